"""Plans from :mod:`wlb` in a torch training step: data, context-parallel attention, unequal pipelines, loss.

Everything here receives plans and runs them on torch.distributed; nothing here decides who gets what.

| what | where |
| --- | --- |
| documents to micro-batches, resumable | :mod:`wlb.torch.data` |
| attention over the shards of a micro-batch | :mod:`wlb.torch.attention` |
| pipeline stages for micro-batches of unequal length | :mod:`wlb.torch.pipeline` |
| device mesh, context-parallel groups | :mod:`wlb.torch.groups` |
| a loss per token, model FLOPs, agreement of plans | :mod:`wlb.torch.loss`, `.flops`, `.agreement` |

Needs torch 2.11 or newer: ``pip install "wlb[torch]"``.
"""

from wlb.torch.agreement import check_agreement
from wlb.torch.attention import context_parallel_attention, max_cp_size, prepare_attention
from wlb.torch.data import (
    IGNORE,
    BalancedBatchSampler,
    BalancedStream,
    Document,
    Documents,
    DynamicCpLoader,
    DynamicCpStep,
    PackedBatch,
    Piece,
    Step,
    StepLoader,
    collate,
)
from wlb.torch.failures import PeerFailed, failures_explained
from wlb.torch.flops import model_flops, model_flops_utilization, peak_flops
from wlb.torch.groups import ContextParallelGroups, build_mesh, data_and_context
from wlb.torch.loss import count_valid_tokens, sum_gradients, token_normalized_loss
from wlb.torch.pipeline import (
    PipelineMicroBatch,
    VarlenPipelineStage,
    pipeline_step,
    stages_of_rank,
)

__all__ = [
    "IGNORE",
    "BalancedBatchSampler",
    "BalancedStream",
    "ContextParallelGroups",
    "Document",
    "Documents",
    "DynamicCpLoader",
    "DynamicCpStep",
    "PackedBatch",
    "PeerFailed",
    "Piece",
    "PipelineMicroBatch",
    "Step",
    "StepLoader",
    "VarlenPipelineStage",
    "build_mesh",
    "check_agreement",
    "collate",
    "context_parallel_attention",
    "count_valid_tokens",
    "data_and_context",
    "failures_explained",
    "max_cp_size",
    "model_flops",
    "model_flops_utilization",
    "peak_flops",
    "pipeline_step",
    "prepare_attention",
    "stages_of_rank",
    "sum_gradients",
    "token_normalized_loss",
]
