"""The global steps of a run over documents of known length."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

import wlb
from wlb._errors import check_integer, error
from wlb._seal import check_seal
from wlb.ledger import waiting_pieces
from wlb.torch.data.packer import StepPacker
from wlb.torch.data.permutation import Permutation
from wlb.torch.data.state import Link, Progress, Snapshot, field, same

FORMAT: Final = "wlb.batch_sampler"
VERSION: Final = 2
_CHUNK = 1 << 20  # lengths looked at together where all of them are


@dataclass(frozen=True)
class Corpus:
    """The lengths of all documents, checked once; the array itself is neither copied nor changed.

    Attributes:
        lengths: int [documents], in memory or mapped from a file.
        tokens: Their sum.
        fingerprint: A hash of them, whatever their type.
    """

    lengths: NDArray[Any]
    tokens: int
    fingerprint: str

    @classmethod
    def of(cls, lengths: ArrayLike, *, longest: int | None) -> Corpus:
        """Reads all lengths once, a block at a time.

        Raises:
            wlb.WlbError: A length is not positive, or above `longest`, or there is none.
        """
        array = np.asanyarray(lengths)
        if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
            message = f"is {array.dtype} of shape {array.shape}, not integers [documents], at least one"
            raise error("lengths", message, value=array.shape)
        tokens, digest = 0, hashlib.blake2b(digest_size=16)
        for first in range(0, array.size, _CHUNK):
            chunk = array[first : first + _CHUNK].astype("<i8")
            bad = chunk < 1 if longest is None else (chunk < 1) | (chunk > longest)
            if bad.any():
                at = int(bad.argmax())
                allowed = "at least 1" if longest is None else f"from 1 to max_document_tokens = {longest}"
                message = f"= {chunk[at]}: a document has {allowed} tokens"
                if chunk[at] > 0:
                    message += '; a packer with oversize="split" or "truncate" accepts it'
                raise error("lengths", message, index=first + at, value=int(chunk[at]))
            tokens += int(chunk.sum())
            digest.update(chunk.tobytes())
        return cls(array, tokens, digest.hexdigest())


@dataclass(frozen=True)
class Order:
    """Which documents make a global batch, in which order: all that must not change in a run, but for the packer.

    Attributes:
        corpus: The documents.
        tokens_per_batch: Tokens that enter the packer in every step.
        shuffle: Whether every epoch has an order of its own.
        seed: Of these orders.
        num_epochs: Epochs of the run.
        longest: What a document counts for at most, in tokens; None: all that it has.
    """

    corpus: Corpus
    tokens_per_batch: int
    shuffle: bool
    seed: int
    num_epochs: int
    longest: int | None

    def next_batch(self, epoch: int, position: int, guess: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Documents and lengths of the global batch that begins at `position`: int64 [documents] each, not empty."""
        total = self.corpus.lengths.size
        permutation = Permutation(total, seed=self.seed, epoch=epoch) if self.shuffle else None
        while True:
            end = min(position + guess, total)
            documents = np.arange(position, end)
            if permutation is not None:
                documents = permutation(documents)
            lengths = np.asarray(self.corpus.lengths[documents], np.int64)
            counted = lengths if self.longest is None else np.minimum(lengths, self.longest)
            offsets = wlb.batch_offsets(counted, tokens_per_batch=self.tokens_per_batch)
            if offsets.size > 2 or end == total:
                return documents[: offsets[1]], lengths[: offsets[1]]
            guess *= 2


class Planner:
    """Gives the `Packing` of one global step after the other, and stands between two of them.

    Document `i` of epoch `e` is known to the packer as `e * documents + i`: it may still wait when its epoch is over.
    A document that waits at the end of an epoch is trained in the next one; after the last they are drained.

    Attributes:
        epoch: The epoch that it stands in.
        step: Global steps so far.
    """

    def __init__(self, order: Order, packer: wlb.Packer) -> None:
        """Begins with epoch 0, with the configuration of `packer`, which is left alone."""
        self._order = order
        self._config = packer
        self._packer = StepPacker(packer)
        self._position = 0
        self._guess = 64
        self._link = Link()
        self._saved: dict[str, Any] | None = None  # the state here, once it was asked for
        self.epoch = 0
        self.step = 0

    @property
    def pending(self) -> int:
        """Pieces that wait."""
        return self._packer.pending

    def metrics(self) -> wlb.PackerMetrics:
        """Balance and delay so far."""
        return self._packer.metrics()

    def copy(self) -> Planner:
        """One that goes on from here on its own."""
        result = Planner(self._order, self._config)
        result._restore(self._state())
        return result

    @property
    def ended(self) -> bool:
        """Whether the epoch has no further step."""
        if self._position < self._order.corpus.lengths.size:
            return False
        return self.pending == 0 or self.epoch + 1 < self._order.num_epochs

    def next_step(self) -> wlb.Packing:
        """Packs the next global batch of an epoch that has not ended. O(its documents + those that wait).

        Nothing new enters while a whole global batch is carried over: documents of many batches each, split, would
        else arrive faster than they can be trained.
        """
        link = Link.after(self._state())
        total = self._order.corpus.lengths.size
        if self._position == total:
            packing = self._packer.drain()
        elif self._packer.carried_tokens >= self._order.tokens_per_batch:
            packing = self._packer.push([], [])
        else:
            documents, lengths = self._order.next_batch(self.epoch, self._position, self._guess)
            packing = self._packer.push(lengths, ids=self.epoch * total + documents)
            self._position += documents.size
            self._guess = documents.size + documents.size // 4 + 1
        self.step += 1
        self._link, self._saved = link, None
        return packing

    def total_steps(self) -> int:
        """Global steps of the whole run, those done included; O(documents to come), for it plans them all."""
        planner = self.copy()
        while planner.epoch < self._order.num_epochs:
            while not planner.ended:
                planner.next_step()
            planner.next_epoch()
        return planner.step

    def next_epoch(self) -> None:
        """Goes to the beginning of the next epoch."""
        self.set_epoch(self.epoch + 1)

    def documents(self, micro_batch: wlb.MicroBatch) -> NDArray[np.int64]:
        """int64 [pieces]: which document of the corpus each piece is from."""
        return micro_batch.document_ids % self._order.corpus.lengths.size

    def set_epoch(self, epoch: int) -> None:
        """Goes to the beginning of `epoch`; what waits goes along. Nothing happens if it is the present one.

        Raises:
            wlb.WlbError: Documents of this or a later epoch still wait: they would be trained twice.
        """
        if epoch == self.epoch:
            return
        check_integer("epoch", epoch, minimum=0)
        if epoch < self.epoch and self.pending:
            message = f"= {epoch}: epoch {self.epoch} is reached, {self.pending} documents of it or before still wait"
            raise error("epoch", message, value=epoch)
        self._link = Link.moved(self._state())
        self.epoch, self._position, self._saved = epoch, 0, None

    def describe(self) -> dict[str, Any]:
        """What a ledger has to know of the documents. Plain JSON values."""
        order = self._order
        return {**self._lengths(), "longest": order.longest, "num_epochs": order.num_epochs}

    def snapshot(self) -> Snapshot:
        """The state, to be written out later; it does not change when the planner goes on."""
        state = self._state()
        return Snapshot.of(state, Progress.of(self._position, state["packer"]))

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; O(documents that wait)."""
        return self.snapshot().state

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
            self._saved = self._link.sealed(
                {
                    "format": FORMAT,
                    "version": VERSION,
                    "lengths": self._lengths(),
                    "shuffle": self._order.shuffle,
                    "seed": self._order.seed,
                    "epoch": self.epoch,
                    "position": self._position,
                    "step": self.step,
                    "micro_batches": 0,
                    **self._packer.state_dict(),
                }
            )
        return self._saved

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Goes on where the saved one stood; on an error nothing has changed.

        Raises:
            wlb.WlbError: The state was changed after it was saved, or is of other documents, another order, or another
                packer configuration.
        """
        same(state, {"format": FORMAT, "version": VERSION}, "this version of wlb")
        check_seal(state)
        same(field(state, "lengths", dict), self._lengths(), "this corpus")
        same(state, {"shuffle": self._order.shuffle, "seed": self._order.seed}, "this sampler")
        total, position, epoch = (
            self._order.corpus.lengths.size,
            field(state, "position", int),
            field(state, "epoch", int),
        )
        if position > total:
            raise error("state", f"has 'position' = {position} beyond the last document", value=position)
        if (epoch + 1) * total >= 2**63:
            raise error("state", f"has 'epoch' = {epoch}, beyond what ids can count", value=epoch)
        planner = Planner(self._order, self._config)
        planner._restore(state, allow_config_change=allow_config_change)
        latest = int(waiting_pieces(planner._state()["packer"]).ids.max(initial=-1))
        if latest >= (epoch + 1) * total:
            raise error("state", f"has document {latest} waiting, of an epoch after 'epoch' = {epoch}", value=latest)
        self._restore(state, allow_config_change=allow_config_change)

    def _restore(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """Stands where `state` does, which has been checked but for its packer."""
        position, epoch, step = (field(state, name, int) for name in ("position", "epoch", "step"))
        packer, link = StepPacker(self._config), Link.of(state)
        packer.load_state_dict(state, allow_config_change=allow_config_change)
        self._packer, self._position, self.epoch, self.step = packer, position, epoch, step
        self._link, self._saved = link, None
