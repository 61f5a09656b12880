"""Dynamic-CP plans from Python: what a plan says of itself, what each argument asks for, clear errors.

That plans are legal, and how long they take: `rust/wlb-core/tests/dynamic_cp.rs` and the goldens.
"""

import json
import pickle
from typing import Any

import numpy as np
import pytest

import wlb
from tests.oracles.dynamic_cp import expanded, violations

COST = wlb.CostModel(attention=1.0, linear=3000.0)
LENGTHS = [700, 30, 45, 12, 3000, 90, 90, 60, 900, 15, 15, 400]
MACHINE: dict[str, Any] = {"world_size": 8, "num_stages": 3, "max_tokens_per_rank": 512}
NODE = {"ranks_per_node": 4}


def test_the_faces_of_a_plan_agree() -> None:
    plan = wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, exchange=wlb.Exchange(seconds_per_token=3000.0), **MACHINE)
    m = len(plan)
    assert {1, 2, 8} <= set(plan.cp_sizes.flat)
    assert m == plan.num_micro_batches == len(plan.micro_batches) >= 3
    assert (plan.world_size, plan.num_stages, plan.num_virtual_stages, plan.max_tokens_per_rank) == (8, 3, 1, 512)
    assert plan.cp_sizes.shape == plan.tokens_per_rank.shape == plan.rank_seconds.shape == (m, 8)
    dtypes = [table.dtype for table in (plan.cp_sizes, plan.tokens_per_rank, plan.rank_seconds)]
    assert dtypes == [np.int32, np.int64, np.float64]
    for j, batch in enumerate(plan):
        assert batch == plan[j] == plan[j - m]
        assert batch.tokens == sum(group.tokens for group in batch)
        assert batch.seconds == plan.rank_seconds[j].max()
        for rank in range(8):
            group = batch.group_of(rank)
            assert rank in group.ranks
            assert group in batch.groups
            assert len(group) == group.cp_size == plan.cp_sizes[j, rank]
            assert group.tokens_per_rank == plan.tokens_per_rank[j, rank]
            assert group.seconds == plan.rank_seconds[j, rank]
            shard = wlb.shard(group.lengths, cp_size=group.cp_size, strategy="per_document")
            assert max(shard.tokens_per_rank) == group.tokens_per_rank
    counts = [count for count, _ in plan.sweep]
    assert counts == sorted(counts)
    assert m in counts
    assert "DynamicCpPlan(" in repr(plan)
    assert "DynamicMicroBatch(" in repr(plan[0])
    assert "CpGroup(" in repr(plan[0][0])
    with pytest.raises(IndexError):
        plan[m]
    with pytest.raises(IndexError):
        plan[0][99]
    with pytest.raises(wlb.WlbError, match="rank = 8"):
        plan[0].group_of(8)


@pytest.mark.parametrize("seed", range(60))
def test_the_tables_of_a_plan_are_those_of_its_groups(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes: dict[str, Any] = [{}, {"multiple_of_tokens": 16}, {"token_buckets": (64, 192, 512)}][seed % 3]
    machine: dict[str, Any] = {"world_size": int(rng.integers(1, 20)), "num_stages": int(rng.integers(1, 4))}
    lengths = rng.integers(1, 512, int(rng.integers(1, 40)))
    plan = wlb.plan_dynamic_cp(
        lengths,
        cost_model=COST,
        max_tokens_per_rank=512,
        group_sizes=["powers_of_two", "any"][seed % 2],
        **machine,
        **sizes,
    )
    for name, expected in expanded(plan).items():
        found = getattr(plan, name)
        np.testing.assert_array_equal(found, expected, err_msg=name)
        assert getattr(found, "dtype", int) == getattr(expected, "dtype", int), name
    assert plan.padding_tokens == sum(group.padding_tokens for batch in plan for group in batch)


@pytest.mark.parametrize("change", ["documents", "groups", "schedule", "group_offsets"])
def test_a_pickle_that_was_changed_is_refused(change: str) -> None:
    make, (text,) = wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, **MACHINE).__reduce__()
    held = json.loads(text)
    assert make(text) == make(json.dumps(held))
    held[change] = {"schedule": "2f2b"}.get(change, held[change][:-1])
    with pytest.raises(wlb.StateError):
        make(json.dumps(held))


def test_plans_are_plain_data() -> None:
    plan = wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, **MACHINE)
    other = wlb.plan_dynamic_cp([*LENGTHS[:-1], 401], cost_model=COST, **MACHINE)
    assert plan != other
    assert plan.digest() != other.digest()
    for item in (plan, plan[1], plan[1][0]):
        copy = pickle.loads(pickle.dumps(item))
        assert copy == item
        assert hash(copy) == hash(item)
    assert pickle.loads(pickle.dumps(plan)).digest() == plan.digest()


def test_groups_stay_inside_a_node_where_exchange_is_free() -> None:
    machine: dict[str, Any] = {"world_size": 12, "num_stages": 1, "max_tokens_per_rank": 4096}
    lengths = [9000, 5000, 4000, 3000, 2500, 2000, *[300] * 30]
    options: dict[str, Any] = {"cost_model": COST, "exchange": wlb.Exchange(seconds_per_token=3000.0, overlap=0.0)}
    for sizes in ("powers_of_two", "any"):
        flat = wlb.plan_dynamic_cp(lengths, group_sizes=sizes, **options, **machine)
        plan = wlb.plan_dynamic_cp(lengths, group_sizes=sizes, ranks_per_node=4, **options, **machine)
        assert violations(plan, lengths, group_sizes=sizes) == []
        assert plan.seconds < 0.9 * flat.seconds
        groups = [group for batch in plan for group in batch]
        assert all(group.first_rank // 4 == (group.first_rank + group.cp_size - 1) // 4 for group in groups)


@pytest.mark.parametrize("sizes", [{"multiple_of_tokens": 128}, {"token_buckets": (256, 512)}, {"max_documents": 3}])
def test_shapes_are_those_of_the_plan(sizes: dict[str, Any]) -> None:
    plan = wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, **sizes, **MACHINE)
    assert violations(plan, LENGTHS) == []
    assert {name: getattr(plan, name) for name in sizes} == sizes
    padded = plan.padded_tokens_per_rank
    assert padded.dtype == np.int64
    assert padded.shape == plan.tokens_per_rank.shape
    assert plan.padding_tokens == sum(group.padding_tokens for batch in plan for group in batch)
    if "max_documents" in sizes:
        np.testing.assert_array_equal(padded, plan.tokens_per_rank)
        assert {group.padding_tokens for batch in plan for group in batch} == {0}
    else:
        assert set(padded.ravel().tolist()) <= set(sizes.get("token_buckets") or range(0, 513, 128))
        assert sum(group.padding_tokens for batch in plan for group in batch) == padded.sum() - sum(LENGTHS)
    plain = wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, **MACHINE)
    assert plan.digest() != plain.digest(), "ranks with other shapes must not agree"
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(("schedule", "stages", "parts"), [("1f1b", 3, 1), ("interleaved_1f1b", 2, 2), ("zbv", 2, 2)])
def test_a_step_is_told_anew_for_other_times(schedule: Any, stages: int, parts: int) -> None:
    pipeline: dict[str, Any] = {"schedule": schedule, "num_stages": stages, "num_virtual_stages": parts}
    plan = wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, p2p_seconds=40.0, **{**MACHINE, **pipeline})
    seconds = np.array([group.seconds for batch in plan for group in batch])
    assert (plan.schedule, plan.p2p_seconds) == (schedule, 40)
    assert plan.step_seconds(seconds) == plan.seconds
    seconds[0] *= 3
    assert plan.step_seconds(seconds) >= plan.seconds
    with pytest.raises(wlb.WlbError, match=r"group_seconds: has 1 entries, but the plan has \d+ groups"):
        plan.step_seconds([1.0])
    seconds[2] = np.nan
    with pytest.raises(wlb.WlbError, match=r"group_seconds\[2\] = NaN: must be finite and not negative"):
        plan.step_seconds(seconds)


def test_documents_bring_their_own_costs() -> None:
    """A costly short document gets many ranks."""
    costs = np.where(np.arange(12) == 1, 100.0, 1.0)
    plan = wlb.plan_dynamic_cp(LENGTHS, costs=costs, **{**MACHINE, "num_stages": 1})
    sizes = {int(i): group.cp_size for batch in plan for group in batch for i in group.document_ids}
    assert sizes[1] == 8
    same = wlb.plan_dynamic_cp(LENGTHS, costs=COST.cost(LENGTHS), **MACHINE)
    assert same.digest() == wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, **MACHINE).digest()


def test_where_ranks_wait_is_part_of_a_plan() -> None:
    machine = {"costs": [3.0, 7.0], "world_size": 2, "num_stages": 2, "max_tokens_per_rank": 100}
    once, always = (wlb.plan_dynamic_cp([5, 6], sync=sync, **machine) for sync in ("step", "micro_batch"))
    assert once != always
    assert once.digest() != always.digest()


def test_costs_of_next_to_nothing_are_planned() -> None:
    costs = np.array([1.0, 2.0, 3.0]) * 1e-308
    machine: dict[str, Any] = {"world_size": 2, "num_stages": 2, "max_tokens_per_rank": 100}
    paid = wlb.Exchange(seconds_per_token=1.0, overlap=0.0)
    plan = wlb.plan_dynamic_cp([5, 10, 20], costs=costs, exchange=paid, **machine)
    assert violations(plan, [5, 10, 20]) == []


def test_a_step_of_other_seconds_is_simulated() -> None:
    plan = wlb.plan_dynamic_cp(LENGTHS, cost_model=COST, **MACHINE)
    seconds = np.array([group.seconds for batch in plan for group in batch])
    assert plan.step_seconds(seconds) == plan.seconds
    assert plan.step_seconds(2 * seconds) == pytest.approx(2 * plan.seconds)
    for wrong, problem in (
        (np.stack([seconds, seconds], axis=1), "must be 1-dimensional"),
        (seconds[1:], "entries, but the plan has"),
        (np.where(np.arange(seconds.size) == 1, np.nan, seconds), r"group_seconds\[1\] = NaN: must be finite"),
    ):
        with pytest.raises(wlb.WlbError, match=problem):
            plan.step_seconds(wrong)


def test_numbers_of_micro_batches_that_do_not_fit_are_tried_once() -> None:
    # Of interleaved pipelines, between two numbers that fit, one may not.
    lengths = [1, 82, 90, 20, 42, 28, 1, 66, 1, 27, 40, 40, 194, 23, 101, 1, 137, 1, 136]
    attention = [0.41, 0, 0, 0, 0, 0.83, 2.58, 1.17, 0.3, 0, 0, 0.9, 0.46, 0, 0, 2.3, 0, 0, 1.6]
    linear = [0.41, 0, 0, 0, 0, 0.83, 0, 0, 0.3, 0.88, 0, 0, 0.46, 1.28, 0, 0, 0, 0.81, 0]
    plan = wlb.plan_dynamic_cp(
        lengths,
        costs=np.add(attention, linear),
        attention_costs=attention,
        world_size=4,
        num_stages=2,
        num_virtual_stages=2,
        max_tokens_per_rank=200,
        exchange=wlb.Exchange(seconds_per_token=1.0, overlap=0.5),
    )
    ids = [number for micro_batch in plan for group in micro_batch for number in group.document_ids.tolist()]
    assert sorted(ids) == list(range(19))


@pytest.mark.parametrize(
    ("sizes", "limit"),
    [
        ({}, "max_tokens_per_rank on the largest group = 600"),
        ({"multiple_of_tokens": 100}, "max_tokens_per_rank on the largest group = 600"),
        (
            {"token_buckets": [256, 512]},
            "512 tokens on the largest group: 2 ranks of 256 tokens, the largest of token_buckets within "
            "max_tokens_per_rank = 300",
        ),
        (
            {"multiple_of_tokens": 128},
            "512 tokens on the largest group: 2 ranks of 256 tokens, the largest multiple of multiple_of_tokens = 128 "
            "within max_tokens_per_rank = 300",
        ),
    ],
    ids=str,
)
def test_a_document_is_too_long_for_what_was_given(sizes: dict[str, Any], limit: str) -> None:
    arguments: dict[str, Any] = {"world_size": 2, "num_stages": 1, "max_tokens_per_rank": 300, "cost_model": COST}
    with pytest.raises(wlb.WlbError) as caught:
        wlb.plan_dynamic_cp([10, 601, 700], **arguments, **sizes)
    assert str(caught.value).startswith(
        f"lengths[1] = 601 exceeds {limit}; split it first (split_documents), or raise "
    )
    assert (caught.value.argument, caught.value.index, caught.value.value) == ("lengths", 1, 601)
