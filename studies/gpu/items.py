"""Items that are done once: each is a line in a file, and a later run does the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

import wlb
from wlb_tools.profiling.records import Lines

Row = dict[str, Any]
Item = tuple[str, Callable[[], Row]]  # its name, which is another for everything that is measured otherwise; the work


class Budget:
    """Wall time that a run may take.

    Args:
        seconds: from now on.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds; below 0 once it is used up."""
        return self._until - time.monotonic()


class Done:
    """What a piece has done so far: a file of one JSON object a line, made or continued.

    Args:
        path: the file.
        identity: what the items depend on; its first line.

    Raises:
        SystemExit: the file is of another machine, other versions or other settings.
    """

    def __init__(self, path: Path, identity: Row) -> None:
        try:
            self._lines, found = Lines.open(path, {"format": "wlb.gpu", "version": 1} | identity)
        except wlb.WlbError as other:
            raise SystemExit(f"{other}, or name another folder with --out") from None
        self.rows: dict[str, Row] = {row["item"]: row for row in found}

    def __enter__(self) -> Done:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None):
        self._lines.close()

    def add(self, name: str, row: Row) -> None:
        """Writes an item down."""
        self.rows[name] = {"item": name, **row}
        self._lines.add(self.rows[name])

    def all(self, items: Iterable[Item], budget: Budget, tick: Callable[[str], None]) -> bool:
        """Does what is not done; whether all of it is.

        An item that raises is written down with its error, and the next one runs: unless the device itself failed,
        which no later call on it survives.

        Raises:
            SystemExit: the device failed; the same command goes on after that item.
        """
        for name, work in items:
            if name in self.rows:
                continue
            if budget.left <= 0:
                return False
            tick(name)
            try:
                self.add(name, work())
            except (RuntimeError, ValueError, AssertionError, NotImplementedError) as failed:
                self.add(name, {"error": f"{type(failed).__name__}: {failed}"})
                if "CUDA error" in str(failed):
                    raise SystemExit(
                        f"{name}: the device failed ({failed}). The same command goes on after it"
                    ) from None
        return True


def machine_of(device: torch.device) -> Row:
    """What every item depends on."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
    }
