"""Experts on several ranks in the simulator: all of them wait for the slowest in every micro-batch."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wlb
import wlb_tools
from tests.tools.simulation.test_simulate import documents, trained
from wlb_tools.simulation import search_layouts, simulate
from wlb_tools.simulation.dynamic import DynamicOutcome
from wlb_tools.simulation.lockstep import Groups, Replicas
from wlb_tools.simulation.outcome import ATTRIBUTION
from wlb_tools.simulation.static import static

MODEL = wlb.ModelConfig(
    hidden_size=512, ffn_hidden_size=256, num_experts=8, experts_per_token=2, num_layers=8, num_heads=8, vocab_size=1000
)
LAYOUT = wlb_tools.ParallelLayout(dp=4, pp=2, cp=2)


def case(ep: int, layout: wlb_tools.ParallelLayout = LAYOUT, **changes: Any) -> wlb_tools.Scenario:
    options: dict[str, Any] = {"context": 4096, "max_tokens": 6144, "outlier_thresholds": (1500, 3000)}
    options |= {"num_micro_batches": 16, "hardware": wlb_tools.Hardware.preset("h100"), "model": MODEL}
    return wlb_tools.Scenario(layout=dataclasses.replace(layout, ep=ep), **options | changes)


def met(positions: list[set[int]], ep: int) -> list[set[int]]:
    """Sets of ranks, put together while an ep group has ranks of two of them."""
    found = [set(ranks) for ranks in positions]
    for first in range(0, max(map(max, positions)) + 1, ep):
        group = set(range(first, first + ep))
        touched = [ranks for ranks in found if ranks & group]
        found = [ranks for ranks in found if not ranks & group] + [set().union(*touched)]
    return found


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_replicas_that_meet(dp: int, cp: int, data: st.DataObject) -> None:
    """Beside sets of ranks."""
    ep = data.draw(st.sampled_from([ep for ep in range(1, dp * cp + 1) if dp * cp % ep == 0]))
    replicas = [set(range(d * cp, (d + 1) * cp)) for d in range(dp)]
    values = np.array(data.draw(st.lists(st.floats(0, 9), min_size=2 * dp, max_size=2 * dp))).reshape(2, dp)
    together = met(replicas, ep)
    found = Replicas(wlb_tools.ParallelLayout(dp=dp, cp=cp, ep=ep))
    for d, ranks in enumerate(replicas):
        others = next(group for group in together if ranks <= group)
        columns = [other for other in range(dp) if replicas[other] <= others]
        assert len(columns) == math.lcm(ep, cp) // cp if ep > 1 else 1
        assert found.most(values)[:, d].tolist() == values[:, columns].max(axis=1).tolist()
        assert found.mean(values)[:, d] == pytest.approx(values[:, columns].mean(axis=1))


@given(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=6), min_size=1, max_size=3), st.data())
def test_groups_that_meet(sizes: list[list[int]], data: st.DataObject) -> None:
    """Beside sets of ranks, micro-batch by micro-batch."""
    world = math.lcm(*[1, 2, 3]) * 2
    filled = []
    for row in sizes:
        cut = [size for size in row if size]
        while sum(cut) > world:
            cut.pop()
        filled.append([*cut, world - sum(cut)] if sum(cut) < world else cut)
    ep = data.draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    flat = np.array([size for row in filled for size in row])
    values = np.array(data.draw(st.lists(st.floats(0, 9), min_size=flat.size, max_size=flat.size)))
    found, first = Groups(flat, ep=ep), 0
    for row in filled:
        ends = np.cumsum(row)
        groups = [set(range(end - size, end)) for size, end in zip(row, ends.tolist(), strict=True)]
        for index, ranks in enumerate(groups):
            others = next(group for group in met(groups, ep) if ranks <= group)
            columns = [first + i for i, other in enumerate(groups) if other <= others]
            assert found.most(values)[first + index] == values[columns].max()
            mean = (flat[columns] * values[columns]).sum() / flat[columns].sum()
            assert found.mean(values)[first + index] == pytest.approx(mean)
            assert [int(found.number[column]) for column in columns] == [int(found.number[first + index])] * len(
                columns
            )
        first += len(row)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_all_time_is_accounted_for(ep: int) -> None:
    lengths = documents(300)
    names = ("original", "wlb_llm", "dynamic_cp")
    found = simulate(lengths, case(ep, noise=0.05), variants=names)
    for outcome in found.outcomes.values():
        assert (trained(outcome.run, lengths) == 1).all()
        assert tuple(outcome.attribution) == ATTRIBUTION
        assert all((part >= -1e-12 * outcome.seconds).all() for part in outcome.attribution.values())
        np.testing.assert_allclose(sum(outcome.attribution.values()), outcome.seconds, rtol=1e-12)
        assert (outcome.attribution["ep_communication"] > 0).all()
        slowest = max(timeline.seconds for timeline in outcome.timelines(0))
        gradients = outcome.attribution["dp_communication"][0]
        assert outcome.seconds[0] == pytest.approx(slowest + gradients, rel=1e-12)
    # Two neighbours are the context-parallel ranks of a replica, which wait for each other anyway.
    waits = float(found.outcomes["original"].attribution["ep_wait"].sum())
    assert waits == 0 if ep == 2 else waits > 0


def test_replicas_that_share_experts_run_in_lockstep() -> None:
    """Each op takes what the slowest of them takes by itself, on its own tokens and the experts' even share."""
    lengths, together = documents(300), case(4, LAYOUT)
    outcome = static(simulate(lengths, together, variants=("original",)).baseline)
    pairs = outcome.costs.reshape(outcome.costs.shape[0], 2, 2, *outcome.costs.shape[2:])
    passes = np.stack([pairs[..., 0], pairs[..., 1:].sum(axis=-1)], axis=-1)  # 1F1B runs both gradients as one
    np.testing.assert_allclose(passes[:, :, 0], passes[:, :, 1], rtol=1e-12)
    assert (pairs[:, 0] != pairs[:, 1]).any(), "two pairs of replicas have nothing to do with each other"
    step, run, sharded = 1, outcome.run, outcome.sharded
    row = step * run.tokens.shape[1] + run.order[step]  # [dp, micro-batches]
    for first in (0, 2):
        for j in range(run.order.shape[2]):
            rows = row[first : first + 2, j]
            tokens = run.tokens.reshape(-1)[rows] / 2
            alone = together.stage_seconds(
                sharded.tokens[rows],
                attention_forward=sharded.forward[rows].max(axis=1),
                attention_backward=sharded.backward[rows].max(axis=1),
                visiting_tokens=[tokens.mean()] * 2,
                fullest_tokens=[sharded.tokens[rows].max()] * 2,
            )
            expected = np.stack([alone.seconds[..., 0], alone.seconds[..., 1:].sum(axis=-1)]).max(axis=1)
            assert np.moveaxis(passes[step, first // 2, 0, j], -1, 0) == pytest.approx(expected)


def test_groups_that_meet_run_in_lockstep() -> None:
    """Three ranks divide experts among them, and groups of two lie across: such a micro-batch joins all six."""
    layout, model = wlb_tools.ParallelLayout(dp=3, cp=2, pp=2), dataclasses.replace(MODEL, num_experts=6)
    outcome = simulate(
        documents(300), case(3, layout, model=model, num_micro_batches=12), variants=("dynamic_cp",)
    ).baseline
    assert isinstance(outcome, DynamicOutcome)
    joined = apart = 0
    for step in range(outcome.seconds.size):
        lines = outcome.timelines(step)
        for j, groups in enumerate(outcome.run.groups(np.array([step]))[0]):
            ranks = [set(np.flatnonzero(groups == group).tolist()) for group in np.unique(groups)]
            for together in met(ranks, 3):
                ends = [line.ends[line.micro_batches == j] for line in (lines[rank] for rank in together)]
                assert all(end == pytest.approx(ends[0]) for end in ends)
                joined += len(together) == 6
                apart += len(together) == 3
    assert joined
    assert apart


def test_experts_across_all_replicas_wait_in_every_micro_batch() -> None:
    """That costs more than waiting once a step, although each rank's experts then have an even share of the visits."""
    lengths = documents(300)
    hidden = {"cp_overlap": 1.0, "tp_overlap": 1.0, "ep_overlap": 1.0, "dp_overlap": 1.0}
    for name in ("original", "dynamic_cp"):
        seconds = [simulate(lengths, case(ep, **hidden), variants=(name,)).baseline.total_seconds for ep in (2, 8)]
        assert seconds[0] < seconds[1], name


def test_the_search_finds_how_to_divide_experts() -> None:
    big = dataclasses.replace(MODEL, num_experts=64, ffn_hidden_size=4096, hidden_size=2048)
    options: dict[str, Any] = {"model": big, "hardware": wlb_tools.Hardware.preset("h100"), "gpus": 4, "context": 4096}
    found = search_layouts(documents(60), tokens_per_batch=4 * 4096, **options)
    assert any(choice.outcome.scenario.layout.ep > 1 for choice in found.ranked)
    assert all("ep" in row["layout"] for row in found.as_json()["ranked"])
