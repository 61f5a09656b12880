"""Results of the core: frozen dataclasses of numbers and arrays, which can be printed, compared and pickled.

The core makes instances of these classes and finds them by name: `wlb._core.result` registers each class.
"""

from wlb._results.cost import CostFit
from wlb._results.packer import Bounds, PackerMetrics
from wlb._results.pipeline import PipelineSteps, PipelineTimeline
from wlb._results.round import RoundPlan
from wlb._results.tune import TunedPoint, TuneResult

__all__ = [
    "Bounds",
    "CostFit",
    "PackerMetrics",
    "PipelineSteps",
    "PipelineTimeline",
    "RoundPlan",
    "TuneResult",
    "TunedPoint",
]
