"""A hash over the whole of a saved state, so that nothing in it can be changed unseen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from wlb._errors import error


class Hashed(str):
    """The hash of a text or of a sealed state, in its place: what has been hashed once is not hashed in every step."""

    __slots__ = ()

    @classmethod
    def of(cls, text: str) -> Hashed:
        """The hash of a long text."""
        return cls(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def digest_of(state: Mapping[str, Any]) -> str:
    """A hash over all of a state but its own "digest": hex, the same wherever and however the state was stored.

    It is that of the state as JSON with sorted keys. Two parts may be large and stay the same over many steps; each
    counts by a hash of its own: texts of the documents in "waiting", and a sealed state in "batches".

    Raises:
        wlb.WlbError: It holds something that is neither a JSON value nor an array.
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
    """The state with its digest, whatever digest it had."""
    return {**state, "digest": digest_of(state)}


def check_seal(state: Mapping[str, Any]) -> None:
    """Refuses a state that is not, to the last digit, what was saved.

    Raises:
        wlb.WlbError: It is none, or its digest is missing, or that of something else.
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
    """A foreign state as plain values: JSON, arrays, tensors and bytes (random generators have these)."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        return {"dtype": array.dtype.str, "shape": list(np.shape(value)), "bytes": array.tobytes().hex()}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    raise TypeError(f"{type(value).__name__} is neither a JSON value nor an array")
