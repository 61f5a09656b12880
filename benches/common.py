"""What the benches share: lengths, the cost of a 7B model, timing, records, and options that look alike.

Every bench takes `--lengths` (.npy files of document lengths; without any, synthetic ones) where lengths matter, and
`--record` where it writes one. Tables go to standard output, progress bars to standard error.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import os
import platform
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import wlb

# A bench may import studies/ and what tests share, which are not installed.

RECORDS = Path(__file__).parent / "records"
DOCS = Path(__file__).parents[1] / "docs"
CONTEXT = 131072
Lengths = NDArray[np.int64]
Row = dict[str, Any]

# Of pictures.
WLB, QUEUES = "#0a5c91", "#c9942f"
STYLE: dict[str, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#eaeef2",
    "axes.edgecolor": "#8c959f",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.frameon": False,
}


# --- lengths and costs -----------------------------------------------------------------------------------------------


def llama_7b(attention_efficiency: float) -> wlb.CostModel:
    """LLaMA2-7B, the paper's model."""
    return wlb.CostModel.from_flops(
        hidden_size=4096,
        ffn_hidden_size=11008,
        num_layers=32,
        num_heads=32,
        vocab_size=32000,
        attention_efficiency=attention_efficiency,
    )


COST = llama_7b(0.55)


def synthetic(documents: int, seed: int = 0) -> Lengths:
    """Lengths close to the paper's histogram: 97.25 % uniform up to 6,250 tokens, the rest log-uniform to 125,000."""
    rng = np.random.default_rng(seed)
    short = rng.integers(1, 6251, documents)
    long = np.exp(rng.uniform(np.log(6250), np.log(125000), documents)).astype(np.int64)
    return np.where(rng.random(documents) < 0.9725, short, long)


def read_lengths(path: Path) -> Lengths:
    """Of a .npy file, in its order."""
    return np.load(path).astype(np.int64)


def sources(paths: Sequence[Path], *, documents: int) -> dict[str, Lengths]:
    """The files' lengths by their names; without files, so many synthetic ones."""
    return {path.stem: read_lengths(path) for path in paths} or {"synthetic": synthetic(documents)}


def stream(lengths: Lengths, tokens: int, seed: int) -> Lengths:
    """So many tokens: the documents in random order, again and again in a new one, cut to the context."""
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(lengths) for _ in range(-(-tokens // int(lengths.sum())))])
    _, _, pieces = wlb.split_documents(order, max_document_tokens=CONTEXT)
    return np.asarray(pieces[: np.searchsorted(pieces.cumsum(), tokens)], np.int64)


def global_batches(lengths: Lengths, micro_batches: int, steps: int) -> list[Lengths]:
    """So many global batches of `micro_batches` contexts."""
    tokens = micro_batches * CONTEXT
    pieces = stream(lengths, (steps + 1) * tokens, seed=0)
    offsets = wlb.batch_offsets(pieces, tokens_per_batch=tokens)[: steps + 1]
    return [pieces[a:b] for a, b in itertools.pairwise(offsets)]


# --- timing ----------------------------------------------------------------------------------------------------------


def samples(work: Callable[[], object], seconds: float = 0.6) -> list[float]:
    """Microseconds per call, one value per burst of about two milliseconds; the first call is not counted."""
    started = time.perf_counter()
    work()
    once = time.perf_counter() - started
    burst = max(1, int(0.002 / max(once, 1e-7)))
    result = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or not result:
        started = time.perf_counter()
        for _ in range(burst):
            work()
        result.append(round((time.perf_counter() - started) / burst * 1e6, 3))
    return result


def reference_us(lengths: Lengths, bins: int, seconds: float = 0.2) -> list[float]:
    """Of the same job as a plain loop: longest first, each where the cost is least, in Python, with a heap.

    A floor that moves with the clock of a machine. `numpy.sort` does not: it is 5 times faster where it finds AVX-512.
    """
    costs = COST.cost(lengths).tolist()

    def loop() -> list[int]:
        heap = [(0.0, index) for index in range(bins)]
        where = [0] * len(costs)
        for document in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):
            cost, index = heap[0]
            heapq.heapreplace(heap, (cost + costs[document], index))
            where[document] = index
        return where

    return samples(loop, seconds)


# --- options ---------------------------------------------------------------------------------------------------------


def options(
    description: str | None, *, lengths: bool = False, record: str | None = None, picture: str | None = None
) -> argparse.ArgumentParser:
    """A parser that shows the module's docstring, with the options that benches have in common.

    Args:
        description: the module's docstring.
        lengths: whether it takes `--lengths`.
        record: name of the file in benches/records that `--record` is by default; None: it has no such option.
        picture: name of the file in docs that `--picture` is by default; None: it has no such option.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if lengths:
        parser.add_argument("--lengths", type=Path, nargs="*", default=[], help=".npy files of document lengths")
    if record is not None:
        parser.add_argument("--record", type=Path, default=RECORDS / record, help="where the raw record goes")
    if picture is not None:
        parser.add_argument("--picture", type=Path, default=DOCS / picture, help="where the picture goes")
    return parser


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options of this call; leaves if wlb is a debug build."""
    arguments = parser.parse_args()
    if wlb.BUILD_PROFILE != "release":
        sys.exit("wlb is a debug build: its timings mean nothing. Build a wheel: pip install .")
    return arguments


# --- output ----------------------------------------------------------------------------------------------------------


def bars() -> Progress:
    """Bars that leave no trace."""
    return Progress(console=Console(stderr=True), transient=True)


def tables(width: int) -> Console:
    """Where tables go: as wide as the terminal, or so many columns in a file."""
    return Console(width=None if sys.stdout.isatty() else width)


def wrapped(text: str) -> list[str]:
    """Lines of a page."""
    return textwrap.wrap(text, 118)


def markdown(table: Table) -> Iterator[str]:
    """The lines of a table on a page."""
    yield "| " + " | ".join(str(column.header) for column in table.columns) + " |"
    yield "| " + " | ".join("---" for _ in table.columns) + " |"
    for cells in zip(*(column.cells for column in table.columns), strict=True):
        yield "| " + " | ".join(str(cell).replace("\n", " ").replace("|", "/") for cell in cells) + " |"


def write_record(path: Path, record: Row) -> None:
    """The raw record, as JSON on one line: `python -m json.tool` shows it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record) + "\n")


def rounded(value: Any) -> Any:
    """For a record: five digits."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return value


def machine(packages: Sequence[str] = ()) -> Row:
    """What the numbers depend on."""
    cpu = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "os": f"{platform.system()} {platform.release()}",
        "load": list(os.getloadavg()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "wlb": wlb.__version__,
        "profile": wlb.BUILD_PROFILE,
        "commit": commit.stdout.strip(),
        "packages": {name: package_version(name) for name in packages},
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


# --- pictures --------------------------------------------------------------------------------------------------------


def entitle(fig: Any, ax: Any, title: str, *, ncols: int) -> None:
    """A title, and below it the legend of one panel for all."""
    fig.legend(
        *ax.get_legend_handles_labels(),
        loc="outside upper left",
        ncols=ncols,
        fontsize=10.5,
        title=title,
        alignment="left",
        title_fontproperties={"weight": "bold", "size": 14},
    )


def front(points: list[Row], key: str) -> list[tuple[float, float]]:
    """The best of them, as (delay, value - 1): less delay or a lower value than all others."""
    best: list[tuple[float, float]] = []
    for delay, value in sorted((point["delay_mean"], point[key] - 1) for point in points):
        if not best or value < best[-1][1]:
            best.append((delay, value))
    return best
