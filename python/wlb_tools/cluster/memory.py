"""Bytes of a GPU during training.

Activations are counted as in Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large Transformer Models",
section 4), for today's layer: flash attention, grouped-query attention, a gated feed-forward block, no dropout.
Kept for the backward pass, for one token and layer, with `a` bytes a value, hidden size `h`, queries `q = num_heads *
head_dim`, keys `kv = num_kv_heads * head_dim` and feed-forward width `f`:

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

If only some layers are recomputed (`recompute_layers`), the others keep everything. Recomputed attention keeps its
queries, keys, values and output, which O needs, and drops the log-sum-exp. A mixture of experts keeps the feed-forward
rows for each expert visited, and a copy of the input for each, not divided by tp but multiplied by `expert_tp / tp`.
Normalised heads (Qwen3) add their inputs, `a (q + kv)`, and their reciprocal norms. One layer at a time also needs, for
each token of its micro-batch:

=========================================  ====================================================
gradients in the feed-forward block        a (3 f experts_per_token / tp + h)
gathered keys and values, their gradients  8 a cp kv / tp at most, with cp above 1; see below
a layer again, if recompute is full        the table above
rows to experts and back, with ep above 1  2 a h experts_per_token, times expert_tp / tp
logits, on the rank of the last stage      (a + 4) vocab / tp, unless `fused_loss`
=========================================  ====================================================

Each of `ep` ranks holds its share of the routed experts, whose parameters, gradients and optimizer state are sharded
over the remaining dp x cp / ep ranks. Every rank is assumed to receive as many rows as it sends.

With LoRA, only adapters have gradients and optimizer state, and each tensor-parallel rank has all of an adapter. FP8
matrix products keep two copies of a layer's weights, plain and transposed, of 1 byte each, besides the parameters, as
Transformer Engine caches them; if parameters are kept in FP8, these two copies are the parameters. With ZeRO-3, FP8
makes gathered parameters smaller, and copies live no longer than a layer. Offloaded optimizer state is in host memory.

Logits are the values and a float32 softmax, which becomes their gradient in place.

Keys and values are gathered as `wlb.torch.context_parallel_attention` does, for as many heads at a time as have
`GATHERED` bytes of them at most; the most that a layer holds at once was counted (`python -m benches.attention`). Of
heads that come together it holds four times the gathered bytes: those that arrive, those that segments pick, and the
gradients of these, which go home in the same dtype. Of heads that come in parts it holds six and a half times the bytes
of a part, because the next keys arrive and the gradients before go home meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Schedule
from wlb._core import MAX_MICRO_BATCHES, simulate_pipeline
from wlb._errors import check_integer, error, numbers
from wlb._shown import explained
from wlb.models import Attention, Block, CountedBlock, FeedForward, Layer, ModelConfig
from wlb_tools.cluster.hardware import GIB
from wlb_tools.cluster.parallel import GRADIENT_BYTES, ParallelLayout, Recompute, default_schedule

RESERVED_BYTES = 4 * GIB
"""Memory that is left free by default, for CUDA's context and kernels, NCCL's buffers and the allocator's losses."""

GATHERED = 1 << 28
"""Most bytes of keys and values that context-parallel ranks gather at a time, but always at least one head."""

TOGETHER, IN_PARTS = 4.0, 6.5
"""Bytes that a layer holds for each byte that is gathered at a time: of all heads together, or of a part of them."""


@explained
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
    logits: NDArray[np.float64]  # on the rank of the last stage

    @property
    def total(self) -> NDArray[np.float64]:
        """Float64[..., pp]: the sum."""
        parts = [getattr(self, field.name) for field in dataclasses.fields(self)]
        return np.asarray(sum(parts[1:], start=parts[0]))


def activation_bytes(model: ModelConfig, layout: ParallelLayout, layer: Layer | None = None) -> float:
    """Bytes that a layer keeps for the backward pass, for each token of a rank: the table above.

    Args:
        model: its sizes.
        layout: the layout on GPUs.
        layer: one of its layers; default: the one that keeps most.
    """
    layers = model.kinds if layer is None else (layer,)
    return max(_layer_bytes(model, layout, each, layout.recompute) for each in layers)


def _layer_bytes(model: ModelConfig, layout: ParallelLayout, layer: Layer, recompute: Recompute) -> float:
    a, tp, h = layout.number_bytes, layout.tp, model.hidden_size
    if recompute == "full":
        return a * model.residual_width / (tp if layout.sequence_parallel else 1)
    selective = recompute == "selective"
    # Inputs and outputs of norms are split over tensor-parallel ranks only by sequence parallelism.
    by_token = float(layer.norms * (a * h + 4))
    by_head, on_each = 0.0, 0.0
    if not selective:
        by_token += len(layer.sublayers) * a * h
    for block in layer.blocks:
        kept = block.kept(h, kv_copies=_kv_copies(block, layout))
        by_head += a * kept.values
        if recompute != "attention" or not block.pairs():
            by_head += 4 * kept.statistics
        # Rows of routed experts that arrive at the tensor-parallel ranks of an expert.
        share = layout.tp_of_experts / tp if isinstance(block, FeedForward) else 1.0
        on_each += a * kept.rows * share
        if not selective:
            by_head += a * (kept.recomputed + (0 if layout.fused_ffn else kept.unfused))
    return by_token / (tp if layout.sequence_parallel else 1) + by_head / tp + on_each


def kv_width(attention: Attention, layout: ParallelLayout) -> int:
    """Width of the keys of a tensor-parallel rank, which has at least one head, perhaps a copy."""
    return max(1, attention.num_kv_heads // layout.tp) * attention.head_dim


def _kv_copies(block: Block, layout: ParallelLayout) -> float:
    """Number of tensor-parallel ranks that hold a copy of each key head."""
    return kv_width(block, layout) * layout.tp / block.kv_width if isinstance(block, Attention) else 1.0


def exchanged_width(layer: Layer, layout: ParallelLayout) -> int:
    """Numbers of a token that a tensor-parallel rank's context-parallel group exchanges for one layer.

    Keys and values of its heads; for latent attention the compressed row, which every tensor-parallel rank needs whole,
    as it needs an indexer's keys. Linear attention and state spaces send states whose size does not depend on tokens,
    so nothing is counted.
    """
    own = sum(kv_width(block, layout) - block.kv_width for block in layer.of_kind(Attention))
    for block in layer.of_kind(CountedBlock):
        whole = block.num_kv_heads * block.head_dim
        if 2 * whole <= block.exchanged:  # not of latent attention, nor where keys are the values
            own += max(1, block.num_kv_heads // layout.tp) * block.head_dim - whole
    return 2 * own + sum(block.exchanged for block in layer.blocks)


def visit_width(model: ModelConfig, layer: Layer) -> int:
    """Numbers of a token that are sent to the experts of one layer; as many come back."""
    return sum(block.visit_width(model.hidden_size) for block in layer.of_kind(FeedForward))


def ranks_of_stages(layout: ParallelLayout, *, schedule: Schedule | None = None) -> NDArray[np.int64]:
    """int64[stages]: the pipeline rank of every stage, in the order of the model, by `wlb.simulate_pipeline`.

    Raises:
        WlbError: the schedule does not support that many virtual stages.
    """
    return _pipeline(schedule or default_schedule(layout), layout.pp, layout.virtual_stages, 2 * layout.pp)[0]


def in_flight(
    layout: ParallelLayout, *, schedule: Schedule | None = None, num_micro_batches: int | None = None
) -> NDArray[np.float64]:
    """Micro-batches whose activations a pipeline rank holds at its peak, in units of all its stages.

    This is ``PipelineTimeline.peak_activation`` of `wlb.simulate_pipeline`: a micro-batch is held from its forward pass
    until its weight gradient is done.

    Args:
        layout: its `pp` and `virtual_stages` count.
        schedule: of the pipeline; default: 1F1B, interleaved if the layout has virtual stages.
        num_micro_batches: of a step and data-parallel rank; default: a large multiple of `pp`. If `pp` does not divide
            it, an interleaved schedule has larger rounds and holds more.

    Returns:
        float64[pp].

    Raises:
        WlbError: the schedule does not support that layout or number; or it is GPipe, which holds all micro-batches,
            and there is no number.

    Complexity:
        O(num_micro_batches * stages) at the first call for a shape.
    """
    schedule = schedule or default_schedule(layout)
    if num_micro_batches is None:
        if schedule == "gpipe":
            raise error("num_micro_batches", "is needed: gpipe holds as many as there are")
        num_micro_batches = 2 * layout.pp  # no other schedule runs further ahead
    check_integer("num_micro_batches", num_micro_batches, minimum=1, maximum=MAX_MICRO_BATCHES)
    return _pipeline(schedule, layout.pp, layout.virtual_stages, int(num_micro_batches))[1]


@functools.lru_cache(maxsize=256)
def _pipeline(
    schedule: Schedule, pp: int, virtual_stages: int, num_micro_batches: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The rank of every stage, and what each rank holds at its peak; both do not depend on times."""
    timeline = simulate_pipeline(
        np.ones(num_micro_batches), schedule=schedule, num_stages=pp, num_virtual_stages=virtual_stages
    )
    ranks = np.empty(pp * virtual_stages, dtype=np.int64)
    ranks[timeline.stages] = timeline.ranks
    held = timeline.peak_activation
    for shared in (ranks, held):
        shared.flags.writeable = False
    return ranks, held


def memory_per_rank(
    model: ModelConfig,
    layout: ParallelLayout,
    tokens: ArrayLike,
    *,
    schedule: Schedule | None = None,
    num_micro_batches: int | None = None,
    held_tokens: ArrayLike | None = None,
    reserved_bytes: int = RESERVED_BYTES,
) -> RankMemory:
    """Bytes on every pipeline rank if each micro-batch under way has `tokens` tokens.

    Args:
        model: its sizes.
        layout: the layout on GPUs.
        tokens: int[...] tokens of a micro-batch, on all context-parallel ranks together; any shape.
        schedule: of the pipeline, as in `in_flight`.
        num_micro_batches: of a step and data-parallel rank, as in `in_flight`; default: enough to fill it.
        held_tokens: float64[..., pp] tokens of the micro-batches under way on each rank, if not all have `tokens`
            (``peak_activation`` of a simulated step); `tokens` is then the largest micro-batch.
        reserved_bytes: bytes that are not available.

    Raises:
        WlbError: the layout does not divide the model, the schedule does not support the layout, or a number is
            negative.
    """
    layout.check(model=model)
    # A rank has at most one token more than its share; a fraction of a token is as good.
    per_rank = _check_tokens("tokens", tokens)[..., None] / layout.cp
    if held_tokens is None:
        held = per_rank * in_flight(layout, schedule=schedule, num_micro_batches=num_micro_batches)
    else:
        held = _check_tokens("held_tokens", held_tokens) / layout.cp
    check_integer("reserved_bytes", reserved_bytes, minimum=0)
    reserved = np.full(layout.pp, float(reserved_bytes))
    ranks = ranks_of_stages(layout, schedule=schedule)
    activations, logits = _per_token(model, layout, ranks)
    working = np.max([_working(model, layout, layer, per_rank) for layer in model.kinds], axis=0)
    constant = _constant(model, layout, ranks)
    return RankMemory(*constant, reserved, held * activations, working + np.zeros(layout.pp), per_rank * logits)


def _check_tokens(name: str, tokens: ArrayLike) -> NDArray[np.float64]:
    values = numbers(name, tokens)
    wrong = np.flatnonzero(~((values >= 0) & (values < np.inf)).ravel())
    if wrong.size:
        value = values.ravel()[wrong[0]]
        index = int(wrong[0]) if values.ndim else None
        raise error(name, f"= {value:g}: must be finite and not negative", index=index, value=value)
    return values.astype(np.float64)


Floats = NDArray[np.float64]


def trained_per_rank(
    model: ModelConfig, layout: ParallelLayout, *, schedule: Schedule | None = None
) -> tuple[Floats, Floats]:
    """Parameters with gradients on a GPU of every pipeline rank, before FSDP shards them.

    Tensor parallelism divides neither norms nor routers, and key heads only into single ones. The embedding is on the
    rank of the first stage, the output projection on that of the last one. If they are tied and these are two ranks,
    there are two copies. With LoRA only the adapters have gradients, and no routed expert.

    Returns:
        float64[pp] outside routed experts, and float64[pp] of routed experts, which dp x cp / ep ranks have alike.
    """
    return _trained(model, layout, ranks_of_stages(layout, schedule=schedule))


def gathered_bytes_per_rank(
    model: ModelConfig, layout: ParallelLayout, *, schedule: Schedule | None = None
) -> tuple[Floats, Floats]:
    """Bytes of updated parameters that a GPU of every pipeline rank needs after a step: of experts and of all others.

    Args:
        model: its shape.
        layout: the layout on GPUs. Parameters that LoRA freezes are not updated; those kept in FP8 are sent in FP8.
        schedule: of the pipeline.

    Returns:
        float64[pp] and float64[pp].
    """
    ranks = ranks_of_stages(layout, schedule=schedule)
    rest, experts = _trained(model, layout, ranks)
    if layout.lora_rank:
        return rest * layout.number_bytes, experts
    in_layers = _over_layers(model, layout, ranks, _layer_parameters) - experts
    width = layer_bytes(layout)
    return in_layers * width + (rest - in_layers) * layout.number_bytes, experts * width


def layer_bytes(layout: ParallelLayout) -> int:
    """Bytes of each number when a parameter of a layer is sent."""
    return 1 if layout.fp8 == "parameters" else layout.number_bytes


@dataclass(frozen=True)
class Unit:
    """Parameters on a GPU that ZeRO-3 gathers together: of a layer, the embedding, or the output projection.

    Args:
        count: number of such units of a stage.
        rest: parameters of one unit outside routed experts.
        experts: parameters of routed experts.
        trained: parameters with gradients outside routed experts; with LoRA the adapters.
        trained_experts: parameters of routed experts with gradients.
        width: bytes of each parameter when it is sent.
    """

    count: int
    rest: float
    experts: float
    trained: float
    trained_experts: float
    width: int


def units_of_stages(
    model: ModelConfig, layout: ParallelLayout, *, schedule: Schedule | None = None
) -> list[list[Unit]]:
    """Units that ZeRO-3 gathers on every stage: layers of each kind, the embedding, the output projection.

    Returns:
        of each stage, in the order of the model. Together they have all parameters of a rank, without adapters.
    """
    ranks = ranks_of_stages(layout, schedule=schedule)
    embedding = model.vocab_size * model.hidden_size / layout.tp
    separate = ranks[0] != ranks[-1] or not model.tied_embeddings
    projection = _prediction_projection(model, layout)

    def unit(count: int, layer: Layer, more: float = 0.0) -> Unit:
        experts = _layer_experts(model, layout, layer)
        rest = _layer_parameters(model, layout, layer) - experts + more
        if layout.lora_rank:
            return Unit(count, rest, experts, _layer_adapters(model, layout, layer), 0.0, layer_bytes(layout))
        return Unit(count, rest, experts, rest, experts, layer_bytes(layout))

    def end(parameters: float) -> Unit:
        return Unit(1, parameters, 0.0, 0.0 if layout.lora_rank else parameters, 0.0, layout.number_bytes)

    counts = layout.kinds_of_stages(model).tolist()
    units = [[unit(n, layer) for n, layer in zip(row, model.kinds, strict=True) if n] for row in counts]
    units[0].append(end(embedding + (model.vision.num_parameters if model.vision else 0)))
    units[-1].extend(unit(1, layer, projection) for layer in model.prediction_layers)
    units[-1].append(end(model.hidden_size + (embedding if separate else 0.0)))
    return units


def adapter_parameters(layer: Layer, hidden_size: int, rank: int) -> int:
    """Parameters of LoRA adapters of that rank on a layer: two narrow matrices for each of its matrices.

    As by the defaults of PEFT and Megatron-Bridge, routers and routed experts have none.
    """
    matrices = [m for block in layer.blocks for m in block.matrices(hidden_size) if m.used and not m.router]
    return sum(rank * (m.parts * m.rows + m.columns) for m in matrices if m.copies == 1)


def _over_layers(
    model: ModelConfig,
    layout: ParallelLayout,
    ranks: NDArray[np.int64],
    of_layer: Callable[[ModelConfig, ParallelLayout, Layer], float],
) -> Floats:
    """float64[pp]: the sum over a rank's layers, with those of heads of multi-token prediction."""
    of_kinds = np.array([of_layer(model, layout, layer) for layer in model.kinds])
    total: Floats = np.zeros(layout.pp)
    np.add.at(total, ranks, (layout.kinds_of_stages(model) * of_kinds).sum(axis=1))
    total[ranks[-1]] += sum(of_layer(model, layout, layer) for layer in model.prediction_layers)
    return total


def _trained(model: ModelConfig, layout: ParallelLayout, ranks: NDArray[np.int64]) -> tuple[Floats, Floats]:
    experts = _experts(model, layout, ranks)
    if layout.lora_rank:
        return _over_layers(model, layout, ranks, _layer_adapters), np.zeros_like(experts)
    return _parameters(model, layout, ranks) - experts, experts


def _experts(model: ModelConfig, layout: ParallelLayout, ranks: NDArray[np.int64]) -> Floats:
    return _over_layers(model, layout, ranks, _layer_experts)


def _layer_experts(model: ModelConfig, layout: ParallelLayout, layer: Layer) -> float:
    return _routed(model, layer) / (layout.tp_of_experts * layout.ep)


def _routed(model: ModelConfig, layer: Layer) -> int:
    return sum(block.expert_parameters(model.hidden_size) for block in layer.of_kind(FeedForward))


def _layer_adapters(model: ModelConfig, layout: ParallelLayout, layer: Layer) -> float:
    return float(adapter_parameters(layer, model.hidden_size, layout.lora_rank))


def _parameters(model: ModelConfig, layout: ParallelLayout, ranks: NDArray[np.int64]) -> Floats:
    parameters = _over_layers(model, layout, ranks, _layer_parameters)
    embedding = model.vocab_size * model.hidden_size / layout.tp
    parameters[ranks[0]] += embedding + (model.vision.num_parameters if model.vision else 0)
    separate = ranks[0] != ranks[-1] or not model.tied_embeddings
    parameters[ranks[-1]] += model.hidden_size + (embedding if separate else 0)
    parameters[ranks[-1]] += len(model.prediction_layers) * _prediction_projection(model, layout)
    return parameters


def _prediction_projection(model: ModelConfig, layout: ParallelLayout) -> float:
    """Parameters of a head of multi-token prediction outside its layer: a projection, and three norms."""
    return (2 * model.hidden_size**2) / layout.tp + 3 * model.hidden_size


def _layer_parameters(model: ModelConfig, layout: ParallelLayout, layer: Layer) -> float:
    h, tp = model.hidden_size, layout.tp
    on_each = layer.norm_parameters(h)
    copied = 0.0
    for block in layer.blocks:
        on_each += block.vectors(h) + sum(m.parameters(m.copies) for m in block.matrices(h) if not m.split)
        if isinstance(block, Attention):
            copied += 2 * h * (kv_width(block, layout) - block.kv_width / tp)
    divided = layer.parameters(h) - on_each - _routed(model, layer)
    return divided / tp + on_each + copied + _layer_experts(model, layout, layer)


def _constant(
    model: ModelConfig, layout: ParallelLayout, ranks: NDArray[np.int64]
) -> tuple[Floats, Floats, Floats, Floats]:
    """The first four terms of `RankMemory`; each float64[pp]."""
    experts = _experts(model, layout, ranks)
    rest = _parameters(model, layout, ranks) - experts
    trained, trained_experts = _trained(model, layout, ranks)
    adapters = trained if layout.lora_rank else np.zeros_like(trained)
    shards, replicas = layout.size("shard"), layout.size("expert_shard")
    level = ("none", "zero1", "zero2", "zero3").index(layout.fsdp)

    def held(width: float, shared_from: int, rest: Floats, experts: Floats) -> Floats:
        """Bytes, sharded from level `shared_from` on over the ranks that hold the same."""
        shared = level >= shared_from
        return np.asarray(rest * width / (shards if shared else 1) + experts * width / (replicas if shared else 1))

    parameters = held(layout.number_bytes, 3, rest + adapters, experts)
    if layout.fp8 == "matmul" and level < 3:
        parameters = parameters + _FP8_COPIES * _over_layers(model, layout, ranks, _layer_parameters)
    gathered = np.zeros(layout.pp)
    if level >= 3 and shards > 1:
        gathered = _gathered(model, layout, ranks, alone=replicas == 1)
    on_gpu = layout.optimizer_bytes * (1 - layout.offload_optimizer)
    return (
        parameters,
        held(GRADIENT_BYTES, 2, trained, trained_experts),
        held(on_gpu, 1, trained, trained_experts),
        gathered,
    )


_FP8_COPIES = 2
"""Bytes of a weight's FP8 copies, as it is and transposed."""


def _gathered(model: ModelConfig, layout: ParallelLayout, ranks: NDArray[np.int64], *, alone: bool) -> Floats:
    """float64[pp]: bytes of two layers' parameters and one layer's gradients, which ZeRO-3 holds whole.

    Experts of which there is only one copy (`alone`) are never gathered.
    """
    sizes = []
    for layer in model.kinds:
        parameters = _layer_parameters(model, layout, layer) - (_layer_experts(model, layout, layer) if alone else 0.0)
        trained = _layer_adapters(model, layout, layer) if layout.lora_rank else parameters
        sizes.append(2 * layer_bytes(layout) * parameters + GRADIENT_BYTES * trained)
    embedding = model.vocab_size * model.hidden_size / layout.tp
    largest = np.full(layout.pp, max(sizes))
    gradients = 0 if layout.lora_rank else GRADIENT_BYTES
    largest[ranks[[0, -1]]] = max(max(sizes), embedding * (2 * layout.number_bytes + gradients))
    return largest


def _per_token(model: ModelConfig, layout: ParallelLayout, ranks: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Bytes for each token of a rank; each float64[pp].

    Activations of a micro-batch under way, and logits of the running one.
    """
    # For every stage under way the rank's largest stage is counted.
    saving, whole = (
        np.array([_layer_bytes(model, layout, layer, recompute) for layer in model.kinds])
        for recompute in (layout.recompute, "none")
    )
    again = layout.recomputed_of_stages(model)
    largest_stage = np.zeros(layout.pp)
    of_stages = (again * saving + (layout.kinds_of_stages(model) - again) * whole).sum(axis=1)
    of_stages[-1] += sum(activation_bytes(model, layout, layer) for layer in model.prediction_layers)
    np.maximum.at(largest_stage, ranks, of_stages)
    activations = largest_stage * layout.virtual_stages
    a, tp = layout.number_bytes, layout.tp
    logits = np.zeros(layout.pp)
    if not layout.fused_loss:
        logits[ranks[-1]] = (a + 4) * model.vocab_size / tp
    return activations, logits


def _working(model: ModelConfig, layout: ParallelLayout, layer: Layer, tokens: Floats) -> Floats:
    """Bytes that a layer needs while it runs, for these tokens of a rank."""
    a = layout.number_bytes
    widest = max((block.inner for block in layer.of_kind(FeedForward)), default=0)
    working = a * (3 * widest / layout.tp + model.hidden_size)
    if layout.ep > 1 or layout.tp_of_experts != layout.tp:
        working += 2 * a * visit_width(model, layer) * layout.tp_of_experts / layout.tp
    if layout.recompute == "full":
        working += _layer_bytes(model, layout, layer, "none")
    return working * tokens + (_gathering(layout, layer, tokens) if layout.cp > 1 else 0.0)


def _gathering(layout: ParallelLayout, layer: Layer, tokens: Floats) -> Floats:
    """Bytes of gathered keys and values, and of what is made of them. Windows need less, but are gathered alike."""
    whole = layout.number_bytes * exchanged_width(layer, layout) * layout.cp * tokens
    heads = max((max(1, block.num_kv_heads // layout.tp) for block in layer.of_kind(Attention)), default=1)
    part = np.maximum(GATHERED, whole / heads)
    return np.asarray(np.minimum(TOGETHER * whole, IN_PARTS * part))
