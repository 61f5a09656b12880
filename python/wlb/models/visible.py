"""The keys that a query sees, as transformers' configuration of a layer says: no run on the meta device shows them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from wlb.models.blocks import Mask
from wlb.models.keys import LEGACY, Refused, says_nothing

ATTENTION = re.compile(r"[Aa]ttention|[Aa]ttn|MLA")
"""Classes of attention."""

# "reference_sliding_attention" is a window in generation only: in training all tokens see the reference.
_FULL = ("full_attention", "global", "attention", "full", "hybrid", "reference_sliding_attention")
_SLIDING = ("sliding_attention", "local", "local_attention", "sliding", "hybrid_sliding")

# Keys that may change which keys a query sees or how often a layer runs. A key is refused unless this file reads it
# (`_NOT_SUSPECT`) or it means something else (`_INNOCENT`).
_SUSPECT = re.compile(
    r"(^|_)(index|indexer|sparse|compress|compression|csa|hca|moba|nsa|block_sparse|block_size|kpool|stride|sink_window|"
    r"local|attention_window|window|chunk_size|loop|loops|recurrences|recurrent_depth|cla|mod_capacity|layer_skip)(_|$)"
)
_INNOCENT = re.compile(r"expert|layer_|sliding_window_pattern|indexer_types|kwargs|rope|mtp|_freq$|_offset$")
_NOT_SUSPECT = frozenset(
    {
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "attention_chunk_size",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "chunk_size_feed_forward",
        "chunk_size",
        "window_size",
        "local_attention",
        "index_topk",
        "decoder_sparse_step",
        "router_sparse_step",
        "num_sparse_encoder_layers",
        "sparse_step",
        "mamba_chunk_size",
        "swiglu_limit",
        "sliding_window_size",
        "attention_window_size",
        "index_n_heads",
        "index_head_dim",
        "index_kpool",
        "index_kpool_always_select_tail",
    }
)


def get(config: Any, name: str) -> Any:
    """A value of the configuration, or None."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers raises it if layers have different values
        return None


def integer(config: Any, *names: str) -> int:
    """The first of these values that is a whole number.

    Raises:
        Refused: none is.
    """
    for name in names:
        value = get(config, name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    raise Refused(f"has no {names[0]} that transformers' configuration would say", None)


def unit(config: Any) -> int:
    """Tokens of which documents must be a multiple, so that no block or compressed key is cut."""
    rates = get(config, "compress_rates")
    sizes = [*rates.values()] if isinstance(rates, Mapping) else []
    sizes += [get(config, name) for name in ("index_block_size", "index_kpool", "indexer_compress_ratio")]
    return math.lcm(16, *(size for size in sizes if isinstance(size, int) and size > 0))


def kind_of(config: Any, layer: Any, index: int, count: int) -> tuple[str, int]:
    """The mask of a layer's attention: ("full", 0), ("window", size), ("chunk", size), or another kind's name.

    Args:
        config: transformers' configuration of the layer.
        layer: the layer's module.
        index: its place among the layers.
        count: number of layers.

    Raises:
        Refused: a window is named, and its size is not found.
    """
    kinds = get(config, "layer_types") or get(config, "layers_block_type")
    kind = ""
    if isinstance(kinds, (list, tuple)) and len(kinds) == count:
        kind = LEGACY.get(str(kinds[index]), str(kinds[index]))
    window = _window(config, layer)
    indexed = kind == "indexed_attention" and (get(config, "index_topk") or get(config, "indexer_budget"))
    if kind in _FULL or indexed:
        return ("full", 0)
    if kind in _SLIDING:
        if not window:
            raise Refused(f"has layer_types {kind!r} and no sliding_window", kind)
        return ("window", window)
    if kind == "chunked_attention":
        chunk = get(config, "attention_chunk_size")
        return ("chunk", int(chunk)) if chunk else ("full", 0)
    if kind:
        return (kind, 0)
    local = get(config, "attention_layers")
    if isinstance(local, (list, tuple)) and len(local) == count:  # GPT-Neo
        return ("window", integer(config, "window_size")) if local[index] == "local" else ("full", 0)
    return ("window", window) if window else ("full", 0)


def _window(config: Any, layer: Any) -> int:
    """Tokens that a query of the layer sees, itself included; 0: no window.

    The attention module's own `sliding_window` has precedence over the configuration.
    """
    if get(config, "use_sliding_window") is False:
        return 0
    for inner in layer.modules():
        if ATTENTION.search(type(inner).__name__) and hasattr(inner, "sliding_window"):
            size = inner.sliding_window
            size = size[0] + 1 if isinstance(size, tuple) and size and isinstance(size[0], int) else size
            return int(size) if isinstance(size, int) and size > 0 else 0
    names = ("sliding_window", "sliding_window_size", "attention_window_size")
    size = next((value for name in names if (value := get(config, name))), None)
    return int(size) if isinstance(size, int) and not isinstance(size, bool) and size > 0 else 0


def seen(config: Any, part: Any, kind: tuple[str, int], pair: float, scores: float) -> dict[Mask, int]:
    """FLOPs of each (query, key) pair by mask, from those that a run without masks counts.

    Args:
        config: transformers' configuration of the layer.
        part: the module of attention.
        kind: as `kind_of` says.
        pair: FLOPs of each pair of the whole square, without the scores of an indexer.
        scores: FLOPs of each pair in an indexer, which scores all keys before a query.

    Raises:
        Refused: some key may change what a query sees, and wlb does not know how.
    """
    whole = {Mask(): round(scores)} if scores else {}
    selected = _selected(config, part, kind, pair)
    if selected is None:
        mask = _mask(config, part, kind)
        selected = {mask: round(pair)}
    for mask, flops in selected.items():
        whole[mask] = whole.get(mask, 0) + flops
    return whole


def _selected(config: Any, part: Any, kind: tuple[str, int], pair: float) -> dict[Mask, int] | None:
    """Attention to keys that are selected or compressed; None: the mask alone decides.

    A query sees as many keys as under a window of the selected number, but other keys. Where whole blocks are selected,
    its own block is half full on average.
    """
    kept = getattr(part, "keep_window_size", None)
    if kind[0] == "full" and isinstance(kept, int):  # Doge
        return {Mask("window", kept): round(pair)}
    if get(config, "compress_rates") and hasattr(part, "compressor"):
        return _compressed(config, part, kind[0], pair)
    if getattr(part, "indexer", None) is not None and get(config, "index_block_size"):  # MiniMax M3
        block, blocks = integer(config, "index_block_size"), integer(config, "index_topk_blocks")
        return {Mask("window", (blocks - 1) * block + (block + 1) // 2): round(pair)}
    if hasattr(part, "indexer") and get(config, "index_block_size"):
        return {Mask(): round(pair)}
    if getattr(part, "indexer", None) is not None and get(config, "indexer_budget"):  # Qwen4-Exp
        block, budget = integer(config, "indexer_compress_ratio"), integer(config, "indexer_budget")
        return {Mask("window", budget + block // 2): round(pair)}
    top = get(config, "index_topk")
    if not top or (kind[0] == "window" and getattr(part, "indexer", None) is None):
        return None
    if kind[0] != "full":
        raise Refused("has an indexer beside a sliding window: what that costs is not known to wlb", None)
    if not get(config, "kv_lora_rank"):
        raise Refused("has index_topk and attention that is not latent: what that costs is not known to wlb", None)
    # The keys that this layer's or an earlier layer's indexer selects. GLM-5-Next selects pools of keys.
    pool = get(config, "index_kpool") or 1
    tail = pool // 2 if get(config, "index_kpool_always_select_tail") else 0
    return {Mask("window", int(top) + tail): round(pair)}


def _compressed(config: Any, part: Any, kind: str, pair: float) -> dict[Mask, int]:
    """DeepSeek V4's attention: a window, and compressed keys that stand for `rate` tokens each.

    A query sees all compressed keys before it, or those that an indexer selects. At `position` there are
    `floor((position + 1) / rate)`. The count leaves out the rounding, which is about half a key too many.
    """
    window = Mask("window", integer(config, "sliding_window"))
    if kind == "window":
        return {window: round(pair)}
    rates = get(config, "compress_rates")
    rate = rates.get(kind) if isinstance(rates, Mapping) else None
    if not isinstance(rate, int) or rate < 1 or part.compressor is None:
        raise Refused(f"has layer_types {kind!r} without its rate in compress_rates", kind)
    selected = Mask()
    if kind == "compressed_sparse_attention":
        selected = Mask("window", integer(config, "index_topk") * rate)
    flops = pair * rate / (rate + 1)  # of the tokens' own keys; there are `rate` of them for each compressed one
    total = Counter({window: round(flops)})
    total[selected] += round(flops / rate)
    return dict(total)


def _mask(config: Any, part: Any, kind: tuple[str, int]) -> Mask:
    name, size = kind
    for key, value in _suspects(config):
        message = f"has {key} = {value!r:.40}: what its attention does with that is not known to wlb"
        raise Refused(message, value)
    if name == "full":
        return Mask()
    if name in ("window", "chunk"):
        return Mask(name, size)  # type: ignore[arg-type]
    raise Refused(f"has layer_types {name!r}: what its attention meets is not known to wlb", name)


def _suspects(config: Any) -> Iterator[tuple[str, object]]:
    kernels = {"block_size"} if "linear_attention" in (get(config, "layer_types") or ()) else {}  # MiniMax's scan
    for name, value in sorted(vars(config).items()):
        if name in kernels:
            continue
        if name in _NOT_SUSPECT or _INNOCENT.search(name) or says_nothing(name, value) or isinstance(value, str):
            continue
        if _SUSPECT.search(name) and isinstance(value, (int, list, tuple, dict)):
            yield name, value
