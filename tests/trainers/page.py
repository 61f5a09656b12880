"""What docs tell users of other programs to write, for the tests to run; tests/test_docs.py asks for each block."""

from __future__ import annotations

import re
from pathlib import Path

UNREACHED = "its repository is not here and could not be reached: make test-trainers clones it"
"""Why a test is skipped that needs another project's repository; `make test-trainers` allows skips for this reason."""

_BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def block(containing: str, page: str = "trainers.md") -> str:
    """The only block of the page that has this text in it."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    found = [block for block in _BLOCK.findall(text) if containing in block]
    assert len(found) == 1, f"{len(found)} blocks of the page have {containing!r}"
    return str(found[0])
