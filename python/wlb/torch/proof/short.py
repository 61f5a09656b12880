"""Shortens the documents of a step, and lays them out on the ranks as the step does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb.reading.documents import IGNORE, WEIGHTS
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.mean import RoundMean
from wlb.torch.data.step import Step
from wlb.torch.proof.ranks import Ranks

PackedStep: TypeAlias = "Step[PackedBatch] | DynamicCpStep[PackedBatch]"
Key: TypeAlias = tuple[int, int]
Change: TypeAlias = "Callable[[Sequence[Document]], Sequence[Document]]"

_MICRO_BATCHES = 2  # of a rank
_DOCUMENTS = 3  # of a micro-batch
_TOKENS = 64  # of a document, for up to two context-parallel ranks
_GOLDEN = 0.6180339887498949  # its multiples never repeat, modulo 1
NO_LABEL = np.iinfo(np.int64).max
"""The place of the first label of a document without labels."""


@dataclass(frozen=True)
class Document:
    """One document, on every rank.

    Attributes:
        tokens: int64 [tokens].
        labels: int64 [tokens]: what each token predicts, or IGNORE.
        columns: further values of each token by name, [..., tokens]. A document's own position ids are one of them.
        share: what the loss of each of its labels counts in the mean that is meant; None: all labels count alike.
        moved: tokens by which its positions are shifted.
    """

    tokens: Tensor
    labels: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    share: float | None = None
    moved: int = 0

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
        """Whether this is a piece whose last token predicts the next one. The end of a document predicts nothing."""
        return bool((self.labels[-1:] != IGNORE).any())


@dataclass(frozen=True)
class Row:
    """A micro-batch: its documents, and their layout on its context-parallel ranks.

    Attributes:
        documents: in packed order.
        shard: the context-parallel rank of each token.
        first: the first of these ranks, counted among the ranks that share the step.
        paths: for a forest: the indices of each document's tokens in the row, int64 [tokens].
    """

    documents: tuple[Document, ...]
    shard: wlb.Shard
    first: int
    paths: tuple[Tensor, ...] = ()


class Documents(ABC):
    """What short steps of documents and of forests have in common.

    Attributes:
        documents: short documents of each micro-batch, as the loop gets them.
        rows: the same micro-batches for the reference.
        mean: over what the step of a round takes its mean; empty for other steps.
    """

    documents: dict[Any, list[Document]]
    rows: Sequence[Row]
    mean: str = ""

    @abstractmethod
    def step(self, change: Change = list, other: Callable[[int], bool] | None = None) -> Any:
        """This rank's part of the step, after `change` of the documents of each micro-batch.

        Args:
            change: makes other documents of those of a micro-batch.
            other: whether a document, named by its place in the micro-batch, gets other tokens. Of a forest, tokens of
                paths without other tokens stay. Labels of changed documents must be gone.
        """

    def count(self, change: Change = list) -> int:
        """Labels of the whole step, after `change` of the documents of each micro-batch."""
        return sum(each.num_labels for documents in self.documents.values() for each in change(documents))

    @property
    def most_documents(self) -> int:
        """Documents of the micro-batch with the most."""
        return max(map(len, self.documents.values()), default=0)

    @property
    def divided(self) -> bool:
        """Whether several context-parallel ranks share a micro-batch."""
        return any(row.shard.cp_size > 1 for row in self.rows)


class Short(Documents):
    """A step with a few short documents in each micro-batch. Every rank knows all of them.

    Lengths are unequal, so that a mean of means shows. Each micro-batch has at least two documents if it has the
    tokens, so that documents could see each other. Documents with labels are chosen first, then pieces of documents. A
    document is cut around its first label, which may come after a long prompt, so that a mask of labels shows. The last
    document of a micro-batch has labels if any has. One document keeps more tokens than `limit`, if one has so many.

    Args:
        step: this rank's part of the step.
        ranks: the ranks that share it.
        special: tokens that stand for something, and are never put in the place of another.
        limit: tokens, such as those of a window of attention.
        whole: whether all micro-batches are needed, as by schedules of pipelines; else two of a rank are enough.
    """

    def __init__(
        self,
        step: PackedStep,
        ranks: Ranks,
        special: frozenset[int] = frozenset(),
        *,
        limit: int = 0,
        whole: bool = True,
    ) -> None:
        is_cut = isinstance(step, Step) and not whole and len(step.micro_batches) > _MICRO_BATCHES
        step = _with_labels(step) if is_cut else step  # type: ignore[arg-type]
        self._mine = [(_key(step, place), batch) for place, batch in enumerate(step.micro_batches)]
        self._strategies: dict[Key, Any] = {}
        self._first: dict[Key, int] = {}
        lengths: dict[Key, NDArray[np.int64]] = {}
        labelled: dict[Key, list[NDArray[np.int64]]] = {}
        for rank, theirs in enumerate(ranks.gathered([(key, *_labelled(batch)) for key, batch in self._mine])):
            for key, strategy, sizes, ends in theirs:
                self._strategies[key], lengths[key] = strategy, sizes
                self._first.setdefault(key, rank)
                labelled.setdefault(key, []).append(ends)
        self._cp_sizes = {key: len(of_ranks) for key, of_ranks in labelled.items()}
        longest = max(labelled, key=lambda key: (int(lengths[key].max(initial=0)), key), default=None)
        cuts = {
            key: _cuts(
                key[1], self._cp_sizes[key], lengths[key], *np.min(labelled[key], 0), limit=limit * (key == longest)
            )
            for key in labelled
        }
        self.documents = {key: [blank(end - start) for start, end, _ in cuts[key]] for key in sorted(cuts)}
        for theirs in ranks.gathered([(key, _inside(batch, cuts[key])) for key, batch in self._mine]):
            for key, parts in theirs:
                found = self.documents[key]
                found[:] = [_filled_in(*given) for given in zip(found, *zip(*parts, strict=True), strict=True)]
        for key, documents in self.documents.items():
            for document, (*_, goes_on) in zip(documents, cuts[key], strict=True):
                if not goes_on:
                    document.labels[-1:] = IGNORE
        expected: Mapping[Key, Sequence[Document]] = self.documents
        if isinstance(step, Step) and step.mean is not None:
            self.mean = step.mean.mean
            packing: Any = step.packing
            samples = {}  # their numbers in the round
            for key in self.documents:
                of_cuts = np.searchsorted(np.cumsum(lengths[key]), [start for start, *_ in cuts[key]], side="right")
                samples[key] = packing[key[1]].document_ids[of_cuts]
            expected, self.documents = _of_round(self.documents, samples, step.mean)
        self.rows = [
            Row(tuple(documents), self._shard(key, documents), self._first[key]) for key, documents in expected.items()
        ]
        self._step = _of(self.documents, step, [key for key, _ in self._mine]) if is_cut else step
        self._other = Other([document.tokens for row in self.rows for document in row.documents], special)

    def step(self, change: Change = list, other: Callable[[int], bool] | None = None) -> PackedStep:
        """This rank's part of the step, in packed rows."""
        changed = {key: list(change(documents)) for key, documents in self.documents.items()}
        if other is not None:
            changed = {
                key: [
                    replace(each, tokens=self._other(each.tokens)) if other(place) else each
                    for place, each in enumerate(documents)
                ]
                for key, documents in changed.items()
            }
        batches = [self._batch(key, batch, changed[key]) for key, batch in self._mine]
        if isinstance(self._step, DynamicCpStep):
            labels = sum(document.num_labels for documents in changed.values() for document in documents)
            return replace(self._step, micro_batches=batches, num_valid_tokens=labels)
        return replace(self._step, micro_batches=batches)

    def _shard(self, key: Key, documents: Sequence[Document]) -> wlb.Shard:
        lengths = np.array([len(document) for document in documents], np.int64)
        return wlb.shard(lengths, cp_size=self._cp_sizes[key], strategy=self._strategies[key])

    def _batch(self, key: Key, like: PackedBatch, documents: Sequence[Document]) -> PackedBatch:
        shard, whole = self._shard(key, documents), joined(documents)
        mine = torch.from_numpy(shard.rank(like.cp_rank).token_indices.astype(np.int64))
        own = whole[mine]
        entries = like.cu_seqlens.numel()
        fixed = entries > like.shard.lengths.size + 1 and entries > len(documents)
        batch = PackedBatch.of(
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
        moved = torch.tensor([each.moved for each in documents], dtype=torch.int64)
        moved = moved.repeat_interleave(torch.from_numpy(shard.lengths.astype(np.int64)))
        return replace(batch, position_ids=batch.position_ids + moved[mine])


class Other:
    """Exchanges ordinary tokens for others: each for the next one among those of the step.

    Args:
        tokens: int64 [tokens] of each document.
        special: tokens that stay, such as those of images.
    """

    def __init__(self, tokens: Sequence[Tensor], special: frozenset[int]) -> None:
        found = set(torch.cat([torch.empty(0, dtype=torch.int64), *tokens]).tolist())
        ordinary = sorted(found - special) or sorted(found)
        if len(ordinary) < 2:  # every vocabulary has these
            ordinary = sorted({*ordinary, *[token for token in range(3) if token not in special][:2]})
        self._tokens = torch.tensor(ordinary, dtype=torch.int64)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Other tokens, int64 [tokens]."""
        at = torch.searchsorted(self._tokens, tokens).clamp(max=self._tokens.numel() - 1)
        return torch.where(self._tokens[at] == tokens, self._tokens[(at + 1) % self._tokens.numel()], tokens)


def _with_labels(step: Step[Any]) -> Step[Any]:
    """The step with two micro-batches of this rank, which have labels if two have."""
    batches = step.micro_batches
    order = sorted(range(len(batches)), key=lambda place: not batches[place].num_valid_tokens)
    taken = sorted(order[:_MICRO_BATCHES])
    return replace(step, micro_batches=[batches[place] for place in taken], indices=step.indices[taken])


def _of(documents: Mapping[Key, Sequence[Document]], step: Any, mine: Sequence[Key]) -> Step[Any]:
    """The step with a plan of these micro-batches alone."""
    sizes = [[len(each) for each in of_batch] for of_batch in documents.values()]
    packing = wlb.Packing.from_assignment(
        [size for of_batch in sizes for size in of_batch],
        [place for place, of_batch in enumerate(sizes) for _ in of_batch],
        num_micro_batches=len(sizes),
        max_tokens=max(map(sum, sizes)),
        cost_model=wlb.CostModel(attention=1.0, linear=1.0),
    )
    places = {key: place for place, key in enumerate(documents)}
    result: Step[Any] = replace(step, packing=packing, indices=np.array([places[key] for key in mine], np.int64))
    return result


def longest_of(step: Any) -> int:
    """Tokens of the longest document of this rank's micro-batches; 0 for a forest."""
    packed = [batch for batch in step.micro_batches if isinstance(batch, PackedBatch)]
    return max((int(each.shard.lengths[: each.document_ids.numel()].max(initial=0)) for each in packed), default=0)


def joined(documents: Sequence[Document]) -> Document:
    """Concatenates documents."""
    documents = documents or [blank(0)]
    return Document(
        torch.cat([document.tokens for document in documents]),
        torch.cat([document.labels for document in documents]),
        {name: torch.cat([each.columns[name] for each in documents], -1) for name in documents[0].columns},
    )


def teaching_nothing(document: Document) -> Document:
    """A copy of a document without labels."""
    return replace(document, labels=torch.full_like(document.labels, IGNORE))


def moved_on(documents: Sequence[Document]) -> list[Document]:
    """Documents whose positions begin where the shortest document ends, but for the longest.

    The longest document may already have all positions that the model knows.
    """
    sizes = [len(each) for each in documents]
    longest = sizes.index(max(sizes)) if sizes else 0
    return [replace(each, moved=0 if place == longest else min(sizes)) for place, each in enumerate(documents)]


def _key(step: PackedStep, place: int) -> Key:
    """Names a micro-batch of the whole step. The ranks that share the micro-batch give it the same name."""
    if isinstance(step, DynamicCpStep):
        return step.groups[place].first_rank, place
    return -1, int(step.indices[place])


def _labelled(batch: PackedBatch) -> tuple[str, NDArray[np.int64], NDArray[np.int64]]:
    """The strategy of a micro-batch, lengths of its documents, and the places of their labels on this rank.

    The places are int64 [2, documents]: the position of the first label of each document, and the number of tokens
    after its last label; `NO_LABEL` for a document without labels.
    """
    strategy = batch.shard.strategy if batch.shard.strategy in ("contiguous", "per_sequence") else "per_document"
    lengths = batch.shard.lengths[: batch.document_ids.numel()].astype(np.int64)
    at = batch.shard.rank(batch.cp_rank).token_indices[batch.labels.cpu().numpy() != IGNORE]
    ends = np.cumsum(lengths)
    document = np.searchsorted(ends, at, side="right")
    labelled = np.full((2, lengths.size), NO_LABEL)
    np.minimum.at(labelled[0], document, at - (ends - lengths)[document])
    np.minimum.at(labelled[1], document, ends[document] - 1 - at)
    return strategy, lengths, labelled


def _cuts(
    number: int,
    cp_size: int,
    lengths: NDArray[np.int64],
    first: NDArray[np.int64],
    last: NDArray[np.int64],
    *,
    limit: int,
) -> list[tuple[int, int, bool]]:
    """Chooses parts of a micro-batch's documents: begin and end of each, and whether it is a piece that goes on.

    Args:
        number: number of the micro-batch.
        cp_size: number of its context-parallel ranks.
        lengths: lengths of its documents.
        first: position of the first label of each, or `NO_LABEL`.
        last: tokens after the last label of each, or `NO_LABEL`.
        limit: the longest document keeps more tokens than these, if it has them; 0 for none.
    """
    order = np.lexsort((np.arange(lengths.size), last != 0, first == NO_LABEL))
    taken = [place for place in order.tolist() if lengths[place] > 1 or lengths.size == 1][:_DOCUMENTS]
    longest = int(lengths.argmax()) if limit else -1
    if limit and longest not in taken:
        taken[-1] = longest
    taken.sort(key=lambda place: bool(first[place] != NO_LABEL))
    most = _TOKENS * max(1, cp_size // 2)
    cuts = []
    for place, document in enumerate(taken):
        size, begin = int(lengths[document]), int(first[document]) if first[document] != NO_LABEL else 0
        # Unequal in documents, micro-batches and ranks, so that a mean of means differs from the mean.
        share = (number + 1) * _GOLDEN % 1 * (_DOCUMENTS - place) / _DOCUMENTS
        length = min(size, limit + 16 if document == longest else most // 8 + int(share * most * 7 / 8))
        start = 0 if begin < length - 1 else min(begin - (length - 1) // 2, size - length)
        start += int(lengths[:document].sum())
        cuts.append((start, start + length, bool(last[document] == 0)))
    if len(cuts) == 1 and (third := (cuts[0][1] - cuts[0][0]) // 3) > 1:  # so that a row has two documents
        (start, end, goes_on), *_ = cuts
        cuts = [(start, start + third, goes_on), (start + third, end, goes_on)]
    return cuts


def _inside(batch: PackedBatch, cuts: Sequence[tuple[int, int, bool]]) -> list[tuple[Tensor, Document]]:
    """The tokens that this rank has of each part, and their places in it."""
    at = torch.from_numpy(batch.shard.rank(batch.cp_rank).token_indices.astype(np.int64))
    columns = dict(batch.columns) | ({"position_ids": batch.position_ids} if batch.own_positions else {})
    mine = Document(batch.tokens.cpu(), batch.labels.cpu(), {name: column.cpu() for name, column in columns.items()})
    inside = [(start, ((at >= start) & (at < end)).nonzero().flatten()) for start, end, _ in cuts]
    return [(at[here] - start, mine[here]) for start, here in inside]


def blank(size: int) -> Document:
    """A document of token 0 that teaches nothing, to be filled in."""
    return Document(torch.zeros(size, dtype=torch.int64), torch.full((size,), IGNORE, dtype=torch.int64))


def _filled_in(document: Document, places: Tensor, part: Document) -> Document:
    """Writes a part of a document at these places."""
    columns = dict(document.columns)
    for name, values in part.columns.items():
        columns.setdefault(name, values.new_zeros(*values.shape[:-1], len(document)))[..., places] = values
    document.tokens[places], document.labels[places] = part.tokens, part.labels
    return replace(document, columns=columns)


def _of_round(
    documents: Mapping[Key, Sequence[Document]], samples: Mapping[Key, NDArray[np.int64]], mean: RoundMean
) -> tuple[dict[Key, list[Document]], dict[Key, list[Document]]]:
    """Samples of a round as the reference runs them, and as the loop gets them.

    The reference has their shares in the mean, counted here from its definition. The loop has the weights of a plan of
    the short samples (`RoundPlan.weights`), in the column that `round_step` writes.

    Args:
        documents: short samples of each micro-batch.
        samples: number of each in the round.
        mean: what the step trains.
    """
    named = [(key, each, int(of)) for key in documents for each, of in zip(documents[key], samples[key], strict=True)]
    labels = [each.num_labels for _, each, _ in named]
    groups = [int(mean.groups[of]) for *_, of in named]
    parts: list[int] = {"token": [0] * len(named), "sample": [*range(len(named))], "prompt": groups}[mean.mean]
    of_part: dict[int, int] = {}
    for part, count in zip(parts, labels, strict=True):
        of_part[part] = of_part.get(part, 0) + count
    counted = sum(1 for count in of_part.values() if count or mean.count_empty)

    sizes = [len(each) for _, each, _ in named]
    plan = wlb.rl.plan(sizes, dp_size=1, max_tokens=sum(sizes), costs=np.ones(len(sizes)), groups=groups)
    weighs = RoundMean.of(
        plan, np.array(labels), mean.mean, averaged_over=mean.averaged_over, count_empty=mean.count_empty
    )
    expected: dict[Key, list[Document]] = {key: [] for key in documents}
    given: dict[Key, list[Document]] = {key: [] for key in documents}
    for (key, each, of), part, weight in zip(named, parts, weighs.weights.tolist(), strict=True):
        columns = dict(each.columns)
        own = columns.pop(WEIGHTS) / max(float(np.float32(mean.weights[of])), np.finfo(np.float32).tiny)
        share = 1 / (counted * of_part[part]) if of_part[part] else 0.0
        weighted = own * weight if mean.weights[of] else torch.zeros_like(own)
        given[key].append(replace(each, columns=columns | {WEIGHTS: weighted}))
        if not torch.allclose(own, torch.ones_like(own)):
            columns[WEIGHTS] = own
        expected[key].append(replace(each, columns=columns, share=share))
    return expected, given
