"""What docs/trainers.md tells users to write, for the tests to run."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def block(containing: str) -> str:
    """The only block of the page that has this text in it."""
    text = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    found = [block for block in _BLOCK.findall(text) if containing in block]
    assert len(found) == 1, f"{len(found)} blocks of the page have {containing!r}"
    return str(found[0])
