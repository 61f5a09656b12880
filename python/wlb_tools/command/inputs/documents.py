"""Where documents come from: one length per document, and an id that leads back to it.

| source | a document is | its id |
| --- | --- | --- |
| nothing | a Python file of the interpreter or of an installed package | its rank among them, by path |
| a directory | a file in it; hidden ones and `__pycache__` are passed over | its rank among them, by path |
| `*.jsonl` | a line: an object with a text field | the line, from 0 |
| `*.txt` | a line | the line, from 0 |
| `*.npy` | an integer: a length in tokens | its index |
| `*.idx` | what Megatron's indexed data set calls one; its `.bin` stays closed | its index |

Empty documents (a blank line, an empty file) are left out, and the others keep their id. Without a tokenizer
a length is in bytes of UTF-8, and the files of a directory are not even opened.
"""

import functools
import itertools
import json
import os
import struct
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import wlb
from wlb._core import MAX_TOKENS
from wlb_tools.command.errors import CliError
from wlb_tools.command.words import readable

_CHUNK = 64  # texts measured at a time: enough for a tokenizer's threads, few enough for a smooth bar

Measure = Callable[[list[str]], list[int]]


@dataclass(frozen=True)
class Documents:
    """The distinct documents of a source, none of them empty."""

    source: str  # its name, for reports
    unit: str  # what a length counts: "bytes" or "tokens"
    ids: NDArray[np.int64]  # [documents]
    lengths: NDArray[np.int64]  # [documents] >= 1
    names: tuple[str, ...] | None = None  # of a directory: the path of document id i is names[i]
    empty: int = 0  # documents left out

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
        }

    def in_words(self) -> str:
        """A sentence or two about the documents."""
        d = self.described
        return (
            f"{d['source']}: {d['distinct']:,} documents, {d['tokens']:,} {d['unit']}"
            f" (median {d['median']:,.0f}, p99 {d['p99']:,.0f}, longest {d['longest']:,})."
            f"{' A byte counts as a token.' if d['unit'] == 'bytes' else ''}"
        )


def read_documents(
    source: Path | None, *, field: str, pattern: str, tokenizer: Path | None, progress: Progress
) -> Documents:
    """Finds the documents of `source` and measures them.

    `field` is the text field of a `.jsonl`, `pattern` the file names taken from a directory.
    """
    if source is not None and not source.exists():
        raise CliError(f"{source}: no such file or directory")
    if source is not None and source.suffix in _LENGTHS:
        if tokenizer is not None:
            raise CliError(f"{source}: holds lengths, so --tokenizer has nothing to read")
        return _LENGTHS[source.suffix](source)

    measure = _bytes if tokenizer is None else _load_tokenizer(tokenizer)
    names: tuple[str, ...] | None = None
    title = "Python sources of this interpreter and its packages"
    if source is not None:
        title = readable(source.resolve().name)
    if source is None or source.is_dir():
        found = _walk(_python_roots(), "*.py", progress) if source is None else _walk([source], pattern, progress)
        if source is not None:
            names = tuple(path.relative_to(source).as_posix() for path in found)
        if tokenizer is None:
            lengths = [path.stat().st_size for path in found]
        else:
            lengths = _measure("Tokenizing files", _file_texts(found), len(found), measure, progress)
    elif source.suffix in (".jsonl", ".txt"):
        texts = _json_texts(source, field) if source.suffix == ".jsonl" else _line_texts(source)
        lengths = _measure(f"Reading {source.name}", texts, source.stat().st_size, measure, progress)
    else:
        raise CliError(
            f"{source}: give a directory, a .jsonl or .txt of documents, a .npy of lengths or an .idx of Megatron's"
        )

    measured = np.array(lengths, dtype=np.int64)
    ids = np.flatnonzero(measured)
    if not ids.size:
        raise CliError(f"{title}: no documents, or only empty ones")
    unit = "bytes" if tokenizer is None else "tokens"
    return Documents(title, unit, ids, measured[ids], names, empty=measured.size - ids.size)


def load_numbers(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """Reads a .npy file; `mapped` leaves the numbers in the file until they are used.

    Raises:
        CliError: There is no such file, or it is none.
    """
    if not path.is_file():
        raise CliError(f"{path}: no such file")
    try:
        loaded = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except Exception as error:  # of a broken header's parser, or of more memory than there is
        raise CliError(f"{path}: is no array of numpy: {error}") from None
    if not isinstance(loaded, np.ndarray):
        raise CliError(f"{path}: holds several arrays; give a .npy with one")
    return loaded


def _read_lengths(path: Path) -> Documents:
    lengths = load_numbers(path)
    try:
        wlb.split_documents(lengths, max_document_tokens=MAX_TOKENS)
    except wlb.WlbError as error:
        raise CliError(f"{path}: {error}") from None
    if not lengths.size:
        raise CliError(f"{path}: no lengths in it")
    return Documents(readable(path.name), "tokens", np.arange(lengths.size), lengths.astype(np.int64))


def _read_index(path: Path) -> Documents:
    """Documents of Megatron's indexed data set: a sequence each, or several that follow one another.

    After the header (magic, version, code of the dtype, number of sequences, of bounds between documents) come
    int32[sequences] lengths, int64[sequences] places in the `.bin`, and int64[documents + 1] bounds in sequences.
    """
    header = struct.Struct("<9sQBQQ")
    with path.open("rb") as file:
        start = file.read(header.size)
        if not start.startswith(_INDEX) or len(start) < header.size:
            raise CliError(f"{path}: is no index of a data set of Megatron's")
        _, _, _, sequences, bounds = header.unpack(start)
        whole, there = header.size + 12 * sequences + 8 * bounds, path.stat().st_size
        if there < whole:
            raise CliError(f"{path}: is cut off: {there:,} bytes of {whole:,}")
        sizes = np.fromfile(file, np.dtype("<i4"), sequences)
        file.seek(8 * sequences, os.SEEK_CUR)
        ends = np.fromfile(file, np.dtype("<i8"), bounds)
    if (sizes < 0).any() or (np.diff(ends, prepend=0) < 0).any() or (ends > sequences).any():
        raise CliError(f"{path}: is damaged: lengths below 0, or documents that end before they begin")
    lengths = np.diff(np.concatenate([[0], sizes.cumsum(dtype=np.int64)])[ends])
    ids = np.flatnonzero(lengths)
    if not ids.size:
        raise CliError(f"{path}: no documents, or only empty ones")
    return Documents(readable(path.name), "tokens", ids, lengths[ids], empty=lengths.size - ids.size)


_INDEX = b"MMIDIDX\x00\x00"
_LENGTHS: dict[str, Callable[[Path], Documents]] = {".npy": _read_lengths, ".idx": _read_index}
"""What reads lengths from a file that has them, by its ending."""


def _python_roots() -> list[Path]:
    """The interpreter's library and the folders of installed packages, none inside another."""
    paths = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return sorted(path for path in paths if path.is_dir() and paths.isdisjoint(path.parents))


def _walk(roots: Iterable[Path], pattern: str, progress: Progress) -> list[Path]:
    """The regular files below `roots` whose name matches `pattern`, ordered by their paths alone."""
    found: list[Path] = []
    task = progress.add_task("Looking for files", total=None)
    for root in roots:
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = sorted(s for s in subfolders if not s.startswith(".") and s != "__pycache__")
            names = (name for name in sorted(files) if not name.startswith(".") and fnmatch(name, pattern))
            found += (path for name in names if (path := Path(folder, name)).is_file())
            progress.update(task, completed=len(found))
    progress.update(task, total=len(found))
    return found


def _measure(
    title: str, texts: Iterable[tuple[str, int]], total: int, measure: Measure, progress: Progress
) -> list[int]:
    """Lengths of `texts`, each of which comes with its share of `total`, for the bar."""
    lengths: list[int] = []
    task = progress.add_task(title, total=total)
    texts = iter(texts)
    while chunk := list(itertools.islice(texts, _CHUNK)):
        lengths += measure([text for text, _ in chunk])
        progress.update(task, advance=sum(size for _, size in chunk))
    return lengths


def _file_texts(paths: Iterable[Path]) -> Iterator[tuple[str, int]]:
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="replace"), 1


def _json_texts(path: Path, field: str) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                yield "", len(line)
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CliError(f"{path}:{number}: not JSON: {error}") from None
            text = record.get(field) if isinstance(record, dict) else None
            if not isinstance(text, str):
                fields = ", ".join(record) if isinstance(record, dict) else "none, it is not an object"
                raise CliError(f"{path}:{number}: no text in field {field!r} (--field); its fields: {fields}")
            yield text, len(line)


def _line_texts(path: Path) -> Iterator[tuple[str, int]]:
    with path.open("rb") as file:
        for line in file:
            yield line.strip().decode("utf-8", "replace"), len(line)


def _bytes(texts: list[str]) -> list[int]:
    # JSON may hold half a surrogate pair, which UTF-8 proper cannot write.
    return [len(text.encode("utf-8", "surrogatepass")) for text in texts]


def _load_tokenizer(path: Path) -> Measure:
    """A measure by a Hugging Face `tokenizer.json`; special tokens are the trainer's business."""
    if not path.is_file():
        raise CliError(f"{path}: no such tokenizer file")
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise CliError('--tokenizer needs the package tokenizers; run: pip install "wlb[tokenizers]"') from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise CliError(f"{path}: not a tokenizer file: {error}") from None

    def measure(texts: list[str]) -> list[int]:
        clean = [text.encode("utf-8", "replace").decode() for text in texts]
        return [len(encoding.ids) for encoding in tokenizer.encode_batch(clean, add_special_tokens=False)]

    return measure
