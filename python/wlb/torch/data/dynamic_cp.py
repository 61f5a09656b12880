"""Global batches from any iterator, replanned with dynamic context parallelism."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

import wlb
from wlb._errors import error
from wlb._seal import Hashed, check_seal
from wlb._shown import explained
from wlb.ledger import Pieces
from wlb.reading.columns import Layout, as_bits, common_layout, layout_of, num_rows, of_bits, of_padding
from wlb.reading.documents import IGNORE, Document, num_labels
from wlb.reading.packed import joined, packed
from wlb.reading.rows import RowReader
from wlb.reading.state import Progress, SavedChain, Snapshot, field, same
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.dynamic_documents import Costs, Table, checked, costs_by, costs_of
from wlb.torch.data.peers import Peers, failure_text
from wlb.torch.data.step import Step, moved, written
from wlb.torch.data.thread import Position, PreparedStep, StepIterator, StepsAhead

FORMAT: Final = "wlb.dynamic_cp_loader"
VERSION: Final = 2
_END = object()
_NOBODY: Final = -1  # the reader of padding: no rank

T = TypeVar("T")


@explained
@dataclass(frozen=True, eq=False)
class DynamicCpStep(Generic[T]):
    """One step of one data x context rank.

    Attributes:
        number: global steps before this one, since the run began.
        plan: of the whole step, the same on every rank. Its documents are numbered in the order of their ids.
        micro_batches: this rank's part of each, in the order of the plan: equally many on all ranks, another number in
            every step. Without documents for this rank one has 0 tokens, and has to be run like the others.
        num_valid_tokens: labels of the whole step that count, each once, however many ranks share its document:
            `token_normalized_loss` divides by it. The same on every rank. 0 means that there is nothing to train, and
            that no rank's optimizer may step.
        planning_seconds: time of planning, in the background.
        stall_seconds: time for which this rank waited for the step, because reading, planning and moving took longer
            than the step before.
        epoch: pass over the documents to which it belongs, if `batches` yields `Step`s; else 0.
        pieces: the documents of groups whose first rank is this one, by the ids of the packer that released them; each
            is on the list of one rank. None if `batches` does not yield `Step`s, because their ids may come again.
        snapshot: position of the loader after it: `state`, and its digest.
        rank: this rank among the data x context ranks.
    """

    number: int
    plan: wlb.DynamicCpPlan
    micro_batches: list[T]
    num_valid_tokens: int
    planning_seconds: float = 0.0
    stall_seconds: float = 0.0
    epoch: int = 0
    pieces: Pieces | None = None
    snapshot: Snapshot | None = None
    rank: int = 0

    @property
    def parts(self) -> NDArray[np.int64]:
        """Index of the part of the step that this rank trains; see `Step.parts`."""
        return np.array([self.rank])

    @property
    def num_ranks(self) -> int:
        """Ranks that share the step: the data x context ranks for which it was planned."""
        return self.plan.world_size

    @property
    def groups(self) -> tuple[wlb.CpGroup, ...]:
        """This rank's group in each micro-batch, and its documents."""
        return tuple(micro_batch.group_of(self.rank) for micro_batch in self.plan)

    @property
    def state(self) -> dict[str, Any]:
        """State to save after this step is trained; a loader that loads it resumes after this step.

        It does not depend on what was read since. As `Step.state`; the same on every rank if that of `batches` is.
        """
        return written(self.snapshot)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> DynamicCpStep[T]:
        """A copy with its micro-batches on `device`; accelerate and Lightning move loader output this way."""
        return replace(self, micro_batches=[moved(batch, device, non_blocking) for batch in self.micro_batches])


class DynamicCpLoader(StepIterator[DynamicCpStep[T]], Generic[T]):
    """Steps from any iterator of documents: with a plan for each step and a context-parallel group for each document.

    All ranks read the documents of a step together, each its own share, without knowing the others'. Each rank counts
    the tokens of its share, only lengths and ids are gathered, every rank makes the same plan, and tokens go straight
    to the ranks that train them: a rank with an eighth of a document gets only that eighth. All this runs in a thread,
    one step ahead of training, over a process group of its own.

        loader = DynamicCpLoader(
            DataLoader(Documents(dataset), batch_sampler=my_share_of_each_batch, collate_fn=list, num_workers=2),
            plan=functools.partial(wlb.plan_dynamic_cp, world_size=dp * cp, num_stages=pp, max_tokens_per_rank=...,
                                   cost_model=...),
            group=data_and_context(mesh).get_group(),
        )
        groups = ContextParallelGroups(mesh)
        for step in loader:
            for batch in step.micro_batches:
                ...  # attention over groups.of(batch)

    **What to iterate.** An item is a list of documents, as `collate` takes them: those of one step that this rank
    reads. It may be empty. If all ranks know the index of a global batch, rank r of n may read `indices[r::n]`. An item
    may also be a `Step`, as a `StepLoader` yields it with `collate_fn=list`, for all its documents. Then outliers wait
    in the queues of a `wlb.Packer` first, and the documents that it releases are planned here; make its
    `num_micro_batches` a multiple of the ranks. Settings of the packer about micro-batches (`dp_size`, `max_documents`,
    padded sizes) would not hold for those planned here, and are refused: give sizes to `plan` instead.

    **Fixed sizes.** With `multiple_of_tokens` or `token_buckets` in `plan`, every rank has the padded number of tokens
    in every micro-batch. The last document of its group is then padding, as `collate` makes it: token 0, positions from
    0, no labels. With `max_documents`, `cu_seqlens` has that and 2 entries. Only the number of micro-batches and the
    sizes of groups still change from step to step: fix the first with `num_micro_batches`, the second with graphs for
    each size.

    If a rank's iterator ends, it gives nothing while the others continue. The iteration ends when all have ended, and
    the next one begins again. A new loop continues where the last one stopped.

    **State.** Each step has the state to save once it is trained (`DynamicCpStep.state`). If `batches` has `state_dict`
    and `load_state_dict`, it has the state of `batches`, and may be loaded wherever that may: a `StepLoader`'s is the
    same on every rank and for any number of ranks. Otherwise it counts the items that this rank read, which are then
    skipped, and only this rank, of as many, may load it. If `batches` ends before, the next step fails.

    Args:
        batches: see above. Read in a thread, by every rank; ranks that differ only in pipeline stage or tensor-parallel
            position read the same.
        plan: makes the plan from int64 [documents], their lengths: `functools.partial(wlb.plan_dynamic_cp, ...)` with
            the group's size as `world_size`. The same on every rank.
        costs: what a document costs on one rank, in seconds for the whole model, if its length does not tell: a float
            array by the ids of documents, none of which is cut; or a function of a document, called once for each
            document in the thread of the rank that reads it. `plan` is then called with `costs=`, float64 [documents],
            and has no cost model.
        attention_costs: the part of `costs` that is attention; `plan` is called with `attention_costs=`, too.
        group: the data x context ranks: `data_and_context(mesh).get_group()`. None: one process.
        prepare: called in the thread with every micro-batch; its result is in the step. Use it for `prepare_attention`,
            or `PackedBatch.pin_memory`. The CUDA device is that of the moment when the loader was made, if CUDA was
            used.
        columns: names of further columns of rows to carry (`wlb.torch.RowReader` says which are always carried).
        labels_ahead: how many tokens ahead every token predicts (`collate`).

    Attributes:
        tokens_moved: tokens that this rank received from others so far.

    All ranks of `group` communicate for every step, so they take equally many, and they make their loaders together.
    Close it before the process groups are destroyed.
    """

    def __init__(
        self,
        batches: Iterable[Any],
        *,
        plan: Callable[..., wlb.DynamicCpPlan],
        costs: Costs | ArrayLike | None = None,
        attention_costs: Costs | ArrayLike | None = None,
        group: dist.ProcessGroup | None = None,
        prepare: Callable[[PackedBatch], T] | None = None,
        columns: Sequence[str] = (),
        labels_ahead: int = 1,
    ) -> None:
        check_source(batches)
        self._row_reader = RowReader(columns, labels_ahead)
        self._peers = Peers(group, description="dynamic_cp")
        self._batches: Any = batches
        self._plan = plan
        self._costs: dict[str, Costs] = {}
        for name, of_document in (("costs", costs), ("attention_costs", attention_costs)):
            if of_document is not None:
                self._costs[name] = costs_by(name, of_document)
        self._prepare = prepare
        self._stateful = all(hasattr(batches, f"{verb}state_dict") for verb in ("", "load_"))
        self._iterator: Iterator[Any] | None = None
        self._read = 0  # items of this iteration
        self._skip = 0  # items that a restored state has read already
        self._number = 0  # of the step that is read next
        self._ended = False  # this rank's share of the iteration
        self._item: Step[Any] | None = None  # the last step that was read, if `batches` gives steps
        self._chain = SavedChain()
        self._latest = self._position()  # after the step that was made last
        self._steps = StepsAhead(self._make, self._latest, name="wlb-dynamic-cp", argument="batches")
        self.tokens_moved = 0

    def __next__(self) -> DynamicCpStep[T]:
        """The next step. All ranks call this, and each only waits for the threads of all ranks.

        Raises:
            wlb.WlbError: on every rank, if reading or `prepare` failed on some rank, a document does not fit, or plans
                differ. Or the loader is closed.
            RuntimeError: a rank has ended, or is later than the timeout.
        """
        started = time.perf_counter()
        step = self._steps.take()
        if step is None:
            raise StopIteration
        return replace(step, stall_seconds=time.perf_counter() - started)

    def metrics(self) -> wlb.PackerMetrics:
        """Delays of documents in the packer of `batches`, if that is a `StepLoader`, up to the last step given."""
        metrics = self._steps.position.metrics
        if metrics is None:
            raise error("batches", "has no metrics", value=self._batches)
        return metrics

    def describe(self) -> dict[str, Any]:
        """Description of the documents for a ledger: plain JSON values."""
        if hasattr(self._batches, "describe"):
            about: dict[str, Any] = self._batches.describe()
            return about
        return {"documents": None, "tokens": None, "fingerprint": None, "longest": None, "num_epochs": None}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Resumes after the step of the state. Needs no communication; call it before the first step.

        Raises:
            wlb.WlbError: the state was changed after it was saved, or was saved by something else; or `batches` has no
                state and it is of another rank or number of ranks; or `batches` refuses its part, such as a
                `StepLoader` that of another packer configuration, unless `allow_config_change` accepts it.
        """
        if self._steps.begun:
            raise error("state", "is loaded after a step; load it into a new loader", value=self._number)
        same(state, {"format": FORMAT, "version": VERSION}, "this version of wlb")
        check_seal(state)
        number, read, batches = field(state, "step", int), field(state, "read", int), field(state, "batches", object)
        if self._stateful != (batches is not None):
            raise error("state", f"was saved with{'out' if self._stateful else ''} a state of batches", value=batches)
        same(state, self._reader(), "this loader")
        chain = SavedChain.of(state)
        if self._stateful:
            allowed = {"allow_config_change": True} if allow_config_change else {}
            self._batches.load_state_dict(batches, **allowed)
        self._number, self._read, self._skip = number, read, 0 if self._stateful else read
        self._chain = chain
        self._steps.position = self._latest = self._position()

    def _reader(self) -> dict[str, int]:
        """The rank whose item count a state has; other ranks read other documents."""
        return {} if self._stateful else {"rank": self._peers.rank, "num_ranks": self._peers.size}

    # In the thread.

    def _position(self) -> Position:
        metrics = self._batches.metrics() if hasattr(self._batches, "metrics") else None
        known = {"format": FORMAT, "version": VERSION, "step": self._number, "read": self._read, **self._reader()}
        within = self._item.snapshot if self._stateful and self._item is not None else None
        if within is not None:
            known = self._chain.sealed({**known, "batches": Hashed(within.digest)})
            snapshot = Snapshot(known, within.progress, lambda: {**known, "batches": copy.deepcopy(within.state)})
        else:
            known["batches"] = copy.deepcopy(self._batches.state_dict()) if self._stateful else None
            known = self._chain.sealed(known)
            snapshot = Snapshot.of(known, Progress())
        return Position(self._number, snapshot, SavedChain.after(known), metrics)

    def _make(self) -> PreparedStep[DynamicCpStep[T], Position]:
        while True:
            documents, table, layout = self._gather()
            if len(table.lengths):
                break
            if table.ended:
                self._iterator, self._read, self._ended, self._item = None, 0, False, None
                return self._peers.finished(self._end, step=self._number)
        plan, seconds = self._planned(table)
        batches = self._exchange(plan, table, documents, layout)

        def finish() -> PreparedStep[DynamicCpStep[T], Position]:
            micro_batches: list[Any] = [self._prepare(batch) for batch in batches] if self._prepare else batches
            number, epoch = self._number, 0 if self._item is None else self._item.epoch
            self._number, self._chain = number + 1, self._latest.chain
            self._latest = self._position()
            step = DynamicCpStep(
                number,
                plan,
                micro_batches,
                table.num_valid_tokens,
                seconds,
                epoch=epoch,
                pieces=self._pieces(plan, table),
                snapshot=self._latest.snapshot,
                rank=self._peers.rank,
            )
            return PreparedStep(step, self._latest)

        return self._peers.finished(finish, step=self._number)

    def _end(self) -> PreparedStep[DynamicCpStep[T], Position]:
        """After the last step of the iteration."""
        head = self._latest.chain.previous
        self._chain = SavedChain(head, head)
        self._latest = self._position()
        return PreparedStep(None, self._latest)

    def _pieces(self, plan: wlb.DynamicCpPlan, table: Table) -> Pieces | None:
        """The documents of groups of which this rank is the first."""
        if (table.names < 0).any():
            return None
        groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
        rows = [group.document_ids for group in groups if group.first_rank == self._peers.rank]
        return Pieces.of(*([column[row] for row in rows] for column in (table.names, table.starts, table.lengths)))

    def _read_share(self) -> tuple[list[Document], list[int]]:
        """Documents that this rank reads for the next step, and their ids from a packer, or -1."""
        if self._iterator is None:
            self._iterator = iter(self._batches)
            for already in range(self._skip):
                if next(self._iterator, _END) is _END:
                    raise ValueError(f"ends after {already} items, {self._skip} were read before")
            self._skip = 0
        batch: Any = _END if self._ended else next(self._iterator, _END)
        if batch is _END:
            self._ended = True
            return [], []
        self._read += 1
        self._item = batch if isinstance(batch, Step) else None
        names = None
        if self._item is not None:
            names = self._item.pieces.ids.tolist()
            batch = [document for documents in self._item.micro_batches for document in documents]
        documents = [document for index, row in enumerate(batch) for document in checked(row, index, self._row_reader)]
        return documents, names or [-1] * len(documents)

    def _gather(self) -> tuple[list[Document], Table, Layout]:
        """The documents of this rank, the table of all ranks' documents, and the columns of all."""
        documents: list[Document] = []
        names: list[int] = []
        costs: dict[str, NDArray[np.float64]] = {}
        layout: Layout = ()
        failure: BaseException | None = None
        try:
            documents, names = self._read_share()
            costs = {name: costs_of(documents, name, of) for name, of in self._costs.items()}
            layout = common_layout([layout_of(document) for document in documents], "batches")
        except BaseException as cause:  # of any kind: the other ranks wait for an answer
            failure = cause
        # All fit in int64: `checked` looked.
        named = zip(documents, names, strict=True)
        rows = np.array([(d.tokens.size, d.id, d.start, num_labels(d), name) for d, name in named], np.int64)
        part = {
            "failure": failure_text(failure),
            "agreement": (self._number, list(self._costs)),
            "rows": rows.reshape(-1, 5),
            "costs": costs,
            "layout": layout if documents else None,
            "ended": self._ended,
            "content": None if self._item is None else self._item.content,
        }
        parts = self._peers.gather(part)
        self._peers.agree(parts, failure, step=self._number, argument="batches", what="step or kind of costs")
        # Plans of equal lengths are equal, whatever the tokens: ranks that shuffled otherwise are known by these.
        known = [{**each, "agreement": each["content"]} for each in parts if each["content"] is not None]
        if len(known) == len(parts):
            self._peers.agree(known, None, step=self._number, argument="batches", what="content of the data set")
        costs = {name: np.concatenate([part["costs"][name] for part in parts]) for name in self._costs}
        everyone = [part["rows"] for part in parts]
        # Every rank checks this, so that either all fail or none.
        layout = common_layout([part["layout"] for part in parts if part["layout"] is not None], "batches")
        return documents, Table.of(everyone, costs, ended=all(part["ended"] for part in parts)), layout

    def _planned(self, table: Table) -> tuple[wlb.DynamicCpPlan, float]:
        """The plan, after all ranks have it."""
        started = time.perf_counter()
        failure: BaseException | None = None
        plan = None
        try:
            plan = self._plan(table.lengths, **table.costs)
            if plan.world_size != self._peers.size:
                message = f"is for world_size = {plan.world_size}; the group has {self._peers.size} ranks"
                raise error("plan", message, value=plan.world_size)
            _check_every_document(plan, table.lengths)
        except BaseException as cause:
            failure = cause
        seconds = time.perf_counter() - started
        if isinstance(failure, wlb.WlbError) and failure.argument == "lengths" and failure.index is not None:
            row = failure.index
            where = f"document {table.ids[row]}, which rank {self._peers.ranks[table.ranks[row]]} read"
            failure = error("batches", f"have {where}: {failure}", value=failure.value)
        digest = plan.digest() if failure is None and plan is not None else None
        parts = self._peers.gather({"failure": failure_text(failure), "agreement": digest})
        self._peers.agree(parts, failure, step=self._number, argument="plan", what="plan")
        assert plan is not None
        return plan, seconds

    def _exchange(
        self, plan: wlb.DynamicCpPlan, table: Table, documents: list[Document], layout: Layout
    ) -> list[PackedBatch]:
        """This rank's parts of all micro-batches, fetched from the ranks that read the documents."""
        me, size = self._peers.rank, self._peers.size
        outgoing: list[list[NDArray[np.int64]]] = [[] for _ in range(size)]  # [tokens, columns], by destination
        incoming: list[list[int]] = [[] for _ in range(size)]  # sizes, by source
        expected = []
        width = 2 + num_rows(layout)  # numbers that a token takes: its id, its label, its columns
        for micro_batch in plan.micro_batches:
            for group in micro_batch.groups:
                rows = group.document_ids
                read_by = table.ranks[rows]
                if me not in group.ranks and me not in read_by:
                    continue
                lengths, source = group.lengths, np.repeat(read_by, group.lengths)  # who read each token
                if group.padding_tokens:
                    lengths = np.append(lengths, group.padding_tokens)
                    source = np.append(source, np.full(group.padding_tokens, _NOBODY))
                shard = wlb.shard(lengths, cp_size=group.cp_size, strategy="per_document")
                if me in read_by:
                    mine = [documents[at] for at in table.positions[rows[read_by == me]]]
                    of_tokens = np.concatenate([np.stack(packed(mine)), *as_bits(joined(mine, layout))]).T
                    here = source == me
                    place = np.cumsum(here) - 1  # place of each token among those that this rank read
                    for cp_rank, destination in enumerate(group.ranks):
                        held = shard.rank(cp_rank).token_indices
                        outgoing[destination].append(of_tokens[place[held[here[held]]]].ravel())
                if me in group.ranks:
                    source = source[shard.rank(me - group.first_rank).token_indices]
                    for rank in np.unique(read_by).tolist():
                        incoming[rank].append(width * int((source == rank).sum()))
                    expected.append((group, shard, source))
        arrived = self._peers.all_to_all(outgoing, incoming)
        self.tokens_moved += sum(sum(sizes) // width for rank, sizes in enumerate(incoming) if rank != me)
        batches = []
        for group, shard, source in expected:
            rows = group.document_ids
            values = np.empty((width, source.size), np.int64)
            values[:2, source == _NOBODY] = [[0], [IGNORE]]
            for rank in np.unique(table.ranks[rows]).tolist():
                values[:, source == rank] = next(arrived[rank]).reshape(-1, width).T
            columns = of_bits(values[2:], layout)
            for name, column in columns.items():
                column[..., source == _NOBODY] = of_padding(name)
            tokens, labels = torch.from_numpy(values[:2])
            batches.append(
                PackedBatch.of(
                    tokens,
                    labels,
                    document_ids=table.ids[rows],
                    shard=shard,
                    cp_rank=me - group.first_rank,
                    num_valid_tokens=int(table.labels[rows].sum()),
                    cp_first_rank=group.first_rank,
                    cu_seqlens_size=None if plan.max_documents is None else plan.max_documents + 2,
                    columns={name: torch.from_numpy(column) for name, column in columns.items()},
                )
            )
        return batches


def check_source(batches: object) -> None:
    """Checks that a loader can keep all settings of the packer before it.

    Raises:
        wlb.WlbError: the packer plans for ranks, or for sizes of micro-batches.
    """
    packer = getattr(batches, "packer", None)
    if not isinstance(packer, wlb.Packer):
        return
    for name, unset in (("dp_size", None), ("max_documents", None), ("multiple_of_tokens", 1), ("token_buckets", ())):
        if (value := getattr(packer, name)) != unset:
            message = (
                f"has a packer with {name} = {value}, and its micro-batches are planned anew here: leave {name} out"
            )
            message += "" if name == "dp_size" else " of the packer, and give it to plan"
            raise error("batches", message, value=value)


def _check_every_document(plan: wlb.DynamicCpPlan, lengths: NDArray[np.int64]) -> None:
    """Checks that the plan has every document once and whole; others would be lost but counted in the loss.

    Raises:
        wlb.WlbError: it does not.
    """
    groups = [group for micro_batch in plan.micro_batches for group in micro_batch.groups]
    ids = np.concatenate([group.document_ids for group in groups])
    if not np.array_equal(np.sort(ids), np.arange(lengths.size)):
        raise error("plan", f"does not have each of {lengths.size} documents once, by their index", value=ids)
    planned = np.empty_like(lengths)
    planned[ids] = np.concatenate([group.lengths for group in groups])
    if (differ := np.flatnonzero(planned != lengths)).size:
        row, found = int(differ[0]), int(planned[differ[0]])
        raise error("plan", f"has {found} tokens of document {row}, which has {lengths[row]}", value=found)
