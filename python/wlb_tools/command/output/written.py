"""Checks of existing output files: a command replaces files that wlb wrote, and refuses all others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wlb
from wlb_tools.command.errors import CliError

RESULTS = "results.json"
_NAMES = (RESULTS, "*.html", "*.png", "plans.npz", "plans.jsonl", "documents.txt", "configuration.py")
"""Names and patterns of the files of a report."""


def check_folder(folder: Path) -> None:
    """Checks that a report may be written into a folder: its `results.json` is wlb's, or no file has a report's name.

    Raises:
        CliError: there is such a file; the error names the first.
    """
    if (folder / RESULTS).is_file() and {"command", "wlb"} <= set(_json(folder / RESULTS)):
        return
    for name in _NAMES:
        for path in sorted(folder.glob(name)):
            raise CliError(
                f"--output {folder}: {path.name} is there, and is not of a report of wlb; give another folder"
            )


def replaces(path: Path, ours: Callable[[Path], bool]) -> bool:
    """Whether writing `path` replaces a file.

    Args:
        path: file to write.
        ours: whether the command wrote a file.

    Raises:
        CliError: the path exists, and the command did not write it.
    """
    if not path.exists():
        return False
    if path.is_file() and ours(path):
        return True
    raise CliError(f"--output {path}: is there, and wlb did not write it; give another name, or remove it")


def costs_file(path: Path) -> bool:
    """Whether a file holds a cost model."""
    try:
        wlb.CostModel.from_json(path.read_text())
    except (wlb.WlbError, UnicodeDecodeError):
        return False
    return True


def profile_file(path: Path) -> bool:
    """Whether `wlb profile` wrote a file."""
    return {"gpu", "kernel", "query_lengths"} <= set(_json(path))


def _json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it holds none."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
