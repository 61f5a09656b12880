"""Pipeline parallelism over micro-batches of unequal length, on the schedules of torch.distributed.pipelining.

Every stage knows the plan, so every receive buffer has the right shape and no shape is ever sent.
"""

from wlb.torch.pipeline.micro_batch import PipelineMicroBatch
from wlb.torch.pipeline.schedule import stages_of_rank
from wlb.torch.pipeline.stage import VarlenPipelineStage
from wlb.torch.pipeline.step import pipeline_step

__all__ = [
    "PipelineMicroBatch",
    "VarlenPipelineStage",
    "pipeline_step",
    "stages_of_rank",
]
