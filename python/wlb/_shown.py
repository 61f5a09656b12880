"""How objects are shown: a short repr, a summary, a table in a notebook, a data frame."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

from wlb._errors import error

LONGEST = 400
"""Characters of a repr: a line or three of a terminal."""

_SHORT = 60
_FEW = 8  # entries of a collection that are printed

Class = TypeVar("Class", bound=type[Any])


class Shown:
    """Base of objects with a summary and a table; a notebook shows them as a table."""

    def _columns(self) -> Mapping[str, Any]:
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """Figures of the object by name, as plain values."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with a row for each part of the object.

        Raises:
            wlb.WlbError: pandas is not installed.
        """
        return to_pandas(self)

    def _repr_html_(self) -> str:
        return html(self)


def summary(shown: Any) -> dict[str, Any]:
    """Figures of a packing or a shard by name, as plain values."""
    return _FIGURES[type(shown).__name__](shown)


def to_pandas(shown: Any) -> Any:
    """A data frame with a row for each part of the object.

    Raises:
        wlb.WlbError: pandas is not installed.
    """
    columns = shown._columns() if isinstance(shown, Shown) else _COLUMNS[type(shown).__name__](shown)
    try:
        import pandas  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise error("to_pandas", "needs pandas, which is not installed: pip install pandas") from None
    return pandas.DataFrame(dict(columns))


def html(shown: Any) -> str:
    """A small table of an object's figures, in the colours of the notebook."""
    from html import escape

    rows = "".join(
        f"<tr><th style='text-align:left'>{escape(name.replace('_', ' '))}</th>"
        f"<td style='text-align:right'>{escape(_cell(value))}</td></tr>"
        for name, value in shown.summary().items()
    )
    name = escape(type(shown).__name__)
    return f"<table><caption style='text-align:left'><b>{name}</b></caption><tbody>{rows}</tbody></table>"


def explained(cls: Class) -> Class:
    """Gives a dataclass a repr of at most `LONGEST` characters, and an `==` that compares its arrays whole."""
    made: Any = cls  # mypy takes methods for bound ones
    made.__repr__ = _repr
    if cls.__dataclass_params__.eq:
        hash_ = made.__hash__
        made.__eq__ = _equality(made.__eq__)
        made.__hash__ = hash_
    return cls


def _repr(self: Any) -> str:
    name = type(self).__qualname__
    fields = [each for each in dataclasses.fields(self) if each.repr]
    parts = [f"{each.name}={short(getattr(self, each.name))}" for each in fields]
    if len(text := f"{name}({', '.join(parts)})") <= LONGEST:
        return text
    parts = [part for part, each in zip(parts, fields, strict=True) if not _is_default(self, each)]
    while len(text := f"{name}({', '.join(parts)}, ...)") > LONGEST:
        parts.pop()
    return text


def short(value: Any) -> str:
    """A value in a few words: an array by dtype and shape, a long collection by its number of entries."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and not np.isscalar(value):
        dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, shape))}]"
    if isinstance(value, list | tuple | set | frozenset | Mapping) and len(value) > _FEW:
        return f"<{len(value)} entries>"
    if isinstance(value, list | tuple):
        inner = ", ".join(map(short, value))
        tail = "," if isinstance(value, tuple) and len(value) == 1 else ""
        text = f"[{inner}]" if isinstance(value, list) else f"({inner}{tail})"
        return text if len(text) <= 2 * _SHORT else f"<{len(value)} entries>"
    if isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key!r}: {short(each)}" for key, each in value.items()) + "}"
        return text if len(text) <= 2 * _SHORT else f"<{len(value)} entries>"
    if isinstance(value, str):
        return repr(value) if len(value) <= _SHORT else repr(value[: _SHORT - 3] + "...")
    text = repr(value)
    if len(text) <= 2 * _SHORT:
        return text
    return f"{type(value).__qualname__}(...)"


def _is_default(self: Any, field: dataclasses.Field[Any]) -> bool:
    value = getattr(self, field.name)
    return field.default is not dataclasses.MISSING and bool(
        value is field.default or short(value) == short(field.default)
    )


def _equality(own: Callable[[Any, Any], Any]) -> Callable[[Any, object], Any]:
    """Equality of a dataclass whose fields may hold arrays, which its own comparison cannot handle."""

    def equal(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        try:
            return own(self, other)
        except (ValueError, RuntimeError):  # a comparison of arrays is neither true nor false
            return _same(self, other)

    return equal


def _compared(self: Any) -> Iterator[dataclasses.Field[Any]]:
    return (each for each in dataclasses.fields(self) if each.compare)


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.shape(one) == np.shape(other) and bool(np.all(np.asarray(one) == np.asarray(other)))
    if type(one) is not type(other):
        return bool(one == other)
    if dataclasses.is_dataclass(one):
        return all(_same(getattr(one, each.name), getattr(other, each.name)) for each in _compared(one))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    if hasattr(one, "shape") and hasattr(one, "tolist"):  # a tensor
        return bool(one.shape == other.shape and one.dtype == other.dtype and one.tolist() == other.tolist())
    return bool(one == other)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _packing_figures(packing: Any) -> dict[str, Any]:
    tokens, costs = packing.tokens, packing.costs
    return {
        "method": packing.method,
        "micro_batches": len(packing),
        "documents": int(sum(len(each.document_ids) for each in packing)),
        "tokens": int(tokens.sum()),
        **({} if packing.forest is None else {"raw_tokens": packing.raw_tokens}),
        "leftover": len(packing.leftover),
        "imbalance": float(packing.imbalance),
        "largest_micro_batch": int(tokens.max(initial=0)),
        "heaviest": float(costs.max(initial=0.0)),
    }


def _packing_columns(packing: Any) -> dict[str, Any]:
    each = list(packing)
    sizes = [len(micro_batch.document_ids) for micro_batch in each]

    def joined(name: str) -> Any:
        return np.concatenate([np.zeros(0, np.int64), *(getattr(micro_batch, name) for micro_batch in each)])

    return {
        "micro_batch": np.repeat(np.arange(len(each)), sizes),
        "document_id": joined("document_ids"),
        "start": joined("starts"),
        "length": joined("lengths"),
    }


def _shard_figures(shard: Any) -> dict[str, Any]:
    pairs = shard.pairs_per_rank
    return {
        "strategy": shard.strategy,
        "cp_size": shard.cp_size,
        "documents" if shard.forest is None else "nodes": len(shard.lengths),
        "tokens": shard.num_tokens,
        "imbalance": float(pairs.max() / pairs.mean()) if pairs.any() else 1.0,
        "keys_moved": int(shard.keys_moved.max(initial=0)),
    }


def _shard_columns(shard: Any) -> dict[str, Any]:
    return {
        "rank": np.arange(shard.cp_size),
        "tokens": shard.tokens_per_rank,
        "pairs": shard.pairs_per_rank,
        "keys_moved": shard.keys_moved,
    }


_FIGURES: dict[str, Callable[[Any], dict[str, Any]]] = {"Packing": _packing_figures, "Shard": _shard_figures}
_COLUMNS: dict[str, Callable[[Any], dict[str, Any]]] = {"Packing": _packing_columns, "Shard": _shard_columns}
