"""Errors about wrong input, in one line that names the option."""

from __future__ import annotations

from collections.abc import Collection

import wlb
from wlb_tools.cluster.capacity import DoesNotFit

_OPTIONS = {
    "cost_file": "cost-model",
    "gpu_count": "gpus",
    "kernel_model": "kernel-profile",
    "launch_file": "from",
    "model_name": "model",
    "num_micro_batches": "micro-batches",
    "num_queues": "queues",
    "num_virtual_stages": "virtual-stages",
    "outlier_thresholds": "thresholds",
    "reserved_bytes": "reserved-gib",
    "world_size": "gpus",
}
"""Options of arguments of the library that have another name."""


class CliError(Exception):
    """An error that the user can fix, in one line."""


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
    return name + text[len(argument) :] if options is None or name in options else text


def setting(argument: str, value: object) -> str:
    """An argument with a value as an option: `--tp 16`, `--fused-loss`, `--no-fused-ffn`."""
    if isinstance(value, bool):
        return f"--{'' if value else 'no-'}{option(argument)}"
    return f"--{option(argument)} {value}"
