"""A document, or a piece of one, as everything after a data set takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from wlb._shown import explained

IGNORE: Final = -100
"""The label of a token that predicts nothing; `torch.nn.functional.cross_entropy` ignores it by default."""

WEIGHTS: Final = "loss_weights"
"""The column of weights of losses, float [tokens]."""

AHEAD: Final = "labels_ahead"
"""The column of labels two and more ahead, int64 [k - 1, tokens]."""


class Piece(NamedTuple):
    """A part of a document that the plan cuts (`oversize="split"` or `"truncate"`).

    It is not an integer, so that a data set that does not support pieces fails instead of returning the whole document.
    """

    document: int
    start: int
    length: int


@explained
@dataclass(frozen=True)
class Document:
    """Tokens of a document or piece, with its name and what follows.

    Attributes:
        tokens: int[n], anything that `collate` takes.
        id: number of the document in its data set.
        start: where `tokens` begins inside the document, in tokens.
        next_token: the token that follows in the document; None at its end, or if it is not to be learnt. The last of
            `tokens` predicts it, so that a cut changes what tokens see, but not which tokens are learnt.
        labels: int[n], not shifted, as Hugging Face has them: what is to be predicted at each token's place, IGNORE
            where nothing is learnt, as in a prompt. None: all tokens are learnt.
        columns: further values of each token by name, numbers [..., n]: "position_ids", "loss_weights" (float, shifted:
            factors of the loss of each token's prediction), "labels_ahead" (see `collate`), and the columns that a
            loader was asked to carry.
    """

    tokens: Any
    id: int
    start: int = 0
    next_token: int | None = None
    labels: Any = None
    columns: Mapping[str, Any] = field(default_factory=dict)


def cut(document: Document, start: int, length: int) -> Document:
    """The piece of `length` tokens from `start` on, with the token that follows."""
    end, labels = start + length, document.labels
    predicted = document.tokens if labels is None else labels
    next_token = int(predicted[end]) if end < len(predicted) else document.next_token
    if labels is not None:
        labels = labels[start:end]
        if next_token == IGNORE:
            next_token = None
    columns = {name: values[..., start:end] for name, values in document.columns.items()}
    return Document(document.tokens[start:end], document.id, document.start + start, next_token, labels, columns)


def num_labels(document: Document) -> int:
    """Predictions of a document of arrays that count in the loss."""
    of_others = document.tokens.size if document.labels is None else np.count_nonzero(document.labels[1:] != IGNORE) + 1
    return int(of_others) - (document.next_token is None)
