"""Pictures of what is better seen than printed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import wlb
from wlb._errors import error
from wlb_tools.simulation import Simulation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = "a Packing, a PipelineTimeline or several, or a Simulation"


def plot(shown: Any) -> Figure:
    """Draws a plan, a timeline, or a simulation.

    | of | shows |
    | --- | --- |
    | ``wlb.Packing`` | cost of every micro-batch, document by document |
    | ``wlb.PipelineTimeline``, or one for each data-parallel rank | when every rank does what |
    | ``wlb_tools.Simulation`` | what a GPU's time goes to under each method |

    Args:
        shown: one of these.

    Returns:
        A figure of matplotlib. A notebook shows it; ``figure.savefig(path)`` writes it.

    Raises:
        wlb.WlbError: it is something else, is empty, or matplotlib is not installed.

    Examples:
        >>> import wlb
        >>> import wlb_tools
        >>> plan = wlb.pack([5, 3, 2], num_micro_batches=2, max_tokens=8, costs=[5, 3, 2])
        >>> wlb_tools.plot(plan).savefig("plan.png")  # doctest: +SKIP
    """
    if find_spec("matplotlib") is None:
        raise error("plot", "needs matplotlib, which is not installed: pip install matplotlib")
    from wlb_tools.command.output.figures import objects, style

    figure: Any = _draw(shown, objects)
    figure._repr_png_ = lambda: style.png(figure)  # what notebooks ask for
    drawn: Figure = figure
    return drawn


def _draw(shown: Any, objects: Any) -> Any:
    if isinstance(shown, wlb.Packing):
        if not len(shown):
            raise error("shown", "is a packing without micro-batches", value=shown)
        return objects.draw_packing(shown)
    several = isinstance(shown, Sequence) and shown and all(isinstance(one, wlb.PipelineTimeline) for one in shown)
    if isinstance(shown, wlb.PipelineTimeline) or several:
        return objects.draw_timelines(shown)
    if isinstance(shown, Simulation):
        return objects.draw_methods(shown)
    raise error("shown", f"is a {type(shown).__name__}: plot draws {_KINDS}", value=shown)
