"""The golden files, which the Rust tests read too: both languages make the same plans of the same input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.generate import golden

import wlb
from oracles import packing, sharding

# Pushes of anything, whatever waits: the bounds are tested in test_admission.py.
pytestmark = pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")

HERE = Path(__file__).parents[1] / "golden"
FILES: dict[str, list[dict[str, Any]]] = {
    name: json.loads((HERE / f"{name}.json").read_text()) for name in ("pack", "packer", "shard")
}


def each(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", FILES[name], ids=range(len(FILES[name])))


def test_the_files_are_what_the_oracles_say() -> None:
    assert golden() == FILES


@each("pack")
def test_pack(case: dict[str, Any]) -> None:
    plan, cost = case.pop("plan"), case.pop("cost")
    assert packing.plain(wlb.pack(**case, leftover="return", cost_model=wlb.CostModel(**cost))) == plan


@each("packer")
def test_packer(case: dict[str, Any]) -> None:
    packer = wlb.Packer(cost_model=wlb.CostModel(**case["cost"]), **case["settings"])
    for step in case["before"]:
        assert packing.plain(packer.push(step["lengths"], step["ids"])) == step["plan"]
    state = packer.state_dict()
    assert {name: state[name] for name in case["saved"]} == case["saved"]

    settings = case["settings"] | {"num_micro_batches": case["num_micro_batches_after"]}
    packer = wlb.Packer(cost_model=wlb.CostModel(**case["cost"]), **settings)
    packer.load_state_dict(state)
    for step in case["after"]:
        assert packing.plain(packer.push(step["lengths"], step["ids"])) == step["plan"]
    assert [packing.plain(packed) for packed in packer.flush()] == case["flush"]


@each("shard")
def test_shard(case: dict[str, Any]) -> None:
    ranks = case.pop("ranks")
    shard = wlb.shard(**case)
    assert [sharding.plain(shard.rank(rank)) for rank in range(shard.cp_size)] == ranks
    rank_major = np.concatenate([shard.rank(rank).token_indices for rank in range(shard.cp_size)])
    assert rank_major[shard.restore_indices].tolist() == list(range(shard.num_tokens))
