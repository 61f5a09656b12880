"""The base class of results that hold arrays."""

from __future__ import annotations

from typing import Any

import numpy as np


class Copied:
    """Returns copies of its public arrays, which the caller may keep or change."""

    def __getattribute__(self, name: str) -> Any:
        value = object.__getattribute__(self, name)
        return value.copy() if isinstance(value, np.ndarray) and not name.startswith("_") else value
