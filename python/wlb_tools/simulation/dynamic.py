"""Dynamic context parallelism in a simulation: plans each step, prices each group, runs each rank."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Sync
from wlb._core import (
    MAX_TOKENS,
    DynamicCpPlan,
    plan_dynamic_cp,
    shard,
    simulate_pipeline,
    simulate_steps,
)
from wlb._results import PipelineSteps, PipelineTimeline
from wlb._shown import explained
from wlb_tools.cluster.memory import RankMemory, memory_per_rank
from wlb_tools.cluster.overhead import NO_OVERHEAD, Overhead, copied
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.simulation.balance import Balance, Floats
from wlb_tools.simulation.lockstep import Groups, in_lockstep
from wlb_tools.simulation.methods import document_ids
from wlb_tools.simulation.outcome import ATTRIBUTION, Contents, Outcome, RankPart, exposed_parts, noise_factors
from wlb_tools.simulation.planner import of_size
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.stream import GlobalBatches, Reading
from wlb_tools.simulation.trained import Trained

Integers = NDArray[np.int64]

_AT_ONCE = 1 << 22
"""Number of seconds of passes of all ranks that are held at a time; it changes memory, not results."""


@explained
@dataclass(frozen=True)
class DynamicStep:
    """One global batch in training."""

    plan: DynamicCpPlan
    ids: Integers  # [documents] ascending: indices into the stream
    delays: Integers  # [documents] iterations from the turn to training
    seconds: float | None  # of planning; None for steps of a flush


@explained
@dataclass(frozen=True)
class DynamicCpRun(Trained):
    """A whole stream in micro-batches that divide the ranks of a pipeline stage into groups."""

    group: Integers  # [pieces] index of the group
    group_step: Integers  # [groups] ascending
    group_micro_batch: Integers  # [groups] inside the step, ascending
    cp_size: Integers  # [groups] ranks; groups are in the order of ranks, and every rank is in one
    group_tokens: Integers  # [groups] of the fullest rank
    micro_batches: Integers  # [steps] of each rank
    world_size: int  # ranks of a pipeline stage

    def group_pieces(self) -> Iterator[slice]:
        """Range of pieces of every group; empty for an empty group."""
        ends = np.bincount(self.group, minlength=self.cp_size.size).cumsum().tolist()
        return (slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True))

    def group_lengths(self) -> Iterator[NDArray[np.int64]]:
        """The lengths of every group's documents; of none where a group is empty."""
        return (self.length[pieces] for pieces in self.group_pieces())

    @cached_property
    def _group_of_slot(self) -> tuple[Integers, Integers]:
        """The group of each step, micro-batch and rank, and where the groups of each step begin."""
        slots = np.repeat(np.arange(self.cp_size.size), self.cp_size)
        return slots, np.concatenate([[0], np.cumsum(self.micro_batches * self.world_size)])

    def together(self, layout: ParallelLayout, *, sync: Sync = "step") -> Groups:
        """Groups that meet, because their ranks divide experts; or all groups of a micro-batch."""
        return Groups(self.cp_size, ep=self.world_size if sync == "micro_batch" else layout.ranks_of_experts)

    def groups(self, steps: Integers) -> Integers:
        """int64[steps, micro-batches, ranks]: the group of each, for steps with equally many micro-batches."""
        slots, begins = self._group_of_slot
        count = int(self.micro_batches[steps[0]])
        within = np.arange(count * self.world_size)
        here: Integers = slots[begins[steps][:, None] + within]
        return here.reshape(steps.size, count, self.world_size)


def dynamic_steps(
    stream: GlobalBatches, options: Mapping[str, Any], reading: Reading | None = None
) -> Iterator[DynamicStep]:
    """The global batches, planned one by one with these arguments of `wlb.plan_dynamic_cp`.

    With a packer before the planner (`reading`), the documents that it releases in each iteration are planned.
    """
    if reading is None:
        for begin, end in itertools.pairwise(stream.offsets.tolist()):
            ids = np.arange(begin, end)
            began = time.perf_counter()
            plan = plan_dynamic_cp(stream.lengths[ids], ids=ids, **options)
            yield DynamicStep(plan, ids, np.zeros_like(ids), time.perf_counter() - began)
        return
    for read in reading.steps():
        ids = np.sort(document_ids(read.packing.micro_batches))
        began = time.perf_counter()
        plan = plan_dynamic_cp(stream.lengths[ids], ids=ids, **options)
        seconds = None if read.seconds is None else read.seconds + time.perf_counter() - began
        yield DynamicStep(plan, ids, read.iteration - reading.turns[ids], seconds)


def packer_before(scenario: Scenario, options: Mapping[str, Any], *, split: int | Fraction) -> dict[str, Any]:
    """Arguments of the packer whose releases are planned with these `options`, without its release rule.

    All ranks can share a document, so it need not wait unless it is too much for all of them. So the packer's
    micro-batches are as wide as the pipeline stage, and there are `dp` times fewer. The planner takes care of memory,
    by making more micro-batches.
    """
    return {
        "num_micro_batches": scenario.micro_batches * split // scenario.layout.dp,
        "max_tokens": min(scenario.tokens_per_batch, MAX_TOKENS),
        "cost_model": options["cost_model"],
        "max_delay": scenario.max_delay,
        "max_document_tokens": scenario.context,
        "tokens_per_batch": scenario.tokens_per_batch,
    }


def collect_dynamic(name: str, steps: Iterable[DynamicStep], stream: GlobalBatches) -> DynamicCpRun:
    """Runs a method over the stream."""
    trained = list(steps)
    batches = [batch for step in trained for batch in step.plan.micro_batches]
    groups = [group for batch in batches for group in batch.groups]
    micro_batches = np.array([len(step.plan) for step in trained])
    group_batch = np.repeat(np.arange(len(batches)), [len(batch.groups) for batch in batches])
    group_step = np.repeat(np.arange(len(trained)), micro_batches)[group_batch]
    firsts = np.cumsum(micro_batches) - micro_batches

    ids = [group.document_ids for group in groups]
    group = np.repeat(np.arange(len(groups)), [of_group.size for of_group in ids])
    document = np.concatenate(ids)
    entered = np.concatenate([step.ids for step in trained])
    delay = np.zeros(stream.lengths.size, dtype=np.int64)
    delay[entered] = np.concatenate([step.delays for step in trained])
    return DynamicCpRun(
        name=name,
        step=group_step[group],
        document=document,
        start=np.zeros_like(document),
        length=stream.lengths[document],
        delay=delay[document],
        digests=tuple(step.plan.digest() for step in trained),
        seconds=np.array([step.seconds for step in trained if step.seconds is not None]),
        group=group,
        group_step=group_step,
        group_micro_batch=group_batch - firsts[group_step],
        cp_size=np.array([one.cp_size for one in groups]),
        group_tokens=np.array([one.tokens_per_rank for one in groups]),
        micro_batches=micro_batches,
        world_size=trained[0].plan.world_size,
    )


@dataclass(frozen=True)
class Attention:
    """Seconds of attention in a layer, on every rank of every group of a run."""

    seconds: Floats  # [2, ranks of all groups, kinds] forward and backward
    copied: Integers  # [ranks of all groups, 2] see wlb_tools.cluster.overhead.copied
    sizes: Integers  # [groups] ranks
    keys: Integers  # [groups, 2] see Scenario.keys_exchanged

    def at_rate(self, rate: float) -> Attention:
        """The seconds if attention were `rate` times as fast."""
        return dataclasses.replace(self, seconds=self.seconds / rate)

    def of_groups(self, overhead: Overhead = NO_OVERHEAD) -> tuple[Floats, Floats]:
        """float64[groups, 2, kinds] on the slowest rank and on the mean one, with the time of copies."""
        seconds = self.seconds + overhead.copying(self.copied)[..., None]
        return of_slowest_and_mean(seconds.swapaxes(0, 1), self.sizes)


def of_slowest_and_mean(seconds: Floats, sizes: Integers) -> tuple[Floats, Floats]:
    """float64[groups, ...] on the slowest rank of every group and on the mean one.

    Args:
        seconds: float64[ranks of all groups, ...].
        sizes: ranks of every group.
    """
    firsts = np.cumsum(sizes) - sizes
    slowest: Floats = np.maximum.reduceat(seconds, firsts, axis=0)
    sums: Floats = np.add.reduceat(seconds, firsts, axis=0)
    return slowest, sums / sizes.reshape(-1, *[1] * (seconds.ndim - 1))


@dataclass(frozen=True)
class Priced:
    """Seconds of every group of a run on each of its ranks and pipeline stages."""

    seconds: Floats  # [groups, stages, 3]
    parts: dict[str, Floats]  # [groups, stages, 3] parts of `seconds` that wait or communicate
    p2p: Floats  # [groups]
    attention: Attention


def attention_of_groups(run: DynamicCpRun, scenario: Scenario) -> Attention:
    """Shards the documents of every group over its ranks. O(groups), some tens of microseconds each."""
    sizes = run.cp_size
    firsts = np.cumsum(sizes) - sizes
    of_ranks = np.zeros((2, int(sizes.sum()), scenario.layer_shares.size))
    rows = np.zeros((int(sizes.sum()), 2), dtype=np.int64)
    keys = np.zeros((sizes.size, 2), dtype=np.int64)
    for index, (first, size, lengths) in enumerate(
        zip(firsts.tolist(), sizes.tolist(), run.group_lengths(), strict=True)
    ):
        if lengths.size:
            cut = shard(lengths, cp_size=size, strategy="per_document")
            keys[index] = scenario.keys_exchanged(cut)
            of_ranks[0, first : first + size] = scenario.rank_seconds(cut, passes="forward")
            of_ranks[1, first : first + size] = scenario.rank_seconds(cut, passes="backward")
            rows[first : first + size] = copied(cut)
    return Attention(of_ranks, rows, sizes, keys)


def price(run: DynamicCpRun, scenario: Scenario, attention: Attention, measured: Floats | None = None) -> Priced:
    """Seconds of every group on every stage, with the communication of its size. O(groups).

    With `measured` seconds of every rank's part (see `Outcome.at_measured`), they replace those that the kernel model
    and the linear part predict.
    """
    sizes = run.cp_size
    shape = (sizes.size, scenario.layout.num_stages, 3)
    seconds, waits = np.zeros((2, *shape))
    exposed: dict[str, Floats] = {}
    p2p = np.zeros(sizes.size)
    together = run.together(scenario.layout)
    everyone = run.together(scenario.layout, sync=scenario.waiting)
    tokens = run.group_tokens.astype(np.float64)
    visiting, fullest = together.mean(tokens), together.most(tokens)
    slowest, mean = attention.of_groups(scenario.overhead)
    for size in np.unique(sizes):
        rows = np.flatnonzero(sizes == size)
        layout = of_size(scenario.layout, int(size))

        def stages(seconds: Floats, rows: Integers = rows, layout: Any = layout) -> Any:
            return scenario.stage_seconds(
                run.group_tokens[rows],
                attention_forward=seconds[rows, 0],
                attention_backward=seconds[rows, 1],
                layout=layout,
                visiting_tokens=visiting[rows],
                fullest_tokens=fullest[rows],
                keys_gathered=attention.keys[rows, 0],
                keys_moved=attention.keys[rows, 1],
            )

        made = stages(slowest)
        seconds[rows], p2p[rows] = made.seconds, made.p2p
        for name, part in exposed_parts(made).items():
            exposed.setdefault(name, np.zeros(shape))[rows] = part
        waits[rows] = np.maximum(made.seconds - stages(mean).seconds, 0.0)
    if measured is not None:
        slowest, mean = of_slowest_and_mean(measured, sizes)
        waits = slowest - mean
        seconds = slowest + sum(exposed.values())
    noise = noise_factors(scenario, shape)
    parts = {name: part * noise for name, part in {"cp_wait": waits, **exposed}.items()}
    alone = seconds * noise
    computing = np.maximum(alone - sum(exposed.values()) * noise, 0.0)
    split = scenario.splits_backward
    with_experts = in_lockstep(together.most, alone, split=split)
    parts["ep_wait"] = with_experts - alone
    of_all = in_lockstep(everyone.most, with_experts, split=split)
    parts["dp_wait"] = of_all - with_experts
    parts["dp_communication"] = scenario.exposed_dp(in_lockstep(everyone.most, computing, split=split))
    return Priced(of_all + parts["dp_communication"], parts, everyone.most(together.most(p2p)), attention)


@explained
@dataclass(frozen=True)
class DynamicOutcome(Outcome):
    """Outcome of a run whose micro-batches divide the ranks into groups."""

    run: DynamicCpRun
    priced: Priced

    @property
    def cp_imbalance(self) -> float:
        """Attention of a group's slowest rank over its mean rank, weighted by ranks and time."""
        sizes, shares = self.run.cp_size, self.scenario.layer_shares
        slowest, mean = (sizes @ (seconds @ shares) for seconds in self.priced.attention.of_groups())
        return float(slowest.sum() / mean.sum())

    @property
    def strategies(self) -> dict[str, int]:
        """Documents of a group are always cut one by one."""
        return {"per_document": int(np.unique(self.run.group).size)}

    @property
    def cp_sizes(self) -> dict[int, float]:
        """Share of the tokens by the size of their group."""
        tokens = np.bincount(self.run.cp_size[self.run.group], weights=self.run.length)
        return {int(size): float(tokens[size] / tokens.sum()) for size in np.flatnonzero(tokens)}

    @property
    def micro_batches(self) -> float:
        """Micro-batches of a step, mean over steps."""
        return float(self.run.micro_batches.mean())

    @property
    def pipelines(self) -> str:
        """One pipeline for each rank of a stage."""
        return "rank"

    def at_attention_rate(self, rate: float) -> DynamicOutcome:
        """See `Outcome.at_attention_rate`."""
        return score_dynamic(self.title, self.run, self.scenario, self.priced.attention.at_rate(rate))

    def parts(self) -> Iterator[RankPart]:
        """See `Outcome.parts`."""
        run = self.run
        # Every rank is in one group of a micro-batch, and groups are in the order of ranks.
        first = (np.cumsum(run.cp_size) - run.cp_size) % run.world_size
        rows = zip(run.group_step.tolist(), run.group_pieces(), run.cp_size.tolist(), first.tolist(), strict=True)
        for step, pieces, size, begin in rows:
            made = shard(run.length[pieces], cp_size=size, strategy="per_document")
            for rank in range(size):
                yield RankPart(step, pieces, made, rank, size, begin)

    def placement(self, step: int) -> Integers:
        """See `Outcome.placement`."""
        world, count = self.run.world_size, int(self.run.micro_batches[step])
        first = int(self.run.micro_batches[:step].sum()) * world
        parts: Integers = np.arange(first, first + count * world).reshape(count, world).T
        return parts

    def at_measured(self, seconds: Floats) -> DynamicOutcome:
        """See `Outcome.at_measured`."""
        priced = price(self.run, self.scenario, self.priced.attention, measured=seconds)
        return score_priced(self.title, self.run, self.scenario, priced)

    def timelines(self, step: int) -> list[PipelineTimeline]:
        """One step op by op, for each rank of a stage; an op begins with its wait for the other ranks of its group."""
        lines, layout = _lines(self.run, self.priced, self.scenario, np.array([step])), self.scenario.layout
        return [
            simulate_pipeline(
                lines.costs[0, rank],
                schedule=self.scenario.pipeline_schedule,
                num_stages=layout.pp,
                num_virtual_stages=layout.virtual_stages,
                p2p_seconds=lines.p2p[0, rank],
                exposed=lines.exposed[0, rank],
            )
            for rank in range(self.run.world_size)
        ]

    def contents(self, step: int) -> list[list[Contents]]:
        """See `Outcome.contents`: of a rank's group."""
        groups = self.run.groups(np.array([step]))[0]
        first, last = int(groups.min()), int(groups.max())
        lengths = itertools.islice(self.run.group_lengths(), first, last + 1)
        sizes = self.run.cp_size[first : last + 1].tolist()
        of_group = [Contents.of(each, size) for each, size in zip(lengths, sizes, strict=True)]
        return [[of_group[group - first] for group in row] for row in groups.T.tolist()]


def score_dynamic(
    title: str, run: DynamicCpRun, scenario: Scenario, attention: Attention | None = None
) -> DynamicOutcome:
    """Times of every group on every stage, through the pipeline rank by rank, to the end of every step."""
    return score_priced(title, run, scenario, price(run, scenario, attention or attention_of_groups(run, scenario)))


def score_priced(title: str, run: DynamicCpRun, scenario: Scenario, priced: Priced) -> DynamicOutcome:
    """Scores a run whose group seconds are known."""
    layout = scenario.layout
    steps = run.micro_batches.size
    seconds, bubble, dp_wait, busy = np.zeros((4, steps))
    held = np.zeros(layout.pp)
    for some in _alike(run, layout.num_stages):
        lines = _lines(run, priced, scenario, some)
        simulated = lines.run(scenario)
        seconds[some] = simulated.seconds
        dp_wait[some] = simulated.dp_wait
        waits = lines.waits.reshape(some.size, -1).sum(axis=1)
        bubble[some] = simulated.bubble + waits
        busy[some] = simulated.compute + simulated.exposed - waits
        held = np.maximum(held, simulated.peak_activation.max(axis=(0, 1)))

    gpus = layout.pp * run.world_size  # tensor-parallel ranks are equal, so they need not be counted

    def of_mean_gpu(part: Floats) -> Floats:
        return np.bincount(run.group_step, weights=run.cp_size * part.sum(axis=(1, 2)), minlength=steps) / gpus

    attribution = {name: of_mean_gpu(part) for name, part in priced.parts.items()}
    attribution["compute"] = busy / gpus - sum(attribution.values())
    attribution["bubble"] += bubble / gpus
    attribution["dp_wait"] += dp_wait / gpus
    attribution["dp_communication"] += scenario.dp_end
    attribution["compute"] += scenario.overhead.step
    apart = sum(priced.parts[name] for name in ("ep_wait", "dp_wait", "dp_communication"))
    of_groups = (priced.seconds - apart).sum(axis=(1, 2))
    heaviest = np.zeros(steps)
    np.maximum.at(heaviest, run.group_step, of_groups)
    work = np.bincount(run.group_step, weights=run.cp_size * of_groups, minlength=steps).astype(np.float64)
    return DynamicOutcome(
        title=title,
        run=run,
        priced=priced,
        seconds=seconds + scenario.step_end,
        attribution={name: attribution[name] for name in ATTRIBUTION},
        work=work,
        all_balance=Balance(heaviest, work / (run.micro_batches * run.world_size), work),
        largest_micro_batch=int(run.group_tokens.max()) * layout.cp,
        memory=_memory(run, scenario, held),
        scenario=scenario,
    )


def _memory(run: DynamicCpRun, scenario: Scenario, held: Floats) -> RankMemory:
    """Bytes on the GPUs: the largest gathered keys of any group beside the most activations."""
    layout = scenario.layout
    memory = scenario.memory(int(run.group_tokens.max()) * layout.cp, held * layout.cp)
    workspace = [
        memory_per_rank(
            scenario.model,
            of_size(layout, int(size)),
            int(run.group_tokens[run.cp_size == size].max()) * int(size),
            schedule=scenario.pipeline_schedule,
        ).workspace
        for size in np.unique(run.cp_size)
    ]
    return dataclasses.replace(memory, workspace=np.max(workspace, axis=0))


def _alike(run: DynamicCpRun, stages: int) -> Iterator[Integers]:
    """Steps with equally many micro-batches, as many as may be held at a time."""
    for count in np.unique(run.micro_batches):
        steps = np.flatnonzero(run.micro_batches == count)
        at_once = max(1, _AT_ONCE // (int(count) * run.world_size * stages * 3))
        yield from np.array_split(steps, -(-steps.size // at_once))


@dataclass(frozen=True)
class _Lines:
    """Some steps, rank by rank. The ranks r of all stages are a pipeline, which waits when its groups wait."""

    costs: Floats  # [steps, ranks, micro-batches, stages, 3] with waits
    waits: Floats  # the same shape: waits for the other ranks of a group
    exposed: Floats  # the same shape: waits, and waiting or communication inside a group
    p2p: Floats  # [steps, ranks, micro-batches]
    tokens: Floats  # [steps, ranks, micro-batches]

    def run(self, scenario: Scenario) -> PipelineSteps:
        """Runs the pipelines of all these steps."""
        return simulate_steps(
            self.costs,
            schedule=scenario.pipeline_schedule,
            num_stages=scenario.layout.pp,
            num_virtual_stages=scenario.layout.virtual_stages,
            p2p_seconds=self.p2p,
            activation=self.tokens,
            exposed=self.exposed,
        )


def _lines(run: DynamicCpRun, priced: Priced, scenario: Scenario, steps: Integers) -> _Lines:
    groups = run.groups(steps)
    at = groups.swapaxes(1, 2)
    seconds, p2p = priced.seconds[at], priced.p2p[at]
    waits = group_waits(
        run.together(scenario.layout, sync=scenario.waiting).number[groups],
        seconds,
        p2p,
        schedule=scenario.pipeline_schedule,
        num_stages=scenario.layout.pp,
        num_virtual_stages=scenario.layout.virtual_stages,
    )
    exposed = np.minimum(sum(part[at] for part in priced.parts.values()), seconds) + waits
    return _Lines(seconds + waits, waits, exposed, p2p, run.group_tokens[at].astype(np.float64))


def group_waits(
    groups: Integers,
    seconds: Floats,
    p2p: Floats,
    *,
    schedule: Any,
    num_stages: int,
    num_virtual_stages: int,
) -> Floats:
    """Seconds that ops wait for other ranks of their group, after their own rank and input are ready.

    Every rank of a stage runs the same order of ops. A forward or backward pass begins when all ranks of its group are
    free and have their input, which comes from the same rank of another stage. A separate gradient of weights waits for
    no other rank.

    Args:
        groups: int64[steps, micro-batches, ranks] a number for each group, or for groups that meet, different in other
            steps and micro-batches; its ranks are neighbours.
        seconds: float64[steps, ranks, micro-batches, stages, 3] of forward pass and gradients of inputs and of weights.
        p2p: float64[steps, ranks, micro-batches] from a stage to another rank's stage.
        schedule: of the pipeline.
        num_stages: pipeline ranks.
        num_virtual_stages: stages of each.

    Returns:
        float64, the shape of `seconds`. If it is added to `seconds`, every rank's pipeline simulated alone has the
        times that it has among the others.

    Complexity:
        O(entries of `seconds`), in numpy calls of `steps * ranks` entries.
    """
    steps, count, ranks = groups.shape
    program = simulate_pipeline(
        np.ones(count), schedule=schedule, num_stages=num_stages, num_virtual_stages=num_virtual_stages
    )
    rank_of_stage = dict(zip(program.stages.tolist(), program.ranks.tolist(), strict=True))
    last = len(rank_of_stage) - 1
    begins, sizes = [], []
    for micro_batch in range(count):
        flat = groups[:, micro_batch].ravel()
        first = np.flatnonzero(np.diff(flat, prepend=-1))
        begins.append(first)
        sizes.append(np.diff(first, append=flat.size))

    waits = np.zeros_like(seconds)
    free = np.zeros((num_stages, steps, ranks))
    ends: dict[tuple[int, int, bool], Floats] = {}  # of the forward pass, or of the backward pass
    # If every op takes some time, it starts after all ops for which it waits, so this order is valid for any costs.
    order = np.argsort(program.starts, kind="stable")
    for rank, stage, j, kind in zip(
        *(ops[order].tolist() for ops in (program.ranks, program.stages, program.micro_batches, program.kinds)),
        strict=True,
    ):
        forward, weights = kind == 0, kind == 3
        start = free[rank]
        if not weights:
            sender = stage - 1 if forward else stage + 1
            if 0 <= sender <= last:
                away = p2p[:, :, j] if rank_of_stage[sender] != rank else 0.0
                start = np.maximum(start, ends[sender, j, forward] + away)
            met = np.repeat(np.maximum.reduceat(start.ravel(), begins[j]), sizes[j]).reshape(start.shape)
            waits[:, :, j, stage, 0 if forward else 1] = met - start
            start = met
        passes = seconds[:, :, j, stage]
        took = passes[..., 1] + passes[..., 2] if kind == 1 else passes[..., max(0, kind - 1)]
        free[rank] = start + took
        if not weights:
            ends[stage, j, forward] = free[rank].copy()
    return waits
