"""A hash over a whole saved state, so that no part of it can be changed unnoticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from wlb._errors import error


class Hashed(str):
    """The hash of a text or of a sealed state, stored in its place so that it is not hashed again in every step."""

    __slots__ = ()

    @classmethod
    def of(cls, text: str) -> Hashed:
        """The hash of a long text."""
        return cls(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def digest_of(state: Mapping[str, Any]) -> str:
    """A hash over a whole state without its "digest", in hex; equal wherever and however the state was stored.

    The state is hashed as JSON with sorted keys. Two parts can be large and unchanged over many steps, so each counts
    with a hash of its own: the texts of the documents in "waiting", and a sealed state in "batches".

    Raises:
        wlb.WlbError: the state holds something that is neither a JSON value nor an array.
    """
    content = {name: value for name, value in state.items() if name != "digest"}
    if isinstance(waiting := content.get("waiting"), list):
        content["waiting"] = [_by_hash(record) for record in waiting]
    if (
        isinstance(inner := content.get("batches"), Mapping)
        and "digest" in inner
        and inner["digest"] == digest_of(inner)
    ):
        content["batches"] = Hashed(inner["digest"])
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as cause:
        raise error("state", f"has no digest: {cause}") from cause
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with its digest; a digest that it had is replaced."""
    return {**state, "digest": digest_of(state)}


def check_seal(state: Mapping[str, Any]) -> None:
    """Refuses a state that differs in any digit from the state that was saved.

    Raises:
        wlb.WlbError: it is no state, its digest is missing, or the digest does not fit the content.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("digest"), str):
        raise error("state", "has no 'digest': not what state_dict() gave")
    saved, found = state["digest"], digest_of(state)
    if saved != found:
        message = f"has digest {saved!r}, but its content has {found!r}: it was changed after it was saved"
        raise error("state", message, value=saved)


def _by_hash(record: Any) -> Any:
    if not isinstance(record, Mapping):
        return record
    return {
        name: Hashed.of(value) if isinstance(value, str) and not isinstance(value, Hashed) else value
        for name, value in record.items()
    }


def _plain(value: Any) -> Any:
    """Turns a foreign state into plain values: JSON, arrays, tensors and bytes (random generators have these)."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        return {"dtype": array.dtype.str, "shape": list(np.shape(value)), "bytes": array.tobytes().hex()}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    raise TypeError(f"{type(value).__name__} is neither a JSON value nor an array")
