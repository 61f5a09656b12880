"""wlb's plans inside Megatron-Core.

| what | in |
| --- | --- |
| :func:`data_iterator`, :func:`get_batch`, :func:`loss_func`: steps for `forward_backward_func` | `data`, `rows` |
| :class:`IndexedDocuments`: `.bin` and `.idx` files | `documents` |
| :func:`packed_layers`: wlb's attention in its layers; Dynamic-CP | `attention` |
| :class:`DynamicCpScheduler`: in the place of its `BalancedCPScheduler` | `scheduler` |
| :func:`packed_seq_params`, :func:`padded_lengths`, ...: for batches of one's own | `packed` |
"""

from wlb.integrations.megatron.attention import PackedCoreAttention, PackedSelfAttention, packed_layers
from wlb.integrations.megatron.data import data_iterator
from wlb.integrations.megatron.documents import IndexedDocuments
from wlb.integrations.megatron.iterator import DataIterator, MegatronStep
from wlb.integrations.megatron.packed import (
    packed_seq_params,
    pad,
    padded_lengths,
    padded_positions,
    real_lengths,
    required_multiple,
    slice_for_rank,
)
from wlb.integrations.megatron.rows import Batch, get_batch, loss_func, mean_loss
from wlb.integrations.megatron.scheduler import DynamicCpScheduler

__all__ = [
    "Batch",
    "DataIterator",
    "DynamicCpScheduler",
    "IndexedDocuments",
    "MegatronStep",
    "PackedCoreAttention",
    "PackedSelfAttention",
    "data_iterator",
    "get_batch",
    "loss_func",
    "mean_loss",
    "packed_layers",
    "packed_seq_params",
    "pad",
    "padded_lengths",
    "padded_positions",
    "real_lengths",
    "required_multiple",
    "slice_for_rank",
]
