"""The `wlb` command, run as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wlb_tools.command import main


class Result:
    """How one run ended."""

    def __init__(self, code: object, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        parsed: dict[str, Any] = json.loads(self.out)
        return parsed


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Runs `wlb` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: object) -> Result:
        with pytest.raises(SystemExit) as exit_:
            main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Result(exit_.value.code or 0, captured.out, captured.err)

    return run
