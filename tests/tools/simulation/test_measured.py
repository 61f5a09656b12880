"""A plan priced by measured seconds: the same step as predicted where they are the predicted ones, rank by rank."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb
import wlb_tools
from tests.tools.simulation.test_simulate import LAYOUTS, documents, scenario
from wlb_tools.cluster import Overhead
from wlb_tools.simulation import Outcome, Scenario, simulate
from wlb_tools.simulation.dynamic import DynamicOutcome, score_dynamic
from wlb_tools.simulation.planner import of_size

METHODS = ("original", "whole", "fixed_length", "adaptive_cp", "wlb", "dynamic_cp")


def compute(outcome: Outcome, case: Scenario) -> NDArray[np.float64]:
    """float64 [parts, stages, 3]: what the simulation expects of every part, communication aside."""
    found = []
    for part in outcome.parts():
        forward, backward = (case.rank_seconds(part.shard, passes=passes) for passes in ("forward", "backward"))
        made = case.stage_seconds(
            [part.shard.tokens_per_rank.max()],
            attention_forward=forward[part.rank][None],
            attention_backward=backward[part.rank][None],
            layout=of_size(case.layout, part.cp_size),
        )
        found.append((made.seconds - made.exposed_cp - made.exposed_tp)[0])
    return np.array(found)


@pytest.mark.parametrize("layout", [LAYOUTS[1], wlb_tools.ParallelLayout(dp=2, pp=4, cp=2)], ids=repr)
def test_what_is_predicted_as_if_it_had_been_measured(layout: wlb_tools.ParallelLayout) -> None:
    case = scenario(layout)
    for name, outcome in simulate(documents(150), case, variants=METHODS).outcomes.items():
        measured = outcome.at_measured(compute(outcome, case))
        np.testing.assert_allclose(measured.seconds, outcome.seconds, rtol=1e-9, err_msg=name)
        np.testing.assert_allclose(measured.work, outcome.work, rtol=1e-9)
        for part, of in measured.attribution.items():
            np.testing.assert_allclose(of, outcome.attribution[part], rtol=1e-6, atol=1e-9 * outcome.total_seconds)


@pytest.mark.parametrize("name", METHODS)
def test_every_rank_runs_its_parts_in_the_order_of_the_plan(name: str) -> None:
    outcome = simulate(documents(150), scenario(LAYOUTS[1]), variants=[name]).outcomes[name]
    parts = list(outcome.parts())
    seen = []
    for step in range(len(outcome.run.digests)):
        placement = outcome.placement(step)
        assert placement.shape[0] == 4  # dp * cp
        assert {parts[index].step for index in placement.ravel()} == {step}
        for column in placement.T:
            ranks = [parts[index] for index in column]
            for rank, part in enumerate(ranks):
                first = part.first_rank if part.first_rank is not None else rank // 2 * 2
                assert first + part.rank == rank
                together = ranks[first : first + part.cp_size]
                assert all(other.pieces == part.pieces for other in together)
                assert part.shard.cp_size == part.cp_size
                np.testing.assert_array_equal(part.shard.lengths, outcome.run.length[part.pieces])
        seen.extend(placement.ravel().tolist())
    assert sorted(seen) == list(range(len(parts)))


def test_a_slow_rank_holds_up_its_group_alone() -> None:
    outcome = simulate(documents(60), scenario(LAYOUTS[1]), variants=["original"]).outcomes["original"]
    parts = list(outcome.parts())
    even = np.ones((len(parts), 2, 3))
    slow = even.copy()
    slow[0] *= 5
    before, after = (outcome.at_measured(seconds) for seconds in (even, slow))
    assert after.seconds[0] > before.seconds[0]
    np.testing.assert_array_equal(after.seconds[1:], before.seconds[1:])
    assert after.attribution["cp_wait"][0] > before.attribution["cp_wait"][0] == 0.0


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=repr)
def test_whole_documents_as_they_arrive(layout: wlb_tools.ParallelLayout) -> None:
    lengths, case = documents(200), scenario(layout)
    run = simulate(lengths, case, variants=["whole"]).outcomes["whole"].run
    assert (run.start == 0).all()
    np.testing.assert_array_equal(run.document, np.arange(lengths.size))
    np.testing.assert_array_equal(run.length, lengths)
    assert run.delay_mean == 0
    batches = list(run.micro_batch_lengths())
    expected: list[list[int]] = []
    room = 0
    for length in lengths.tolist():  # one by one
        if length > room:
            expected.append([])
            room = case.context
        expected[-1].append(length)
        room -= length
    assert [batch.tolist() for batch in batches if batch.size] == expected
    width = case.micro_batches
    assert len(run.digests) == -(-len(expected) // width)
    assert run.streamed == len(expected) // width


def gives(shard: wlb.Shard, rank: int) -> bool:
    """Whether another rank sees a key of this one: it has a later token of the same document."""
    first, last = [np.full(shard.lengths.size, end) for end in (shard.num_tokens, -1)]
    held = shard.rank(rank)
    np.minimum.at(first, np.repeat(held.documents, np.diff(held.cu_seqlens_q)), held.position_ids)
    for other in set(range(shard.cp_size)) - {rank}:
        theirs = shard.rank(other)
        np.maximum.at(last, np.repeat(theirs.documents, np.diff(theirs.cu_seqlens_q)), theirs.position_ids)
    return bool((first < last).any())


def copies_beside(shard: wlb.Shard, case: Scenario, copies: Any) -> float:
    """How much longer a micro-batch takes that copies, in all layers and on its slowest rank; segment by segment."""
    more = 0.0
    for passes, (of_token, of_key) in zip(("forward", "backward"), copies, strict=True):
        attention = case.rank_seconds(shard, passes=passes)[:, 0]
        copying = np.zeros(shard.cp_size)
        for rank in range(shard.cp_size):
            held = shard.rank(rank)
            queries, keys = np.diff(held.cu_seqlens_q), np.diff(held.cu_seqlens_k)
            # A document is apart if some of what its last segment sees is on another rank.
            whole = [queries[held.documents == of].sum() == keys[held.documents == of].max() for of in held.documents]
            apart = ~np.array(whole, bool)
            own = int(queries[~apart].sum())
            if own and 8 * own < queries.sum():  # so few tokens are not worth a call of their own
                apart = apart | apart.any()
            copying[rank] = of_key * keys[apart].sum()
            if apart.any() or gives(shard, rank):
                copying[rank] += of_token * queries.sum()
        more += (attention + copying).max() - attention.max()
    return case.model.num_layers * float(more)


def test_what_a_trainer_takes_beside_by_hand() -> None:
    """On two ranks of a group and without a pipeline, every pass and every step last so much longer."""
    layout, copies = wlb_tools.ParallelLayout(cp=2), ((0.25, 0.125), (0.5, 0.0625))
    overhead = Overhead(forward=((0.5, 0.25),), backward=((2.0, 1.0),), copies=copies, gather=3.0, step=7.0)
    cases = [scenario(layout, num_micro_batches=3, overhead=of) for of in (Overhead(), overhead)]
    lengths = documents(120)
    before, after = (simulate(lengths, case, variants=("original",)).baseline for case in cases)
    tokens = np.bincount(after.run.step, weights=after.run.length)
    slots = np.unique(np.stack([after.run.step, after.run.micro_batch]), axis=1)[0]  # the last step has an empty one
    more = 3 * 2.5 + 2 * 3.0 * np.bincount(slots) + 1.25 * tokens / 2 + 7.0
    shards = {part.pieces.start: (part.step, part.shard) for part in after.parts() if part.shard.num_tokens}
    for step, made in shards.values():
        more[step] += copies_beside(made, cases[0], copies)
    np.testing.assert_allclose(after.seconds - before.seconds, more, rtol=1e-3)
    planned = simulate(lengths, cases[1], variants=("dynamic_cp",)).baseline
    np.testing.assert_allclose(sum(planned.attribution.values()), planned.seconds, rtol=1e-12)
    assert (planned.seconds > 7.0 + 2.5).all()
    alone = overhead.passes([100], gathers=[False])
    assert alone.tolist() == [[[25.5, 102.0, 0.0]]]  # whose keys nobody gathers
    assert overhead.passes([100], gathers=[True]).tolist() == [[[28.5, 105.0, 0.0]]]
    assert overhead.copying([[8, 0], [0, 16]]).tolist() == [[2.0, 2.0], [4.0, 1.0]]
    with pytest.raises(wlb.WlbError, match="is of 1 stages: the layout has pp x virtual_stages = 2"):
        scenario(wlb_tools.ParallelLayout(pp=2), overhead=overhead)
    with pytest.raises(wlb.WlbError, match="forward 1"):
        Overhead(forward=((0.0, 0.0),))
    with pytest.raises(wlb.WlbError, match="must be finite"):
        Overhead(step=float("nan"))
    with pytest.raises(wlb.WlbError, match=r"copies.*must be finite"):
        Overhead(copies=((0.0, float("inf")), (0.0, 0.0)))
    with pytest.raises(wlb.WlbError, match="a part of passes, and forward has none"):
        Overhead(gather=1.0)


def test_groups_that_a_plan_chose_wait_for_the_rank_that_copies_most() -> None:
    layout, copies = wlb_tools.ParallelLayout(cp=4), ((0.25, 0.125), (0.5, 0.0625))
    case, overhead = scenario(layout), Overhead(copies=copies)
    planned = simulate(documents(120), case, variants=("dynamic_cp",)).outcomes["dynamic_cp"]
    assert isinstance(planned, DynamicOutcome)
    slowest, _ = planned.priced.attention.of_groups()
    with_copies, mean = planned.priced.attention.of_groups(overhead)
    groups = [part for part in planned.parts() if part.rank == 0]
    more = ((with_copies - slowest)[:, :, 0]).sum(axis=1) * case.model.num_layers
    expected = [copies_beside(part.shard, case, copies) for part in groups]
    np.testing.assert_allclose(more, expected, rtol=1e-9, atol=1e-12)
    assert {part.cp_size > 1 for part in groups} == {seconds > 0 for seconds in expected}
    assert (mean <= with_copies).all()
    # A step is longer by what its groups of several ranks copy, and no longer where all are of one.
    beside = score_dynamic(planned.title, planned.run, scenario(layout, overhead=overhead), planned.priced.attention)
    longer = beside.seconds - planned.seconds
    several = {part.step for part in groups if part.cp_size > 1 and part.shard.num_tokens}
    assert [seconds > 1e-9 for seconds in longer] == [step in several for step in range(longer.size)]
