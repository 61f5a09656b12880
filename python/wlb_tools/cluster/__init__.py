"""A model on a cluster: hardware, parallel layout, and what they take in bytes and seconds.

Each file answers one question: `hardware` (which GPUs), `parallel` (the layout), `memory` (how many bytes of each GPU),
`capacity` (how many tokens fit, and what to change if they are too few), `collectives` (how long communication takes),
`data_parallel` (what data-parallel ranks exchange, and when), `overhead` (what a trainer takes besides) and `step_time`
(how long a micro-batch takes on each pipeline stage). The model is a `wlb.ModelConfig`.
"""

from wlb._choices import Schedule
from wlb_tools.cluster.capacity import max_tokens
from wlb_tools.cluster.data_parallel import data_parallel_seconds
from wlb_tools.cluster.hardware import Hardware, Link
from wlb_tools.cluster.memory import RankMemory, memory_per_rank
from wlb_tools.cluster.overhead import Overhead
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.cluster.step_time import StageSeconds, stage_seconds

__all__ = [
    "Hardware",
    "Link",
    "Overhead",
    "ParallelLayout",
    "RankMemory",
    "Schedule",
    "StageSeconds",
    "data_parallel_seconds",
    "max_tokens",
    "memory_per_rank",
    "stage_seconds",
]
