"""Evaluates a stream on several ranks, each row once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from wlb.integrations.rows import Collator
from wlb.torch.host import host_group


class StreamedEvaluation:
    """Batches of the trainer's own size from a stream, equally many on all ranks.

    accelerate concatenates the batches of all ranks, which fails if their rows have other widths; or it lets each rank
    read the stream, and does not say which rows it repeats to fill up the last batches. This loader deals out rows
    before they are collated, and tells accelerate how many rows of the last batches are new. So the loss and
    `compute_metrics` have each row once.

    The first rank reads for all ranks, as accelerate does it for streams; with `dispatch_batches=False` every rank
    reads the whole stream, without communication.

    Args:
        dataset: an iterable, with or without a length; equal on all ranks with `dispatch_batches=False`.
        collator: the trainer's; called with the rows of one batch.
        args: the trainer's arguments.
        accelerator: the trainer's.

    Attributes:
        dataset: as above.
        end_of_dataloader: whether the batch that was given is the last one; read by accelerate.
        remainder: how many rows of the last batches of all ranks are new; -1 before the last one; read by accelerate.
    """

    def __init__(self, dataset: Any, collator: Collator, args: TrainingArguments, accelerator: Any) -> None:
        self.dataset = dataset
        self.end_of_dataloader, self.remainder = False, -1
        self._collator, self._args, self._state = collator, args, accelerator.gradient_state
        self._reads_alone = args.accelerator_config.dispatch_batches is not False  # type: ignore[union-attr]

    def __len__(self) -> int:
        """Batches of a rank. Raises `TypeError` for a stream without a length."""
        together: int = self._args.eval_batch_size * self._args.world_size
        return math.ceil(len(self.dataset) / together)

    def __iter__(self) -> Iterator[Any]:
        self.end_of_dataloader, self.remainder = False, -1
        self._state._add_dataloader(self)
        try:
            parts = self._dealt() if self._reads_alone else self._own()
            part = next(parts, None)
            while part is not None:
                following = next(parts, None)
                rows, new = part
                if following is None:
                    self.end_of_dataloader, self.remainder = True, new
                yield self._collator(rows)
                part = following
        finally:
            self._state._remove_dataloader(self)

    def _own(self) -> Iterator[tuple[list[Any], int]]:
        """The rows of this rank in each round, from a stream that every rank reads."""
        for parts, new in self._rounds():
            yield parts[self._args.process_index], new

    def _dealt(self) -> Iterator[tuple[list[Any], int]]:
        """The rows of this rank in each round, which the first rank reads.

        Raises:
            Exception: what the stream raised, on every rank.
        """
        group = host_group(description="wlb: rows of an evaluation")
        found: list[Any] = [None]
        rounds = self._rounds() if self._args.process_index == 0 else None
        while True:
            given: list[Any] | None = None
            if rounds is not None:
                try:
                    parts, new = next(rounds, (None, 0))
                    given = [None if parts is None else (parts[rank], new) for rank in range(self._args.world_size)]
                except Exception as cause:  # the other ranks would wait for ever
                    given = [cause for _ in range(self._args.world_size)]
            dist.scatter_object_list(found, given, group=group, group_src=0)
            part: Any = found[0]
            if isinstance(part, Exception):
                raise part
            if part is None:
                return
            yield part

    def _rounds(self) -> Iterator[tuple[list[list[Any]], int]]:
        """One batch of rows for each rank, and how many of these rows are new: the last round repeats its first."""
        args = self._args
        size, workers = args.eval_batch_size, args.dataloader_num_workers
        read = DataLoader(
            self.dataset,
            batch_size=size,
            collate_fn=list,
            num_workers=workers,
            prefetch_factor=args.dataloader_prefetch_factor if workers else None,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None) if workers else None,
        )
        together, rows = size * args.world_size, chain.from_iterable(read)
        while part := list(islice(rows, together)):
            full = list(islice(cycle(part), together))
            yield [full[rank * size : (rank + 1) * size] for rank in range(args.world_size)], len(part)
