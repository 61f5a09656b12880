"""Checks the arguments of attention without communication; an error on all ranks is found on all."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypedDict, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

import wlb
from wlb._core import MAX_TOKENS
from wlb._errors import check_integer, check_positive, error, is_integer
from wlb.torch.attention.kernels import KernelName

Transport = Literal["all_gather", "fetch", "ring", "ulysses", "usp"]


class Options(NamedTuple):
    """Plain options of `context_parallel_attention`, in the order of the operator's schema."""

    transport: Transport
    ulysses_size: int | None
    softmax_scale: float | None
    softcap: float | None
    window: int | None
    kernel: KernelName
    return_lse: bool


class Named(TypedDict, total=False):
    """Keywords of `context_parallel_attention`, except `return_lse`, for type checkers."""

    group: dist.ProcessGroup | None
    transport: Transport
    ulysses_size: int | None
    softmax_scale: float | None
    softcap: float | None
    window: int | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    kernel: KernelName


def check_shard(shard: wlb.Shard, name: str = "shard") -> None:
    """Refuses anything but a shard of documents."""
    check_any_shard(shard, name)
    if shard.forest is not None:
        message = (
            "is of a forest: this is for documents, whose tokens have one that comes next. Collate the samples one by "
            "one (wt.collate) for layers that need it"
        )
        raise error(name, message, value=shard)


def check_any_shard(shard: wlb.Shard, name: str = "shard") -> None:
    """Refuses anything but a shard."""
    if not isinstance(shard, wlb.Shard):
        raise error(name, f"is a {type(shard).__name__}, not a wlb.Shard", value=shard)


def check_rank(rank: int, size: int) -> None:
    """Refuses a rank outside of a group of `size` ranks."""
    if not is_integer(rank) or not 0 <= rank < size:
        raise error("rank", f"= {rank!r}: the shard has ranks 0 to {size - 1}", value=rank)


def place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in a group, and the group's size."""
    if group is None:
        return 0, 1
    if isinstance(group, dist.ProcessGroup):
        return group.rank(), group.size()
    if (rank := dist.get_rank(group)) < 0:
        raise error("group", "does not contain this process", value=group)
    return rank, dist.get_world_size(group)


def check_group(shard: wlb.Shard, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's rank in the group and the group's size, which is the shard's."""
    check_any_shard(shard)
    rank, size = place(group)
    check_size(shard, size)
    return rank, size


def check_size(shard: wlb.Shard, size: int) -> None:
    """Refuses a shard for a group of another size."""
    if size != shard.cp_size:
        found = "None: one process, or a group of 1" if size == 1 else f"a group of {size}"
        raise error("group", f"is {found}, but the shard is for cp_size = {shard.cp_size}", value=size)


def check_transport(transport: Transport, ulysses_size: int | None, size: int) -> int:
    """The number of ranks that exchange heads."""
    if transport not in get_args(Transport):
        raise error("transport", f"= {transport!r}: one of {', '.join(get_args(Transport))}", value=transport)
    if transport != "usp":
        if ulysses_size is not None:
            raise error("ulysses_size", f"= {ulysses_size!r}: only for the transport 'usp'", value=ulysses_size)
        return size if transport == "ulysses" else 1
    if not is_integer(ulysses_size) or ulysses_size < 1 or size % ulysses_size:
        raise error("ulysses_size", f"= {ulysses_size!r}: a divisor of the group's size {size}", value=ulysses_size)
    return int(ulysses_size)


class Described(NamedTuple):
    """Properties of a tensor that are checked."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def check_are_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuses what is no tensor."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        name, x = next((name, x) for name, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, Tensor))
        found = type(x).__name__
        raise error(name, f"is {found}, not a tensor [tokens, heads, head_dim]", value=found)


def check_tensors(q: Described, k: Described, v: Described, shard: wlb.Shard, rank: int) -> None:
    """Checks that tensors fit each other and this rank of the shard."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if len(x.shape) != 3:
            shape = list(x.shape)
            raise error(name, f"is {shape}, not a tensor [tokens, heads, head_dim]", value=shape)
        if x.dtype != q.dtype or x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise error(name, f"is {x.dtype}: floating point and one dtype for q, k and v ({q.dtype})", value=x.dtype)
        if x.device != q.device:
            raise error(name, f"is on {x.device}, q on {q.device}", value=x.device)
        if x.shape[1] < 1 or x.shape[2] < 1 or (name != "v" and x.shape[2] != q.shape[2]):
            message = f"is {list(x.shape)}, q {list(q.shape)}: at least one head, and keys have the head_dim of queries"
            raise error(name, message, value=x.shape)
    if v.shape[1] != k.shape[1]:
        raise error("v", f"has {v.shape[1]} heads, k {k.shape[1]}", value=v.shape[1])
    if q.shape[1] % k.shape[1]:
        raise error("k", f"has {k.shape[1]} heads, which do not divide the {q.shape[1]} of q", value=k.shape[1])
    held = shard.tokens_per_rank.tolist()
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[0] != held[rank]:
            message = f"has {x.shape[0]} tokens; the shard gives rank {rank} {held[rank]} of {shard.num_tokens}"
            raise error(name, message, value=x.shape[0])


def widened(x: Tensor, width: int) -> Tensor:
    """`x` with its last axis padded with zeros."""
    return x if x.shape[2] == width else pad(x, (0, width - x.shape[2]))


def of_one_width(q: Tensor, k: Tensor, v: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values padded to the widest with zeros, which change no score and no output."""
    return widened(q, width), widened(k, width), widened(v, width)


def check_heads(transport: Transport, degree: int, heads: int, kv_heads: int) -> None:
    """Checks that `degree` ranks can share the heads."""
    if not _shared(degree, heads, kv_heads):
        raise error(
            "ulysses_size" if transport == "usp" else "transport",
            f"{transport!r}: {degree} ranks cannot share {heads} heads and {kv_heads} key heads; their number must "
            "divide the heads, and divide the key heads or be a multiple of them",
            value=degree,
        )


def cp_sizes(
    transport: Transport, *, num_heads: int, num_kv_heads: int | None = None
) -> tuple[int, ...] | Literal["any"]:
    """The sizes of context-parallel groups that attention supports, for `wlb.plan_dynamic_cp(group_sizes=...)`.

    `ulysses` divides the heads of a model among the ranks of a group, so their number has to divide the heads, and to
    divide the key heads or be a multiple of them. Attention refuses other sizes.

    Args:
        transport: as in the call of attention. `usp` exchanges heads in blocks of a separate size, so it has no limit.
        num_heads: query heads on one rank: divided by the tensor-parallel ranks.
        num_kv_heads: key heads on one rank; `num_heads` if None.

    Returns:
        Ascending from 1; "any" if every size is supported.

    Raises:
        WlbError: no such transport, or no heads; or key heads that do not divide the heads.

    O(num_heads).

    Examples:
        >>> import wlb.torch as wt
        >>> wt.cp_sizes("ulysses", num_heads=28, num_kv_heads=4)
        (1, 2, 4, 28)
        >>> wt.cp_sizes("ring", num_heads=28, num_kv_heads=4)
        'any'
    """
    if transport not in get_args(Transport):
        raise error("transport", f"= {transport!r}: one of {', '.join(get_args(Transport))}", value=transport)
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    for name, value in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        check_integer(name, value, minimum=1)
    if num_heads % num_kv_heads:
        message = f"= {num_kv_heads}: key heads divide the heads ({num_heads}); give those of one rank"
        raise error("num_kv_heads", message, value=num_kv_heads)
    if transport != "ulysses":
        return "any"
    return tuple(size for size in range(1, num_heads + 1) if _shared(size, num_heads, num_kv_heads))


def _shared(degree: int, heads: int, kv_heads: int) -> bool:
    return heads % degree == 0 and (kv_heads % degree == 0 or degree % kv_heads == 0)


def check_scores(softmax_scale: float | None, softcap: float | None, window: int | None) -> None:
    """Checks scale, cap and window."""
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is not None:
            check_positive(name, value)
    check_window(window)


def reach(window: int | None) -> int | None:
    """The window, or None where it hides nothing: no sequence is longer than `MAX_TOKENS`, and kernels take int32."""
    return None if window is None or window >= MAX_TOKENS else int(window)


def check_window(window: int | None) -> None:
    """Refuses a window that is no positive number of tokens."""
    if window is not None and not (is_integer(window) and window > 0):
        raise error("window", f"= {window!r}: a positive number of tokens, or None", value=window)


def check_slopes(slopes: Tensor, q: Tensor) -> None:
    """Refuses anything but a number for each head of the queries, without a gradient."""
    check_of_heads("alibi_slopes", slopes, q)
    if slopes.requires_grad:
        raise error("alibi_slopes", "requires a gradient, and gets none", value=slopes.requires_grad)


def check_of_heads(name: str, x: Tensor, q: Tensor) -> None:
    """Refuses anything but a number for each head of the queries."""
    if not isinstance(x, Tensor) or x.shape != q.shape[1:2] or not x.is_floating_point():
        found = f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise error(name, f"is {found}, not floating point [{q.shape[1]}], one for each head", value=found)
    if x.device != q.device:
        raise error(name, f"is on {x.device}, q on {q.device}", value=x.device)
