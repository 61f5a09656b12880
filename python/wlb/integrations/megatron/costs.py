"""Costs of documents in a model of Megatron-Core."""

from __future__ import annotations

from typing import Any

import wlb
from wlb._core import MAX_TOKENS
from wlb._errors import error

# If one of these is set, the costs of layers cannot be computed from their sizes.
_UNLIKE = {
    "multi_latent_attention": "latent attention",
    "is_hybrid_model": "Mamba layers",
    "experimental_attention_variant": "another attention",
    "heterogeneous_block_specs": "layers that differ",
    "moe_shared_expert_intermediate_size": "shared experts",
    "mtp_num_layers": "layers of multi-token prediction",
}


def cost_of(config: Any, *, vocab_size: int) -> wlb.CostModel:
    """FLOPs of a document, from the sizes of a `TransformerConfig`.

    Args:
        config: of a model whose layers are equal.
        vocab_size: rows of the output layer, which are not in the configuration.

    Raises:
        wlb.WlbError: there is no configuration, or sizes do not tell the costs of its layers: give `cost_model`.
    """
    if config is None:
        raise error("cost_model", "is missing: give it, or the model's configuration to derive it from")
    found = [words for name, words in _UNLIKE.items() if getattr(config, name, None)]
    if 0 <= (getattr(config, "window_size", None) or (-1, 0))[0] < MAX_TOKENS - 1:  # keys before the query's own
        found.append("windows")
    if getattr(config, "num_moe_experts", None) and getattr(config, "moe_layer_freq", 1) != 1:
        found.append("layers with and without experts")
    if found:
        message = f"is missing: the model has {', '.join(found)}, so its sizes do not say what documents cost"
        raise error("cost_model", f"{message}; see wlb.ModelConfig(layers=...).cost_model()")
    experts = getattr(config, "num_moe_experts", None)
    width = getattr(config, "moe_ffn_hidden_size", None) if experts else None
    shape = wlb.ModelConfig(
        hidden_size=config.hidden_size,
        vocab_size=vocab_size,
        ffn_hidden_size=width or config.ffn_hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups or config.num_attention_heads,
        head_dim=config.kv_channels,
        gated_ffn=bool(config.gated_linear_unit),
        num_experts=experts or 1,
        experts_per_token=config.moe_router_topk if experts else 1,
    )
    return shape.cost_model()
