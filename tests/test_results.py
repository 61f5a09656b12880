"""The page of results is made of the records, and of nothing else."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benches import results
from benches.common import DOCS, RECORDS


def test_the_page_is_that_of_the_records() -> None:
    assert results.page(RECORDS) == (DOCS / "results.md").read_text(), "run python -m benches.results"


def test_a_figure_comes_from_its_record(tmp_path: Path) -> None:
    """Another time, commit and figure are another page; what never ran says so."""
    record = json.loads((RECORDS / "engine.json").read_text())
    record["machine"] |= {"time": "2031-02-03T04:05:06Z", "commit": "abc1234", "os": "Linux 9.8"}
    record["speed"] = [{**record["speed"][0], "us": [12.0, 24.0], "sort_us": [6.0], "loop_us": [480.0]}]
    (tmp_path / "engine.json").write_text(json.dumps(record))
    made = results.page(tmp_path)
    assert "| 2031-02-03 04:05 | abc1234 | " in made
    assert "Linux 9.8" in made
    assert "| 12.0 | 2.0 | 0.025 | " in made
    assert made.count("| never |") == len(results.SECTIONS) - 1
