"""The page on large corpora: its blocks give the lengths of `wlb lengths`, by `map` of datasets and by Ray Data."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb_tools
from tests.tools.command import trainers
from tests.trainers.page import block
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import read_documents, wanted
from wlb_tools.command.output.console import progress

pa = pytest.importorskip("pyarrow")
pytest.importorskip("transformers")

PAGE = "large_corpora.md"
ROWS = [
    {"messages": [{"role": "user", "content": "the fox " * n}, {"role": "assistant", "content": "jumps"}]}
    for n in range(1, 41)
]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, list[int]]:
    """A file and a tokenizer where the page has them, and the lengths that `wlb lengths` counts."""
    monkeypatch.chdir(tmp_path)
    tokenizer, path = tmp_path / "path" / "of" / "model", tmp_path / "chats" / "all.jsonl"
    trainers.save_tokenizer(tokenizer)
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path, tokenizer, read(path, tokenizer=tokenizer)


def read(path: Path, **options: Any) -> list[int]:
    with progress(quiet=True) as bars:
        found = read_documents([str(path)], wanted=wanted(**options), pattern=None, cache=None, progress=bars)
    return [int(length) for length in found.lengths]


def test_a_batch_is_a_mapping_or_a_table_and_the_function_can_be_sent(corpus: tuple[Path, Path, list[int]]) -> None:
    _, tokenizer, expected = corpus
    lengths = pickle.loads(pickle.dumps(wlb_tools.RowLengths(tokenizer, trainer="trl")))
    assert lengths({"messages": [row["messages"] for row in ROWS]})["length"] == expected
    assert lengths(pa.Table.from_pylist(ROWS)).column("length").to_pylist() == expected
    pairs = pa.table({"chosen": ["a", "bb"], "rejected": ["ccc", "dddd"]})
    with pytest.warns(UserWarning, match="two documents"):
        assert wlb_tools.RowLengths()(pairs).column("length").to_pylist() == [1, 3, 2, 4]
    with pytest.warns(UserWarning, match="Not counted: 'chat'"):
        wlb_tools.RowLengths()({"text": ["a"], "chat": ["b"]})
    with pytest.raises(CliError, match="batch: row 1: nothing in column 'text'"):
        wlb_tools.RowLengths()({"text": ["a", None]})


def test_map_of_datasets_with_processes(corpus: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", corpus[0].parent / "cache")
    exec(block("import datasets", PAGE).replace("num_proc=64", "num_proc=2"), {})
    assert read(Path("lengths.parquet")) == corpus[2]


def test_map_batches_of_ray_data(corpus: tuple[Path, Path, list[int]]) -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        exec(block("import ray", PAGE).replace("s3://corpus/chats/", str(corpus[0].parent)).replace(
            '"path/of/model"', repr(str(corpus[1]))), {})  # fmt: skip
    finally:
        ray.shutdown()
    assert read(Path("lengths")) == corpus[2]


def test_loaders_read_the_column(corpus: tuple[Path, Path, list[int]]) -> None:
    pytest.importorskip("torch")
    import pyarrow.parquet as pq

    import wlb
    import wlb.torch as wt

    _, tokenizer, expected = corpus
    pq.write_table(wlb_tools.RowLengths(tokenizer)(pa.Table.from_pylist(ROWS)), "lengths.parquet")
    found: dict[str, Any] = {}
    exec(block("pq.read_table", PAGE), found)
    packer = wlb.Packer(
        num_micro_batches=2, max_tokens=512, cost_model=wlb.CostModel(attention=1.0, linear=1.0), release="fifo"
    )
    sampler = wt.BalancedBatchSampler(found["lengths"], packer=packer, dp_rank=0, dp_size=1)
    drawn = {piece for batch in sampler for piece in batch}
    assert drawn == {*range(len(expected))}
    assert np.array_equal(found["lengths"], expected)
