"""The style of all pictures. Rust is the original order, blue is wlb, sand is a window of global batches."""

import html
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

INK, SOFT, BARS, LINE = "#24292f", "#57606a", "#c3d3e0", "#d8dee4"
ORIGINAL, ORIGINAL_PALE = "#c2482e", "#e8b4a4"
WLB, WLB_PALE = "#0a5c91", "#a9cbe2"
BLUES = ("#7fb4d8", WLB, "#062f4c")  # more queues, darker
ADAPTIVE = "#2f8f5b"
SANDS = ("#e3bd6b", "#c9942f", "#8f641a")  # wider windows, darker
WAITING = (ORIGINAL_PALE, "#e19680", "#d9775f", "#a3361f")
IDLE, STRIPES = "#f3f5f7", "#b6bec7"
PAPER, AXIS, GRID = "#ffffff", "#8c959f", "#eaeef2"

_SHADES = 8


def _shades(base: str, towards: int) -> tuple[str, ...]:
    """A colour and its shades, in steps towards black (`towards` = 0) or white (255)."""
    parts = [int(base[at : at + 2], 16) for at in (1, 3, 5)]
    shares = [0.6 * step / (_SHADES - 1) for step in range(_SHADES)]
    return tuple("#" + "".join(f"{round(part + share * (towards - part)):02x}" for part in parts) for share in shares)


PASSES = tuple(_shades(base, 0) for base in ("#1f6aa5", "#b8432a", "#8a6100", "#7d4aa8"))
"""Colours of forward, backward, input gradient and weight gradient, each with a shade for each stage of a rank.

The bars, and text in `PAPER` on them, have a contrast of at least 4.5 in the light and in the dark scheme.
"""
_PASSES_IN_DARK = tuple(_shades(base, 255) for base in ("#6db5e6", "#f2917a", "#d9b25c", "#c3a1ea"))

METHODS = ("#c2482e", "#9c6b6b", "#7d7446", "#4f7d5c", "#57606a", "#3f7fb0", "#0a5c91", "#8056ad", "#a8761b", "#b0127b")
"""Colours of the ten kinds of plans, with a contrast of at least 3 with the page in both schemes."""
_METHODS_IN_DARK = ("#d3a3a3", "#c4ba86", "#8fc49f", "#4d8fc2", "#b794e0", "#e3bd6b", "#f06bc4")

DARK = {
    PAPER: "#12171d",
    INK: "#e6edf3",
    SOFT: "#a9b3be",
    LINE: "#343c46",
    AXIS: "#77828e",
    GRID: "#272e36",
    BARS: "#3d4f5f",
    ORIGINAL: "#f2917a",
    ORIGINAL_PALE: "#7d4638",
    WLB: "#6db5e6",
    WLB_PALE: "#2f5f80",
    BLUES[0]: "#3f7fab",
    BLUES[2]: "#c9e5f8",
    ADAPTIVE: "#5cc98d",
    SANDS[0]: "#8f6f2e",
    SANDS[2]: "#f0d495",
    WAITING[1]: "#a85a46",
    WAITING[3]: "#ff8a6e",
    IDLE: "#1d242c",
    STRIPES: "#66717d",
    **dict(zip([name for name in METHODS if name not in (ORIGINAL, SOFT, WLB)], _METHODS_IN_DARK, strict=True)),
    **dict(zip(sum(PASSES, ()), sum(_PASSES_IN_DARK, ()), strict=True)),
}
"""Colours of the dark scheme, by the colour of the light scheme. A colour without an entry is the same in both."""

WIDE, NARROW = 13.0, 4.6
"""Widths of a picture for a screen and for a phone, in inches. With both, a point is about a pixel of the page."""
SMALLEST = 11.0
"""Size of the smallest text, in points."""
_MOST_PIXELS = 90
"""Most pixels of a page for an inch of a screen's picture, so that small pictures are not enlarged to the page."""

STYLE: Any = {  # matplotlib's type for it differs between versions
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 11.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": AXIS,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": SMALLEST,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "wlb",  # equal input gives equal bytes
}
_SVG_METADATA = ("Creator", "Date", "Format", "Type")

DASHED: Any = {"lw": 1.4, "ls": (0, (4, 3))}
RING: Any = {"ls": "none", "marker": "o", "ms": 14, "mfc": "none", "mew": 2.2}  # a ring around the chosen point


@contextmanager
def drawing(width: float, height: float, *, caption: str | None = None) -> Iterator[Figure]:
    """A figure of this size in inches. Its layout is computed once, at the end, and not again for each file."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.1))
        if caption is not None:
            text = textwrap.fill(caption, int(width * 10.5))
            figure.suptitle(text, x=0.012, ha="left", size=11.5, color=SOFT)
        yield figure
        figure.draw_without_rendering()
        figure.set_layout_engine("none")


def wrapped(text: str, *, narrow: bool, characters: int = 34) -> str:
    """A title, wrapped if the picture is for a phone."""
    return textwrap.fill(text, characters) if narrow else text


def named_rows(ax: Any) -> None:
    """Styles axes for horizontal bars with names at the left."""
    ax.tick_params(axis="y", length=0)
    ax.spines.left.set_visible(False)
    ax.grid(visible=False, axis="y")


# These functions print through a canvas, because `Figure.savefig` would draw twice.


def png(figure: Figure) -> bytes:
    """A PNG file on white, at twice the width at which a README shows it."""
    out = BytesIO()
    dpi, figure.dpi = figure.dpi, 150
    figure.set_facecolor(PAPER)
    canvas: Any = FigureCanvasAgg(figure)  # its methods are not typed
    canvas.print_png(out, metadata={"Software": None})
    figure.dpi = dpi
    figure.set_facecolor("none")
    return out.getvalue()


def svg(figure: Figure, name: str, label: str) -> str:
    """An `<svg>` element for a page that has the style sheet of `themes`.

    Args:
        figure: figure to draw. Its text stays text.
        name: prefix of all ids, which must be unique on a page.
        label: description for screen readers.
    """
    out = StringIO()
    with matplotlib.rc_context(STYLE):
        canvas: Any = FigureCanvasSVG(figure)
        canvas.print_svg(out, metadata=dict.fromkeys(_SVG_METADATA))
    text = out.getvalue()[out.getvalue().index("<svg") :]
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    text = re.sub(r"(?<=: )#[0-9a-f]{6}\b", lambda found: _variable(found[0]), text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", text, count=1)
    width = figure.get_figwidth()
    most = "" if width <= NARROW else f' style="max-width: {round(_MOST_PIXELS * width)}px"'
    return text.replace("<svg", f'<svg role="img" aria-label="{html.escape(label)}"{most}', 1)


def _variable(colour: str) -> str:
    return f"var(--c{colour[1:]})" if colour in DARK else colour


def themes() -> str:
    """Style sheet with the colours of the light and dark scheme as CSS variables."""

    def rules(colours: Iterable[tuple[str, str]]) -> str:
        return " ".join(f"--c{name[1:]}: {colour};" for name, colour in colours)

    light, dark = rules((name, name) for name in DARK), rules(DARK.items())
    return f":root {{ {light} }}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
