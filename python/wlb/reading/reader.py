"""The global steps of a run over documents of known length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import field as field_of
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

import wlb
from wlb._errors import check_integer, error
from wlb._seal import check_seal
from wlb.ledger import waiting_pieces
from wlb.reading.corpus import Corpus
from wlb.reading.documents import Piece
from wlb.reading.filling import Offer, next_packing
from wlb.reading.given_costs import CorpusCosts, check_given
from wlb.reading.permutation import Permutation
from wlb.reading.sizes import batch_tokens, check_max_early, least_tokens, warn_of_long
from wlb.reading.state import Progress, SavedChain, Snapshot, check_outside, field, outside, read_outside, same

FORMAT: Final = "wlb.batch_sampler"
VERSION: Final = 2


@dataclass(frozen=True)
class ReadingOrder:
    """Order in which documents become global batches: all settings except the packer that must not change in a run.

    Attributes:
        corpus: the documents.
        tokens_per_batch: tokens that enter the packer in every step.
        min_step_tokens: least tokens of a step, except at the end of the run.
        shuffle: whether every epoch has an order of its own.
        seed: of these orders.
        num_epochs: epochs of the run.
        oversize: what to do with documents longer than `limit`, as in the packer.
        limit: most tokens of a document.
        costs: given costs of documents, if the packer takes them.
        max_early: iterations that a document may come before its turn.
        content: a `fingerprint` of the data set under "content", once a loader knows it.
    """

    corpus: Corpus
    tokens_per_batch: int
    min_step_tokens: int
    shuffle: bool
    seed: int
    num_epochs: int
    oversize: str
    limit: int
    costs: CorpusCosts | None = None
    max_early: int = 0
    content: dict[str, str] = field_of(default_factory=dict)

    @property
    def longest(self) -> int | None:
        """Most tokens that a document counts for; None for all of its tokens."""
        return self.limit if self.oversize == "truncate" else None

    def documents(self, epoch: int, first: int, end: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers and tokens of the documents at places `first` to `end` of an epoch: int64 [end - first] each."""
        documents = np.arange(first, end)
        if self.shuffle:
            documents = Permutation(self.corpus.lengths.size, seed=self.seed, epoch=epoch)(documents)
        lengths = np.asarray(self.corpus.lengths[documents], np.int64)
        return documents, lengths if self.longest is None else np.minimum(lengths, self.longest)

    def costs_of(
        self, documents: NDArray[np.int64], at: NDArray[np.integer[Any]], lengths: NDArray[np.int64]
    ) -> NDArray[np.float64] | None:
        """float64 [pieces, columns] of pieces of `documents[at]`: the share of their tokens. None without costs."""
        if self.costs is None:
            return None
        documents = documents[: at.max(initial=-1) + 1]
        share: NDArray[np.float64] = lengths / np.asarray(self.corpus.lengths[documents], np.int64)[at]
        rows: NDArray[np.float64] = self.costs.rows(documents)[at]
        rows *= share[:, None]
        return rows


class DocumentsAhead:
    """The documents of an epoch from a place on, as they are offered to a packer (`next_packing`).

    Under `oversize="split"` documents are cut here at the packer's limit, so that one that is longer than a global
    batch enters piece by piece.

    After those whose turn has come it offers documents of later global batches that would wait for others of their
    cost, as early as the packer says (`Packer.leads`), up to `max_early` iterations.

    Attributes:
        place: place of the next document in the epoch.
        offset: number of its tokens that have entered.
        taken: int64 [documents], places from `place` on of documents that entered before their turn, ascending.
    """

    def __init__(
        self,
        order: ReadingOrder,
        packer: wlb.Packer,
        *,
        epoch: int,
        place: int,
        offset: int,
        taken: NDArray[np.int64],
        guess: int,
    ) -> None:
        self._order = order
        self._packer = packer
        self._epoch = epoch
        self.place = place
        self.offset = offset
        self.taken = taken
        self.guess = guess  # number of documents to look at for a step
        self._due = 0
        self._turns_end = place
        self._places = np.empty(0, np.int64)
        self._ends = np.empty(0, np.int64)
        self._finished = np.empty(0, np.bool_)

    def offer(self, extra: int) -> Offer:
        """See `Source`. The last offer of an epoch has all the rest, so that no small step is left."""
        order = self._order
        wanted = (1 + extra) * order.tokens_per_batch
        ahead = order.max_early * order.tokens_per_batch
        total = order.corpus.lengths.size
        # The next documents that entered before their turn; new ones begin behind them.
        entered = int((self.taken == self.place + np.arange(self.taken.size)).sum())
        while True:
            end = min(self.place + max(self.guess, self._taken_until - self.place), total)
            documents, left = order.documents(self._epoch, self.place, end)
            left[:1] -= self.offset
            # At least one piece, even if it exceeds a global batch; the rest behind it must be known to make a step.
            looked_at = max(wanted, int(left[:entered].sum()) + order.limit) + ahead + order.min_step_tokens
            if end == total or left.sum() > looked_at:
                break
            self.guess *= 2
        # Cut to the same documents whatever the guess was, because early documents depend on all of them.
        seen = max(int(np.searchsorted(left.cumsum(), looked_at, side="right")) + 1, self._taken_until - self.place)
        end = min(self.place + seen, end)
        documents, left = documents[: end - self.place], left[: end - self.place]
        # Only the needed pieces of a long document, which may have millions.
        shown = np.minimum(left, looked_at + order.limit)
        if order.oversize == "split":
            at, starts, lengths = wlb.split_documents(shown, max_document_tokens=order.limit)
        else:
            at, starts, lengths = np.arange(documents.size), np.zeros(documents.size, np.int64), shown
        ends = starts + lengths
        has_entered, is_whole = np.isin(self.place + at, self.taken), lengths == left[at]
        to_the_end = end == total and bool((shown == left).all())
        turns, offered, self._due, early = self._packer.offered(
            lengths,
            most_early=np.where(has_entered, -1, np.where(is_whole, order.max_early, 0)),
            wanted=wanted,
            tokens_per_batch=order.tokens_per_batch,
            min_step_tokens=order.min_step_tokens,
            to_the_end=to_the_end,
        )
        last = to_the_end and turns == lengths.size
        self._turns_end = int(self.place + at[turns - 1]) + 1
        offset = np.where(at == 0, self.offset, 0)
        self._places, self._ends = (self.place + at)[offered], (ends + offset)[offered]
        self._finished = (ends == left[at])[offered]
        at, lengths = at[offered], lengths[offered]
        return Offer(
            ids=self._epoch * total + documents[at],
            starts=(starts + offset)[offered] if order.oversize == "split" else None,
            lengths=lengths,
            more=not last,
            rest_waits=last,
            costs=order.costs_of(documents, at, lengths),
            early=early,
            numbers=documents[at],
        )

    @property
    def _taken_until(self) -> int:
        """The place after the last document that came early."""
        return int(self.taken[-1:].sum()) + 2

    def advance(self, pieces: int) -> None:
        """See `Source`."""
        if not pieces:
            return
        before, entered = self.place, self._places[:pieces]
        place, end, finished = (row[min(pieces, self._due) - 1].item() for row in (entered, self._ends, self._finished))
        self.place, self.offset = (place + 1, 0) if finished else (place, end)
        if pieces >= self._due and finished:
            self.place = self._turns_end  # all documents between have entered before their turn
        self.taken = np.union1d(self.taken, entered[self._due :])
        self.taken = self.taken[self.taken >= self.place]
        self.guess = max(self.place - before, 1) * (1 + self._order.max_early) * 5 // 4 + 1


class StepReader:
    """Yields the `Packing` of one global step after the other; its position is between two of them.

    Document `i` of epoch `e` has the id `e * documents + i` in the packer, because it may still wait when its epoch is
    over. A document that waits at the end of an epoch is trained in the next one; after the last epoch they are
    drained.

    Waiting documents stay within `packer.bounds()`, because only admitted documents are read. If a step would train
    fewer than `min_step_tokens`, more are read (`next_packing`). Only the drained steps at the end may be smaller.

    Attributes:
        epoch: the present epoch.
        step: global steps so far.
    """

    def __init__(self, order: ReadingOrder, packer: wlb.Packer) -> None:
        """Begins with epoch 0 and the configuration of `packer`, which is not changed."""
        self._order = order
        self._config = packer
        self._packer = packer.empty_copy()
        self._position = 0
        self._offset = 0  # tokens of the current document that have entered
        self._taken = np.empty(0, np.int64)  # places of documents that entered before their turn
        self._guess = 64
        self._chain = SavedChain()
        self._saved: dict[str, Any] | None = None  # the state at this place, made on request
        self.epoch = 0
        self.step = 0

    @classmethod
    def over(
        cls,
        lengths: ArrayLike,
        packer: wlb.Packer,
        *,
        tokens_per_batch: int | None,
        min_step_tokens: int | None,
        shuffle: bool,
        seed: int,
        num_epochs: int,
        max_early: int,
        costs: ArrayLike | Callable[[int], Any] | None,
    ) -> StepReader:
        """Begins with documents of these lengths. The arguments are those of `wlb.torch.BalancedBatchSampler`.

        Raises:
            wlb.WlbError: an argument is invalid; a document is too long for the packer.
        """
        check_integer("num_epochs", num_epochs, minimum=1)
        check_max_early(max_early, packer)
        check_integer("seed", seed, minimum=-(2**63))
        if packer.pending:
            raise error("packer", f"holds {packer.pending} documents; give one that is new", value=packer.pending)
        tokens_per_batch = batch_tokens(packer, tokens_per_batch)
        check_given(costs, packer)
        limit = packer.max_document_tokens
        corpus = Corpus.of(lengths, longest=limit if packer.oversize == "error" else None)
        order = ReadingOrder(
            corpus=corpus,
            tokens_per_batch=tokens_per_batch,
            min_step_tokens=least_tokens(packer, tokens_per_batch, min_step_tokens),
            shuffle=bool(shuffle),
            seed=int(seed),
            num_epochs=num_epochs,
            oversize=packer.oversize,
            limit=limit,
            max_early=max_early,
            costs=None if costs is None else CorpusCosts(costs, packer, corpus.lengths),
        )
        if packer.oversize == "split":
            warn_of_long("the longest document", corpus.longest, tokens_per_batch)
        return cls(order, packer)

    @property
    def packer(self) -> wlb.Packer:
        """A packer with the configuration, without documents."""
        return self._config

    @property
    def pending(self) -> int:
        """Pieces that wait."""
        return self._packer.pending

    @property
    def pending_tokens(self) -> int:
        """Tokens that wait."""
        return self._packer.pending_tokens

    @property
    def oldest_wait(self) -> int:
        """Iterations for which the oldest waiting document has waited."""
        return self._packer.oldest_wait

    def metrics(self) -> wlb.PackerMetrics:
        """Balance and delay so far."""
        return self._packer.metrics()

    def copy(self) -> StepReader:
        """A copy that continues from here independently."""
        result = StepReader(self._order, self._config)
        result._restore(self._state())
        return result

    @property
    def ended(self) -> bool:
        """Whether the epoch has no further step."""
        if self._position < self._order.corpus.lengths.size:
            return False
        return self.pending == 0 or self.epoch + 1 < self._order.num_epochs

    def next_step(self) -> wlb.Packing:
        """Packs the next step of an epoch that has not ended. O(its documents + those that wait)."""
        chain = SavedChain.after(self._state())
        if self._position == self._order.corpus.lengths.size:
            packing = self._packer.drain()
        else:
            ahead = DocumentsAhead(
                self._order,
                self._packer,
                epoch=self.epoch,
                place=self._position,
                offset=self._offset,
                taken=self._taken,
                guess=self._guess,
            )
            self._packer, packing = next_packing(self._packer, ahead, min_step_tokens=self._order.min_step_tokens)
            self._position, self._offset, self._guess = ahead.place, ahead.offset, ahead.guess
            self._taken = ahead.taken
        self.step += 1
        self._chain, self._saved = chain, None
        return packing

    def total_steps(self) -> int:
        """Global steps of the whole run, with those already done. O(documents left), because it plans them all."""
        reader = self.copy()
        while reader.epoch < self._order.num_epochs:
            while not reader.ended:
                reader.next_step()
            reader.next_epoch()
        return reader.step

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch."""
        self.set_epoch(self.epoch + 1)

    def documents(self, micro_batch: wlb.MicroBatch) -> NDArray[np.int64]:
        """int64 [pieces]: which document of the corpus each piece is from."""
        return micro_batch.document_ids % self._order.corpus.lengths.size

    @property
    def lengths(self) -> NDArray[Any]:
        """Int [documents], tokens of each."""
        return self._order.corpus.lengths

    def elements(self, micro_batch: wlb.MicroBatch) -> list[int | Piece]:
        """Numbers of documents of the corpus, or pieces of them, that make a micro-batch of a plan."""
        documents = self.documents(micro_batch)
        whole = np.asarray(self.lengths[documents]) == micro_batch.lengths
        rows = zip(
            documents.tolist(), micro_batch.starts.tolist(), micro_batch.lengths.tolist(), whole.tolist(), strict=True
        )
        return [number if is_whole else Piece(number, start, length) for number, start, length, is_whole in rows]

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of `epoch` with the waiting documents. Nothing happens if it is the present one.

        Raises:
            wlb.WlbError: documents of this or a later epoch still wait, and would be trained twice.
        """
        if epoch == self.epoch:
            return
        check_integer("epoch", epoch, minimum=0)
        if (epoch + 1) * self._order.corpus.lengths.size >= 2**63:
            raise error("epoch", f"= {epoch}: beyond what ids can count", value=epoch)
        if epoch < self.epoch and self.pending:
            message = f"= {epoch}: epoch {self.epoch} is reached, {self.pending} documents of it or before still wait"
            raise error("epoch", message, value=epoch)
        self._chain = SavedChain.moved(self._state())
        self.epoch, self._position, self._offset, self._saved = epoch, 0, 0, None
        self._taken = np.empty(0, np.int64)

    def describe(self) -> dict[str, Any]:
        """Description of the documents for a ledger: plain JSON values."""
        order = self._order
        return {**self._lengths(), "longest": order.longest, "num_epochs": order.num_epochs}

    def snapshot(self) -> Snapshot:
        """The state, to be written out later; it does not change when the reader continues."""
        state = self._state()
        read = self._position + (self._offset > 0) + self._taken.size
        return Snapshot.of(state, Progress.of(read, state))

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; O(documents that wait)."""
        return self.snapshot().state

    def split(self) -> NDArray[np.int64]:
        """int64 [documents]: numbers of the documents that are split into pieces. O(documents) if there are any."""
        order = self._order
        if order.oversize != "split" or order.corpus.longest <= order.limit:
            return np.empty(0, np.int64)
        return order.corpus.longer_than(order.limit)

    def _lengths(self) -> dict[str, Any]:
        corpus = self._order.corpus
        return {
            "documents": int(corpus.lengths.size),
            "tokens": corpus.tokens,
            "fingerprint": corpus.fingerprint,
        }

    def _state(self) -> dict[str, Any]:
        """The state as it is kept here: taken once, not to be changed."""
        if self._saved is None:
            self._saved = self._chain.sealed(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "lengths": self._lengths(),
                    "shuffle": self._order.shuffle,
                    "seed": self._order.seed,
                    "epoch": self.epoch,
                    "position": self._position,
                    "outside": self._outside(),
                    **({"taken": self._taken.tolist()} if self._taken.size else {}),
                    "step": self.step,
                    "micro_batches": 0,
                    "packer": self._packer.state_dict(),
                    **self._costs(),
                    **self._order.content,
                }
            )
        return self._saved

    def know(self, content: str | None) -> None:
        """Keeps the content of the data set in all states from now on."""
        if content is not None and self._order.content.get("content") != content:
            self._order.content["content"] = content
            self._saved = None

    @property
    def content(self) -> str | None:
        """The `fingerprint` of the data set, if a loader knows it."""
        return self._order.content.get("content")

    def _check_content(self, state: Mapping[str, Any]) -> None:
        """Compares the content of the data set with that of a state, where both are known."""
        saved = state.get("content", self.content)
        if self.content is not None and saved != self.content:
            message = (
                f"was saved with documents of the same lengths and other tokens (content {str(saved)[:8]}; this data "
                f"set has {self.content[:8]}): shuffle with a fixed seed, or leave the shuffle to wlb"
            )
            raise error("state", message, value=saved)

    def other_documents(self, state: Mapping[str, Any]) -> str:
        """What is wrong if a state is of documents of other lengths, and the way on; empty if it is of these.

        Raises:
            wlb.WlbError: it does not say of which.

        Complexity:
            O(documents) if there are more of them now.
        """
        saved, corpus, mine = field(state, "lengths", dict), self._order.corpus, self._lengths()
        wrong = next((name for name, value in mine.items() if field(saved, name, object) != value), None)
        if wrong is None:
            return ""
        before, now = field(saved, "documents", int), int(corpus.lengths.size)
        if 0 < before < now and Corpus.of(corpus.lengths[:before], longest=None).fingerprint == saved["fingerprint"]:
            return (
                f"was saved with {before} documents, behind which this data set has {now - before} more: resume with "
                f"the first {before} alone (torch.utils.data.Subset(dataset, range({before})), or dataset.select), and "
                "train all of them in the next run"
            )
        return (
            f"was saved with {wrong} = {saved[wrong]!r}; this corpus has {mine[wrong]!r}: resume with the documents "
            "that it was saved with"
        )

    def _costs(self) -> dict[str, Any]:
        """Description of the costs that documents bring, for the state."""
        costs = self._order.costs
        return {} if costs is None else {"costs": costs.fingerprint}

    def _outside(self) -> dict[str, list[int]]:
        """The rest of the document that has entered in part."""
        if not self._offset:
            return outside()
        documents, lengths = self._order.documents(self.epoch, self._position, self._position + 1)
        id, length = self.epoch * self._order.corpus.lengths.size + int(documents[0]), int(lengths[0])
        return outside([id], [self._offset], [length - self._offset])

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Resumes at the position of the state; on an error nothing has changed.

        Raises:
            wlb.WlbError: the state was changed after it was saved, or is of other documents, another order, or another
                packer configuration.
        """
        same(state, {"format": FORMAT, "version": VERSION}, "this version of wlb")
        check_seal(state)
        if wrong := self.other_documents(state):
            raise error("state", wrong, value=state["lengths"])
        same(state, {"shuffle": self._order.shuffle, "seed": self._order.seed}, "this sampler")
        if not allow_config_change:
            same(state, self._costs(), "this sampler")
        self._check_content(state)
        total, position, epoch = (
            self._order.corpus.lengths.size,
            field(state, "position", int),
            field(state, "epoch", int),
        )
        if position > total:
            raise error("state", f"has 'position' = {position} beyond the last document", value=position)
        if (epoch + 1) * total >= 2**63:
            raise error("state", f"has 'epoch' = {epoch}, beyond what ids can count", value=epoch)
        read_taken(state, position, total)
        check_outside(read_outside(state), self._config)
        reader = StepReader(self._order, self._config)
        reader._restore(state, allow_config_change=allow_config_change)
        if read_outside(reader._state()) != read_outside(state):
            raise error("state", "has a piece in 'outside' that is not the rest of the document at 'position'")
        latest = int(waiting_pieces(reader._state()).ids.max(initial=-1))
        if latest >= (epoch + 1) * total:
            raise error("state", f"has document {latest} waiting, of an epoch after 'epoch' = {epoch}", value=latest)
        vars(self).update(vars(reader))  # the state was restored into a copy, and is sound

    def _restore(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Stands where `state` does, which has been checked but for its packer."""
        position, epoch, step = (field(state, name, int) for name in ("position", "epoch", "step"))
        rest = read_outside(state)
        offset = rest[0][1] if rest else 0
        self._taken = read_taken(state, position, self._order.corpus.lengths.size)
        packer, chain = self._config.empty_copy(), SavedChain.of(state)
        packer.load_state_dict(field(state, "packer", dict), allow_config_change=allow_config_change)
        self._packer, self._position, self._offset, self.epoch, self.step = packer, position, offset, epoch, step
        self._chain, self._saved = chain, None


def read_taken(state: Mapping[str, Any], position: int, total: int) -> NDArray[np.int64]:
    """int64 [documents]: places of those that entered before their turn, ascending from the position on.

    Raises:
        wlb.WlbError: they are no such places.
    """
    found = state.get("taken", [])
    if not isinstance(found, list) or not all(type(place) is int for place in found):
        raise error("state", "has 'taken' that is no list of whole numbers", value=found)
    places = np.array(found, np.int64)
    if places.size and not (position <= places[0] and places[-1] < total and (np.diff(places) > 0).all()):
        raise error("state", f"has 'taken' that does not ascend from {position} to below {total}", value=found)
    return places
