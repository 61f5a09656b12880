"""Data in every format that people keep: right lengths, or one line that names the file and what to do.

Each format has a file that is whole and a sibling that is not. Lengths are those of `TEXTS`, in bytes or in tokens.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import Documents, read_documents, wanted
from wlb_tools.command.output.console import progress

pa = pytest.importorskip("pyarrow")
import pyarrow.csv  # noqa: E402
import pyarrow.feather  # noqa: E402
import pyarrow.parquet  # noqa: E402

TEXTS = ["a document", "é and ß", "one\ttab", "x" * 300, "last"]
BYTES = [len(text.encode()) for text in TEXTS]
IDS = [[1, 2, 3], [4], [5, 6], [7] * 40, [8, 9]]
TOKENS = [len(ids) for ids in IDS]
CHATS = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in TEXTS]


def read(*sources: Path | str, pattern: str | None = None, **options: Any) -> Documents:
    with progress(quiet=True) as bars:
        return read_documents(
            [str(each) for each in sources], wanted=wanted(**options), pattern=pattern, cache=None, progress=bars
        )


def table(**columns: Any) -> Any:
    return pa.table(columns)


def lines(*records: Any) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def rows(**columns: list[Any]) -> bytes:
    return lines(*(dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)))


def parquet(made: Any) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(made, out)
    return out.getvalue()


def arrow(made: Any, *, stream: bool = False) -> bytes:
    out = io.BytesIO()
    opener = pa.ipc.new_stream if stream else pa.ipc.new_file
    with opener(out, made.schema) as writer:
        writer.write_table(made)
    return out.getvalue()


def feather(made: Any, version: int = 2) -> bytes:
    out = io.BytesIO()
    pyarrow.feather.write_feather(made, out, version=version)
    return out.getvalue()


def csv(made: Any, delimiter: str = ",") -> bytes:
    out = io.BytesIO()
    pyarrow.csv.write_csv(made, out, pyarrow.csv.WriteOptions(delimiter=delimiter))
    return out.getvalue()


def npy(array: Any) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(**arrays: Any) -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def zst(content: bytes) -> bytes:
    return bytes(pa.compress(content, codec="zstd", asbytes=True))


def tar(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return out.getvalue()


def index(lengths: list[int]) -> bytes:
    sizes = np.array(lengths, dtype="<i4")
    ends = np.arange(len(lengths) + 1, dtype="<i8")
    places = np.concatenate([[0], sizes.cumsum()[:-1]]).astype("<i8") * 4
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, len(lengths), len(ends))
    return header + sizes.tobytes() + places.tobytes() + ends.tobytes()


SAMPLES = {f"{place:04}.txt": text.encode() for place, text in enumerate(TEXTS)}
JSON_SAMPLES = {f"{place:04}.json": json.dumps({"text": text}).encode() for place, text in enumerate(TEXTS)}
TEXT_LINES = "".join(f"{text}\n" for text in TEXTS).encode()
SPOILED = TEXT_LINES.replace("ß".encode(), b"\xdf")  # Latin-1

# name, content, options, lengths
GOOD: list[tuple[str, bytes, dict[str, Any], list[int]]] = [
    ("text.parquet", parquet(table(text=TEXTS, other=[1] * 5)), {}, BYTES),
    ("ids.parquet", parquet(table(input_ids=IDS, labels=IDS)), {}, TOKENS),
    ("large.parquet", parquet(table(text=pa.array(TEXTS, pa.large_string()))), {}, BYTES),
    ("dictionary.parquet", parquet(table(text=pa.array(TEXTS).dictionary_encode())), {}, BYTES),
    ("lengths.parquet", parquet(table(num_tokens=TOKENS, source=TEXTS)), {}, TOKENS),
    ("numbers.parquet", parquet(table(n=TOKENS)), {"field": "n", "holds": "lengths"}, TOKENS),
    ("chat.parquet", parquet(table(messages=CHATS)), {}, [n + 3 for n in BYTES]),
    ("named.parquet", parquet(table(body_html=TEXTS, url=TEXTS)), {"field": "url"}, BYTES),
    ("pair.parquet", parquet(table(prompt=TEXTS, completion=TEXTS)), {}, [2 * n for n in BYTES]),
    ("joined.parquet", parquet(table(a=TEXTS, b=TEXTS, c=TEXTS)), {"field": "a,c"}, [2 * n for n in BYTES]),
    ("file.arrow", arrow(table(text=TEXTS)), {}, BYTES),
    ("stream.arrow", arrow(table(text=TEXTS), stream=True), {}, BYTES),
    ("ids.arrow", arrow(table(input_ids=IDS)), {}, TOKENS),
    ("two.feather", feather(table(text=TEXTS)), {}, BYTES),
    ("one.feather", feather(table(text=TEXTS), version=1), {}, BYTES),
    ("text.jsonl", rows(text=TEXTS), {}, BYTES),
    ("text.ndjson", rows(text=TEXTS), {}, BYTES),
    ("bom.jsonl", b"\xef\xbb\xbf" + rows(text=TEXTS), {}, BYTES),
    ("crlf.jsonl", rows(text=TEXTS).replace(b"\n", b"\r\n"), {}, BYTES),
    ("ids.jsonl", rows(tokens=IDS), {}, TOKENS),
    ("lengths.jsonl", rows(length=TOKENS), {}, TOKENS),
    ("pair.jsonl", rows(prompt=TEXTS, completion=TEXTS), {}, [2 * n for n in BYTES]),
    ("text.jsonl.gz", gzip.compress(rows(text=TEXTS)), {}, BYTES),
    ("text.jsonl.zst", zst(rows(text=TEXTS)), {}, BYTES),
    ("array.json", json.dumps([{"text": text} for text in TEXTS]).encode(), {}, BYTES),
    ("indented.json", json.dumps([{"text": text} for text in TEXTS], indent=1).encode(), {}, BYTES),
    ("lines.json", rows(text=TEXTS), {}, BYTES),
    ("array.json.gz", gzip.compress(json.dumps([{"text": text} for text in TEXTS]).encode()), {}, BYTES),
    ("array.json.zst", zst(json.dumps([{"text": text} for text in TEXTS]).encode()), {}, BYTES),
    ("text.csv", csv(table(text=TEXTS, n=[1] * 5)), {}, BYTES),
    ("numeric.csv", csv(table(text=["1", "22", "333"])), {}, [1, 2, 3]),
    ("lengths.csv", csv(table(length=TOKENS)), {}, TOKENS),
    ("headless.csv", b"".join(b"%d\n" % n for n in TOKENS), {"holds": "lengths"}, TOKENS),
    ("text.csv.gz", gzip.compress(csv(table(text=TEXTS))), {}, BYTES),
    ("text.csv.zst", zst(csv(table(text=TEXTS))), {}, BYTES),
    ("quoted.csv", b'text,n\n"two\nlines, and a comma",1\n', {}, [22]),
    ("text.tsv", csv(table(text=["a", "bb"], n=[1, 2]), "\t"), {}, [1, 2]),
    ("text.tsv.gz", gzip.compress(csv(table(text=["a", "bb"], n=[1, 2]), "\t")), {}, [1, 2]),
    ("text.txt", TEXT_LINES, {}, BYTES),
    ("text.txt.gz", gzip.compress(TEXT_LINES), {}, BYTES),
    ("text.txt.zst", zst(TEXT_LINES), {}, BYTES),
    ("lengths.txt", b"3\n1\n2\n40\n2\n", {"holds": "lengths"}, TOKENS),
    ("ids.txt", b"1 2 3\n4\n5 6\n", {"holds": "tokens"}, [3, 1, 2]),
    ("digits.txt", b"3\n1\n22\n", {"holds": "text"}, [1, 1, 2]),
    ("lengths.npy", npy(np.array(TOKENS)), {}, TOKENS),
    ("any.npy", npy(np.array(TOKENS)), {"holds": "lengths"}, TOKENS),
    ("unsigned-lengths.npy", npy(np.array(TOKENS, np.uint16)), {}, TOKENS),
    ("floats-lengths.npy", npy(np.array(TOKENS, np.float64)), {}, TOKENS),
    ("rows.npy", npy(np.zeros((4, 7), np.int32)), {"holds": "tokens"}, [7] * 4),
    ("lengths.npz", npz(lengths=np.array(TOKENS)), {}, TOKENS),
    ("many.npz", npz(lengths=np.array(TOKENS), other=np.zeros(3)), {}, TOKENS),
    ("rows.npz", npz(input_ids=np.zeros((4, 7), np.int32)), {"holds": "tokens"}, [7] * 4),
    ("text.tar", tar(SAMPLES), {}, BYTES),
    ("json.tar", tar(JSON_SAMPLES), {}, BYTES),
    ("with-images.tar", tar(dict(sorted({**SAMPLES, **{f"{n:04}.png": b"x" for n in range(5)}}.items()))), {}, BYTES),
    ("text.tar.gz", gzip.compress(tar(SAMPLES)), {}, BYTES),
    ("megatron.idx", index(TOKENS), {}, TOKENS),
]  # fmt: skip

# name, content, options, what is said
BAD: list[tuple[str, bytes, dict[str, Any], str]] = [
    ("cut.parquet", parquet(table(text=TEXTS))[:-40], {}, "no whole Parquet file"),
    ("empty.parquet", b"", {}, "no whole Parquet file"),
    ("null.parquet", parquet(table(text=["a", None])), {}, "row 1: nothing in column 'text' .null."),
    ("unclear.parquet", parquet(table(a=TEXTS, b=TEXTS)), {}, "--field NAME; its columns: a, b"),
    ("missing.parquet", parquet(table(a=TEXTS)), {"field": "text"}, "no column 'text' .--field.; its columns: a"),
    ("numbers.parquet", parquet(table(text=[1, 2])), {}, "holds numbers .int64.: --lengths"),
    ("negative.parquet", parquet(table(length=[3, -1])), {}, "row 1: -1: a length is from 0"),
    ("dates.parquet", parquet(table(text=pa.array([1, 2], pa.date32()))), {}, "is of type date32"),
    ("roles.parquet", parquet(table(messages=[[{"content": "a"}]])), {}, "row 0: a message without a role"),
    ("floats.parquet", parquet(table(length=[1.0, 2.5])), {}, "row 1: 2.5 is no length"),
    ("cut.arrow", arrow(table(text=TEXTS))[:-30], {}, "no whole Arrow or Feather file"),
    ("cut-stream.arrow", arrow(table(text=TEXTS), stream=True)[:-8], {}, "its stream of Arrow has no end"),
    ("cut.feather", feather(table(text=TEXTS))[:-30], {}, "no whole Arrow or Feather file"),
    ("bad.jsonl", b'{"text": "fine"}\n{"text": \n', {}, "bad.jsonl:2: not JSON"),
    ("mixed.jsonl", b'{"text": "fine"}\n{"text": 5}\n', {}, "mixed.jsonl:2: column 'text' holds a number"),
    ("kinds.jsonl", b'{"text": "fine"}\n{"text": [1, 2]}\n', {}, "holds tokens, where the rows before"),
    ("missing.jsonl", b'{"text": "fine"}\n{"body": "x"}\n', {}, "nothing in column 'text' .--field.; its columns"),
    ("null.jsonl", b'{"text": "fine"}\n{"text": null}\n', {}, ":2: nothing in column 'text'"),
    ("list.jsonl", b"[1, 2]\n", {}, "is no object with fields"),
    ("utf16.jsonl", rows(text=TEXTS).decode().encode("utf-16"), {}, "is UTF-16, must be UTF-8: iconv"),
    ("latin.jsonl", '{"text": "ß"}\n'.encode("latin-1"), {}, "latin.jsonl:1: byte 10 .df. is no UTF-8"),
    ("cut.jsonl.gz", gzip.compress(rows(text=TEXTS * 50))[:-30], {}, "cannot be read"),
    ("cut.jsonl.zst", zst(rows(text=[str(n) * 50 for n in range(500)]))[:-30], {}, "cannot be read"),
    ("plain.jsonl.gz", rows(text=TEXTS), {}, "cannot be read"),
    ("cut.json", json.dumps([{"text": "a"}]).encode()[:-3], {}, "not JSON"),
    ("mixed.json", json.dumps([{"text": "a"}, {"text": 3}]).encode(), {}, "mixed.json: row 1: column 'text'"),
    ("strings.json", json.dumps(TEXTS).encode(), {}, "is no object with fields, but str"),
    ("ragged.csv", b"text,n\na,1\nb\n", {}, "is no table as its first line says.*[Rr]ow"),
    ("headless.csv", b"3\n1\n", {}, "has no header"),
    ("utf16.csv", "text\na\n".encode("utf-16"), {}, "is UTF-16"),
    ("cut.csv.gz", gzip.compress(csv(table(text=TEXTS * 50)))[:-30], {}, "is no table|cannot be read"),
    ("ragged.tsv", b"text\tn\na\t1\tx\n", {}, "is no table as its first line says"),
    ("digits.txt", b"3\n1\n22\n", {}, "every line is a number: --lengths"),
    ("ids.txt", b"1 2 3\n4\n", {"holds": "lengths"}, "ids.txt:1: 3 numbers in a line"),
    ("words.txt", b"3\nthree\n", {"holds": "lengths"}, "words.txt:2: 'three' is no whole number"),
    ("utf16.txt", "text\n".encode("utf-16"), {}, "is UTF-16"),
    ("utf16-bare.txt", "text\n".encode("utf-16-le"), {}, "has NUL bytes"),
    ("latin.txt", SPOILED, {}, "latin.txt:2: byte 7 .df. is no UTF-8"),
    ("cut.txt.gz", gzip.compress(TEXT_LINES * 50)[:-20], {}, "cannot be read"),
    ("tokens.npy", npy(np.array([5, 2, 9])), {}, "may be 3 lengths or one row of token ids: --lengths"),
    ("row-of-tokens.npy", npy(np.array([5, 2, 9])), {"holds": "tokens"}, "cannot be told apart into documents"),
    ("rows.npy", npy(np.zeros((4, 7), np.int32)), {}, "--tokens, if each row is a document"),
    ("objects.npy", npy(np.array([{}], dtype=object)), {}, "is no array of numpy"),
    ("cut-lengths.npy", npy(np.array(TOKENS))[:-8], {}, "is no array of numpy"),
    ("negative-lengths.npy", npy(np.array([3, -2])), {}, "row 1: -2: a length is from 0"),
    ("cut.npz", npz(lengths=np.array(TOKENS))[:-30], {}, "is no whole .npz"),
    ("unclear.npz", npz(a=np.array(TOKENS), b=np.array(TOKENS)), {}, "--field NAME; its columns: a, b"),
    ("cut.tar", tar(SAMPLES)[:-8000], {}, "has no end|no whole tar"),
    ("cut-inside.tar", tar(SAMPLES)[:2700], {}, "no whole tar archive"),
    ("other.tar", tar({"0.png": b"x"}), {}, "sample '/0' has .png, and no .txt or .json"),
    ("mixed.tar", tar({"0.txt": b"x", "1.json": b"{}"}), {}, "some samples have text as .json, others as .txt"),
    ("bad.tar", tar({"0.json": b"{"}), {}, "/0.json: not JSON"),
    ("cut.tar.gz", gzip.compress(tar(SAMPLES))[:-20], {}, "cannot be read|no whole tar"),
    ("cut.idx", index(TOKENS)[:-8], {}, "is cut off"),
    ("other.idx", b"hello", {}, "is no index of a data set of Megatron's"),
    ("alone.bin", b"\x00" * 80, {}, "alone.bin: has no alone.idx beside it"),
    ("data.pkl", b"x", {}, "its name does not say what it holds; read are .parquet"),
]  # fmt: skip


def test_there_are_enough_of_each() -> None:
    assert len(GOOD) + len(BAD) >= 80


@pytest.mark.parametrize(("name", "content", "options", "lengths"), GOOD, ids=[each[0] for each in GOOD])
def test_a_whole_file_has_the_right_lengths(
    name: str, content: bytes, options: dict[str, Any], lengths: list[int], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found = read(path, **options)
    assert found.lengths.tolist() == lengths
    in_tokens = lengths in (TOKENS, [7] * 4, [3, 1, 2])
    assert found.unit == ("tokens" if in_tokens else "bytes")


@pytest.mark.parametrize(("name", "content", "options", "said"), BAD, ids=[each[0] for each in BAD])
def test_a_broken_file_is_refused_by_name(
    name: str, content: bytes, options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CliError, match=said) as caught:
        read(path, **options)
    assert name in str(caught.value)


# Folders, patterns, several sources.


def test_a_folder_of_shards_is_all_their_rows(tmp_path: Path) -> None:
    for shard in range(3):
        (tmp_path / f"part-{shard}.parquet").write_bytes(parquet(table(text=TEXTS)))
    for name in ("README.md", "dataset_info.json", "_SUCCESS", ".hidden.parquet"):
        (tmp_path / name).write_text("{}")
    found = read(tmp_path)
    assert found.lengths.tolist() == BYTES * 3
    assert found.names is None
    assert read(f"{tmp_path}/part-*.parquet").lengths.tolist() == BYTES * 3
    assert read(tmp_path / "part-0.parquet", tmp_path / "part-2.parquet").lengths.tolist() == BYTES * 2
    with pytest.raises(CliError, match="no file matches"):
        read(f"{tmp_path}/part-*.csv")


def test_a_folder_of_text_files_is_a_document_each_and_links_are_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        for place, text in enumerate(TEXTS):
            (folder / f"{place}.py").write_text(text)
    (inside / "linked").symlink_to(outside)
    (outside / "back").symlink_to(inside)
    found = read(inside)
    assert found.lengths.tolist() == BYTES * 2
    assert found.names is not None
    assert found.names[5] == "linked/0.py"


def test_a_folder_of_both_asks(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("x = 1")
    (tmp_path / "data.jsonl").write_bytes(rows(text=TEXTS))
    with pytest.raises(CliError, match=r"beside other files, as code.py: --pattern '\*.jsonl'"):
        read(tmp_path)
    assert read(tmp_path, pattern="*.jsonl").lengths.tolist() == BYTES
    assert read(tmp_path, pattern="*.py").lengths.tolist() == [5]
    assert len(read(tmp_path, pattern="*").lengths) == 2
    (tmp_path / "code.py").unlink()
    (tmp_path / "more.csv").write_bytes(csv(table(text=TEXTS)))
    with pytest.raises(CliError, match=r"data files of several kinds, \.csv, \.jsonl"):
        read(tmp_path)
    (tmp_path / "wide").mkdir()
    (tmp_path / "wide/a.md").write_bytes("x".encode("utf-16"))
    with pytest.raises(CliError, match="UTF-16"):
        read(tmp_path / "wide", pattern="*.md")


def test_sources_that_count_other_things_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT_LINES)
    (tmp_path / "lengths.npy").write_bytes(npy(np.array(TOKENS)))
    with pytest.raises(CliError, match="some hold text, whose bytes would be counted, and some tokens"):
        read(tmp_path / "text.txt", tmp_path / "lengths.npy")


@pytest.mark.parametrize("name", ["data", "data.idx", "data.bin"])
def test_megatron_with_and_without_suffix(name: str, tmp_path: Path) -> None:
    (tmp_path / "data.idx").write_bytes(index(TOKENS))
    (tmp_path / "data.bin").write_bytes(b"\x00" * 4 * sum(TOKENS))
    assert read(tmp_path / name).lengths.tolist() == TOKENS
    assert read(tmp_path).lengths.tolist() == TOKENS
    (tmp_path / "data.bin").write_bytes(b"\x00" * 4)
    with pytest.raises(CliError, match=r"data.bin: is cut off: 4 bytes of the 192 that data.idx says"):
        read(tmp_path / name)


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zst])
def test_standard_input(compress: Callable[[bytes], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (rows(text=TEXTS), TEXT_LINES):

        class Standard:
            buffer = io.BytesIO(compress(content))

        monkeypatch.setattr("sys.stdin", Standard)
        assert read("-").lengths.tolist() == BYTES
    Standard.buffer = io.BytesIO(compress(b'{"text": 1\n'))
    with pytest.raises(CliError, match=r"^standard input.*:1: not JSON"):
        read("-")


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": TEXTS, "n": [1] * 5})
    whole.save_to_disk(str(tmp_path / "saved"))
    assert read(tmp_path / "saved").lengths.tolist() == BYTES
    whole.select([3, 0]).save_to_disk(str(tmp_path / "some"))
    assert read(tmp_path / "some").lengths.tolist() == [BYTES[3], BYTES[0]]
    datasets.DatasetDict({"train": whole, "test": whole}).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(CliError, match=r"has several splits: give one of them, as .*both/test"):
        read(tmp_path / "both")
    assert read(tmp_path / "both" / "train").lengths.tolist() == BYTES
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(CliError, match="is no whole data set of save_to_disk"):
        read(tmp_path / "saved")


def test_a_folder_of_save_to_disk_without_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    for name in ("dataset_info.json", "state.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(CliError, match="which datasets reads: pip install datasets"):
        read(tmp_path)
