"""The table of known faults, and the loss and gradient that a model would have under each of them.

An expectation is a list of runs: rows that one rank runs alone. The sum of their losses, and its gradient, is what
training would give under the fault. The fault whose gradient is the nearest explains what was seen, if it is as near as
rounding allows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

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
        positions: int64 [tokens]; by default the document's own, or from 0 on.
    """

    document: Document
    weight: float = 1.0
    lengths: tuple[int, ...] = ()
    positions: Tensor | None = None


Runs = Callable[[Sequence[Row]], list[Run]]


@dataclass(frozen=True)
class Expectation:
    """A fault: what it makes of a step, and what to do about it.

    Attributes:
        name: One or two words.
        runs: Gives the runs whose sum training would show, up to a factor.
        remedy: What is wrong, and the way out. The text follows the word "model".
        copies: Whether gradients of weights that pipeline stages share are added up.
        divided: Whether only steps with context-parallel ranks can have the fault.
    """

    name: str
    runs: Runs
    remedy: str
    copies: bool = True
    divided: bool = False


def mean(runs: list[Run]) -> list[Run]:
    """Weighs every label alike."""
    count = sum(run.document.num_labels for run in runs)
    return [replace(run, weight=1 / max(count, 1)) for run in runs]


def right(rows: Sequence[Row]) -> list[Run]:
    """What is right: documents one by one, with the same weight for every label."""
    return mean([Run(document) for row in rows for document in row.documents])


def _of_each_rank(row: Row) -> Iterator[tuple[int, Tensor]]:
    """Each context-parallel rank, with the places of its tokens in the row, in its order: int64 [tokens]."""
    for rank in range(row.shard.cp_size):
        yield rank, torch.from_numpy(row.shard.rank(rank).token_indices.astype(np.int64))


def means(unit: Callable[[Row, int, int], Hashable], *, parts: bool = False) -> Runs:
    """The mean of the means of units. A unit is named by row, context-parallel rank and place in the row."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        found: list[tuple[Hashable, Run]] = []
        for row in rows:
            labels = joined(row.documents).labels
            for rank, mine in _of_each_rank(row) if parts else [(0, torch.arange(labels.numel()))]:
                here = torch.full_like(labels, IGNORE)
                here[mine] = labels[mine]
                for place, (document, own) in enumerate(_split(row, here)):
                    found.append((unit(row, rank, place), Run(replace(document, labels=own))))
        counts: dict[Hashable, int] = defaultdict(int)
        for key, run in found:
            counts[key] += run.document.num_labels
        units = sum(count > 0 for count in counts.values())
        return [replace(run, weight=1 / (counts[key] * units)) for key, run in found if run.document.num_labels]

    return runs


def _split(row: Row, values: Tensor) -> list[tuple[Document, Tensor]]:
    """Splits values of a row by its documents."""
    ends = np.cumsum([len(document) for document in row.documents]).tolist()
    return [(each, values[end - len(each) : end]) for each, end in zip(row.documents, ends, strict=True)]


def _labelled(labels_of: Callable[[Row], Tensor]) -> Runs:
    """Documents one by one, with other labels."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        return mean([Run(replace(each, labels=own)) for row in rows for each, own in _split(row, labels_of(row))])

    return runs


def _shifted(values: Callable[[Row], Tensor]) -> Callable[[Row], Tensor]:
    """The next value in the part of each context-parallel rank."""

    def labels_of(row: Row) -> Tensor:
        given = values(row)
        labels = torch.full_like(given, IGNORE)
        for _, mine in _of_each_rank(row):
            labels[mine[:-1]] = given[mine[1:]]
        return labels

    return labels_of


def _not_shifted(row: Row) -> Tensor:
    whole = joined(row.documents)
    return torch.where(whole.labels == IGNORE, IGNORE, whole.tokens)


def _all_tokens(row: Row) -> Tensor:
    """Every token predicts the next, also in prompts."""
    whole = joined(row.documents)
    labels = whole.tokens.roll(-1)
    ends = np.cumsum([len(document) for document in row.documents], dtype=np.int64) - 1
    labels[ends] = whole.labels[ends]
    return labels


def _next_document(row: Row) -> Tensor:
    """The last token of a document predicts the first of the next."""
    whole = joined(row.documents)
    labels = whole.labels.clone()
    ends = np.cumsum([len(document) for document in row.documents], dtype=np.int64)[:-1]
    labels[ends - 1] = whole.tokens[ends]
    return labels


def _after_others(rows: Sequence[Row]) -> list[Run]:
    """Positions go on over the row: each document stands behind another one, as long as all before it are."""
    result = []
    for row in rows:
        start = 0
        for document in row.documents:
            # Any tokens do, from which nothing is learnt.
            before = teaching_nothing(document[torch.zeros(start, dtype=torch.int64)])
            end = start + len(document)
            lengths = (start, len(document)) if start else (len(document),)
            result.append(Run(joined([before, document]), 1.0, lengths, torch.arange(end)))
            start = end
    return mean(result)


def _local_positions(*, anew: bool) -> Runs:
    """Positions count the tokens of a rank: of its part of the row, or anew in each document."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        result = []
        for row in rows:
            positions = torch.empty(row.shard.num_tokens, dtype=torch.int64)
            document = _number_of_each(row)
            for _, mine in _of_each_rank(row):
                positions[mine] = _counted(document[mine]) if anew else torch.arange(mine.numel())
            for each, own in _split(row, positions):
                result.append(Run(each, positions=own))
        return mean(result)

    return runs


def _number_of_each(row: Row) -> Tensor:
    """The number of the document of each token of a row."""
    lengths = torch.tensor([len(document) for document in row.documents], dtype=torch.int64)
    return torch.arange(lengths.numel()).repeat_interleave(lengths)


def _counted(numbers: Tensor) -> Tensor:
    """For each value, how often it occurred before."""
    result = torch.empty_like(numbers)
    for number in set(numbers.tolist()):
        here = numbers == number
        result[here] = torch.arange(int(here.sum()))
    return result


def _attention_of_a_rank(*, local: bool) -> Runs:
    """Tokens see those of their rank and document alone, at right positions or at positions counted on the rank."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        result = []
        for row in rows:
            whole = joined(row.documents)
            number, places = _number_of_each(row), torch.cat([torch.arange(0), *map(_places, row.documents)])
            for _, mine in _of_each_rank(row):
                for document in sorted(set(number[mine].tolist())):
                    here = mine[number[mine] == document]
                    positions = torch.arange(here.numel()) if local else places[here]
                    result.append(Run(whole[here], positions=positions))
        return mean(result)

    return runs


def _places(document: Document) -> Tensor:
    return torch.arange(len(document))


def _one_document(*, anew: bool) -> Runs:
    """The row is one document, with positions that go on or begin anew."""

    def runs(rows: Sequence[Row]) -> list[Run]:
        result = []
        for row in rows:
            if row.documents:
                whole = joined(row.documents)
                positions = torch.cat([*map(_places, row.documents)]) if anew else _places(whole)
                result.append(Run(whole, positions=positions))
        return mean(result)

    return runs


MEANS: Final = (
    "has the mean of the means of {}, in which tokens of short ones weigh more: divide sums by the labels of the whole "
    "global batch (train_step, token_normalized_loss)"
)
POSITIONS: Final = (
    "is trained at other positions: they go on over the row, or count the tokens of this rank's part. Give it the "
    "batch's position_ids, which begin anew in every document, and do not make positions from the number of tokens"
)
SEE_EACH_OTHER: Final = "lets documents of a row see each other: what one teaches changes with those before it. {}"

EXPECTATIONS: Final[tuple[Expectation, ...]] = (
    Expectation("divisor", right, "{}"),
    Expectation("means", means(lambda row, rank, place: (id(row), place)), MEANS.format("documents")),
    Expectation("means", means(lambda row, rank, place: id(row)), MEANS.format("micro-batches")),
    Expectation("means", means(lambda row, rank, place: row.first), MEANS.format("ranks")),
    Expectation(
        "means",
        means(lambda row, rank, place: (id(row), rank), parts=True),
        MEANS.format("parts of micro-batches"),
        divided=True,
    ),
    Expectation(
        "means",
        means(lambda row, rank, place: row.first + rank, parts=True),
        MEANS.format("context-parallel ranks"),
        divided=True,
    ),
    Expectation(
        "labels shifted twice",
        _labelled(_shifted(lambda row: joined(row.documents).labels)),
        "is trained with labels shifted twice: each token learns the one after the next. Those of a PackedBatch are "
        "shifted; models that shift by themselves take batch.as_hf()",
    ),
    Expectation(
        "labels not shifted",
        _labelled(_not_shifted),
        "is trained with labels that are not shifted: each token learns itself. Those of a PackedBatch are shifted; "
        "give them to a loss that does not shift, with logits of the same tokens",
    ),
    Expectation(
        "labels shifted in a part",
        _labelled(_shifted(lambda row: joined(row.documents).tokens)),
        "is trained with labels that were shifted on each rank or over whole rows: ends of documents, and of a rank's "
        "part, predict what does not follow them, and masks are left out. Take the batch's labels",
    ),
    Expectation(
        "mask of labels",
        _labelled(_all_tokens),
        "learns tokens whose labels are masked, such as those of prompts: take the batch's labels, in which they are "
        "IGNORE, not its tokens",
    ),
    Expectation(
        "ends of documents",
        _labelled(_next_document),
        "learns the first token of each document from the last one of that before it: take the batch's labels, in "
        "which ends of documents are IGNORE",
    ),
    Expectation(
        "tied weights",
        right,
        "leaves each copy of a weight that stages share without the gradient of the others: call "
        "TiedWeights.all_reduce_gradients() after the backward passes of each step",
        copies=False,
    ),
    Expectation("positions", _after_others, POSITIONS),
    Expectation("positions", _local_positions(anew=False), POSITIONS),
    Expectation("positions", _local_positions(anew=True), POSITIONS, divided=True),
    *(
        Expectation(
            "attention of a rank",
            _attention_of_a_rank(local=local),
            "has attention over the tokens of one context-parallel rank alone: give it the group of the ranks that "
            "share the micro-batch (context_parallel_attention(..., group=...))",
            divided=True,
        )
        for local in (False, True)
    ),
    *(Expectation("attention", _one_document(anew=anew), SEE_EACH_OTHER) for anew in (True, False)),
)
