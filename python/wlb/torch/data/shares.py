"""Shares of the streams in the tokens of a step: given by weights, or so that all streams end together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

from wlb._errors import error
from wlb.reading.one_stream import OneStream


class Shares:
    """The share of each stream in the tokens that are read for a step.

    Given weights stay as they are. Without weights, shares follow the rest of each stream: its documents that are left
    (`len`) times the mean length of those read, so that all streams end together. Streams that are shards of one data
    set (`whole`, as `streams_of` names it) have equal shares.

    Attributes:
        weights: one for each stream; or None.
        sizes: documents of each stream; or None if there are weights.

    Raises:
        wlb.WlbError: the number of weights is not that of streams, or one is no finite number above 0; or there are no
            weights, and a stream does not say how many documents it has.
    """

    def __init__(self, streams: Sequence[Iterable[Any]], weights: Sequence[float] | None) -> None:
        self.weights: list[float] | None = None
        self.sizes: list[int] | None = None
        if weights is not None:
            self.weights = _checked(weights, len(streams))
            return
        wholes = [getattr(stream, "whole", None) for stream in streams]
        if len(streams) == 1 or (wholes[0] is not None and all(whole is wholes[0] for whole in wholes)):
            self.weights = [1.0] * len(streams)
            return
        self.sizes = [_size(stream, number) for number, stream in enumerate(streams)]

    def tokens(self, streams: Sequence[OneStream], tokens: int) -> list[int]:
        """Divides `tokens` among streams: at least 1 each, and 0 for a stream that has ended. O(streams)."""
        if self.sizes is None:
            assert self.weights is not None
            parts = self.weights
        else:
            read = [stream.so_far for stream in streams]
            documents = sum(number for _, number in read)
            mean = sum(size for size, _ in read) / documents if documents else 1.0
            parts = [stream.tokens_left(size, mean) for stream, size in zip(streams, self.sizes, strict=True)]
        live = [0.0 if stream.ended else part for stream, part in zip(streams, parts, strict=True)]
        total = math.fsum(live)
        ends = [math.floor(tokens * (end / total)) for end in itertools.accumulate(live)] if total else []
        starts = [0, *ends[:-1]]
        return [max(end - start, 1) if part else 0 for part, start, end in zip(live, starts, ends, strict=True)]


def _checked(weights: Sequence[float], count: int) -> list[float]:
    try:
        given = [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise error("weights", "must be a number for each stream", value=weights) from None
    if len(given) != count:
        raise error("weights", f"has {len(given)} values for {count} streams", value=len(given))
    for number, weight in enumerate(given):
        if not 0 < weight < math.inf:
            message = f"= {weight}: must be a finite number above 0; leave a stream out that is not to be read"
            raise error("weights", message, index=number, value=weight)
    return given


def _size(stream: Any, number: int) -> int:
    try:
        return len(stream)
    except (TypeError, AttributeError, NotImplementedError):
        message = (
            f"is missing: streams[{number}] (a {type(stream).__name__}) does not say how many documents it has, so its "
            "share of a step is not known; give one number for each stream, in proportion to their tokens"
        )
        raise error("weights", message) from None
