"""Warns of answers that are cut off from their prompts."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

import wlb
from wlb._warned import warn
from wlb.reading.documents import IGNORE, Document

WAYS: Final = (
    'so the part of an answer in a later piece does not see its prompt; give oversize="truncate" or "error", or raise '
    "max_document_tokens"
)


class SplitPrompts:
    """Warns of the first document of streams whose answer is learnt in another piece than its prompt is seen."""

    def __init__(self, packer: wlb.Packer) -> None:
        self._limit = packer.max_document_tokens if packer.oversize == "split" else None

    def look(self, document: Document, name: str) -> None:
        """Looks at a document that was read."""
        if self._limit is not None and hides_prompt(document, self._limit):
            longer = f"has more than max_document_tokens = {self._limit} tokens"
            warn(f"{name} {longer}, begins with a prompt without labels, and is split, {WAYS}")
            self._limit = None


def hides_prompt(row: Any, limit: int) -> bool:
    """Whether a document begins with a prompt without labels, and has labels behind the first `limit` tokens."""
    if not isinstance(row, Document) or row.labels is None or len(row.labels) <= limit:
        return False
    learnt = np.flatnonzero(np.asarray(row.labels) != IGNORE)
    return bool(learnt.size and learnt[0] > 1 and learnt[-1] >= limit)
