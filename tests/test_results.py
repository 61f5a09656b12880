"""The pages of results are made of the records, and of nothing else."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")

from benches import compare, forests, results, rl
from benches.common import DOCS, RECORDS

PAGES = DOCS / "results"


def test_the_pages_are_those_of_the_records() -> None:
    assert results.index(RECORDS) == (PAGES / "index.md").read_text(), "run python -m benches.results"
    assert results.speed(RECORDS) == (PAGES / "engine.md").read_text(), "run python -m benches.results"
    record = json.loads((RECORDS / "compare.json").read_text())
    assert compare.page(record) == (PAGES / "compare.md").read_text(), "run make compare"
    record = json.loads((RECORDS / "forests.json").read_text())
    assert forests.page(record) == (PAGES / "forests.md").read_text(), "run python -m benches.forests"
    scale = pytest.importorskip("benches.scale", reason="torch is not installed", exc_type=ImportError)
    record = json.loads((RECORDS / "scale.json").read_text())
    assert scale.page(record) == (PAGES / "scale.md").read_text(), "run make scale"
    record, clock = (json.loads((RECORDS / name).read_text()) for name in ("rl.json", "rl_clock.json"))
    assert rl.page(record, clock) == (PAGES / "rl.md").read_text(), "run python -m benches.rl"


def test_a_figure_comes_from_its_record(tmp_path: Path) -> None:
    """Another time, commit and figure are another page; what never ran has no time."""
    record = json.loads((RECORDS / "engine.json").read_text())
    record["machine"] |= {"time": "2031-02-03T04:05:06Z", "commit": "abc1234", "os": "Linux 9.8"}
    row = next(row for row in record["speed"] if "8,700 documents, 64 micro-batches" in row["name"])
    record["speed"] = [{**row, "us": [12.0, 24.0], "sort_us": [6.0], "loop_us": [480.0]}]
    (tmp_path / "engine.json").write_text(json.dumps(record))
    made = results.speed(tmp_path)
    assert "takes 12 microseconds, 2.0 times" in made
    assert "Linux 9.8" in made
    assert "commit abc1234" in made
    assert "| 12.0 | 2.0 | 0.025 | " in made
    assert "| 2031-02-03 04:05 | abc1234 | " in results.index(tmp_path)


def test_a_better_peer_is_named() -> None:
    record = json.loads((RECORDS / "compare.json").read_text())
    heap = next(row for row in record["rows"] if row["planner"] == "longest first with a heap")
    assert not any("every round: longest first" in line for line in compare.ahead([heap, *record["rows"]]))
    heap["every_round"] = 0.5
    named = " ".join(compare.ahead(record["rows"]))
    assert "a shorter step where they meet in every round: longest first with a heap (0.500)" in named
