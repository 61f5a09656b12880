"""What a plan takes on the cluster: predicted by costs that the packer did not use."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._core import PipelineTimeline, order_micro_batches, shard, simulate_pipeline, simulate_steps
from wlb.memory import RankMemory
from wlb.simulation.plans import Plan
from wlb.simulation.scenario import Scenario
from wlb.simulation.variants import Strategy
from wlb.step_time import data_parallel_seconds, stage_seconds

Floats = NDArray[np.float64]

ATTRIBUTION = (
    "compute",
    "cp_wait",
    "cp_communication",
    "tp_communication",
    "bubble",
    "dp_wait",
    "dp_communication",
)
"""What a GPU's time goes to: computing; waiting for the slowest context-parallel rank's attention; context- and
tensor-parallel communication that nothing hides; idle in the pipeline; waiting for the slowest data-parallel replica;
the gradient reduction that nothing hides."""


@dataclass(frozen=True)
class Sharded:
    """Every micro-batch of a plan over the context-parallel ranks; seconds are of one layer's attention."""

    forward: Floats  # [micro-batches, cp]
    backward: Floats  # [micro-batches, cp]
    tokens: NDArray[np.int64]  # [micro-batches] of the fullest rank
    strategies: dict[str, int]  # how many micro-batches each was chosen for

    @property
    def imbalance(self) -> float:
        """Attention of the slowest rank over the mean rank, mean over micro-batches weighted by their time."""
        both = self.forward + self.backward
        return float(both.max(axis=1).sum() / both.mean(axis=1).sum())


def shard_plan(plan: Plan, scenario: Scenario, strategies: tuple[Strategy, ...]) -> Sharded:
    """Shards every micro-batch. O(micro-batches), some tens of microseconds each."""
    kernel, cp = scenario.attention, scenario.layout.cp
    selector = scenario.selector or kernel
    forward, backward = np.zeros((2, plan.tokens.size, cp))
    tokens = np.zeros(plan.tokens.size, dtype=np.int64)
    counts: Counter[str] = Counter()
    for index, lengths in enumerate(plan.micro_batch_lengths()):
        if not lengths.size:
            continue
        made = [
            shard(lengths, cp_size=cp, strategy=name, kernel_model=selector if name == "adaptive" else None)
            for name in strategies
        ]
        best = made[0] if len(made) == 1 else min(made, key=lambda one: selector.rank_seconds(one).max())
        counts[best.strategy] += 1
        forward[index] = kernel.rank_seconds(best, passes="forward")
        backward[index] = kernel.rank_seconds(best, passes="backward")
        tokens[index] = best.tokens_per_rank.max()
    return Sharded(forward, backward, tokens, dict(sorted(counts.items())))


def placed(plan: Plan, scenario: Scenario) -> Plan:
    """The plan with every step's micro-batches placed for the schedule, by the costs that the packer knows."""
    layout = scenario.layout
    order = [
        order_micro_batches(
            costs,
            dp_size=layout.dp,
            schedule=scenario.pipeline_schedule,
            num_stages=layout.pp,
            num_virtual_stages=layout.virtual_stages,
        )
        for costs in plan.costs
    ]
    return dataclasses.replace(plan, order=np.stack(order))


@dataclass(frozen=True)
class Outcome:
    """A stream as one method trains it, and how long that takes."""

    title: str
    plan: Plan
    sharded: Sharded
    seconds: Floats  # [steps]
    attribution: dict[str, Floats]  # by ATTRIBUTION: [steps] seconds of the mean GPU; they add up to `seconds`
    micro_batch_seconds: Floats  # [steps, micro-batches] over all stages and passes
    memory: RankMemory  # [pp] the most over all steps
    costs: Floats  # [steps, dp, micro-batches of a rank, stages, 3] what wlb.simulate_pipeline takes
    exposed: Floats  # the same: the part of it that waits or communicates
    p2p: Floats  # [steps, dp, micro-batches of a rank]
    scenario: Scenario

    @property
    def tokens(self) -> int:
        """Tokens trained: the same for all methods of a comparison."""
        return int(self.plan.tokens.sum())

    @property
    def total_seconds(self) -> float:
        """Seconds of all steps, those that empty the queues at the end of the stream included."""
        return float(self.seconds.sum())

    @property
    def steady_seconds(self) -> float:
        """Seconds of all steps if those that empty the queues were as efficient as the others: for a longer stream.

        That is, the seconds before the flush times all work over the work before it.
        """
        work, streamed = self.micro_batch_seconds.sum(axis=1), self.plan.streamed
        return float(self.seconds[:streamed].sum() * work.sum() / work[:streamed].sum())

    @property
    def tokens_per_second(self) -> float:
        """Of the whole cluster, over all steps."""
        return self.tokens / self.total_seconds

    @property
    def imbalance(self) -> Floats:
        """float64[streamed]: predicted time of the heaviest micro-batch over the mean of its step."""
        seconds = self.micro_batch_seconds[: self.plan.streamed]
        return np.asarray(seconds.max(axis=1) / seconds.mean(axis=1))

    @property
    def idle(self) -> Floats:
        """float64[steps]: share of the time in which GPUs wait for other stages or replicas."""
        return np.asarray((self.attribution["bubble"] + self.attribution["dp_wait"]) / self.seconds)

    @property
    def model_flops_utilization(self) -> float:
        """FLOPs of the documents as they are trained, over what the GPUs could do in the time."""
        peak = self.scenario.hardware.peak_flops * self.scenario.layout.world_size
        return self.flops / (peak * self.total_seconds)

    @property
    def flops(self) -> float:
        """FLOPs of the documents as they are trained: fewer where they are cut."""
        return float(self.scenario.model.flops(self.plan.length).sum())

    @property
    def flush_share(self) -> float:
        """Share of the time in steps at the end of the stream: emptying queues, and a global batch that is not full."""
        return float(self.seconds[self.plan.streamed :].sum()) / self.total_seconds

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

    def summary(self) -> dict[str, Any]:
        """In a few numbers, as plain JSON values."""
        plan, total = self.plan, self.total_seconds
        packing = plan.summary()
        imbalance = self.imbalance
        return {
            "title": self.title,
            "steps": len(plan.digests),
            "steps_of_flush": packing["steps_of_flush"],
            "flush_share": self.flush_share,
            "tokens": self.tokens,
            "seconds": total,
            "step_seconds_mean": float(self.seconds[: plan.streamed].mean()),
            "step_seconds_p95": float(np.quantile(self.seconds[: plan.streamed], 0.95)),
            "step_seconds_worst": float(self.seconds[: plan.streamed].max()),
            "tokens_per_second": self.tokens_per_second,
            "model_flops_utilization": self.model_flops_utilization,
            "attribution": {name: float(part.sum() / total) for name, part in self.attribution.items()},
            "micro_batch_imbalance_mean": float(imbalance.mean()),
            "micro_batch_imbalance_p95": float(np.quantile(imbalance, 0.95)),
            "micro_batch_imbalance_worst": float(imbalance.max()),
            "cp_imbalance": self.sharded.imbalance,
            "cp_strategies": self.sharded.strategies,
            "delay_mean": packing["delay_mean"],
            "delay_p99": packing["delay_p99"],
            "delay_max": packing["delay_max"],
            "documents_cut": packing["documents_cut"],
            "largest_micro_batch": int(plan.tokens.max()),
            "peak_bytes": float(self.memory.total.max()),
            "digest": packing["digest"],
        }


def score(title: str, plan: Plan, sharded: Sharded, scenario: Scenario) -> Outcome:
    """Times of every micro-batch on every stage, through the pipeline, to the end of every step."""
    layout, order = scenario.layout, plan.order
    steps, width = plan.tokens.shape

    def stages(forward: Floats, backward: Floats) -> Any:
        return stage_seconds(
            sharded.tokens,
            attention_forward=forward,
            attention_backward=backward,
            model=scenario.model,
            layout=layout,
            hardware=scenario.hardware,
            cp_overlap=scenario.cp_overlap,
            tp_overlap=scenario.tp_overlap,
        )

    slowest = stages(sharded.forward.max(axis=1), sharded.backward.max(axis=1))
    mean = stages(sharded.forward.mean(axis=1), sharded.backward.mean(axis=1))
    noise = _noise(scenario, slowest.seconds.shape)
    parts = {
        "cp_wait": np.maximum(slowest.seconds - mean.seconds, 0.0) * noise,
        "cp_communication": slowest.exposed_cp * noise,
        "tp_communication": slowest.exposed_tp * noise,
    }
    seconds = slowest.seconds * noise

    # Micro-batches of a step, dealt to the ranks and ordered.
    row = np.arange(steps)[:, None, None] * width + order
    costs, p2p = seconds[row], slowest.p2p[row]
    exposed = np.minimum(sum(parts.values()), seconds)[row]  # up to rounding, no more than the whole
    simulated = simulate_steps(
        costs,
        schedule=scenario.pipeline_schedule,
        num_stages=layout.pp,
        num_virtual_stages=layout.virtual_stages,
        p2p_seconds=p2p,
        activation=plan.tokens.reshape(-1)[row].astype(np.float64),
        exposed=exposed,
    )
    of_ranks = data_parallel_seconds(scenario.model, layout, scenario.hardware, schedule=scenario.pipeline_schedule)
    gradients = float(of_ranks.max())
    dp_communication = np.full(steps, (1 - scenario.dp_overlap) * gradients)

    pipelines = layout.pp * layout.dp
    attribution = {name: part.reshape(steps, -1).sum(axis=1) / pipelines for name, part in parts.items()}
    busy = (simulated.compute + simulated.exposed) / pipelines
    attribution["compute"] = busy - sum(attribution.values())
    attribution["bubble"] = simulated.bubble / pipelines
    attribution["dp_wait"] = simulated.dp_wait / pipelines
    attribution["dp_communication"] = dp_communication
    return Outcome(
        title=title,
        plan=plan,
        sharded=sharded,
        seconds=simulated.seconds + dp_communication,
        attribution={name: attribution[name] for name in ATTRIBUTION},
        micro_batch_seconds=seconds.reshape(steps, width, -1).sum(axis=2),
        memory=scenario.memory(int(plan.tokens.max()), simulated.peak_activation.max(axis=(0, 1))),
        costs=costs,
        exposed=exposed,
        p2p=p2p,
        scenario=scenario,
    )


def _noise(scenario: Scenario, shape: tuple[int, ...]) -> Floats:
    """Factors of mean 1, the same for every variant as far as its steps go."""
    if not scenario.noise:
        return np.ones(shape)
    sigma = np.sqrt(np.log1p(scenario.noise**2))
    return np.random.default_rng(scenario.noise_seed).lognormal(-(sigma**2) / 2, sigma, shape)
