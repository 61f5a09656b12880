"""Rows whose tokens are known only after a function made them: a tokenizer, a chat template, a collator."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from wlb._errors import check_bool, check_integer, error
from wlb.reading.permutation import Permutation
from wlb.reading.state import field

_PLACE = tuple[int, int]
"""Epoch and number of a row."""


class ProcessedRows(IterableDataset[Any]):
    """The rows of a data set after a function, which worker processes call a few rows ahead.

        rows = wt.ProcessedRows(texts, lambda row: tokenizer(row["text"]), num_workers=8)
        loader = wt.balanced_loader(rows, max_tokens=65536, tokens_per_batch=2**20, config=model.config)

    Nothing is tokenised before the run. A step is planned once its rows were processed, at most `ahead` rows of each
    stream early, so memory is bounded. `balanced_loader` and `wlb.integrations.huggingface.balance` (as
    `train_dataset`) take it as data of unknown length: one rank processes each of the `num_shards` streams, and
    documents move to the ranks that train them (`BalancedStream`).

    The state is the position in each stream. It does not depend on the numbers of ranks and workers, so a run resumes
    with the next row, and processes none twice. Random numbers that the function draws in a worker from Python, numpy
    and torch are those of the row, in any worker and after a resume. Without workers it should draw none.

    Args:
        dataset: `dataset[i]` gives row `i`; it has a length.
        process: a function of a row. Returns a row as `wlb.torch.RowReader` takes it; or a list of such rows, as many
            as it likes; or None for a row to leave out.
        num_workers: processes that call it, for all streams of a rank together; 0: the thread that reads.
        ahead: rows of each stream that are processed before they are needed, with workers.
        num_shards: streams into which rows are dealt. The plan depends on it, and not on the ranks; at least the number
            of data-parallel ranks, or some ranks process nothing.
        shuffle: whether each epoch has another order.
        seed: of these orders, and of random numbers of rows.
        num_epochs: passes over the data set.
        multiprocessing_context: how processes are started, such as "spawn"; None: as this platform does.

    Attributes:
        num_shards: streams into which rows are dealt; at most one for each row.
        whole: of a shard that `streams` made, all rows.

    Raises:
        wlb.WlbError: an argument is invalid.
    """

    def __init__(
        self,
        dataset: Any,
        process: Callable[[Any], Any],
        *,
        num_workers: int = 0,
        ahead: int = 16,
        num_shards: int = 16,
        shuffle: bool = True,
        seed: int = 0,
        num_epochs: int = 1,
        multiprocessing_context: str | None = None,
    ) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            kind = type(dataset).__name__
            message = f"is a {kind} without an index: process its rows in its own workers, and give it as streams"
            raise error("dataset", message, value=kind)
        if not callable(process):
            raise error("process", "is not a function of a row", value=process)
        check_integer("num_workers", num_workers, minimum=0)
        check_integer("ahead", ahead, minimum=1)
        check_integer("num_shards", num_shards, minimum=1)
        check_integer("num_epochs", num_epochs, minimum=1)
        check_integer("seed", seed, minimum=-(2**63))
        check_bool("shuffle", shuffle)
        if not len(dataset):
            raise error("dataset", "is empty", value=0)
        self.num_shards = min(num_shards, len(dataset))
        self._size, self._ahead, self._num_epochs = len(dataset), ahead, num_epochs
        self._shuffle, self._seed = shuffle, seed
        self._process = _Process(dataset, process, seed)
        self._workers = _Workers(self._process, num_workers, multiprocessing_context)
        self.whole: ProcessedRows | None = None
        self._part = (0, 1)
        self._place, self._given = 0, 0  # rows that were given whole, and documents of the row after them

    def shard(self, num_shards: int, index: int) -> ProcessedRows:
        """Every `num_shards`-th row, with the same workers.

        Raises:
            wlb.WlbError: there is no such shard, or this is one already.
        """
        check_integer("num_shards", num_shards, minimum=1)
        check_integer("index", index, minimum=0)
        if index >= num_shards or self._part != (0, 1):
            raise error("index", f"= {index} of {num_shards} shards of shard {self._part}", value=index)
        part = ProcessedRows.__new__(ProcessedRows)
        vars(part).update(vars(self))
        part.num_shards, part._part, part._place, part._given = 1, (index, num_shards), 0, 0
        return part

    def streams(self) -> list[Any]:
        """All shards, for `BalancedStream`: with equal shares of a step."""
        shards = [self.shard(self.num_shards, index) for index in range(self.num_shards)]
        for shard in shards:
            shard.whole = self
        return shards

    def __iter__(self) -> Iterator[Any]:
        place, given = self._place, self._given
        for rows in self._read(place):
            for number, row in enumerate(rows[given:], start=given + 1):
                self._place, self._given = (place + 1, 0) if number == len(rows) else (place, number)
                yield row
            place, given = place + 1, 0
        self._place, self._given = place, 0

    def state_dict(self) -> dict[str, Any]:
        """Position after the last row."""
        return {"place": self._place, "given": self._given, "of": [self._size, *self._part]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins at this position.

        Raises:
            wlb.WlbError: the state is of another data set or number of shards.
        """
        if field(state, "of", list) != [self._size, *self._part]:
            message = f"was saved with {state['of']} (rows, shard, shards), and here are {[self._size, *self._part]}"
            raise error("state", message, value=state["of"])
        self._place, self._given = field(state, "place", int), field(state, "given", int)

    def _read(self, place: int) -> Iterator[Sequence[Any]]:
        """The processed rows of each row from a place on."""
        waiting: deque[Future[Sequence[Any]]] = deque()
        for following in self._places(place):
            if not self._workers.count:
                yield self._process(following)
                continue
            waiting.append(self._workers.submit(following))
            if len(waiting) > self._ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _places(self, place: int) -> Iterator[_PLACE]:
        """Epoch and number of each row of this shard from a place on."""
        first, shards = self._part
        per_epoch = len(range(first, self._size, shards))
        for epoch in range(place // per_epoch, self._num_epochs):
            order = Permutation(self._size, seed=self._seed, epoch=epoch) if self._shuffle else None
            begin = place % per_epoch if epoch == place // per_epoch else 0
            for at in range(first + begin * shards, self._size, shards):
                yield epoch, at if order is None else int(order(np.array([at], np.int64))[0])


class _Process:
    """Reads and processes a row."""

    def __init__(self, dataset: Any, process: Callable[[Any], Any], seed: int) -> None:
        self._dataset, self._process, self._seed = dataset, process, seed

    def draw(self, place: _PLACE) -> None:
        """Sets the random states of this process to those of a row."""
        own = np.random.SeedSequence([self._seed % 2**63, *place]).generate_state(2, np.uint64)
        random.seed(int(own[0]))
        np.random.seed(int(own[0] % 2**32))  # noqa: NPY002  # what users draw from
        torch.default_generator.manual_seed(int(own[1]))

    def __call__(self, place: _PLACE) -> Sequence[Any]:
        found = self._process(self._dataset[place[1]])
        if found is None:
            return []
        return found if _is_several(found) else [found]


def _is_several(found: Any) -> bool:
    """Whether a function returned a list of rows, and not one row of bare tokens."""
    if not isinstance(found, list | tuple):
        return False
    return not found or isinstance(found[0], Mapping) or np.ndim(found[0]) > 0


class _Workers:
    """Processes that are started when they are first needed, and shared by all streams of a rank."""

    def __init__(self, process: _Process, count: int, context: str | None) -> None:
        self.count = count
        self._process, self._context = process, context
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, place: _PLACE) -> Future[Sequence[Any]]:
        if self._pool is None:
            context = get_context(self._context)
            arguments = (self._process, os.getpid())
            self._pool = ProcessPoolExecutor(self.count, context, initializer=_begin, initargs=arguments)
            # Also where this process is itself a child of multiprocessing, which waits for its own children at its end.
            Finalize(self, self._pool.shutdown, kwargs={"wait": False, "cancel_futures": True}, exitpriority=100)
        return self._pool.submit(_call, place)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_pool": None}


_process: _Process | None = None  # of a worker process


def _begin(process: _Process, parent: int) -> None:
    global _process
    torch.set_num_threads(1)
    _process = process
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, even if that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _call(place: _PLACE) -> Sequence[Any]:
    assert _process is not None
    _process.draw(place)
    return _process(place)
