"""Files that are there already: those that wlb wrote are replaced, and said so; nobody else's are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wlb
from wlb_tools.command.errors import CliError

RESULTS = "results.json"
_NAMES = (RESULTS, "*.html", "*.png", "plans.npz", "plans.jsonl", "documents.txt", "configuration.py", "*.trace.json")
"""Files that reports are made of."""


def check_folder(folder: Path) -> None:
    """Refuses a folder that has files of such names that are not of a report.

    Raises:
        CliError: Names the first of them.
    """
    if (folder / RESULTS).is_file() and {"command", "wlb"} <= set(_json(folder / RESULTS)):
        return
    for name in _NAMES:
        for path in sorted(folder.glob(name)):
            raise CliError(
                f"--output {folder}: {path.name} is there, and is not of a report of wlb; give another folder"
            )


def replaces(path: Path, ours: Callable[[Path], bool]) -> bool:
    """Whether a file is replaced.

    Args:
        path: To write.
        ours: Whether a file is one that the command wrote.

    Raises:
        CliError: It is there, and is something else.
    """
    if not path.exists():
        return False
    if path.is_file() and ours(path):
        return True
    raise CliError(f"--output {path}: is there, and wlb did not write it; give another name, or remove it")


def costs_file(path: Path) -> bool:
    """Whether it holds a cost model."""
    try:
        wlb.CostModel.from_json(path.read_text())
    except (wlb.WlbError, UnicodeDecodeError):
        return False
    return True


def profile_file(path: Path) -> bool:
    """Whether `wlb profile` wrote it."""
    return {"gpu", "kernel", "query_lengths"} <= set(_json(path))


def _json(path: Path) -> dict[str, Any]:
    """An object of JSON; empty where the file holds none."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
