"""Bytes of a GPU during training.

Activations are counted as in Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models",
section 4), for today's layer: flash attention, grouped-query attention, a gated feed-forward block, no dropout.
Of one token and layer, with `a` bytes a value, hidden size `h`, queries `q = num_heads * head_dim`, keys
`kv = num_kv_heads * head_dim` and feed-forward width `f`, these are kept for the backward:

=========================================  ===========  =========================  ================
what                                       bytes        divided by                 recompute drops
=========================================  ===========  =========================  ================
input of the layer (attention's norm)      a h          tp, if sequence parallel   (full keeps it)
normalised input of QKV                    a h          tp, if sequence parallel   selective, full
queries, keys, values, rotated             a (q + 2kv)  tp                         full
attention's output, input of O             a q          tp                         full
log-sum-exp, float32                       4 num_heads  tp                         full
input of the feed-forward block's norm     a h          tp, if sequence parallel   full
its normalised input                       a h          tp, if sequence parallel   selective, full
gate and up                                2 a f        tp                         full
activated gate, unless `fused_ffn`         a f          tp                         selective, full
product of the two, input of down          a f          tp                         selective, full
reciprocal norms, float32                  8            tp, if sequence parallel   full
=========================================  ===========  =========================  ================

A mixture of experts keeps the feed-forward rows for each expert visited, and a copy of the input for each, which tensor
parallelism does not divide. Normalised heads (Qwen3) add their inputs, `a (q + kv)`, and their reciprocal norms. A
layer is at work on one micro-batch at a time, which takes for each token

=========================================  ==============================================
gradients in the feed-forward block        a (3 f experts_per_token / tp + h)
gathered keys and values, their gradients  2 (a + 4) cp kv / tp, with cp above 1
a layer again, if recompute is full        the table above
logits of the last stage                   (a + 4) vocab / tp, unless `fused_loss`
=========================================  ==============================================

Logits are the values and a float32 softmax, which becomes their gradient in place. The gradients of gathered keys are
summed in float32, as `wlb.torch` does.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._errors import error
from wlb.hardware import GIB
from wlb.layout import ParallelLayout
from wlb.models import ModelConfig

RESERVED_BYTES = 4 * GIB
"""Left free by default: CUDA's context and kernels, NCCL's buffers, what the allocator cannot use."""

KEY_GRADIENT_BYTES = 4
"""Width of the gradients of keys and values while they are summed over context-parallel ranks."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the GPUs of every pipeline rank.

    The first five are float64[pp], the others [..., pp] for micro-batches [...].
    """

    parameters: NDArray[np.float64]
    gradients: NDArray[np.float64]
    optimizer: NDArray[np.float64]
    gathered_parameters: NDArray[np.float64]  # ZeRO-3: two layers' parameters and one's gradients, whole
    reserved: NDArray[np.float64]
    activations: NDArray[np.float64]  # kept for the backward, of all micro-batches under way
    workspace: NDArray[np.float64]  # of the layer at work: gathered keys, gradients, a layer recomputed
    logits: NDArray[np.float64]  # on the last rank

    @property
    def total(self) -> NDArray[np.float64]:
        """Float64[..., pp]: the sum."""
        parts = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return np.asarray(sum(parts[1:], start=parts[0]))


def activation_bytes(model: ModelConfig, layout: ParallelLayout) -> float:
    """Bytes that one layer keeps for the backward, for each token of a rank: the table above."""
    if layout.recompute == "full":
        return layout.activation_bytes * model.hidden_size / (layout.tp if layout.sequence_parallel else 1)
    return _layer_bytes(model, layout, selective=layout.recompute == "selective")


def _layer_bytes(model: ModelConfig, layout: ParallelLayout, *, selective: bool) -> float:
    a, tp = layout.activation_bytes, layout.tp
    experts, h, f = model.experts_per_token, model.hidden_size, model.ffn_hidden_size
    q, kv = model.num_heads * model.head_dim, kv_width(model, layout) * tp
    kept_ffn = (2 if model.gated_ffn else 1) * f
    dropped_ffn = (1 if layout.fused_ffn or not model.gated_ffn else 2) * f
    by_token = 2.0 * a * h + 8  # split over tensor-parallel ranks only by sequence parallelism
    by_head: float = a * (2 * q + 2 * kv + experts * kept_ffn) + 4 * model.num_heads
    if model.qk_norm:
        by_head += a * (q + kv) + 4 * (q + kv) / model.head_dim
    if not selective:
        by_token += 2 * a * h
        by_head += a * experts * dropped_ffn
    copies = a * h * experts if model.num_experts > 1 else 0
    return by_token / (tp if layout.sequence_parallel else 1) + by_head / tp + copies


def kv_width(model: ModelConfig, layout: ParallelLayout) -> int:
    """Width of the keys of a tensor-parallel rank: a rank has at least one head, a copy if there are fewer."""
    return max(1, model.num_kv_heads // layout.tp) * model.head_dim


def in_flight(layout: ParallelLayout, *, num_micro_batches: int | None = None) -> NDArray[np.float64]:
    """How many micro-batches' activations each pipeline rank holds at its peak, in units of all its layers.

    1F1B: `pp - rank`. Interleaved (Narayanan et al. 2021, section 2.2): the rank warms up with
    `2 (pp - rank - 1) + (v - 1) pp` chunks of `1 / v` of its layers and then holds one more. Never more than there are.

    Args:
        layout: `pp` and `virtual_stages` of it.
        num_micro_batches: of a step and data-parallel rank; default: many.

    Returns:
        float64[pp].
    """
    p, v, rank = layout.pp, layout.virtual_stages, np.arange(layout.pp)
    chunks = p - rank if v == 1 else 2 * (p - rank - 1) + (v - 1) * p + 1
    if num_micro_batches is not None:
        chunks = np.minimum(chunks, num_micro_batches * v)
    return np.asarray(chunks / v)


def memory_per_rank(
    model: ModelConfig,
    layout: ParallelLayout,
    tokens: ArrayLike,
    *,
    num_micro_batches: int | None = None,
    reserved_bytes: int = RESERVED_BYTES,
) -> RankMemory:
    """Bytes of every pipeline rank when each micro-batch under way has that many tokens.

    Args:
        model: its shape.
        layout: how it is spread.
        tokens: int[...] tokens of a micro-batch, over all context-parallel ranks; any shape.
        num_micro_batches: of a step and data-parallel rank; default: enough to fill the pipeline.
        reserved_bytes: not available.

    Raises:
        WlbError: the layout does not divide the model, or a number is negative.
    """
    layout.check(model=model)
    # A rank has at most one token more than its share; a fraction of a token is as good.
    per_rank = _check_tokens(tokens)[..., None] / layout.cp
    static, per_token = coefficients(model, layout, num_micro_batches)
    if reserved_bytes < 0:
        raise error("reserved_bytes", f"= {reserved_bytes}: must not be negative", value=reserved_bytes)
    reserved = np.full(layout.pp, float(reserved_bytes))
    activations, workspace, logits = (per_rank * slope for slope in per_token)
    return RankMemory(*static, reserved, activations, workspace, logits)


def _check_tokens(tokens: ArrayLike) -> NDArray[np.float64]:
    values = np.asarray(tokens, dtype=np.float64)
    wrong = np.flatnonzero(~(values >= 0).ravel())
    if wrong.size:
        value = values.ravel()[wrong[0]]
        index = int(wrong[0]) if values.ndim else None
        raise error("tokens", f"= {value:g}: must not be negative", index=index, value=value)
    return values


Floats = NDArray[np.float64]


def parameters_per_rank(model: ModelConfig, layout: ParallelLayout) -> NDArray[np.float64]:
    """Float64[pp]: parameters on a GPU of every pipeline rank, before FSDP shares them out.

    Norms and the router are not divided by tensor parallelism, and key heads no further than into single ones. A tied
    embedding has a copy on the last rank.
    """
    layers = layout.layers_of_stages(model).reshape(layout.virtual_stages, layout.pp).sum(axis=0)
    embedding = model.vocab_size * model.hidden_size / layout.tp
    parameters: NDArray[np.float64] = layers * _layer_parameters(model, layout)
    parameters[0] += embedding
    parameters[-1] += model.hidden_size + (embedding if layout.pp > 1 or not model.tied_embeddings else 0)
    return parameters


def _layer_parameters(model: ModelConfig, layout: ParallelLayout) -> float:
    whole = 2 * model.hidden_size + model.qk_norm * 2 * model.head_dim
    whole += model.hidden_size * model.num_experts if model.num_experts > 1 else 0
    copied = 2 * model.hidden_size * (kv_width(model, layout) - model.num_kv_heads * model.head_dim / layout.tp)
    return (model.layer_parameters() - whole) / layout.tp + whole + copied


def coefficients(
    model: ModelConfig, layout: ParallelLayout, num_micro_batches: int | None
) -> tuple[tuple[Floats, Floats, Floats, Floats], tuple[Floats, Floats, Floats]]:
    """The terms of `RankMemory` that are constant, and those for each token of a rank; each float64[pp]."""
    p, tp = layout.pp, layout.tp
    parameters = parameters_per_rank(model, layout)
    shards = layout.dp * layout.cp
    level = ("none", "zero1", "zero2", "zero3").index(layout.fsdp)
    optimizer = parameters * layout.optimizer_bytes / (shards if level >= 1 else 1)
    gradients = parameters * layout.gradient_bytes / (shards if level >= 2 else 1)
    gathered = np.zeros(p)
    if level >= 3 and shards > 1:
        layer = _layer_parameters(model, layout)
        largest = np.full(p, layer)
        largest[[0, -1]] = max(layer, model.vocab_size * model.hidden_size / tp)
        gathered = largest * (2 * layout.parameter_bytes + layout.gradient_bytes)
    held = parameters * layout.parameter_bytes / (shards if level >= 3 else 1)

    # Chunks under way are counted as the rank's largest.
    largest_chunk = layout.layers_of_stages(model).reshape(layout.virtual_stages, p).max(axis=0)
    under_way = in_flight(layout, num_micro_batches=num_micro_batches) * largest_chunk * layout.virtual_stages
    activations = under_way * activation_bytes(model, layout)
    a = layout.activation_bytes
    working = a * (3 * model.ffn_hidden_size * model.experts_per_token / tp + model.hidden_size)
    if layout.cp > 1:
        working += 2 * (a + KEY_GRADIENT_BYTES) * layout.cp * kv_width(model, layout)
    if layout.recompute == "full":
        working += _layer_bytes(model, layout, selective=False)
    logits = np.zeros(p)
    if not layout.fused_loss:
        logits[-1] = (a + 4) * model.vocab_size / tp
    return (held, gradients, optimizer, gathered), (activations, np.full(p, working), logits)
