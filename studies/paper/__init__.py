"""The papers' tables and figures, side by side with ours.

Each entry of `RESULTS` makes one from a `Study`. Nothing here decides anything: plans are those of
`wlb_tools.simulation`, on the paper's cluster (`published.py`) under stated inputs (`inputs.py`).
"""

from __future__ import annotations

from collections.abc import Callable

from studies.paper.dynamic_cp import dynamic_cp
from studies.paper.inputs import SWEEP, Input, Inputs
from studies.paper.packing import table_2
from studies.paper.results import Facts, Result, Row
from studies.paper.sharding import figure_15
from studies.paper.speedups import figure_12, figure_13, figure_14
from studies.paper.study import Study
from studies.paper.windows import figure_6

__all__ = ["RESULTS", "SWEEP", "Facts", "Input", "Inputs", "Result", "Row", "Study"]

RESULTS: dict[str, Callable[[Study], Result]] = {
    "table2": table_2,
    "fig6": figure_6,
    "fig12": figure_12,
    "fig13": figure_13,
    "fig14": figure_14,
    "fig15": figure_15,
    "dynamic_cp": dynamic_cp,
}
"""By name, in the paper's order."""
