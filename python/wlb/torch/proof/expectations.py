"""The table of known faults, and the loss and gradient that a model would have under each of them.

A fault changes the labels of tokens, their positions, which of them see each other, or the groups over which means are
taken. Its expectation is a list of runs: rows that one rank runs alone. The sum of their losses, with its gradient, is
what training would give under the fault. The fault with the nearest gradient explains what was seen, if it is as near
as
rounding allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

import numpy as np
import torch
from torch import Tensor

from wlb.torch.data.batch import IGNORE
from wlb.torch.proof.short import Document, Row, joined, teaching_nothing


@dataclass(frozen=True)
class Run:
    """One row through the model, alone on one rank.

    Attributes:
        document: The tokens of the row.
        weight: The factor of the sum of their losses.
        lengths: Lengths of the documents in the row; by default it is one document.
        positions: int64 [tokens]; by default those of the document, or counted from 0.
    """

    document: Document
    weight: float = 1.0
    lengths: tuple[int, ...] = ()
    positions: Tensor | None = None


class Tokens:
    """All tokens of the documents of a micro-batch, or of the samples of its forest: int64 [tokens] each.

    Attributes:
        whole: The tokens with their labels and columns.
        row: The micro-batch.
        number: Number of the micro-batch.
        document: Number of each token's document.
        place: Position of each token in its document.
        at: Index of each token in the micro-batch; samples of a forest share some.
        rank: Context-parallel rank of each token.
        on_rank: Index of each token on its rank.
        again: Index of each token among those of its document on its rank.
        last: Whether each token is the last of its document, bool.
    """

    def __init__(self, number: int, row: Row) -> None:
        self.whole, self.row, self.number = joined(row.documents), row, number
        lengths = torch.tensor([len(document) for document in row.documents], dtype=torch.int64)
        self.document = torch.arange(lengths.numel()).repeat_interleave(lengths)
        self.place = torch.arange(len(self.whole)) - (lengths.cumsum(0) - lengths)[self.document]
        self.last = self.place == lengths[self.document] - 1
        self.at = torch.cat(row.paths) if row.paths else torch.arange(len(self.whole))
        held = torch.zeros(2, row.shard.num_tokens, dtype=torch.int64)
        self._of_ranks = [
            torch.from_numpy(row.shard.rank(rank).token_indices.astype(np.int64)) for rank in range(row.shard.cp_size)
        ]
        for rank, mine in enumerate(self._of_ranks):
            held[0, mine], held[1, mine] = rank, torch.arange(mine.numel())
        self.rank, self.on_rank = held[:, self.at]
        self.again = torch.zeros_like(self.place)
        for part in set((parts := self.rank * MANY + self.document).tolist()):
            here = (parts == part).nonzero().flatten()
            self.again[here] = torch.arange(here.numel())

    def following(self, values: Tensor) -> Tensor:
        """The next value on the same rank, for each token."""
        result = torch.full_like(values, IGNORE)
        for mine in self._of_ranks:
            result[mine[:-1]] = values[mine[1:]]
        return result


Of: TypeAlias = "Callable[[Tokens], Tensor]"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """A fault: how it changes a step, and what to do about it.

    Attributes:
        name: One or two words.
        remedy: What is wrong, and the way out. The text follows the word "model".
        labels: Label of each token.
        positions: Position of each token; by default that in its document.
        sees: A number for each token: tokens with the same number see each other.
        unit: A number for each token: the loss is the mean of the means over tokens with the same number; by default
            the mean over all tokens.
        behind: Whether documents come after those before them in the row, though they do not see them.
        copies: Whether gradients of weights that pipeline stages share are added up.
        divided: Whether only steps with context-parallel ranks can have the fault.
    """

    name: str
    remedy: str
    labels: Of = lambda tokens: tokens.whole.labels
    positions: Of | None = None
    sees: Of = lambda tokens: tokens.document
    unit: Of = lambda tokens: torch.zeros_like(tokens.document)
    behind: bool = False
    copies: bool = True
    divided: bool = False

    def runs(self, rows: Sequence[Row]) -> list[Run]:
        """The runs whose sum training would give under the fault, up to a factor."""
        found: list[tuple[int, Run]] = []
        for number, row in enumerate(rows):
            tokens = Tokens(number, row)
            labels, sees, unit = self.labels(tokens), self.sees(tokens), self.unit(tokens)
            positions = None if self.positions is None else self.positions(tokens)
            for segment in sorted(set(sees.tolist())):
                here = (sees == segment).nonzero().flatten()
                for of in sorted(set(unit[here].tolist())):
                    learnt = replace(tokens.whole, labels=labels.where(unit == of, IGNORE))[here]
                    run = Run(learnt, positions=None if positions is None else positions[here])
                    found.append((of, _behind(run, int(here[0])) if self.behind else run))
        counts = Counter[int]()
        for of, run in found:
            counts[of] += run.document.num_labels
        units = sum(count > 0 for count in counts.values())
        learning = [replace(run, weight=1 / (counts[of] * units)) for of, run in found if run.document.num_labels]
        return learning or [found[0][1]]


def _behind(run: Run, start: int) -> Run:
    """A run whose positions continue: the document comes after another one as long as all before it together."""
    before = teaching_nothing(run.document[torch.zeros(start, dtype=torch.int64)])  # any tokens do
    whole = joined([before, run.document])
    lengths = (start, len(run.document)) if start else (len(run.document),)
    return Run(whole, run.weight, lengths, torch.arange(len(whole)))


MEANS: Final = (
    "has the mean of the means of {}, in which tokens of short ones weigh more: divide sums by the labels of the whole "
    "global batch (train_step, token_normalized_loss)"
)
POSITIONS: Final = (
    "is trained at other positions: they go on over the row, or count the tokens of this rank's part. Give it the "
    "batch's position_ids, which begin anew in every document, and do not make positions from the number of tokens"
)
OF_A_RANK: Final = (
    "has attention over the tokens of one context-parallel rank alone: give it the group of the ranks that share the "
    "micro-batch (context_parallel_attention(..., group=...))"
)
SEE_EACH_OTHER: Final = "lets documents of a row see each other: what one teaches changes with those before it. {}"
MANY: Final = 1 << 32  # more than documents, or ranks, of a micro-batch

RIGHT: Final = Expectation(name="divisor", remedy="{}")


def of_one_rank(positions: Of) -> Expectation:
    """Attention over the tokens of one context-parallel rank, with these positions."""
    return Expectation(
        name="attention of a rank",
        remedy=OF_A_RANK,
        sees=lambda of: of.rank * MANY + of.document,
        positions=positions,
        divided=True,
    )


EXPECTATIONS: Final = (
    RIGHT,
    Expectation(name="means", remedy=MEANS.format("documents"), unit=lambda of: of.number * MANY + of.document),
    Expectation(name="means", remedy=MEANS.format("micro-batches"), unit=lambda of: of.number + 0 * of.document),
    Expectation(name="means", remedy=MEANS.format("ranks"), unit=lambda of: of.row.first + 0 * of.document),
    Expectation(
        name="means",
        remedy=MEANS.format("parts of micro-batches"),
        unit=lambda of: of.number * MANY + of.rank,
        divided=True,
    ),
    Expectation(
        name="means",
        remedy=MEANS.format("context-parallel ranks"),
        unit=lambda of: of.row.first + of.rank,
        divided=True,
    ),
    Expectation(
        name="labels shifted twice",
        remedy="is trained with labels shifted twice: each token learns the one after the next. Those of a PackedBatch "
        "are shifted; models that shift by themselves take batch.as_hf()",
        labels=lambda of: of.following(of.whole.labels),
    ),
    Expectation(
        name="labels not shifted",
        remedy="is trained with labels that are not shifted: each token learns itself. Those of a PackedBatch are "
        "shifted; give them to a loss that does not shift, with logits of the same tokens",
        labels=lambda of: of.whole.tokens.where(of.whole.labels != IGNORE, IGNORE),
    ),
    Expectation(
        name="labels shifted in a part",
        remedy="is trained with labels that were shifted on each rank or over whole rows: ends of documents, and of a "
        "rank's part, predict what does not follow them, and masks are left out. Take the batch's labels",
        labels=lambda of: of.following(of.whole.tokens),
    ),
    Expectation(
        name="mask of labels",
        remedy="learns tokens whose labels are masked, such as those of prompts: take the batch's labels, in which "
        "they are IGNORE, not its tokens",
        labels=lambda of: of.whole.labels.where(of.last, of.whole.tokens.roll(-1)),
    ),
    Expectation(
        name="ends of documents",
        remedy="learns the first token of each document from the last one of that before it: take the batch's labels, "
        "in which ends of documents are IGNORE",
        labels=lambda of: of.whole.labels.where(~of.last | (of.document == of.document[-1:]), of.whole.tokens.roll(-1)),
    ),
    Expectation(
        name="tied weights",
        remedy="leaves each copy of a weight that stages share without the gradient of the others: call "
        "TiedWeights.all_reduce_gradients() after the backward passes of each step",
        copies=False,
    ),
    Expectation(name="positions", remedy=POSITIONS, behind=True),
    Expectation(name="positions", remedy=POSITIONS, positions=lambda of: of.on_rank),
    Expectation(name="positions", remedy=POSITIONS, positions=lambda of: of.again, divided=True),
    of_one_rank(lambda of: of.place),
    of_one_rank(lambda of: of.again),
    *(
        Expectation(
            name="attention", remedy=SEE_EACH_OTHER, sees=lambda of: torch.zeros_like(of.document), positions=positions
        )
        for positions in (lambda of: of.place, lambda of: torch.arange(of.place.numel()))
    ),
)
