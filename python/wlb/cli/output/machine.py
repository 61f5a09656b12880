"""The machine, as far as planning times depend on it."""

import os
import platform
from pathlib import Path

import numpy as np

import wlb


def machine() -> dict[str, str | int | None]:
    """Processor, system and versions, as plain JSON values."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "wlb_build": wlb.BUILD_PROFILE,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")  # elsewhere than on Linux, the platform module knows more
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"
