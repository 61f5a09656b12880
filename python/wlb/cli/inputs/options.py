"""The options that commands share: a name, its type and its help text, written once."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from wlb.cli.inputs.stream import Oversize
from wlb.cli.output.console import CliError
from wlb.models import presets

_DOCUMENTS = "Documents"
_BATCHES = "Global batches"
_QUEUES = "Outlier queues"
_COST = "Cost"
_OUTPUT = "Output"


Source = Annotated[
    Path,
    typer.Argument(
        help="A directory (a document a file), a .jsonl or .txt (a document a line), or a .npy of lengths.",
        show_default=False,
    ),
]
OptionalSource = Annotated[
    Path | None,
    typer.Argument(
        help="A directory (a document a file), a .jsonl or .txt (a document a line), or a .npy of lengths;"
        " by default the Python files of this interpreter and its packages.",
        show_default=False,
    ),
]
Field = Annotated[str, typer.Option(help="Text field of a .jsonl.", rich_help_panel=_DOCUMENTS)]
Pattern = Annotated[str, typer.Option(help="Names of the files to take from a directory.", rich_help_panel=_DOCUMENTS)]
TokenizerFile = Annotated[
    Path | None,
    typer.Option(
        "--tokenizer",
        help="A Hugging Face tokenizer.json to count tokens with; by default a byte counts as a token.",
        show_default=False,
        rich_help_panel=_DOCUMENTS,
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Shuffles the documents, every epoch anew.", rich_help_panel=_DOCUMENTS)]
OptionalSeed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=0,
        help="Shuffle the documents, every epoch anew; by default they come in the source's order.",
        rich_help_panel=_DOCUMENTS,
    ),
]
OversizeFate = Annotated[
    Oversize,
    typer.Option("--oversize", help="What to do with documents longer than the context.", rich_help_panel=_DOCUMENTS),
]
Steps = Annotated[int, typer.Option(min=1, help="Global batches to form.", rich_help_panel=_BATCHES)]
MicroBatches = Annotated[
    int, typer.Option(min=1, help="Micro-batches of a global batch: PP x DP.", rich_help_panel=_BATCHES)
]
Context = Annotated[
    int,
    typer.Option(
        min=1,
        help="Context window in tokens: the longest document. A global batch holds so many per micro-batch.",
        rich_help_panel=_BATCHES,
    ),
]
MemoryFactor = Annotated[
    float,
    typer.Option(
        min=1.0,
        max=1000.0,
        help="The most tokens of a micro-batch of variable length, in contexts: what memory allows.",
        rich_help_panel=_BATCHES,
    ),
]
Queues = Annotated[
    int,
    typer.Option(min=0, help="Number of outlier queues; their thresholds are tuned.", rich_help_panel=_QUEUES),
]
TunedQueues = Annotated[int, typer.Option(min=1, help="Number of outlier queues.", rich_help_panel=_QUEUES)]
DelayPrice = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="With adaptive release: the imbalance that the first iteration of waiting of a global batch is worth;"
        " higher waits less. By default it is tuned.",
        show_default=False,
        rich_help_panel=_QUEUES,
    ),
]
Thresholds = Annotated[
    str | None,
    typer.Option(
        help="Thresholds of the queues in tokens, ascending, such as 49152,98304; none are tuned then.",
        show_default=False,
        rich_help_panel=_QUEUES,
    ),
]
MaxMeanDelay = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="Tuning keeps the mean delay of a token below this, in iterations.",
        rich_help_panel=_QUEUES,
    ),
]
MaxDelay = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="No document waits in a queue for more iterations than this; by default there is no limit.",
        show_default=False,
        rich_help_panel=_QUEUES,
    ),
]
Model = Annotated[
    str,
    typer.Option(
        help=f"Model whose FLOPs are the cost: {', '.join(presets())}, or a Hugging Face config.json.",
        rich_help_panel=_COST,
    ),
]
AttentionEfficiency = Annotated[
    float,
    typer.Option(
        min=0.01,
        help="FLOP/s of attention kernels relative to matrix multiplications.",
        rich_help_panel=_COST,
    ),
]
OutputDir = Annotated[Path, typer.Option(help="Folder to write to; made if missing.", rich_help_panel=_OUTPUT)]
Json = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON and nothing else.", rich_help_panel=_OUTPUT)
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", rich_help_panel=_OUTPUT)]


_NAMES = {
    "num_micro_batches": "--micro-batches",
    "num_virtual_stages": "--virtual-stages",
    "virtual_stages": "--virtual-stages",
    "num_queues": "--queues",
    "outlier_thresholds": "--thresholds",
    "max_mean_delay": "--max-mean-delay",
    "max_delay": "--max-delay",
    "delay_price": "--delay-price",
    "max_tokens": "--max-tokens",
    "stage_layers": "--stage-layers",
    "kernel_model": "--kernel-profile",
    "reserved_bytes": "--reserved-gib",
}


_QUOTED = r"""(?<![\w=])(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
_ASSIGNED = r"\b(?P<name>[a-z][a-z_0-9]*)=(?P<value>True|'[^']*'|\d+)"
_WORDS = re.compile(rf"{_QUOTED}|{_ASSIGNED}|\b[a-z_]+\b")


def as_options(message: str) -> str:
    """An error of the library in the words of the command line: `tp=16` is `--tp 16`, `fused_loss=True` a flag.

    What stands between quotation marks is the user's, such as a file's name, and stays.
    """
    return _WORDS.sub(_as_option, message)


def _as_option(found: re.Match[str]) -> str:
    if found["name"] is None:
        return _NAMES.get(found[0], found[0])
    name, value = found["name"].replace("_", "-"), found["value"].strip("'")
    return f"--{name}" if value == "True" else f"--{name} {value}"


def whole(option: str, value: float, unit: int) -> int:
    """What an option says in contexts or GiB, in tokens or bytes."""
    if not math.isfinite(value * unit):
        raise CliError(f"{option} {value}: must be a finite number")
    return int(value * unit)


def parse_thresholds(text: str | None) -> tuple[int, ...] | None:
    """The thresholds of an option, where it was given."""
    return None if text is None else parse_numbers("--thresholds", text, "49152,98304")


def parse_numbers(option: str, text: str, example: str) -> tuple[int, ...]:
    """The numbers between commas."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise CliError(f"{option} {text}: give whole numbers with commas between, such as {example}") from None
