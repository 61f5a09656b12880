"""Interfaces of flash kernels, as upstream has them: what stands in for them takes these arguments and no others."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

# Module, names, and parameters of the functions forward and backward: upstream's, 2.7, 3 and
# 4.0.0b36; those of torch that are used, the first by flash-attn's names.
UPSTREAM: dict[int | str, tuple[str, tuple[str, str], str, str]] = {
    2: (
        "flash_attn.flash_attn_interface",
        ("_flash_attn_varlen_forward", "_flash_attn_varlen_backward"),
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None",
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
        "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, "
        "deterministic, rng_state=None",
    ),
    3: (
        "flash_attn_interface",
        ("_flash_attn_forward", "_flash_attn_backward"),
        "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, "
        "cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, "
        "page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, "
        "seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, "
        "window_size_left=-1, window_size_right=-1, attention_chunk=0, softcap=0.0, rotary_interleaved=True, "
        "scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0",
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, "
        "window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0",
    ),
    4: (
        "flash_attn.cute.interface",
        ("_flash_attn_fwd", "_flash_attn_bwd"),
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None, "
        "window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
        "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, "
        "mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, "
        "aux_scalars=None, q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, "
        "scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False, "
        "gather_bwd_recompute_p=False",
        "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, "
        "window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2, "
        "num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, "
        "AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
        "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None, "
        "learnable_sink=None",
    ),
    "torch": (
        "torch.ops.aten",
        ("_flash_attention_forward", "_flash_attention_backward"),
        "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, is_causal, "
        "return_debug_mask, *, scale, window_size_left, window_size_right",
        "dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, "
        "is_causal, rng_state, unused, *, scale, window_size_left, window_size_right",
    ),
}

# Arguments that the stand-in computes with; it refuses any other option that is not off.
USED = {
    *("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "softmax_scale", "alibi_slopes"),
    *("causal", "is_causal", "window_size_left", "window_size_right", "dout", "out", "softmax_lse", "dq", "dk", "dv"),
    *("scale", "out_", "softcap", "lse", "return_lse"),
}
# Defaults that are not 0, and change no result.
OFF = {"rotary_interleaved": True, "num_splits": 1, "num_threads": (256, 384), "m_block_size": 64, "n_block_size": 128}
OFF |= dict.fromkeys(("num_stages_Q", "num_stages_dO", "AtomLayoutMSdP", "AtomLayoutNdKV", "AtomLayoutMdQ"), 2)


def bound(parameters: str, compute: Callable[[dict[str, Any]], Any]) -> Callable[..., Any]:
    """A function of these parameters that computes with those that are `USED`, and refuses others that are not off."""
    upstream = inspect.signature(eval(f"lambda {parameters}: None"))

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = upstream.bind(*args, **kwargs)
        arguments.apply_defaults()
        options = arguments.arguments
        for name in options.keys() - USED:
            assert not np.asarray(options[name]).any() or np.isin(options[name], OFF.get(name, ())), name
        return compute(options)

    function.__signature__ = upstream  # type: ignore[attr-defined]
    return function
