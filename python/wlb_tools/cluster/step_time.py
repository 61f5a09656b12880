"""Time of a micro-batch on each pipeline stage, the input of a simulated step.

Assumptions, all of them inputs of `stage_seconds` or of the layout and hardware:

- Tensor-parallel ranks are equal. The slowest context-parallel rank counts for attention, and the one with most tokens
  for the rest. A stage takes its computation plus the communication that nothing hides.
- Linear part: measured if it is given; by default FLOPs (`ModelConfig.token_flops`) at
  ``Hardware.flops_per_second``, with two forward passes for the backward pass. Half of the backward pass is the
  gradient of inputs, half that of weights. The output projection has the FLOP rate of a layer's linear part.
- Attention's seconds are given, for one layer and a rank's share of the heads. Its backward pass is part of the
  gradient of inputs, because it has no weights.
- Full recomputation adds the forward pass, with its communication, to the gradient of inputs, in the layers that it
  applies to; recomputed attention adds attention and the gathering of its keys. Selective recomputation adds nothing,
  because it repeats element-wise work.
- FP8 makes the linear part of layers `Hardware.fp8_gain` times as fast; output projection and attention stay as fast.
- With LoRA, the only gradients of weights are those of adapters, whose FLOPs are added to all passes.
- Tensor parallelism: a layer's forward pass gathers the tokens before QKV and before the feed-forward block and
  reduce-scatters after each (two all-reduces without sequence parallelism); its backward pass does the same. A share
  `tp_overlap` is hidden. The gather for the gradient of weights runs beside the gradient of inputs.
- Context parallelism: the forward pass gathers keys and values, of all tokens or of fewer (`keys_gathered`). The
  backward pass gathers them again, and an all-to-all in their dtype returns their gradients: each rank sends those of
  the keys that it saw (`keys_moved`). A share `cp_overlap` is hidden; none in the paper and in Llama 3.
- Expert parallelism: in a layer with experts an all-to-all sends every token's row to each expert that it visits, and
  another one sends the answers back; the backward pass sends their gradients both ways again. A share `ep_overlap` is
  hidden. Each tensor-parallel rank sends its share of the tokens, gathers the rows that arrived and reduce-scatters the
  answers: `experts_per_token` times the rows of a dense block, among the `expert_tp` ranks of an expert. Every expert
  has the mean number of visits, or those of the busiest rank have `expert_imbalance` times as many, and the others wait
  for it. The time of visits is the experts' share of the linear part, by FLOPs.
- A stage sends its output, split over tensor-parallel ranks by sequence parallelism, to the next stage, and receives a
  gradient. A share `p2p_overlap` travels during computation and is returned separately (`p2p`), because it depends on
  the schedule whether it is hidden. The receiving stage waits for the rest when it is free, because 1F1B posts a
  receive only then.
- Data parallelism is separate too (`wlb_tools.cluster.data_parallel`): once a step, or for all ranks that meet in a
  micro-batch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._errors import check_positive, check_share, error, numbers
from wlb._shown import explained
from wlb.models import FeedForward, ModelConfig
from wlb_tools.cluster.collectives import Communicator
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.memory import adapter_parameters, exchanged_width, visit_width
from wlb_tools.cluster.parallel import ParallelLayout

Floats = NDArray[np.float64]


@explained
@dataclass(frozen=True)
class StageSeconds:
    """Seconds of micro-batches on the stages of a pipeline, in the order of the model.

    The last axis of the first five is forward pass, gradient of inputs, gradient of weights.
    """

    seconds: Floats  # [micro-batches, stages, 3]: everything but `p2p`; what wlb.simulate_pipeline takes as costs
    exposed_cp: Floats  # [micro-batches, stages, 3]: the part of it that waits for context parallelism
    exposed_tp: Floats  # [micro-batches, stages, 3]: the part of it that waits for tensor parallelism
    exposed_ep: Floats  # [micro-batches, stages, 3]: the part of it that waits for expert parallelism
    exposed_pp: Floats  # [micro-batches, stages, 3]: the part of it that receives from a neighbour
    p2p: Floats  # [micro-batches]: further time of an output or gradient between two stages, beside computation

    @property
    def exposed(self) -> Floats:
        """float64[micro-batches, stages, 3]: the part of `seconds` that waits."""
        return self.exposed_cp + self.exposed_tp + self.exposed_ep + self.exposed_pp

    @property
    def computing(self) -> Floats:
        """float64[micro-batches, stages, 3]: the part of `seconds` that does not wait, at least 0."""
        return np.maximum(self.seconds - self.exposed, 0.0)


def stage_seconds(
    tokens: ArrayLike,
    *,
    attention_forward: ArrayLike,
    attention_backward: ArrayLike,
    model: ModelConfig,
    layout: ParallelLayout,
    hardware: Hardware,
    linear_forward: ArrayLike | None = None,
    linear_backward: ArrayLike | None = None,
    visiting_tokens: ArrayLike | None = None,
    fullest_tokens: ArrayLike | None = None,
    keys_gathered: ArrayLike | None = None,
    keys_moved: ArrayLike | None = None,
    expert_imbalance: float = 1.0,
    cp_overlap: float = 0.0,
    tp_overlap: float = 0.0,
    ep_overlap: float = 0.0,
    p2p_overlap: float = 1.0,
) -> StageSeconds:
    """Times of micro-batches on every stage; the module's docstring lists the assumptions.

    Args:
        tokens: int[m] tokens of each micro-batch's fullest context-parallel rank.
        attention_forward: float[m] seconds of one layer's attention on its slowest context-parallel rank, with
            `num_heads / tp` heads (``KernelModel.rank_seconds(shard, passes="forward").max()``); float[m, kinds] if
            layers differ, with a column for each of `model.kinds`.
        attention_backward: float[m] the same for its backward pass.
        model: its sizes.
        layout: the layout on GPUs.
        hardware: the GPUs and links.
        linear_forward: float64[m] seconds of everything but attention in one layer, on the fullest context-parallel
            rank, with its share of the heads and the feed-forward block
            (``CostModel.from_profile(path, passes="forward").linear_cost(tokens)``); default: by FLOPs. Only for models
            whose layers differ at most in masks.
        linear_backward: float64[m] the same for its backward pass; give both or neither.
        visiting_tokens: float64[m] tokens of the mean rank of those that divide experts, on which a rank's experts
            work; default: `tokens`, as if all had equally many.
        fullest_tokens: float64[m] tokens of the fullest of these ranks, for which the all-to-all waits; default:
            `tokens`.
        keys_gathered: float64[m] keys that every context-parallel rank sends to the others (the most in
            `Shard.keys_gathered`, if attention sends no others); default: `tokens`, all of them.
        keys_moved: float64[m] keys of other ranks whose gradients the rank with most of them returns (the most in
            `Shard.keys_moved`); default: all that the other ranks send.
        expert_imbalance: visits to the experts of the busiest of these ranks, divided by those of the mean one; at
            least 1.
        cp_overlap: share of the context-parallel communication that computation hides.
        tp_overlap: share of the tensor-parallel communication that computation hides.
        ep_overlap: share of the expert-parallel communication that computation hides.
        p2p_overlap: share of a transfer between stages that may be hidden, because it travels as soon as it is sent.

    Raises:
        WlbError: naming an argument of another length, a negative entry, more keys than tokens, a share outside 0..1,
            or as `wlb_tools.ParallelLayout.check`.

    Complexity:
        O(m * stages).
    """
    layout.check(model=model)
    overlaps = {"cp": cp_overlap, "tp": tp_overlap, "ep": ep_overlap, "p2p": p2p_overlap}
    for axis, share in overlaps.items():
        check_share(f"{axis}_overlap", share)
    check_imbalance(expert_imbalance)
    count = _entries("tokens", tokens, numbers("tokens", tokens).size)
    kinds = len(model.kinds)

    def given(name: str, values: ArrayLike | None, default: Floats) -> Floats:
        return default if values is None else _entries(name, values, count.size)

    sent = given("keys_gathered", keys_gathered, count)
    work = _Work(
        tokens=count,
        attention_forward=_by_kind("attention_forward", attention_forward, count.size, kinds),
        attention_backward=_by_kind("attention_backward", attention_backward, count.size, kinds),
        visiting=given("visiting_tokens", visiting_tokens, count),
        fullest=given("fullest_tokens", fullest_tokens, count),
        keys_sent=sent,
        keys_returned=given("keys_moved", keys_moved, sent * (layout.cp - 1)),
        expert_imbalance=expert_imbalance,
    )
    _check_keys(work, layout)
    if (linear_forward is None) != (linear_backward is None):
        missing = "linear_forward" if linear_forward is None else "linear_backward"
        raise error(missing, "is missing: both passes are measured, or neither")
    linear = _linear(work, model, layout, hardware, linear_forward, linear_backward)
    gather, home = _exchanged_keys(work, model, layout, hardware)
    gather, home = (1 - cp_overlap) * gather, (1 - cp_overlap) * home
    exchange = (1 - tp_overlap) * _among_tensor_ranks(work, model, layout, hardware)
    to_experts = (1 - ep_overlap) * _to_experts(work, model, layout, hardware)
    zero = np.zeros_like(exchange)
    attention = np.stack([work.attention_forward, work.attention_backward, zero], axis=-1)
    compute = _of_layers(linear, work, model, layout) / fp8_gain(layout, hardware) + attention

    # What each pass of a layer takes, and what recomputation repeats of the forward pass.
    nothing = (zero, zero, zero, zero)
    again_cp, again_tp, again_ep, again = {
        "full": (gather, exchange, to_experts, compute[..., 0]),
        "attention": (gather, zero, zero, work.attention_forward),
    }.get(layout.recompute, nothing)
    exposed_cp = _over_stages(np.stack([gather, gather + home, zero], axis=-1), again_cp, model, layout)
    exposed_tp = _over_stages(np.stack([exchange, exchange, zero], axis=-1), again_tp, model, layout)
    exposed_ep = _over_stages(np.stack([to_experts, to_experts, zero], axis=-1), again_ep, model, layout)
    seconds = _over_stages(compute, again, model, layout)
    seconds[:, -1] += _head(linear, model, layout)
    p2p = _between_stages(work, model, layout, hardware)
    exposed_pp = np.zeros_like(seconds)
    exposed_pp[:, 1:, 0] = exposed_pp[:, :-1, 1] = (1 - p2p_overlap) * p2p[:, None]
    made = StageSeconds(seconds, exposed_cp, exposed_tp, exposed_ep, exposed_pp, p2p_overlap * p2p)
    return dataclasses.replace(made, seconds=seconds + made.exposed)


@dataclass(frozen=True)
class _Work:
    """What the micro-batches bring, checked."""

    tokens: Floats  # [m] of the fullest context-parallel rank
    attention_forward: Floats  # [m, kinds] seconds in a layer
    attention_backward: Floats  # [m, kinds]
    visiting: Floats  # [m] tokens of the mean rank of those that divide experts
    fullest: Floats  # [m] tokens of the fullest of these ranks
    keys_sent: Floats  # [m] by every context-parallel rank
    keys_returned: Floats  # [m] of which the rank with most of them returns gradients
    expert_imbalance: float


def _check_keys(work: _Work, layout: ParallelLayout) -> None:
    """Refuses more keys than the ranks have."""
    others = work.keys_sent * (layout.cp - 1)
    for name, keys, most, whose in (
        ("keys_gathered", work.keys_sent, work.tokens, "a rank has {:g} tokens"),
        ("keys_moved", work.keys_returned, others, "other ranks send {:g} keys"),
    ):
        over = np.flatnonzero(keys > most)
        if over.size:
            index = int(over[0])
            message = f"= {keys[index]:g}: {whose.format(most[index])}"
            raise error(name, message, index=index, value=float(keys[index]))


def _linear(
    work: _Work,
    model: ModelConfig,
    layout: ParallelLayout,
    hardware: Hardware,
    forward: ArrayLike | None,
    backward: ArrayLike | None,
) -> Floats:
    """float64[m, kinds, 3]: everything but attention in a layer, as measured, or else by FLOPs."""
    if forward is None or backward is None:
        layer = gradient = work.tokens[:, None] * _flops(model) / (hardware.flops_per_second * layout.tp)
    else:
        _ = model.feed_forward  # one measurement stands for all layers
        kinds = np.zeros(len(model.kinds))
        layer = _entries("linear_forward", forward, work.tokens.size)[:, None] + kinds
        gradient = (_entries("linear_backward", backward, work.tokens.size) / 2)[:, None] + kinds
    return np.stack([layer, gradient, gradient], axis=-1)


def _of_layers(linear: Floats, work: _Work, model: ModelConfig, layout: ParallelLayout) -> Floats:
    """float64[m, kinds, 3]: the linear part with the visits to experts, without frozen weights, with adapters."""
    flops, hidden_size = _flops(model), model.hidden_size
    by_visits = np.ones(linear.shape[:2])
    if layout.ep > 1:
        # Experts take their share of a layer's FLOPs and time, for arriving tokens instead of the rank's own.
        visits = np.array([sum(b.expert_flops(hidden_size) for b in kind.of_kind(FeedForward)) for kind in model.kinds])
        others = (work.expert_imbalance * work.visiting - work.tokens) / np.maximum(work.tokens, 1)
        by_visits += others[:, None] * visits / flops
    adapters = [2.0 * adapter_parameters(kind, hidden_size, layout.lora_rank) for kind in model.kinds]
    return np.asarray(linear * (by_visits[..., None] * _trained(layout) + (np.array(adapters) / flops)[:, None]))


def _exchanged_keys(
    work: _Work, model: ModelConfig, layout: ParallelLayout, hardware: Hardware
) -> tuple[Floats, Floats]:
    """float64[m, kinds]: context-parallel ranks gather keys and values, and return their gradients."""
    cp = Communicator.along("cp", layout, hardware)
    key_bytes = np.array([exchanged_width(kind, layout) for kind in model.kinds]) * layout.number_bytes
    gather = cp.all_gather(key_bytes * work.keys_sent[:, None] * layout.cp)
    # A rank keeps its own share of an all-to-all, so the bytes of the exchange are more than those that move.
    home = cp.all_to_all(key_bytes * work.keys_returned[:, None] * layout.cp / max(layout.cp - 1, 1))
    return gather, home


def _among_tensor_ranks(work: _Work, model: ModelConfig, layout: ParallelLayout, hardware: Hardware) -> Floats:
    """float64[m, kinds]: tensor-parallel ranks exchange the tokens of each block of a layer, in a pass."""
    tp, hidden = Communicator.along("tp", layout, hardware), _hidden(work, model, layout)
    one_block = tp.all_gather(hidden) + tp.reduce_scatter(hidden) if layout.sequence_parallel else tp.all_reduce(hidden)
    blocks = np.array([float(len(kind.sublayers)) for kind in model.kinds])
    among_experts = np.zeros((work.tokens.size, len(model.kinds)))
    rows = _rows(model)
    if layout.tp_of_experts != layout.tp:
        # Rows of all tokens of an expert's tensor-parallel ranks, instead of a dense block's rows.
        arrived = hidden * layout.tp_of_experts / layout.tp
        etp = Communicator.along("etp", layout, hardware)
        among_experts = rows * (etp.all_gather(arrived) + etp.reduce_scatter(arrived))[:, None]
        blocks -= rows > 0
    elif layout.ep > 1:
        blocks += np.where(rows > 0, rows - 1, 0.0)
    return np.asarray(blocks * one_block[:, None] + among_experts)


def _to_experts(work: _Work, model: ModelConfig, layout: ParallelLayout, hardware: Hardware) -> Floats:
    """float64[m, kinds]: an all-to-all to the experts and one back, in a pass."""
    if layout.ep == 1:
        return np.zeros((work.tokens.size, len(model.kinds)))
    share = layout.tp if layout.sequence_parallel else 1
    rows = work.expert_imbalance * work.fullest[:, None] * _rows(model)
    sent = rows * model.hidden_size * layout.number_bytes / share
    return np.asarray(2 * Communicator.along("ep", layout, hardware).all_to_all(sent))


def _between_stages(work: _Work, model: ModelConfig, layout: ParallelLayout, hardware: Hardware) -> Floats:
    """float64[m]: an output or its gradient to the neighbouring stage."""
    sent = _hidden(work, model, layout) * (model.residual_width / model.hidden_size)
    sent = sent / (layout.tp if layout.sequence_parallel else 1)
    return np.asarray(Communicator.along("pp", layout, hardware).neighbour(sent))


def _over_stages(part: Floats, repeated: Floats, model: ModelConfig, layout: ParallelLayout) -> Floats:
    """float64[m, stages, 3]: a part of each kind of layer, summed over a stage's layers.

    `repeated` is what is computed again of the forward pass, in the gradient of inputs.
    """
    layers = layout.kinds_of_stages(model).astype(np.float64)
    again = layout.recomputed_of_stages(model).astype(np.float64)
    predicting = _prediction_kinds(model)
    layers[-1] += predicting
    again[-1] += predicting if layout.recompute != "none" else 0.0
    summed = np.asarray((part[:, None] * layers[None, :, :, None]).sum(axis=2))
    summed[..., 1] += (repeated[:, None] * again).sum(axis=2)
    return summed


def _head(linear: Floats, model: ModelConfig, layout: ParallelLayout) -> Floats:
    """float64[m, 3]: output projections, at the FLOP rate of the mean layer's linear part, on all tokens of a rank."""
    shares = np.array(list(model.kinds.values())) / model.num_layers
    head = (_head_flops(model) / (_flops(model) @ shares)) * np.einsum("mkp,k->mp", linear, shares)
    return np.asarray(head * _trained(layout))


def _trained(layout: ParallelLayout) -> Floats:
    """float64[3]: frozen weights have no gradient."""
    return np.array([1.0, 1.0, 0.0 if layout.lora_rank else 1.0])


def _flops(model: ModelConfig) -> Floats:
    """float64[kinds]: forward FLOPs of a token in a layer, without attention's."""
    return np.array([float(kind.token_flops(model.hidden_size)) for kind in model.kinds])


def _hidden(work: _Work, model: ModelConfig, layout: ParallelLayout) -> Floats:
    """float64[m]: bytes of the tokens' hidden states."""
    return np.asarray(work.tokens * model.hidden_size * layout.number_bytes)


def _rows(model: ModelConfig) -> Floats:
    """float64[kinds]: rows that a token sends to experts."""
    return np.array([visit_width(model, kind) for kind in model.kinds]) / model.hidden_size


def fp8_gain(layout: ParallelLayout, hardware: Hardware) -> float:
    """Speed-up of the linear part of a layer by FP8; 1 without it.

    Raises:
        WlbError: the GPU has no FP8.
    """
    if layout.fp8 == "none":
        return 1.0
    if hardware.fp8_gain is None:
        raise error("fp8", f"= {layout.fp8!r}: {hardware.name} has no FP8 matrix products", value=layout.fp8)
    return hardware.fp8_gain


def check_imbalance(value: float) -> None:
    """Refuses a ratio of the largest to the mean that is below 1.

    Raises:
        WlbError: it is below 1.
    """
    check_positive("expert_imbalance", value)
    if value < 1:
        raise error("expert_imbalance", f"= {value}: the most over the mean is at least 1", value=value)


def _head_flops(model: ModelConfig) -> float:
    """Forward FLOPs of a token outside layers: output projections, and projections of multi-token prediction."""
    heads = len(model.prediction_layers)
    return float(2 * (1 + heads) * model.hidden_size * model.vocab_size + 4 * heads * model.hidden_size**2)


def _prediction_kinds(model: ModelConfig) -> Floats:
    """float64[kinds]: layers of heads of multi-token prediction, all on the last stage."""
    columns = {kind: column for column, kind in enumerate(model.kinds)}
    counts = np.zeros(len(columns))
    for index, layer in enumerate(model.prediction_layers):
        if layer not in columns:
            raise error("prediction_layers", "is of a kind that no other layer has", index=index, value=layer)
        counts[columns[layer]] += 1
    return counts


def _by_kind(name: str, given: ArrayLike, length: int, kinds: int) -> Floats:
    """float64[length, kinds]; one column may be given for all kinds."""
    values = numbers(name, given)
    if values.ndim < 2:
        return np.repeat(_entries(name, values, length)[:, None], kinds, axis=1)
    if values.shape != (length, kinds):
        message = f"has shape {values.shape}: must be ({length}, {kinds}), an entry for each kind of layer"
        raise error(name, message, value=values.shape)
    return _entries(name, values.ravel(), length * kinds).reshape(length, kinds)


def _entries(name: str, given: ArrayLike, length: int) -> Floats:
    values = numbers(name, given)
    if values.shape != (length,):
        raise error(name, f"has shape {values.shape}: must be ({length},), one entry a micro-batch", value=values.shape)
    wrong = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
    if wrong.size:
        index = int(wrong[0])
        raise error(
            name, f"= {values[index]}: must be finite and not negative", index=index, value=float(values[index])
        )
    return values.astype(np.float64)
