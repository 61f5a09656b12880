"""Balanced micro-batches from a pipeline of Google's Grain, for JAX and for everything else that reads by Grain.

    from wlb.integrations.grain import BalancedIterDataset

    ranks = grain.sharding.ShardByJaxProcess()
    ds = BalancedIterDataset(documents, lengths=lengths, packer=packer, shard_options=ranks)
    for micro_batch in ds:
        ...                                       # {"input_ids": int32 [1, tokens], "labels": ..., "segment_ids": ...}

Every rank makes the same plan of each global step and takes its own part, so the packer balances all ranks together.
`get_state` of any rank is the state of all, and may be set on another number of ranks or workers. No torch is needed.
"""

from wlb.integrations.versions import check_version

check_version("grain")  # before imports that an older version does not have

import itertools  # noqa: E402
import json  # noqa: E402
import sys  # noqa: E402
from collections import deque  # noqa: E402
from collections.abc import Callable, Iterator, Sequence  # noqa: E402
from concurrent.futures import Future, ThreadPoolExecutor  # noqa: E402
from dataclasses import dataclass, replace  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any, Final  # noqa: E402

import grain  # noqa: E402
import numpy as np  # noqa: E402
from grain.sharding import ShardOptions  # noqa: E402
from numpy.typing import ArrayLike, NDArray  # noqa: E402

import wlb  # noqa: E402
from wlb._errors import check_integer, error  # noqa: E402
from wlb.reading.columns import Layout, common_layout, layout_of, of_padding  # noqa: E402
from wlb.reading.documents import IGNORE, WEIGHTS, Document, cut  # noqa: E402
from wlb.reading.packed import joined, packed, whole_runs  # noqa: E402
from wlb.reading.reader import StepReader  # noqa: E402
from wlb.reading.rows import RowReader  # noqa: E402
from wlb.reading.sizes import check_share  # noqa: E402
from wlb.reading.state import Snapshot, field  # noqa: E402
from wlb.reading.stream_reader import StreamReader  # noqa: E402
from wlb.reading.values import as_arrays, nothing  # noqa: E402

__all__ = ["BalancedIterDataset"]

Element = dict[str, NDArray[Any]]
_HERE: Final = ShardOptions(shard_index=0, shard_count=1)
_ARGUMENT: Final = "ds"  # name of the pipeline in errors


class BalancedIterDataset(grain.IterDataset[Element]):
    """Micro-batches of balanced work from the rows of a Grain pipeline, planned over all ranks at once.

    Every step has `packer.num_micro_batches` micro-batches. Each rank gets `num_micro_batches_per_rank` elements a
    step, one after the other. The k-th element of a step has the same shape on all ranks, as JAX needs: that of its
    largest micro-batch, padded to the packer's `token_buckets` and `multiple_of_tokens`. An element is a mapping:

    - `input_ids`, int32 [rows, tokens]; 0 in padding.
    - `labels`, int32 [rows, tokens]: what each token predicts, -100 where nothing is learnt.
    - `position_ids`, int32 [rows, tokens], from 0 in every document and in every piece of a cut one; 0 in padding.
    - `segment_ids`, int32 [rows, tokens]: 1 for the first document of a row, 2 for the next; 0 in padding.
    - `loss_weights`, float32 [rows, tokens]: factors of the loss of each label; 0 where there is none.
    - `labels_ahead`, int64 [rows, labels_ahead - 1, tokens], if asked for, and the `columns`, [rows, ..., tokens].

    The work is balanced in one of two ways:

    - A `MapDataset` whose `lengths` are known is read by index. Each rank reads only its own documents.
    - Other pipelines are read in their own order, by all ranks, each of which processes all rows. Documents that wait
      are kept in memory, and read again after a resume (`wlb.reading.stream_reader`).

    **State.** `get_state` has a position in documents, not in shards: `{"steps": text, "given": int, "ranks": int}`.
    It is the same on every rank after the same number of elements. Between two steps it may be set on any number of
    ranks and workers; inside a step only on the same number of ranks. After a resume each document is trained exactly
    as often as without. Put later transformations of Grain behind (`map`, `batch`, `ThreadPrefetchIterDataset`); but
    give workers here, because `mp_prefetch` behind it would cut the plan into slices.

    Args:
        ds: a `MapDataset` or `IterDataset` that is not sharded and not batched, the same on every rank. Its rows are as
            `wlb.torch.RowReader` takes them: mappings with `input_ids` and maybe `labels` (not shifted), `loss_mask`,
            or bare tokens.
        packer: gives the configuration; it is not changed. `packer.num_micro_batches` is that of the whole step.
        shard_options: this process among those that read, such as `grain.sharding.ShardByJaxProcess()`.
        rows: micro-batches of an element: the data-parallel ranks that one process feeds, such as
            `jax.local_device_count()`.
        lengths: int [documents], tokens of each, for a `MapDataset`; None: read in order.
        tokens_per_batch: tokens that enter the packer in every step; None: the packer's.
        min_step_tokens: least tokens of a step; None: a tenth of `tokens_per_batch`.
        shuffle: with `lengths`, whether each epoch has another order. Without, shuffle in the pipeline.
        seed: of these orders.
        num_epochs: with `lengths`, passes over the documents. Without, repeat in the pipeline.
        max_early: with `lengths`, iterations that a document may come before its turn (`BalancedBatchSampler`).
        costs: what documents cost, if the packer was made with `cost_columns`: with `lengths` as for
            `wlb.torch.BalancedBatchSampler`, without as for `wlb.torch.BalancedStream`.
        columns: names of further columns of rows to carry.
        labels_ahead: how many tokens ahead every token predicts (`wlb.torch.collate`).
        read_options: threads that read rows, and rows that they read ahead.
        multiprocessing_options: worker processes of Grain. With `lengths` each plans, and makes every
            `num_workers`-th element. Otherwise they process rows: several of a `MapDataset`, at most one of an
            `IterDataset`, whose rows have one order.

    Attributes:
        num_micro_batches_per_rank: elements of a step.

    Raises:
        wlb.WlbError: an argument is invalid.

    Complexity:
        A plan takes a process some milliseconds a step; each worker and each rank makes it.

    Examples:
        >>> import grain, wlb
        >>> from wlb.integrations.grain import BalancedIterDataset
        >>> documents = grain.MapDataset.source([[5, 6, 7], [8, 9], [4], [3, 2, 1, 0]])
        >>> cost = wlb.CostModel(attention=1.0, linear=100.0)
        >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=8, cost_model=cost, release="fifo", token_buckets=[8])
        >>> element = next(iter(BalancedIterDataset(documents, packer=packer, lengths=[3, 2, 1, 4])))
        >>> element["input_ids"].tolist(), element["segment_ids"].tolist()
        ([[3, 2, 1, 0, 4, 0, 0, 0]], [[1, 1, 1, 1, 2, 0, 0, 0]])
    """

    def __init__(
        self,
        ds: grain.MapDataset[Any] | grain.IterDataset[Any],
        *,
        packer: wlb.Packer,
        shard_options: ShardOptions = _HERE,
        rows: int = 1,
        lengths: ArrayLike | None = None,
        tokens_per_batch: int | None = None,
        min_step_tokens: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        num_epochs: int = 1,
        max_early: int = 0,
        costs: ArrayLike | Callable[[Any], Any] | None = None,
        columns: Sequence[str] = (),
        labels_ahead: int = 1,
        read_options: grain.ReadOptions | None = None,
        multiprocessing_options: grain.MultiprocessingOptions | None = None,
    ) -> None:
        super().__init__()
        check_integer("rows", rows, minimum=1)
        ranks = shard_options.shard_count * rows
        names = ("shard_options.shard_index", "shard_options.shard_count")
        if rows > 1:
            names = ("shard_options.shard_index * rows", "shard_options.shard_count * rows")
        check_share(packer, shard_options.shard_index * rows, ranks, names=names)
        self.num_micro_batches_per_rank = packer.num_micro_batches // ranks
        self._share = _Share(shard_options.shard_index * rows, rows, ranks)
        reader = RowReader(columns, labels_ahead)
        read = grain.ReadOptions() if read_options is None else read_options
        workers = 0 if multiprocessing_options is None else multiprocessing_options.num_workers
        options = multiprocessing_options if workers else None
        self._make: Callable[[], _Rounds]
        if lengths is not None:
            _check_indexed(ds, lengths)
            steps = StepReader.over(
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
            indexed = _Indexed(ds, steps, num_epochs, reader, self._share, read)
            self._make = partial(_IndexedRounds, indexed, options)
            return
        for name, value, usual in (
            ("shuffle", shuffle, "ds.shuffle(seed=...)"),
            ("num_epochs", num_epochs != 1, "ds.repeat(...)"),
            ("max_early", max_early, "0"),
        ):
            if value:
                raise error(name, f"needs lengths; without them the order is that of the pipeline: give {usual}")
        if costs is not None and not callable(costs):
            raise error("costs", 'is not a function of a row: lambda row: row["costs"], say', value=costs)
        _check_kind(ds)
        if isinstance(ds, grain.IterDataset) and workers > 1:
            message = (
                f"= {workers}: the rows of an IterDataset have one order, which one process reads ahead; give 1, or a "
                "MapDataset, whose rows several processes read"
            )
            raise error("multiprocessing_options.num_workers", message, value=workers)

        self._make = partial(
            _streamed,
            ds,
            packer,
            tokens_per_batch=tokens_per_batch,
            min_step_tokens=min_step_tokens,
            costs=costs,
            reader=reader,
            share=self._share,
            read_options=read,
            options=options,
        )
        self._make()  # raises if an argument is wrong

    def __iter__(self) -> grain.DatasetIterator[Element]:
        """An iterator from the beginning; `set_state` moves it."""
        return self._make()

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Refuses `mp_prefetch` behind this data set, each worker of which would take a slice of the rows.

        Raises:
            wlb.WlbError: Always.
        """
        message = "plans over all rows, of which mp_prefetch behind it gives each worker a slice: give it "
        message += "multiprocessing_options instead"
        raise error("BalancedIterDataset", message, value=sl)

    def __str__(self) -> str:
        return f"BalancedIterDataset({self._share})"


@dataclass(frozen=True)
class _Share:
    """The data-parallel ranks that a process feeds: `rows` from `first` on, among `ranks`."""

    first: int
    rows: int
    ranks: int

    def rounds(self, packing: wlb.Packing) -> list[tuple[list[int], int]]:
        """For each element of a step: the indices of its micro-batches, and their tokens with padding.

        These tokens are those of the largest micro-batch that any rank has in its place.
        """
        deal = packing.deal(self.ranks)
        most = packing.padded_tokens[deal].max(axis=0)
        mine = deal[self.first : self.first + self.rows]
        return list(zip(mine.T.tolist(), most.tolist(), strict=True))


# --- iterators --------------------------------------------------------------------------------------------------------


class _Rounds(grain.DatasetIterator[Element]):
    """An iterator over the elements of all steps; its state is the position before a step, and the elements since."""

    def __init__(self, reader: StepReader | StreamReader, share: _Share) -> None:
        super().__init__()
        self._reader, self._share = reader, share
        self._per_step = reader.packer.num_micro_batches // share.ranks
        self._stands(0)

    def _stands(self, given: int) -> None:
        """Is at the position of its reader, behind which `given` elements were given."""
        self._snapshot: Snapshot = self._reader.snapshot()
        self._text: str | None = None
        self._given = given
        self._planned = False  # whether the reader is behind the step that has begun

    def _gave(self) -> None:
        """Counts an element; after the last of a step, the position is behind the step."""
        self._given += 1
        if self._given == self._per_step:
            self._stands(0)

    def get_state(self) -> dict[str, Any]:
        """Plain JSON values of the same names and types at any time, the same on every rank."""
        if self._text is None:
            self._text = self._snapshot.text
        return {"steps": self._text, "given": self._given, "ranks": self._share.ranks}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on behind the element after which the state was taken. On an error nothing has changed.

        Raises:
            wlb.WlbError: the state was changed; it is of other documents, another order or packer; or it was taken
                inside a step, and now there is another number of ranks or micro-batches.
        """
        try:
            steps = json.loads(field(state, "steps", str))
        except json.JSONDecodeError as cause:
            raise error("state", f"is cut or changed: {cause}") from cause
        given, ranks = field(state, "given", int), field(state, "ranks", int)
        saved = wlb.Packer.from_state_dict(field(steps, "packer", dict)).num_micro_batches
        now = (self._share.ranks, self._reader.packer.num_micro_batches)
        if given and ((ranks, saved) != now or given >= self._per_step):
            message = (
                f"was saved after {given} micro-batches of a rank, inside a step of {saved} on {ranks} ranks; it can "
                f"not go on with {now[1]} on {now[0]}: save it after a whole step"
            )
            raise error("state", message, value=given)
        self._reader.load_state_dict(steps)
        self._restart()
        self._stands(given)

    def _restart(self) -> None:
        """Drops what was read ahead."""
        raise NotImplementedError


class _IndexedRounds(_Rounds):
    """Elements from known lengths. `_Indexed` plans and reads them, in workers if asked for; this keeps the state."""

    def __init__(self, indexed: "_Indexed", options: grain.MultiprocessingOptions | None) -> None:
        self._steps_of_run = indexed.steps.copy()
        super().__init__(self._steps_of_run, indexed.share)
        self._indexed, self._options = indexed, options
        self._elements: grain.DatasetIterator[Element] | None = None

    def __next__(self) -> Element:
        self._assert_not_closed()
        element = next(self._opened())
        if not self._planned:
            _next_step(self._steps_of_run)
            self._planned = True
        self._gave()
        return element

    def _opened(self) -> grain.DatasetIterator[Element]:
        if self._elements is None:
            ds: grain.IterDataset[Element] = self._indexed.begun(self._steps_of_run, self._given)
            self._elements = iter(ds if self._options is None else ds.mp_prefetch(self._options))
        return self._elements

    def start_prefetch(self) -> None:
        """Starts the workers."""
        self._opened().start_prefetch()

    def _restart(self) -> None:
        if self._elements is not None:
            self._elements.close()
            self._elements = None

    def close(self) -> None:
        """Ends the workers."""
        super().close()
        if hasattr(self, "_elements"):
            self._restart()


def _next_step(reader: StepReader, num_epochs: int | None = None) -> wlb.Packing | None:
    """The next step of a run, in this epoch or a later one; None after the last."""
    while reader.ended:
        if num_epochs is not None and reader.epoch + 1 >= num_epochs:
            return None
        reader.next_epoch()
    return reader.next_step()


class _StreamedRounds(_Rounds):
    """Elements from rows that are read in their order."""

    def __init__(self, reader: StreamReader, rows: "_Rows", row_reader: RowReader, share: _Share) -> None:
        super().__init__(reader, share)
        self._stream, self._rows, self._row_reader = reader, rows, row_reader
        self._layout: Layout = ()
        self._rest: deque[tuple[list[list[Document]], int]] = deque()  # elements of the step that are left

    def __next__(self) -> Element:
        self._assert_not_closed()
        if not self._planned:
            packing = self._stream.next_step()
            if packing is None:
                raise StopIteration
            documents = self._stream.documents
            rounds = self._share.rounds(packing)[self._given :]
            self._rest = deque(([documents[index] for index in indices], size) for indices, size in rounds)
            if self._row_reader.nothing() and not self._layout:
                self._layout = _further([each for part in documents for each in part], self._row_reader)
            self._planned = True
        element = _element(*self._rest.popleft(), self._layout)
        self._gave()
        return element

    def start_prefetch(self) -> None:
        """Starts the worker processes."""
        self._rows.start_prefetch()

    def _restart(self) -> None:
        self._rest.clear()

    def close(self) -> None:
        """Ends the worker processes."""
        super().close()
        if hasattr(self, "_rows"):
            self._rows.close()


def _streamed(
    ds: Any,
    packer: wlb.Packer,
    *,
    reader: RowReader,
    share: _Share,
    read_options: grain.ReadOptions,
    options: grain.MultiprocessingOptions | None,
    **settings: Any,
) -> _StreamedRounds:
    rows = _Rows(ds, read_options, options)
    return _StreamedRounds(
        StreamReader(rows, packer, reader=reader, argument=_ARGUMENT, **settings), rows, reader, share
    )


# --- reading by index -------------------------------------------------------------------------------------------------


class _Indexed(grain.IterDataset[Element]):
    """The elements of a rank from a position on, without a state. A worker's slice has every `num_workers`-th."""

    def __init__(
        self,
        ds: grain.MapDataset[Any],
        steps: StepReader,
        num_epochs: int,
        reader: RowReader,
        share: _Share,
        read_options: grain.ReadOptions,
        given: int = 0,
    ) -> None:
        super().__init__()
        self.ds, self.steps, self.num_epochs = ds, steps, num_epochs
        self.reader, self.share, self.read_options, self.given = reader, share, read_options, given
        self.part = slice(None)

    def begun(self, steps: StepReader, given: int) -> "_Indexed":
        """From this position on, behind `given` elements of its first step."""
        others = (self.num_epochs, self.reader, self.share, self.read_options)
        return _Indexed(self.ds, steps.copy(), *others, given)

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """For Grain's `mp_prefetch`: from now on only these elements."""
        self.part = sl

    def __iter__(self) -> grain.DatasetIterator[Element]:
        return _Reading(self)

    def planned(self) -> Iterator[tuple[list[list[tuple[int, int, int, int]]], int]]:
        """Each element: the pieces of its rows (document, its id, start, length), and the tokens of a row."""
        steps, skip = self.steps.copy(), self.given
        while (packing := _next_step(steps, self.num_epochs)) is not None:
            for indices, size in self.share.rounds(packing)[skip:]:
                yield [self._pieces(packing[index], steps) for index in indices], size
            skip = 0

    @staticmethod
    def _pieces(part: wlb.MicroBatch, steps: StepReader) -> list[tuple[int, int, int, int]]:
        numbers, ids = steps.documents(part).tolist(), part.document_ids.tolist()
        return list(zip(numbers, ids, part.starts.tolist(), part.lengths.tolist(), strict=True))

    def document(self, number: int) -> Document:
        """Reads a document.

        Raises:
            wlb.WlbError: its row has other documents than one of the given length.
        """
        row = self.ds[number]
        if row is None:
            raise nothing(_ARGUMENT, number)
        found = self.reader.documents(row, number, _ARGUMENT)
        if len(found) != 1:
            message = f"has {len(found)} documents by its seq_lengths: give each a row of its own, or leave lengths out"
            raise error(_ARGUMENT, message, index=number, value=len(found))
        document = as_arrays(found[0], _ARGUMENT, number)
        if document.tokens.size != (planned := self.steps.lengths[number]):
            message = f"has {document.tokens.size} tokens, but lengths[{number}] = {planned}"
            raise error(_ARGUMENT, message, index=number, value=document.tokens.size)
        return document


class _Reading(grain.DatasetIterator[Element]):
    """Reads the elements of a plan, whose rows threads read ahead."""

    def __init__(self, indexed: _Indexed) -> None:
        super().__init__()
        self._indexed = indexed
        self._next = 0
        self._begin()

    def _begin(self) -> None:
        sl = self._indexed.part
        self._planned = itertools.islice(self._indexed.planned(), sl.start or 0, sl.stop, sl.step or 1)
        self._planned = itertools.islice(self._planned, self._next, None)
        self._ahead: deque[tuple[list[list[tuple[int, int, int, int]]], int, list[Future[Document]]]] = deque()
        self._layout: Layout | None = None
        self._threads: ThreadPoolExecutor | None = None

    def __next__(self) -> Element:
        self._assert_not_closed()
        options = self._indexed.read_options
        if self._layout is None:
            asked = self._indexed.reader.nothing()
            self._layout = _further([self._indexed.document(0)], self._indexed.reader) if asked else ()
        if self._threads is None and options.num_threads:
            self._threads = ThreadPoolExecutor(options.num_threads, thread_name_prefix="wlb-grain")
        while not self._ahead or sum(len(reads) for *_, reads in self._ahead) < options.prefetch_buffer_size:
            planned = next(self._planned, None)
            if planned is None:
                break
            rows, size = planned
            self._ahead.append((rows, size, [self._read(number) for row in rows for number, *_ in row]))
        if not self._ahead:
            raise StopIteration
        rows, size, reads = self._ahead.popleft()
        found = iter(reads)
        documents = [
            [cut(replace(next(found).result(), id=id), start, length) for _, id, start, length in row] for row in rows
        ]
        self._next += 1
        return _element(documents, size, self._layout)

    def _read(self, number: int) -> "Future[Document]":
        if self._threads is not None:
            return self._threads.submit(self._indexed.document, number)
        done: Future[Document] = Future()
        done.set_result(self._indexed.document(number))
        return done

    def get_state(self) -> dict[str, Any]:
        """Number of elements given; `_IndexedRounds` keeps the state of the run."""
        return {"next": self._next}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on behind this number of elements."""
        self._stop()
        self._next = state["next"]
        self._begin()

    def _stop(self) -> None:
        if self._threads is not None:
            for *_, reads in self._ahead:
                for read in reads:
                    read.cancel()
            self._threads.shutdown()
            self._threads = None

    def close(self) -> None:
        """Ends the threads."""
        super().close()
        if hasattr(self, "_threads"):
            self._stop()


# --- reading in order -------------------------------------------------------------------------------------------------


class _Rows:
    """The rows of a pipeline in their order, as a stream that resumes from its state, whatever the workers."""

    def __init__(self, ds: Any, read_options: grain.ReadOptions, options: grain.MultiprocessingOptions | None) -> None:
        self._ds, self._read_options, self._options = ds, read_options, options
        self._state: Any = None
        self._rows: grain.DatasetIterator[Any] | None = None
        self._begun = False  # whether these rows are being read

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self.close()
        rows = self._opened()
        self._begun = True
        if isinstance(self._ds, grain.MapDataset):
            for number, row in enumerate(rows, start=self._first + 1):
                self._state = {"next": number}
                if row is not None:  # a filter of a MapDataset leaves such
                    yield row
        else:
            for row, self._state in rows:
                yield row
        self.close()

    @property
    def _first(self) -> int:
        return 0 if self._state is None else field(self._state, "next", int)

    def _opened(self) -> grain.DatasetIterator[Any]:
        if self._rows is None:
            if isinstance(self._ds, grain.MapDataset):
                ds = self._ds[self._first :].to_iter_dataset(self._read_options, allow_nones=True)
            else:
                ds = _WithStates(self._ds, self._state)
            self._rows = iter(ds if self._options is None else ds.mp_prefetch(self._options))
        return self._rows

    def start_prefetch(self) -> None:
        """Starts the worker processes."""
        self._opened().start_prefetch()

    def state_dict(self) -> Any:
        """Position behind the last row."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """The next iteration begins at this position."""
        self.close()
        self._state = state

    def close(self) -> None:
        """Ends the worker processes."""
        if self._rows is not None:
            self._rows.close()
            self._rows, self._begun = None, False


class _WithStates(grain.IterDataset[tuple[Any, Any]]):
    """The rows of a pipeline from a state of it on, each with the state behind it."""

    def __init__(self, ds: grain.IterDataset[Any], state: Any) -> None:
        super().__init__()
        self.ds, self.state = ds, state

    def __iter__(self) -> grain.DatasetIterator[tuple[Any, Any]]:
        rows = iter(self.ds)
        if self.state is not None:
            rows.set_state(self.state)
        return _RowsWithStates(rows)


class _RowsWithStates(grain.DatasetIterator[tuple[Any, Any]]):
    def __init__(self, rows: grain.DatasetIterator[Any]) -> None:
        super().__init__(rows)

    def __next__(self) -> tuple[Any, Any]:
        row = next(self._parent)
        return row, self._parent.get_state()

    def get_state(self) -> dict[str, Any]:
        return self._parent.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state)


# --- elements ---------------------------------------------------------------------------------------------------------


def _further(documents: list[Document], reader: RowReader) -> Layout:
    """The columns that every element has because the user asked for them."""
    asked = reader.nothing()
    layout = common_layout([layout_of(as_arrays(each, _ARGUMENT, each.id)) for each in documents], _ARGUMENT)
    return tuple(column for column in layout if column[0] in asked)


def _element(rows: list[list[Document]], size: int, layout: Layout) -> Element:
    """The packed documents of each row, padded to `size` tokens, with the columns of the layout.

    Raises:
        wlb.WlbError: a document has other columns than the layout, or tokens beyond int32.
    """
    found = [_row(documents, size, layout) for documents in rows]
    return {name: np.stack([row[name] for row in found]) for name in found[0]}


def _row(documents: list[Document], size: int, layout: Layout) -> Element:
    runs = whole_runs(documents)
    lengths = [end for _, _, end in runs]
    padding = size - sum(lengths)
    if padding:
        runs.append((len(documents), 0, padding))
    given = common_layout([layout_of(each) for each in documents], _ARGUMENT)
    known = dict.fromkeys(layout)
    for column in given:
        if column[0] not in ("position_ids", WEIGHTS) and column not in known:
            message = f"has {column[0]!r} of type {column[1]} and shape {[*column[2], 'tokens']}, unlike the first rows"
            raise error(_ARGUMENT, message, index=documents[0].id, value=column[0])
        if column[0] == "position_ids" and column[2]:
            message = (
                f"has position_ids of shape {[*column[2], 'tokens']}; here they are [tokens]: name the column "
                "otherwise, and give it in columns"
            )
            raise error(_ARGUMENT, message, index=documents[0].id, value="position_ids")
    tokens, labels = packed(documents, runs)
    columns = joined(documents, given, runs)
    positions, segments = np.zeros((2, size), np.int32)
    weights = np.ones(size, np.float32)
    start = 0
    for number, length in enumerate(lengths, start=1):
        positions[start : start + length] = np.arange(length)
        segments[start : start + length] = number
        start += length
    if "position_ids" in columns:
        positions = _int32(columns["position_ids"], "position_ids")
    if WEIGHTS in columns:
        weights = columns[WEIGHTS].astype(np.float32)
    element = {
        "input_ids": _int32(tokens, "input_ids"),
        "labels": _int32(labels, "labels"),
        "position_ids": positions,
        "segment_ids": segments,
        "loss_weights": np.where(labels == IGNORE, np.float32(0), weights),
    }
    for name, dtype, shape in layout:
        values = columns.get(name)
        element[name] = np.full((*shape, size), of_padding(name), dtype) if values is None else values
    return element


def _int32(values: NDArray[np.int64], name: str) -> NDArray[np.int32]:
    if values.size and (values.max() >= 2**31 or values.min() < -(2**31)):
        raise error(_ARGUMENT, f"has {name} up to {values.max()}: must fit into int32", value=int(values.max()))
    return values.astype(np.int32)


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_kind(ds: object) -> None:
    if not isinstance(ds, grain.MapDataset | grain.IterDataset):
        kind = type(ds).__name__
        raise error(_ARGUMENT, f"is a {kind}: must be a grain.MapDataset or grain.IterDataset", value=kind)


def _check_indexed(ds: Any, lengths: ArrayLike) -> None:
    """Checks that rows can be read by index, one for each length.

    Raises:
        wlb.WlbError: they cannot.
    """
    _check_kind(ds)
    if not isinstance(ds, grain.MapDataset):
        raise error("lengths", "are given for an IterDataset, whose rows have no index: leave them out")
    if np.shape(lengths) != (len(ds),):
        message = f"have shape {np.shape(lengths)}, but the pipeline has {len(ds)} rows"
        if len(ds) >= sys.maxsize:
            message += ": repeat with num_epochs instead"
        raise error("lengths", message, value=np.shape(lengths))
