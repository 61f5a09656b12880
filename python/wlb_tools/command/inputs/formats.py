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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.reading.row_kinds import Reading, reading_of
from wlb_tools.command.errors import CliError, first_line
from wlb_tools.command.inputs.cells import (
    Wanted,
    checked_lengths,
    has_text,
    histogram,
    holds_text,
    row_lengths,
    table_lengths,
)

Lengths = NDArray[np.int64]
Reader = Callable[[Path, Wanted], Iterator[tuple[Lengths, int]]]
"""Yields the lengths of some rows, and how many bytes of the file they took, until the file ends."""

_ROWS = 16384  # rows of a table that are measured at a time
_BLOCK = 1 << 20  # bytes of lines that are measured at a time
_LOOK = 100  # rows whose keys say how a file is read
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
        raise CliError(f"{path}: cannot be read: {first_line(cause)}") from None


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


def _blocks(path: Path) -> Iterator[bytes]:
    """Whole lines of a file, some at a time, without a mark of their order of bytes."""
    with _opened(path) as stream:
        rest, first = b"", True
        while block := stream.read(_BLOCK):
            if first:
                check_encoding(block[:4096], str(path))
                block, first = block.removeprefix(b"\xef\xbb\xbf"), False
            end = block.rfind(b"\n") + 1
            if end:
                yield rest + block[:end]
                rest = block[end:]
            else:
                rest += block
        if rest:
            yield rest


def _json_lines(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """Objects, a line each."""
    reading: Reading | None = None
    first = 1
    for block in _blocks(path):
        if reading is None:
            reading = _looked_at(path, block, wanted)
            if reading is None:
                yield from _json_array(path, wanted)
                return
        yield _by_lines(block, reading, wanted, path, first), len(block)
        first += block.count(b"\n")


def _by_lines(block: bytes, reading: Reading, wanted: Wanted, path: Path, first: int) -> Lengths:
    """Lengths of lines, an empty document for an empty line."""
    found: list[Lengths] = []
    records: list[Any] = []
    numbers: list[int] = []

    def measure() -> None:
        if records:
            found.append(row_lengths(records, reading, wanted, lambda place: f"{path}:{numbers[place]}"))
            records.clear()
            numbers.clear()

    for number, line in enumerate(block.removesuffix(b"\n").split(b"\n"), start=first):
        if line.strip():
            records.append(_object(line, f"{path}:{number}"))
            numbers.append(number)
        else:
            measure()
            found.append(np.zeros(1, dtype=np.int64))
    measure()
    return np.concatenate([*found, np.zeros(0, dtype=np.int64)])


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        decoded(line, where)
        raise
    except (ValueError, RecursionError) as error:
        raise CliError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise CliError(f"{where}: is no object with fields, but {type(record).__name__}")
    return record


def _looked_at(path: Path, block: bytes, wanted: Wanted) -> Reading | None:
    """How the objects of a file are read; None: it has an array, or an object over several lines."""
    lines = [(place, line) for place, line in enumerate(block.split(b"\n", _LOOK)[:_LOOK], start=1) if line.strip()]
    if not lines:
        return Reading("text", {})
    (place, first), following = lines[0], lines[1:2]
    start = first.lstrip()[:1]
    if start == b"[" or (start == b"{" and following and following[0][1].lstrip()[:1] != b"{" and not _is_json(first)):
        return None
    records = [_object(first, f"{path}:{place}")]
    records += [record for _, line in lines[1:] if isinstance(record := _is_json(line), dict)]
    return _chosen(records, wanted, f"{path}:{place}")


def _is_json(line: bytes) -> Any:
    """The value of a line; None if it is no JSON, which is said with its number when the line is read."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _chosen(records: list[dict[str, Any]], wanted: Wanted, where: str) -> Reading:
    """How rows are read, by all the keys of some of them."""
    names = dict.fromkeys(name for record in records for name in record)
    reading = wanted.reading([*names], where)
    said = [name for name in reading.unread([*names]) if any(holds_text(record.get(name)) for record in records)]
    wanted.unread(said)
    return reading


def _json_array(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    with _opened(path) as stream:
        content = decoded(stream.read().removeprefix(b"\xef\xbb\xbf"), str(path))
    try:
        records = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CliError(f"{path}: not JSON: {error}; objects may stand one a line, or in one array") from None
    if isinstance(records, dict):
        arrays = [name for name, value in records.items() if _is_records(value)]
        if len(arrays) == 1 and not wanted.field and reading_of([*records]) is None:
            wanted.notes[f"Its rows are those of {arrays[0]!r}."] = None
            records = records[arrays[0]]
        else:
            records = [records]
    for place, record in enumerate(records):
        if not isinstance(record, dict):
            raise CliError(f"{path}: row {place}: is no object with fields, but {type(record).__name__}")
    reading = _chosen(records[:_LOOK], wanted, f"{path}: row 0") if records else None
    for start in range(0, len(records), _ROWS):
        part = records[start : start + _ROWS]
        assert reading is not None
        found = row_lengths(part, reading, wanted, lambda place, start=start: f"{path}: row {start + place}")  # type: ignore[misc]
        yield found, len(content) * len(part) // len(records)


def _is_records(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(each, dict) for each in value)


def _text_lines(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """One document a line; or numbers, which are lengths or token ids if the caller says so."""
    if wanted.field:
        raise CliError(f"{path}: has lines of text and no columns: leave --field out")
    reading = Reading("text", {"text": "text"})
    numbers_so_far, some, first = wanted.holds is None, False, 1
    kept: list[tuple[Lengths, int]] = []
    for block in _blocks(path):
        said = block.removesuffix(b"\n").split(b"\n")
        lines = [decoded(line, f"{path}:{number}").strip() for number, line in enumerate(said, start=first)]
        if wanted.holds in ("lengths", "tokens"):
            yield _numbers(lines, first, wanted, path), len(block)
        else:
            numbers_so_far = numbers_so_far and all(not line or line.replace(" ", "").isdecimal() for line in lines)
            some = some or any(lines)
            rows = [{"text": line} for line in lines]
            kept.append((row_lengths(rows, reading, wanted, lambda place: f"{path}: line {place}"), len(block)))
            if not numbers_so_far:
                yield from kept
                kept = []
        first += len(lines)
    if kept and some:
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
    wanted.saw.add("tokens")
    return lengths


# Tables.


def _batches(
    batches: Iterable[Any], schema: Any, path: Path, wanted: Wanted, share: float = 0
) -> Iterator[tuple[Lengths, int]]:
    """Lengths of batches of Arrow, each with the bytes of its rows; `share` are the bytes of a row of the file."""
    reading, row = None, 0
    for batch in batches:
        if reading is None:
            reading = _of_schema(schema, path, wanted)
        if batch.num_rows:
            yield table_lengths(batch, reading, wanted, path, row), int(share * batch.num_rows) or batch.nbytes
            row += batch.num_rows


def _of_schema(schema: Any, path: Path, wanted: Wanted) -> Reading:
    reading = wanted.reading(schema.names, str(path))
    wanted.unread([name for name in reading.unread(schema.names) if has_text(schema.field(name).type)])
    return reading


def _parquet(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            reading = _of_schema(file.schema_arrow, path, wanted)
            share = path.stat().st_size / max(1, file.metadata.num_rows)
            batches = file.iter_batches(batch_size=_ROWS, columns=[*reading.names])
            yield from _batches(batches, file.schema_arrow, path, wanted, share)
    except (pa.ArrowException, OSError) as cause:
        raise CliError(f"{path}: is no whole Parquet file: {first_line(cause)}") from None


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
                yield from _batches(batches, opened.schema, path, wanted)
            elif start.startswith(b"FEA1"):
                table = feather.read_table(path)
                yield from _batches(table.to_batches(), table.schema, path, wanted)
            else:
                # A stream has an end mark of 8 bytes, which a file that was cut off lacks.
                if file.size() >= 8 and file.read_at(8, file.size() - 8) != b"\xff\xff\xff\xff\x00\x00\x00\x00":
                    raise CliError(f"{path}: its stream of Arrow has no end: it was cut off, or is being written")
                streamed = ipc.open_stream(file)
                yield from _batches(streamed, streamed.schema, path, wanted)
    except (pa.ArrowException, OSError) as cause:
        raise CliError(f"{path}: is no whole Arrow or Feather file: {first_line(cause)}") from None


def _csv(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    import pyarrow as pa
    from pyarrow import csv

    tabs = ".tsv" in [suffix.lower() for suffix in path.suffixes]
    parse = csv.ParseOptions(delimiter="\t" if tabs else ",", newlines_in_values=True)
    with _opened(path) as stream:
        start = stream.read(1 << 16)
    check_encoding(start[:4096], str(path))
    header = start.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].strip()
    cells = [decoded(cell.strip().strip(b'"'), str(path)) for cell in header.split(parse.delimiter.encode())]
    headless = all(cell.isdigit() for cell in cells)
    if headless and (wanted.holds != "lengths" or len(cells) > 2):
        message = "has no header: its first line is of numbers. --lengths if it is a column of lengths, or lengths and"
        raise CliError(f"{path}: {message} counts of documents; else give it a line of names")
    cells = ["length", "count"][: len(cells)] if headless else cells
    reading = wanted.reading(cells, str(path))
    numbers = reading.kind in ("lengths", "histogram")
    reading_options = csv.ReadOptions(use_threads=False, block_size=1 << 24, column_names=cells if headless else None)
    types = {} if numbers else {name: pa.string() for name in cells}  # texts may look like numbers
    converting = csv.ConvertOptions(column_types=types, strings_can_be_null=False)
    wanted.unread([name for name in reading.unread(cells) if not numbers])
    try:
        with _opened(path) as stream:
            opened = csv.open_csv(stream, reading_options, parse, converting)
            row = 0
            for batch in opened:
                yield table_lengths(batch, reading, wanted, path, row), batch.nbytes
                row += batch.num_rows
    except pa.ArrowException as cause:
        raise CliError(f"{path}: is no table as its first line says: {first_line(cause)}") from None


# Arrays.


def load_numbers(path: Path, *, mapped: bool = False) -> NDArray[Any]:
    """Reads a .npy file; with `mapped`, numbers stay in the file until they are used.

    Raises:
        CliError: there is no such file, or it is no array.
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
            reading = wanted.reading(names, str(path))
            (name, *more) = reading.names
            if more and reading.kind not in ("tokens", "histogram"):
                raise CliError(f"{path}: one array has the documents: --field NAME; its arrays: {', '.join(names)}")
            array = arrays[name]
            counts = arrays[more[0]] if reading.kind == "histogram" else None
    except CliError:
        raise
    except Exception as error:  # of the archive, of a header
        raise CliError(f"{path}: is no whole .npz: {error}") from None
    lengths = _of_array(array, name, f"{path}: array {name!r}", wanted)
    if counts is not None:
        lengths = histogram(lengths, checked_lengths(counts, f"{path}: array {more[0]!r}"), str(path))
    yield lengths, path.stat().st_size


def _of_array(array: NDArray[Any], name: str, where: str, wanted: Wanted) -> Lengths:
    """The numbers of a row are lengths; rows of numbers are token ids."""
    if array.dtype.kind not in "iuf" or array.ndim not in (1, 2):
        raise CliError(f"{where}: has shape {array.shape} of {array.dtype}: must be numbers, [n] or [n, tokens]")
    if wanted.holds == "text":
        raise CliError(f"{where}: has numbers, not text: leave --text out")
    wanted.saw.add("tokens")
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
    wanted.saw.add("tokens")
    yield np.diff(np.concatenate([[0], sizes.cumsum(dtype=np.int64)])[ends]), there


# WebDataset.


def _tar(path: Path, wanted: Wanted) -> Iterator[tuple[Lengths, int]]:
    """A sample is all files of one name without ending; its text is that of `.txt`, or its row that of `.json`."""
    reading: Reading | None = None
    try:
        with _opened(path) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
            samples = _samples(archive, path, wanted)
            while group := [*itertools.islice(samples, _ROWS)]:
                names, rows, sizes = zip(*group, strict=True)
                if reading is None:
                    reading = _chosen([*rows[:_LOOK]], wanted, f"{path}: {names[0]}")
                yield row_lengths(rows, reading, wanted, lambda row, names=names: f"{path}: {names[row]}"), sum(sizes)  # type: ignore[misc]
    except (tarfile.TarError, OSError, EOFError) as cause:
        raise CliError(f"{path}: is no whole tar archive: {first_line(cause)}") from None
    if path.suffix == ".tar":
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1024))
            if file.read().strip(b"\x00"):
                raise CliError(f"{path}: has no end: it was cut off, or is being written")


def _samples(archive: tarfile.TarFile, path: Path, wanted: Wanted) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name, row and bytes of each sample."""
    members = (member for member in archive if member.isfile())
    kind = ""
    for name, files in itertools.groupby(members, key=lambda member: _sample_name(member.name)):
        row: dict[str, Any] = {}
        others, size, found = list[str](), 0, ""
        for member in files:
            ending = member.name.rpartition("/")[2].partition(".")[2].lower()
            if ending not in ("txt", "text", "json") or found:
                others.append(f".{ending}")
                continue
            content = archive.extractfile(member)
            said, found, size = (content.read() if content else b""), "json" if ending == "json" else "txt", member.size
            row = (
                _object(said, f"{path}: {name}.json") if found == "json" else {"text": decoded(said, f"{path}: {name}")}
            )
        if not found:
            raise CliError(f"{path}: sample {name!r} has {', '.join(sorted(others))}, and no .txt or .json")
        if kind not in ("", found):
            raise CliError(f"{path}: some samples have text as .json, others as .txt: {name!r} has .{found}")
        kind = found
        wanted.unread(sorted({*others}))
        yield name, row, size


def _sample_name(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}"


_READERS: dict[str, Reader] = {
    ".parquet": _parquet,
    ".arrow": _arrow,
    ".feather": _arrow,
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".json": _json_lines,
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
