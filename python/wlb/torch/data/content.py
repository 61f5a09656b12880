"""Knows a data set by its content, so that ranks and resumed runs do not read another of equal lengths."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb._errors import error
from wlb._warned import warn
from wlb.reading.documents import Document, Piece
from wlb.reading.split_prompts import WAYS, hides_prompt
from wlb.torch.data.batch import PackedBatch
from wlb.torch.random_states import random_states

HEADS: Final = 8
"""Documents by which the beginning of a stream is known."""

_DOCUMENTS: Final = 64


def fingerprint(dataset: Any) -> str | None:
    """A hash of the tokens of at most 64 documents, evenly spaced over a data set.

    Args:
        dataset: `dataset[i]` gives a `Document`, an array or a tensor.

    Returns:
        Hexadecimal digits. None for a data set that gives another document when it is read twice, or something else
        than documents: it is known by its indices only.

    Complexity:
        Two reads of at most 64 documents. Random states are left as they were.
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        return None
    digest = hashlib.blake2b(digest_size=16)
    try:
        with random_states():
            size = len(dataset)
            for number in np.unique(np.linspace(0, size - 1, min(_DOCUMENTS, size)).astype(np.int64)).tolist():
                first, second = (_bytes(dataset[number]) for _ in range(2))
                if first is None or first != second:
                    return None
                digest.update(hashlib.blake2b(first, digest_size=16).digest())
    except Exception:  # whoever reads it next raises it again, in its place
        return None
    return digest.hexdigest()


def check_collated(batch: object, elements: list[int | Piece], dataset: Any) -> None:
    """Compares the tokens of a collated micro-batch with those of its documents in the data set, at most 64.

    Args:
        batch: the micro-batch; only a `PackedBatch` is compared.
        elements: its documents and pieces, in packed order.
        dataset: a data set that has a `fingerprint`.

    Raises:
        wlb.WlbError: it holds other documents than its plan.
    """
    if not isinstance(batch, PackedBatch):
        return
    at = batch.shard.rank(batch.cp_rank).token_indices.astype(np.int64)
    tokens = batch.tokens.cpu().numpy()
    ends = np.cumsum(batch.shard.lengths.astype(np.int64))
    with random_states():
        for place, element in enumerate(elements[:_DOCUMENTS]):
            start, end = int(ends[place] - batch.shard.lengths[place]), int(ends[place])
            here = (at >= start) & (at < end)
            row = dataset[element]
            planned = np.asarray(row.tokens if isinstance(row, Document) else row)
            if planned.size != end - start or not np.array_equal(planned[at[here] - start], tokens[here]):
                number = element if isinstance(element, int) else element.document
                message = (
                    f"gives another document of {end - start} tokens where the plan has document {number}: something "
                    "between the data set and this loader shuffles, or shares out, what the plan has already shared out"
                )
                raise error("loader", message, index=place, value=number)


def warn_of_split_prompts(dataset: Any, numbers: NDArray[np.int64], packer: wlb.Packer) -> None:
    """Warns once of documents whose answer is learnt in another piece than their prompt is seen.

    Args:
        dataset: `dataset[i]` gives a `Document`; others are not looked at.
        numbers: int64 [documents] that are split.
        packer: splits them.

    Complexity:
        Reads at most 64 of them, evenly spaced.
    """
    looked = numbers[np.unique(np.linspace(0, numbers.size - 1, min(_DOCUMENTS, numbers.size)).astype(np.int64))]
    try:
        with random_states():
            found = sum(hides_prompt(dataset[number], packer.max_document_tokens) for number in looked.tolist())
    except Exception:  # whoever reads it next raises it again, in its place
        return
    if found:
        of = f"{numbers.size:,}" if looked.size == numbers.size else f"{looked.size} (of {numbers.size:,})"
        longer = f"documents with more than max_document_tokens = {packer.max_document_tokens} tokens"
        warn(f"{found} of {of} {longer} begin with a prompt without labels, and are split, {WAYS}")


def warn_of_equal_streams(heads: Mapping[int, Sequence[str]]) -> bool:
    """Warns if two streams begin with the same documents: ranks may have them in another order.

    Args:
        heads: hashes of the first documents of each stream that was opened, by its number.

    Returns:
        Whether it warned.
    """
    by_first: dict[tuple[str, ...], int] = {}
    for number, found in sorted(heads.items()):
        if len(found) < 2:
            continue
        other = by_first.setdefault(tuple(found[:2]), number)
        if other != number and all(one == two for one, two in zip(found, heads[other], strict=False)):
            warn(
                f"streams[{other}] and streams[{number}] begin with the same documents. Every rank must have the same"
                " streams in the same order, or some are read twice and others never: sort the names of files, which"
                " os.listdir and glob give in another order on each host. Ignore this if one stream is listed twice."
            )
            return True
    return False


def _bytes(row: Any) -> bytes | None:
    """Tokens and labels of a row; None if it is no document."""
    parts = [row.tokens, row.labels] if isinstance(row, Document) else [row]
    if not all(isinstance(part, Tensor | np.ndarray | list | None) for part in parts):
        return None
    arrays = [np.asarray(part.cpu() if isinstance(part, torch.Tensor) else part) for part in parts if part is not None]
    if not all(array.dtype.kind in "iu" and array.ndim == 1 for array in arrays):
        return None
    return b"|".join(array.astype(np.int64).tobytes() for array in arrays)
