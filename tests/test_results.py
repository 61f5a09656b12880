"""The page of results says what the records say."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHES = ROOT / "benches"
RECORDS = BENCHES / "records"


def page(records: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("rich")
    monkeypatch.syspath_prepend(str(BENCHES))
    monkeypatch.setattr(sys, "argv", ["results.py", "--records", str(records), "--page", str(target)])
    runpy.run_path(str(BENCHES / "results.py"), run_name="__main__")
    return target.read_text()


def test_the_page_is_that_of_the_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = page(RECORDS, tmp_path / "results.md", monkeypatch)
    assert made == (ROOT / "docs" / "results.md").read_text(), "run python benches/results.py"
    for name in ("comparison", "engine", "refined", "proof", "proof_larger", "proof_bounded"):
        about: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())["machine"]
        (row,) = (line for line in made.splitlines() if about["time"][:16].replace("T", " ") in line)
        assert about["commit"] in row
        assert f"{about['cpu']}, {about['cores']} cores" in row
    assert not re.search(r"/(home|root|tmp|work)\b", made), "no path of a machine"


def test_a_figure_comes_from_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another time, commit and figure are another page; what never ran says so."""
    record = json.loads((RECORDS / "engine.json").read_text())
    record["machine"] |= {"time": "2031-02-03T04:05:06Z", "commit": "abc1234", "os": "Linux 9.8"}
    record["speed"] = [{**record["speed"][0], "us": [12.0, 24.0], "sort_us": [6.0], "loop_us": [480.0]}]
    (tmp_path / "engine.json").write_text(json.dumps(record))
    made = page(tmp_path, tmp_path / "results.md", monkeypatch)
    assert "| 2031-02-03 04:05 | abc1234 | " in made
    assert "Linux 9.8" in made
    assert "| 12.0 | 2.0 | 0.025 | " in made
    assert made.count("| never |") == 5
