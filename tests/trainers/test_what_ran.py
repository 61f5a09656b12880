"""`make test-trainers` says what ran, and fails where something was skipped that nobody named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILE = """
import pytest


def test_one() -> None:
    pass


@pytest.mark.skip(reason="of another version")
def test_other() -> None:
    pass
"""


@pytest.mark.parametrize(
    ("may_skip", "passes"),
    [("verl", False), ("verl,trl", True), ("of another", True)],
)
def test_a_skip_that_nobody_named_fails(may_skip: str, passes: bool, tmp_path: Path) -> None:
    (tmp_path / "test_trl.py").write_text(FILE)
    program = [sys.executable, "-m", "pytest", "-p", "tests.trainers.conftest", "-p", "no:cacheprovider"]
    program += ["--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path / "test_trl.py"), "--may-skip", may_skip]
    done = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout.partition("what ran")[2]
    assert ("--may-skip does not name it: of another version" in done.stdout) != passes
