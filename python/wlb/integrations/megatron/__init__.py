"""wlb's plans inside Megatron-Core.

| what | in |
| --- | --- |
| `data_iterator`, `get_batch`, `loss_func`: steps for `forward_backward_func` | `data`, `rows` |
| `pretraining`: steps for `megatron.training.pretrain` | `pretraining` |
| `IndexedDocuments`: `.bin` and `.idx` files | `documents` |
| `packed_layers`: wlb's attention in Megatron-Core's layers; Dynamic-CP | `attention` |
| `DynamicCpScheduler`: wlb's plans instead of Megatron-Core's `BalancedCPScheduler` | `scheduler` |
| `row_multiple`, `required_multiple`: multiples of tokens that its kernels need | `multiples` |
"""

from wlb.integrations.megatron.attention import PackedCoreAttention, PackedSelfAttention, packed_layers
from wlb.integrations.megatron.data import data_iterator
from wlb.integrations.megatron.documents import IndexedDocuments
from wlb.integrations.megatron.iterator import DataIterator, MegatronStep
from wlb.integrations.megatron.multiples import padded_lengths, required_multiple, row_multiple
from wlb.integrations.megatron.pretraining import MicroBatches, pretraining
from wlb.integrations.megatron.rows import Batch, get_batch, loss_func, mean_loss
from wlb.integrations.megatron.scheduler import DynamicCpScheduler

__all__ = [
    "Batch",
    "DataIterator",
    "DynamicCpScheduler",
    "IndexedDocuments",
    "MegatronStep",
    "MicroBatches",
    "PackedCoreAttention",
    "PackedSelfAttention",
    "data_iterator",
    "get_batch",
    "loss_func",
    "mean_loss",
    "packed_layers",
    "padded_lengths",
    "pretraining",
    "required_multiple",
    "row_multiple",
]
