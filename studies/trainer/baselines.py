"""What people do today, in the place of `StepLoader`: documents in order of arrival, cut or whole, or fixed lengths.

Nobody waits and nothing is carried over, so a step follows from its number alone. Batches are built when they are asked
for, without workers: enough to compare losses and balance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb.reading.permutation import Permutation
from wlb.torch.data import Documents, PackedBatch, Piece, Step
from wlb_tools.simulation.methods import next_fit


class BaselineLoader:
    """Steps of `pack(method="original")` or `pack(method="fixed_length")`, or of whole documents in order.

    Args:
        dataset: with `lengths` and token arrays, as in `corpus.py`.
        collate: makes a batch of documents.
        method: "original", "whole" (as documents arrive, the next micro-batch where one no longer fits) or
            "fixed_length".
        window: global batches that are packed together.
        num_micro_batches: of a global batch.
        context: tokens of a micro-batch; longer documents are split first.
        cost_model: what documents cost.
        dp_rank: this data-parallel rank.
        dp_size: data-parallel ranks.
        seed: of the order of documents: that of `BalancedBatchSampler` with the same seed.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate: Callable[[list[Any]], PackedBatch],
        method: Any,
        window: int,
        num_micro_batches: int,
        context: int,
        cost_model: wlb.CostModel,
        dp_rank: int,
        dp_size: int,
        seed: int,
    ) -> None:
        self.dataset, self.collate, self.method, self.window = dataset, collate, method, window
        self.sizes: dict[str, Any] = {
            "num_micro_batches": num_micro_batches,
            "max_tokens": context,
            "cost_model": cost_model,
        }
        self.dp_rank, self.dp_size, self.seed = dp_rank, dp_size, seed
        self.epoch, self.number, self.in_epoch = 0, 0, 0

    def __iter__(self) -> Iterator[Step[PackedBatch]]:
        """The remaining steps of this epoch."""
        documents, starts, lengths = self._pieces()
        tokens_per_batch = self.sizes["num_micro_batches"] * self.sizes["max_tokens"]
        if self.method == "whole":
            owner = next_fit(lengths, self.sizes["max_tokens"])
            every = np.arange(0, owner[-1] + 1, self.sizes["num_micro_batches"])
            offsets = np.append(np.searchsorted(owner, every), owner.size)
        else:
            offsets = wlb.batch_offsets(lengths, tokens_per_batch=tokens_per_batch)
        num_steps = (offsets.size - 1) // self.window * self.window  # a window that is not full is left out
        if num_steps == 0:
            found = offsets.size - 1
            raise ValueError(f"the documents make {found} global batches, fewer than a window of {self.window}")
        while self.in_epoch < num_steps:
            first = self.in_epoch // self.window * self.window
            here = slice(offsets[first], offsets[first + self.window])
            yield self._step(documents[here], starts[here], lengths[here], self.in_epoch - first)
        self.epoch, self.in_epoch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Where the next step begins."""
        return {"epoch": self.epoch, "number": self.number, "in_epoch": self.in_epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes on there."""
        self.epoch, self.number, self.in_epoch = state["epoch"], state["number"], state["in_epoch"]

    def _pieces(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Document, start and length of everything in this epoch, in order of arrival."""
        count = len(self.dataset)
        order = Permutation(count, seed=self.seed, epoch=self.epoch)(np.arange(count))
        documents, starts, lengths = wlb.split_documents(
            self.dataset.lengths[order], max_document_tokens=self.sizes["max_tokens"]
        )
        return order[documents], starts.astype(np.int64), lengths.astype(np.int64)

    def _step(
        self, documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64], which: int
    ) -> Step[PackedBatch]:
        window = {"global_batches": self.window} if self.method == "fixed_length" else {}
        started = time.perf_counter()
        if self.method == "whole":
            in_order = next_fit(lengths, self.sizes["max_tokens"])
            together = wlb.Packing.from_assignment(lengths, in_order, **self.sizes)
        else:
            together = wlb.pack(lengths, method=self.method, **window, **self.sizes)
        count = self.sizes["num_micro_batches"]
        mine = [together[index] for index in range(which * count, (which + 1) * count)]
        # One packing for this step alone; what was cut is listed as documents of their own.
        owner = np.repeat(np.arange(count), [len(micro_batch) for micro_batch in mine])
        cut = np.concatenate([micro_batch.lengths for micro_batch in mine])
        packing = wlb.Packing.from_assignment(cut, owner, **self.sizes)
        indices = packing.deal(self.dp_size)[self.dp_rank]
        seconds = time.perf_counter() - started
        reader = Documents(self.dataset)
        batches = []
        for index in indices:
            micro_batch = mine[index]
            ids = micro_batch.document_ids
            rows = zip(documents[ids], starts[ids] + micro_batch.starts, micro_batch.lengths, strict=True)
            batches.append(self.collate([reader[Piece(*(int(value) for value in row))] for row in rows]))
        step = Step(self.number, self.epoch, packing, indices, batches, seconds)
        self.number, self.in_epoch = self.number + 1, self.in_epoch + 1
        return step
