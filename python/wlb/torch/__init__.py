"""Plans from `wlb` in a torch training step: data, context-parallel attention, unequal pipelines, loss.

`wlb` decides, on lengths alone, which documents share a micro-batch, a group of ranks or a rank. The loaders here
choose the documents of a global batch and call the packer and the planner for it, with the same result on every rank.
All other parts receive plans and run them on torch.distributed.

| what | where |
| --- | --- |
| documents to micro-batches, resumable | `wlb.torch.data` |
| attention over the shards of a micro-batch | `wlb.torch.attention` |
| pipeline stages for micro-batches of unequal length | `wlb.torch.pipeline` |
| device mesh, context- and expert-parallel groups | `wlb.torch.groups` |
| a global batch under any wrapper | `wlb.torch.training` |
| weights that stages of a pipeline share | `wlb.torch.tied` |
| routers of experts, and padding | `wlb.torch.routers` |
| a loss per token, its gradients under any wrapper | `wlb.torch.loss`, `.gradients` |
| sums over the tokens of each sample, under context parallelism | `wlb.torch.samples` |
| times of micro-batches, costs fitted to them | `wlb.torch.timing` |
| figures for loggers | `wlb.torch.metrics` |
| model FLOPs, agreement of plans | `wlb.torch.flops`, `.agreement` |

Needs torch 2.11 or newer: ``pip install "torch>=2.11"``.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING

if find_spec("torch") is None:
    raise ModuleNotFoundError('wlb.torch needs torch 2.11 or newer: pip install "torch>=2.11"', name="torch")

from wlb.torch.agreement import check_agreement
from wlb.torch.attention import context_parallel_attention, cp_sizes, halo, prepare_attention, recut
from wlb.torch.data import (
    IGNORE,
    BalancedBatchSampler,
    BalancedStream,
    Document,
    Documents,
    DynamicCpLoader,
    DynamicCpStep,
    ForestBatch,
    Ledger,
    Loading,
    PackedBatch,
    Piece,
    ProcessedRows,
    RoundMean,
    RowReader,
    Step,
    StepLoader,
    balanced_loader,
    collate,
    round_step,
)
from wlb.torch.flops import model_flops, model_flops_utilization, peak_flops
from wlb.torch.gradients import all_reduce_gradients, sum_gradients
from wlb.torch.groups import ContextParallelGroups, build_mesh, data_and_context, expert_ranks
from wlb.torch.loss import count_valid_tokens, token_normalized_loss
from wlb.torch.metrics import StepMetrics
from wlb.torch.proof import Proof, verify
from wlb.torch.routers import real_tokens
from wlb.torch.samples import sample_predictions, sample_sums
from wlb.torch.tied import TiedWeights
from wlb.torch.timing import CostTracker, CostUpdate, StepTimer, TimedStep
from wlb.torch.training import train_step

if TYPE_CHECKING:
    from wlb.torch.pipeline import PipelineMicroBatch, VarlenPipelineStage, pipeline_step, stages_of_rank

__all__ = [
    "IGNORE",
    "BalancedBatchSampler",
    "BalancedStream",
    "ContextParallelGroups",
    "CostTracker",
    "CostUpdate",
    "Document",
    "Documents",
    "DynamicCpLoader",
    "DynamicCpStep",
    "ForestBatch",
    "Ledger",
    "Loading",
    "PackedBatch",
    "Piece",
    "PipelineMicroBatch",
    "ProcessedRows",
    "Proof",
    "RoundMean",
    "RowReader",
    "Step",
    "StepLoader",
    "StepMetrics",
    "StepTimer",
    "TiedWeights",
    "TimedStep",
    "VarlenPipelineStage",
    "all_reduce_gradients",
    "balanced_loader",
    "build_mesh",
    "check_agreement",
    "collate",
    "context_parallel_attention",
    "count_valid_tokens",
    "cp_sizes",
    "data_and_context",
    "expert_ranks",
    "halo",
    "model_flops",
    "model_flops_utilization",
    "peak_flops",
    "pipeline_step",
    "prepare_attention",
    "real_tokens",
    "recut",
    "round_step",
    "sample_predictions",
    "sample_sums",
    "stages_of_rank",
    "sum_gradients",
    "token_normalized_loss",
    "train_step",
    "verify",
]


if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> object:
        """Names of :mod:`wlb.torch.pipeline`, imported when first asked for: torch's pipelining takes seconds."""
        if name in ("PipelineMicroBatch", "VarlenPipelineStage", "pipeline_step", "stages_of_rank"):
            from wlb.torch import pipeline

            found = globals()[name] = getattr(pipeline, name)
            return found
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
