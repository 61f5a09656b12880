"""Errors about wrong input, in one line that names the option."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields

import wlb
from wlb_tools.cluster.capacity import DoesNotFit
from wlb_tools.cluster.hardware import Hardware
from wlb_tools.cluster.parallel import ParallelLayout

_SET = "--set"
_OPTIONS = {
    "changes": "set",
    "cost_file": "cost-model",
    "gpu_count": "gpus",
    "kernel_model": "kernel-profile",
    "launch_file": "from",
    "model_name": "model",
    "num_micro_batches": "micro-batches",
    "num_queues": "queues",
    "outlier_thresholds": "thresholds",
    "world_size": "gpus",
}
"""Options of arguments of the library that have another name."""


class CliError(Exception):
    """An error that the user can fix, in one line."""


def first_line(cause: BaseException) -> str:
    """The first line of what another package says about an error; the error's type if it says nothing."""
    return next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)


def option(argument: str) -> str:
    """The option of an argument or field of the library, without its hyphens."""
    return _OPTIONS.get(argument, argument.replace("_", "-"))


def in_options(error: wlb.WlbError, options: Collection[str] | None = None) -> str:
    """An error of the library in the words of the command line.

    Args:
        error: names its argument; if a model does not fit, also settings with which it would.
        options: existing options, such as `--micro-batches`; other arguments keep their names.
    """
    if isinstance(error, DoesNotFit):
        return error.worded(setting)
    text, argument = str(error), error.argument
    if argument is None or not text.startswith(argument):
        return text
    name = f"--{option(argument)}"
    if name in (_ON_A_CLUSTER if options is None else options):
        return name + text[len(argument) :]
    if options is None or _SET in options:
        return f"{_SET} {_dotted(argument)}{text[len(argument) :]}"
    return text


_ON_A_CLUSTER = frozenset(f"--{name}" for name in ("tp", "cp", "pp", "dp", "gpus", "model", "gpu", "micro-batches"))
"""Options of commands about a cluster that an argument of the library may have; `--set` has the others."""


def setting(argument: str, value: object) -> str:
    """An argument with a value as a command line has it: `--tp 16`, or `--set layout.fused_loss=true`."""
    name = f"--{option(argument)}"
    if name in _ON_A_CLUSTER:
        return f"{name} {value}"
    return f"{_SET} {_dotted(argument)}={value if isinstance(value, str) else json.dumps(value)}"


def _dotted(argument: str) -> str:
    """The name of a setting in a scenario: `layout.fsdp` for the argument `fsdp`."""
    argument = {"num_virtual_stages": "virtual_stages"}.get(argument, argument)
    for table, cls in (("layout", ParallelLayout), ("hardware", Hardware)):
        if argument in {field.name for field in fields(cls)}:
            return f"{table}.{argument}"
    return argument
