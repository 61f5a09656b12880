"""Lengths in a mapped file are read once; what is kept beside it is taken only while it holds."""

from __future__ import annotations

import json
import multiprocessing
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb
from wlb.reading import corpus, sidecar
from wlb.reading.corpus import Corpus

LENGTHS = np.random.default_rng(0).integers(1, 1000, 5000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of lengths."""
    np.save(tmp_path / "lengths.npy", LENGTHS.astype(np.int32))
    return tmp_path / "lengths.npy"


def mapped(path: Path, mode: Any = "r") -> NDArray[Any]:
    return np.load(path, mmap_mode=mode)


def sidecar_of(path: Path) -> Path:
    return path.with_name("lengths.npy.wlb.json")


def facts(found: Corpus) -> tuple[int, str]:
    return found.tokens, found.fingerprint


def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(array: NDArray[Any]) -> Any:
        raise AssertionError("lengths are read again")

    monkeypatch.setattr(corpus, "_read", read)


EXPECTED = facts(Corpus.of(LENGTHS, longest=None))


@pytest.mark.parametrize("view", [lambda array: array, np.asarray, lambda array: array[:]])
def test_known_lengths_are_not_read(view: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts(Corpus.of(mapped(path), longest=999)) == EXPECTED
    reads_nothing(monkeypatch)
    assert facts(Corpus.of(view(mapped(path)), longest=999)) == EXPECTED
    assert [entry.name for entry in sorted(path.parent.iterdir())] == ["lengths.npy", "lengths.npy.wlb.json"]


def test_the_fingerprint_is_that_of_saved_states() -> None:
    """Of int64, little-endian, in one: states of earlier versions hold it."""
    assert EXPECTED == (2508211, "909fea082456c5147ce6490058c28751")
    assert facts(Corpus.of(LENGTHS.astype(">u2")[::1], longest=None)) == EXPECTED
    assert facts(Corpus.of(np.repeat(LENGTHS, 2)[::2], longest=None)) == EXPECTED


def test_parts_of_a_file_are_kept_beside_each_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [slice(0, 4000), slice(4000, None), slice(10, 4010), slice(None, None, 2)]
    expected = [facts(Corpus.of(LENGTHS[part], longest=None)) for part in parts]
    assert [facts(Corpus.of(mapped(path)[part], longest=None)) for part in parts] == expected
    reads_nothing(monkeypatch)
    assert [facts(Corpus.of(mapped(path)[part], longest=None)) for part in parts[:3]] == expected[:3]
    with pytest.raises(AssertionError):  # every other length is not contiguous
        Corpus.of(mapped(path)[parts[3]], longest=None)


def test_a_length_that_is_refused_is_found(path: Path) -> None:
    first = int((LENGTHS > 990).argmax())
    for _ in range(2):  # unknown, known
        with pytest.raises(wlb.WlbError, match=r"from 1 to max_document_tokens = 990 tokens; a packer") as raised:
            Corpus.of(mapped(path), longest=990)
        assert (raised.value.argument, raised.value.index, raised.value.value) == ("lengths", first, LENGTHS[first])
    np.save(path, np.array([3, 2, 0, 1]))
    for _ in range(2):
        with pytest.raises(wlb.WlbError, match="at least 1") as raised:
            Corpus.of(mapped(path), longest=None)
        assert raised.value.index == 2


def changed_in_place(path: Path) -> None:
    array = mapped(path, "r+")
    array[3210] += 1
    array.flush()


def swapped(path: Path) -> None:
    array = mapped(path, "r+")
    array[[7, 8]] = array[[8, 7]]
    array.flush()


def truncated(path: Path) -> None:
    np.save(path, LENGTHS[:-1].astype(np.int32))


def of_another_type(path: Path) -> None:
    np.save(path, LENGTHS.astype(np.uint32) + 2**31)


@pytest.mark.parametrize("change", [changed_in_place, swapped, truncated, of_another_type])
@pytest.mark.parametrize("restored", [False, True])
def test_a_changed_file_is_read_again(change: Any, restored: bool, path: Path) -> None:
    """Also where its modification time is the old one."""
    Corpus.of(mapped(path), longest=None)
    before = path.stat()
    change(path)
    if restored:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    expected = facts(Corpus.of(np.array(mapped(path)), longest=None))
    assert expected != EXPECTED
    assert facts(Corpus.of(mapped(path), longest=None)) == expected
    assert facts(Corpus.of(mapped(path), longest=None)) == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-9],
        lambda text: text.replace(str(EXPECTED[0]), str(EXPECTED[0] + 1)),
        lambda text: text.replace(EXPECTED[1][:4], "0000"),
        lambda text: json.dumps([1, 2]),
        lambda text: "null",
        lambda text: "\x00" * len(text),
    ],
)
def test_a_damaged_sidecar_is_replaced(damage: Any, path: Path) -> None:
    Corpus.of(mapped(path), longest=None)
    text = sidecar_of(path).read_text()
    sidecar_of(path).write_text(damage(text))
    with pytest.warns(UserWarning, match="lengths.npy.wlb.json is damaged"):
        assert facts(Corpus.of(mapped(path), longest=None)) == EXPECTED
    assert sidecar_of(path).read_text() == text


def test_what_cannot_be_kept_is_found_every_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In silence where that is quick."""
    sidecar_of(path).mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert facts(Corpus.of(mapped(path), longest=None)) == EXPECTED
    monkeypatch.setattr(sidecar, "_SLOW", -1.0)
    with pytest.warns(UserWarning, match="cannot keep the result.*lengths.npy.wlb.json"):
        assert facts(Corpus.of(mapped(path), longest=None)) == EXPECTED
    assert len(list(path.parent.iterdir())) == 2, "a temporary file is left"


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_what_may_be_written_to_is_read(mode: str, path: Path) -> None:
    Corpus.of(mapped(path), longest=None)
    array = mapped(path, mode)
    array[5] += 1
    assert Corpus.of(array, longest=None).tokens == EXPECTED[0] + 1


def test_one_process_of_many_reads(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, read = tmp_path / "log", corpus._read

    def logged(array: NDArray[Any]) -> Any:
        with log.open("a") as file:
            file.write("x")
        return read(array)

    monkeypatch.setattr(corpus, "_read", logged)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        found = pool.map(of_path, [path] * 8, chunksize=1)
    assert set(found) == {EXPECTED}
    assert log.read_text() == "x"


def of_path(path: Path) -> tuple[int, str]:
    return facts(Corpus.of(mapped(path), longest=None))
