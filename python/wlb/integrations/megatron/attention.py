"""wlb's attention inside Megatron-Core's layers, over the ranks that hold a micro-batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from numpy.typing import NDArray
from torch import Tensor

import wlb
from wlb._errors import error
from wlb.torch.attention import context_parallel_attention


@dataclass
class ShardedSeqParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron-Core's description of a packed row, with the places of its tokens on ranks.

    Attributes:
        shard: where its tokens are.
        ranks: the ranks that hold the row; None: only this one.
        position: the group whose sizes rotary embeddings use: `ranks`, or one of a single rank; None: the model's own.
        padded: whether some of this rank's tokens are padding.
    """

    shard: wlb.Shard | None = None
    ranks: dist.ProcessGroup | None = None
    position: dist.ProcessGroup | None = None
    padded: bool = False

    def __post_init__(self) -> None:
        """Refuses the shard of a forest.

        Raises:
            wlb.WlbError: it is a shard of a forest.
        """
        if self.shard is not None and self.shard.forest is not None:
            message = (
                "is of a forest: Megatron-Core finds documents by cu_seqlens, and knows no shared prefix. "
                "Collate the samples one by one (wt.collate), or run wt.context_parallel_attention in your own model"
            )
            raise error("shard", message, value=self.shard)
        if hasattr(super(), "__post_init__"):
            super().__post_init__()


class PackedSelfAttention(SelfAttention):  # type: ignore[misc]
    """Self-attention whose rotary embedding uses the ranks of the micro-batch instead of those of the model.

    Megatron-Core computes positions for the model's context-parallel group, and only its Transformer Engine kernel uses
    the group of the micro-batch. With a Dynamic-CP plan the two differ.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        whole: Any = self.pg_collection  # type: ignore[has-type]
        self.pg_collection = copy.copy(whole)  # of this layer alone

    def forward(self, *args: Any, packed_seq_params: PackedSeqParams | None = None, **kwargs: Any) -> Any:
        """Attention of a packed row; arguments and result as in Megatron-Core's `SelfAttention`."""
        position = getattr(packed_seq_params, "position", None)
        if position is None:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        group = self.pg_collection.cp
        self.pg_collection.cp = position
        try:
            return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)
        finally:
            self.pg_collection.cp = group


class PackedCoreAttention(MegatronModule):  # type: ignore[misc]
    """`wlb.torch.context_parallel_attention` as a layer's `core_attention`: packed rows without a GPU kernel.

    In Megatron-Core only Transformer Engine has attention for packed rows. The arguments are those of Megatron-Core's
    `DotProductAttention`.

    Raises:
        wlb.WlbError: the model has dropout or a kind of scores that packed attention does not have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise error("attention_dropout", f"= {dropout}: wlb's attention has none; give 0.0", value=dropout)
        if getattr(attn_mask_type, "name", "causal") not in ("causal", "padding_causal"):
            raise error("attn_mask_type", f"= {attn_mask_type.name}: must be causal", value=attn_mask_type.name)
        # With apply_query_key_layer_scaling Megatron-Core divides scores by the layer's number, because of the range of
        # half precision, and multiplies the softmax's input by it. That changes nothing, and here scores are float32.
        self._scale = config.kv_channels**-0.5 if softmax_scale is None else softmax_scale
        self._window: int | None = None
        sizes: Any = getattr(config, "window_size", None)
        if is_layer_window_attention(sizes, getattr(config, "window_attn_skip_freq", None), layer_number):
            left, right = sizes
            if right not in (0, -1):
                raise error("window_size", f"= {sizes}: causal attention sees nothing to the right", value=sizes)
            self._window = left + 1 if left >= 0 else None
        self._tp_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
        self.softmax_offset: Tensor | None = None
        self._make_sinks(config)

    def _make_sinks(self, config: TransformerConfig) -> None:
        """Makes the logits that Megatron-Core's softmax has beside the scores, by its own names."""
        softmax = getattr(config, "softmax_type", "vanilla")
        if softmax == "vanilla":
            return
        if softmax not in ("off-by-one", "learnable"):
            raise error("softmax_type", f"= {softmax!r}: 'vanilla', 'off-by-one' or 'learnable'", value=softmax)
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        offset = torch.zeros(
            config.num_attention_heads // self._tp_group.size(), dtype=config.params_dtype, device=device
        )
        if softmax == "learnable":
            offset = torch.nn.Parameter(offset)
            if config.perform_initialization:
                config.init_method(offset)
        self.softmax_offset = offset

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> Any:
        """The learnt logits for a distributed checkpoint, as Megatron-Core's own attention has them."""
        state = self.state_dict(prefix="", keep_vars=True)
        if not state:
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)
        groups = {"tp_group": self._tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention of this rank's tokens, each within its document.

        Args:
            query: `[tokens, heads, head_dim]`; for a row of one document (`qkv_format` "sbhd"), as Megatron-Core's own
                Dynamic-CP gives it, `[tokens, 1, heads, head_dim]`.
            key: like `query`, with key heads.
            value: like `key`.
            attention_mask: not used: `packed_seq_params` has the documents.
            attn_mask_type: not used either.
            attention_bias: None.
            packed_seq_params: from `wlb.integrations.megatron.get_batch`, or Megatron-Core's own.

        Returns:
            Like `query`; for "sbhd" `[tokens, 1, heads * head_dim]`.

        Raises:
            wlb.WlbError: the row is not packed; its `cu_seqlens` are not those of its tokens; or there is a bias.
        """
        if packed_seq_params is None:
            raise error("packed_seq_params", "is missing: wlb's attention is for packed rows")
        if attention_bias is not None:
            raise error("attention_bias", "is not taken by wlb's attention")
        shard, ranks = self._row(packed_seq_params, query.shape[0])
        q, k, v = (tensor.squeeze(1) if tensor.dim() == 4 else tensor for tensor in (query, key, value))
        sinks = None if self.softmax_offset is None else self.softmax_offset.to(q.device)  # a plain one stays behind
        options: Any = {"softmax_scale": self._scale, "window": self._window, "sinks": sinks}
        output: Tensor = context_parallel_attention(q, k, v, shard, group=ranks, **options)
        return output.flatten(1).unsqueeze(1) if query.dim() == 4 else output

    def _row(self, params: PackedSeqParams, tokens: int) -> tuple[wlb.Shard, dist.ProcessGroup | None]:
        """Shard and process group of a row. Megatron-Core's own rows are read from the device, once for all layers."""
        if isinstance(params, ShardedSeqParams) and params.shard is not None:
            return params.shard, params.ranks
        known: tuple[wlb.Shard, dist.ProcessGroup | None] | None = getattr(params, "_wlb_row", None)
        if known is None:
            if params.cp_group is not None or params.local_cp_size is not None:
                ranks = params.cp_group
            else:
                ranks = parallel_state.get_context_parallel_group()
            size = 1 if ranks is None else ranks.size()
            shard = wlb.shard(_documents_of(params, tokens * size), cp_size=size, strategy="per_document")
            known = params._wlb_row = shard, ranks if size > 1 else None
        return known


def _documents_of(params: PackedSeqParams, tokens: int) -> NDArray[np.int32]:
    """int32 [documents], tokens of each document of Megatron-Core's own row. Read from the device.

    Args:
        params: of the row. If `cu_seqlens` repeat their last entry, that is Megatron-Core's padding of their number.
        tokens: of the row, on all context-parallel ranks.

    Raises:
        wlb.WlbError: `cu_seqlens` do not begin at 0, do not ascend, or do not end at the row's end; or keys have other
            ones than queries.
    """
    padded = params.cu_seqlens_q_padded is not None
    name, other = ("cu_seqlens_q_padded", "cu_seqlens_kv_padded") if padded else ("cu_seqlens_q", "cu_seqlens_kv")
    found = getattr(params, name).cpu().numpy()
    keys = getattr(params, other, None)
    if keys is not None and not np.array_equal(found, keys.cpu().numpy()):
        raise error(other, f"differs from {name}: wlb's attention is for keys of the same documents as queries")
    if found.ndim != 1 or found.size < 2 or found[0] != 0:
        begin = found.reshape(-1)[:1].tolist()
        raise error(name, f"of shape {list(found.shape)} begins with {begin}: must be [documents + 1], from 0 on")
    if found[-1] != tokens:
        message = f"= {int(found[-1])}: must be the end of the row, which has {tokens} tokens on all ranks together"
        raise error(name, message, index=found.size - 1, value=int(found[-1]))
    ends = int(np.searchsorted(found, tokens)) + 1 if (np.diff(found) >= 0).all() else found.size
    lengths: NDArray[np.int32] = np.diff(found[:ends])
    if (lengths < 1).any():
        at = int((lengths < 1).argmax())
        message = f"= {int(found[at + 1])} after {int(found[at])}: must ascend; only the last entry may be repeated"
        raise error(name, message, index=at + 1, value=int(found[at + 1]))
    return lengths


def packed_layers(spec: Any, *, core_attention: bool = True) -> Any:
    """The specification of a model's layers, changed so that they take packed rows.

    Needed without Transformer Engine, which has Megatron-Core's only attention for packed rows. Dynamic-CP plans need
    it with Transformer Engine, too.

    Args:
        spec: of a layer or of a block of layers, from `get_gpt_layer_local_spec()`,
            `get_gpt_layer_with_transformer_engine_spec()` or `get_gpt_decoder_block_spec(...)`. Not changed.
        core_attention: whether to take wlb's attention; False keeps the kernel of the layer.

    Returns:
        A specification like the one given.

    Raises:
        wlb.WlbError: a layer's attention is not Megatron-Core's `SelfAttention` (MLA, Mamba).
    """
    if (layers := getattr(spec, "layer_specs", None)) is not None:
        return replace(spec, layer_specs=[packed_layers(layer, core_attention=core_attention) for layer in layers])
    attention = getattr(getattr(spec, "submodules", None), "self_attention", None)
    found = getattr(attention, "module", None)
    if found is PackedSelfAttention or not isinstance(attention, ModuleSpec) or found is not SelfAttention:
        name = getattr(found, "__name__", type(spec).__name__)
        raise error("spec", f"has attention of the kind {name}: must be Megatron-Core's SelfAttention", value=name)
    inside = attention.submodules
    if core_attention:
        inside = replace(inside, core_attention=PackedCoreAttention)
    packed = replace(attention, module=PackedSelfAttention, submodules=inside)
    return replace(spec, submodules=replace(spec.submodules, self_attention=packed))
