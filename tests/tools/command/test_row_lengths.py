"""A corpus that is larger than one machine: the same lengths from `map` of datasets and `map_batches` of Ray Data."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb_tools
from tests.tools.command import trainers
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.documents import read_documents, wanted
from wlb_tools.command.output.console import progress

pa = pytest.importorskip("pyarrow")
pytest.importorskip("transformers")

ROWS = [
    {"messages": [{"role": "user", "content": "the fox " * n}, {"role": "assistant", "content": "jumps"}]}
    for n in range(1, 41)
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """A file, a tokenizer, and the lengths that `wlb lengths` counts."""
    folder = tmp_path_factory.mktemp("corpus")
    trainers.save_tokenizer(folder / "tokenizer")
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path, folder / "tokenizer", read(path, tokenizer=folder / "tokenizer")


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


def test_map_of_datasets_with_processes(corpus: tuple[Path, Path, list[int]], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    path, tokenizer, expected = corpus
    rows = datasets.load_dataset("json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    lengths = wlb_tools.RowLengths(tokenizer)
    made = rows.map(lengths, batched=True, batch_size=7, num_proc=2, remove_columns=rows.column_names)
    made.to_parquet(tmp_path / "lengths.parquet")
    assert read(tmp_path / "lengths.parquet") == expected


def test_map_batches_of_ray_data(corpus: tuple[Path, Path, list[int]], tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    path, tokenizer, expected = corpus
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().execution_options.preserve_order = True
        rows = ray.data.read_json(str(path), lines=True)
        made = rows.map_batches(wlb_tools.RowLengths(tokenizer), batch_format="pyarrow", batch_size=7)
        made.write_parquet(str(tmp_path / "lengths"))
    finally:
        ray.shutdown()
    assert read(tmp_path / "lengths") == expected


def test_loaders_read_the_column(corpus: tuple[Path, Path, list[int]], tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import pyarrow.parquet as pq

    import wlb
    import wlb.torch as wt

    _, tokenizer, expected = corpus
    table = wlb_tools.RowLengths(tokenizer)(pa.Table.from_pylist(ROWS))
    pq.write_table(table, tmp_path / "lengths.parquet")
    lengths = pq.read_table(tmp_path / "lengths.parquet")["length"].to_numpy()
    packer = wlb.Packer(
        num_micro_batches=2, max_tokens=512, cost_model=wlb.CostModel(attention=1.0, linear=1.0), release="fifo"
    )
    sampler = wt.BalancedBatchSampler(lengths, packer=packer, dp_rank=0, dp_size=1)
    drawn = {piece for batch in sampler for piece in batch}
    assert drawn == {*range(len(expected))}
    assert np.array_equal(lengths, expected)
