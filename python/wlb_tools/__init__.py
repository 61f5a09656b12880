"""Tools that predict, measure and draw training on a cluster.

`cluster` has the memory and the step times of a model on GPUs, `simulation` compares ways to train, `profiling`
measures a GPU, `audit` checks the ledger of a run, and `command` is the `wlb` command (`python -m wlb_tools`).

    hardware = wlb_tools.Hardware.preset("h100")
    layout = wlb_tools.ParallelLayout(tp=8, cp=2, pp=4)
    wlb_tools.max_tokens(wlb.ModelConfig.preset("llama2-7b"), layout, hardware)

Training does not need these tools: `import wlb` does not load them.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from wlb_tools.cluster import (
        Hardware,
        Link,
        ParallelLayout,
        RankMemory,
        StageSeconds,
        data_parallel_seconds,
        max_tokens,
        memory_per_rank,
        stage_seconds,
    )
    from wlb_tools.command.inputs.mapped import RowLengths
    from wlb_tools.simulation import Scenario, Simulation, simulate

    plot: Callable[[Any], Any]  # of `wlb_tools.plotting`, which imports the command, and the command these names

__all__ = [
    "Hardware",
    "Link",
    "ParallelLayout",
    "RankMemory",
    "RowLengths",
    "Scenario",
    "Simulation",
    "StageSeconds",
    "data_parallel_seconds",
    "max_tokens",
    "memory_per_rank",
    "plot",
    "simulate",
    "stage_seconds",
]


_ROOMS = {
    "RowLengths": "command.inputs.mapped",
    "Scenario": "simulation",
    "Simulation": "simulation",
    "plot": "plotting",
    "simulate": "simulation",
}
"""Modules of the public names that are not in `cluster`."""


if not TYPE_CHECKING:  # a type checker would take any name for one of the package

    def __getattr__(name: str) -> Any:
        """Loads a public name when it is first used, so that the command answers Ctrl-C before numpy is loaded."""
        if name in __all__:
            room = _ROOMS.get(name, "cluster")
            return getattr(import_module(f"wlb_tools.{room}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
