"""Predicts the time of a run without Dynamic-CP on the cluster, by costs that the packer did not use."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wlb._core import Shard, shard, simulate_pipeline, simulate_steps
from wlb._results import PipelineTimeline
from wlb._shown import explained
from wlb_tools.cluster.overhead import copied
from wlb_tools.cluster.step_time import StageSeconds
from wlb_tools.simulation.balance import Balance, Floats
from wlb_tools.simulation.lockstep import Replicas, in_lockstep
from wlb_tools.simulation.outcome import ATTRIBUTION, Contents, Outcome, RankPart, exposed_parts, noise_factors
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.trained import PackedRun
from wlb_tools.simulation.variants import Strategy


@explained
@dataclass(frozen=True)
class Sharded:
    """Every micro-batch of a run on the context-parallel ranks; seconds are of attention in a layer of each kind."""

    forward: Floats  # [micro-batches, cp, kinds]
    backward: Floats  # [micro-batches, cp, kinds]
    shares: Floats  # [kinds] among the layers
    tokens: NDArray[np.int64]  # [micro-batches] of the fullest rank
    keys: NDArray[np.int64]  # [micro-batches, 2] see Scenario.keys_exchanged
    copied: NDArray[np.int64]  # [micro-batches, cp, 2] see wlb_tools.cluster.overhead.copied
    strategies: dict[str, int]  # number of micro-batches for which each was chosen
    choice: tuple[Strategy, ...]  # the strategies to choose from

    def at_attention_rate(self, rate: float) -> Sharded:
        """These shards with attention `rate` times as fast."""
        return dataclasses.replace(self, forward=self.forward / rate, backward=self.backward / rate)

    @property
    def imbalance(self) -> float:
        """Attention of the slowest rank over the mean rank, mean over micro-batches weighted by their time."""
        both = self.forward + self.backward
        return float((both.max(axis=1) @ self.shares).sum() / (both.mean(axis=1) @ self.shares).sum())


def best_shard(lengths: NDArray[np.int64], scenario: Scenario, strategies: tuple[Strategy, ...]) -> Shard:
    """One micro-batch by the strategy with which its slowest rank is predicted to be fastest."""
    selector = scenario.selector or scenario.attention
    made = [
        shard(
            lengths,
            cp_size=scenario.layout.cp,
            strategy=name,
            kernel_model=selector if name == "adaptive" else None,
        )
        for name in strategies
    ]

    def slowest(one: Shard) -> float:
        """Seconds of the slowest rank, forward and backward, in the mean layer."""
        seconds = scenario.rank_seconds(one, passes="forward_backward", kernel=selector)
        return float(seconds.max(axis=0) @ scenario.layer_shares)

    return made[0] if len(made) == 1 else min(made, key=slowest)


def shard_run(run: PackedRun, scenario: Scenario, strategies: tuple[Strategy, ...]) -> Sharded:
    """Shards every micro-batch. O(micro-batches), some tens of microseconds each."""
    cp, shares = scenario.layout.cp, scenario.layer_shares
    forward, backward = np.zeros((2, run.tokens.size, cp, shares.size))
    tokens, keys = np.zeros(run.tokens.size, dtype=np.int64), np.zeros((run.tokens.size, 2), dtype=np.int64)
    rows = np.zeros((run.tokens.size, cp, 2), dtype=np.int64)
    counts: Counter[str] = Counter()
    for index, lengths in enumerate(run.micro_batch_lengths()):
        if not lengths.size:
            continue
        best = best_shard(lengths, scenario, strategies)
        counts[best.strategy] += 1
        forward[index] = scenario.rank_seconds(best, passes="forward")
        backward[index] = scenario.rank_seconds(best, passes="backward")
        tokens[index], keys[index] = best.tokens_per_rank.max(), scenario.keys_exchanged(best)
        rows[index] = copied(best)
    return Sharded(forward, backward, shares, tokens, keys, rows, dict(sorted(counts.items())), strategies)


@explained
@dataclass(frozen=True)
class StaticOutcome(Outcome):
    """Outcome of a run whose micro-batches all have the same context-parallel ranks."""

    run: PackedRun
    sharded: Sharded
    costs: Floats  # [steps, dp, micro-batches of a rank, stages, 3] costs for wlb.simulate_pipeline
    exposed: Floats  # the same shape: the part of `costs` that waits or communicates
    p2p: Floats  # [steps, dp, micro-batches of a rank]

    @property
    def cp_imbalance(self) -> float:
        """Attention of the slowest context-parallel rank over the mean rank, see `Sharded.imbalance`."""
        return self.sharded.imbalance

    @property
    def strategies(self) -> dict[str, int]:
        """The number of micro-batches for which each sharding was chosen."""
        return self.sharded.strategies

    @property
    def cp_sizes(self) -> dict[int, float]:
        """All tokens are on the layout's ranks."""
        return {self.scenario.layout.cp: 1.0}

    @property
    def micro_batches(self) -> float:
        """Micro-batches of a rank in a step."""
        return float(self.run.order.shape[2])

    def at_attention_rate(self, rate: float) -> StaticOutcome:
        """See `Outcome.at_attention_rate`."""
        return score(self.title, self.run, self.sharded.at_attention_rate(rate), self.scenario)

    def parts(self) -> Iterator[RankPart]:
        """See `Outcome.parts`."""
        cp, width = self.scenario.layout.cp, self.run.tokens.shape[1]
        for index, pieces in enumerate(self.run.micro_batch_pieces()):
            made = best_shard(self.run.length[pieces], self.scenario, self.sharded.choice)
            for rank in range(cp):
                yield RankPart(index // width, pieces, made, rank, cp, None)

    def placement(self, step: int) -> NDArray[np.int64]:
        """See `Outcome.placement`."""
        cp, order = self.scenario.layout.cp, self.run.order[step]
        rows = step * self.run.tokens.shape[1] + order
        parts: NDArray[np.int64] = rows[:, None, :] * cp + np.arange(cp)[:, None]
        return parts.reshape(-1, order.shape[1])

    def at_measured(self, seconds: Floats) -> StaticOutcome:
        """See `Outcome.at_measured`."""
        return score(self.title, self.run, self.sharded, self.scenario, measured=seconds)

    def timelines(self, step: int) -> list[PipelineTimeline]:
        """One step op by op, for each data-parallel replica."""
        layout = self.scenario.layout
        return [
            simulate_pipeline(
                self.costs[step, replica],
                schedule=self.scenario.pipeline_schedule,
                num_stages=layout.pp,
                num_virtual_stages=layout.virtual_stages,
                p2p_seconds=self.p2p[step, replica],
                exposed=self.exposed[step, replica],
            )
            for replica in range(layout.dp)
        ]

    def contents(self, step: int) -> list[list[Contents]]:
        """See `Outcome.contents`."""
        width = self.run.tokens.shape[1]
        lengths = list(itertools.islice(self.run.micro_batch_lengths(), step * width, (step + 1) * width))
        of_micro_batch = [Contents.of(each, self.scenario.layout.cp) for each in lengths]
        return [[of_micro_batch[index] for index in row] for row in self.run.order[step].tolist()]


def static(outcome: Outcome) -> StaticOutcome:
    """The outcome, after a check that it is that of a static run.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(outcome, StaticOutcome):
        raise TypeError(f"{outcome.title} has no fixed context-parallel ranks")
    return outcome


def score(
    title: str, run: PackedRun, sharded: Sharded, scenario: Scenario, measured: Floats | None = None
) -> StaticOutcome:
    """Times of every micro-batch on every stage, through the pipeline, to the end of every step.

    With `measured` seconds of every context-parallel rank's part (see `Outcome.at_measured`), they replace those that
    the kernel model and the linear part predict.
    """
    layout, order = scenario.layout, run.order
    steps, width = run.tokens.shape
    # Micro-batches of a step, dealt to the ranks and ordered.
    row = np.arange(steps)[:, None, None] * width + order
    replicas, everyone = Replicas(layout), Replicas(layout, sync=scenario.waiting)
    visiting, fullest = np.zeros((2, run.tokens.size))
    visiting[row] = replicas.mean(run.tokens.reshape(-1)[row] / layout.cp)
    fullest[row] = replicas.most(sharded.tokens[row])

    def stages(forward: Floats, backward: Floats) -> StageSeconds:
        return scenario.stage_seconds(
            sharded.tokens,
            attention_forward=forward,
            attention_backward=backward,
            visiting_tokens=visiting,
            fullest_tokens=fullest,
            keys_gathered=sharded.keys[:, 0],
            keys_moved=sharded.keys[:, 1],
        )

    copying = scenario.overhead.copying(sharded.copied)[..., None]
    forward, backward = sharded.forward + copying[0], sharded.backward + copying[1]
    slowest = stages(forward.max(axis=1), backward.max(axis=1))
    mean = stages(forward.mean(axis=1), backward.mean(axis=1))
    seconds, mean_seconds = slowest.seconds, mean.seconds
    exposed_inside = slowest.exposed
    if measured is not None:
        of_ranks = measured.reshape(run.tokens.size, layout.cp, *seconds.shape[1:])
        seconds, mean_seconds = of_ranks.max(axis=1) + exposed_inside, of_ranks.mean(axis=1) + exposed_inside
    noise = noise_factors(scenario, seconds.shape)
    parts = {
        "cp_wait": np.maximum(seconds - mean_seconds, 0.0) * noise,
        **{name: part * noise for name, part in exposed_parts(slowest).items()},
        **{name: np.zeros_like(seconds) for name in ("ep_wait", "dp_wait", "dp_communication")},
    }
    computing, seconds = (seconds - exposed_inside) * noise, seconds * noise
    split = scenario.splits_backward
    with_experts = in_lockstep(replicas.most, seconds[row], split=split)
    together = in_lockstep(everyone.most, with_experts, split=split)
    p2p = everyone.most(replicas.most(slowest.p2p[row]))
    parts["ep_wait"][row] = with_experts - seconds[row]
    parts["dp_wait"][row] = together - with_experts
    parts["dp_communication"][row] = scenario.exposed_dp(
        in_lockstep(everyone.most, np.maximum(computing[row], 0.0), split=split)
    )
    costs = together + parts["dp_communication"][row]
    exposed = np.minimum(sum(part[row] for part in parts.values()), costs)  # by rounding it could exceed the whole
    simulated = simulate_steps(
        costs,
        schedule=scenario.pipeline_schedule,
        num_stages=layout.pp,
        num_virtual_stages=layout.virtual_stages,
        p2p_seconds=p2p,
        activation=run.tokens.reshape(-1)[row].astype(np.float64),
        exposed=exposed,
    )
    pipelines = layout.pp * layout.dp
    attribution = {name: part.reshape(steps, -1).sum(axis=1) / pipelines for name, part in parts.items()}
    busy = (simulated.compute + simulated.exposed) / pipelines
    attribution["compute"] = busy - sum(attribution.values())
    attribution["bubble"] += simulated.bubble / pipelines
    attribution["dp_wait"] += simulated.dp_wait / pipelines
    attribution["dp_communication"] += scenario.dp_end
    attribution["compute"] += scenario.overhead.step
    of_micro_batches = seconds.reshape(steps, width, -1).sum(axis=2)
    return StaticOutcome(
        title=title,
        run=run,
        sharded=sharded,
        seconds=simulated.seconds + scenario.step_end,
        attribution={name: attribution[name] for name in ATTRIBUTION},
        work=of_micro_batches.sum(axis=1),
        all_balance=Balance.of(of_micro_batches),
        largest_micro_batch=int(run.tokens.max()),
        memory=scenario.memory(int(run.tokens.max()), simulated.peak_activation.max(axis=(0, 1))),
        costs=costs,
        exposed=exposed,
        p2p=p2p,
        scenario=scenario,
    )
