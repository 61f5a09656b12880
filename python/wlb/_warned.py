"""Warnings that point at the user's line, not at a line of wlb or of the engine between them."""

from __future__ import annotations

import sys
import sysconfig
import warnings
from pathlib import Path
from types import FrameType

_OWN = str(Path(__file__).parent)
_STDLIB = sysconfig.get_paths()["stdlib"]
_PACKAGES = ("site-packages", "dist-packages")


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line outside of wlb and installed packages; else at the line that called wlb."""
    warnings.warn(message, category, stacklevel=_level(sys._getframe(1)))


def _level(frame: FrameType | None) -> int:
    level, outside = 2, None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN):
            outside = outside or level
            if not _installed(name):
                return level
        frame, level = frame.f_back, level + 1
    return outside or 2


def _installed(name: str) -> bool:
    """Whether a file belongs to Python or to a package, not to the user."""
    return name.startswith((_STDLIB, "<frozen")) or any(part in name for part in _PACKAGES)
