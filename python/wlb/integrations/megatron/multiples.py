"""Multiples of tokens that Megatron-Core's kernels need for a document and for a rank's row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from numpy.typing import ArrayLike, NDArray

from wlb._errors import check_integer, error


def required_multiple(*, cp_size: int, tp_size: int = 1) -> int:
    """Tokens of every document must be a multiple of this number.

    Args:
        cp_size: context-parallel ranks.
        tp_size: tensor-parallel ranks if the model is sequence parallel, else 1.
    """
    for argument, value in (("cp_size", cp_size), ("tp_size", tp_size)):
        if value < 1:
            raise error(argument, f"must be at least 1, not {value}", value=value)
    return (2 * cp_size if cp_size > 1 else 1) * tp_size


def row_multiple(config: Any, *, cp_size: int, multiple_of_tokens: int = 1) -> int:
    """Tokens of a rank's row, with all its documents, must be a multiple of this number.

    Twice for context parallelism, whose ranks hold two chunks of every document; the number of tensor-parallel ranks if
    they share tokens (sequence parallelism); and what the kernels of FP8 (16), MXFP8 (32) and FP4 demand, by
    Megatron-Core's own rule. Use it in the plan, so that `max_tokens` counts the padding:
    ``Packer(multiple_of_tokens=row_multiple(config, cp_size=cp_size), cp_size=cp_size)``, and pad rows to
    ``packing.padded_tokens`` with one more document.

    Args:
        config: a `TransformerConfig`.
        cp_size: context-parallel ranks.
        multiple_of_tokens: another multiple that is needed, such as 128 for HybridEP.
    """
    check_integer("multiple_of_tokens", multiple_of_tokens, minimum=1)
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(2 if cp_size > 1 else 1, shares, quantized_multiple(config), multiple_of_tokens)


def quantized_multiple(config: Any) -> int:
    """Multiple of tokens that matrix products in FP8 or FP4 need; 1 in other formats."""
    quantized = getattr(config, "fp8", None) or getattr(config, "fp4", None)
    return get_align_size_for_quantization(config) if quantized else 1


def padded_lengths(lengths: ArrayLike, *, pad_multiple: int) -> NDArray[np.int64]:
    """Rounds lengths (int[n], tokens) up to multiples of `pad_multiple`; pack the result. int64[n]."""
    if pad_multiple < 1:
        raise error("pad_multiple", f"must be at least 1, not {pad_multiple}", value=pad_multiple)
    return -(-np.asarray(lengths, dtype=np.int64) // pad_multiple) * pad_multiple
