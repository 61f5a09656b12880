"""`wlb lengths`: any source in, one file of lengths out, which says of which documents they are."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("cyclopts", "jinja2", "rich", "matplotlib", "plotly"):
    pytest.importorskip(package)


def index(path: Path, sizes: list[int], bounds: list[int]) -> bytes:
    """An `.idx` as Megatron writes it."""
    places = np.concatenate([[0], np.cumsum(sizes)[:-1] * 4])
    arrays = (np.array(sizes, "<i4"), places.astype("<i8"), np.array(bounds, "<i8"))
    made = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 4, len(sizes), len(bounds)) + b"".join(a.tobytes() for a in arrays)
    path.write_bytes(made)
    return made


def test_lengths_are_a_source_for_every_command(run: Any, tmp_path: Path) -> None:
    texts = ["a" * 40, "b", "c" * 3000, "d" * 500]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    shown = run("lengths", "corpus.jsonl", "-o", "mine.npy")
    assert "4 documents, 3,541 bytes" in shown.out
    assert "Wrote mine.npy\n" in shown.out
    assert np.load(tmp_path / "mine.npy").tolist() == [40, 1, 3000, 500]
    again = run("lengths", "mine.npy", "--output", "again.npy", "--json").json
    assert again["files"] == ["again.npy"]
    assert np.load(tmp_path / "again.npy").tolist() == [40, 1, 3000, 500]
    run("pack", "mine.npy", "--context", 3000, "--micro-batches", 1, "--json").json  # noqa: B018


def test_empty_documents_keep_the_others_ids(run: Any, tmp_path: Path) -> None:
    (tmp_path / "some.txt").write_text("one\n\nthree\n")
    assert "1 are empty, and left out: lengths.ids.npy has" in run("lengths", "some.txt").out
    assert np.load(tmp_path / "lengths.npy").tolist() == [3, 5]
    assert np.load(tmp_path / "lengths.ids.npy").tolist() == [0, 2]
    (tmp_path / "all.txt").write_text("one\ntwo\n")
    run("lengths", "all.txt")
    assert not (tmp_path / "lengths.ids.npy").exists()  # it was of other documents


def test_files_of_a_directory_are_named(run: Any, tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name in ("b.py", "a.py", "c.md"):
        (tmp_path / "corpus" / name).write_text(name * 3)
    run("lengths", "corpus", "--pattern", "*.py")
    assert (tmp_path / "lengths.documents.txt").read_text() == "a.py\nb.py\n"


def test_where_tokens_and_attention_lie(run: Any, tmp_path: Path) -> None:
    lengths = np.array([1, 2, 3, 1024, 1025, 100_000, 131_072])
    np.save(tmp_path / "some-lengths.npy", lengths)
    numbers = run("lengths", "some-lengths.npy", "--json").json
    pairs = lengths * (lengths + 1) / 2
    bounds = [row["up_to"] for row in numbers["classes"]]
    assert bounds == [256 << power for power in range(10)]
    below = [0, *bounds[:-1]]
    for row, least in zip(numbers["classes"], below, strict=True):
        inside = (lengths > least) & (lengths <= row["up_to"])
        assert row["documents"] == inside.sum()
        assert row["of_documents"] == pytest.approx(inside.mean())
        assert row["of_tokens"] == pytest.approx(lengths[inside].sum() / lengths.sum())
        assert row["of_attention"] == pytest.approx(pairs[inside].sum() / pairs.sum())
    np.save(tmp_path / "ones-lengths.npy", np.ones(3, dtype=np.int32))
    assert [row["up_to"] for row in run("lengths", "ones-lengths.npy", "--json").json["classes"]] == [1]


def test_megatrons_index_is_read_without_its_data(run: Any, tmp_path: Path) -> None:
    index(tmp_path / "corpus.idx", [5, 7, 0, 11, 2], [0, 1, 3, 3, 5])  # a sequence, two, none, two
    run("lengths", "corpus.idx")
    assert np.load(tmp_path / "lengths.npy").tolist() == [5, 7, 13]
    assert np.load(tmp_path / "lengths.ids.npy").tolist() == [0, 1, 3]


def test_megatrons_own_index(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.int32)
    documents = [[3], [4, 1], [100]]
    for parts in documents:
        builder.add_document(torch.arange(sum(parts), dtype=torch.int32), parts)
    builder.finalize(str(tmp_path / "corpus.idx"))
    run("lengths", "corpus.idx")
    assert np.load(tmp_path / "lengths.npy").tolist() == [sum(parts) for parts in documents]


def test_a_file_that_is_no_index_or_half_of_one(run: Any, tmp_path: Path) -> None:
    whole = index(tmp_path / "corpus.idx", [5, 7], [0, 1, 2])
    for cut in (8, 20, len(whole) - 1):
        (tmp_path / "cut.idx").write_bytes(whole[:cut])
        found = run("lengths", "cut.idx")
        assert found.code == 2
        assert "cut.idx: is " in found.err
        assert not (tmp_path / "lengths.npy").exists()
    for sizes, bounds in (([5, -7], [0, 1, 2]), ([5, 7], [0, 2, 1]), ([5, 7], [0, 1, 3]), ([5, 7], [-1, 1, 2])):
        index(tmp_path / "wrong.idx", sizes, bounds)
        assert "wrong.idx: is damaged" in run("lengths", "wrong.idx").err
    index(tmp_path / "empty.idx", [0], [0, 1])
    assert "empty.idx: no documents, or only empty ones" in run("lengths", "empty.idx").err


def test_the_source_is_not_overwritten(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([1, 2]))
    found = run("lengths", "lengths.npy")
    assert (found.code, "is one of SOURCES" in found.err) == (2, True)
    assert "must end with .npy" in run("lengths", "lengths.npy", "-o", "lengths.json").err
