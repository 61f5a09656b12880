"""Ranks that meet in every micro-batch (FSDP, ZeRO-3), beside a slow simulation of ranks that wait for each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import wlb
import wlb_tools
from tests.tools.simulation.test_simulate import MODEL, documents, trained
from wlb_tools.cluster.data_parallel import micro_batch_seconds
from wlb_tools.cluster.memory import ranks_of_stages, trained_per_rank, units_of_stages
from wlb_tools.command.output.configuration import configuration
from wlb_tools.simulation import simulate, tune
from wlb_tools.simulation.dynamic import DynamicOutcome
from wlb_tools.simulation.outcome import ATTRIBUTION
from wlb_tools.simulation.static import score, static
from wlb_tools.simulation.tuning import EARLY

H100 = wlb_tools.Hardware.preset("h100")
SLOW = wlb_tools.Link(latency=1e-5, bandwidth=2e9)
"""A link over which gathering a small model's parameters takes as long as a micro-batch does."""


def case(layout: wlb_tools.ParallelLayout, *, per_rank: int = 3, **changes: Any) -> wlb_tools.Scenario:
    options: dict[str, Any] = {"context": 4096, "max_tokens": 6144, "outlier_thresholds": (1500, 3000)}
    options |= {"hardware": H100, "model": MODEL, "num_micro_batches": per_rank * layout.dp}
    return wlb_tools.Scenario(layout=layout, **options | changes)


def one_forward_one_backward(stages: int, rank: int, count: int) -> list[tuple[str, int]]:
    """The ops of a pipeline rank."""
    ahead = min(stages - rank - 1, count)
    ops = [("forward", j) for j in range(ahead)]
    for j in range(count - ahead):
        ops += [("forward", ahead + j), ("backward", j)]
    return ops + [("backward", j) for j in range(count - ahead, count)]


def ranks_that_meet(seconds: NDArray[np.float64], p2p: NDArray[np.float64]) -> float:
    """A step of 1F1B in which all replicas of a stage meet in every op: who comes waits for all, and goes with them.

    Args:
        seconds: [dp, micro-batches, stages, 3] of every op by itself.
        p2p: [dp, micro-batches].
    """
    dp, count, stages, _ = seconds.shape
    ended: dict[tuple[str, int, int, int], float] = {}  # of an op: its kind, stage, replica and micro-batch
    free = np.zeros((stages, dp))
    ahead = [one_forward_one_backward(stages, stage, count) for stage in range(stages)]
    while any(ahead):
        moved = False
        for stage, ops in enumerate(ahead):
            if not ops:
                continue
            kind, j = ops[0]
            before = stage - 1 if kind == "forward" else stage + 1
            ready = []
            for replica in range(dp):
                if not 0 <= before < stages:
                    ready.append(free[stage, replica])
                elif (kind, before, replica, j) in ended:
                    arrived = ended[kind, before, replica, j] + p2p[replica, j]
                    ready.append(max(free[stage, replica], arrived))
            if len(ready) < dp:
                continue
            passes = slice(0, 1) if kind == "forward" else slice(1, 3)
            took = [seconds[replica, j, stage, passes].sum() for replica in range(dp)]
            for replica in range(dp):
                free[stage, replica] = ended[kind, stage, replica, j] = max(ready) + max(took)
            ops.pop(0)
            moved = True
        assert moved, "a deadlock"
    return float(free.max())


def recomputed(outcome: Any, step: int) -> float:
    """Seconds of a step without its end: every micro-batch by itself, through ranks that meet."""
    scenario, run, sharded = outcome.scenario, outcome.run, outcome.sharded
    layout = scenario.layout
    sent = micro_batch_seconds(MODEL, layout, scenario.hardware, sync="micro_batch")
    row = step * run.tokens.shape[1] + run.order[step]
    shape = (*row.shape, layout.num_stages, 3)
    seconds, p2p = np.zeros(shape), np.zeros(row.shape)
    computing = np.zeros(shape)
    for replica, j in np.ndindex(row.shape):
        index = [int(row[replica, j])]
        made = scenario.stage_seconds(
            sharded.tokens[index],
            attention_forward=sharded.forward[index].max(axis=1),
            attention_backward=sharded.backward[index].max(axis=1),
        )
        seconds[replica, j], p2p[replica, j] = made.seconds[0], made.p2p[0]
        computing[replica, j] = (made.seconds - made.exposed)[0]
    p2p[:] = p2p.max(axis=0)
    for j, stage in np.ndindex(row.shape[1], layout.num_stages):
        for first, last in ((0, 1), (1, 3)):
            communication = sent[stage, first:last].sum()
            beside = computing[:, j, stage, first:last].sum(axis=1).max()
            left = max((1 - scenario.dp_overlap) * communication, communication - beside)
            seconds[:, j, stage, first] += left
    return ranks_that_meet(seconds, p2p)


@settings(max_examples=40)
@given(
    st.sampled_from([(2, 1, 1), (3, 1, 2), (2, 2, 1), (2, 3, 2), (4, 4, 1), (1, 2, 2)]),
    st.sampled_from(["none", "zero1", "zero2", "zero3"]),
    st.sampled_from(["original", "fixed_length", "wlb_llm", "wlb"]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([H100, dataclasses.replace(H100, intra_node=SLOW, inter_node=SLOW)]),
    st.integers(0, 99),
)
def test_steps_beside_ranks_that_wait_for_each_other(
    sizes: tuple[int, int, int], fsdp: Any, name: str, overlap: float, hardware: wlb_tools.Hardware, seed: int
) -> None:
    dp, pp, cp = sizes
    layout = wlb_tools.ParallelLayout(dp=dp, pp=pp, cp=cp, fsdp=fsdp)
    scenario = case(layout, per_rank=4, sync="micro_batch", dp_overlap=overlap, hardware=hardware)
    lengths = documents(150, seed)
    outcome = static(simulate(lengths, scenario, variants=(name,)).baseline)
    assert (trained(outcome.run, lengths) == 1).all()
    for step in range(outcome.seconds.size):
        assert outcome.seconds[step] == pytest.approx(recomputed(outcome, step) + scenario.step_end, rel=1e-9)
    assert tuple(outcome.attribution) == ATTRIBUTION
    assert all((part >= -1e-12 * outcome.seconds).all() for part in outcome.attribution.values())
    np.testing.assert_allclose(sum(outcome.attribution.values()), outcome.seconds, rtol=1e-12)


def test_by_hand() -> None:
    """Two ranks, two rounds; everything is computing, and no link takes any time."""
    free = wlb_tools.Link(latency=1e-30, bandwidth=1e30)
    hardware = dataclasses.replace(H100, intra_node=free, inter_node=free, launch_latency=1e-30)
    layout = wlb_tools.ParallelLayout(dp=2, fsdp="zero3")
    lengths = np.array([4096, 2048, 2048, 1024, 1024, 1024, 1024, 4096])
    for sync, fsdp in (("micro_batch", "zero3"), ("step", "zero2")):
        scenario = case(
            dataclasses.replace(layout, fsdp=fsdp),
            per_rank=2,
            hardware=hardware,
            sync=sync,  # type: ignore[arg-type]
        )
        outcome = static(simulate(lengths, scenario, variants=("as_they_come",)).baseline)
        # A 4,096; B 2 x 2,048; C 4 x 1,024; D 4,096. Rank 0 has A, B; rank 1 has C, D.
        a, b, c = (seconds_alone(scenario, [4096 // n] * n) for n in (1, 2, 4))
        assert a > b > c
        # Both rounds last as long as a whole document; or each rank its own two.
        expected = 2 * a if sync == "micro_batch" else max(a + b, c + a)
        assert outcome.seconds.tolist() == pytest.approx([expected])
        waits = ((a - c) + (a - b)) / 2 if sync == "micro_batch" else (b - c) / 2
        assert outcome.attribution["dp_wait"][0] == pytest.approx(waits)


def seconds_alone(scenario: wlb_tools.Scenario, lengths: list[int]) -> float:
    whole = wlb.shard(lengths, cp_size=1, strategy="per_sequence")
    passes = [scenario.attention.rank_seconds(whole, passes=one) for one in ("forward", "backward")]
    made = scenario.stage_seconds([sum(lengths)], attention_forward=passes[0], attention_backward=passes[1])
    return float(made.seconds.sum())


def test_what_is_sent_by_hand() -> None:
    """Of two layers, the embedding and the projection: parameters there and back again, gradients once."""
    model = dataclasses.replace(MODEL, num_layers=2)
    hardware = dataclasses.replace(H100, intra_node=SLOW, launch_latency=1e-6)
    layout = wlb_tools.ParallelLayout(dp=2, fsdp="zero3")
    h, f, v = 512, 1024, 1000
    layer = 4 * h * h + 3 * h * f + 2 * h
    units = [layer, layer, v * h, v * h + h]

    def ring(parameters: int, width: int) -> float:
        return 1e-6 + 1e-5 + parameters * width / 2 / 2e9

    found = micro_batch_seconds(model, layout, hardware)
    gather, reduce = (sum(ring(unit, width) for unit in units) for width in (2, 4))
    assert found.tolist() == [pytest.approx([gather, gather, reduce])]
    for fsdp, factor in (("zero1", 1), ("zero2", 1), ("none", 2)):
        kept = dataclasses.replace(layout, fsdp=fsdp)
        found = micro_batch_seconds(model, kept, hardware, sync="micro_batch")
        summed = sum(1e-6 + factor * (ring(unit, 4) - 1e-6) for unit in units)
        assert found.tolist() == [pytest.approx([0, 0, summed])]
        assert not micro_batch_seconds(model, kept, hardware).any()
    for sync in ("step", "micro_batch"):
        end = wlb_tools.data_parallel_seconds(model, dataclasses.replace(layout, fsdp="zero1"), hardware, sync=sync)
        gradients = 1e-5 + 1e-6 + sum(units) * 4 / 2 / 2e9 if sync == "step" else 0.0
        assert end.tolist() == pytest.approx([gradients + 1e-5 + 1e-6 + sum(units) * 2 / 2 / 2e9])
    assert wlb_tools.data_parallel_seconds(model, layout, hardware).tolist() == [0]


@given(
    st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 1), (2, 4)]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["1f1b", "zbv"]),
    st.booleans(),
)
def test_units_are_all_parameters(stages: tuple[int, int], ep: int, schedule: Any, tied: bool) -> None:
    """What is gathered layer by layer is what a GPU has, experts and ends included, whichever rank has which stage."""
    pp, virtual = (stages[0], 2) if schedule == "zbv" else stages
    if pp == 1:
        pp, virtual, schedule = 1, 1, "1f1b"
    model = dataclasses.replace(MODEL, num_experts=8, experts_per_token=2, tied_embeddings=tied)
    layout = wlb_tools.ParallelLayout(dp=4, cp=2, pp=pp, virtual_stages=virtual, ep=ep, fsdp="zero3")
    schedule = "interleaved_1f1b" if virtual > 1 and schedule == "1f1b" else schedule
    units = units_of_stages(model, layout, schedule=schedule)
    found = np.zeros((2, pp))
    for rank, of_stage in zip(ranks_of_stages(layout, schedule=schedule).tolist(), units, strict=True):
        for unit in of_stage:
            found[:, rank] += unit.count * unit.rest, unit.count * unit.experts
    assert found == pytest.approx(np.array(trained_per_rank(model, layout, schedule=schedule)))


def test_whole_documents_are_planned_for_rounds() -> None:
    """And that is faster than dealing what was packed without the ranks; a plan for a step is as it was."""
    lengths = documents(2000, 3)
    seconds = {}
    for sync in ("micro_batch", "step"):
        scenario = case(wlb_tools.ParallelLayout(dp=4), per_rank=4, sync=sync, dp_overlap=1.0)  # type: ignore[arg-type]
        outcome = static(simulate(lengths, scenario, variants=("wlb",)).baseline)
        seconds[sync] = outcome
    planned, dealt = seconds["micro_batch"], seconds["step"]
    assert planned.run.digests != dealt.run.digests
    again = score(dealt.title, dealt.run, dealt.sharded, planned.scenario)
    assert planned.steady_seconds < again.steady_seconds
    # Ranks that meet more often wait no less.
    assert (again.seconds >= dealt.seconds * (1 - 1e-12)).all()


@pytest.mark.parametrize("pp", [1, 2])
def test_groups_that_all_meet(pp: int) -> None:
    """A micro-batch of Dynamic-CP takes what its slowest group does, on every rank."""
    scenario = case(wlb_tools.ParallelLayout(dp=2, cp=2, pp=pp, fsdp="zero3"), sync="micro_batch")
    lengths = documents(300)
    outcome = simulate(lengths, scenario, variants=("dynamic_cp",)).baseline
    assert isinstance(outcome, DynamicOutcome)
    assert (trained(outcome.run, lengths) == 1).all()
    np.testing.assert_allclose(sum(outcome.attribution.values()), outcome.seconds, rtol=1e-12)
    for step in range(outcome.seconds.size):
        lines = outcome.timelines(step)
        for line in lines[1:]:
            assert line.ends.tolist() == pytest.approx(lines[0].ends.tolist())
    assert (outcome.attribution["dp_wait"] > 0).any()


def test_zero3_meets_in_every_micro_batch_by_itself() -> None:
    layout = wlb_tools.ParallelLayout(dp=2, fsdp="zero3")
    assert case(layout).waiting == "micro_batch"
    assert case(dataclasses.replace(layout, fsdp="zero2")).waiting == "step"
    with pytest.raises(wlb.WlbError, match="sync = 'step': ZeRO-3 gathers parameters in every micro-batch") as refused:
        case(layout, sync="step")
    assert refused.value.argument == "sync"
    with pytest.raises(wlb.WlbError, match="must be one of step, micro_batch"):
        case(layout, sync="always")


def test_small_micro_batches_hide_no_more_than_they_compute() -> None:
    """So more micro-batches of the same tokens take longer where gathering is most of it."""
    slow = dataclasses.replace(H100, intra_node=SLOW)
    lengths = documents(600)
    seconds = []
    for per_rank in (2, 8):
        scenario = case(
            wlb_tools.ParallelLayout(dp=2, fsdp="zero3"),
            per_rank=per_rank,
            context=4096 * 2 // per_rank,
            dp_overlap=1.0,
            hardware=slow,
            max_tokens=None,
        )
        cut = wlb.split_documents(lengths, max_document_tokens=1024)[2]
        seconds.append(simulate(cut, scenario, variants=("original",)).baseline.steady_seconds)
    assert seconds[1] > 2 * seconds[0]


def test_a_tuned_packer_plans_for_ranks_that_meet() -> None:
    """As it was simulated: what is printed makes the same packer."""
    scenario = case(wlb_tools.ParallelLayout(dp=2, fsdp="zero3"), per_rank=2, outlier_thresholds=None, num_queues=1)
    tuning = tune(documents(120), scenario)
    for kind, early in (("wlb", 0), ("early", EARLY)):
        of_kind = [choice for choice in tuning.tried if choice.kind == kind]
        assert {choice.max_early for choice in of_kind} == {early}
        made: dict[str, Any] = {}
        printed = configuration(dataclasses.replace(tuning, best=of_kind[0]), model="llama2-7b", profile=None)
        exec(printed, made)
        assert (made["packer"].dp_size, made["packer"].sync) == (2, "micro_batch")
        assert made["packer"].tokens_per_batch == scenario.tokens_per_batch
        assert (f"with max_early={EARLY}" in printed) == (early > 0), "the sampler has to be told"


def test_what_comes_early_counts_against_the_limit_too() -> None:
    """Whoever limits how far data are moved means both ways; and where early is no faster, it is not chosen."""
    scenario = case(wlb_tools.ParallelLayout(dp=2), per_rank=2, outlier_thresholds=None, num_queues=1)
    tuning = tune(documents(120), scenario)
    early = [choice for choice in tuning.tried if choice.kind == "early"]
    assert any(choice.outcome.run.early_mean > 0 for choice in early)
    for choice in early:
        run = choice.outcome.run
        moved = float((np.abs(run.delay) * run.length).sum() / run.length.sum())
        assert choice.delay == pytest.approx(moved)
    assert tuning.best.delay <= scenario.max_mean_delay
