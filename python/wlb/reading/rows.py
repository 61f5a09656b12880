"""Makes documents of the rows of a data set, for every loader, stream and trainer."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import wlb
from wlb._errors import check_integer, error
from wlb._shown import explained
from wlb.reading.documents import AHEAD, IGNORE, WEIGHTS, Document
from wlb.reading.row_kinds import MASKS, WITHOUT_EFFECT, advice
from wlb.reading.values import (
    as_arrays,
    as_numpy,
    column_array,
    label_array,
    sequence_lengths,
    token_array,
    tokens_of,
)

_WEIGHTS: Final = (WEIGHTS, "token_weights", "weights")

_TAKEN: Final = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids", "seq_lengths")

_OF_ONE_DOCUMENT: Final = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "token_type_ids")

KNOWN: Final = frozenset((*_TAKEN, *MASKS, *_WEIGHTS, *_OF_ONE_DOCUMENT)) | WITHOUT_EFFECT
"""Columns with a known meaning."""

Part = dict[str, NDArray[Any]]


@explained
@dataclass(frozen=True)
class RowReader:
    """Reads rows of a data set as documents. All loaders, streams and trainers of wlb read rows with it.

    A row is a sequence of token ids, or a mapping with `input_ids`, [n] tokens. These columns of a mapping have a
    meaning; None in their place means that the row has none:

    - `labels`, int [n], not shifted: what is to be learnt at the place of each token, -100 where nothing is.
    - `shift_labels`, int [n]: what each token predicts, -100 where it predicts nothing. Becomes labels.
    - `loss_mask`, `completion_mask`, `assistant_masks`, 0 or 1 [n] for each token: labels are -100 where one is 0.
    - `loss_weights`, `token_weights` or `weights`, or a `loss_mask` with fractions, numbers [n]: factors of the loss of
      predicting each token; the mean is still over labels. A token of weight 0 is not learnt.
    - `attention_mask`, 0 or 1 [n]: 0 at the beginning and at the end is padding, which is cut off.
    - `position_ids`, int [..., n]: carried. Single rows that count from 0 are made anew.
    - `seq_lengths`, int [documents]: the row has several documents of these lengths, and is split.
    - `seq_idx`, `cu_seq_lens_q`, `cu_seq_lens_k`, `token_type_ids`: dropped if they describe a single document, or are
      0 everywhere; refused otherwise.
    - `length`, `num_tokens`, `special_tokens_mask`, `offset_mapping`, text: dropped, because they do not change what is
      learnt.

    Any other column with numbers is an error that names it, unless it is one of `columns`.

    Attributes:
        columns: names of further columns that are carried: numbers [..., n] for each token, or one number for all
            tokens of the row.
        labels_ahead: how many tokens ahead every token predicts (`collate`).

    Raises:
        wlb.WlbError: `columns` is no sequence of names, or `labels_ahead` is below 1.

    Complexity:
        O(tokens) a row.

    Examples:
        >>> import wlb.torch as wt
        >>> reader = wt.RowReader(columns=("source",))
        >>> row = {"input_ids": [5, 6, 7, 0], "attention_mask": [1, 1, 1, 0], "loss_mask": [0, 0, 1, 0], "source": 3}
        >>> [document] = reader.documents(row, 0, "dataset")
        >>> document.tokens.tolist(), document.labels.tolist(), document.columns["source"].tolist()
        ([5, 6, 7], [-100, -100, 7], [3, 3, 3])
    """

    columns: Sequence[str] = ()
    labels_ahead: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.columns, str) or not all(isinstance(name, str) for name in self.columns):
            raise error("columns", f"= {self.columns!r}: must be a sequence of names", value=self.columns)
        object.__setattr__(self, "columns", tuple(self.columns))
        check_integer("labels_ahead", self.labels_ahead, minimum=1)

    @functools.cached_property
    def asked(self) -> tuple[str, ...]:
        """Columns that are carried because the user asked for them."""
        handled = {*_TAKEN, *MASKS, *_WEIGHTS}
        return tuple(name for name in self.columns if name not in handled)

    def nothing(self) -> Part:
        """The columns of an empty batch, with 0 tokens."""
        found: Part = {name: np.empty(0, np.int64) for name in self.asked}
        return found if self.labels_ahead == 1 else found | {AHEAD: np.empty((self.labels_ahead - 1, 0), np.int64)}

    def check_names(self, names: Sequence[str], argument: str, index: int | None = None) -> None:
        """Refuses unknown columns that the user did not ask for, and the lack of columns that the user asked for.

        Raises:
            wlb.WlbError: naming the first such column.
        """
        if "input_ids" not in names:
            message = f"has no 'input_ids', but {', '.join(map(repr, names)) or 'nothing'}: {advice(names)}"
            raise error(argument, message, index=index, value=list(names))
        for name in names:
            if name not in KNOWN and name not in self.columns:
                message = (
                    f"has the column {name!r}, which has no known meaning: remove it from the data set, or give "
                    f"columns=[{name!r}] to a loader that carries columns to the model"
                )
                raise error(argument, message, index=index, value=name)
        for name in self.asked:
            if name not in names:
                raise error("columns", f"has {name!r}, which {argument} has not", index=index, value=name)

    def documents(
        self, row: Any, index: int, argument: str, *, first_id: int | None = None, used: Collection[str] = ()
    ) -> list[Document]:
        """The documents of a row: one, or with `seq_lengths` several.

        Args:
            row: as in the class; or a `Document`, which is returned.
            index: the row's number, for errors.
            argument: name of the row's source, for errors.
            first_id: id of the first document; by default `index`.
            used: columns that only something else reads, such as a function of costs; they are not carried.

        Raises:
            wlb.WlbError: the row cannot be read; the error names the column.
        """
        id = index if first_id is None else first_id
        if type(row) is np.ndarray and self.labels_ahead == 1 and not self.asked:
            return [Document(row, id)]
        if isinstance(row, Document):
            if self.labels_ahead > 1 and AHEAD not in row.columns:
                return [self._ahead_of(as_arrays(row, argument, index), argument, index)]
            return [row]
        if not isinstance(row, Mapping):
            if self.asked:
                message = f"has {self.asked[0]!r}, but row {index} of {argument} is bare tokens"
                raise error("columns", message, index=index, value=self.asked[0])
            if self.labels_ahead == 1:
                return [Document(tokens_of(row, argument, index), id)]
            row = {"input_ids": row}
        if self.labels_ahead == 1 and not self.asked and row.keys() <= {"input_ids", "labels"} and "input_ids" in row:
            # Checked when it is packed.
            return [Document(tokens_of(row, argument, index), id, labels=row.get("labels"))]
        return [self._document(part, id + at) for at, part in enumerate(self.parts(row, index, argument, used))]

    def parts(self, row: Mapping[str, Any], index: int, argument: str, used: Collection[str] = ()) -> list[Part]:
        """The documents of a row as mappings of arrays with the same meaning, in as few columns as possible.

        Raises:
            wlb.WlbError: as `documents`.
        """
        if "input_ids" in row:
            tokens_of(row, argument, index)  # raises if there are none
        given = {name: value for name, value in row.items() if value is not None}
        kept = ("input_ids", *self.columns)
        names = [name for name in given if name in kept or not (name in used or is_text(given[name]))]
        self.check_names(names if "input_ids" in given else list(row), argument, index)
        tokens = token_array(given["input_ids"], argument, index)
        values = _Row(given, tokens, argument, index)
        whole: Part = {"input_ids": tokens}
        if (labels := values.labels()) is not None:
            whole["labels"] = labels
        weights = values.weights()
        if weights is not None:
            whole[WEIGHTS] = weights
        if "position_ids" in given:
            whole["position_ids"] = values.integers("position_ids")
        for name in self.asked:
            whole[name] = column_array(given[name], tokens.size, argument, name, index)
        for name in _OF_ONE_DOCUMENT:
            if name in given and name not in self.columns:
                values.check_single(name)
        real = values.real()
        whole = {name: column[..., real] for name, column in whole.items()}
        found = []
        for start, end in values.bounds(whole["input_ids"].size):
            part = {name: column[..., start:end] for name, column in whole.items()}
            found.append(values.without_the_usual(part))
        return found

    def _document(self, part: Part, id: int) -> Document:
        columns: dict[str, Any] = {name: part[name] for name in ("position_ids", *self.asked) if name in part}
        if WEIGHTS in part:
            columns[WEIGHTS] = np.append(part[WEIGHTS][1:], np.float32(1))  # weights belong to the predicted token
        document = Document(part["input_ids"], id, labels=part.get("labels"), columns=columns)
        if self.labels_ahead > 1:
            document = _with_labels_ahead(document, self.labels_ahead)
        return document

    def _ahead_of(self, document: Document, argument: str, index: int) -> Document:
        """A given document, with labels further ahead, which are known only if it is whole."""
        if document.start or document.next_token is not None:
            message = (
                f"is a piece of document {document.id}: what follows its next token is not known here; give "
                "labels_ahead to wt.Documents or the loader, which read whole documents"
            )
            raise error(argument, message, index=index, value=document.id)
        return _with_labels_ahead(document, self.labels_ahead)


def _with_labels_ahead(document: Document, most: int) -> Document:
    """A copy of a whole document with the labels two to `most` tokens ahead."""
    labels: Any = document.tokens if document.labels is None else document.labels
    ahead = np.full((most - 1, labels.size), IGNORE, np.int64)
    for row in range(most - 1):
        further = labels[row + 2 :]
        ahead[row, : further.size] = further
    return replace(document, columns={**document.columns, AHEAD: ahead})


class _Row:
    """The columns of one row, each of which is checked when it is read."""

    def __init__(self, given: Mapping[str, Any], tokens: NDArray[Any], argument: str, index: int) -> None:
        self._given, self._tokens, self._argument, self._index = given, tokens, argument, index

    def _error(self, message: str, value: Any) -> wlb.WlbError:
        return error(self._argument, message, index=self._index, value=value)

    def integers(self, name: str) -> NDArray[Any]:
        """Int [..., tokens]."""
        values = column_array(self._given[name], self._tokens.size, self._argument, name, self._index)
        if values.dtype.kind != "i":
            raise self._error(f"has {name} of {values.dtype}, not integers", name)
        return values

    def numbers(self, name: str) -> NDArray[Any]:
        """Finite numbers [tokens]."""
        values = column_array(self._given[name], self._tokens.size, self._argument, name, self._index)
        if values.ndim != 1 or not np.isfinite(values).all():
            raise self._error(f"has {name} of shape {values.shape}: must be finite numbers [tokens]", name)
        return values

    def _mask(self, name: str) -> NDArray[np.bool_]:
        values = self.numbers(name)
        if ((values != 0) & (values != 1)).any():
            message = f"has {name} with other values than 0 and 1: wlb packs, and wants one document in a row"
            raise self._error(message if name == "attention_mask" else message.partition(":")[0], name)
        return values.astype(bool)

    def _weighted(self) -> list[str]:
        """Columns that are weights."""
        found = [name for name in _WEIGHTS if name in self._given]
        if "loss_mask" in self._given:
            mask = self.numbers("loss_mask")
            if ((mask != 0) & (mask != 1)).any():
                found.append("loss_mask")
        if len(found) > 1:
            raise self._error(f"has both {found[0]!r} and {found[1]!r}: leave one out", found[1])
        return found

    def weights(self) -> NDArray[Any] | None:
        """Float32 [tokens], factors of the loss of predicting each token; None: all 1."""
        for name in self._weighted():
            values = self.numbers(name).astype(np.float32)
            if not ((values == 0) | (values == 1)).all():
                return np.where(values == 0, np.float32(1), values)  # their labels are masked
        return None

    def labels(self) -> NDArray[Any] | None:
        """Int [tokens], not shifted, with all masks; None: all tokens are learnt."""
        given, size = self._given, self._tokens.size
        labels: NDArray[Any] | None = None
        if "labels" in given:
            labels = label_array(given["labels"], size, self._argument, self._index)
        if "shift_labels" in given:
            shifted = self._shifted()
            found = np.append(np.int64(IGNORE), shifted[:-1])
            if labels is not None and (labels[1:] != found[1:]).any():
                message = "has labels and shift_labels that contradict each other: leave one out"
                raise self._error(message, "shift_labels")
            labels = found if labels is None else labels
        weighted = self._weighted()
        masks = [self._mask(name) for name in MASKS if name in given and name not in weighted]
        masks += [self.numbers(name) != 0 for name in weighted]
        for mask in masks:
            if not mask.all():
                of_all: Any = self._tokens if labels is None else labels
                labels = np.where(mask, of_all.astype(np.int64), IGNORE)
        return labels

    def _shifted(self) -> NDArray[Any]:
        labels = label_array(self._given["shift_labels"], self._tokens.size, self._argument, self._index)
        if labels[-1] != IGNORE:
            message = (
                f"has shift_labels by which its last token predicts {labels[-1]}, which is no token of the row: give "
                "that token too, or -100"
            )
            raise self._error(message, "shift_labels")
        return labels.astype(np.int64)

    def real(self) -> slice:
        """The tokens of the row without padding.

        Raises:
            wlb.WlbError: the mask hides all tokens, or some between others.
        """
        if "attention_mask" not in self._given:
            return slice(None)
        value = as_numpy(self._given["attention_mask"])
        if value.ndim != 1 or len(value) != self._tokens.size:
            message = f"has an attention_mask of shape {value.shape} for {self._tokens.size} tokens: wlb packs, and "
            raise self._error(message + "wants one document in a row, with a mask [tokens]", "attention_mask")
        mask = self._mask("attention_mask")
        if mask.all():
            return slice(None)
        seen = np.flatnonzero(mask)
        if not seen.size:
            raise self._error(
                "has no tokens, or an attention_mask that hides all: filter such rows out", "attention_mask"
            )
        first, last = int(seen[0]), int(seen[-1]) + 1
        if seen.size < last - first:
            hidden = first + int(np.flatnonzero(~mask[first:last])[0])
            message = (
                f"has an attention_mask that hides token {hidden} between others: packed rows hide none; cut them out"
            )
            raise self._error(message, "attention_mask")
        return slice(first, last)

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """Where documents begin and end among the row's `size` tokens without padding."""
        if "seq_lengths" not in self._given:
            return [(0, size)]
        lengths = sequence_lengths(self._given["seq_lengths"], self._argument, self._index)
        if int(lengths.sum()) != size:
            message = f"has seq_lengths of {int(lengths.sum())} tokens for {size}"
            raise self._error(message, "seq_lengths")
        ends = np.cumsum(lengths).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))

    def without_the_usual(self, part: Part) -> Part:
        """The columns of one document without those that have the default meaning.

        Raises:
            wlb.WlbError: positions begin again, so there are several documents.
        """
        positions = part.get("position_ids")
        if positions is not None and positions.ndim == 1:
            if (np.diff(positions) < 0).any():
                message = "has position_ids that begin anew in it: wlb packs, and wants one document in a row, or the "
                raise self._error(message + "lengths of its documents in a column seq_lengths", "position_ids")
            if np.array_equal(positions, np.arange(positions.size)):
                del part["position_ids"]
        if WEIGHTS in part and (part[WEIGHTS] == 1).all():
            del part[WEIGHTS]
        return part

    def check_single(self, name: str) -> None:
        """Checks that a column describes a single document.

        Raises:
            wlb.WlbError: it does not.
        """
        values = as_numpy(self._given[name])
        if name.startswith("cu_seq_lens"):
            single = values.shape == (2,) and values[0] == 0
        else:
            single = bool((values == values.reshape(-1)[:1]).all()) and (name == "seq_idx" or not values.any())
        if not single:
            message = f"has {name} of several documents or kinds of tokens: wlb packs, and wants one document in a row"
            raise self._error(message, name)


def is_text(value: Any) -> bool:
    """Whether a column has text, from which tokens were made, or parts of text by name; or nothing."""
    if value is None or isinstance(value, str | bytes):
        return True
    if isinstance(value, Mapping):
        return all(map(is_text, value.values()))
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US" or (value.dtype.kind == "O" and all(map(is_text, value.ravel())))
    return isinstance(value, list | tuple) and bool(value) and is_text(value[0])
