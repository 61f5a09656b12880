"""Packs the documents of a micro-batch one after the other: tokens, what each predicts, and further columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wlb.reading.columns import Layout, filled_up, laid_out
from wlb.reading.documents import IGNORE, Document

Run = tuple[int, int, int]
"""Neighbouring tokens of a document on a rank: the document's index, the first token, one past the last."""


def whole_runs(documents: Sequence[Document]) -> list[Run]:
    """Runs of whole documents, one after the other."""
    return [(number, 0, document.tokens.size) for number, document in enumerate(documents)]


def packed(
    documents: Sequence[Document], runs: Sequence[Run] | None = None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of runs of documents of arrays, and what each predicts: int64 [tokens] both.

    By default all documents, one after the other; a run of document `len(documents)` is padding.
    """
    runs = whole_runs(documents) if runs is None else runs
    tokens, labels = np.empty((2, sum(end - start for _, start, end in runs)), np.int64)
    pack(documents, runs, tokens, labels)
    return tokens, labels


def pack(
    documents: Sequence[Document], runs: Sequence[Run], tokens: NDArray[np.int64], labels: NDArray[np.int64]
) -> None:
    """See `packed`: writes tokens and labels of the runs one after the other."""
    row = 0
    for number, start, end in runs:
        behind = row + end - start
        if number == len(documents):
            tokens[row:behind], labels[row:behind] = 0, IGNORE
        else:
            document = documents[number]
            predicted = document.tokens if document.labels is None else document.labels
            further = predicted[start + 1 : end + 1]
            tokens[row:behind] = document.tokens[start:end]
            labels[row : row + further.size] = further
            if end == document.tokens.size:
                labels[behind - 1] = IGNORE if document.next_token is None else document.next_token
        row = behind


def joined(documents: Sequence[Document], layout: Layout, runs: Sequence[Run] | None = None) -> dict[str, NDArray[Any]]:
    """Columns of the runs of `packed`, [..., tokens] each; empty if the layout is."""
    if not layout or not documents:
        return {}
    runs = whole_runs(documents) if runs is None else runs
    of_each = {number: laid_out(documents[number], layout) for number in {run[0] for run in runs} - {len(documents)}}
    found = {}
    for name, dtype, shape in layout:
        nothing = np.empty((*shape, 0), dtype)
        parts = [
            filled_up(name, nothing, end - start) if number == len(documents) else of_each[number][name][..., start:end]
            for number, start, end in runs
        ]
        found[name] = np.concatenate([nothing, *parts], axis=-1)
    return found
