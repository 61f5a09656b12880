"""What docs tell users of other programs to write, for the tests to run; tests/test_docs.py asks for each block."""

from __future__ import annotations

import re
from pathlib import Path

UNREACHED = "its repository is not here and could not be reached: make test-trainers clones it"
"""Why a test is skipped that needs another project's repository; `make test-trainers` allows skips for this reason."""

_BLOCK = re.compile(r"^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def block(containing: str, page: str = "") -> str:
    """The only block of a page, or of all pages of trainers, that has this text in it."""
    docs = Path(__file__).parents[2] / "docs"
    pages = [docs / page] if page else [docs / "trainers.md", *sorted((docs / "trainers").glob("*.md"))]
    found = [block for path in pages for block in _BLOCK.findall(path.read_text()) if containing in block]
    assert len(found) == 1, f"{len(found)} blocks have {containing!r}"
    return str(found[0])
