"""Dynamic-CP's protocol: Llama-13B, 2048 documents a step, PP 8, CP 8, recomputation; packing only against Dynamic-CP.

Emulated: the datasets' lengths (`corpora.py`), the GPU, TP, DP and the window are not published.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies.paper.corpora import CORPORA
from studies.paper.inputs import Inputs, Point, hardware, kernel, running
from studies.paper.published import DYNAMIC_CP
from studies.paper.results import Result, Row, influence, row
from studies.paper.study import Source, Study
from wlb._core import (
    CostModel,
    Exchange,
    KernelModel,
    batch_offsets,
    plan_dynamic_cp,
    shard,
    simulate_pipeline,
    simulate_steps,
)
from wlb.models import ModelConfig
from wlb_tools.cluster.collectives import Communicator
from wlb_tools.cluster.data_parallel import data_parallel_seconds
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.memory import kv_width
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.cluster.step_time import stage_seconds

Floats = NDArray[np.float64]
Seed = tuple[int, int]

MODEL = "llama2-13b"
DOCUMENTS = 2048  # of a global batch
STEPS = 9  # at most: 10 iterations, the first dropped
PP, CP = 8, 8


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What the report leaves open beside `Inputs`.

    Args:
        tp: tensor-parallel ranks; the report's example is "TP2CP8".
        dp: data-parallel ranks; 2: the fewest with an imbalance between them.
        window: tokens of a packed sequence at CP 8, and of the longest document.
        hidden: share of attention that can hide the exchange of keys and values; usually
            all of it, says the report.
        spread: of the logarithm of the lengths, of that of `CORPORA`.
    """

    tp: int = 2
    dp: int = 2
    window: int = 131072
    hidden: float = 1.0
    spread: float = 1.0


_SPREAD = "spread of the lengths, of the fitted"

_SWEEP: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("data-parallel ranks", "dp", (1, 4)),
    ("tensor-parallel ranks", "tp", (4, 8)),
    ("window", "window", (65536,)),
    ("attention hides the exchange", "hidden", (0.0,)),
    (_SPREAD, "spread", (0.8, 1.25)),
)
_WITHOUT = (
    "virtual_stages",
    "max_contexts",
    "recompute",
    "num_queues",
    "max_mean_delay",
    "attention_efficiency",
    "cp_overlap",
    "crossing",
)
_SPEEDUP, _THROUGHPUT = "speed-up over packing only", "TFLOP/s a GPU"


def dynamic_cp(study: Study) -> Result:
    """Packing only, at CP 8, and Dynamic-CP on the same documents, of each corpus, or of a file beside both."""
    from_file = study.source is not None
    swept = [(point, Protocol()) for point in study.points(*_WITHOUT, *(() if from_file else ("tail", "outliers")))]
    if study.sweep:
        swept += [
            (Point(f"{label} = {value}", study.central, label), replace(Protocol(), **{field: value}))
            for label, field, values in _SWEEP
            for value in values
            if not (from_file and label == _SPREAD)
        ]
    points = [point for point, _ in swept]
    corpora = [next(iter(CORPORA))] if from_file else list(CORPORA)
    tasks = [(point.inputs, protocol, corpus) for corpus in corpora for point, protocol in swept]
    made = study.map("Dynamic-CP", throughputs, tasks)
    rows: list[Row] = []
    sizes: dict[str, dict[int, float]] = {}
    ratios: dict[str, dict[str, float]] = {}
    for index, (name, paper) in enumerate(DYNAMIC_CP.items()):
        first = 0 if from_file else index * len(points)
        of_corpus = made[first : first + len(points)]
        packed = {point.label: one[0] for point, one in zip(points, of_corpus, strict=True)}
        dynamic = {point.label: one[1] for point, one in zip(points, of_corpus, strict=True)}
        sizes[name], ratios[name] = of_corpus[0][2], {at: dynamic[at] / packed[at] for at in packed}
        rows.append(row(_SPEEDUP, f"beside {name}", "emulated", paper.speedup, ratios[name]))
        rows += [
            row(_THROUGHPUT, f"{method}, beside {name}", "emulated", of_paper, series, ratio=False)
            for method, of_paper, series in (
                ("packing only", paper.packing_only, packed),
                ("Dynamic-CP", paper.dynamic_cp, dynamic),
            )
        ]
    rows.sort(key=lambda one: one.quantity != _SPEEDUP)
    lengths = (
        "Ours are the same numbers beside both datasets: those of --lengths."
        if from_file
        else "Neither dataset's lengths are published. Ours are log-normal, with two facts that others publish of such"
        " a corpus: " + "; ".join(f"{name}: {CORPORA[name].source}" for name in DYNAMIC_CP) + "."
    )
    return Result(
        name="dynamic_cp",
        title="Dynamic-CP: Llama-13B, PP 8, CP 8, 2048 documents a step",
        rows=tuple(rows),
        notes=(
            lengths,
            "GPU, TP (here 2), DP (2) and window (128K) are not published either, and are swept.",
            "Packing only: documents packed whole as they arrive, per-document sharding over 8 ranks. Dynamic-CP's"
            " times are bounds from above: every micro-batch as slow as its slowest group.",
            "Documents by the size of their group, Dynamic-CP at the central inputs: "
            + "; ".join(
                f"{name}: " + ", ".join(f"CP {size}: {share:.1%}" for size, share in of_name.items())
                for name, of_name in sizes.items()
            )
            + ".",
        ),
        influence=influence(points, ratios["GitHub"]),
        influenced=rows[0].name,
    )


@dataclass(frozen=True)
class _Cluster:
    model: ModelConfig
    layout: ParallelLayout  # of packing only
    hardware: Hardware
    kernel: KernelModel  # which runs
    inputs: Inputs
    protocol: Protocol

    def seconds(self, parts: Sequence[tuple[NDArray[Any], int]]) -> tuple[Floats, Floats]:
        """Times of documents on groups of ranks.

        Args:
            parts: lengths of documents, and the size of their group.

        Returns:
            float64[parts, stages, 3] seconds on every stage, and float64[parts] of sending a stage's output.
        """
        shards = [shard(lengths, cp_size=cp_size, strategy="per_document") for lengths, cp_size in parts]
        forward, backward = (
            np.array([self.kernel.rank_seconds(cut, passes=passes).max() for cut in shards])
            for passes in ("forward", "backward")
        )
        tokens = np.array([cut.tokens_per_rank.max() for cut in shards])
        sizes = np.array([cp_size for _, cp_size in parts])
        seconds, p2p = np.zeros((len(parts), self.layout.num_stages, 3)), np.zeros(len(parts))
        for cp_size in np.unique(sizes):
            of_size = np.flatnonzero(sizes == cp_size)
            stages = stage_seconds(
                tokens[of_size],
                attention_forward=forward[of_size],
                attention_backward=backward[of_size],
                model=self.model,
                layout=replace(self.layout, cp=int(cp_size)),
                hardware=self.hardware,
                tp_overlap=self.inputs.tp_overlap,
            )
            seconds[of_size], p2p[of_size] = stages.seconds, stages.p2p
            # The backward runs the forward again.
            attention = np.stack([forward, backward + forward, np.zeros_like(forward)], axis=-1)[of_size, None, :]
            attention = attention * self.layout.layers_of_stages(self.model)[:, None]
            seconds[of_size] -= np.minimum(stages.exposed_cp, self.protocol.hidden * attention)
        return seconds, p2p


def throughputs(
    steps: int, source: Source, inputs: Inputs, protocol: Protocol, corpus: str
) -> tuple[float, float, dict[int, float]]:
    """TFLOP/s a GPU of packing only and of Dynamic-CP; and the share of documents by the size of their group.

    Documents are of a corpus of `CORPORA`, or of `source`.
    """
    cluster = _cluster(inputs, protocol)
    generator = np.random.default_rng(inputs.seed)
    model, layout = cluster.model, cluster.layout
    reduction = float(data_parallel_seconds(model, layout, cluster.hardware).max())
    packed = dynamic = flops = 0.0
    sizes: Counter[int] = Counter()
    for step in range(min(steps, STEPS)):
        if source is None:
            drawn = CORPORA[corpus].wider(protocol.spread)
            lengths = drawn.lengths(DOCUMENTS, protocol.window, generator)
        else:
            lengths = np.minimum(generator.choice(source, DOCUMENTS), protocol.window)
        noise = (inputs.seed, 1 + step)  # the same for both methods
        flops += float(model.flops(lengths).sum())
        packed += _packing_only(cluster, lengths, noise) + reduction
        dynamic += _dynamic(cluster, lengths, noise, sizes) + reduction
    scale = flops / layout.world_size / 1e12
    total = sum(sizes.values())
    return scale / packed, scale / dynamic, {size: sizes[size] / total for size in sorted(sizes)}


def _cluster(inputs: Inputs, protocol: Protocol) -> _Cluster:
    model = ModelConfig.preset(MODEL)
    return _Cluster(
        model=model,
        layout=ParallelLayout(dp=protocol.dp, pp=PP, cp=CP, tp=protocol.tp, recompute="full"),
        hardware=hardware(inputs),
        kernel=running(model.num_heads // protocol.tp, model.head_dim, inputs),
        inputs=inputs,
        protocol=protocol,
    )


def _packing_only(cluster: _Cluster, lengths: NDArray[np.int64], noise: Seed) -> float:
    """Seconds of a step: whole documents in arrival order, replicas in turn."""
    offsets = batch_offsets(lengths, tokens_per_batch=cluster.protocol.window)
    costs, p2p = cluster.seconds([(lengths[a:b], CP) for a, b in itertools.pairwise(offsets)])
    costs *= _factors(cluster, costs.shape, noise)
    dp = cluster.layout.dp
    missing = -len(costs) % dp  # empty micro-batches, so that replicas have as many
    costs = np.pad(costs, ((0, missing), (0, 0), (0, 0))).reshape(-1, dp, *costs.shape[1:]).swapaxes(0, 1)
    p2p = np.pad(p2p, (0, missing)).reshape(-1, dp).T
    return float(simulate_steps(costs[None], num_stages=PP, p2p_seconds=p2p[None]).seconds[0])


def _dynamic(cluster: _Cluster, lengths: NDArray[np.int64], noise: Seed, sizes: Counter[int]) -> float:
    """Seconds of a step at most: micro-batches as slow as their slowest group. Counts documents by size of group."""
    layout, protocol = cluster.layout, cluster.protocol
    per_token, per_exchange = _exchange(cluster)
    plan = plan_dynamic_cp(
        lengths,
        world_size=layout.dp * layout.cp,
        num_stages=PP,
        max_tokens_per_rank=protocol.window // CP,
        cost_model=_believed(cluster),
        exchange=Exchange(seconds_per_token=per_token, seconds_per_exchange=per_exchange, overlap=protocol.hidden),
    )
    groups = [
        (index, group)
        for index, micro_batch in enumerate(plan.micro_batches)
        for group in micro_batch.groups
        if len(group.lengths)
    ]
    for _, group in groups:
        sizes[group.cp_size] += len(group.lengths)
    seconds, sent = cluster.seconds([(group.lengths, group.cp_size) for _, group in groups])
    micro_batch = np.array([index for index, _ in groups])
    costs, p2p = np.zeros((len(plan), *seconds.shape[1:])), np.zeros(len(plan))
    np.maximum.at(costs, micro_batch, seconds)
    np.maximum.at(p2p, micro_batch, sent)
    costs *= _factors(cluster, costs.shape, noise)
    return float(simulate_pipeline(costs, num_stages=PP, p2p_seconds=p2p).seconds)


def _believed(cluster: _Cluster) -> CostModel:
    """What the planner is told: FLOPs, at the rates of GEMMs and of the analytic kernel's longest calls."""
    model, tp, rate = cluster.model, cluster.layout.tp, cluster.hardware.flops_per_second
    longest = [cluster.protocol.window]
    assumed = kernel(model.num_heads // tp, model.head_dim, rate=cluster.inputs.attention_rate)
    seconds = float(assumed.segment_seconds(longest, longest)[0]) * model.num_layers
    flops = float(model.cost_model(attention_efficiency=1.0).attention_cost(longest)[0])
    return model.cost_model(
        attention_efficiency=flops / tp / seconds / rate, flops_per_second=rate * tp, recompute=True
    )


def _exchange(cluster: _Cluster) -> tuple[float, float]:
    """Seconds that keys and values, and their gradients, take over all layers: of a token, and of handing them on."""
    layout, near = cluster.layout, cluster.hardware
    group = Communicator.along("cp", layout, near)
    link = near.inter_node if group.nodes > 1 else near.intra_node
    width = 2 * kv_width(cluster.model.attention, layout)
    exchanges = 4  # keys of the forward, of the forward again, of the backward; gradients
    layers = cluster.model.num_layers
    per_token = layers * width * exchanges * layout.number_bytes / link.bandwidth
    return per_token, layers * exchanges * link.latency


def _factors(cluster: _Cluster, shape: tuple[int, ...], noise: Seed) -> Floats:
    sigma = cluster.inputs.noise
    return np.exp(np.random.default_rng(noise).normal(-(sigma**2) / 2, sigma, shape))
