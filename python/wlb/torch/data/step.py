"""Yields one global step at a time, from a loader that yields one micro-batch at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader

import wlb
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.ledger import Pieces
from wlb.reading.documents import Piece
from wlb.reading.reader import StepReader
from wlb.reading.state import Snapshot
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.collate import collate
from wlb.torch.data.content import check_collated, fingerprint, warn_of_split_prompts
from wlb.torch.data.dataset import Documents
from wlb.torch.data.mean import RoundMean
from wlb.torch.data.sampler import BalancedBatchSampler
from wlb.torch.data.thread import background_thread

T = TypeVar("T")


@explained
@dataclass(frozen=True, eq=False)
class Step(Generic[T]):
    """One step of one data-parallel rank.

    Attributes:
        number: global steps before this one, since the run began.
        epoch: pass over the documents to which it belongs; 0 for a stream.
        packing: the plan of the whole step, the same on every rank: compare its `digest()`. Its document ids are the
            packer's own.
        indices: int64 [micro-batches of this rank]: their indices in the plan.
        micro_batches: in the order of `indices`, which suits a pipeline: the lightest are at both ends.
        planning_seconds: time of planning.
        snapshot: position of its loader after it: `state`, and its digest. None if the loader has no states.
        content: a hash of some documents of the data set, the same on every rank; None if it is not known.
        mean: the mean over samples that the step of a round trains (`round_step`); None for the mean over labels.
    """

    number: int
    epoch: int
    packing: wlb.Packing
    indices: NDArray[np.int64]
    micro_batches: list[T]
    planning_seconds: float = 0.0
    snapshot: Snapshot | None = None
    content: str | None = None
    mean: RoundMean | None = None

    @classmethod
    def of(
        cls,
        plan: wlb.Packing,
        documents: Sequence[Any],
        *,
        number: int = 0,
        dp_rank: int = 0,
        dp_size: int | None = None,
        **collating: Any,
    ) -> Step[Any]:
        """This rank's part of the step of a plan that you made, as `train_step` and `verify` take it.

        Args:
            plan: of `wlb.pack`, of documents or of a forest, the same on all ranks.
            documents: all documents or samples of the plan, by their ids: anything with indices, such as a list of
                what `collate` takes, or `wt.Documents`. Only those of this rank are read.
            number: steps before this one, since the run began.
            dp_rank: this rank among the data-parallel ranks.
            dp_size: data-parallel ranks; None: the number for which the plan was made, or one.
            **collating: arguments of `collate`: `cp_rank`, `cp_size`, `multiple_of_tokens`, ...

        Returns:
            The step; its `indices` are those of this rank's micro-batches in the plan (`plan.deal`). It has no `state`.

        Raises:
            wlb.WlbError: the number of documents is not the plan's; the plan is of several global batches; a rank does
                not exist; ranks cannot have equally many micro-batches; and for what `collate` refuses.

        Complexity:
            O(tokens of this rank's documents).

        Examples:
            >>> import wlb, wlb.torch as wt
            >>> samples = [[5, 6, 7, 1, 2], [5, 6, 7, 3], [8, 9], [8, 4]]
            >>> forest = wlb.PrefixForest.from_tokens(sum(samples, []), [0, 5, 9, 11, 13])
            >>> cost = wlb.CostModel(attention=1.0, linear=9.0)
            >>> plan = wlb.pack(forest, num_micro_batches=2, max_tokens=8, cost_model=cost, dp_size=2)
            >>> step = wt.Step.of(plan, samples, dp_rank=0)
            >>> step.num_ranks, [batch.num_valid_tokens for batch in step.micro_batches]
            (2, [7])
        """
        if not isinstance(plan, wlb.Packing):
            raise error("plan", f"is a {type(plan).__name__}, not a wlb.Packing", value=plan)
        if plan.global_batches != 1:
            raise error("plan", f"is of {plan.global_batches} global batches: a step is one", value=plan.global_batches)
        total = plan.assignment.size
        if len(documents) != total:
            message = f"are {len(documents)}, but the plan has {total}: give all, by their ids"
            raise error("documents", message, value=len(documents))
        if dp_size is None:
            dp_size = plan.dp_size or 1
        check_integer("dp_size", dp_size, minimum=1)
        check_integer("dp_rank", dp_rank, minimum=0, maximum=dp_size - 1)
        indices = plan.deal(dp_size)[dp_rank]
        cut: Any = documents if isinstance(documents, Documents) else Documents(documents, argument="documents")
        whole = plan.assignment >= 0
        batches = []
        for micro_batch in (plan[index] for index in indices.tolist()):
            ids, starts, lengths = micro_batch.document_ids, micro_batch.starts, micro_batch.lengths
            pieces = map(Piece, ids.tolist(), starts.tolist(), lengths.tolist())
            rows = [documents[piece.document] if whole[piece.document] else cut[piece] for piece in pieces]
            batches.append(collate(rows, micro_batch, **collating))
        return cls(number, 0, plan, indices, batches)

    @property
    def state(self) -> dict[str, Any]:
        """State to save after this step is trained; a loader that loads it resumes after this step.

        It does not depend on what was fetched since. Plain JSON values, the same on every rank, read without
        communication. Written out when it is first read: O(documents that wait), and for a `BalancedStream` their
        tokens.

        Raises:
            wlb.WlbError: the loader that made the step has no states.
        """
        return written(self.snapshot)

    @property
    def pieces(self) -> Pieces:
        """Pieces of documents that this rank trains, by the packer's ids; of a forest its samples, whole."""
        mine = [self.packing[index] for index in self.indices.tolist()]
        return Pieces.of(
            [part.document_ids for part in mine], [part.starts for part in mine], [part.lengths for part in mine]
        )

    @property
    def parts(self) -> NDArray[np.int64]:
        """Indices of the step's parts that this rank trains. A part is a micro-batch on one context-parallel rank.

        Every part is on one of the ranks that share the step, so the parts of all ranks are 0 to `num_ranks *
        len(parts) - 1`.
        """
        first = self.micro_batches[0] if self.micro_batches else None
        return self.indices * getattr(first, "cp_size", 1) + getattr(first, "cp_rank", 0)

    @property
    def num_ranks(self) -> int:
        """Ranks that share the step: data-parallel times context-parallel ranks."""
        cp_size = getattr(self.micro_batches[0], "cp_size", 1) if self.micro_batches else 1
        return len(self.packing) // max(len(self.indices), 1) * cp_size

    @property
    def plan(self) -> wlb.Packing:
        """The packing, under its name in a `DynamicCpStep`."""
        return self.packing

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Step[T]:
        """A copy with its micro-batches on `device`; accelerate and Lightning move loader output this way."""
        return replace(self, micro_batches=[moved(batch, device, non_blocking) for batch in self.micro_batches])


def written(snapshot: Snapshot | None) -> dict[str, Any]:
    """The state of a step.

    Raises:
        wlb.WlbError: it has none.
    """
    if snapshot is None:
        raise error("step", "has no state: its loader keeps none")
    return snapshot.state


def moved(batch: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    """A micro-batch on `device`, as far as it can be moved; other values are unchanged."""
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {name: moved(value, device, non_blocking) for name, value in batch.items()}
    return batch.to(device, non_blocking=non_blocking) if hasattr(batch, "to") else batch


class StepLoader(Generic[T]):
    """Reads a loader step by step, and knows which steps were consumed.

    One iteration is the rest of one epoch. If a loop is left early, the next one continues there. While a step runs,
    the next one is fetched from the workers.

    Each step has the state to save once it is trained, whatever has been fetched since by the loader's workers, or by
    anything between this loader and the training loop. It is the same on every rank, and may be loaded with any number
    of workers, data-parallel and context-parallel ranks.

        loader = StepLoader(DataLoader(Documents(dataset), batch_sampler=sampler, collate_fn=..., num_workers=1))
        while sampler.epoch < sampler.num_epochs:
            for step in loader:
                ...
                torch.save(step.state, path)  # loader.load_state_dict(...) goes on after this step

    Args:
        loader: a `DataLoader`, or something like it, whose `batch_sampler` is a `BalancedBatchSampler` and that keeps
            the order of its batches. A `StatefulDataLoader` has its own state; both agree.
        prepare: called with every micro-batch before its step is yielded; its result is in the step. Use it to call
            `prepare_attention`. With workers it runs in a thread during the step before, on the CUDA device that was
            current when the iteration began, if CUDA was used.
    """

    def __init__(self, loader: DataLoader[Any], *, prepare: Callable[[Any], T] | None = None) -> None:
        sampler = getattr(loader, "batch_sampler", None)
        if not isinstance(sampler, BalancedBatchSampler):
            found = type(sampler).__name__
            raise error("loader", f"has a batch_sampler of type {found}, not BalancedBatchSampler", value=found)
        self._loader = loader
        self._sampler = sampler
        self._prepare = prepare
        self._documents = _size_of(loader)
        # Before there is any state, because each state names the one before.
        sampler.reader.know(fingerprint(getattr(loader, "dataset", None)))
        warn_of_split_prompts(getattr(loader, "dataset", None), sampler.reader.split(), sampler.reader.packer)
        # A StatefulDataLoader must not be ahead of the step in which its own state is read.
        self._read_ahead = loader.num_workers > 0 and not hasattr(loader, "state_dict")

    def __iter__(self) -> Iterator[Step[T]]:
        """The remaining steps of this epoch.

        Raises:
            wlb.WlbError: the data set has another number of documents than when this loader was made. Or the loader was
                restored inside a step, or yields a batch of other lengths than planned; or a state was loaded, or
                another epoch or iteration began, during this one.
        """
        self._check_documents()
        planned = self._sampler.follow()
        batches = iter(self._loader)
        reader = self._sampler.consumer()
        most = self.packer.max_documents
        unseen = [True]  # until the first step, whose documents are compared with the data set

        def next_step(reader: StepReader) -> tuple[Step[T], StepReader]:
            """The step after `reader`, and the reader after it. On an error nothing counts as consumed."""
            micro_batches = list(itertools.islice(batches, self._sampler.num_micro_batches_per_rank))
            if not planned:
                raise error(
                    "loader", f"gives no step {reader.step}: it ended before its batch_sampler", value=reader.step
                )
            packing, indices, seconds, following = planned.popleft()
            padded = packing.padded_tokens
            for index, batch in zip(indices.tolist(), micro_batches, strict=True):
                numbers = following.documents(packing[index])
                check_batch(batch, packing[index], int(padded[index]), most, numbers, "loader")
                if unseen and following.content is not None:
                    check_collated(batch, following.elements(packing[index]), self._loader.dataset)
            unseen.clear()
            if self._prepare is not None:
                micro_batches = [self._prepare(batch) for batch in micro_batches]
            step = Step(
                reader.step,
                reader.epoch,
                packing,
                indices,
                micro_batches,
                seconds,
                following.snapshot(),
                following.content,
            )
            return step, following

        # Fetch now what workers have sent, so that the next step need not wait for it.
        with background_thread("wlb-step-loader") if self._read_ahead else nullcontext() as thread:
            ahead = thread and thread.submit(next_step, reader)
            while not reader.ended:
                step, reader = ahead.result() if ahead else next_step(reader)
                ahead = thread and (None if reader.ended else thread.submit(next_step, reader))
                self._sampler.consumed(reader)
                yield step
                self._sampler.check_stands(reader)
        next(batches, None)  # a loader notices the end of its epoch only when it is asked once more
        reader = reader.copy()
        reader.next_epoch()
        self._sampler.consumed(reader)

    def _check_documents(self) -> None:
        """Checks that the data set did not grow, because its new documents would not be trained."""
        found = _size_of(self._loader)
        if found != self._documents:
            message = f"has {found} documents, but had {self._documents} when this loader was made: make a new one"
            raise error("dataset", message, value=found)

    @property
    def packer(self) -> wlb.Packer:
        """A packer with the configuration, without documents."""
        return self._sampler.reader.packer

    @property
    def num_micro_batches_per_rank(self) -> int:
        """Micro-batches of a rank in every step."""
        return self._sampler.num_micro_batches_per_rank

    @property
    def num_epochs(self) -> int:
        """Epochs of the run."""
        return self._sampler.num_epochs

    @property
    def ended(self) -> bool:
        """Whether all epochs of the run are done."""
        return self._sampler.epoch >= self._sampler.num_epochs

    def skip_epoch(self, to: int | None = None) -> None:
        """Ends the present epoch after the last step that was yielded; documents that wait are trained later.

        After the last epoch, documents that wait are not trained. An iteration that goes on raises.

        Args:
            to: the epoch that is next; None: the following one.
        """
        self._sampler.set_epoch(self._sampler.epoch + 1 if to is None else to)

    def other_documents(self, state: Mapping[str, Any]) -> str:
        """What is wrong if a state is of documents of other lengths, and the way on; empty if it is of these."""
        return self._sampler.other_documents(state)

    def describe(self) -> dict[str, Any]:
        """Description of the documents for a ledger: plain JSON values."""
        return self._sampler.describe()

    def metrics(self) -> wlb.PackerMetrics:
        """Balance and delay of the consumed steps."""
        return self._sampler.reader.metrics()

    def state_dict(self) -> dict[str, Any]:
        """State after the last step that this loader *yielded*: plain JSON values.

        That is a step too far if something fetches ahead of training, as loaders that accelerate has prepared,
        Lightning's Trainer and threads of your own do: with this state, the fetched step would never be trained. Save
        the `state` of the step that was trained instead. It is right between two iterations, and in a plain loop over
        this loader.
        """
        return self._sampler.reader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Resumes from a state, as `BalancedBatchSampler.load_state_dict` does; the next iteration begins there.

        Takes the `state` of a step, or a result of `state_dict`.
        """
        self._sampler.load_state_dict(state, allow_config_change=allow_config_change)


def _size_of(loader: DataLoader[Any]) -> int | None:
    """Documents of its data set; None if that has no length."""
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else None


def check_batch(
    batch: object,
    planned: wlb.MicroBatch,
    padded: int,
    max_documents: int | None,
    numbers: NDArray[np.int64],
    argument: str,
) -> None:
    """Checks the lengths and sizes of `batch` against the plan, on which kernels and other ranks of a pipeline rely.

    Args:
        batch: the collated batch; only a `PackedBatch` is checked.
        planned: the micro-batch.
        padded: its tokens with padding.
        max_documents: the packer's.
        numbers: int64 [documents], their names in errors.
        argument: source of the batch, for errors.

    Raises:
        wlb.WlbError: it differs.
    """
    if not isinstance(batch, PackedBatch):
        return
    lengths = batch.shard.lengths
    size = int(lengths.sum())
    if batch.num_padding:
        lengths = lengths[:-1]
    if lengths.size != planned.lengths.size:
        raise error(argument, f"gives {lengths.size} documents where the plan has {planned.lengths.size}")
    for at in np.flatnonzero(lengths != planned.lengths)[:1]:
        number, wanted = int(numbers[at]), planned.lengths[at]
        message = f"gives document {number} with {lengths[at]} tokens where the plan has {wanted}"
        raise error(argument, message, index=number, value=int(lengths[at]))
    if size != padded:
        message = f"gives a micro-batch of {size} tokens where the plan has {padded}, padding included: collate needs "
        message += "the packer's multiple_of_tokens, cp_size and token_buckets"
        raise error(argument, message, value=size)
    entries = batch.cu_seqlens.numel()
    if max_documents is not None and entries != max_documents + 2:
        message = f"gives cu_seqlens of {entries} entries where the packer's max_documents = {max_documents} promises "
        message += f"{max_documents + 2} in every micro-batch: collate needs the same max_documents"
        raise error(argument, message, value=entries)
