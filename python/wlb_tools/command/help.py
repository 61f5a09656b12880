"""Help of two screens: an example, then the options of most runs. `--help-all` explains every option."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App

WIDTH = 80

EXAMPLES = {
    "": ("wlb demo", "wlb advise corpus.jsonl --gpus 64 --tp 8 --tokenizer tokenizer.json"),
    "demo": ("wlb demo", "wlb demo corpus.jsonl --context 32k --tokenizer tokenizer.json"),
    "lengths": ("wlb lengths corpus.parquet --tokenizer tokenizer.json --output lengths.npy",),
    "advise": ("wlb advise lengths.npy --model llama3-8b --gpus 64 --tp 8 --trainer megatron",),
    "pack": ("wlb pack lengths.npy --micro-batches 16 --context 32k --dp-size 4 -o plans",),
    "profile": ("wlb profile --model llama3-8b --tp 8 --output h100.json",),
    "fit": ("wlb fit timings.jsonl --output run.cost.json",),
    "tune": (
        "wlb tune lengths.npy --context 32k",
        "wlb tune lengths.npy --model llama3-8b --gpus 64 --global-batch 4M",
    ),
    "simulate": ("wlb simulate lengths.npy --model llama3-8b --gpus 64 --tp 8 --cp 2 --pp 4",),
    "audit": ("wlb audit ledger",),
    "doctor": ("wlb doctor",),
}
"""Example commands, by the command that they show; "" is all of them."""

_FEW = 16  # most options of a command whose help explains them all
_OFTEN = frozenset(
    (
        *(
            "--model",
            "--gpu",
            "--gpus",
            "--tp",
            "--cp",
            "--pp",
            "--dp",
            "--from",
            "--trainer",
            "--global-batch",
            "--set",
        ),
        *("--variants", "--method", "--dp-size", "--steps", "--context", "--max-tokens", "--micro-batches"),
        *("--tokenizer", "--field", "--max-mean-delay", "--output", "--json"),
    )
)
"""Options that most runs need; of other options the help only lists the names."""


def command_of(app: App, words: Sequence[str]) -> str:
    """The command in these words; "" without one."""
    return next((word for word in words if word in EXAMPLES and word in app), "")


def asked(words: Sequence[str]) -> bool:
    """Whether these words ask for the short help."""
    typed = words[: words.index("--")] if "--" in words else words
    return "--help" in typed or "-h" in typed


def examples(command: str) -> str:
    """Example commands of a command's help, as printed text."""
    return "\n".join([f"Example{'s' if len(EXAMPLES[command]) > 1 else ''}:", *(f"  {e}" for e in EXAMPLES[command])])


def short(app: App, command: str) -> str:
    """Help of two screens of 24 lines."""
    if not command:
        return _of_all(app)
    function: Callable[..., object] = app[command].default_command  # type: ignore[assignment]
    collected = app[command].assemble_argument_collection(default_parameter=app.default_parameter, parse_docstring=True)
    arguments = [each for each in collected if each.show]
    named = [each for each in arguments if each.names and each.names[0].startswith("-")]
    places = [each.names[0] for each in arguments if each not in named]
    explained = named if len(named) <= _FEW else [each for each in named if each.names[0] in _OFTEN]
    usage = f"Usage: wlb {command} {'[OPTIONS] ' if named else ''}{' '.join(places)}".rstrip()
    about = re.split(r"\n\s*\n", inspect.getdoc(function) or "")[0]
    parts = [examples(command), usage, _filled(about)]
    if explained:
        parts.append("\n".join(_explained(each) for each in explained))
    others = [each.names[0] for each in named if each not in explained]
    if others:
        more = f"Further options, explained by wlb {command} --help-all: "
        parts.append(textwrap.fill(more + ", ".join(others) + ".", WIDTH, break_on_hyphens=False))
    return "\n\n".join(parts)


def _of_all(app: App) -> str:
    commands = [name for name in EXAMPLES if name]
    lines = []
    for name in commands:
        about = " ".join((inspect.getdoc(app[name].default_command) or "").split("\n\n")[0].split())
        lines += textwrap.wrap(
            f"{name:<11}{re.split(r'(?<=[a-z])[.:] ', about + ' ')[0].rstrip('.: ')}.",
            WIDTH - 2,
            subsequent_indent=" " * 11,
        )
    listed = "\n".join(f"  {line}" for line in lines)
    usage = "Usage: wlb COMMAND [OPTIONS], or python -m wlb_tools COMMAND [OPTIONS]"
    return "\n\n".join(
        [examples(""), usage, _filled(str(app.help).split("\n\n")[0]), f"Commands (wlb COMMAND --help):\n{listed}"]
    )


def _filled(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), WIDTH, break_on_hyphens=False)


def _explained(argument: Any) -> str:
    """An option and the first clause of its help, in at most two lines."""
    help_ = " ".join((argument.parameter.help or "").replace("`", "").split())
    clause = re.split(r"(?<=[^.])\. |; |: ", f"{help_} ")[0].rstrip(". ")
    default = argument.field_info.default
    if isinstance(default, int | float | str) and not isinstance(default, bool) and str(default):
        shown = argument.parameter.show_default
        clause += f" [{shown(default) if callable(shown) else default}]"
    name = ", ".join(each for each in argument.names if not each.startswith("--no-"))
    lines = textwrap.wrap(clause, WIDTH - 22, break_on_hyphens=False) or [""]
    if len(lines) > 2:
        lines = [lines[0], textwrap.shorten(" ".join(lines[1:]), WIDTH - 26, placeholder=" ...")]
    head = f"  {name:<19} " if len(name) < 20 else f"  {name}\n{'':22}"
    return head + f"\n{'':22}".join(lines)
