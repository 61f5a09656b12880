"""torchtitan's Grain data pipeline, of a checkout, reads rows that wlb packs for all ranks together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECKOUT = os.environ.get("WLB_TORCHTITAN", "")


@pytest.mark.skipif(
    not CHECKOUT or not (Path(CHECKOUT) / "torchtitan/components/data/packing.py").is_file(),
    reason="torchtitan could not be reached: WLB_TORCHTITAN names no checkout with a Grain data pipeline",
)
def test_rows_of_all_ranks_are_balanced_and_resume_on_other_ranks() -> None:
    """In a process of its own, because an installed torchtitan has no such module."""
    path = os.pathsep.join([CHECKOUT, str(ROOT)])
    command = [sys.executable, "-m", "tests.trainers.titan_packing"]
    subprocess.run(command, check=True, timeout=540, cwd=ROOT, env=os.environ | {"PYTHONPATH": path})
