"""Saved states, looked at before they are trusted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from wlb._errors import error

T = TypeVar("T")


def field(state: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """`state[name]`, if it is of that type.

    Raises:
        wlb.WlbError: It is missing, or something else, or a negative number.
    """
    if not isinstance(state, Mapping) or name not in state:
        raise error("state", f"has no {name!r}: not what state_dict() gave")
    value = state[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise error("state", f"has {name!r} = {value!r}, not of type {kind.__name__}", value=value)
    if isinstance(value, int) and value < 0 and name not in ("seed", "credit"):
        raise error("state", f"has {name!r} = {value!r}, below 0", value=value)
    return value


def same(state: Mapping[str, Any], expected: Mapping[str, Any], where: str) -> None:
    """Checks that `state` has what is `expected`; names the first that differs.

    Raises:
        wlb.WlbError: It is missing or differs.
    """
    for name, value in expected.items():
        found = field(state, name, object)
        if found != value:
            raise error("state", f"was saved with {name} = {found!r}; {where} has {value!r}", value=found)
