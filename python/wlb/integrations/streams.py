"""Makes the streams that `wlb.torch.BalancedStream` reads from data sets without a length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final

from numpy.typing import NDArray

from wlb._errors import error
from wlb.integrations.rows import Collator, as_it_is, row_of
from wlb.reading.joined_rows import joined_row, split_row
from wlb.reading.one_stream import restores_itself
from wlb.reading.rows import RowReader


def streams_of(dataset: Any, collator: Collator = as_it_is, *, columns: Sequence[str] = ()) -> list[Any]:
    """Makes streams for `wlb.torch.BalancedStream` from a tokenised data set without a length.

        data = load_dataset(..., streaming=True).map(tokenise)
        stream = BalancedStream(streams_of(data), packer=packer, collate_fn=collate, group=group)

    Args:
        dataset: Hugging Face's `IterableDataset`, all of it on every rank; or any iterable of rows with `input_ids` and
            maybe `labels`, `attention_mask` and other columns (`wlb.torch.RowReader`).
        collator: a trainer's collator, called with a list of one row.
        columns: names of further columns to carry. Give them to the `BalancedStream` too.

    Returns:
        One stream for each shard of the data set, with equal shares of a step; each is read by one rank. Only one
        stream, the data set itself, if its rows depend on their order or on the other rows of a batch: `skip`, `take`,
        `interleave_datasets`, `concatenate_datasets`, `batch`, functions `with_indices` or `batched` (except with
        `batch_size=1`), and layers that this version does not know.
        Streams resume from the data set's own state if that is exact; otherwise (shuffle buffers, `filter` over Arrow
        tables) they read again from the start.

    Raises:
        wlb.WlbError: the data set already gives each rank its own part.
    """
    if getattr(dataset, "_distributed", None) is not None:
        message = "is already split by node: give the whole data set, equal on every rank"
        raise error("train_dataset", message)
    shards = getattr(dataset, "num_shards", 1) if hasattr(dataset, "shard") and _is_unordered(dataset) else 1
    parts = [dataset.shard(num_shards=shards, index=index) for index in range(shards)] if shards > 1 else [dataset]
    kind = ResumableRowStream if _resumes_exactly(dataset) else RowStream
    return [kind(part, collator, dataset, RowReader(columns)) for part in parts]


class RowStream:
    """The documents of a stream, as `Rows`. It has no state, so after a resume it reads again from the start.

    Attributes:
        whole: the data set of which this is a shard.
    """

    def __init__(self, dataset: Any, collator: Collator, whole: Any, reader: RowReader) -> None:
        self._dataset = dataset
        self._collator = collator
        self._reader = reader
        self.whole = whole

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        for index, feature in enumerate(self._dataset):
            documents = split_row(feature, "train_dataset", index) if isinstance(feature, Mapping) else [feature]
            of_each = [row_of(document, index, self._collator, self._reader) for document in documents]
            yield of_each[0] if len(of_each) == 1 else joined_row(of_each)  # whole rows: a stream resumes at one


class ResumableRowStream(RowStream):
    """The documents of a stream that resumes from its own state."""

    def state_dict(self) -> Any:
        """Position of the stream."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """The next iteration begins at this state."""
        self._dataset.load_state_dict(state)


# Layers of Hugging Face's streams whose rows do not depend on earlier rows, so all shards together have all rows.
_UNORDERED: Final = {
    "ArrowExamplesIterable",
    "BufferShuffledExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "InterleavedShardsExamplesIterable",  # of `shuffle` since datasets 5.2; every shard interleaves its own files
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "RepeatExamplesIterable",
    "SelectColumnsIterable",
}

# Layers whose state is the exact position; that of `map` and `filter` is if the layers below them are exact.
_EXACT: Final = {
    "ArrowExamplesIterable",
    "CyclingMultiSourcesExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "HorizontallyConcatenatedMultiSourcesExamplesIterable",
    "MappedExamplesIterable",
    "RandomlyCyclingMultiSourcesExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "RepeatExamplesIterable",
    "SelectColumnsIterable",
    "SkipExamplesIterable",
    "TakeExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}


def _is_unordered(dataset: Any) -> bool:
    """Whether all shards of a stream together have the rows of the whole, in whatever order they are read.

    If a function takes batches of several rows, its rows depend on the batch, and every shard begins a new batch.
    """
    return all(
        type(layer).__name__ in _UNORDERED
        and not getattr(layer, "with_indices", False)
        and not (getattr(layer, "batched", False) and layer.batch_size != 1)
        for layer in _layers(getattr(dataset, "_ex_iterable", None))
    )


def _resumes_exactly(dataset: Any) -> bool:
    """Whether the state of a stream is its exact position; a shuffle buffer loses the rows in it."""
    return restores_itself(dataset) and all(map(_is_exact, _layers(getattr(dataset, "_ex_iterable", None))))


def _layers(layer: Any) -> Iterator[Any]:
    """The streams from which a Hugging Face stream reads, layer by layer."""
    if layer is None:
        return
    yield layer
    for inner in [getattr(layer, "ex_iterable", None), *getattr(layer, "ex_iterables", ())]:
        yield from _layers(inner)


def _is_exact(layer: Any) -> bool:
    name, inner = type(layer).__name__, type(getattr(layer, "ex_iterable", None)).__name__
    if name in ("MappedExamplesIterable", "FilteredExamplesIterable") and inner == "FormattedExamplesIterable":
        return _resumes_in_tables(name == "FilteredExamplesIterable", bool(layer.batched))
    return name in _EXACT


@cache
def _resumes_in_tables(is_filter: bool, batched: bool) -> bool:
    """Whether datasets resumes a `map` or `filter` over Arrow tables at the right row; 4.7 resumes one table later."""

    def stream() -> Any:
        rows = import_module("datasets").Dataset.from_dict({"number": list(range(6))}).to_iterable_dataset(num_shards=2)
        options: dict[str, Any] = {"batched": True, "batch_size": 2} if batched else {}
        if is_filter:
            return rows.filter(lambda row: [True] * len(row["number"]) if batched else True, **options)
        return rows.map(lambda row: row, **options)

    def rest(given: int) -> list[int]:
        first, resumed = stream(), stream()
        rows = iter(first)
        for _ in range(given):
            next(rows)
        resumed.load_state_dict(first.state_dict())
        return [row["number"] for row in resumed]

    return all(rest(given) == list(range(given, 6)) for given in range(1, 6))
