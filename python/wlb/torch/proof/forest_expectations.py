"""The table of known faults of a forest's step, like the table of `expectations` for documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

import wlb
from wlb.torch.data.batch import IGNORE
from wlb.torch.proof.expectations import EXPECTATIONS, POSITIONS, Expectation, Run, Tokens, of_one_rank
from wlb.torch.proof.short import Document, Row


@dataclass(frozen=True, kw_only=True)
class Joined(Expectation):
    """Attention over the whole row, as if it were one document, or over each node, as if it were one.

    Attributes:
        nodes: Whether attention is over each node instead of the row.
        anew: Whether positions are counted in the row or node, instead of the path.
    """

    nodes: bool
    anew: bool

    def runs(self, rows: Sequence[Row]) -> list[Run]:
        """Each row, once for each prediction of the token with the most: a row has one label for each token."""
        found = []
        for number, row in enumerate(rows):
            of = Tokens(number, row)
            tokens, depth = torch.zeros(2, row.shard.num_tokens, dtype=torch.int64)
            tokens[of.at], depth[of.at] = of.whole.tokens, of.place
            targets: dict[int, list[int]] = defaultdict(list)
            for place, label in zip(of.at.tolist(), of.whole.labels.tolist(), strict=True):
                if label != IGNORE:
                    targets[place].append(label)
            positions = depth
            if self.anew:
                positions = _in_nodes(row) if self.nodes else torch.arange(tokens.numel())
            lengths = tuple(_nodes(row)) if self.nodes else (tokens.numel(),)
            for turn in range(max(map(len, targets.values()), default=0)):
                labels = torch.full_like(tokens, IGNORE)
                for place, predicted in targets.items():
                    if turn < len(predicted):
                        labels[place] = predicted[turn]
                found.append(Run(Document(tokens, labels), lengths=lengths, positions=positions))
        count = sum(run.document.num_labels for run in found)
        return [replace(run, weight=1 / max(count, 1)) for run in found]


def _once(of: Tokens) -> Tensor:
    """Labels in which a prediction that several samples share counts in the first sample alone."""
    labels, seen = of.whole.labels.clone(), set[int]()
    for token in (labels != IGNORE).nonzero().flatten().tolist():
        target = int(of.at[token + 1])
        if target in seen:
            labels[token] = IGNORE
        seen.add(target)
    return labels


def _nodes(row: Row) -> list[int]:
    """Tokens of each node, as they lie in the row."""
    assert isinstance(row.shard, wlb.ForestShard)
    lengths: list[int] = row.shard.forest.lengths.tolist()
    return lengths


def _in_nodes(row: Row) -> Tensor:
    return torch.cat([torch.arange(0), *map(torch.arange, _nodes(row))])


_OTHERS = (
    "sees tokens that are not on its path, those of siblings: run attention by context_parallel_attention with "
    "batch.shard, and no mask of the whole row"
)
_NODES = (
    "sees its own node alone, without what is before it: nodes are no documents. Run attention by "
    "context_parallel_attention with batch.shard"
)
_AT_OTHERS = POSITIONS.replace("which begin anew in every document", "of which siblings have the same")
_EDGES = (
    "learns tokens whose labels are masked, such as those of prompts: take the batch's edges, which are those that "
    "some sample learns, and its edge_weights"
)

FOREST_EXPECTATIONS: Final = (
    *(
        replace(of, remedy=of.remedy.replace("documents", "samples"))
        for of in EXPECTATIONS
        if of.name in ("divisor", "means")
    ),
    Expectation(
        name="weights of edges",
        remedy="counts once what several samples predict: multiply losses of edges by batch.edge_weights, or give "
        "every sample its own with batch.to_samples",
        labels=_once,
    ),
    Expectation(
        name="mask of labels", remedy=_EDGES, labels=lambda of: of.whole.tokens.roll(-1).where(~of.last, IGNORE)
    ),
    Expectation(name="positions", remedy=_AT_OTHERS, positions=lambda of: of.at),
    Expectation(name="positions", remedy=_AT_OTHERS, positions=lambda of: _in_nodes(of.row)[of.at]),
    Expectation(name="positions", remedy=_AT_OTHERS, positions=lambda of: of.on_rank, divided=True),
    of_one_rank(lambda of: of.place),
    of_one_rank(lambda of: of.on_rank),
    *(Joined(name="attention", remedy=_OTHERS, nodes=False, anew=anew) for anew in (False, True)),
    *(Joined(name="attention of a node", remedy=_NODES, nodes=True, anew=anew) for anew in (False, True)),
)
