"""Sources of documents: a length for each document, and an id by which to find it.

| source | a document is | its id |
| --- | --- | --- |
| nothing | a Python file of the interpreter or of an installed package | its rank among them, by path |
| a directory of data files | a row of one of them | its row, all files one after the other by path |
| a directory of other files | a file in it; hidden ones and `__pycache__` are passed over | its rank, by path |
| `*.parquet`, `*.arrow`, `*.feather` | a row | the row, from 0 |
| `*.jsonl`, `*.json`, `*.csv`, `*.tsv`, `*.txt` | an object, a row or a line | the row, from 0 |
| `*.npy`, `*.npz` | a length in tokens, or a row of token ids | its index |
| `*.idx`, `*.bin` | a document of Megatron's indexed data set; its tokens are not read | its index |
| `*.tar` | a sample of a WebDataset | its place |
| a folder of `save_to_disk`, a name on the hub | a row of the data set | the row, from 0 |
| `-` | a line of standard input, of text or JSON | the line, from 0 |

Several sources follow one another. Empty documents (a blank line, an empty file) are left out, and the others keep
their ids. Without a tokenizer a length is in bytes of UTF-8.
"""

from __future__ import annotations

import functools
import glob
import itertools
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from wlb.reading.row_kinds import Reading
from wlb_tools.command.errors import CliError, first_line
from wlb_tools.command.inputs.cells import Holds, Wanted, has_text, row_lengths, table_lengths
from wlb_tools.command.inputs.formats import check_encoding, endings, indexed, is_index, reader_of
from wlb_tools.command.inputs.lengths_cache import LengthsCache
from wlb_tools.command.inputs.tokenizers import load_tokenizer
from wlb_tools.command.words import readable

_CHUNK = 1024  # files measured at a time
_ROWS = 16384  # rows of a data set that are measured at a time

# Files beside data that are no data.
_BESIDE = (
    "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json", "README*", "LICENSE*",
    "*.md", "*.lock", "*.crc", "_SUCCESS", "_metadata", "_common_metadata", "*.yaml", "*.yml", "*.ids.npy",
    "*.documents.txt", "tokenizer*.json", "special_tokens_map.json", "*.metadata.json", "*.sha256", "*.md5",
)  # fmt: skip


def wanted(
    field: str = "", tokenizer: str | Path | None = None, holds: Holds | None = None, trainer: str | None = None
) -> Wanted:
    """The fields to read from each row, the tokenizer that counts them, and the trainer whose rule they follow.

    Raises:
        CliError: the tokenizer does not load.
    """
    made = None if tokenizer is None else load_tokenizer(str(tokenizer))
    return Wanted(field=field, holds=holds, tokenizer=made, trainer=trainer)


@dataclass(frozen=True)
class Documents:
    """The distinct documents of a source, none of them empty."""

    source: str  # its name, for reports
    unit: str  # what a length counts: "bytes" or "tokens"
    ids: NDArray[np.int64]  # [documents]
    lengths: NDArray[np.int64]  # [documents] >= 1
    names: tuple[str, ...] | None = None  # for a directory: the path of document id i is names[i]
    empty: int = 0  # documents left out
    files: int = 1  # files read
    notes: tuple[str, ...] = ()  # sentences about what was read

    @property
    def tokens(self) -> int:
        """The sum of the lengths."""
        return int(self.lengths.sum())

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        """Numbers, as plain JSON values; lengths in `unit`."""
        return {
            "source": self.source,
            "unit": self.unit,
            "distinct": self.lengths.size,
            "empty": self.empty,
            "tokens": self.tokens,
            "mean": float(self.lengths.mean()),
            "median": float(np.median(self.lengths)),
            "p99": float(np.quantile(self.lengths, 0.99)),
            "longest": int(self.lengths.max()),
            "notes": [*self.notes],
        }

    def in_words(self) -> str:
        """Sentences about the documents, and about what was read."""
        d = self.described
        return (
            f"{d['source']}: {d['distinct']:,} documents, {d['tokens']:,} {d['unit']}"
            f" (median {d['median']:,.0f}, p99 {d['p99']:,.0f}, longest {d['longest']:,})."
            f"{' A byte counts as a token.' if d['unit'] == 'bytes' else ''}"
            f"{''.join(f' {note}' for note in self.notes)}"
        )


def read_documents(
    sources: Sequence[str], *, wanted: Wanted, pattern: str | None, cache: LengthsCache | None, progress: Progress
) -> Documents:
    """Finds the documents of all sources and measures them.

    Args:
        sources: files, folders, patterns of these, names of data sets on the hub, `-`; none: this interpreter's files.
        wanted: what to read of each row.
        pattern: names of the files to take from a directory, each of them a document; None: the kind of files decides.
        cache: lengths of files that were measured before.
        progress: shows progress.

    Raises:
        CliError: naming the file, and the row and column if there are some.
    """
    if not sources:
        found = _walk(_python_roots(), "*.py", progress)
        lengths = _files(found, wanted, progress, check=False)
        return _documents("Python sources of this interpreter and its packages", [lengths], wanted, len(found))
    parts: list[NDArray[np.int64]] = []
    names: list[str] = []
    named = True
    files = 0
    of_tokens: list[bool] = []
    for source in itertools.chain.from_iterable(_expanded(each) for each in sources):
        for part in _source(source, wanted, pattern, cache, progress):
            parts.append(part.lengths)
            files += part.files
            of_tokens.append(part.tokens)
            if part.names is None:
                named = False
            else:
                names += part.names
    if wanted.measure is not None and all(of_tokens):
        message = "--tokenizer has nothing to read: there are lengths or token ids, and no text"
        raise CliError(f"{', '.join(sources)}: {message}")
    if len({*of_tokens}) > 1 and wanted.measure is None:
        message = "some hold text, whose bytes would be counted, and some tokens: give --tokenizer, or one kind alone"
        raise CliError(f"{', '.join(sources)}: {message}")
    title = ", ".join(_title(source) for source in sources[:3]) + (
        f" and {len(sources) - 3} more" if sources[3:] else ""
    )
    of_names = tuple(names) if named and names else None
    return _documents(title, parts, wanted, files, of_names, tokens=all(of_tokens))


def _title(source: str) -> str:
    return "standard input" if source == "-" else readable(Path(source).resolve().name)


def _documents(
    title: str,
    parts: Sequence[NDArray[np.int64]],
    wanted: Wanted,
    files: int,
    names: tuple[str, ...] | None = None,
    *,
    tokens: bool = False,
) -> Documents:
    lengths = np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
    ids = np.flatnonzero(lengths)
    if not ids.size:
        raise CliError(f"{title}: no documents, or only empty ones")
    unit = "tokens" if tokens or wanted.measure is not None else "bytes"
    return Documents(
        title, unit, ids, lengths[ids], names, empty=lengths.size - ids.size, files=files, notes=tuple(wanted.notes)
    )


@dataclass(frozen=True)
class _Part:
    lengths: NDArray[np.int64]
    tokens: bool  # whether lengths count tokens, whatever the tokenizer
    files: int = 1
    names: tuple[str, ...] | None = None


def _expanded(source: str) -> list[str]:
    """The paths that a pattern matches; a source that is no pattern, unchanged."""
    if Path(source).exists() or not any(each in source for each in "*?["):
        return [source]
    found = sorted(glob.glob(source, recursive=True))
    if not found:
        raise CliError(f"{source}: no file matches")
    return found


def _source(
    source: str, wanted: Wanted, pattern: str | None, cache: LengthsCache | None, progress: Progress
) -> Iterator[_Part]:
    path = Path(source)
    if source == "-":
        yield _standard_input(wanted, progress)
    elif path.is_dir():
        yield from _folder(path, wanted, pattern, cache, progress)
    elif path.is_file() or (not path.exists() and is_index(path)):
        yield _file(path, wanted, cache, progress)
    elif path.exists():
        raise CliError(f"{source}: is neither a file nor a directory")
    else:
        yield _from_hub(source, wanted, progress)


def _file(path: Path, wanted: Wanted, cache: LengthsCache | None, progress: Progress) -> _Part:
    reader = indexed if is_index(path) else reader_of(path)
    if reader is None:
        raise CliError(f"{path}: its name does not say what it holds; read are {endings()}, and folders of these")
    cached = cache.find(path, wanted) if cache is not None else None
    if cached is not None:
        lengths, notes = cached
        wanted.notes.update(dict.fromkeys(notes))
        return _Part(lengths, tokens=False)
    own = wanted.fresh()
    total = path.stat().st_size if path.is_file() else None
    task = progress.add_task(f"Reading {path.name}", total=total)
    parts: list[NDArray[np.int64]] = []
    done = 0
    try:
        for rows, size in reader(path, own):
            parts.append(rows)
            done += size
            progress.update(task, completed=min(done, total) if total else done)
    except ModuleNotFoundError as missing:
        if missing.name != "pyarrow":
            raise
        raise CliError(f"{path}: is read by the package pyarrow; run: pip install pyarrow") from None
    progress.update(task, completed=total)
    lengths = np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
    tokens = "text" not in own.saw
    if cache is not None and not tokens and wanted.measure is not None:
        cache.keep(path, wanted, lengths, [*own.notes])
    wanted.notes.update(own.notes)
    return _Part(lengths, tokens)


def _standard_input(wanted: Wanted, progress: Progress) -> _Part:
    """Lines of text or of JSON objects, compressed or not; read into a file first."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "standard input")
        with raw.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        with raw.open("rb") as file:
            start = file.read(4)
        ending = ".gz" if start.startswith(b"\x1f\x8b") else ".zst" if start == b"\x28\xb5\x2f\xfd" else ""
        if ending:
            import pyarrow as pa

            kind = {".gz": "gzip", ".zst": "zstd"}[ending]
            try:
                with pa.input_stream(str(raw), compression=kind) as stream:
                    start = stream.read(4096)
            except OSError as cause:
                raise CliError(f"standard input: cannot be read: {cause}") from None
        named = raw.rename(Path(folder, f"standard input{'.jsonl' if start.lstrip()[:1] == b'{' else '.txt'}{ending}"))
        try:
            part = _file(named, wanted, None, progress)
        except CliError as problem:
            raise CliError(str(problem).replace(str(named), "standard input")) from None
    return part


def _from_hub(name: str, wanted: Wanted, progress: Progress) -> _Part:
    """A data set by its name on the hub, OWNER/NAME: its training split."""
    if name.count("/") != 1 or Path(name).suffix or name.startswith((".", "/", "~")):
        raise CliError(f"{name}: no such file or directory")
    try:
        import datasets
    except ImportError:
        message = "no such file or directory; for a data set on the hub: pip install datasets"
        raise CliError(f"{name}: {message}") from None
    try:
        found = datasets.load_dataset(name, split="train")
    except Exception as cause:  # of many types: no network, unknown name, several configurations
        raise CliError(
            f"{name}: no such file or directory, nor a data set that could be had: {first_line(cause)}"
        ) from None
    return _of_dataset(found, Path(name), wanted, progress)


def _of_dataset(found: Any, path: Path, wanted: Wanted, progress: Progress) -> _Part:
    own = wanted.fresh()
    schema = found.features.arrow_schema
    reading = own.reading(found.column_names, str(path))
    own.unread([name for name in reading.unread(found.column_names) if has_text(schema.field(name).type)])
    table = found.select_columns([*reading.names]).with_format("arrow")
    task = progress.add_task(f"Reading {path.name}", total=len(found))
    parts = []
    for row, batch in enumerate(table.iter(batch_size=_ROWS)):
        parts.append(table_lengths(batch, reading, own, path, row * _ROWS))
        progress.update(task, advance=batch.num_rows)
    wanted.notes.update(own.notes)
    return _Part(np.concatenate([*parts, np.zeros(0, dtype=np.int64)]), "text" not in own.saw)


# Folders.


def _folder(
    path: Path, wanted: Wanted, pattern: str | None, cache: LengthsCache | None, progress: Progress
) -> Iterator[_Part]:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(each.name for each in path.iterdir() if (each / "state.json").is_file())
        raise CliError(
            f"{path}: has several splits: give one of them, as {path / splits[0] if splits else path / 'train'}"
        )
    if (path / "state.json").is_file() and (path / "dataset_info.json").is_file():
        yield _saved(path, wanted, progress)
        return
    found = _walk([path], pattern or "*", progress)
    data = [each for each in found if not _is_beside(each) and (reader_of(each) or is_index(each))]
    data = [each for each in data if each.suffix != ".bin" or not each.with_suffix(".idx").is_file()]
    lines = [each for each in data if each.suffixes[-1:] == [".txt"]]
    tables = [each for each in data if each not in lines]
    others = [each for each in found if each not in data and not _is_beside(each) and each.suffix != ".bin"]
    if pattern is None and tables and (others or lines):
        message = (
            f"has data files, as {tables[0].name}, beside other files, as {(others or lines)[0].name}: --pattern"
            f" '*{tables[0].suffix}' for the rows of the first, --pattern '*' if each file is a document"
        )
        raise CliError(f"{path}: {message}")
    if tables and (pattern is None or not (others or lines)):
        kinds = {
            "".join(each.suffixes[-2:]) if each.suffixes[-1] in (".gz", ".zst") else each.suffix for each in tables
        }
        if len(kinds) > 1:
            raise CliError(
                f"{path}: has data files of several kinds, {', '.join(sorted(kinds))}: --pattern '*{min(kinds)}'"
            )
        for each in tables:
            yield _file(each, wanted, cache, progress)
        return
    documents = [each for each in found if pattern is not None or not _is_beside(each) or each.suffix == ".md"]
    if not documents:
        raise CliError(f"{path}: no documents, or only empty ones")
    names = tuple(each.relative_to(path).as_posix() for each in documents)
    lengths = _files(documents, wanted, progress, check=True)
    yield _Part(lengths, tokens=False, files=len(documents), names=names)


def _is_beside(path: Path) -> bool:
    return any(fnmatch(path.name, each) for each in _BESIDE)


def _saved(path: Path, wanted: Wanted, progress: Progress) -> _Part:
    """Documents of a folder that `Dataset.save_to_disk` wrote."""
    try:
        import datasets
    except ImportError:
        raise CliError(f"{path}: is a folder of save_to_disk, which datasets reads: pip install datasets") from None
    try:
        return _of_dataset(datasets.load_from_disk(str(path)), path, wanted, progress)
    except CliError:
        raise
    except Exception as cause:  # Arrow and datasets may raise anything for a damaged folder
        raise CliError(f"{path}: is no whole data set of save_to_disk: {first_line(cause)}") from None


def _python_roots() -> list[Path]:
    """The interpreter's library and the folders of installed packages, none inside another."""
    paths = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(path for path in paths if path.is_dir() and paths.isdisjoint(path.parents))


def _walk(roots: Iterable[Path], pattern: str, progress: Progress) -> list[Path]:
    """The regular files below `roots` whose name matches `pattern`, ordered by their paths alone.

    Links to folders are followed, and each folder is read once.
    """
    found: list[Path] = []
    seen: set[str] = set()
    task = progress.add_task("Looking for files", total=None)
    for root in roots:
        for folder, subfolders, files in os.walk(root, followlinks=True):
            real = os.path.realpath(folder)
            if real in seen:
                subfolders.clear()
                continue
            seen.add(real)
            subfolders[:] = sorted(s for s in subfolders if not s.startswith(".") and s != "__pycache__")
            names = (name for name in sorted(files) if not name.startswith(".") and fnmatch(name, pattern))
            found += (path for name in names if (path := Path(folder, name)).is_file())
            progress.update(task, completed=len(found))
    progress.update(task, total=len(found))
    return found


def _files(paths: Sequence[Path], wanted: Wanted, progress: Progress, *, check: bool) -> NDArray[np.int64]:
    """int64[n]: each file a document."""
    task = progress.add_task("Reading files" if wanted.measure is None else "Tokenizing files", total=len(paths))
    parts: list[NDArray[np.int64]] = []
    for start in range(0, len(paths), _CHUNK):
        some = paths[start : start + _CHUNK]
        if check:
            for path in some:
                with path.open("rb") as file:
                    check_encoding(file.read(4096), str(path))
        if wanted.measure is None:
            parts.append(np.array([path.stat().st_size for path in some], dtype=np.int64))
        else:
            rows = [{"text": path.read_text(encoding="utf-8", errors="replace")} for path in some]
            parts.append(row_lengths(rows, Reading("text", {"text": "text"}), wanted, lambda row: str(paths[row])))
        progress.update(task, advance=len(some))
    wanted.saw.add("text")
    return np.concatenate([*parts, np.zeros(0, dtype=np.int64)])
