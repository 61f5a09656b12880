"""Tiny models of transformers' families with a causal convolution or a recurrent state."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from tests.oracles.transformers_models import CASES, Case, build

VARLEN: Final = "varlen_stand_in"  # attention that is told cu_seq_lens_q, as flash attention is

_KNOWN: dict[str, Case] = {case.model_type: case for case in CASES}
_BOTH: Final = ["linear_attention", "full_attention"]
_INKLING: Final = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 32,
    "rel_extent": 16,
    "intermediate_size": 96,
}

# Two layers, of each kind one, where a family has no other need.
FAMILIES: dict[str, Case] = {
    case.model_type: replace(case, tiny={"num_hidden_layers": 2} | case.tiny)
    for case in (
        Case(
            "bailing_hybrid",
            {
                "n_group": 1,
                "topk_group": 1,
                "num_key_value_heads": 4,
                "num_local_experts": 6,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "layer_types": _BOTH,
            },
        ),
        Case("bamba", {"head_dim": ..., "attn_layer_indices": [1]}),
        _KNOWN["falcon_h1"],
        Case("falcon_mamba", {"head_dim": ..., "intermediate_size": ...}),
        Case(
            "glm5_next",
            {
                "head_dim": 0,
                "qk_rope_head_dim": 0,
                "num_key_value_heads": 4,
                "index_kpool": 4,
                "layer_types": ["linear_attention", "indexed_attention"],
            },
            vision={"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64},
        ),
        Case("granitemoehybrid", {"head_dim": ..., "layer_types": _BOTH}),
        Case("inkling_text", _INKLING),
        Case("inkling2_text", _INKLING | {"unpadded_vocab_size": 211}),
        Case(
            "inkling2_loop_text",
            _INKLING
            | {
                "unpadded_vocab_size": 211,
                "num_hidden_layers": 3,
                "n_layers_per_attn_res_block": 1,
                "loop_layer_index_start": 1,
                "loop_layer_index_end": 2,
            },
        ),
        Case("jamba", {"head_dim": ..., "attn_layer_offset": 1, "attn_layer_period": 2}),
        Case(
            "kimi_linear",
            {"head_dim": ..., "num_experts_per_token": 2, "num_key_value_heads": 4, "layer_types": _BOTH},
        ),
        Case("lara_mini", {"layer_types": _BOTH}),
        Case("lfm2", {"head_dim": ..., "layer_types": ["conv", "full_attention"]}),
        Case("lfm2_moe", {"head_dim": ..., "num_dense_layers": 1, "layer_types": ["conv", "full_attention"]}),
        Case("lfm3", {"layer_types": ["conv", "full_attention"]}),
        _KNOWN["mamba"],
        _KNOWN["mamba2"],
        Case("minimax", {"layer_types": _BOTH}),
        Case("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": ...}),
        Case("olmo_hybrid", {"head_dim": ..., "layer_types": _BOTH}),
        Case("qwen3_5_text", {"layer_types": _BOTH}),
        Case("qwen3_5_moe_text", {"layer_types": _BOTH}),
        Case("qwen3_next", {"layer_types": _BOTH}),
        replace(_KNOWN["qwen4_exp_text"], tiny=_KNOWN["qwen4_exp_text"].tiny | {"num_hidden_layers": 4}),
        Case("recurrent_gemma", {"head_dim": ..., "num_hidden_layers": 3}),
        Case("rwkv", {"head_dim": ..., "intermediate_size": ...}),
        Case("xlstm", {"head_dim": ..., "intermediate_size": ...}),
        Case(
            "zamba",
            {
                "head_dim": ...,
                "num_hidden_layers": 4,
                "num_key_value_heads": 4,
                "layers_block_type": ["linear_attention", "hybrid"] * 2,
            },
        ),
        Case(
            "zamba2",
            {
                "head_dim": ...,
                "n_mamba_heads": 8,
                "num_mem_blocks": 1,
                "layers_block_type": ["linear_attention", "hybrid"],
            },
        ),
        Case("zaya", {"num_experts_per_tok": 1}),
    )
}


def tiny(family: str, *, seed: int = 0, **options: Any) -> Any:
    """A model with random weights, in training mode; those that begin at 0 have others."""
    torch.manual_seed(seed)
    model = build(FAMILIES[family].tiny_config(), **options).train()
    with torch.no_grad():
        for weight in model.parameters():
            if not weight.any():
                weight.normal_(std=0.02)
    return model


def varlen_stand_in(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **kwargs: Any
) -> tuple[Tensor, None]:
    """Causal attention inside of each document of `cu_seq_lens_q`, without a mask."""
    assert attention_mask is None
    ends = kwargs["cu_seq_lens_q"].tolist() if "cu_seq_lens_q" in kwargs else [0, query.shape[2]]
    groups = query.shape[1] // key.shape[1]
    parts = [
        F.scaled_dot_product_attention(
            query[:, :, begin:end],
            key[:, :, begin:end].repeat_interleave(groups, 1),
            value[:, :, begin:end].repeat_interleave(groups, 1),
            is_causal=True,
            scale=scaling,
        )
        for begin, end in pairwise(ends)
        if end > begin
    ]
    return torch.cat(parts, 2).transpose(1, 2), None


AttentionInterface.register(VARLEN, varlen_stand_in)
AttentionMaskInterface.register(VARLEN, flash_attention_mask)
