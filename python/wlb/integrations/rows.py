"""Documents of a trainer's data set as its own collator makes them: their lengths, their tokens, what is learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from wlb._errors import error
from wlb.torch.data.arrow import arrow_lengths

Collator = Callable[[list[Any]], Mapping[str, Any]]

# What collators also give, and is made anew for packed rows.
_REMADE = {"attention_mask", "position_ids", "shift_labels", "seq_idx", "seq_lengths", "length", "use_cache"}
_WANTED = "wants one document in a row; switch packing off"
_REMADE |= {"num_items_in_batch", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}


class Rows(Dataset[dict[str, NDArray[Any]]]):
    """Document `i` of a data set, collated alone: its `input_ids`, and `labels` where the collator gives them."""

    def __init__(self, dataset: Any, collator: Collator) -> None:
        self.dataset = dataset
        self._collator = collator
        self._planned: NDArray[np.int64] | None = None  # tokens of each document, by the plan
        self._said_by = ""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, NDArray[Any]]:
        """Raises `wlb.WlbError` as :func:`row`, or if the document has not the tokens that it was planned with."""
        return self._as_planned(row(self.dataset[index], index, self._collator), index)

    def __getitems__(self, indices: list[int]) -> list[dict[str, NDArray[Any]]]:
        """Several at once: data sets of Hugging Face read them in one query."""
        together = getattr(self.dataset, "__getitems__", None)
        features = [self.dataset[index] for index in indices] if together is None else together(indices)
        made = (row(feature, index, self._collator) for feature, index in zip(features, indices, strict=True))
        return [self._as_planned(document, index) for document, index in zip(made, indices, strict=True)]

    def lengths(self) -> NDArray[np.int64]:
        """int64 [documents], tokens of each, as the collator makes them; what is read later has to have as many.

        Tables say them where the collator keeps the tokens of the first and of the longest document: one that adds
        tokens changes all, and one that truncates the longest.

        Complexity:
            Of a data set in Arrow tables O(documents); of any other every document is made once.
        """
        found = arrow_lengths(self.dataset)
        self._planned = None
        if found is None or not len(found) or any(found[at] != self._size(at) for at in (0, int(found.argmax()))):
            found = np.array([self._size(index) for index in range(len(self))], np.int64)
        self.planned_by(found, "in the table of the data set")
        if (empty := np.flatnonzero(found == 0)).size:
            index = int(empty[0])
            raise error("train_dataset", "has no tokens: filter such documents out", index=index, value=0)
        return found

    def planned_by(self, lengths: NDArray[np.int64], said_by: str) -> None:
        """What is read from here on has to have these tokens, for steps are planned with them.

        Args:
            lengths: int64 [documents].
            said_by: Where they come from, for an error.
        """
        self._planned, self._said_by = lengths, said_by

    def _size(self, index: int) -> int:
        return int(row(self.dataset[index], index, self._collator)["input_ids"].size)

    def _as_planned(self, document: dict[str, NDArray[Any]], index: int) -> dict[str, NDArray[Any]]:
        """The document, if it has the tokens of its plan.

        Raises:
            wlb.WlbError: It names the setting.
        """
        found = document["input_ids"].size
        if self._planned is None or found == self._planned[index]:
            return document
        message = (
            f"gives {found} tokens of document {index}, which has {self._planned[index]} {self._said_by}: leave "
            "max_length and truncation of the collator (or of its tokenizer) out, and give balance max_document_tokens= with "
            'oversize="truncate"; or give balance lengths= as the collator makes them'
        )
        raise error("data_collator", message, index=index, value=found)


def tokens_and_labels(features: list[Any]) -> Mapping[str, Any]:
    """Of one document, what a packed row keeps; its other columns are left."""
    return {name: features[0][name] for name in ("input_ids", "labels", "attention_mask") if name in features[0]}


def row(feature: Any, index: int, collator: Collator) -> dict[str, NDArray[Any]]:
    """One document: what the collator makes of it alone, without its padding.

    Raises:
        wlb.WlbError: It has no `input_ids`, or something that a packed row cannot keep.
    """
    if isinstance(feature, Mapping) and "input_ids" not in feature:
        columns = ", ".join(map(repr, feature)) or "nothing"
        message = f"has no 'input_ids', but {columns}: {_way_out(feature)}"
        raise error("train_dataset", message, index=index, value=list(feature))
    batch = collator([dict(feature) if isinstance(feature, Mapping) else feature])
    found = {name: _flat(value) for name, value in batch.items()}
    if "input_ids" not in found:
        given = ", ".join(map(repr, batch)) or "nothing"
        raise error("data_collator", f"gives no 'input_ids', but {given}", index=index, value=list(batch))
    tokens = found.pop("input_ids")
    real = _real(found, tokens.size, index)
    result = {"input_ids": tokens[real]}
    if "labels" in found:
        labels = found.pop("labels")
        if labels.size != tokens.size:
            message = f"gives {labels.size} labels for {tokens.size} tokens: only next tokens can be learnt"
            raise error("data_collator", message, index=index, value=int(labels.size))
        result["labels"] = labels[real]
    for name, value in found.items():
        if name not in _REMADE and not (name == "token_type_ids" and not value.any()):
            message = f"gives {name!r}, which rows of packed documents cannot keep: drop it from the data set"
            raise error("data_collator", message, index=index, value=name)
    return result


def _way_out(feature: Mapping[str, Any]) -> str:
    """What to do about a document without tokens of its own."""
    if any(name.startswith(("chosen", "rejected", "completion_input_ids", "KL_")) for name in feature):
        return (
            "several sequences are one example (DPO, KTO, reward models), whose loss is no sum over tokens, and a "
            "packed row cannot keep them together. Plan their micro-batches with wlb.integrations.rl.plan(groups=) instead"
        )
    return "tokenise it, or give it to a trainer that does"


def _real(found: dict[str, NDArray[Any]], size: int, index: int) -> Any:
    """Which tokens are no padding: all, where no mask says so.

    Raises:
        wlb.WlbError: The row holds several documents, which would be taken for one.
    """
    mask, positions = found.get("attention_mask"), found.get("position_ids")
    if mask is not None and mask.dtype != object and (mask.size != size or mask.max(initial=0) > 1):
        message = (
            f"has a mask of {mask.size} values up to {mask.max(initial=0)} for {size} tokens: wlb packs, and {_WANTED}"
        )
        raise error("attention_mask", message, index=index, value=int(mask.size))
    real: Any = slice(None) if mask is None or mask.dtype == object else mask.astype(bool)
    if positions is not None and positions.size == size and (np.diff(positions[real]) < 0).any():
        message = f"has position_ids that begin anew in it: wlb packs, and {_WANTED}"
        raise error("train_dataset", message, index=index)
    return real


def _flat(value: Any) -> NDArray[Any]:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    return np.asarray(value).reshape(-1)
