"""What the paper does not publish and a reproduction needs, each with its value, its reason and its range.

The central values were chosen before any result was seen, by one rule: what the paper says, else the default of
`wlb_tools.simulate`. The band of a result is its least and greatest over `points`: every value of `SWEEP`
alone, and draws of all of them together. After a first run `crossing` joined the sweep, since Fixed-4D turned out to
compute more than Plain-4D, and so did the draws; no central value was changed. Later what the paper does say left the
sweep (`PUBLISHED`, one virtual stage, tensor-parallel communication that nothing hides): the bands became
narrower.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from studies.paper.published import MEAN_DELAY, Configuration
from wlb._core import KernelModel, batch_offsets, split_documents
from wlb.models import ModelConfig
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.simulation import Scenario


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """One choice of everything that was not published.

    Args:
        virtual_stages: `v`; the schedule is interleaved 1F1B (section 6).
        max_contexts: `S_max` in context windows, never more than fits; None: what fits into a GPU's memory.
        recompute: what the backward computes again; it frees memory for a larger `S_max`.
        num_queues: of outliers.
        max_mean_delay: iterations; thresholds are tuned to keep the mean delay of a token below.
        attention_efficiency: what the packer believes of attention's rate relative to the rest; None: profiled, that is
            fitted to the cluster, communication included (section 4.1).
        gemm_efficiency: share of its peak that a GPU reaches in a layer's linear part.
        attention_rate: attention's rate relative to `KernelModel.analytic`.
        kernel_error: how far the kernel that runs is from the one that the sharding is chosen by and the packer is
            fitted to: standard deviation of the logarithm of every entry of its table.
        noise: standard deviation of a pass of a micro-batch through a stage, relative to its time.
        tp_overlap: share of tensor-parallel communication that computation hides.
        cp_overlap: share of context-parallel communication that computation hides.
        network: bytes/s of a GPU's network card, relative to 400 Gb/s.
        tail: where long documents end: "window": at 0.95 of the context window; "fixed": at 125,000 tokens, cut where
            the window is smaller.
        outliers: share of documents above 6,250 tokens.
        crossing: documents that cross the end of a window: "whole": they reach every method whole, and only Plain-4D
            cuts them, which leaves it less attention to compute; "cut": the loader has cut the stream into windows
            already, so that all methods train the same pieces.
        seed: of lengths and noise.
        profile: a measured kernel, a name or a path, that runs instead of the assumed one; what plans and shardings are
            chosen by stays the analytic model. Not swept.
    """

    virtual_stages: int = 2
    max_contexts: float | None = None
    recompute: Literal["none", "selective"] = "none"
    num_queues: int = 2
    max_mean_delay: float = MEAN_DELAY
    attention_efficiency: float | None = None
    gemm_efficiency: float = 0.65
    attention_rate: float = 1.0
    kernel_error: float = 0.05
    noise: float = 0.02
    tp_overlap: float = 0.5
    cp_overlap: float = 0.0
    network: float = 1.0
    tail: Literal["window", "fixed"] = "window"
    outliers: float = 0.0275
    crossing: Literal["whole", "cut"] = "whole"
    seed: int = 0
    profile: str | None = None


@dataclass(frozen=True)
class Input:
    """An input with its range.

    `values` are what is tried beside the central one.
    """

    label: str
    field: str
    values: tuple[Any, ...]
    reason: str  # why this value, and this range

    @property
    def central(self) -> Any:
        """The value of `Inputs`."""
        return getattr(Inputs(), self.field)

    @property
    def of_lengths(self) -> bool:
        """Whether it has no meaning for lengths from a file."""
        return self.field in ("tail", "outliers")


SWEEP = (
    Input("virtual stages v", "virtual_stages", (4,), "the paper interleaves (section 6): at least 2"),
    Input(
        "S_max in contexts", "max_contexts", (1.0, 1.25, 1.5), "a memory bound: what 80 GB hold without recomputation"
    ),
    Input("recomputation", "recompute", ("selective",), "not mentioned; it only makes S_max larger"),
    Input(
        "outlier queues", "num_queues", (1, 3), "table 2 has no gain from a third; thresholds are tuned, not published"
    ),
    Input("linear part, share of peak", "gemm_efficiency", (0.5, 0.8), "as wlb_tools.Hardware assumes"),
    Input("attention's rate, of the default", "attention_rate", (0.6, 1.2), "0.6: FlashAttention-2 on a H100"),
    Input("error of the kernel model", "kernel_error", (0.0, 0.1), "a profile of another day"),
    Input("noise of a pass", "noise", (0.0, 0.05), "clocks and network of a shared cluster"),
    Input(
        "TP communication hidden", "tp_overlap", (0.25, 1.0), "the paper overlaps it (section 6), not saying how much"
    ),
    Input("CP communication hidden", "cp_overlap", (0.5, 1.0), "an all-gather before attention hides nothing"),
    Input("network, of 400 Gb/s", "network", (0.5,), "RoCE of unknown speed; 400 Gb/s is what a DGX H100 has"),
    Input("end of the lengths' tail", "tail", ("fixed",), "documents reach the window (section 2.2)"),
    Input(
        "documents above 6,250 tokens",
        "outliers",
        (0.01, 0.07),
        "0.07: the most with 75 % of the tokens in documents up to half the window (section 2.2)",
    ),
    Input("documents across windows", "crossing", ("cut",), "where the paper's loader cuts is not said"),
    Input("seed", "seed", (1, 2), "another sample of documents"),
)

PUBLISHED = {
    "max_mean_delay": "limit of the mean delay",
    "attention_efficiency": "attention's efficiency for the packer",
}
"""Fields that the paper leaves no choice of, with their labels: not swept. 0.5 iterations are published
(section 7), and that the packer goes by a profile (section 4.1)."""

DRAWS = 24
"""Points of a sweep at which all inputs vary together."""


@dataclass(frozen=True)
class Point:
    """One choice of inputs in a sweep."""

    label: str
    inputs: Inputs
    swept: str | None = None  # label of the input that alone is not central


def points(*, from_file: bool = False, without: tuple[str, ...] = (), central: Inputs | None = None) -> Iterator[Point]:
    """The central inputs; each value of the sweep, the others central; draws in which each input has any of its values.

    Args:
        from_file: lengths are given, so what shapes the generated ones is left out.
        without: fields that make no difference.
        central: what is swept around.
    """
    central = central or Inputs()
    yield Point("central", central)
    sweep = [one for one in SWEEP if one.field not in without and not (from_file and one.of_lengths)]
    for one in sweep:
        for value in one.values:
            yield Point(f"{one.label} = {value}", replace(central, **{one.field: value}), one.label)
    generator = np.random.default_rng(0)
    for draw in range(1, DRAWS + 1):
        changes = {one.field: (one.central, *one.values)[generator.integers(1 + len(one.values))] for one in sweep}
        yield Point(f"draw {draw}", replace(central, **changes))


def documents(
    configuration: Configuration, inputs: Inputs, *, steps: int, source: ArrayLike | None = None
) -> NDArray[np.int64]:
    """Lengths of `steps` global batches.

    Without a source, those of a generator that needs no license: 97.25 % of the documents uniform from 1 to 6,250
    tokens, the others log-uniform up to 0.95 of the context window (at 128K: 125,000). Their mean is 4.1K, and 87 % of
    the tokens are in documents up to half the window; the paper's figure 3 says "more than 75 %".

    Args:
        configuration: its window and the size of a global batch.
        inputs: `tail`, `outliers`, `seed`.
        steps: global batches.
        source: int[n] lengths to shuffle and repeat instead; those above the window are cut.
    """
    context = configuration.context
    tokens_per_batch = configuration.pp * configuration.dp * context
    needed = steps * tokens_per_batch + context
    generator = np.random.default_rng(inputs.seed)
    parts: list[NDArray[np.int64]] = []
    while needed > 0:
        if source is None:
            part = generated(_AT_A_TIME, context, inputs, generator)
        else:
            part = generator.permutation(np.asarray(source)).astype(np.int64)
        parts.append(part)
        needed -= int(part.sum())
    _, _, pieces = split_documents(np.concatenate(parts), max_document_tokens=context)
    lengths = pieces.astype(np.int64)
    if inputs.crossing == "cut":
        ends = lengths.cumsum()
        lengths = np.diff(np.union1d(ends, np.arange(context, ends[-1], context)), prepend=0)
    offsets = batch_offsets(lengths, tokens_per_batch=tokens_per_batch)
    return lengths[: offsets[steps]]


_SHORT, _LONG = 6250, 125000
_AT_A_TIME = 4096


def generated(count: int, context: int, inputs: Inputs, generator: np.random.Generator) -> NDArray[np.int64]:
    """`count` lengths for a context window; with `inputs.tail` "fixed" some may be above it."""
    end = _LONG if inputs.tail == "fixed" else _LONG * context / 131072
    outlier = generator.random(count) < inputs.outliers
    short = generator.integers(1, _SHORT + 1, count)
    long = np.exp(generator.uniform(np.log(_SHORT), np.log(end), count)).astype(np.int64)
    return np.where(outlier, long, short)


def scenario(configuration: Configuration, inputs: Inputs, lengths: NDArray[np.int64]) -> Scenario:
    """The paper's cluster under these inputs.

    The packer and the choice of a sharding go by the analytic kernel model and by FLOPs; times come from a table with
    errors of its own, forward and backward, so that neither grades itself.
    """
    model = ModelConfig.preset(configuration.model)
    layout = ParallelLayout(
        tp=configuration.tp,
        cp=configuration.cp,
        pp=configuration.pp,
        dp=configuration.dp,
        virtual_stages=inputs.virtual_stages,
        recompute=inputs.recompute,
    )
    assumed = kernel(model.num_heads // layout.tp, model.head_dim, rate=inputs.attention_rate)
    believed = Scenario(
        model=model,
        layout=layout,
        hardware=hardware(inputs),
        context=configuration.context,
        kernel_model=assumed,
        tp_overlap=inputs.tp_overlap,
        cp_overlap=inputs.cp_overlap,
    )
    efficiency = inputs.attention_efficiency or believed.fitted_efficiency(lengths)
    fits = believed.limit
    limit = fits if inputs.max_contexts is None else min(fits, int(inputs.max_contexts * configuration.context))
    runs = running(assumed.num_heads, model.head_dim, inputs)
    return replace(
        believed,
        kernel_model=runs,
        selector=assumed,
        max_tokens=limit,
        cost_model=model.cost_model(attention_efficiency=efficiency),
        num_queues=inputs.num_queues,
        max_mean_delay=inputs.max_mean_delay,
        noise=inputs.noise,
        noise_seed=inputs.seed,
    )


def hardware(inputs: Inputs) -> Hardware:
    """The paper's nodes: 8 H100 SXM, RoCE (section 7.1)."""
    preset = Hardware.preset("h100")
    network = replace(preset.inter_node, bandwidth=preset.inter_node.bandwidth * inputs.network)
    return replace(preset, gemm_efficiency=inputs.gemm_efficiency, inter_node=network)


_QUERIES = [2**i for i in range(4, 14)]
_KEYS = [2**i for i in range(7, 18)]


def running(num_heads: int, head_dim: int, inputs: Inputs) -> KernelModel:
    """What runs: a measured kernel if there is one, else a table with errors of its own."""
    if inputs.profile is not None:
        return KernelModel.from_profile(inputs.profile, num_heads=num_heads)
    return kernel(num_heads, head_dim, rate=inputs.attention_rate, error=inputs.kernel_error, seed=inputs.seed)


def kernel(num_heads: int, head_dim: int, *, rate: float = 1.0, error: float = 0.0, seed: int = 0) -> KernelModel:
    """A table of the analytic H100's latencies at `rate` times its speed, each wrong by a factor of its own.

    Args:
        num_heads: of one GPU, MHA.
        head_dim: width of a head.
        rate: speed relative to the analytic model's.
        error: standard deviation of the logarithm of the factors.
        seed: of the factors.
    """
    analytic = KernelModel.analytic("h100", num_heads=num_heads, head_dim=head_dim)
    generator = np.random.default_rng(seed)

    def latencies(passes: Literal["forward", "backward"]) -> dict[str, Any]:
        factors = np.exp(generator.normal(0.0, error, (len(_QUERIES), len(_KEYS)))) / rate
        table = [
            [
                float(analytic.segment_seconds([queries], [keys], passes=passes)[0] * factors[i, j])
                if queries <= keys
                else None
                for j, keys in enumerate(_KEYS)
            ]
            for i, queries in enumerate(_QUERIES)
        ]
        launch = {"forward": 5e-6, "backward": 10e-6}
        return {"tile": analytic.tiles[0], "median_seconds": table, "launch_seconds": launch[passes]}

    profile = {
        "format": "wlb.profile",
        "version": 1,
        "gpu": "assumed H100",
        "kernel": f"analytic x {rate:g}, error {error:g}",
        "causal": True,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": head_dim,
        "query_lengths": _QUERIES,
        "key_lengths": _KEYS,
        "forward": latencies("forward"),
        "backward": latencies("backward"),
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.json")
        path.write_text(json.dumps(profile))
        return KernelModel.from_profile(path)
