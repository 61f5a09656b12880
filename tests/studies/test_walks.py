"""The two walks of docs/results/walks.md: the commands run again, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

for package in ("cyclopts", "jinja2", "rich", "matplotlib", "plotly", "pyarrow", "tokenizers"):
    pytest.importorskip(package)
from benches import walks  # noqa: E402

BLOCK = re.compile(r"```console\n\$ (.*)\n([^`]*)```")


@pytest.mark.parametrize("walk", walks.WALKS, ids=lambda walk: walk.title.split(" ")[1])
def test_a_walk_prints_what_the_page_says(walk: walks.Walk, tmp_path: Path) -> None:
    shown = dict(BLOCK.findall(walks.PAGE.read_text().partition(f"## {walk.title}")[2]))
    for command, printed in walks.walked(walk, tmp_path):
        assert printed == shown[command].rstrip("\n"), f"{command}: run python -m benches.walks"


def test_two_commands_from_a_parquet_file_to_advice() -> None:
    engineer, researcher = walks.WALKS
    assert len(researcher.commands) == 2
    assert researcher.commands[0].startswith("wlb lengths train.parquet ")
    assert researcher.commands[1].startswith("wlb advise lengths.npy ")
    assert [each.split(" ")[1] for each in engineer.commands] == ["lengths", "simulate", "advise"]
