"""wlb's planners in the place of verl's: with the same names, arguments and kinds of results.

A file of two lines, such as `balance.py`, and an environment variable install them in all of verl's processes:

    import wlb.integrations.verl
    wlb.integrations.verl.install()

    VERL_USE_EXTERNAL_MODULES=balance python -m verl.trainer.main_ppo ...

verl gives samples to ranks first, and then every rank splits its own samples into micro-batches. This module does the
same, with `max_token_len` as a hard limit. `wlb.integrations.rl.plan` plans for all ranks at once, which is more even.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import wlb
from wlb._errors import check_integer, error, renamed

__all__ = ["get_seqlen_balanced_partitions", "install", "rearrange_micro_batches"]

_PLANNER = "verl.utils.seqlen_balancing"


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[float], k_partitions: int, equal_size: bool
) -> list[list[int]]:
    """Distributes items so that the sums of their weights are even.

    Args:
        seqlen_list: the weight of each item, at least 0: its length, or its work.
        k_partitions: number of partitions.
        equal_size: whether every partition has equally many items.

    Returns:
        For each partition its items, ascending; none is empty.

    Raises:
        WlbError: fewer items than partitions; with `equal_size`, a number of items that `k_partitions` does not divide;
            a weight that is negative or not finite.
    """
    check_integer("k_partitions", k_partitions, minimum=1)
    weights = np.asarray(seqlen_list, dtype=np.float64)
    if weights.size < k_partitions:
        raise error("seqlen_list", f"has {weights.size} items, fewer than k_partitions = {k_partitions}")
    if equal_size and weights.size % k_partitions:
        raise error("seqlen_list", f"has {weights.size} items, which k_partitions = {k_partitions} does not divide")
    bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
    if bad.size:
        index, value = int(bad[0]), float(weights[bad[0]])
        raise error("seqlen_list", f"= {value}: must be finite, and 0 or above", index=index, value=value)
    with renamed(equal_documents="equal_size", costs="seqlen_list", dp_size="k_partitions"):
        packing = wlb.pack(
            np.ones(weights.size, np.int64),
            num_micro_batches=k_partitions,
            max_tokens=max(weights.size, 1),
            costs=weights if weights.any() else np.ones_like(weights),
            dp_size=k_partitions,
            equal_documents=equal_size,
        )
    return [micro_batch.document_ids.tolist() for micro_batch in packing]


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    same_micro_num_in_dp: bool = True,
    min_num_micro_batch: int | None = None,
    use_dynamic_bsz_balance: bool = True,
    force_group_size: int = 1,
) -> tuple[list[Any], list[list[int]]]:
    """Splits a rank's batch into micro-batches of even work and at most `max_token_len` tokens.

    Args:
        batch: TensorDict with "input_ids", nested, or padded and with "attention_mask" [samples, tokens].
        max_token_len: most tokens of a micro-batch, without padding.
        dp_group: data-parallel ranks.
        same_micro_num_in_dp: whether all of these have equally many micro-batches.
        num_batches_divided_by: the number of micro-batches is a multiple of it.
        min_num_micro_batch: least number of micro-batches.
        use_dynamic_bsz_balance: whether the lightest micro-batches are at both ends, where a pipeline fills and drains;
            otherwise they are in the order of their first samples.
        force_group_size: number of consecutive samples that stay in one micro-batch.

    Returns:
        The micro-batches, and the samples of each. They are the fewest, or nearly, with which the fullest rank can hold
        its samples; none is empty.

    Raises:
        WlbError: on all ranks of `dp_group` alike, if the samples of a rank are no multiple of `force_group_size`, a
            group of them is longer than `max_token_len`, or a rank has fewer groups than micro-batches.
    """
    lengths = _lengths(batch)
    divisor = num_batches_divided_by or 1
    check_integer("force_group_size", force_group_size, minimum=1)
    together = dp_group if dist.is_initialized() and same_micro_num_in_dp else None
    rest = lengths.size % force_group_size
    grouped = lengths[: lengths.size - rest].reshape(-1, force_group_size)
    tokens, work = grouped.sum(axis=1), _workload(grouped).sum(axis=1)

    # All ranks refuse together, because if one rank raised alone, the others would wait for it.
    uneven = lengths.size if rest else 0
    longest, fewest, uneven = _most([int(tokens.max(initial=0)), -tokens.size, uneven], together)
    if uneven:
        message = f"= {force_group_size}: does not divide the {uneven} samples"
        raise error("force_group_size", message, value=force_group_size)
    if longest > max_token_len:
        raise error("max_token_len", f"= {max_token_len}: a group of samples has {longest} tokens", value=max_token_len)
    least = _packed(tokens, work, max_token_len, None, divisor)
    count = divisor if least is None else len(least)
    (count,) = _most([max(count, -(-(min_num_micro_batch or 1) // divisor) * divisor)], together)
    while True:
        if count > -fewest:
            message = f"= {max_token_len}: {count} micro-batches are needed, and a rank has {-fewest} groups of samples"
            raise error("max_token_len", message, value=max_token_len)
        packing = _packed(tokens, work, max_token_len, count, 1)
        (missed,) = _most([int(packing is None)], together)
        if packing is not None and not missed:
            break
        count += divisor

    order = packing.deal(1)[0]
    groups = [packing[int(index)].document_ids for index in order]
    if not use_dynamic_bsz_balance:
        groups.sort(key=lambda held: int(held[0]))
    first = np.arange(force_group_size)
    indices = [(held[:, None] * force_group_size + first).ravel().tolist() for held in groups]
    select = importlib.import_module("verl.utils.tensordict_utils").index_select_tensor_dict
    return [select(batch, held) for held in indices], indices


def install() -> None:
    """Replaces verl's functions by these, in all of its modules that are loaded.

    Raises:
        WlbError: verl is not installed, or its functions take other arguments than those of verl 0.9.
    """
    try:
        planner = importlib.import_module(_PLANNER)
    except ImportError as missing:
        raise error("verl", f"is needed, and cannot be imported: {missing}") from missing
    for ours in (get_seqlen_balanced_partitions, rearrange_micro_batches):
        _replace(planner, ours)


def _replace(planner: ModuleType, ours: Callable[..., Any]) -> None:
    theirs = getattr(planner, ours.__name__, None)
    if theirs is ours:
        return
    expected = list(inspect.signature(ours).parameters)
    found = None if theirs is None else list(inspect.signature(theirs).parameters)
    if found != expected:
        try:
            installed = version("verl")
        except PackageNotFoundError:
            installed = "of no known version"
        message = (
            f"{installed} has {ours.__name__}({', '.join(found) if found else 'missing'}), but wlb expects "
            f"({', '.join(expected)}), as in verl 0.9: install that, or a wlb that supports this version"
        )
        raise error("verl", message, value=installed)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "verl" and getattr(module, ours.__name__, None) is theirs:
            setattr(module, ours.__name__, ours)


def _lengths(batch: Any) -> NDArray[np.int64]:
    """Tokens of each sample."""
    input_ids = batch["input_ids"]
    lengths = input_ids.offsets().diff() if input_ids.is_nested else batch["attention_mask"].sum(dim=1)
    found: NDArray[np.int64] = lengths.to("cpu", torch.int64).numpy()
    return found


def _workload(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Work as verl measures it: 24,576 d + d^2 for d tokens, that of a dense transformer of hidden size 4,096."""
    tokens = lengths.astype(np.float64)
    found: NDArray[np.float64] = tokens * (24576.0 + tokens)
    return found


def _packed(
    tokens: NDArray[np.int64], work: NDArray[np.float64], max_tokens: int, count: int | None, multiple_of: int
) -> wlb.Packing | None:
    """One rank's groups in `count` micro-batches, or in the fewest; None where they were not found to fit."""
    options: dict[str, Any] = {"multiple_of": multiple_of} if count is None else {}
    # A sample without tokens takes the room of one.
    lengths, costs = np.maximum(tokens, 1), np.maximum(work, 1.0)
    try:
        return wlb.pack(lengths, num_micro_batches=count, max_tokens=max_tokens, costs=costs, dp_size=1, **options)
    except wlb.WlbError as refused:
        if refused.argument == "num_micro_batches":
            return None
        raise


def _most(values: list[int], group: Any) -> list[int]:
    """The greatest of each value on the ranks of a group."""
    if group is None:
        return values
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else "cpu"
    found = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return [int(value) for value in found.tolist()]
