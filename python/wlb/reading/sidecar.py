"""Keeps facts about a memory-mapped array, such as lengths, in a file beside it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wlb._warned import warn

FORMAT: Final = "wlb.lengths"
VERSION: Final = 1
_BLOCKS, _BLOCK = 256, 1024  # samples: number of blocks, elements of each
_WAIT = 120.0  # seconds at most for another process of this machine
_SLOW = 1.0  # seconds: if a longer search cannot be saved, it warns

Facts = dict[str, Any]


class Sidecar:
    """`lengths.npy.wlb.json`, beside `lengths.npy`: facts about arrays that map it.

    **What is trusted.** The facts are used if the file has the same size and modification time (in nanoseconds) as
    then, the array is the same part of it, of the same type, and 256 blocks of 1,024 elements, evenly over the array
    with its first and last, have the same hash. So a file that was written again is noticed, also if its time was set
    back, and an array of up to 262,144 elements is compared as a whole. If a few elements of a larger one were changed
    in place and the old modification time restored, that is not noticed.

    It is written to a temporary file that is then renamed, so that no reader sees half of it. A damaged one is
    replaced, with a warning. Delete it to compute the facts again.

    Args:
        path: the mapped file.
        array: mapped from it, contiguous.
        offset: of its first element in the file, in bytes.
        use: meaning of its numbers: one file may be lengths for one reader and costs for another, with different facts.
    """

    def __init__(self, path: Path, array: NDArray[Any], offset: int, use: str = "") -> None:
        self.offset = offset
        self._path = path.with_name(f"{path.name}.wlb.json")
        self._mapped = path
        self._array = array
        self._key = f"{array.dtype.str}[{array.size}]@{offset}{use}"  # of the array among those of the file

    @classmethod
    def of(cls, array: NDArray[Any], use: str = "") -> Sidecar | None:
        """Sidecar of the file behind an array that was memory-mapped by `np.load` or `np.memmap`; else None.

        None if it is in memory, is not contiguous, or is writable: then memory may differ from the file.
        """
        mapped = array
        while isinstance(mapped.base, np.ndarray):
            mapped = mapped.base
        if not isinstance(mapped, np.memmap) or mapped.mode != "r" or mapped.filename is None:
            return None
        if not array.flags.c_contiguous:
            return None
        inside = array.__array_interface__["data"][0] - mapped.__array_interface__["data"][0]
        return cls(Path(mapped.filename), array, mapped.offset + inside, use)

    @property
    def place(self) -> tuple[str, str, int, tuple[int, ...]]:
        """File, type, offset in bytes and shape of the array, to map it again in another process."""
        return str(self._mapped), self._array.dtype.str, self.offset, self._array.shape

    def facts(self, find: Callable[[], Facts]) -> Facts:
        """Facts of the sidecar; if there are none, those that `find` returns, which are then written.

        If several processes of one machine ask at the same time, one finds them and the others wait, unless nothing can
        be written to that folder.
        """
        kept = self._read()
        if kept is not None:
            return kept
        with self._alone():
            kept = self._read()
            if kept is not None:
                return kept
            before, started = self._stamp(), time.perf_counter()
            facts = find()
            if before is not None and self._stamp() == before:  # the file did not change meanwhile
                self._write(before, facts, seconds=time.perf_counter() - started)
            return facts

    def _stamp(self) -> Facts | None:
        """Size, time and identity of the file, which show changes; None if it does not exist."""
        try:
            found = self._mapped.stat()
        except OSError:
            return None
        return {"format": FORMAT, "version": VERSION, "size": found.st_size, "mtime_ns": found.st_mtime_ns}

    def _samples(self) -> str:
        """A hash of some blocks of the array."""
        starts = np.linspace(0, max(self._array.size - _BLOCK, 0), _BLOCKS).astype(np.int64)
        if self._array.size <= _BLOCKS * _BLOCK:
            starts = np.arange(0, self._array.size, _BLOCK)
        digest = hashlib.blake2b(digest_size=16)
        for start in starts.tolist():
            digest.update(self._array[start : start + _BLOCK].data)
        return digest.hexdigest()

    def _content(self) -> dict[str, Any] | None:
        """The parts of the file that are still valid; None if there are none."""
        try:
            text = self._path.read_text()
        except (OSError, UnicodeDecodeError) as problem:
            if isinstance(problem, OSError):
                return None
            text = ""
        try:
            content = json.loads(text)
            sound = content.pop("digest") == _digest(content)
        except (ValueError, KeyError, TypeError, AttributeError):
            sound = False
        if not sound:
            warn(f"{self._path} is damaged: the lengths are read again, and it is replaced")
            return None
        stamp = self._stamp()
        same = stamp is not None and stamp.items() <= content.items()
        return content if same else None

    def _read(self) -> Facts | None:
        content = self._content()
        kept = content and content["arrays"].get(self._key)
        if not kept or kept.pop("samples") != self._samples():
            return None
        facts: Facts = kept
        return facts

    def _write(self, stamp: Facts, facts: Facts, *, seconds: float) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warning about damage was given
            others = (self._content() or {"arrays": {}})["arrays"]
        content = {**stamp, "arrays": {**others, self._key: {**facts, "samples": self._samples()}}}
        temporary = self._path.with_name(f"{self._path.name}.{secrets.token_hex(8)}")
        try:
            with temporary.open("x") as file:
                json.dump({**content, "digest": _digest(content)}, file)
            temporary.replace(self._path)
        except OSError as problem:
            if seconds > _SLOW:
                message = f"reading all lengths took {seconds:.1f} s and will again: cannot keep the result, {problem}"
                warn(message)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Admits one process of this machine at a time, if results can be kept; others wait at most two minutes."""
        try:
            import fcntl

            file = self._mapped.open("rb")
        except (ImportError, OSError):
            yield
            return
        with file:  # closing it, or the end of the process, lets the next one in
            until = time.monotonic() + (_WAIT if os.access(self._path.parent, os.W_OK) else 0.0)
            while time.monotonic() < until:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    time.sleep(0.02)
                except OSError:  # a file system without locks
                    break
            yield


def _digest(content: Facts) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
