"""Chooses the documents that a rank trains in every step, and makes tensors of them.

For known lengths: `BalancedBatchSampler` in a `DataLoader`, read by `StepLoader`; `balanced_loader` makes all three.
For a stream without an index: `BalancedStream`. Both plan with a `wlb.Packer` and yield one `Step` after the other.
Each step has the state to save once it is trained. It holds documents, so a run resumes exactly after that step, also
on another number of ranks or workers. A `Ledger` records what was trained.
"""

from wlb.reading.documents import IGNORE, Document, Piece
from wlb.reading.rows import RowReader
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.collate import collate
from wlb.torch.data.dataset import Documents
from wlb.torch.data.dynamic_cp import DynamicCpLoader, DynamicCpStep
from wlb.torch.data.forest import ForestBatch
from wlb.torch.data.ledger import Ledger
from wlb.torch.data.loading import Loading, balanced_loader
from wlb.torch.data.mean import RoundMean
from wlb.torch.data.processed import ProcessedRows
from wlb.torch.data.round import round_step
from wlb.torch.data.sampler import BalancedBatchSampler
from wlb.torch.data.step import Step, StepLoader
from wlb.torch.data.stream import BalancedStream

__all__ = [
    "IGNORE",
    "BalancedBatchSampler",
    "BalancedStream",
    "Document",
    "Documents",
    "DynamicCpLoader",
    "DynamicCpStep",
    "ForestBatch",
    "Ledger",
    "Loading",
    "PackedBatch",
    "Piece",
    "ProcessedRows",
    "RoundMean",
    "RowReader",
    "Step",
    "StepLoader",
    "balanced_loader",
    "collate",
    "round_step",
]
