"""Documents to balanced steps in one line, for a loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from numpy.typing import ArrayLike
from torch.utils.data import DataLoader

import wlb
from wlb._choices import Oversize
from wlb._errors import check_integer, check_options, error
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.collate import collate
from wlb.torch.data.documents import measured
from wlb.torch.data.room import micro_batches
from wlb.torch.data.sampler import BalancedBatchSampler
from wlb.torch.data.step import StepLoader

_SET_HERE = ("num_micro_batches",)


def balanced_loader(
    dataset: Any,
    *,
    max_tokens: int,
    tokens_per_batch: int,
    max_document_tokens: int | None = None,
    oversize: Oversize = "split",
    max_delay: int = 16,
    config: Any = None,
    cost_model: wlb.CostModel | None = None,
    lengths: ArrayLike | None = None,
    num_epochs: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    num_workers: int = 0,
    group: dist.ProcessGroup | None = None,
    **packer: Any,
) -> StepLoader[PackedBatch]:
    """Steps of equal work from a data set: packer, sampler, `DataLoader` and `StepLoader` made for it.

        loader = wt.balanced_loader(documents, max_tokens=65536, tokens_per_batch=2**20, config=model.config)
        while not loader.ended:
            for step in loader:
                loss = wt.train_step(model, step)
                ...  # optimizer; save step.state

    A step has the fewest micro-batches of `max_tokens` that hold `tokens_per_batch` with a quarter to spare. Not to be
    given to `accelerator.prepare`: each rank reads its own part already.

    Args:
        dataset: `dataset[i]` gives document `i`: a mapping with `input_ids` and maybe `labels` (-100 where nothing is
            learnt), or its tokens.
        max_tokens: most tokens of a micro-batch: what the memory of a rank holds.
        tokens_per_batch: tokens of a step on all ranks.
        max_document_tokens: the context; by default `max_tokens`.
        oversize: "split" longer documents, each token predicting the next one all the same; "truncate" them; or it is
            an "error".
        max_delay: most steps that a document waits for others; 0: none waits.
        config: that of a Hugging Face model, for what documents cost.
        cost_model: or what they cost.
        lengths: int[documents] tokens, if they are known; else they are read, once.
        num_epochs: of the run: after the last one what waits is drained.
        shuffle: another order in every epoch.
        seed: of these orders.
        num_workers: of the loader.
        group: data-parallel ranks; None for all there are, or a single process.
        **packer: further arguments of `wlb.Packer`: `method`, `release`, `delay_price`.

    Returns:
        The steps of this rank.

    Raises:
        wlb.WlbError: an argument makes no sense, or is unknown; a data set without a length; a model of which the costs
            are not known.

    Complexity:
        O(documents), where lengths are not read from documents.
    """
    check_options(packer, balanced_loader, wlb.Packer, but=_SET_HERE)
    check_integer("max_tokens", max_tokens, minimum=1)
    check_integer("tokens_per_batch", tokens_per_batch, minimum=1)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    documents, lengths = measured(dataset, lengths, "dataset")
    sampler = BalancedBatchSampler(
        lengths,
        packer=wlb.Packer(
            num_micro_batches=ranks * micro_batches(tokens_per_batch, ranks=ranks, max_tokens=max_tokens),
            max_tokens=max_tokens,
            max_document_tokens=max_document_tokens,
            oversize=oversize,
            cost_model=cost_of(config, cost_model),
            **waiting(max_delay) | packer,
        ),
        dp_rank=rank,
        dp_size=ranks,
        tokens_per_batch=tokens_per_batch,
        shuffle=shuffle,
        seed=seed,
        num_epochs=num_epochs,
    )
    return StepLoader(DataLoader(documents, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers))


def cost_of(config: Any, cost_model: wlb.CostModel | None) -> wlb.CostModel:
    """What documents cost, by a Hugging Face model's configuration (or the mapping that it is) if not given.

    Raises:
        wlb.WlbError: both are given, or none.
    """
    if (config is None) == (cost_model is None):
        raise error("cost_model", "or config: give one of them, which says what documents cost")
    if cost_model is not None:
        return cost_model
    return wlb.ModelConfig.from_hugging_face(config if isinstance(config, Mapping) else config.to_dict()).cost_model()


def waiting(max_delay: int) -> dict[str, Any]:
    """What a packer is told of how long documents may wait.

    Raises:
        wlb.WlbError: it makes no sense.
    """
    check_integer("max_delay", max_delay, minimum=0)
    return {"release": "adaptive", "max_delay": max_delay} if max_delay else {}
