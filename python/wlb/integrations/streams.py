"""Data sets without a length as the streams that `wlb.torch.BalancedStream` reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Any

from numpy.typing import NDArray

from wlb._errors import error
from wlb.integrations.rows import Collator, as_it_is, row_of
from wlb.torch.data.one_stream import restores_itself
from wlb.torch.data.rows import RowReader, joined_row, split_row


def streams_of(dataset: Any, collator: Collator = as_it_is, *, columns: Sequence[str] = ()) -> list[Any]:
    """What `wlb.torch.BalancedStream` reads of a tokenised data set without a length.

        data = load_dataset(..., streaming=True).map(tokenise)
        stream = BalancedStream(streams_of(data), packer=packer, collate_fn=collate, group=group)

    Args:
        dataset: Hugging Face's `IterableDataset`, the whole of it on every rank; or any iterable of rows with
            `input_ids` and maybe `labels`, `attention_mask` and other columns (:class:`wlb.torch.RowReader`).
        collator: Makes what is learnt of a list of one row, as a trainer's.
        columns: Names of further columns that are carried. Give them to the `BalancedStream` too.

    Returns:
        One for each shard of the data set, or the data set itself: read by several ranks, or by one. They go on from
        the data set's own state where that is exact; from others (shuffle buffers) what was read is read again.

    Raises:
        wlb.WlbError: It gives every rank its own part already.
    """
    if getattr(dataset, "_distributed", None) is not None:
        message = "is split by node already: give the whole of it, the same on every rank"
        raise error("train_dataset", message)
    shards = getattr(dataset, "num_shards", 1) if hasattr(dataset, "shard") else 1
    parts = [dataset.shard(num_shards=shards, index=index) for index in range(shards)] if shards > 1 else [dataset]
    kind = ResumableRowStream if _resumes_exactly(dataset) else RowStream
    return [kind(part, collator, RowReader(columns)) for part in parts]


class RowStream:
    """The documents of a stream, as `Rows`. A stream without a state of its own: what was read is read again."""

    def __init__(self, dataset: Any, collator: Collator, reader: RowReader) -> None:
        self._dataset = dataset
        self._collator = collator
        self._reader = reader

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        for index, feature in enumerate(self._dataset):
            documents = split_row(feature, "train_dataset", index) if isinstance(feature, Mapping) else [feature]
            of_each = [row_of(document, index, self._collator, self._reader) for document in documents]
            yield of_each[0] if len(of_each) == 1 else joined_row(of_each)  # whole: a stream goes on with a row


class ResumableRowStream(RowStream):
    """The documents of a stream that goes on from its own state."""

    def state_dict(self) -> Any:
        """Where the stream stands."""
        return self._dataset.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """The next iteration begins there."""
        self._dataset.load_state_dict(state)


def _resumes_exactly(dataset: Any) -> bool:
    """Whether the state of a stream says exactly where it stands: that of a shuffle buffer loses what is in it."""
    return restores_itself(dataset) and not any(map(_is_ahead, _layers(getattr(dataset, "_ex_iterable", None))))


def _layers(layer: Any) -> Iterator[Any]:
    """Of a stream of Hugging Face's: what it reads from, and what that reads from."""
    if layer is None:
        return
    yield layer
    for inner in [getattr(layer, "ex_iterable", None), *getattr(layer, "ex_iterables", ())]:
        yield from _layers(inner)


def _is_ahead(layer: Any) -> bool:
    """Whether the state of a layer says that more was read than was given."""
    name, inner = type(layer).__name__, type(getattr(layer, "ex_iterable", None)).__name__
    if name == "MappedExamplesIterable" and inner == "FormattedExamplesIterable":
        return not layer.batched and not _maps_of_tables_resume()
    return "BufferShuffled" in name


@cache
def _maps_of_tables_resume() -> bool:
    """Whether datasets resumes a `map` over Arrow tables after the row that was given: 4.7 goes on a table later."""

    def stream() -> Any:
        rows = import_module("datasets").Dataset.from_dict({"number": [0, 1, 2]})
        return rows.to_iterable_dataset().map(lambda row: row)

    given, resumed = stream(), stream()
    next(iter(given))
    resumed.load_state_dict(given.state_dict())
    return [row["number"] for row in resumed] == [1, 2]
