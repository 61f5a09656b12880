"""The style of all pictures. One colour per idea: rust is the original, blue is WLB, sand is a window of batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, SOFT, BARS = "#24292f", "#57606a", "#c3d3e0"
ORIGINAL, ORIGINAL_PALE = "#c2482e", "#e8b4a4"
WLB, WLB_PALE = "#0a5c91", "#a9cbe2"
BLUES = ("#7fb4d8", WLB, "#062f4c")  # more queues, darker
ADAPTIVE, ADAPTIVE_PALE = "#2f8f5b", "#a8d5bc"
SANDS = ("#e3bd6b", "#c9942f", "#8f641a")  # wider windows, darker

STYLE: Any = {  # matplotlib's own type for it changes from version to version
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#8c959f",
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#eaeef2",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "svg.hashsalt": "wlb",  # the same input draws the same bytes
}
_SVG_METADATA = ("Creator", "Date", "Format", "Type")

DASHED: Any = {"lw": 1.4, "ls": (0, (4, 3))}
RING: Any = {"ls": "none", "marker": "o", "ms": 14, "mfc": "none", "mew": 2.2}  # around what was chosen


@contextmanager
def drawing(width: float, height: float, *, caption: str | None = None) -> Iterator[Figure]:
    """A figure of so many inches to draw on; it is laid out at the end, once and not once a file."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1))
        if caption is not None:
            figure.suptitle(caption, x=0.012, ha="left", size=11.5, color=SOFT)
        yield figure
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def named_rows(ax: Any) -> None:
    """A row for each thing, named at the left; numbers run to the right."""
    ax.tick_params(axis="y", length=0)
    ax.spines.left.set_visible(False)
    ax.grid(visible=False, axis="y")


# Canvases print what `Figure.savefig` draws twice.


def png(figure: Figure) -> bytes:
    """A PNG file, twice as wide as a README shows it."""
    out = BytesIO()
    dpi, figure.dpi = figure.dpi, 150
    canvas: Any = FigureCanvasAgg(figure)  # whose methods have no types
    canvas.print_png(out, metadata={"Software": None})
    figure.dpi = dpi
    return out.getvalue()


def svg(figure: Figure) -> str:
    """An `<svg>` element to put into a page: text as outlines, nothing to load."""
    out = StringIO()
    with matplotlib.rc_context(STYLE):
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(out, metadata=dict.fromkeys(_SVG_METADATA))
    return out.getvalue()[out.getvalue().index("<svg") :]
