"""Shortens the documents of a step, and lays them out on the ranks as the step does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb.torch.data.batch import IGNORE, PackedBatch
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.step import Step
from wlb.torch.proof.ranks import Ranks

PackedStep: TypeAlias = "Step[PackedBatch] | DynamicCpStep[PackedBatch]"
Key: TypeAlias = tuple[int, int, int]

_DOCUMENTS = 3  # of a micro-batch
_TOKENS = 64  # of a document, for each of two context-parallel ranks


@dataclass(frozen=True)
class Document:
    """One document, on every rank.

    Attributes:
        tokens: int64 [tokens].
        labels: int64 [tokens]: what each token predicts, or IGNORE.
        columns: Further values of each token by name, [..., tokens]. A document's own position ids are one of them.
    """

    tokens: Tensor
    labels: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.tokens.numel()

    def __getitem__(self, places: Tensor) -> Document:
        """The tokens at these places, in this order."""
        columns = {name: values[..., places] for name, values in self.columns.items()}
        return Document(self.tokens[places], self.labels[places], columns)

    @property
    def num_labels(self) -> int:
        """Number of labels that count."""
        return int((self.labels != IGNORE).sum())

    @property
    def goes_on(self) -> bool:
        """Whether this is a piece whose last token predicts what follows. The end of a document predicts nothing."""
        return bool((self.labels[-1:] != IGNORE).any())


@dataclass(frozen=True)
class Row:
    """One micro-batch: its documents, and their layout on its context-parallel ranks.

    Attributes:
        documents: In packed order.
        shard: Which tokens lie on which context-parallel rank.
        first: The first of these ranks, counted among the ranks that share the step.
        paths: Of a forest: the places of each document's tokens in the row, int64 [tokens].
    """

    documents: tuple[Document, ...]
    shard: wlb.Shard | wlb.ForestShard
    first: int
    paths: tuple[Tensor, ...] = ()


class Short:
    """A step with a few short documents in each micro-batch. Every rank knows all of them.

    Lengths are unequal, so that a mean of means shows. Each micro-batch has two documents or more if it has the tokens,
    so that documents could see each other. Documents with labels come first in the choice, then pieces of documents. A
    document is cut around its first label, which may stand behind a long prompt. The last document of a micro-batch has
    labels if any has.
    """

    def __init__(self, step: PackedStep, ranks: Ranks) -> None:
        self._step = step
        self._keys = [_key(step, place) for place in range(len(step.micro_batches))]
        self._holders: dict[Key, dict[int, int]] = {}
        self.documents = self._cut(ranks)
        self.rows = [self._row(key, documents) for key, documents in sorted(self.documents.items())]
        self.num_valid_tokens = sum(document.num_labels for row in self.rows for document in row.documents)
        self.num_edges = self.num_valid_tokens

    @property
    def divided(self) -> bool:
        """Whether several context-parallel ranks share a micro-batch."""
        return any(row.shard.cp_size > 1 for row in self.rows)

    def step(self, change: Callable[[Sequence[Document]], Sequence[Document]] = list) -> PackedStep:
        """This rank's part of the step, after `change` of the documents of each micro-batch."""
        changed = {key: change(documents) for key, documents in self.documents.items()}
        batches = [
            self._batch(key, batch, changed[key])
            for key, batch in zip(self._keys, self._step.micro_batches, strict=True)
        ]
        if isinstance(self._step, DynamicCpStep):
            labels = sum(document.num_labels for documents in changed.values() for document in documents)
            return replace(self._step, micro_batches=batches, num_valid_tokens=labels)
        return replace(self._step, micro_batches=batches)

    def _cut(self, ranks: Ranks) -> dict[Key, list[Document]]:
        batches = list(zip(self._keys, self._step.micro_batches, strict=True))
        first: dict[Key, NDArray[np.int64]] = {}
        last: dict[Key, NDArray[np.bool_]] = {}
        sizes: dict[Key, NDArray[np.int32]] = {}
        self._strategies: dict[Key, str] = {}
        mine = [(key, batch.cp_rank, batch.shard.strategy, *_labelled(batch)) for key, batch in batches]
        for rank, theirs in enumerate(ranks.gathered(mine)):
            for key, cp_rank, strategy, lengths, labelled, ended in theirs:
                self._holders.setdefault(key, {})[cp_rank] = rank
                self._strategies[key] = strategy if strategy in ("contiguous", "per_sequence") else "per_document"
                sizes[key] = lengths
                first[key] = np.minimum(first.get(key, labelled), labelled)
                last[key] = last.get(key, ended) | ended
        windows = {
            key: _windows(key, len(self._holders[key]), sizes[key], first[key], last[key]) for key in sorted(sizes)
        }
        found: dict[Key, list[Document]] = {
            key: [_empty(end - start) for start, end, _ in of_row] for key, of_row in windows.items()
        }
        for theirs in ranks.gathered([(key, _inside(batch, windows[key])) for key, batch in batches]):
            for key, parts in theirs:
                for number, (places, part) in enumerate(parts):
                    found[key][number] = _filled_in(found[key][number], places, part)
        for key, of_row in windows.items():
            for document, (_, _, goes_on) in zip(found[key], of_row, strict=True):
                if not goes_on:
                    document.labels[-1:] = IGNORE
        return found

    def _row(self, key: Key, documents: Sequence[Document]) -> Row:
        return Row(tuple(documents), self._shard(key, documents), self._holders[key][0])

    def _shard(self, key: Key, documents: Sequence[Document]) -> wlb.Shard:
        lengths = np.array([len(document) for document in documents], np.int64)
        strategy: Any = self._strategies[key]
        return wlb.shard(lengths, cp_size=len(self._holders[key]), strategy=strategy)

    def _batch(self, key: Key, like: PackedBatch, documents: Sequence[Document]) -> PackedBatch:
        shard = self._shard(key, documents)
        mine = torch.from_numpy(shard.rank(like.cp_rank).token_indices.astype(np.int64))
        whole = joined(documents)
        own = whole[mine]
        entries = like.cu_seqlens.numel()
        fixed = entries > like.shard.lengths.size + 1 and entries > len(documents)
        return PackedBatch.of(
            own.tokens,
            own.labels,
            document_ids=list(range(len(documents))),
            shard=shard,
            cp_rank=like.cp_rank,
            num_valid_tokens=whole.num_labels,
            cp_first_rank=like.cp_first_rank,
            cu_seqlens_size=entries if fixed else None,
            columns=own.columns,
        )


def joined(documents: Sequence[Document]) -> Document:
    """Concatenates documents."""
    empty = torch.empty(0, dtype=torch.int64)
    names = documents[0].columns if documents else ()
    return Document(
        torch.cat([empty, *(document.tokens for document in documents)]),
        torch.cat([empty, *(document.labels for document in documents)]),
        {name: torch.cat([document.columns[name] for document in documents], -1) for name in names},
    )


def teaching_nothing(document: Document) -> Document:
    """The same tokens without labels."""
    return replace(document, labels=torch.full_like(document.labels, IGNORE))


def _key(step: PackedStep, place: int) -> Key:
    """Names a micro-batch of the whole step. The ranks that share the micro-batch give it the same name."""
    if isinstance(step, DynamicCpStep):
        return 1, place, step.groups[place].first_rank
    return 0, int(step.indices[place]), 0


def _labelled(batch: PackedBatch) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """Length of each document, its first token with a label on this rank, and whether its last token has a label."""
    lengths = batch.shard.lengths[: batch.document_ids.numel()]
    first, last = np.full(lengths.size, np.iinfo(np.int64).max), np.zeros(lengths.size, bool)
    labels = batch.labels.cpu().numpy()
    at = batch.shard.rank(batch.cp_rank).token_indices[labels != IGNORE]
    starts = np.cumsum(lengths) - lengths
    document = np.searchsorted(starts + lengths, at, side="right")
    place = at - starts[document]
    np.minimum.at(first, document, place)
    last[document[place == lengths[document] - 1]] = True
    return lengths, first, last


def _windows(
    key: Key, cp_size: int, lengths: NDArray[np.int32], first: NDArray[np.int64], last: NDArray[np.bool_]
) -> list[tuple[int, int, bool]]:
    """Chooses parts of a micro-batch: begin, end, and whether the last token predicts what follows."""
    learns = first < lengths
    order = np.lexsort((np.arange(lengths.size), ~last, ~learns))
    taken = [int(number) for number in order if lengths[number] > 1 or lengths.size == 1][:_DOCUMENTS]
    taken.sort(key=lambda number: bool(learns[number]))
    starts = np.cumsum(lengths) - lengths
    # From where on, how long, the first label in it, and whether it goes on.
    parts = [(int(starts[n]), int(lengths[n]), int(first[n]) if learns[n] else 0, bool(last[n])) for n in taken]
    if len(parts) == 1 and (third := parts[0][1] // 3) > 1:  # so that a row has what may see each other
        start, size, begin, goes_on = parts[0]
        parts = [(start, third, begin % third, goes_on), (start + third, size - third, max(begin - third, 0), goes_on)]
    most = _TOKENS * max(1, cp_size // 2)
    result = []
    for place, (start, size, begin, goes_on) in enumerate(parts):
        # Unequal, so that a mean of means is another one.
        length = min(size, most // 4 + 29 * (_DOCUMENTS * key[1] + place) % (most * 3 // 4))
        start += 0 if begin < length - 1 else min(begin - (length - 1) // 2, size - length)
        result.append((start, start + length, goes_on))
    return result


def _inside(batch: PackedBatch, windows: Sequence[tuple[int, int, bool]]) -> list[tuple[Tensor, Document]]:
    """The tokens that this rank has of each window, and their places in the window."""
    at = torch.from_numpy(batch.shard.rank(batch.cp_rank).token_indices.astype(np.int64))
    columns = dict(batch.columns) | ({"position_ids": batch.position_ids} if batch.own_positions else {})
    mine = Document(batch.tokens.cpu(), batch.labels.cpu(), {name: column.cpu() for name, column in columns.items()})
    inside = [(start, ((at >= start) & (at < end)).nonzero().flatten()) for start, end, _ in windows]
    return [(at[here] - start, mine[here]) for start, here in inside]


def _empty(size: int) -> Document:
    return Document(torch.zeros(size, dtype=torch.int64), torch.full((size,), IGNORE, dtype=torch.int64))


def _filled_in(document: Document, places: Tensor, part: Document) -> Document:
    """Writes a part of a document at these places."""
    columns = dict(document.columns)
    for name, values in part.columns.items():
        columns.setdefault(name, values.new_zeros(*values.shape[:-1], len(document)))[..., places] = values
    document.tokens[places], document.labels[places] = part.tokens, part.labels
    return replace(document, columns=columns)
