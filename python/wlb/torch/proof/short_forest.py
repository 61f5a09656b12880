"""Shortens the samples of a forest's step, and lays them out on the ranks as the step does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import wlb
from wlb.reading import documents as data
from wlb.reading.documents import IGNORE
from wlb.torch.data.collate import collate
from wlb.torch.data.forest import ForestBatch, paths_of
from wlb.torch.data.step import Step
from wlb.torch.layers import limit_of, special_tokens
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short import NO_LABEL, Change, Document, Documents, Other, Row, Short, blank
from wlb.torch.training import AnyStep

Ints = NDArray[np.int64]

_OF_ONE_ROOT, _OF_ANOTHER = 3, 1  # samples of a micro-batch
_SHARED = 20  # tokens that samples of one tree keep of their shared tokens
_BEFORE = 4  # tokens before the first that is predicted


def shortened(step: AnyStep, ranks: Ranks, parts: Sequence[nn.Module], *, whole: bool = False) -> Short | ShortForest:
    """The step with a few short documents or samples in each micro-batch, for the model that has these parts.

    Args:
        step: this rank's part of the step.
        ranks: the ranks that share it.
        parts: the model, or this rank's stages.
        whole: as in `Short`.
    """
    special = special_tokens(parts)
    if any(isinstance(batch, ForestBatch) for batch in step.micro_batches):
        return ShortForest(step, ranks, special)  # type: ignore[arg-type]
    return Short(step, ranks, special, limit=limit_of(parts), whole=whole)  # type: ignore[arg-type]


class ShortForest(Documents):
    """A step with a few short samples in each micro-batch. Every rank knows all of them.

    Samples of a tree keep some of their shared tokens, then some of their own from the first predicted token on.
    Lengths are unequal, so that a mean of means shows.
    """

    def __init__(self, step: Step[ForestBatch], ranks: Ranks, special: frozenset[int]) -> None:
        self._step = step
        self._holders: dict[int, dict[int, int]] = {}
        self.documents = self._cut(ranks)
        self.rows = [self._row(key, documents) for key, documents in sorted(self.documents.items())]
        self._other = Other([document.tokens for row in self.rows for document in row.documents], special)

    def step(self, change: Change = list, other: Callable[[int], bool] | None = None) -> Step[ForestBatch]:
        """This rank's part of the step, in which samples share their tokens."""
        batches = []
        for key, batch in zip(self._step.indices.tolist(), self._step.micro_batches, strict=True):
            samples = change(self.documents[key])
            given = [data.Document(each.tokens, number, labels=_own(each)) for number, each in enumerate(samples)]
            made = collate(given, _forest(samples), cp_rank=batch.cp_rank, cp_size=batch.cp_size)
            if other is not None:
                changed = np.ones(made.shard.num_tokens, bool)
                for place, path in enumerate(paths_of(made.shard)):
                    if not other(place):
                        changed[path] = False
                here = torch.from_numpy(changed[made.shard.rank(made.cp_rank).token_indices])
                made = replace(made, tokens=torch.where(here, self._other(made.tokens), made.tokens))
            batches.append(made)
        return replace(self._step, micro_batches=batches)

    def _cut(self, ranks: Ranks) -> dict[int, list[Document]]:
        batches = list(zip(self._step.indices.tolist(), self._step.micro_batches, strict=True))
        first: dict[int, Ints] = {}
        for rank, theirs in enumerate(ranks.gathered([(key, batch.cp_rank, _first(batch)) for key, batch in batches])):
            for key, cp_rank, predicted in theirs:
                self._holders.setdefault(key, {})[cp_rank] = rank
                first[key] = np.minimum(first.get(key, predicted), predicted)
        found: dict[int, list[Document]] = {}
        for theirs in ranks.gathered([(key, _kept(batch, first[key])) for key, batch in batches]):
            for key, samples in theirs:
                held = found.setdefault(key, [blank(size) for size, *_ in samples])
                for document, (_, places, tokens, counts) in zip(held, samples, strict=True):
                    document.tokens[places] = tokens
                    document.labels[counts] = 0  # what is counted; of which token is known once all are here
        for samples in found.values():
            for each in samples:
                follows = each.tokens.roll(-1)
                each.labels.copy_(torch.where(each.labels == IGNORE, IGNORE, follows))
        return found

    def _row(self, key: int, samples: Sequence[Document]) -> Row:
        holders = self._holders[key]
        shard = wlb.shard(_forest(samples), cp_size=len(holders))
        paths = tuple(map(torch.from_numpy, paths_of(shard)))
        return Row(tuple(samples), shard, holders[0], paths)


def _forest(samples: Sequence[Document]) -> wlb.PrefixForest:
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    tokens = torch.cat([torch.empty(0, dtype=torch.int64), *(each.tokens for each in samples)])
    return wlb.PrefixForest.from_tokens(tokens.numpy(), offsets)


def _own(document: Document) -> NDArray[Any]:
    """Labels as a data set has them: for each token, whether it is predicted."""
    counts = np.append(False, (document.labels != IGNORE).numpy()[:-1])
    return np.where(counts, document.tokens.numpy(), IGNORE)


def _first(batch: ForestBatch) -> Ints:
    """First position of each sample that this rank predicts; the largest int64 where it predicts none."""
    first = np.full(batch.document_ids.numel(), NO_LABEL)
    np.minimum.at(first, batch.sample_of.cpu().numpy(), batch.sample_positions.cpu().numpy())
    return first


def _kept(batch: ForestBatch, first: Ints) -> list[tuple[int, Any, Any, Any]]:
    """For each chosen sample: kept tokens; of those on this rank places and rows; places that predict."""
    paths = paths_of(batch.shard)[: first.size]  # without the filler
    row = np.full(batch.shard.num_tokens, -1, np.int64)
    mine = batch.shard.rank(batch.cp_rank).token_indices
    row[mine] = np.arange(mine.size)
    tokens = batch.tokens.cpu().numpy()
    of, at = batch.sample_of.cpu().numpy(), batch.sample_positions.cpu().numpy()
    result = []
    for sample, positions in _chosen(paths, first):
        rows = row[paths[sample][positions]]
        held = rows >= 0
        counts = np.isin(positions, at[of == sample])
        counts[0] = False  # nothing is before it
        predict = np.flatnonzero(counts) - 1
        result.append(
            (
                positions.size,
                torch.from_numpy(np.flatnonzero(held)),
                torch.from_numpy(tokens[rows[held]]),
                torch.from_numpy(predict),
            )
        )
    return result


def _chosen(paths: Sequence[Ints], first: Ints) -> list[tuple[int, Ints]]:
    """Samples, and their positions that are kept."""
    trees: dict[int, list[int]] = {}
    for sample, path in enumerate(paths):
        trees.setdefault(int(path[0]), []).append(sample)
    learns = first < NO_LABEL
    for of_tree in trees.values():
        of_tree.sort(key=lambda sample: (not learns[sample], sample))
    ordered = sorted(trees.values(), key=lambda tree: (-int(learns[tree].sum()), -len(tree), tree[0]))
    result: list[tuple[int, Ints]] = []
    for tree, most in zip(ordered, (_OF_ONE_ROOT, _OF_ANOTHER), strict=False):
        taken = tree[:most]
        shared = _in_common(paths[taken[0]], paths[taken[1]]) if len(taken) > 1 else 0
        for sample in taken:
            size = paths[sample].size
            label = int(first[sample]) if learns[sample] else 0
            common = np.arange(max(0, shared - _SHARED), min(shared, size))
            begin = max(shared, min(label - _BEFORE, size))
            own = np.arange(begin, min(size, begin + 16 + 29 * (len(result) + 1) % 31))
            result.append((sample, np.concatenate([common, own])))
    return result


def _in_common(one: Ints, other: Ints) -> int:
    size = min(one.size, other.size)
    different = np.flatnonzero(one[:size] != other[:size])
    return int(different[0]) if different.size else size
