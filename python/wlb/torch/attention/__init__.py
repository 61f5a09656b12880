"""Context-parallel attention: runs a `wlb.Shard` on the ranks that hold it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

import wlb
from wlb._errors import check_bool
from wlb.torch.attention import arguments, kernels, operator, plan
from wlb.torch.attention.arguments import Options, Transport, cp_sizes
from wlb.torch.attention.heads import HeadsExchange, join_heads, split_heads
from wlb.torch.attention.keys import KeysExchange, head_parts
from wlb.torch.attention.merge import LSE_CHANNELS, attention
from wlb.torch.attention.recut import halo, recut
from wlb.torch.attention.ring import Ring
from wlb.torch.lazy import not_compiled

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from wlb.torch.attention.arguments import Named

__all__ = ["context_parallel_attention", "cp_sizes", "halo", "prepare_attention", "recut"]


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: wlb.Shard | Tensor,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Named],
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: wlb.Shard | Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Named],
) -> tuple[Tensor, Tensor]: ...
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: wlb.Shard | Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    transport: Transport = "all_gather",
    ulysses_size: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    kernel: kernels.KernelName = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a packed micro-batch whose tokens are on the ranks of `group` as in `shard`. Differentiable.

    Tokens attend only within their document, to all earlier tokens and themselves, or to the whole document
    (`shard.causal`). In a forest (`wlb.PrefixForest`) they attend to earlier tokens on their path and themselves. Row
    `i` of this rank's tensors is token `shard.rank(r).token_indices[i]`, where `r` is its rank in `group`. Every
    transport runs every shard:

    - `all_gather`: gathers the keys that some rank needs from another, one varlen call; memory for the keys of the
      micro-batch while it runs. Best when keys have few heads, or documents are mostly local.
    - `fetch`: all-to-all of just the keys that each rank needs; otherwise as `all_gather`. Best for shards whose
      `keys_moved` are far below a full gather: `wlb.shard`'s default.
    - `ring`: keys pass around by send and receive while the others are computed. Memory does not grow with the group.
    - `ulysses`: all-to-all from tokens to heads; work is then equal whatever the shard. The group's size must
      divide the query heads, and divide the key heads or be a multiple of them.
    - `usp`: both: `ulysses_size` neighbouring ranks exchange heads, a ring goes over those blocks:
      rank = ring position * ulysses_size + ulysses rank.

    The window is exact on every transport with every kernel. ALiBi is exact on every transport with the kernel
    `reference`. flash-attn 2 has it on `ulysses`, on `all_gather` and `fetch` with a causal shard, and on one rank;
    other kernels have none.

    All arguments are checked before anything is sent. Differences between ranks, such as different shards, cannot be
    seen without communication: compare plans with `check_agreement`. The backward pass communicates, too, so every rank
    must run it, also one without tokens. A rank's work is planned once for all layers, by the first layer or by
    `prepare_attention`.

    Sinks (gpt-oss) are exact on every transport with every kernel: they join the softmax once, when all keys have.
    `reference`, flash-attn 2, 3 and 4 cap scores. Values narrower than keys (MLA: 192 and 128) are computed as they
    are by `reference`, flash-attn 3 and flash-attn 4; for other kernels they are padded with zeros, which is exact.

    Tensors are computed in the dtype in which they come, also under `torch.autocast`, which is off inside. Cast tensors
    that are float32 under autocast, such as those from a rotary embedding, or flash kernels do not take them.

    Under `torch.compile` a shard breaks the graph. Give the tensor that `prepare_attention` returned for the shard
    instead: attention is then one operator of one graph for all micro-batches, named `torch.ops.wlb.attention` in
    policies of selective checkpointing. There is no second derivative.

    Args:
        q: queries `[tokens of this rank, heads, head_dim]`; float16, bfloat16, float32 or float64.
        k: keys `[tokens of this rank, kv_heads, head_dim]`; `kv_heads` divides `heads`.
        v: values `[tokens of this rank, kv_heads, value_dim]`, of any width.
        shard: the places of the whole micro-batch's tokens on the ranks; the same on all ranks.
        group: the context-parallel group, of `shard.cp_size` ranks. None: one process holds everything.
        transport: how keys and queries meet; see above.
        ulysses_size: for `usp`: ranks that share heads. Divides the group's size.
        softmax_scale: factor of the scores; None: `head_dim ** -0.5`.
        softcap: scaled scores become `softcap * tanh(score / softcap)` (Gemma 2), before any bias. None: no cap.
        window: a token sees tokens less than this many positions away; with 1 only itself. None, or 2**31 - 1 and more:
            all.
        alibi_slopes: float `[heads]`, without gradient: `slope * distance in the document` is subtracted from scores.
        sinks: floating point `[heads]`: a logit of each head that takes a share of the softmax and has no value. Its
            gradient is that of this rank's tokens: sum it over the ranks, like those of other parameters.
        kernel: `flash_attn` (2, 3 or 4, must be installed), `varlen` (torch's own flash kernels), `reference` (softmax
            written out: exact, slow, any device and dtype), or `auto`: the fastest that can do it here (on a CPU
            torch's flash attention for it).

        return_lse: whether to return the log-sum-exp of the scores, and of the sinks, too; the same on all ranks.

    Returns:
        Output `[tokens of this rank, heads, value_dim]`; with `return_lse` it and the log-sum-exp, float `[tokens of
        this rank, heads]` in the dtype of sums (float32 of half precision). Both are differentiable.

    Raises:
        WlbError: shapes, dtypes, devices, the group, or a combination of options do not fit.
    """
    options = Options(transport, ulysses_size, softmax_scale, softcap, window, kernel, return_lse)
    if isinstance(shard, Tensor):
        out, lse = operator.attention(q, k, v, shard, alibi_slopes, sinks, group, options)
        return (out, lse) if return_lse else out
    found: Tensor | tuple[Tensor, Tensor] = _attend(q, k, v, shard, alibi_slopes, sinks, group, options)
    return found


@operator.attends
@not_compiled
def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: wlb.Shard,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    group: dist.ProcessGroup | None,
    options: Options,
    with_lse: bool = False,
    known: operator.Known | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`context_parallel_attention` that can give more, or do less.

    `with_lse` also gives the log-sum-exp, without a gradient. `known` holds output and log-sum-exp of an earlier
    forward, which is then not computed again.
    """
    rank, size = arguments.place(group)
    arguments.check_are_tensors(q, k, v)
    tensors = q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device
    how = _known_how(shard, rank, size, alibi_slopes is not None, tensors, *options)
    width, degree, chosen = how.width, how.degree, how.kernel
    if width:
        q, k, v = arguments.of_one_width(q, k, v, width)
        if known is not None:
            known = arguments.widened(known[0], how.computed), known[1]
    if alibi_slopes is not None or sinks is not None:
        share = q.shape[1] // degree
        mine = slice(rank % degree * share, (rank % degree + 1) * share)  # heads that this rank computes
        if alibi_slopes is not None:
            arguments.check_slopes(alibi_slopes, q)
            chosen = how.choose(options.kernel, q, alibi_slopes[mine])
        if sinks is not None:
            arguments.check_of_heads("sinks", sinks, q)
            sinks = sinks if degree == 1 else sinks[mine]
    assert chosen is not None
    shown = options.return_lse or with_lse
    if how.heads is None:
        out, lse = attention(q, k, v, how.exchange, group, chosen, how.computed, sinks, shown, known)
    else:
        heads = HeadsExchange(how.heads, how.block, group)
        if known is not None:
            known = heads.split_heads(known[0]), heads.split_heads(known[1].unsqueeze(-1)).squeeze(-1)
        q, k, v = split_heads(q, k, v, heads)
        out, lse = attention(q, k, v, how.exchange, group, chosen, how.computed, sinks, shown, known)
        out = join_heads(out, heads)
        if lse is not None:
            lse = join_heads(lse.unsqueeze(-1).contiguous(), heads).squeeze(-1)
    if how.value_dim < how.computed:
        out = out[..., : how.value_dim]
    return out if lse is None else (out, lse)


@dataclass(frozen=True)
class _How:
    """How a layer attends: all that follows from a shard, options, shapes, dtypes and devices."""

    exchange: KeysExchange | Ring
    degree: int  # ranks that exchange heads
    heads: plan.HeadsPlan | None  # what they exchange
    block: range  # these ranks
    kernel: kernels.Kernel | None  # None: it depends on slopes
    choice: dict[str, Any]  # arguments by which it is chosen
    width: int  # to which heads are padded; 0: they need not be
    value_dim: int
    computed: int  # the width of values that the kernel computes

    def choose(self, name: kernels.KernelName, q: Tensor, alibi_slopes: Tensor | None) -> kernels.Kernel:
        """The kernel for these queries and slopes."""
        return kernels.choose(name, q, alibi_slopes=alibi_slopes, **self.choice)


@functools.lru_cache(maxsize=plan.KEPT, typed=True)
def _how(
    shard: wlb.Shard,
    rank: int,
    size: int,
    biased: bool,
    tensors: tuple[Any, ...],
    *options: Any,  # one by one: the cache tells 1 from True among arguments, and not inside of a tuple
) -> _How:
    """Checks the arguments and derives how the layer attends: once for all layers that are called alike."""
    transport, ulysses_size, softmax_scale, softcap, window, kernel, return_lse = Options(*options)
    check_bool("return_lse", return_lse)
    arguments.check_any_shard(shard)
    arguments.check_size(shard, size)
    degree = arguments.check_transport(transport, ulysses_size, size)
    q, k, v = (arguments.Described(*tensors[i::3]) for i in range(3))
    arguments.check_tensors(q, k, v, shard, rank)
    (_, heads, head_dim), (_, kv_heads, _), (_, _, value_dim) = q.shape, k.shape, v.shape
    arguments.check_heads(transport, degree, heads, kv_heads)
    arguments.check_scores(softmax_scale, softcap, window)
    window = arguments.reach(window)
    width = max(head_dim, value_dim)
    more = return_lse * LSE_CHANNELS
    choice: dict[str, Any] = {
        "value_dim": value_dim,
        "more": more,
        "softcap": None if softcap is None else float(softcap),
        "scale": head_dim**-0.5 if softmax_scale is None else float(softmax_scale),
        "alibi_aligned": size == degree or (transport in ("all_gather", "fetch") and shard.causal),
    }
    sample = torch.empty((0, heads, width), dtype=q.dtype, device=q.device)
    chosen = None if biased else kernels.choose(kernel, sample, alibi_slopes=None, **choice)
    block = rank - rank % degree
    exchange: KeysExchange | Ring
    in_block = None
    common: dict[str, Any] = {"window": window, "biased": biased, "device": q.device}
    common["buckets"] = kernels.gains_by_buckets(chosen)
    if transport in ("all_gather", "fetch"):
        keys = plan.keys_plan(shard, rank, fetch=transport == "fetch", **common)
        exchange = KeysExchange(keys, 1 if biased else head_parts(keys, kv_heads, 2 * width * q.dtype.itemsize))
    else:
        in_block, ring = plan.ring_plan(shard, rank, degree=degree, **common)
        exchange = Ring(ring, range(rank % degree, size, degree), size)
    return _How(
        exchange=exchange,
        degree=degree,
        heads=in_block,
        block=range(block, block + degree),
        kernel=chosen,
        choice=choice,
        width=width if head_dim != value_dim else 0,
        value_dim=value_dim,
        computed=width if chosen is None else kernels.value_width(chosen, sample, value_dim, more),
    )


def forget() -> None:
    """Forgets all plans, and how layers attend: for tests and benches, which change what plans are made of."""
    for known in (_how, plan.keys_plan, plan.ring_plan, plan.moves_plan):
        known.cache_clear()


def _known_how(*given: Any) -> _How:
    """`_how`; what cannot be looked up is wrong, and refused by name."""
    try:
        return _how(*given)
    except TypeError:
        return _how.__wrapped__(*given)


def prepare_attention(
    shard: wlb.Shard,
    *,
    rank: int,
    device: torch.device | str | int,
    transport: Transport = "all_gather",
    ulysses_size: int | None = None,
    window: int | None = None,
    alibi: bool = False,
) -> Tensor:
    """Plans the work of `rank` for a micro-batch ahead of time, so that its first layer need not wait for the plan.

    Call it for the next micro-batch while the device works on this one, from any thread: nothing is sent to other
    ranks. `context_parallel_attention` with the same options and the kernel "auto" then finds the plan, if it is among
    the last 128 plans. Planning costs a fraction of a millisecond of CPU time, without the GIL, depending on the
    segments of all ranks and the tokens of this rank. Index arrays go to `device` in one copy on its current stream,
    which must be that of attention.

    Args:
        shard: the places of the micro-batch's tokens on the ranks.
        rank: this process's rank in the context-parallel group.
        device: device of the queries.
        transport: as in the call of attention.
        ulysses_size: as in the call of attention.
        window: as in the call of attention. Call this once for each window of the layers.
        alibi: whether attention will be called with `alibi_slopes`.

    Returns:
        int64 [1] on the CPU, to give to `context_parallel_attention` instead of the shard, also in compiled models. It
        is valid in this process for the last 1,024 prepared shards. Equal shards have equal tensors.

    Raises:
        WlbError: the shard does not have this rank, or options do not fit.
    """
    arguments.check_any_shard(shard)
    arguments.check_rank(rank, shard.cp_size)
    degree = arguments.check_transport(transport, ulysses_size, shard.cp_size)
    arguments.check_window(window)
    window = arguments.reach(window)
    device = torch.empty(0, device=device).device  # with its index, as tensors have it
    common: dict[str, Any] = {"window": window, "biased": alibi, "device": device}
    common["buckets"] = not alibi and kernels.is_prepared_in_buckets(device)
    if transport in ("all_gather", "fetch"):
        plan.keys_plan(shard, rank, fetch=transport == "fetch", **common)
    else:
        plan.ring_plan(shard, rank, degree=degree, **common)
    return operator.PREPARED.add(shard)
