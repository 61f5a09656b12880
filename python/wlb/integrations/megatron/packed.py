"""`PackedSeqParams` of Megatron-Core, and each context-parallel rank's slice, for a loop that makes its own batches.

:func:`wlb.integrations.megatron.data_iterator` does all this by itself. Transformer Engine cuts every document of a
packed (thd) sequence into ``2 * cp_size`` equal chunks, so each needs padding. Pad the lengths *before* packing: then
``max_tokens`` counts the padding, and no micro-batch overflows. With ``lengths`` of all documents of the run,
int64[documents], and of every global batch their indices ``ids``::

    multiple = required_multiple(cp_size=cp_size)
    packing = packer.push(padded_lengths(lengths[ids], pad_multiple=multiple), ids=ids)
    micro_batch = packing[i]                                             # may hold documents of earlier pushes
    shard = wlb.shard(micro_batch.lengths, cp_size=cp_size, strategy="per_document")    # as Transformer Engine cuts
    real = real_lengths(micro_batch, lengths[micro_batch.document_ids], pad_multiple=multiple)

    batch = {"tokens": tokens, "labels": labels, "loss_mask": torch.ones(len(tokens))}        # [real tokens] each
    fill = {"tokens": pad_id, "labels": 0, "loss_mask": 0}
    batch = {name: pad(values, shard, lengths=real, fill=fill[name])[None] for name, values in batch.items()}
    batch = slice_for_rank(batch, shard, cp_rank=cp_rank)                 # [1, tokens of this rank] each
    params = packed_seq_params(shard, lengths=real, device=device)
    model(**batch, packed_seq_params=params, ...)

``max_tokens``, and ``max_document_tokens`` where the packer splits or truncates, must be multiples of ``pad_multiple``.

Tested on CPU with megatron-core 0.16: the fields against its own builder, slices against its
`get_batch_on_this_cp_rank` document by document, and its thd rotary embedding of ranks' slices against that of the
whole sequence. Its thd attention, and Transformer Engine's `thd_get_partitioned_indices`, exist on a GPU only and are
not tested.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe.moe_utils import get_align_size_for_quantization
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

import wlb
from wlb._errors import check_integer, error


def required_multiple(*, cp_size: int, tp_size: int = 1) -> int:
    """What every document's tokens must be a multiple of.

    Args:
        cp_size: context-parallel ranks.
        tp_size: tensor-parallel ranks if the model is sequence parallel, else 1.
    """
    for argument, value in (("cp_size", cp_size), ("tp_size", tp_size)):
        if value < 1:
            raise error(argument, f"must be at least 1, not {value}", value=value)
    return (2 * cp_size if cp_size > 1 else 1) * tp_size


def row_multiple(config: Any, *, cp_size: int, multiple_of_tokens: int = 1) -> int:
    """What the tokens of a rank's row, all its documents together, must be a multiple of.

    Twice for context parallelism, whose ranks hold two chunks of every document; the tensor-parallel ranks where they
    share tokens (sequence parallelism); and what the kernels of FP8 (16), MXFP8 (32) and FP4 demand, as Megatron-Core
    says it. Plan with it, so that `max_tokens` counts the padding:
    ``Packer(multiple_of_tokens=cp_size * row_multiple(config, cp_size=cp_size))``, and fill rows up to
    ``packing.padded_tokens`` with one more document.

    Args:
        config: a `TransformerConfig`.
        cp_size: context-parallel ranks.
        multiple_of_tokens: what else asks for a multiple, such as 128 for HybridEP.
    """
    check_integer("multiple_of_tokens", multiple_of_tokens, minimum=1)
    shares = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return math.lcm(2 if cp_size > 1 else 1, shares, quantized_multiple(config), multiple_of_tokens)


def quantized_multiple(config: Any) -> int:
    """What the matrix products of a model in FP8 or FP4 want a rank's tokens to be a multiple of; else 1."""
    quantized = getattr(config, "fp8", None) or getattr(config, "fp4", None)
    return get_align_size_for_quantization(config) if quantized else 1


def padded_lengths(lengths: ArrayLike, *, pad_multiple: int) -> NDArray[np.int64]:
    """Rounds lengths (int[n], tokens) up to multiples of `pad_multiple`; pack these. int64[n]."""
    if pad_multiple < 1:
        raise error("pad_multiple", f"must be at least 1, not {pad_multiple}", value=pad_multiple)
    return -(-np.asarray(lengths, dtype=np.int64) // pad_multiple) * pad_multiple


def real_lengths(micro_batch: wlb.MicroBatch, document_lengths: ArrayLike, *, pad_multiple: int) -> NDArray[np.int64]:
    """Tokens that are no padding, of each piece of a micro-batch that was packed by padded lengths.

    Args:
        micro_batch: of a plan made from :func:`padded_lengths`.
        document_lengths: int[k], unpadded tokens of the whole documents ``micro_batch.document_ids``.
        pad_multiple: as given to :func:`padded_lengths`.

    Returns:
        int64[k]. Piece ``i`` is ``document[starts[i] : starts[i] + real[i]]``.

    Raises:
        wlb.WlbError: other documents, or pieces that are not cut at multiples of `pad_multiple`.
    """
    whole = np.asarray(document_lengths, dtype=np.int64)
    if whole.shape != micro_batch.lengths.shape:
        message = f"must have shape {micro_batch.lengths.shape}, not {whole.shape}"
        raise error("document_lengths", message, value=whole.shape)
    real: NDArray[np.int64] = np.minimum(whole - micro_batch.starts, micro_batch.lengths)
    padded = padded_lengths(real, pad_multiple=pad_multiple)
    for index in np.flatnonzero((padded != micro_batch.lengths) | (real < 1))[:1]:
        raise error(
            "document_lengths",
            f"leaves {real[index]} tokens from token {micro_batch.starts[index]} on, but the plan has "
            f"{micro_batch.lengths[index]}, which is not that padded to a multiple of {pad_multiple}",
            index=int(index),
            value=int(whole[index]),
        )
    return real


def packed_seq_params(
    shard: wlb.Shard, *, lengths: ArrayLike | None = None, device: torch.device | str = "cpu", **fields: Any
) -> PackedSeqParams:
    """Megatron-Core's description of a packed sequence of padded documents, the same on every rank.

    Args:
        shard: the plan of the padded documents, cut per document.
        lengths: int[k], tokens of each document that are no padding; None if there is none.
        device: where the int32 ``cu_seqlens`` tensors are put.
        **fields: other fields that the installed version has, such as `cp_group` and `local_cp_size` (a group of this
            micro-batch's own), or `total_tokens`.

    Returns:
        `qkv_format` "thd"; `cu_seqlens_*` count real tokens and `cu_seqlens_*_padded` all tokens (one and the same
        tensor if there is no padding: Transformer Engine then uses kernels without); `max_seqlen_*` are of padded
        documents, since rotary tables and chunks cover the padding too.

    Raises:
        wlb.WlbError: the shard is not the cut that Transformer Engine makes, lengths are not of these documents, or
            the installed version has no such field.
    """
    _require_engine_cut(shard)
    known = {field.name for field in dataclasses.fields(PackedSeqParams)}
    for name in fields:
        if name not in known:
            raise error(name, "is no field of PackedSeqParams in the installed megatron-core", value=fields[name])
    real = _real(shard, lengths)
    cu_seqlens_padded = _cu_seqlens(shard.lengths, device)
    cu_seqlens = _cu_seqlens(real, device) if (real != shard.lengths).any() else cu_seqlens_padded
    longest = int(shard.lengths.max(initial=0))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        cu_seqlens_q_padded=cu_seqlens_padded,
        cu_seqlens_kv_padded=cu_seqlens_padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **fields,
    )


def padded_positions(shard: wlb.Shard, *, lengths: ArrayLike) -> NDArray[np.int64]:
    """Where in the padded sequence each real token stands; `padded[positions]` are the real tokens.

    Args:
        shard: the plan of the padded documents.
        lengths: int[k], tokens of each document that are no padding.

    Returns:
        int64[sum(lengths)], increasing.
    """
    real = _real(shard, lengths)
    padding_before = np.cumsum(shard.lengths - real) - (shard.lengths - real)
    positions: NDArray[np.int64] = np.arange(real.sum()) + np.repeat(padding_before, real)
    return positions


def pad(values: Tensor, shard: wlb.Shard, *, lengths: ArrayLike, fill: float) -> Tensor:
    """Puts the padding between documents: `[real tokens, ...]` to `[padded tokens, ...]`, `fill` in the gaps."""
    positions = padded_positions(shard, lengths=lengths)
    if len(values) != len(positions):
        message = f"has {len(values)} tokens, the documents {len(positions)}"
        raise error("values", message, value=len(values))
    padded = values.new_full((shard.num_tokens, *values.shape[1:]), fill)
    padded[torch.from_numpy(positions).to(values.device)] = values
    return padded


def slice_for_rank(batch: Mapping[str, Tensor | None], shard: wlb.Shard, *, cp_rank: int) -> dict[str, Tensor | None]:
    """Takes this rank's tokens of `[1, padded tokens, ...]` tensors: chunks `r` and `2 * cp_size - 1 - r` of documents.

    The tokens, in the order, that Transformer Engine's `thd_get_partitioned_indices` gives Megatron-Core on a GPU. None
    stays None.

    Raises:
        wlb.WlbError: the shard is not the cut that Transformer Engine makes, or a tensor has another number of tokens.
    """
    _require_engine_cut(shard)
    indices = torch.from_numpy(shard.rank(cp_rank).token_indices)
    sliced: dict[str, Tensor | None] = {}
    for name, values in batch.items():
        if values is not None and values.shape[:2] != (1, shard.num_tokens):
            message = f"[{name!r}] must have shape [1, {shard.num_tokens}, ...], not {list(values.shape)}"
            raise error("batch", message, value=list(values.shape))
        sliced[name] = None if values is None else values.index_select(1, indices.to(values.device))
    return sliced


def _require_engine_cut(shard: wlb.Shard) -> None:
    if shard.cp_size == 1:
        return
    if shard.strategy != "per_document":
        raise error("shard", f'must be cut "per_document", not {shard.strategy!r}', value=shard.strategy)
    for index in np.flatnonzero(shard.lengths % (2 * shard.cp_size))[:1]:
        length = int(shard.lengths[index])
        message = f"has {length} tokens, not a multiple of 2 * cp_size = {2 * shard.cp_size}: pack padded_lengths(...)"
        raise error("shard", message, index=int(index), value=length)


def _real(shard: wlb.Shard, lengths: ArrayLike | None) -> NDArray[np.int64]:
    if lengths is None:
        return shard.lengths.astype(np.int64)
    real = np.asarray(lengths, dtype=np.int64)
    if real.shape != shard.lengths.shape:
        raise error("lengths", f"must have shape {shard.lengths.shape}, not {real.shape}", value=real.shape)
    for index in np.flatnonzero((real < 1) | (real > shard.lengths))[:1]:
        message = f"must be from 1 to the padded {shard.lengths[index]} tokens, not {real[index]}"
        raise error("lengths", message, index=int(index), value=int(real[index]))
    return real


def _cu_seqlens(lengths: NDArray[Any], device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.append(0, np.cumsum(lengths)).astype(np.int32)).to(device)
