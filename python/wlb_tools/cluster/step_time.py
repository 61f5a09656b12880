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
    count = _entries("tokens", tokens, numbers("tokens", tokens).size)
    kinds = tuple(model.kinds)
    forward_attention = _by_kind("attention_forward", attention_forward, count.size, len(kinds))
    backward_attention = _by_kind("attention_backward", attention_backward, count.size, len(kinds))
    overlaps = {"cp_overlap": cp_overlap, "tp_overlap": tp_overlap, "ep_overlap": ep_overlap}
    for name, share in (overlaps | {"p2p_overlap": p2p_overlap}).items():
        check_share(name, share)
    check_imbalance(expert_imbalance)
    given_counts = {
        "visiting_tokens": visiting_tokens,
        "fullest_tokens": fullest_tokens,
        "keys_gathered": keys_gathered,
    }
    visiting, fullest, sent_keys = (
        count if given is None else _entries(name, given, count.size) for name, given in given_counts.items()
    )
    others = sent_keys * (layout.cp - 1)
    returned = others if keys_moved is None else _entries("keys_moved", keys_moved, count.size)

    over = np.flatnonzero(sent_keys > count)
    if over.size:
        index = int(over[0])
        message = f"= {sent_keys[index]:g}: a rank has {count[index]:g} tokens"
        raise error("keys_gathered", message, index=index, value=float(sent_keys[index]))
    over = np.flatnonzero(returned > others)
    if over.size:
        index = int(over[0])
        message = f"= {returned[index]:g}: other ranks send {others[index]:g} keys"
        raise error("keys_moved", message, index=index, value=float(returned[index]))

    hidden_size = model.hidden_size
    flops = np.array([float(kind.token_flops(hidden_size)) for kind in kinds])
    gain = fp8_gain(layout, hardware)
    if (linear_forward is None) != (linear_backward is None):
        missing = "linear_forward" if linear_forward is None else "linear_backward"
        raise error(missing, "is missing: both passes are measured, or neither")
    if linear_forward is None or linear_backward is None:
        layer = count[:, None] * flops / (hardware.flops_per_second * layout.tp)
        layer_gradient = layer
    else:
        _ = model.feed_forward  # one measurement stands for all layers
        layer = _entries("linear_forward", linear_forward, count.size)[:, None] + np.zeros(len(kinds))
        layer_gradient = (_entries("linear_backward", linear_backward, count.size) / 2)[:, None] + np.zeros(len(kinds))

    cp, tp = Communicator.along("cp", layout, hardware), Communicator.along("tp", layout, hardware)
    widths = np.array([exchanged_width(kind, layout) for kind in kinds])
    key_bytes = widths * layout.number_bytes
    gather = (1 - cp_overlap) * cp.all_gather(key_bytes * sent_keys[:, None] * layout.cp)
    # A rank keeps its own share of an all-to-all, so the bytes of the exchange are more than those that move.
    home = (1 - cp_overlap) * cp.all_to_all(key_bytes * returned[:, None] * layout.cp / max(layout.cp - 1, 1))
    hidden = count * model.hidden_size * layout.number_bytes
    one_block = tp.all_gather(hidden) + tp.reduce_scatter(hidden) if layout.sequence_parallel else tp.all_reduce(hidden)
    blocks = np.array([float(len(kind.sublayers)) for kind in kinds])
    to_experts, among_experts = np.zeros_like(layer), np.zeros_like(layer)
    rows = np.array([visit_width(model, kind) for kind in kinds]) / hidden_size
    if layout.tp_of_experts != layout.tp:
        # Rows of all tokens of an expert's tensor-parallel ranks, instead of a dense block's rows.
        arrived = hidden * layout.tp_of_experts / layout.tp
        etp = Communicator.along("etp", layout, hardware)
        among_experts = rows * (etp.all_gather(arrived) + etp.reduce_scatter(arrived))[:, None]
        blocks -= rows > 0
    elif layout.ep > 1:
        blocks += np.where(rows > 0, rows - 1, 0.0)
    if layout.ep > 1:
        share = layout.tp if layout.sequence_parallel else 1
        sent = expert_imbalance * fullest[:, None] * rows * hidden_size * layout.number_bytes / share
        there_and_back = 2 * Communicator.along("ep", layout, hardware).all_to_all(sent)
        to_experts = (1 - ep_overlap) * there_and_back
    exchange = (1 - tp_overlap) * (blocks * one_block[:, None] + among_experts)

    zero = np.zeros_like(layer)
    layer_cp = np.stack([gather, gather + home, zero], axis=-1)
    layer_tp = np.stack([exchange, exchange, zero], axis=-1)
    layer_ep = np.stack([to_experts, to_experts, zero], axis=-1)
    linear = np.stack([layer, layer_gradient, layer_gradient], axis=-1)
    trained = np.array([1.0, 1.0, 0.0 if layout.lora_rank else 1.0])  # frozen weights have no gradient
    by_visits = np.ones_like(layer)
    if layout.ep > 1:
        # Experts take their share of a layer's FLOPs and time, for arriving tokens instead of the rank's own.
        visits = np.array([sum(b.expert_flops(hidden_size) for b in kind.of_kind(FeedForward)) for kind in kinds])
        others = (expert_imbalance * visiting - count) / np.maximum(count, 1)
        by_visits += others[:, None] * visits / flops
    adapters = np.array([2.0 * adapter_parameters(kind, hidden_size, layout.lora_rank) for kind in kinds]) / flops
    layer_linear = linear * (by_visits[..., None] * trained + adapters[:, None]) / gain
    layer_compute = layer_linear + np.stack([forward_attention, backward_attention, zero], axis=-1)

    # [micro-batches, stages, 3], each the sum over the layers of a stage, kind by kind.
    layers = layout.kinds_of_stages(model).astype(np.float64)
    again = layout.recomputed_of_stages(model).astype(np.float64)
    predicting = _prediction_kinds(model)
    layers[-1] += predicting
    again[-1] += predicting if layout.recompute != "none" else 0.0

    def over_stages(part: Floats, repeated: Floats) -> Floats:
        """Sums over a stage's layers; repeated parts of the forward pass are in the gradient of inputs."""
        summed = np.asarray((part[:, None] * layers[None, :, :, None]).sum(axis=2))
        summed[..., 1] += (repeated[:, None] * again).sum(axis=2)
        return summed

    nothing = np.zeros_like(layer)
    repeated = {
        "full": (gather, exchange, to_experts, layer_compute[..., 0]),
        "attention": (gather, nothing, nothing, forward_attention),
    }.get(layout.recompute, (nothing,) * 4)
    exposed_cp, exposed_tp, exposed_ep, seconds = map(
        over_stages, (layer_cp, layer_tp, layer_ep, layer_compute), repeated
    )
    # Output projections run at the FLOP rate of the mean layer's linear part, on all tokens of the rank.
    shares = np.array(list(model.kinds.values())) / model.num_layers
    head = (_head_flops(model) / (flops @ shares)) * np.einsum("mkp,k->mp", linear, shares)
    seconds[:, -1] += head * trained
    sent = hidden * (model.residual_width / hidden_size) / (layout.tp if layout.sequence_parallel else 1)
    p2p = Communicator.along("pp", layout, hardware).neighbour(sent)
    exposed_pp = np.zeros_like(seconds)
    exposed_pp[:, 1:, 0] = exposed_pp[:, :-1, 1] = (1 - p2p_overlap) * p2p[:, None]
    made = StageSeconds(seconds, exposed_cp, exposed_tp, exposed_ep, exposed_pp, p2p_overlap * p2p)
    return dataclasses.replace(made, seconds=seconds + made.exposed)


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
        WlbError: It is below 1.
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
