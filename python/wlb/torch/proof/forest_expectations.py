"""The table of known faults of a forest's step, as `expectations` has it of documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import torch
from torch import Tensor

import wlb
from wlb.torch.data.batch import IGNORE
from wlb.torch.proof.expectations import MEANS, POSITIONS, Expectation, Run, Runs, mean, means, right
from wlb.torch.proof.short import Document, Row


def _parts(unit: Callable[[Row, int], Hashable]) -> Runs:
    """The mean of the means of what context-parallel ranks hold."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        found: list[tuple[Hashable, Run]] = []
        for row in rows:
            for rank, mine in enumerate(_held(row)):
                for document, path in _samples(row):
                    labels = torch.where(mine[path], document.labels, IGNORE)
                    found.append((unit(row, rank), Run(replace(document, labels=labels))))
        counts: dict[Hashable, int] = defaultdict(int)
        for key, run in found:
            counts[key] += run.document.num_labels
        units = sum(count > 0 for count in counts.values())
        return [replace(run, weight=1 / (counts[key] * units)) for key, run in found if run.document.num_labels]

    return runs


def _once(rows: Sequence[Row]) -> list[Run]:
    """What several samples predict counts in the first alone."""
    result = []
    for row in rows:
        seen: set[int] = set()
        for document, path in _samples(row):
            labels = document.labels.clone()
            for place in (labels[:-1] != IGNORE).nonzero().flatten().tolist():
                target = int(path[place + 1])
                if target in seen:
                    labels[place] = IGNORE
                seen.add(target)
            result.append(Run(replace(document, labels=labels)))
    return mean(result)


def _all_tokens(rows: Sequence[Row]) -> list[Run]:
    """Every token of a sample predicts the next."""
    result = []
    for row in rows:
        for document, _ in _samples(row):
            labels = document.tokens.roll(-1)
            labels[-1:] = IGNORE
            result.append(Run(replace(document, labels=labels)))
    return mean(result)


def _positions(of_row: Callable[[Row], Tensor]) -> Runs:
    """Samples at other positions, which each token of the row has."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        return mean([Run(document, positions=of_row(row)[path]) for row in rows for document, path in _samples(row)])

    return runs


def _in_the_row(row: Row) -> Tensor:
    return torch.arange(row.shard.num_tokens)


def _on_a_rank(row: Row) -> Tensor:
    result = torch.empty(row.shard.num_tokens, dtype=torch.int64)
    for mine in _held(row):
        result[mine] = torch.arange(int(mine.sum()))
    return result


def _in_nodes(row: Row) -> Tensor:
    return torch.cat([torch.arange(0), *map(torch.arange, _nodes(row))])


def _joined(*, nodes: bool, anew: bool) -> Runs:
    """Attention over the whole row, as if it were one document, or over each node, as if it were one."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        result = []
        for row in rows:
            tokens = torch.zeros(row.shard.num_tokens, dtype=torch.int64)
            depth = torch.zeros_like(tokens)
            targets: dict[int, list[int]] = defaultdict(list)
            for document, path in _samples(row):
                tokens[path], depth[path] = document.tokens, torch.arange(len(document))
                for place in (document.labels != IGNORE).nonzero().flatten().tolist():
                    targets[int(path[place])].append(int(document.labels[place]))
            positions = (_in_nodes(row) if nodes else _in_the_row(row)) if anew else depth
            lengths = tuple(_nodes(row)) if nodes else (tokens.numel(),)
            # A row has one label a token: as many rows as the token that predicts most often has predictions.
            for turn in range(max(map(len, targets.values()), default=0)):
                labels = torch.full_like(tokens, IGNORE)
                for place, predicted in targets.items():
                    if turn < len(predicted):
                        labels[place] = predicted[turn]
                result.append(Run(Document(tokens, labels), lengths=lengths, positions=positions))
        return mean(result)

    return runs


def _attention_of_a_rank(*, local: bool) -> Runs:
    """Tokens see those of their path that lie on their rank, at right positions or at those of the rank."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        result = []
        for row in rows:
            on_rank = _on_a_rank(row)
            for mine in _held(row):
                for document, path in _samples(row):
                    here = mine[path].nonzero().flatten()
                    if here.numel():
                        result.append(Run(document[here], positions=on_rank[path[here]] if local else here))
        return mean(result)

    return runs


def _held(row: Row) -> list[Tensor]:
    """Of each context-parallel rank which tokens of the row it holds: bool [tokens]."""
    result = []
    for rank in range(row.shard.cp_size):
        held = torch.zeros(row.shard.num_tokens, dtype=torch.bool)
        held[torch.from_numpy(row.shard.rank(rank).token_indices.astype(np.int64))] = True
        result.append(held)
    return result


def _samples(row: Row) -> list[tuple[Document, Tensor]]:
    """Samples with the places of their tokens in the row."""
    return list(zip(row.documents, row.paths, strict=True))


def _nodes(row: Row) -> list[int]:
    """Tokens of each node, as they lie in the row."""
    assert isinstance(row.shard, wlb.ForestShard)
    lengths: list[int] = row.shard.forest.lengths.tolist()
    return lengths


_OTHERS = (
    "sees tokens that are not on its path, those of siblings: run attention by context_parallel_attention with "
    "batch.shard, and no mask of the whole row"
)
_NODES = (
    "sees its own node alone, without what is before it: nodes are no documents. Run attention by "
    "context_parallel_attention with batch.shard"
)
_RANK = (
    "has attention over the tokens of one context-parallel rank alone: give it the group of the ranks that share the "
    "micro-batch (context_parallel_attention(..., group=...))"
)
_AT_OTHERS = POSITIONS.replace("which begin anew in every document", "of which siblings have the same")

FOREST_EXPECTATIONS: Final[tuple[Expectation, ...]] = (
    Expectation("divisor", right, "{}"),
    Expectation("means", means(lambda row, rank, place: (id(row), place)), MEANS.format("samples")),
    Expectation("means", means(lambda row, rank, place: id(row)), MEANS.format("micro-batches")),
    Expectation("means", means(lambda row, rank, place: row.first), MEANS.format("ranks")),
    Expectation(
        "means", _parts(lambda row, rank: (id(row), rank)), MEANS.format("parts of micro-batches"), divided=True
    ),
    Expectation(
        "means", _parts(lambda row, rank: row.first + rank), MEANS.format("context-parallel ranks"), divided=True
    ),
    Expectation(
        "weights of edges",
        _once,
        "counts once what several samples predict: multiply losses of edges by batch.edge_weights, or give every "
        "sample its own with batch.to_samples",
    ),
    Expectation(
        "mask of labels",
        _all_tokens,
        "learns tokens whose labels are masked, such as those of prompts: take the batch's edges, which are those that "
        "some sample learns, and its edge_weights",
    ),
    Expectation("positions", _positions(_in_the_row), _AT_OTHERS),
    Expectation("positions", _positions(_in_nodes), _AT_OTHERS),
    Expectation("positions", _positions(_on_a_rank), _AT_OTHERS, divided=True),
    *(Expectation("attention of a rank", _attention_of_a_rank(local=of), _RANK, divided=True) for of in (False, True)),
    *(Expectation("attention", _joined(nodes=False, anew=anew), _OTHERS) for anew in (False, True)),
    *(Expectation("attention of a node", _joined(nodes=True, anew=anew), _NODES) for anew in (False, True)),
)
