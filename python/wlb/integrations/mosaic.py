"""Streaming data sets of MosaicML (`mosaicml-streaming`) under `wlb.torch.BalancedStream`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wlb._errors import check_integer, error
from wlb.integrations.rows import Collator, row, tokens_and_labels
from wlb.integrations.versions import check_version
from wlb.torch.data.state import field

_ORDER: Final = (
    "batching_method",
    "partition_algo",
    "sampling_method",
    "sampling_granularity",
    "shuffle",
    "shuffle_algo",
)


def is_mosaic(dataset: Any) -> bool:
    """Whether this is a `streaming.StreamingDataset`. Imports nothing."""
    kinds = [(cls.__module__.partition(".")[0], cls.__name__) for cls in type(dataset).__mro__]
    return ("streaming", "StreamingDataset") in kinds


def streams_of(
    dataset: Any, collator: Collator = tokens_and_labels, *, num_streams: int | None = None, num_epochs: int = 1
) -> list[SampleStream]:
    """What `wlb.torch.BalancedStream` reads of a `StreamingDataset`: a stream for each rank, of the rank's own samples.

        data = StreamingDataset(local="corpus", batch_size=1, shuffle=True)
        stream = BalancedStream(streams_of(data), packer=packer, collate_fn=collate, group=group)

    The data set says in which order and on which node samples are read (`shuffle`, `num_canonical_nodes`, ...); of a
    node's samples each of its ranks reads every n-th. No sample is repeated to make ranks even, and none waits for a
    batch to be full. A state holds that of the data set and how many samples of it each stream has read, so that it
    resumes at the next one, whatever was read ahead.

    Args:
        dataset: made with the same arguments on every rank; it begins where its own `load_state_dict` says. Samples are
            read by index, in the thread of `BalancedStream`: shards should be on local disk. One that is not is fetched
            when its first sample is due.
        collator: makes `input_ids` and maybe `labels` of a list of one sample.
        num_streams: as many as there were when a state was saved, to resume it on another number of ranks. By default
            one for each rank.
        num_epochs: how often the data set is read.

    Raises:
        wlb.WlbError: It is no `StreamingDataset`, has no `batch_size`, or asks for batches out of one stream each;
            mosaicml-streaming is missing or too old.

    Complexity:
        Each rank makes the order of the epoch, int64 [samples of the data set], and keeps its own part.
    """
    check_version("mosaicml-streaming")
    if not is_mosaic(dataset):
        kind = type(dataset).__name__
        raise error("dataset", f"is a {kind}, not a StreamingDataset: give that, without a loader", value=kind)
    if not isinstance(dataset.batch_size, int):
        message = "of the StreamingDataset is None, without which it makes no order: any will do, batch_size=1"
        raise error("batch_size", message)
    if dataset.batching_method not in ("random", "stratified"):
        message = f'= {dataset.batching_method!r}: documents are packed by their work; "random" or "stratified"'
        raise error("batching_method", message, value=dataset.batching_method)
    check_integer("num_epochs", num_epochs, minimum=1)
    from streaming.base.world import World

    world = World.detect()
    if dataset.replication is not None:
        world = world.replicate(dataset.replication)
    if num_streams is None:
        num_streams = world.num_ranks
    check_integer("num_streams", num_streams, minimum=1)
    nodes = 1 if num_streams % world.num_nodes else world.num_nodes
    stands = _stands(dataset)
    begin = {"nodes": nodes, "data_set": stands, "order": _order(dataset), "samples": dataset.epoch_size}
    begin |= {"shuffle_block_size": dataset.shuffle_block_size, "epoch": 0, "read": 0}
    return [SampleStream(dataset, collator, number, num_streams, num_epochs, begin) for number in range(num_streams)]


class SampleStream:
    """The samples of a `StreamingDataset` that one stream of several reads."""

    def __init__(
        self, dataset: Any, collator: Collator, number: int, count: int, num_epochs: int, begin: dict[str, Any]
    ) -> None:
        self._dataset = dataset
        self._collator = collator
        self._number = number
        self._count = count
        self._num_epochs = num_epochs
        self._state = begin

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        for epoch in range(self._state["epoch"], self._num_epochs):
            samples = self._samples(epoch)
            for index in range(self._state["read"], len(samples)):
                self._state = {**self._state, "epoch": epoch, "read": index + 1}
                yield row(self._dataset[int(samples[index])], index, self._collator)
            self._state = {**self._state, "epoch": epoch + 1, "read": 0}

    def _samples(self, epoch: int) -> NDArray[np.int64]:
        """Their numbers in an epoch, counted from where the data set stood when it was given."""
        from streaming.base.batching import generate_work
        from streaming.base.world import World

        nodes, stood = self._state["nodes"], self._state["data_set"]
        drop = 0 if epoch else stood["sample_in_epoch"]
        world = World(nodes, 1, 1, 0)  # one rank on each node: its samples in order, and nothing to make ranks even
        method = self._dataset.batching_method
        work = generate_work(method, self._dataset, world, stood["epoch"] + epoch, drop)
        of_node = self._count // nodes
        samples = work[self._number // of_node].reshape(-1)
        return np.array(samples[samples >= 0][self._number % of_node :: of_node], np.int64)

    def state_dict(self) -> dict[str, Any]:
        """Where the data set stood when it was given, and how far this stream has read since."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next iteration begins there.

        Raises:
            wlb.WlbError: it is of another data set or another order, or this one has already been read further.
        """
        if state["samples"] != self._dataset.epoch_size:
            message = f"is of a data set of {state['samples']} samples, this one has {self._dataset.epoch_size}"
            raise error("state", message, value=state["samples"])
        self._dataset.load_state_dict(state["data_set"])
        if (stands := _stands(self._dataset)) != state["data_set"]:
            message = f"begins in epoch {state['data_set']['epoch']}, but the data set is in epoch {stands['epoch']}"
            raise error("state", f"{message} already: make a new one", value=stands["epoch"])
        for name, value in _order(self._dataset).items():
            if (saved := field(state, "order", dict).get(name)) != value:
                message = (
                    f"= {value!r}, but the state is of {saved!r}, another order: samples would be lost, and others "
                )
                raise error(name, f"{message}read twice; make the data set with {name}={saved!r}", value=value)
        # By default it follows from the number of nodes, which was another one perhaps.
        self._dataset.shuffle_block_size = field(state, "shuffle_block_size", object)
        self._state = dict(state)


def _order(dataset: Any) -> dict[str, Any]:
    """What says in which order samples are read, and is not in the data set's own state."""
    names = [*_ORDER, "batch_size"] if dataset.batching_method == "stratified" else _ORDER
    return {name: getattr(dataset, name) for name in names}


def _stands(dataset: Any) -> dict[str, Any]:
    """Where a data set begins: what was loaded into it, or the epoch after the last that it gave by itself."""
    found: dict[str, Any] = dataset.state_dict(num_samples=0, from_beginning=False)
    if found["epoch"] < dataset.next_epoch:
        found |= {"epoch": dataset.next_epoch, "sample_in_epoch": 0}
    return found
