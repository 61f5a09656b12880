"""Documents to balanced steps in one line, for a loop of one's own."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch.distributed as dist
from torch.utils.data import DataLoader

import wlb
from wlb._errors import check_integer
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.collate import collate
from wlb.torch.data.documents import measured
from wlb.torch.data.loading import Loading
from wlb.torch.data.room import micro_batches
from wlb.torch.data.step import StepLoader

_SHAPE: Final = ("multiple_of_tokens", "token_buckets", "max_documents")  # as a packer and `collate` have them


def balanced_loader(
    dataset: Any,
    *,
    max_tokens: int,
    tokens_per_batch: int,
    config: Any = None,
    group: dist.ProcessGroup | None = None,
    **options: Any,
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
        config: that of a Hugging Face model, for what documents cost; or give `cost_model`.
        group: data-parallel ranks; None for all there are, or a single process.
        **options: of :class:`wlb.torch.Loading`: `max_document_tokens`, `oversize`, `max_delay`, `cost_model`,
            `lengths`, `num_epochs`, `shuffle`, `seed`, `num_workers`; and of `wlb.Packer`: `method`, `release`,
            `delay_price`, `max_step_cost`, ...

    Returns:
        The steps of this rank.

    Raises:
        wlb.WlbError: an argument makes no sense, or is unknown; a data set without a length; a model of which the costs
            are not known.

    Complexity:
        O(documents), where lengths are not read from documents.
    """
    loading, packer = Loading.of(options, wlb.Packer, but=("num_micro_batches",))
    check_integer("max_tokens", max_tokens, minimum=1)
    check_integer("tokens_per_batch", tokens_per_batch, minimum=1)
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    documents, lengths = measured(dataset, loading.lengths, "dataset")
    count = ranks * micro_batches(tokens_per_batch, ranks=ranks, max_tokens=max_tokens)
    limits = {"max_tokens": max_tokens, "cost_model": loading.costs(config), "tokens_per_batch": tokens_per_batch}
    made = loading.packer(count, **limits, **packer)
    sampler = loading.sampler(lengths, made, rank=rank, ranks=ranks)
    shape = {name: packer[name] for name in _SHAPE if name in packer}
    work, workers = partial(collate, **shape), loading.num_workers
    return StepLoader(DataLoader(documents, batch_sampler=sampler, collate_fn=work, num_workers=workers))
