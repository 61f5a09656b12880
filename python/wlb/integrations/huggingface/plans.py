"""Sources of micro-batches for a trainer: data of known lengths, streams, and evaluations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_utils import seed_worker

import wlb
from wlb.integrations.huggingface.loader import row_of
from wlb.integrations.rows import Collator, Rows
from wlb.integrations.streams import streams_of
from wlb.reading.rows import RowReader
from wlb.reading.sizes import micro_batches
from wlb.torch.data import BalancedBatchSampler, BalancedStream, Documents, PackedBatch, StepLoader
from wlb.torch.data.loading import SHAPE, Loading

EVALUATED_TOGETHER: Final = 4  # micro-batches of a rank in a step of an evaluation, so that they are full


@dataclass(frozen=True)
class Limits:
    """Settings of a packer that do not depend on the number of micro-batches.

    Attributes:
        max_tokens: most tokens of a micro-batch.
        loading: options of the loader.
        others: further arguments of the packer.
        ranks: number of data-parallel ranks.
        meet: whether they wait for each other in every micro-batch.
    """

    max_tokens: int
    loading: Loading
    others: dict[str, Any]
    ranks: int
    meet: bool

    @property
    def reader(self) -> RowReader:
        """The reader of rows, which knows the columns to carry."""
        return RowReader(self.loading.columns)

    @property
    def collate(self) -> Callable[[list[Any]], PackedBatch]:
        """Makes micro-batches of the sizes that the packer plans."""
        return partial(self.loading.collate, **{name: self.others[name] for name in SHAPE if name in self.others})

    @property
    def context(self) -> int:
        """Most tokens of a document that is not cut."""
        return self.loading.max_document_tokens or self.max_tokens

    def packer(self, num_micro_batches: int, tokens_per_batch: int | None = None) -> wlb.Packer:
        """A packer for steps of `num_micro_batches` micro-batches, for which `tokens_per_batch` tokens are read."""
        arguments = {"max_tokens": self.max_tokens, "cost_model": self.loading.cost_model}
        arguments["tokens_per_batch"] = tokens_per_batch
        return self.loading.packer(num_micro_batches, ranks=self.ranks, meet=self.meet, **arguments | self.others)

    def micro_batches(self, tokens_per_batch: int) -> int:
        """Fewest micro-batches, equally many on all ranks, that hold the tokens of a step and leave some room."""
        return self.ranks * micro_batches(tokens_per_batch, ranks=self.ranks, max_tokens=self.max_tokens)


@dataclass(frozen=True, eq=False)
class KnownLengths:
    """Documents of known lengths.

    Attributes:
        rows: the documents.
        lengths: int64 [documents].
        packer: for their steps.
        num_epochs: epochs of the run.
        shuffle: whether each epoch has its own order.
        args: the trainer's arguments.
        limits: settings of the packer.
    """

    rows: Rows
    lengths: NDArray[np.int64]
    packer: wlb.Packer
    num_epochs: int
    shuffle: bool
    args: TrainingArguments
    limits: Limits

    def sampler(self) -> BalancedBatchSampler:
        """A sampler of this rank, at the beginning of the data."""
        args = self.args
        return BalancedBatchSampler(
            self.lengths,
            packer=self.packer,
            dp_rank=args.process_index,
            dp_size=args.world_size,
            shuffle=self.shuffle,
            seed=args.seed if args.data_seed is None else args.data_seed,
            num_epochs=self.num_epochs,
        )

    def steps(self) -> StepLoader[PackedBatch]:
        """A loader at the beginning of the data."""
        args = self.args
        workers = args.dataloader_num_workers
        return StepLoader(
            DataLoader(
                Documents(self.rows, columns=self.limits.loading.columns),
                batch_sampler=self.sampler(),
                collate_fn=self.limits.collate,
                num_workers=workers,
                prefetch_factor=args.dataloader_prefetch_factor if workers else None,
                pin_memory=args.dataloader_pin_memory and torch.accelerator.is_available(),
                persistent_workers=args.dataloader_persistent_workers,
                multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
                # As the Trainer does: the random numbers of rows are other ones on every rank and worker.
                worker_init_fn=partial(seed_worker, num_workers=workers, rank=args.process_index),
            )
        )


@dataclass(frozen=True, eq=False)
class Streamed:
    """Documents of a data set without a length.

    Attributes:
        dataset: iterable, equal on all ranks.
        collator: called with one document at a time.
        packer: for their steps.
        limits: settings of the packer.
    """

    dataset: Any
    collator: Collator
    packer: wlb.Packer
    limits: Limits

    def steps(self) -> BalancedStream[PackedBatch]:
        """A stream at the beginning of the data. All ranks call this together. Close the stream at the end."""
        return BalancedStream(
            streams_of(self.dataset, self.collator, columns=self.limits.loading.columns),
            packer=self.packer,
            collate_fn=self.limits.collate,
            columns=self.limits.loading.columns,
            group=dist.group.WORLD if dist.is_initialized() else None,
        )


class Evaluation:
    """Every document once, in rows of packed documents, with equally many rows on all ranks.

    Attributes:
        dataset: the data to evaluate on.
    """

    def __init__(self, rows: Rows, limits: Limits, args: TrainingArguments, *, plain: bool) -> None:
        self.dataset = rows.dataset
        self._plain = plain
        limits = replace(limits, loading=replace(limits.loading, max_delay=0), others={})
        packer = limits.packer(args.world_size * EVALUATED_TOGETHER)
        self._plan = KnownLengths(rows, rows.lengths(), packer, 1, False, args, limits)

    def __len__(self) -> int:
        return self._plan.sampler().total_steps() * EVALUATED_TOGETHER

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step in self._plan.steps():
            for batch in step.micro_batches:
                yield row_of(batch, plain=self._plain)
