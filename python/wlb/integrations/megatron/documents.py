"""Documents of a run, from Megatron's `.bin` and `.idx` files or elsewhere, padded to the multiples of kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from wlb._errors import error
from wlb.integrations.megatron.multiples import padded_lengths
from wlb.reading.columns import filled_up
from wlb.reading.documents import IGNORE, Document, Piece, cut
from wlb.torch.data.dataset import Documents


class IndexedDocuments(Dataset[Document]):
    """The documents of Megatron's `.bin` and `.idx` files. Only the parts that a plan needs are read.

    Lengths come from the `.idx` file. A document is that of the index: one sequence, or several consecutive ones.
    Documents without tokens are left out, and `skipped` counts them.

    Args:
        dataset: an `IndexedDataset`, or the path of its files without `.bin` and `.idx`.

    Attributes:
        lengths: int [documents] tokens; if every document is one sequence, this is the index itself, not a copy.
        skipped: documents without tokens.

    Raises:
        wlb.WlbError: there are no such files, or they have something other than text.
    """

    def __init__(self, dataset: IndexedDataset | str) -> None:
        self._dataset = dataset if isinstance(dataset, IndexedDataset) else _opened(dataset)
        if self._dataset.index.sequence_modes is not None:
            raise error("dataset", "is multimodal: only documents of tokens can be packed", value=dataset)
        sizes, bounds = self._dataset.sequence_lengths, np.asarray(self._dataset.document_indices)
        if np.array_equal(bounds, np.arange(len(sizes) + 1)):
            lengths, self._bounds = np.asarray(sizes), None
        else:
            ends = np.append(0, np.cumsum(sizes, dtype=np.int64))
            lengths, self._bounds = ends[bounds[1:]] - ends[bounds[:-1]], bounds
        kept = np.flatnonzero(lengths)
        self.skipped = len(lengths) - len(kept)
        self._kept: NDArray[np.int64] | None = kept if self.skipped else None
        self.lengths: NDArray[Any] = lengths[kept] if self.skipped else lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | Piece) -> Document:
        """The document, or a piece of it. Only it is read, and the token that follows a piece.

        Raises:
            wlb.WlbError: the document ends before the piece does, so the plan had another length than the files.
        """
        number, start, length = index if isinstance(index, Piece) else (index, 0, int(self.lengths[index]))
        found = int(self.lengths[number])
        if found < start + length:
            message = f"has {found} tokens, but the plan wants those from {start} to {start + length}"
            raise error("dataset", message, index=number, value=found)
        tokens = self._read(number, start, min(start + length + 1, found))
        return cut(Document(tokens, number, start), 0, length)

    def _read(self, number: int, start: int, end: int) -> NDArray[Any]:
        """Tokens `start` to `end` of a document, sequence by sequence."""
        row = number if self._kept is None else int(self._kept[number])
        first, last = (row, row + 1) if self._bounds is None else self._bounds[row : row + 2].tolist()
        parts, before = [], 0
        for sequence in range(first, last):
            size = int(self._dataset.sequence_lengths[sequence])
            low, high = max(start - before, 0), min(end - before, size)
            if low < high:
                parts.append(self._dataset.get(sequence, offset=low, length=high - low))
            before += size
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


PADDING: Final = "padding"
"""Name of a column of padded documents."""


class PaddedDocuments(Dataset[Document]):
    """Documents padded to a multiple of tokens. Padding is never learnt.

    With causal attention no token sees later ones, so padding does not change what is trained.

    Args:
        documents: `documents[i]` gives document `i`, or the piece of it that a `Piece` names.
        lengths: int [documents], tokens of each.
        multiple: all padded lengths are multiples of it.
        token: token id of padding.
        marked: whether documents have a column `PADDING`, which is 1 for padding.

    Attributes:
        lengths: int64 [documents], with padding.
    """

    def __init__(self, documents: Any, lengths: ArrayLike, *, multiple: int, token: int, marked: bool = False) -> None:
        self._documents, self._real, self._token, self._marked = documents, np.asarray(lengths), token, marked
        self.lengths = padded_lengths(self._real, pad_multiple=multiple)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | Piece) -> Document:
        """The document, or the piece of it, and its padding."""
        piece = self._wanted(index)
        return self._padded(self._documents[self._own(piece)], piece)

    def __getitems__(self, indices: list[int | Piece]) -> list[Document]:
        """Reads the documents of a micro-batch at once, if the data set can."""
        together = getattr(self._documents, "__getitems__", None)
        if together is None:
            return [self[index] for index in indices]
        pieces = [self._wanted(index) for index in indices]
        found = together([self._own(piece) for piece in pieces])
        return [self._padded(document, piece) for document, piece in zip(found, pieces, strict=True)]

    def padding(self, ids: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """Tokens of padding in these pieces."""
        own = np.clip(self._real[ids] - starts, 0, lengths)
        return int(lengths.sum() - own.sum())

    def _wanted(self, index: int | Piece) -> Piece:
        return index if isinstance(index, Piece) else Piece(index, 0, int(self.lengths[index]))

    def _own(self, piece: Piece) -> int | Piece:
        """The part of a padded piece that belongs to the document; the rest is padding."""
        size = int(self._real[piece.document])
        length = min(piece.length, size - piece.start)
        return piece.document if length == size else Piece(piece.document, piece.start, length)

    def _padded(self, document: Document, piece: Piece) -> Document:
        number, start, length = piece
        own, wanted = len(document.tokens), min(length, int(self._real[number]) - start)
        if own != wanted:  # without this check, padding would hide the error
            message = f"has {start + own} tokens, but lengths says {start + wanted}"
            raise error("dataset", message, index=number, value=start + own)
        columns = {name: _filled(name, values, length) for name, values in document.columns.items()}
        if self._marked:
            columns[PADDING] = (np.arange(length) >= own).astype(np.int64)
        if own == length:
            return replace(document, columns=columns)
        tokens = np.asarray(document.tokens)
        labels = tokens if document.labels is None else np.asarray(document.labels)
        padded = [np.full(length, fill, np.int64) for fill in (self._token, IGNORE)]
        padded[0][:own], padded[1][:own] = tokens, labels
        return Document(padded[0], document.id, document.start, document.next_token, padded[1], columns)


def _filled(name: str, values: Any, length: int) -> NDArray[Any]:
    return filled_up(name, np.asarray(values), length - values.shape[-1])


def source(dataset: Any, lengths: ArrayLike | None) -> tuple[Any, NDArray[Any]]:
    """Documents that can be read by pieces, and their lengths.

    Raises:
        wlb.WlbError: the data set is one of Megatron's that packs documents by itself; or lengths are not those of all
            documents, or were given for files that have an index.
    """
    for cls in type(dataset).__mro__:
        if cls.__module__.startswith("megatron.core.datasets") and cls.__name__ in _PACKS:
            found = type(dataset).__name__
            message = f"is a {found}, which cuts and joins documents to sequences of one length by itself: give the "
            message += "IndexedDataset that it reads, or what its files are called"
            raise error("dataset", message, value=found)
    if isinstance(dataset, str | IndexedDataset):
        dataset = IndexedDocuments(dataset)
    if isinstance(dataset, IndexedDocuments):
        if lengths is not None:
            raise error("lengths", "are in the .idx file: leave them out")
        return dataset, dataset.lengths
    documents = dataset if isinstance(dataset, Documents) else Documents(dataset)
    documents.check()
    if lengths is None:
        lengths = documents.lengths()
    known = np.asarray(lengths)
    if known.shape != (len(documents),):
        message = f"have shape {known.shape}, but there are {len(documents)} documents"
        raise error("lengths", message, value=known.shape)
    if known.dtype.kind not in "iu":  # padding would round them
        raise error("lengths", f"are {known.dtype}, not integers", value=str(known.dtype))
    return documents, known


_PACKS = {"GPTDataset", "MockGPTDataset", "MegatronDataset", "BlendedDataset"}


def _opened(prefix: str) -> IndexedDataset:
    if not IndexedDataset.exists(prefix):
        raise error("dataset", f"= {prefix!r}: there are no {prefix}.bin and {prefix}.idx", value=prefix)
    return IndexedDataset(prefix)
