"""Formats of files with documents, read by pyarrow, numpy and the standard library: a length for each row.

Arrow decompresses (gzip, Zstandard). If a file is cut off, has another encoding or a row that is not like the others,
it is refused with its name and row.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import json
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.cells import LENGTHS, Wanted, checked_lengths, measured, object_lengths, table_lengths

Lengths = NDArray[np.int64]
Reader = Callable[[Path, Wanted], Iterator[tuple[Lengths, int]]]
"""Yields the lengths of some rows, and how many bytes of the file they took, until the file ends."""

_ROWS = 4096  # rows of a table, or lines, that are measured at a time
_TEXT = 1 << 22  # characters of lines that are measured at a time
_COMPRESSED = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}


def reader_of(path: Path) -> Reader | None:
    """The reader for a file's ending; None for an unknown ending."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in _COMPRESSED:
        return _READERS.get(suffixes[-2]) if len(suffixes) > 1 and suffixes[-2] in _STREAMED else None
    return _READERS.get(suffixes[-1]) if suffixes else None


def endings() -> str:
    """The supported endings, for messages."""
    return ", ".join([*_READERS, *(f"{ending}.gz/.zst" for ending in sorted(_STREAMED))])


def is_index(path: Path) -> bool:
    """Whether it is a part of a Megatron data set: `NAME.idx`, `NAME.bin`, or NAME beside these."""
    return path.suffix in (".idx", ".bin") or Path(f"{path}.idx").is_file() or Path(f"{path}.bin").is_file()


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The bytes of a file, decompressed."""
    kind = _COMPRESSED.get(path.suffix.lower())
    try:
        with contextlib.ExitStack() as stack:
            if kind == "zstd":
                import pyarrow as pa

                yield stack.enter_context(pa.input_stream(str(path), compression=kind))
            else:
                yield stack.enter_context(gzip.open(path) if kind else path.open("rb"))  # noqa: SIM115
    except (OSError, EOFError, zlib.error) as cause:
        raise CliError(f"{path}: cannot be read: {_said(cause)}") from None


def _said(cause: BaseException) -> str:
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)


# Lines.


def check_encoding(start: bytes, where: str) -> None:
    """Refuses text that is not UTF-8, by its first bytes.

    Raises:
        CliError: it is UTF-16 or UTF-32, or no text at all.
    """
    for mark, name in ((b"\xff\xfe\x00\x00", "UTF-32"), (b"\xff\xfe", "UTF-16"), (b"\xfe\xff", "UTF-16")):
        if start.startswith(mark):
            raise CliError(f"{where}: is {name}, must be UTF-8: iconv -f {name} -t UTF-8 FILE > NEW")
    if b"\x00" in start:
        raise CliError(
            f"{where}: has NUL bytes: no text of UTF-8 (perhaps UTF-16: iconv -f UTF-16 -t UTF-8 FILE > NEW)"
        )


def decoded(line: bytes, where: str) -> str:
    """Text of UTF-8.

    Raises:
        CliError: naming the first wrong byte.
    """
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as cause:
        message = f"byte {cause.start} ({line[cause.start : cause.start + 1].hex()}) is no UTF-8"
        raise CliError(f"{where}: {message}; iconv -f LATIN1 -t UTF-8 FILE > NEW, if it is Latin-1") from None


def _lines(path: Path) -> Iterator[bytes]:
    with _opened(path) as stream:
        rest = b""
        first = True
        while block := stream.read(1 << 20):
            if first:
                check_encoding(block[:4096], str(path))
                block, first = block.removeprefix(b"\xef\xbb\xbf"), False
            lines = (rest + block).split(b"\n")
            rest = lines.pop()
            yield from lines
        if rest:
            yield rest


def _grouped(lines: Iterator[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Lines with their numbers from 1, some at a time."""
    group: list[tuple[int, bytes]] = []
    size = 0
    for number, line in enumerate(lines, start=1):
        group.append((number, line))
        size += len(line)
        if size > _TEXT or len(group) == 16 * _ROWS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _json_lines(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    columns: tuple[str, ...] = ()
    for group in _grouped(_lines(path)):
        lengths = np.zeros(len(group), dtype=np.int64)
        records, places = [], []
        for place, (number, line) in enumerate(group):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except UnicodeDecodeError:
                decoded(line, f"{path}:{number}")
                raise
            except (ValueError, RecursionError) as error:
                raise CliError(f"{path}:{number}: not JSON: {error}") from None
            places.append(place)
        if records and not columns:
            columns = _object_columns(records[0], wanted, f"{path}:{group[places[0]][0]}")
        rows = [group[place][0] for place in places]
        lengths[places] = object_lengths(records, columns, wanted, path, rows)
        yield lengths, sum(len(line) + 1 for _, line in group)


def _object_columns(record: Any, wanted: Wanted, where: str) -> tuple[str, ...]:
    if not isinstance(record, dict):
        raise CliError(f"{where}: is no object with fields, but {type(record).__name__}")
    return wanted.columns([*record], where)


def _json(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """An array of objects, or lines of them."""
    with _opened(path) as stream:
        content = stream.read()
    check_encoding(content[:4096], str(path))
    if not content.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        yield from _json_lines(path, wanted)
        return
    try:
        records = json.loads(decoded(content.removeprefix(b"\xef\xbb\xbf"), str(path)))
    except (ValueError, RecursionError) as error:
        raise CliError(f"{path}: not JSON: {error}") from None
    columns = _object_columns(records[0], wanted, f"{path}: row 0") if records else ()
    for start in range(0, len(records), _ROWS):
        part = records[start : start + _ROWS]
        rows = range(start, start + len(part))
        yield object_lengths(part, columns, wanted, path, rows), len(content) * len(part) // len(records)


def _text_lines(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """One document a line; or numbers, which are lengths or token ids if the caller says so."""
    if wanted.field:
        raise CliError(f"{path}: has lines of text and no columns: leave --field out")
    numbers_so_far = wanted.holds is None
    kept: list[tuple[Lengths, int]] = []
    for group in _grouped(_lines(path)):
        lines = [decoded(line, f"{path}:{number}").strip() for number, line in group]
        taken = sum(len(line) + 1 for _, line in group)
        if wanted.holds in ("lengths", "tokens"):
            yield _numbers(lines, group[0][0], wanted, path), taken
            continue
        numbers_so_far = numbers_so_far and all(not line or line.replace(" ", "").isdecimal() for line in lines)
        kept.append((measured(wanted, lines), taken))
        if not numbers_so_far:
            yield from kept
            kept = []
    if kept and any(lengths.any() for lengths, _ in kept):
        message = "every line is a number: --lengths if these are lengths of documents, --tokens if token ids"
        raise CliError(f"{path}: {message} (a document a line), --text if they are documents")
    yield from kept


def _numbers(lines: list[str], first: int, wanted: Wanted, path: Path) -> Lengths:
    lengths = np.zeros(len(lines), dtype=np.int64)
    for place, line in enumerate(lines):
        parts = line.replace(",", " ").split()
        where = f"{path}:{first + place}"
        if not all(part.isdecimal() for part in parts):
            raise CliError(f"{where}: {line[:40]!r} is no whole number (--{wanted.holds})")
        if wanted.holds == "tokens":
            lengths[place] = len(parts)
        elif len(parts) > 1:
            raise CliError(f"{where}: {len(parts)} numbers in a line: --lengths has one, --tokens several")
        elif parts:
            lengths[place] = checked_lengths([int(parts[0])], where)[0]
    return lengths


# Tables.


def _batches(batches: Iterator[Any], path: Path, wanted: Wanted, names: list[str]) -> Iterator[tuple[Lengths, int]]:
    columns = wanted.columns(names, str(path))
    row = 0
    for batch in batches:
        if batch.num_rows:
            yield table_lengths(batch, columns, wanted, path, row), batch.nbytes
            row += batch.num_rows


def _parquet(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = wanted.columns(names, str(path))
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            row = 0
            for batch in file.iter_batches(batch_size=16 * _ROWS, columns=[*columns]):
                yield table_lengths(batch, columns, wanted, path, row), int(share * batch.num_rows)
                row += batch.num_rows
    except (pa.ArrowException, OSError) as cause:
        raise CliError(f"{path}: is no whole Parquet file: {_said(cause)}") from None


def _arrow(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """Arrow's file format, its stream format, and Feather of version 1."""
    import pyarrow as pa
    from pyarrow import feather, ipc

    try:
        with pa.memory_map(str(path)) as file:
            start = file.read(6)
            file.seek(0)
            if start.startswith(b"ARROW1"):
                opened = ipc.open_file(file)
                batches = (opened.get_batch(index) for index in range(opened.num_record_batches))
                yield from _batches(batches, path, wanted, opened.schema.names)
            elif start.startswith(b"FEA1"):
                table = feather.read_table(path)
                yield from _batches(iter(table.to_batches()), path, wanted, table.schema.names)
            else:
                streamed = ipc.open_stream(file)
                # A stream has an end mark of 8 bytes, which a file that was cut off lacks.
                if path.stat().st_size >= 8:
                    with path.open("rb") as raw:
                        raw.seek(-8, os.SEEK_END)
                        if raw.read() != b"\xff\xff\xff\xff\x00\x00\x00\x00":
                            raise CliError(
                                f"{path}: its stream of Arrow has no end: it was cut off, or is being written"
                            )
                yield from _batches(iter(streamed), path, wanted, streamed.schema.names)
    except (pa.ArrowException, OSError) as cause:
        raise CliError(f"{path}: is no whole Arrow or Feather file: {_said(cause)}") from None


def _csv(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    import pyarrow as pa
    from pyarrow import csv

    names = [suffix.lower() for suffix in path.suffixes]
    parse = csv.ParseOptions(delimiter="\t" if ".tsv" in names else ",", newlines_in_values=True)
    with _opened(path) as stream:
        start = stream.read(1 << 16)
    check_encoding(start[:4096], str(path))
    header = start.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].strip()
    cells = [cell.strip().strip(b'"') for cell in header.split(parse.delimiter.encode())]
    headless = all(cell.isdigit() for cell in cells)
    if headless and (wanted.holds != "lengths" or len(cells) > 1):
        message = "has no header: its first line is of numbers. --lengths if it is one column of lengths"
        raise CliError(f"{path}: {message}; else give it a line of names")
    reading = csv.ReadOptions(use_threads=False, block_size=1 << 24, autogenerate_column_names=headless)
    types = {} if headless else {name: pa.string() for name in _texts_of(cells, wanted, str(path))}
    converting = csv.ConvertOptions(column_types=types, strings_can_be_null=False)
    try:
        with _opened(path) as stream:
            opened = csv.open_csv(stream, reading, parse, converting)
            if not headless:
                yield from _batches(iter(opened), path, wanted, opened.schema.names)
                return
            row = 0
            for batch in opened:
                yield checked_lengths(batch.column(0).to_numpy(zero_copy_only=False), str(path), row), batch.nbytes
                row += batch.num_rows
    except pa.ArrowException as cause:
        raise CliError(f"{path}: is no table as its first line says: {_said(cause)}") from None


def _texts_of(cells: list[bytes], wanted: Wanted, where: str) -> list[str]:
    """Texts of columns with documents, even if they look like numbers; other columns may be lengths."""
    columns = wanted.columns([decoded(cell, where) for cell in cells], where)
    return [] if wanted.holds == "lengths" or columns[0] in LENGTHS else [*columns]


# Arrays.


def load_numbers(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """Reads a .npy file; with `mapped`, numbers stay in the file until they are used.

    Raises:
        CliError: There is no such file, or it is no array.
    """
    if not path.is_file():
        raise CliError(f"{path}: no such file")
    try:
        loaded = np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)
    except Exception as error:  # of a broken header's parser, or of more memory than there is
        raise CliError(f"{path}: is no array of numpy: {_told(path, error)}") from None
    if not isinstance(loaded, np.ndarray):
        raise CliError(f"{path}: holds several arrays; give a .npy with one")
    return loaded


def _told(path: Path, error: Exception) -> str:
    """What is wrong with a file that numpy cannot read; numpy would take it for pickled objects."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"\x93NUMPY"):
        return "its objects are pickled, which is not read" if "pickle" in str(error) else str(error)
    if not head:
        return "it is empty"
    if head[:1] == b"\x80":
        return "it is a pickle, which is not read"
    text = b"\0" not in head
    return "it is a text file; name it .txt, .jsonl or .csv" if text else "it does not begin as one"


LENGTHS_MARK = b"wlb lengths\n"
"""Mark that `wlb lengths` writes behind the array of a .npy: its numbers are lengths, whatever the file's name."""


def is_lengths(path: Path) -> bool:
    """Whether `wlb lengths` wrote the file."""
    with path.open("rb") as file:
        file.seek(-min(len(LENGTHS_MARK), path.stat().st_size), os.SEEK_END)
        return file.read() == LENGTHS_MARK


def _npy(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    array = load_numbers(path, mapped=True)
    yield _of_array(array, "lengths" if is_lengths(path) else path.stem, str(path), wanted), path.stat().st_size


def _npz(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            names = list(arrays.files)
            (name, *more) = wanted.columns(names, str(path))
            if more:
                raise CliError(f"{path}: one array has the documents: --field NAME; its arrays: {', '.join(names)}")
            array = arrays[name]
    except CliError:
        raise
    except Exception as error:  # of the archive, of a header
        raise CliError(f"{path}: is no whole .npz: {error}") from None
    yield _of_array(array, name, f"{path}: array {name!r}", wanted), path.stat().st_size


def _of_array(array: NDArray[Any], name: str, where: str, wanted: Wanted) -> Lengths:
    """The numbers of a row are lengths; rows of numbers are token ids."""
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2):
        raise CliError(f"{where}: has shape {array.shape} of {array.dtype}: must be numbers, [n] or [n, tokens]")
    if wanted.holds == "text":
        raise CliError(f"{where}: has numbers, not text: leave --text out")
    if array.ndim == 2:
        if wanted.holds != "tokens":
            message = "--tokens, if each row is a document of so many token ids"
            raise CliError(f"{where}: has shape {array.shape}, rows of {array.shape[1]} numbers: {message}")
        return np.full(array.shape[0], array.shape[1], dtype=np.int64)
    if wanted.holds == "tokens":
        message = "one row of numbers cannot be told apart into documents: give [n, tokens], or their lengths"
        raise CliError(f"{where}: has shape {array.shape}: {message}")
    if wanted.holds is None and not any(each in name.lower() for each in ("len", "size", "num_tokens", "count")):
        message = f"may be {array.size:,} lengths or one row of token ids: --lengths, if these are lengths"
        raise CliError(f"{where}: {message} (a name with 'length' in it says so as well)")
    if not array.size:
        raise CliError(f"{where}: no lengths in it")
    return checked_lengths(array, where)


# Megatron's indexed data sets.

_INDEX = b"MMIDIDX\x00\x00"
_NUMBER_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def _indexed(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """Documents of Megatron's indexed data set: each is one sequence, or several consecutive ones.

    After the header (magic, version, code of the dtype, number of sequences, number of bounds between documents) come
    int32[sequences] lengths, int64[sequences] positions in the `.bin`, and int64[documents + 1] bounds in sequences.
    """
    stem = path.with_suffix("") if path.suffix in (".idx", ".bin") else path
    index, data = Path(f"{stem}.idx"), Path(f"{stem}.bin")
    if not index.is_file():
        message = "without it nothing says where documents end"
        raise CliError(f"{data}: has no {index.name} beside it: {message}")
    header = struct.Struct("<9sQBQQ")
    with index.open("rb") as file:
        start = file.read(header.size)
        if not start.startswith(_INDEX) or len(start) < header.size:
            raise CliError(f"{index}: is no index of a data set of Megatron's")
        _, _, code, sequences, bounds = header.unpack(start)
        whole, there = header.size + 12 * sequences + 8 * bounds, index.stat().st_size
        if there < whole:
            raise CliError(f"{index}: is cut off: {there:,} bytes of {whole:,}")
        sizes = np.fromfile(file, np.dtype("<i4"), sequences)
        file.seek(8 * sequences, os.SEEK_CUR)
        ends = np.fromfile(file, np.dtype("<i8"), bounds)
    if (sizes < 0).any() or (np.diff(ends, prepend=0) < 0).any() or (ends > sequences).any():
        raise CliError(f"{index}: is damaged: lengths below 0, or documents that end before they begin")
    if data.is_file() and code in _NUMBER_BYTES:
        needed, present = int(sizes.sum(dtype=np.int64)) * _NUMBER_BYTES[code], data.stat().st_size
        if present < needed:
            raise CliError(f"{data}: is cut off: {present:,} bytes of the {needed:,} that {index.name} says")
    yield np.diff(np.concatenate([[0], sizes.cumsum(dtype=np.int64)])[ends]), there


# WebDataset.


def _tar(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """A sample is all files of one name without ending; its text is that of `.txt`, or of a field in `.json`."""
    try:
        with _opened(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            samples = _samples(archive, path)
            while group := [*itertools.islice(samples, _ROWS)]:
                yield _of_samples(group, wanted, path), sum(size for *_, size in group)
    except (tarfile.TarError, OSError, EOFError) as cause:
        raise CliError(f"{path}: is no whole tar archive: {_said(cause)}") from None
    if path.suffix == ".tar":
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1024))
            if file.read().strip(b"\x00"):
                raise CliError(f"{path}: has no end: it was cut off, or is being written")


def _samples(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[str, bytes, str, int]]:
    """Name, content, ending and size of the file of each sample that has its text."""
    open_name, found, others = "", 0, set[str]()
    for member in archive:
        if not member.isfile():
            continue
        folder, _, base = member.name.rpartition("/")
        name, _, ending = base.partition(".")
        name = f"{folder}/{name}"
        if name != open_name:
            if open_name and not found:
                raise CliError(f"{path}: sample {open_name!r} has {', '.join(sorted(others))}, and no .txt or .json")
            open_name, found, others = name, 0, set()
        others.add(f".{ending}")
        if ending.lower() in ("txt", "text", "json") and not found:
            found = 1
            content = archive.extractfile(member)
            yield name, content.read() if content else b"", ending.lower(), member.size
    if open_name and not found:
        raise CliError(f"{path}: sample {open_name!r} has {', '.join(sorted(others))}, and no .txt or .json")


def _of_samples(group: list[tuple[str, bytes, str, int]], wanted: Wanted, path: Path) -> Lengths:
    endings_here = {ending for _, _, ending, _ in group}
    if "json" in endings_here and len(endings_here) > 1:
        raise CliError(f"{path}: some samples have text as .json, others as .txt: {', '.join(sorted(endings_here))}")
    if "json" not in endings_here:
        return measured(wanted, [decoded(content, f"{path}: {name}") for name, content, _, _ in group])
    records = []
    for name, content, _, _ in group:
        try:
            records.append(json.loads(content))
        except ValueError as error:  # noqa: PERF203 - each names its sample
            raise CliError(f"{path}: {name}.json: not JSON: {error}") from None
    columns = _object_columns(records[0], wanted, f"{path}: {group[0][0]}.json")
    return object_lengths(records, columns, wanted, path, range(len(records)))


_READERS: dict[str, Reader] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json,
    ".csv": _csv,
    ".tsv": _csv,
    ".txt": _text_lines,
    ".npy": _npy,
    ".npz": _npz,
    ".idx": _indexed,
    ".bin": _indexed,
    ".tar": _tar,
}
_STREAMED = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".txt", ".tar"}
"""Endings that the ending of a compression may follow."""

indexed = _indexed
