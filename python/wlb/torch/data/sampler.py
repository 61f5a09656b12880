"""A batch sampler over known lengths, which yields the documents of a data-parallel rank's micro-batches."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Sampler

import wlb
from wlb._errors import error
from wlb._seal import seal
from wlb.reading.documents import Piece
from wlb.reading.reader import StepReader
from wlb.reading.sizes import check_share
from wlb.reading.state import SavedChain, field


class PlannedStep(NamedTuple):
    """A global step, as the sampler planned it.

    Attributes:
        packing: the plan.
        indices: int64 [micro-batches of this rank]: their indices in the plan.
        seconds: time of planning.
        reader: its position is after the step.
    """

    packing: wlb.Packing
    indices: NDArray[np.int64]
    seconds: float
    reader: StepReader


class BalancedBatchSampler(Sampler[list["int | Piece"]]):
    """The documents of one micro-batch after the other: those of this data-parallel rank, with balanced work.

    Every rank plans the same global steps with a packer of its own, and takes its share (`Packing.deal`, or the plan's
    own ranks if the packer was made with `dp_size`): `num_micro_batches_per_rank` micro-batches in every step, some
    perhaps empty. Elements are document numbers, or a `Piece` if the packer cuts a document; wrap the data set in
    `Documents` so that pieces are cut.

    One iteration is one epoch, and the next iteration continues with the next epoch. A document that waits at the end
    of an epoch is trained in the next one. After epoch `num_epochs - 1` (and any later one) all waiting documents are
    trained in further steps; then every document was trained once an epoch.

    The state has documents, not shards. If you read through `StepLoader`, each step has its own: save `step.state` once
    that step is trained, also if a `DataLoader` or something else fetches steps ahead. `state_dict` of the sampler is
    the state after the last micro-batch *yielded*, which is right only if nothing is fetched ahead, and for a
    `StatefulDataLoader`, which keeps track of its workers by itself.

    Memory: the lengths, as given (not copied; a memory map stays one), and documents that wait in the packer. A
    shuffled order is computed, not stored (`Permutation`). All lengths are read once here, to check and to fingerprint
    them. If a file is mapped read-only, `np.load(path, mmap_mode="r")`, one process of a machine reads it in the first
    run, and never again: the result is kept beside it, in `<path>.wlb.json`, and used as long as the file is the same.

    Args:
        lengths: int [documents], tokens of each, from 1. The same on every rank.
        packer: gives the configuration; it is not changed. `packer.num_micro_batches` is that of the whole step.
        dp_rank: this rank in the data-parallel group.
        dp_size: ranks of that group; divides `packer.num_micro_batches`, and is the packer's, if that has one.
        tokens_per_batch: tokens that enter the packer in every step, rounded down to whole documents, at least one. By
            default the packer's; at most `num_micro_batches * max_tokens`. Required if the packer bounds the work of
            steps (`max_step_cost`).
        min_step_tokens: least tokens of a step: if its documents wait for others, more are read first. By default a
            tenth of `tokens_per_batch`; at most a third of `num_micro_batches * max_tokens`. Only the steps that drain
            the packer at the end of the run may be smaller, and steps of a single micro-batch, if a short document and
            one of `max_tokens` do not fit into it together.
        shuffle: whether each epoch has another order; otherwise it is that of the numbers of documents.
        seed: of these orders.
        num_epochs: epochs of the run; more may be added when it is resumed.
        max_early: iterations that a document may be trained before its turn, for a packer with release="adaptive" and a
            cost model. Then long documents are read as long before their turn as they would wait after it
            (`Packer.leads`), so the mean displacement is a fifth to a third less at equal balance. The lengths of the
            next `1 + max_early` global batches are read. No document comes before its epoch. 4 is enough.
        costs: float [documents] or [documents, columns], the costs of each document, if the packer was made with
            `cost_columns`; the same on every rank. Or a function of a document's number that returns a float or floats.
            It is called whenever a step is planned, in workers too, and has to return the same every time. A piece of a
            document has the share of its tokens. A state checks an array by its hash, but cannot check a function.

    Raises:
        wlb.WlbError: an argument is invalid; a document is too long for the packer.
    """

    def __init__(
        self,
        lengths: ArrayLike,
        *,
        packer: wlb.Packer,
        dp_rank: int,
        dp_size: int,
        tokens_per_batch: int | None = None,
        min_step_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        num_epochs: int = 1,
        max_early: int = 0,
        costs: ArrayLike | Callable[[int], Any] | None = None,
    ) -> None:
        check_share(packer, dp_rank, dp_size, names=("dp_rank", "dp_size"))
        self.num_epochs = num_epochs
        self.num_micro_batches_per_rank = packer.num_micro_batches // dp_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._start = self._origin = StepReader.over(
            lengths,
            packer,
            tokens_per_batch=tokens_per_batch,
            min_step_tokens=min_step_tokens,
            shuffle=shuffle,
            seed=seed,
            num_epochs=num_epochs,
            max_early=max_early,
            costs=costs,
        )
        self._skip = 0
        self._plans: deque[PlannedStep] | None = None  # for a `StepLoader` that follows the next iteration
        self._followed = False  # whether a StepLoader sets the beginning of the next iteration
        self._moves = 0  # how many times the beginning of an iteration was set
        self._yielded = (self._start.snapshot(), 0)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is in; inside one over a `StepLoader`, that of the last step."""
        return self._start.epoch

    @property
    def reader(self) -> StepReader:
        """Its position is the beginning of the next iteration."""
        return self._start

    def total_steps(self) -> int:
        """Global steps of the whole run, with those already done, for a learning rate schedule.

        All steps are planned here, some milliseconds each. The number stays the same when a run is resumed, unless its
        settings change.
        """
        return self._start.total_steps()

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration that of `epoch`. Without it, iterations go from one epoch to the next.

        The rest of the present epoch is skipped, except documents that already wait. Nothing happens if `epoch` is the
        present one, also in its middle, so it does no harm after a resume.

        Raises:
            wlb.WlbError: it is an earlier epoch, and documents wait that would be trained twice.
        """
        if epoch != self._start.epoch:
            reader = self._start.copy()
            reader.set_epoch(epoch)
            self._begin(reader, 0)

    def __iter__(self) -> Iterator[list[int | Piece]]:
        """The micro-batches of this rank in the rest of the epoch."""
        self._begin(self._start, self._skip)
        self._origin, self._followed = self._start, False
        if self._plans is not None:
            self._plans.clear()  # a `StatefulDataLoader` may begin twice, the second time from its state
        return self._micro_batches(self._start.copy(), self._skip, self._moves, self._plans)

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values: the order, the position in it, and the documents that wait."""
        snapshot, yielded = self._yielded
        state = snapshot.state
        if not yielded:
            return state
        inside = {"micro_batches": yielded, "dp_size": self._dp_size}
        # This state is not that after a step: a run that resumes from it continues the chain of the last step.
        return seal({**state, **inside, "previous": SavedChain.after(state).previous, "moved": True})

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Makes the next iteration begin at the position of the state. On an error nothing has changed.

        The numbers of ranks and of micro-batches may differ from those when the state was saved, unless that was in the
        middle of a step. `tokens_per_batch` and `num_epochs` may change too.

        Raises:
            wlb.WlbError: the state was changed after it was saved, or is of other lengths, of another order, of another
                packer configuration (`allow_config_change` accepts that), or was not saved here.
        """
        reader = self._start.copy()
        reader.load_state_dict(state, allow_config_change=allow_config_change)
        yielded = field(state, "micro_batches", int)
        if yielded:
            saved_size = field(state, "dp_size", int)
            saved = wlb.Packer.from_state_dict(state["packer"]).num_micro_batches
            now = self.num_micro_batches_per_rank * self._dp_size
            if (saved_size, saved) != (self._dp_size, now) or yielded >= self.num_micro_batches_per_rank:
                message = f"was saved inside a step of {saved} micro-batches on {saved_size} data-parallel ranks"
                raise error("state", f"{message}; it can not go on with {now} on {self._dp_size}", value=yielded)
        self._begin(reader, yielded)

    def other_documents(self, state: Mapping[str, Any]) -> str:
        """What is wrong if a state is of documents of other lengths, and the way on; empty if it is of these."""
        return self._start.other_documents(state)

    def follow(self) -> deque[PlannedStep]:
        """For `StepLoader`: the steps of the next iteration, filled in when they are planned."""
        self._plans = deque()
        return self._plans

    def consumer(self) -> StepReader:
        """For `StepLoader`, which from now on sets the beginning of the next iteration: returns the present one.

        Raises:
            wlb.WlbError: it is inside a step.
        """
        if self._skip:
            message = f"begins after {self._skip} of {self.num_micro_batches_per_rank} micro-batches of a step"
            raise error("loader", message, value=self._skip)
        self._start, self._followed, self._plans = self._origin, True, None
        return self._origin

    def consumed(self, reader: StepReader) -> None:
        """For `StepLoader`: the next iteration begins at the position of `reader`, which does not change any more."""
        self._start = reader

    def check_stands(self, reader: StepReader) -> None:
        """For `StepLoader`: checks that the next iteration still begins where it was last set.

        Raises:
            wlb.WlbError: a state was loaded since, or another epoch or iteration began.
        """
        if self._start is not reader:
            raise _moved("loader")

    def describe(self) -> dict[str, Any]:
        """Description of the documents for a ledger: plain JSON values."""
        return self._start.describe()

    def share(self, packing: wlb.Packing) -> NDArray[np.int64]:
        """int64 [num_micro_batches_per_rank]: the indices of this rank's micro-batches in a plan, in schedule order."""
        mine: NDArray[np.int64] = packing.deal(self._dp_size)[self._dp_rank]
        return mine

    def _begin(self, reader: StepReader, skip: int) -> None:
        self._start, self._skip = reader, skip
        self._yielded = (reader.snapshot(), skip)
        self._moves += 1

    def _micro_batches(
        self, reader: StepReader, skip: int, moves: int, plans: deque[PlannedStep] | None
    ) -> Iterator[list[int | Piece]]:
        before = reader.snapshot()
        while not reader.ended:
            started = time.perf_counter()
            packing = reader.next_step()
            indices = self.share(packing)
            seconds = time.perf_counter() - started
            after = reader.snapshot()
            if plans is not None:
                plans.append(PlannedStep(packing, indices, seconds, reader.copy()))
            for done, index in enumerate(indices.tolist(), start=1):
                if done > skip:
                    last = done == self.num_micro_batches_per_rank
                    self._yielded = (after, 0) if last else (before, done)
                    yield reader.elements(packing[index])
                    if self._moves != moves:
                        raise _moved("sampler")
            before, skip = after, 0
        reader.next_epoch()
        if not self._followed:
            self._start, self._skip = reader, 0


def _moved(argument: str) -> wlb.WlbError:
    """The error of a loop that continues although its sampler was set to another position.

    Its next step would be wrong, and so would be the state after it.
    """
    message = (
        "was given a state, another epoch or a second iteration while this one went on: leave the loop and begin again"
    )
    return error(argument, message)
