"""Results of the core: frozen dataclasses of numbers and arrays, which print, compare and pickle by themselves.

The core makes them. It knows each class by its name, which `wlb._core.result` tells it, and imports nothing.
"""

from wlb._results.cost import CostFit
from wlb._results.dynamic_cp import CpGroup, DynamicCpPlan, DynamicMicroBatch
from wlb._results.packer import Bounds, PackerMetrics
from wlb._results.pipeline import PipelineSteps, PipelineTimeline
from wlb._results.tune import TunedPoint, TuneResult

__all__ = [
    "Bounds",
    "CostFit",
    "CpGroup",
    "DynamicCpPlan",
    "DynamicMicroBatch",
    "PackerMetrics",
    "PipelineSteps",
    "PipelineTimeline",
    "TuneResult",
    "TunedPoint",
]
