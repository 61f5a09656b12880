"""What the naive oracles of the core wrote down (`rust/wlb-core/tests/golden`), through the bindings.

Arguments of every kind, their defaults, the order of what comes back: every function of the engine is held here to
answers that it did not give itself.
"""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
from tests.plain import pieces_of, plain, plain_rank

# Pushes of anything, whatever waits: the bounds are tested in test_admission.py.
pytestmark = pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")

HERE = Path(__file__).parents[1] / "golden"
PASSES: list[Any] = ["forward", "backward", "forward_backward"]
ROUNDING: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-11}
"""Of the latency of a rank: a sum in another order, of segments rounded to 57 fs each."""


def each(name: str) -> pytest.MarkDecorator:
    cases: list[dict[str, Any]] = json.loads((HERE / f"{name}.json").read_text())
    return pytest.mark.parametrize("case", cases, ids=range(len(cases)))


def cost_model(cost: dict[str, Any]) -> wlb.CostModel:
    if "lengths" in cost:
        return wlb.CostModel.from_tables(**cost)
    local = {name: dict(cost[name]) for name in ("windows", "chunks") if name in cost}
    return wlb.CostModel(**cost | local)


@each("pack")
def test_pack(case: dict[str, Any]) -> None:
    plan, cost = case.pop("plan"), cost_model(case.pop("cost"))
    case["global_batches"] = case.pop("window")
    packing = wlb.pack(**case, leftover="return", cost_model=cost)
    assert plain(packing) == plan
    assert (
        plain(wlb.pack(**case | {"lengths": np.array(case["lengths"], np.int32)}, leftover="return", cost_model=cost))
        == plan
    )
    assert (packing.method, packing.global_batches, packing.max_tokens) == (
        case["method"],
        case["global_batches"],
        case["max_tokens"],
    )
    copy = pickle.loads(pickle.dumps(packing))
    assert (copy, copy.digest(), plain(copy)) == (packing, packing.digest(), plan)
    assert [pickle.loads(pickle.dumps(batch)) for batch in packing] == list(packing)
    if case["method"] not in ("original", "fixed_length"):
        sizes = {name: case[name] for name in ("num_micro_batches", "max_tokens")}
        scored = wlb.Packing.from_assignment(case["lengths"], packing.assignment, **sizes, cost_model=cost)
        assert [pieces_of(batch) for batch in scored] == [pieces_of(batch) for batch in packing]
        np.testing.assert_allclose(scored.costs, packing.costs, rtol=1e-12)
        assert sorted(scored.leftover) == sorted(packing.leftover)


@each("columns")
def test_pack_by_columns(case: dict[str, Any]) -> None:
    plan = case.pop("plan")
    costs = np.reshape(case.pop("costs"), (len(case["lengths"]), len(case["limits"])))
    limits = [np.inf if limit is None else limit for limit in case.pop("limits")]
    packing = wlb.pack(**case, costs=costs, limits=limits, leftover="return")
    assert packing.assignment.tolist() == plan["assignment"]
    assert packing.column_costs.tolist() == plan["column_costs"]
    assert packing.leftover.tolist() == plan["leftover"]
    assert packing.length_fallbacks == plan["length_fallbacks"]


@each("packer")
def test_packer(case: dict[str, Any]) -> None:
    cost = cost_model(case["cost"])
    waiting: dict[str, Any] = {} if "release" in case["settings"] else {"release": "fifo"}

    def check(packer: wlb.Packer, steps: list[dict[str, Any]]) -> None:
        for step in steps:
            least = {name: step[name] for name in ("min_step_tokens",) if name in step}
            assert plain(packer.push(step["lengths"], step["ids"], **least)) == step["plan"]

    packer = wlb.Packer(cost_model=cost, **waiting, **case["settings"])
    check(packer, case["before"])
    state = packer.state_dict()
    assert {name: state[name] for name in case["saved"]} == case["saved"]
    assert packer.queued == tuple(len(queue["ids"]) for queue in case["saved"]["queues"])
    assert packer.carried == len(case["saved"]["carried"]["ids"])

    settings = case["settings"] | {"num_micro_batches": case["num_micro_batches_after"]}
    packer = wlb.Packer(cost_model=cost, **waiting, **settings)
    packer.load_state_dict(state)
    check(packer, case["after"])
    assert [plain(packed) for packed in packer.flush()] == case["flush"]


@each("shard")
def test_shard(case: dict[str, Any]) -> None:
    ranks = case.pop("ranks")
    shard = wlb.shard(**case)
    found = [shard.rank(rank) for rank in range(shard.cp_size)]
    assert [plain_rank(rank) for rank in found] == ranks
    assert (shard.strategy, shard.causal, len(shard)) == (case["strategy"], case["causal"], case["cp_size"])
    assert (shard.lengths.tolist(), shard.num_tokens) == (case["lengths"], sum(case["lengths"]))
    assert shard.tokens_per_rank.tolist() == [rank["num_tokens"] for rank in ranks]
    assert shard.pairs_per_rank.tolist() == [rank["pairs"] for rank in ranks]
    assert shard.keys_moved.tolist() == [fetched(rank) for rank in ranks]
    assert (shard.keys_gathered <= shard.tokens_per_rank).all()
    arrays = [value for rank in found for value in (getattr(rank, name) for name in ranks[0])]
    assert {value.dtype for value in arrays if isinstance(value, np.ndarray)} == {np.dtype(np.int32)}
    copy = pickle.loads(pickle.dumps(shard))
    assert (copy, copy.strategy, copy.digest()) == (shard, shard.strategy, shard.digest())
    assert [plain_rank(copy.rank(rank)) for rank in range(shard.cp_size)] == ranks
    rank_major = np.concatenate([shard.rank(rank).token_indices for rank in range(shard.cp_size)])
    assert rank_major[shard.restore_indices].tolist() == list(range(shard.num_tokens))
    if case["strategy"] == "auto" and "max_imbalance" not in case:
        assert wlb.shard(case["lengths"], cp_size=case["cp_size"], causal=case["causal"]) == shard, "the default"


def fetched(rank: dict[str, Any]) -> int:
    """Keys that a rank's segments see and that it does not hold."""
    seen = zip(rank["k_starts"], np.diff(rank["cu_seqlens_k"]).tolist(), strict=True)
    return len({key for start, count in seen for key in range(start, start + count)} - set(rank["token_indices"]))


@each("kernel")
def test_kernel(case: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(case["profile"]))
    model = wlb.KernelModel.from_profile(path)
    queries, keys = np.transpose(case["segments"])
    for passes in PASSES:
        expected = [seconds[passes] for seconds in case["segment_seconds"]]
        np.testing.assert_allclose(model.segment_seconds(queries, keys, passes=passes), expected, rtol=1e-9)
    both = [seconds["forward_backward"] for seconds in case["segment_seconds"]]
    np.testing.assert_allclose(model.segment_seconds(queries, keys), both, rtol=1e-9)
    for batch in case["micro_batches"]:
        for strategy in ("adaptive", "hybrid"):
            shard = wlb.shard(
                batch["lengths"],
                cp_size=batch["cp_size"],
                strategy=strategy,  # type: ignore[arg-type]
                causal=model.causal,
                kernel_model=model,
            )
            choice = batch[strategy]
            assert (shard.strategy, shard.hybrid_threshold) == (choice["strategy"], choice["hybrid_threshold"])
            np.testing.assert_allclose(model.rank_seconds(shard), choice["rank_seconds"], **ROUNDING)


@each("pipeline")
def test_pipeline(case: dict[str, Any]) -> None:
    ranks, shape, p2p = case.pop("ranks"), case.pop("shape"), case.pop("p2p_seconds")
    arguments = case | {"costs": np.reshape(case["costs"], shape), "p2p_seconds": p2p if len(p2p) > 1 else p2p[0]}
    timeline = wlb.simulate_pipeline(**arguments)
    columns = (timeline.ranks, timeline.kinds, timeline.micro_batches, timeline.stages, timeline.starts, timeline.ends)
    found: list[list[Any]] = [[] for _ in ranks]
    for rank, kind, *op in zip(*(column.tolist() for column in columns), strict=True):
        found[rank].append([timeline.KINDS[kind], *op])
    assert found == [rank["ops"] for rank in ranks]
    assert timeline.peak_activation.tolist() == [rank["peak_activation"] for rank in ranks]
    assert timeline.seconds == max(op[-1] for rank in ranks for op in rank["ops"])


@each("dynamic_cp")
def test_dynamic_cp(case: dict[str, Any]) -> None:
    machine = case["machine"] | {"exchange": wlb.Exchange(**case["machine"].get("exchange", {}))}
    plan = wlb.plan_dynamic_cp(case["lengths"], ids=case["ids"], cost_model=cost_model(case["cost"]), **machine)
    assert plan.seconds == pytest.approx(case["seconds"], rel=1e-9)
    assert [len(batch) for batch in plan] == [len(groups) for groups in case["groups"]]
    for batch, groups in zip(plan, case["groups"], strict=True):
        for group, expected in zip(batch, groups, strict=True):
            assert (group.first_rank, group.cp_size) == (expected["first_rank"], expected["cp_size"])
            assert group.document_ids.tolist() == expected["document_ids"]
            assert group.padded_tokens_per_rank == expected.get("padded_tokens_per_rank", group.tokens_per_rank)
            assert group.seconds == pytest.approx(expected["seconds"], rel=1e-9)
