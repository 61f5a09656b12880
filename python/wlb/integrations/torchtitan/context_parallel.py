"""Cuts a row of documents for the ranks of a context-parallel group by a `wlb.Shard`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import _context_parallel_shard
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.protocols.module import Module

import wlb
from wlb._errors import error
from wlb.integrations.torch_cp import ShardLoadBalancer
from wlb.torch import context_parallel_attention

Rows = tuple[Tensor, ...]


def shard_for_flex(mesh: DeviceMesh, rows: Rows, masks: Any, lengths: list[int], *, block: int) -> tuple[Rows, Any]:
    """This rank's part of rows, [1, tokens] each, and of their block masks.

    Documents of which a rank would get fewer than two blocks stay whole, because FlexAttention computes whole blocks.

    Args:
        mesh: the context-parallel dimension.
        rows: with as many tokens as all `lengths` together, a multiple of `block` times the number of ranks.
        masks: a `BlockMask` of the whole row, or several by name.
        lengths: int [documents] tokens.
        block: queries of a block.
    """
    size = mesh.size()
    shard = wlb.shard(lengths, cp_size=size, strategy="hybrid", hybrid_threshold=4 * size * block)
    named: Mapping[Any, Any] = masks if isinstance(masks, Mapping) else {None: masks}
    used = {name: mask for name, mask in named.items() if mask is not None}
    balancer = ShardLoadBalancer(shard, mesh)
    parts: Any = _context_parallel_shard(
        mesh, [*rows, *used.values()], [1] * len(rows) + [2] * len(used), load_balancer=balancer
    )
    sharded = dict(named) | dict(zip(used, parts[len(rows) :], strict=True))
    return tuple(parts[: len(rows)]), sharded if isinstance(masks, Mapping) else sharded[None]


def shard_for_varlen(mesh: DeviceMesh, rows: Rows, lengths: list[int]) -> tuple[Rows, wlb.Shard]:
    """This rank's part of rows, [1, tokens] each, and the shard, which `DocumentAttention` takes as its mask."""
    shard = wlb.shard(lengths, cp_size=mesh.size())
    indices = torch.from_numpy(shard.rank(mesh.get_local_rank()).token_indices).to(rows[0].device, torch.int64)
    return tuple(row[:, indices] for row in rows), shard


def with_document_attention(model: Any) -> Any:
    """A copy of a model's configuration in which varlen attention can be sharded."""
    layers = []
    for layer in model.layers:
        attention = getattr(layer, "attention", None)
        if attention is not None and isinstance(attention.inner_attention, VarlenAttention.Config):
            back = attention.inner_attention.window_size[0]
            inner = DocumentAttention.Config(window=None if back < 0 else back + 1)
            layer = replace(layer, attention=replace(attention, inner_attention=inner))
        layers.append(layer)
    return replace(model, layers=layers)


class DocumentAttention(Module):
    """Varlen attention for torchtitan's layers whose rows are cut for the ranks of a context-parallel group.

    Computes what torchtitan's `VarlenAttention` computes on one rank, by `wlb.torch.context_parallel_attention`:
    exactly, in the dtype of its inputs, for documents of any length, without padding.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Configuration: how many tokens before itself a query sees."""

        window: int | None = None
        """A token sees tokens less than this many positions away. None: all before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._window = config.window
        self._group: dist.ProcessGroup | None = None

    def parallelize(self, parallel_dims: Any) -> None:
        """Takes its group. Keys are exchanged in the attention itself, so nothing is gathered around it."""
        self._parallelized = True
        self._group = parallel_dims.get_mesh("cp").get_group()

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: wlb.Shard,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
    ) -> Tensor:
        """Attention of this rank's queries, [1, tokens, heads, head_dim]; keys may have fewer heads.

        Raises:
            wlb.WlbError: a layer also needs the normalizers of the softmax (`out_transform`).
        """
        if out_transform is not None:
            raise error("out_transform", "is not there under context parallelism: take attn_backend='flex'")
        (q,), (k,), (v,) = q_BLNH, k_BLNH, v_BLNH
        out = context_parallel_attention(
            q, k, v, attention_masks, group=self._group, transport="fetch", softmax_scale=scale, window=self._window
        )
        return out.unsqueeze(0)
