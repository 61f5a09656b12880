"""Checkpoints that are verified before they are loaded: the newest that is whole is taken.

A run's folder:

    step-00000020/           what torch.distributed.checkpoint writes, and a MANIFEST with the checksum of every file
    step-00000030/
    step-00000040.partial/   was being written, or removed, when the run was killed: never counts
    step-00000050.damaged/   did not verify and was set aside, to be looked at and deleted

A checkpoint gets its name when its last byte is on the disk: a run that is killed, or whose disk is full, leaves the
ones before as they were. All ranks must see the same folder, as torch.distributed.checkpoint wants it. Each computes
the checksums of some files and gets to know all of them, so that all ranks take the same checkpoint.

    python -m studies.trainer.checkpoints run      # verifies all checkpoints of a run
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from cyclopts import Parameter, run

MANIFEST = "MANIFEST"
BLOCK = 1 << 20  # bytes of a file that are read at once

T = TypeVar("T")


def save(folder: Path, done: int, state: dict[str, Any], *, keep: int) -> None:
    """Writes the checkpoint of step `done`, then removes all but the newest `keep`. All ranks call it.

    If it fails, it raises on every rank, and the checkpoints before are as they were.
    """
    whole = folder / f"step-{done:08d}"
    partial = whole.with_suffix(".partial")
    on_first_rank(lambda: remove(folder.glob("step-*.partial")))
    dcp.save(state, checkpoint_id=partial)
    names = on_first_rank(lambda: sorted(path.name for path in partial.iterdir()))
    entries, problems = checksums(partial, names)
    if problems:
        raise OSError(f"{partial}: {sentence(problems)}")
    on_first_rank(lambda: complete(partial, whole, manifest(entries)))
    on_first_rank(lambda: remove(checkpoints(folder)[:-keep]))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole, None where there is none yet. All ranks call it and get the same one.

    Newer ones that are damaged are named with what is wrong, and set aside.

    Raises:
        SystemExit: there are checkpoints and all are damaged. Whether to begin anew is for a person to decide.
    """
    damaged: dict[Path, str] = {}
    for checkpoint in reversed(on_first_rank(lambda: checkpoints(folder))):
        problems = verify(checkpoint)
        if not problems:
            on_first_rank(lambda: set_aside(damaged))
            return checkpoint
        damaged[checkpoint] = sentence(problems)
        if dist.get_rank() == 0:
            print(f"{checkpoint} is damaged and not loaded: {damaged[checkpoint]}", file=sys.stderr, flush=True)
    if damaged:
        listed = "; ".join(f"{checkpoint.name}: {problem}" for checkpoint, problem in damaged.items())
        raise SystemExit(
            f"every checkpoint in {folder} is damaged ({listed}): restore one from a copy, or begin anew elsewhere"
        )
    return None


def verify(checkpoint: Path) -> dict[str, str]:
    """What is wrong with each damaged file of a checkpoint; the same on every rank. Reads all files once.

    A flipped bit is seen in any file. For the manifest itself: it is written anew from what was read, and compared.
    """
    text = on_first_rank(lambda: read_manifest(checkpoint))
    if text is None:
        return {MANIFEST: "is missing"}
    expected = {line[ENTRY:]: line[:ENTRY] for line in text.split("\n")[1:-1]}
    entries, problems = checksums(checkpoint, sorted(expected))
    for name, entry in entries.items():
        if entry != expected[name]:
            problems[name] = "does not have its checksum"
    if not problems and manifest(entries) != text:
        problems[MANIFEST] = "is damaged"
    return problems


# --- checksums -------------------------------------------------------------------------------------------------------

ENTRY = len("2656ae7a   1099511627776 ")  # what stands before the name of a file in the manifest


def checksums(folder: Path, names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """CRC-32 and size of each file as the manifest has them, and what is wrong with those that cannot be read.

    CRC-32 sees every single flipped bit and every burst of 32, as in a zip file; it is several times faster than a
    cryptographic hash, which is for files that somebody changes on purpose.
    """
    mine = {name: checksum(folder / name) for name in names[dist.get_rank() :: dist.get_world_size()]}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    entries, problems = {}, {}
    for theirs in everyone:
        for name, (entry, problem) in theirs.items():
            if problem is None:
                entries[name] = entry
            else:
                problems[name] = problem
    return entries, problems


def checksum(path: Path) -> tuple[str, str | None]:
    """The beginning of a file's line in the manifest, or why there is none."""
    crc, size, block = 0, 0, memoryview(bytearray(BLOCK))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(block):
                crc = zlib.crc32(block[:count], crc)
                size += count
    except FileNotFoundError:
        return "", "is missing"
    except (OSError, ValueError) as problem:  # ValueError: a damaged manifest may hold impossible names
        return "", f"cannot be read: {problem}"
    return f"{crc:08x} {size:15} ", None


def manifest(entries: dict[str, str]) -> str:
    """A line for each file, of fixed columns, so that a damaged manifest can still be split into lines and names."""
    lines = [f"CRC-32, bytes and name of {len(entries)} files\n"]
    return "".join(lines + [f"{entries[name]}{name}\n" for name in sorted(entries)])


def read_manifest(checkpoint: Path) -> str | None:
    """Every byte as one character, whatever became of them; None if there is no manifest."""
    try:
        return (checkpoint / MANIFEST).read_bytes().decode("latin-1")
    except OSError:
        return None


def sentence(problems: dict[str, str]) -> str:
    """What a person reads: the first few."""
    first = [f"{name} {problem}" for name, problem in sorted(problems.items())[:3]]
    return ", ".join(first) + (f" and {len(problems) - 3} files more" if len(problems) > 3 else "")


# --- files and names; on the first rank alone ------------------------------------------------------------------------


def on_first_rank(work: Callable[[], T]) -> T:
    """What `work` gives there, or raises there, on every rank."""
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = work()
        except OSError as problem:
            outcome[1] = problem
    dist.broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def checkpoints(folder: Path) -> list[Path]:
    """Those that were written to their end, by step."""
    found = [path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def complete(partial: Path, whole: Path, text: str) -> None:
    """Writes the manifest; then, with everything on the disk, the checkpoint gets its name at once."""
    with (partial / MANIFEST).open("w", encoding="latin-1", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    to_disk(partial)
    partial.rename(whole)
    to_disk(whole.parent)


def to_disk(folder: Path) -> None:
    """The names in a folder, as `os.fsync` does the content of a file."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove(folders: Iterable[Path]) -> None:
    """A checkpoint that is removed in part must not count as one: it loses its name first."""
    for folder in folders:
        partial = folder.with_suffix(".partial")
        folder.rename(partial)
        shutil.rmtree(partial)


def set_aside(damaged: Iterable[Path]) -> None:
    """They are neither verified again nor counted among those that are kept."""
    for checkpoint in damaged:
        aside = checkpoint.with_suffix(".damaged")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)


def main(folder: Annotated[Path, Parameter(help="The --checkpoint-dir of a run.")]) -> None:
    """Verifies all checkpoints of a run; ends with an error if one is damaged."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = checkpoints(folder)
    sound = True
    for checkpoint in found:
        problems = verify(checkpoint)
        sound = sound and not problems
        print(f"{checkpoint}: {sentence(problems) or 'sound'}")
    dist.destroy_process_group()
    if not found or not sound:
        raise SystemExit(f"{folder}: no checkpoints" if not found else 1)


if __name__ == "__main__":
    run(main)
