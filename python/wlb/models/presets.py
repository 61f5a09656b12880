"""Shapes of models by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _shape(layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, vocab: int = 32000) -> dict[str, int]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": ffn,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "vocab_size": vocab,
    }


_LLAMA2_7B = _shape(32, 4096, 11008, 32, 32)
_LLAMA2_70B = _shape(80, 8192, 28672, 64, 8)
_LLAMA3_VOCABULARY = 128256
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": _LLAMA2_7B,
    "llama2-13b": _shape(40, 5120, 13824, 40, 40),
    "llama2-70b": _LLAMA2_70B,
    "llama3-8b": _shape(32, 4096, 14336, 32, 8, _LLAMA3_VOCABULARY),
    "llama3-70b": _LLAMA2_70B | {"vocab_size": _LLAMA3_VOCABULARY},
    "llama3-405b": _shape(126, 16384, 53248, 128, 8, _LLAMA3_VOCABULARY),
    "wlb-llm-550m": _shape(16, 1536, 4096, 12, 12),
    "wlb-llm-7b": _LLAMA2_7B,
    "wlb-llm-30b": _shape(64, 6144, 16384, 48, 48),
    "wlb-llm-70b": _LLAMA2_70B,
}


def preset_named(name: object) -> str | None:
    """The name of the preset, read in any case; None if there is no such preset."""
    found = name.lower().replace("_", "-") if isinstance(name, str) else None
    return found if found in PRESETS else None


def presets() -> list[str]:
    """Names that `wlb.ModelConfig.preset` knows."""
    return list(PRESETS)
