"""Seconds of attention in layers of any kind, from a kernel model of causal attention over all keys.

Assumptions beyond the kernel model:

- A chunk is a document of its own: chunks cut a segment into segments with the keys of their chunks.
- A pair under a window of `w` keys takes as long as a pair of a segment of `w` queries whose last query sees `2 w - 1`
  keys, because its tiles have about as many keys. The sum is never more than with all keys.
- With other heads, seconds are proportional to the FLOPs of their pairs. So are those of latent attention, whose keys
  and values have other widths, and of the scores of an indexer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Passes
from wlb._core import KernelModel, Shard
from wlb.models import Mask, ModelConfig

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


def segment_seconds(
    kernel: KernelModel, query_lengths: ArrayLike, key_lengths: ArrayLike, mask: Mask, *, passes: Passes
) -> Floats:
    """Seconds of segments under a mask, with the heads of the kernel model.

    Args:
        kernel: of causal attention over all keys.
        query_lengths: int[n] queries of each segment.
        key_lengths: int[n] position of its last query in its document, counted from 1.
        mask: of the layer.
        passes: which passes to count.

    Returns:
        float64[n].
    """
    queries, keys = (np.asarray(lengths, dtype=np.int64) for lengths in (query_lengths, key_lengths))
    if mask.kind == "window":
        return _window_seconds(kernel, queries, keys, mask.size, passes)
    if mask.kind == "chunk":
        return _chunk_seconds(kernel, queries, keys, mask.size, passes)
    return kernel.segment_seconds(queries, keys, passes=passes)


def _window_seconds(kernel: KernelModel, queries: Integers, keys: Integers, window: int, passes: Passes) -> Floats:
    unlimited = kernel.segment_seconds(queries, keys, passes=passes)
    # A part of the segment; all of it if the window hides nothing.
    of_part = np.where(keys <= window, queries, np.minimum(queries, window))
    part_keys = np.minimum(keys, of_part + window - 1)
    part = kernel.segment_seconds(of_part, part_keys, passes=passes)
    # Pairs of the last `q` queries of the first `k` positions, with and without the window.
    share = (_window_pairs(keys, window) - _window_pairs(keys - queries, window)) / (
        _window_pairs(part_keys, None) - _window_pairs(part_keys - of_part, None)
    )
    return np.where(keys <= window, unlimited, np.minimum(part * share, unlimited))


def _window_pairs(positions: Integers, window: int | None) -> Floats:
    """Pairs of all queries up to a position."""
    inside = positions if window is None else np.minimum(positions, window)
    beyond = (positions - inside) * float(window or 0)
    return np.asarray(inside * (inside + 1.0) / 2 + beyond)


def _chunk_seconds(kernel: KernelModel, queries: Integers, keys: Integers, chunk: int, passes: Passes) -> Floats:
    first = (keys - queries) // chunk
    pieces = (keys - 1) // chunk - first + 1
    of_segment = np.repeat(np.arange(queries.size), pieces)
    begins = np.cumsum(pieces) - pieces
    number = first[of_segment] + np.arange(of_segment.size) - begins[of_segment]
    start = np.maximum((keys - queries)[of_segment], number * chunk)
    end = np.minimum(keys[of_segment], (number + 1) * chunk)
    seconds = kernel.segment_seconds(end - start, end - number * chunk, passes=passes)
    return np.bincount(of_segment, weights=seconds, minlength=queries.size).astype(np.float64)


def rank_seconds(kernel: KernelModel, shard: Shard, mask: Mask, *, passes: Passes) -> Floats:
    """float64[cp]: seconds of every rank's segments under a mask, as `wlb.KernelModel.rank_seconds`."""
    seconds = kernel.rank_seconds(shard, passes=passes)
    if mask.kind == "full":
        return seconds
    for rank in range(shard.cp_size):
        of_rank = shard.rank(rank)
        if of_rank.num_segments:
            queries, keys = np.diff(of_rank.cu_seqlens_q), np.diff(of_rank.cu_seqlens_k)
            masked = segment_seconds(kernel, queries, keys, mask, passes=passes).sum()
            # The fixed time of a call stays the same.
            seconds[rank] += masked - kernel.segment_seconds(queries, keys, passes=passes).sum()
    return np.maximum(seconds, 0.0)


def attention_of_kinds(model: ModelConfig) -> tuple[tuple[Mask, ...], Floats]:
    """The masks of a model's layers, and the attention under each mask in a layer of each of `model.kinds`.

    Returns:
        masks; float64[masks, kinds], relative to a layer with the heads of `model.kernel_heads` under that mask.
    """
    heads, _, width = model.kernel_heads
    masks = tuple(dict.fromkeys(mask for layer in model.kinds for mask in layer.pairs()))
    weights = np.zeros((len(masks), len(model.kinds)))
    for column, layer in enumerate(model.kinds):
        for mask, flops in layer.pairs().items():
            weights[masks.index(mask), column] = flops / (4 * heads * width)
    return masks, weights
