"""wlb's planners in the place of verl's: with the same names, arguments and kinds of results.

A file such as `balance.py`, and an environment variable install them in all of verl's processes:

    import wlb, wlb.integrations.verl
    model = wlb.ModelConfig.from_hugging_face("Qwen/Qwen3-8B/config.json")
    wlb.integrations.verl.install(cost_model=model.cost_model())

    VERL_USE_EXTERNAL_MODULES=balance python -m verl.trainer.main_ppo ...

verl's trainer gives a round's samples to ranks (`_balance_batch`). Every rank then cuts its samples into optimizer
steps and splits each step into micro-batches (`rearrange_micro_batches`). Here the trainer plans the optimizer steps
first, by `wlb.rl.plan`, so that each step is even and has whole prompts.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

import wlb
from wlb._errors import check_integer, error, renamed
from wlb._warned import warn
from wlb.integrations import slices
from wlb.integrations.versions import check_signature, needed, when_imported

__all__ = ["calculate_workload", "get_seqlen_balanced_partitions", "install", "rearrange_micro_batches"]

_PLANNER = "verl.utils.seqlen_balancing"
_TRAINERS = {"verl.trainer.ppo.v1.trainer_base": "PPOTrainer", "verl.trainer.ppo.ray_trainer": "RayPPOTrainer"}
# verl's formula, 24,576 d + d^2: a dense transformer of hidden size 4,096. Until `install` says what is trained.
_cost_model = wlb.CostModel(attention=2.0, linear=24575.0)


def calculate_workload(seqlen_list: torch.Tensor) -> torch.Tensor:
    """Work of each sample, by the cost model that `install` was given.

    Args:
        seqlen_list: tokens of each sample, integers of any shape.

    Returns:
        float64 of the same shape, in the cost model's unit; 0 for a sample without tokens.
    """
    return torch.from_numpy(_workload(seqlen_list.to("cpu", torch.int64).numpy())).to(seqlen_list.device)


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


def install(*, cost_model: wlb.CostModel) -> None:
    """Replaces verl's functions by these, in all of its modules that are loaded, and its trainers' `_balance_batch`.

    Args:
        cost_model: what samples cost in the model that is trained, such as
            ``wlb.ModelConfig.from_hugging_face(path).cost_model()``.

    Raises:
        WlbError: verl is not installed, or its functions take other arguments than those of verl 0.9. For the trainers
            this is raised when they are imported.
    """
    global _cost_model
    planner = needed("verl", _PLANNER, cost_model)
    for ours in (calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches):
        _replace(planner, ours)
    for name in _TRAINERS:
        when_imported(name, _patch_trainer)
    _cost_model = cost_model


def _replace(planner: ModuleType, ours: Callable[..., Any]) -> None:
    theirs = getattr(planner, ours.__name__, None)
    if theirs is ours:
        return
    check_signature("verl", theirs, ours, "as in verl 0.9")
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == "verl" and getattr(module, ours.__name__, None) is theirs:
            setattr(module, ours.__name__, ours)


def _patch_trainer(module: ModuleType) -> None:
    trainer = getattr(module, _TRAINERS[module.__name__], None)
    theirs = getattr(trainer, "_balance_batch", None)
    if trainer is None or theirs is _balance_batch:
        return
    check_signature("verl", theirs, _balance_batch, "as in verl 0.9")
    trainer._balance_batch_of_verl = theirs
    trainer._balance_batch = _balance_batch


def _balance_batch(
    self: Any, batch: Any, metrics: Any, logging_prefix: str = "global_seqlen", keep_minibatch: bool = False
) -> Any:
    """Reorders a round so that the equal slices that ranks get have even optimizer steps of whole prompts."""
    actor = self.config.actor_rollout_ref.actor
    if getattr(self, "use_prefix_grouper", False):  # ranks get groups of one size, which theirs does
        return self._balance_batch_of_verl(batch, metrics, logging_prefix, keep_minibatch)
    if actor.get("shuffle", False):
        warn(
            "actor.shuffle=True mixes the samples of a rank, so steps are not those that were planned: set it to False"
        )
    dp_size = _dp_size(self.actor_rollout_wg)
    if hasattr(batch, "tags"):  # trainer_base: names of samples in TransferQueue
        upsample = importlib.import_module("verl.trainer.ppo.padding_utils").upsample_batch_to_divisible_size
        batch = upsample(batch, self._get_required_batch_multiple(dp_size), self.tokenizer.eos_token_id)
        lengths = np.array([tag["seq_len"] for tag in batch.tags], np.int64)
        # Padding of verl goes to any step.
        pads = [tag.get("is_padding", False) for tag in batch.tags]
        prompts = [key if pad else key.rsplit("_", 2)[0] for key, pad in zip(batch.keys, pads, strict=True)]
    else:  # ray_trainer: a DataProto
        lengths = _lengths(batch.batch)
        prompts = [*batch.non_tensor_batch["uid"]] if "uid" in batch.non_tensor_batch else [*range(lengths.size)]
    size = int(actor.ppo_mini_batch_size) * int(self.config.actor_rollout_ref.rollout.n)
    work = _workload(lengths)
    steps, parted = slices.planned(lengths, work, prompts, dp_size=dp_size, samples_per_step=size)
    parts = [[sample for held in of_rank for sample in _light_ends(held, work)] for of_rank in steps]
    order = [sample for part in parts for sample in part]
    batch.reorder(order if hasattr(batch, "tags") else torch.tensor(order))
    log = importlib.import_module(_PLANNER).log_seqlen_unbalance
    metrics.update(log(seqlen_list=lengths.tolist(), partitions=parts, prefix=logging_prefix))
    metrics[f"{logging_prefix}/prompts_parted"] = parted
    return batch if hasattr(batch, "tags") else None


def _light_ends(samples: NDArray[np.int64], work: NDArray[np.float64]) -> list[int]:
    """Samples by work, lightest at both ends: micro-batches of a fixed number take them one after the other."""
    rising = samples[np.argsort(work[samples], kind="stable")]
    return [*rising[::2].tolist(), *rising[1::2][::-1].tolist()]


def _dp_size(workers: Any) -> int:
    if "actor" not in workers._dispatch_info:
        workers._dispatch_info["actor"] = workers._query_dispatch_info("actor")
    return int(max(workers._dispatch_info["actor"])) + 1


def _lengths(batch: Any) -> NDArray[np.int64]:
    """Tokens of each sample."""
    input_ids = batch["input_ids"]
    lengths = input_ids.offsets().diff() if input_ids.is_nested else batch["attention_mask"].sum(dim=1)
    found: NDArray[np.int64] = lengths.to("cpu", torch.int64).numpy()
    return found


def _workload(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
    """Work of each sample, by the model's cost; 0 without tokens."""
    found: NDArray[np.float64] = _cost_model.cost(np.maximum(lengths, 1).ravel()).reshape(lengths.shape)
    return np.where(lengths > 0, found, 0.0)


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
