"""Loaders of documents that bring their costs: a packer's plans that is told them, on any ranks, also resumed."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from tests.torch import processes

RNG = np.random.default_rng(3)
LENGTHS = np.minimum(8 + RNG.pareto(1.2, 300) * 20, 300).astype(int)
COSTS = np.stack(
    [np.where(RNG.random(300) < 0.4, RNG.uniform(1, 40, 300), 0.0), LENGTHS * RNG.uniform(1, 2, 300)], axis=1
)


def packer(columns: int | None = 2, **options: Any) -> wlb.Packer:
    shape = {"num_micro_batches": 4, "max_tokens": 300, "max_document_tokens": 128, "oversize": "split"}
    priced = {"cost_columns": columns} if columns else {"cost_model": wlb.CostModel(attention=1.0, linear=1.0)}
    return wlb.Packer(**(shape | priced | {"outlier_thresholds": (64,), "max_delay": 4} | options))


def sampler(
    dp_rank: int = 0, dp_size: int = 1, costs: Any = COSTS, of: wlb.Packer | None = None, **options: Any
) -> Any:
    of = of or packer()
    return wt.BalancedBatchSampler(LENGTHS, packer=of, dp_rank=dp_rank, dp_size=dp_size, costs=costs, **options)


def steps(of: Any) -> list[Any]:
    dataset = [np.arange(length) for length in LENGTHS.tolist()]
    return list(wt.StepLoader(DataLoader(wt.Documents(dataset), batch_sampler=of, collate_fn=wt.collate)))


def test_a_sampler_trains_all_costs() -> None:
    trained = np.zeros(2)
    for step in steps(sampler()):
        trained += step.packing.column_costs.sum(axis=0)
        documents = [
            COSTS[part.document_ids % 300] * (part.lengths / LENGTHS[part.document_ids % 300])[:, None]
            for part in step.packing
        ]
        np.testing.assert_allclose(step.packing.column_costs, [rows.sum(axis=0) for rows in documents])
    np.testing.assert_allclose(trained, COSTS.sum(axis=0))


def test_ranks_functions_and_resumed_runs_plan_alike(tmp_path: Path) -> None:
    plans = [step.packing.digest() for step in steps(sampler())]
    asked: list[int] = []

    def cost(document: int) -> Any:
        asked.append(document)
        return COSTS[document].tolist()

    assert [step.packing.digest() for step in steps(sampler(costs=cost))] == plans
    assert set(asked) == set(range(300))
    assert [step.packing.digest() for step in steps(sampler(dp_rank=1, dp_size=2))] == plans
    np.save(tmp_path / "costs.npy", COSTS)
    mapped = np.load(tmp_path / "costs.npy", mmap_mode="r")
    for _ in range(2):  # the second time by what is kept beside the file
        assert [step.packing.digest() for step in steps(sampler(costs=mapped))] == plans
    for at in (0, 5):
        state = json.loads(json.dumps(steps(sampler())[at].state))
        resumed = sampler(dp_size=2)
        resumed.load_state_dict(state)
        assert [step.packing.digest() for step in steps(resumed)] == plans[at + 1 :]


def test_other_costs_than_the_saved_are_refused() -> None:
    state = steps(sampler())[3].state
    other = sampler(costs=COSTS * 2)
    with pytest.raises(wlb.WlbError, match="was saved with costs = "):
        other.load_state_dict(state)
    other.load_state_dict(state, allow_config_change=True)
    by_length = sampler(costs=None, of=packer(None))
    with pytest.raises(wlb.WlbError, match="limits: saved"):
        by_length.load_state_dict(state)
    with pytest.raises(wlb.WlbError, match="'costs'"):
        sampler().load_state_dict(steps(by_length)[3].state)


def test_truncated_documents_cost_the_share_of_what_is_kept() -> None:
    plan = steps(sampler(of=packer(oversize="truncate")))
    kept = COSTS * (np.minimum(LENGTHS, 128) / LENGTHS)[:, None]
    np.testing.assert_allclose(sum(step.packing.column_costs.sum(axis=0) for step in plan), kept.sum(axis=0))


@pytest.mark.parametrize(
    ("costs", "of", "message"),
    [
        (None, packer(), "costs are missing: the packer was made with cost_columns=2"),
        (COSTS, packer(None), "costs have no meaning for a packer with a cost model"),
        (COSTS[:, 0], packer(), r"costs is float64 of shape \(300,\), not numbers \[300, 2\]"),
        (np.where(np.arange(300) == 7, -1.0, 1.0), packer(1), r"costs\[7\] has -1.0 in column 0: must be finite"),
        (np.where(np.arange(300) == 7, np.nan, 1.0), packer(1), r"costs\[7\] has nan in column 0: must be finite"),
        (COSTS * [0, 1], packer(), "costs has nothing but 0 in column 0: leave"),
        (COSTS, packer(limits=[20.0, np.inf]), "exceeds the limit 20 of its column"),
    ],
)
def test_costs_that_make_no_sense_are_named(costs: Any, of: wlb.Packer, message: str) -> None:
    with pytest.raises(wlb.WlbError, match=message):
        sampler(costs=costs, of=of)


def test_a_function_that_gives_no_costs_is_named() -> None:
    with pytest.raises(wlb.WlbError, match=r"costs\[\d+\] are 3 numbers for a document"):
        steps(sampler(costs=lambda document: [1.0, 2.0, 3.0]))
    with pytest.raises(wlb.WlbError, match="must be finite numbers"):
        steps(sampler(costs=lambda document: [1.0, -2.0]))
    for wrong in ("12", True, None, [[1.0], [2.0, 3.0]]):
        with pytest.raises(wlb.WlbError, match=r"costs\[\d+\] are .*: no numbers"):
            steps(sampler(costs=lambda document, wrong=wrong: wrong))
    with pytest.raises(wlb.WlbError, match="costs are rows of several lengths"):
        sampler(costs=[[1.0, 2.0], [3.0]])


def test_what_the_packer_refuses_is_named_by_its_document() -> None:
    of = packer(1, cost_columns=2, limits=[np.inf, 10.0])
    with pytest.raises(wlb.WlbError, match=r"costs\[137\] has 10\d*\.\d+ in column 1: exceeds the limit") as caught:
        steps(sampler(costs=lambda document: [1.0, 1e5 if document == 137 else 1.0], of=of))
    assert caught.value.index == 137
    of = packer(oversize="error", max_document_tokens=299)
    with pytest.raises(wlb.WlbError, match=rf"lengths\[{LENGTHS.argmax()}\] = 300 .*max_document_tokens = 299"):
        list(stream(of=of))


def test_one_file_may_be_lengths_and_costs(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", LENGTHS)
    lengths = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    for _ in range(2):  # the second time by what is kept beside the file
        of = wt.BalancedBatchSampler(lengths, packer=packer(1), dp_rank=0, dp_size=1, costs=lengths)
        assert [step.packing.digest() for step in steps(of)] == [
            step.packing.digest() for step in steps(sampler(costs=LENGTHS, of=packer(1)))
        ]


# --- streams ---------------------------------------------------------------------------------------------------------

ROWS = [{"input_ids": np.full(length, 7), "number": number} for number, length in enumerate(LENGTHS.tolist())]
STREAMS = [ROWS[:120], ROWS[120:150], ROWS[150:]]


def cost(row: Any) -> Any:
    return COSTS[row["number"]]


def stream(costs: Any = cost, of: wlb.Packer | None = None) -> wt.BalancedStream[wt.PackedBatch]:
    group = dist.group.WORLD if dist.is_initialized() else None
    return wt.BalancedStream(STREAMS, packer=of or packer(), collate_fn=wt.collate, group=group, costs=costs)


def read(_rank: int, state: Any, oversize: Any) -> list[tuple[str, Any, Any]]:
    of = stream(of=packer(oversize=oversize))
    if state is not None:
        of.load_state_dict(state)
    found = [
        (step.packing.digest(), step.packing.column_costs.tolist(), json.loads(json.dumps(step.state))) for step in of
    ]
    of.close()
    return found


@pytest.mark.parametrize("oversize", ["split", "truncate"])
def test_ranks_of_a_stream_know_the_costs_of_all(oversize: Any) -> None:
    alone = read(0, None, oversize)
    kept = np.minimum(LENGTHS, 128) / LENGTHS if oversize == "truncate" else np.ones(300)
    np.testing.assert_allclose(
        np.sum([np.sum(costs, axis=0) for _, costs, _ in alone], axis=0), (COSTS * kept[:, None]).sum(axis=0)
    )
    for of_rank in processes.run(2, read, None, oversize):
        assert of_rank == alone
    # Resumed in its middle, on other ranks: the same plans and states. Best where documents wait outside the packer.
    waits = [number for number, (*_, state) in enumerate(alone) if state["outside"]["ids"]]
    waits += [number for number, (*_, state) in enumerate(alone) if state["waiting"]]
    at = waits[0]
    assert any("costs" in document for document in alone[at][2]["waiting"])
    for of_rank in processes.run(2, read, alone[at][2], oversize):
        assert of_rank == alone[at + 1 :]


def fails(rank: int) -> str:
    def wrong(row: Any) -> Any:
        return [1.0] if row["number"] == 125 else cost(row)

    of = stream(wrong)
    with pytest.raises(wlb.WlbError) as caught:
        list(of)
    of.close()
    return str(caught.value)


def test_a_document_without_its_costs_is_named_on_all_ranks() -> None:
    for message in processes.run(2, fails):
        assert "streams[1].costs[5] are 1 numbers" in message, message
    with pytest.raises(wlb.WlbError, match="are missing"):
        stream(None)
    with pytest.raises(wlb.WlbError, match="not a function"):
        stream(COSTS)
