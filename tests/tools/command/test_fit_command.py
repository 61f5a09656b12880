"""`wlb fit`: logs of any trainer in, costs out, wrong lines named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb

for package in ("cyclopts", "jinja2", "rich", "matplotlib", "plotly"):
    pytest.importorskip(package)

COST = wlb.CostModel(attention=3e-10, linear=2e-6)


def rows(count: int = 60) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        lengths = np.minimum(50 + rng.pareto(1.1, rng.integers(5, 40)) * 300, 65_536).astype(int)
        found.append({"step": number, "lengths": lengths.tolist(), "seconds": float(COST.cost(lengths).sum())})
    return found


def log(folder: Path, form: str = "jsonl") -> Path:
    path = folder / f"log.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    else:
        lines = [f"{' '.join(map(str, row['lengths']))},{row['seconds']!r}" for row in rows()]
        path.write_text("\n".join(["lengths,seconds", *lines]) + "\n")
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_the_costs_of_a_log(run: Any, form: str, tmp_path: Path) -> None:
    shown = run("fit", log(tmp_path, form)).out
    assert "pairs" in shown
    assert "half are off by at most" in shown
    cost = wlb.CostModel.from_json((tmp_path / "log.cost.json").read_text())
    assert cost.terms == pytest.approx(COST.terms, rel=1e-6)
    assert cost.unit == "seconds"


def test_outliers_are_named_by_their_lines(run: Any, tmp_path: Path) -> None:
    made = [row | {"seconds": row["seconds"] * (50 if number in (7, 33) else 1)} for number, row in enumerate(rows())]
    (tmp_path / "log.jsonl").write_text("\n" + "".join(json.dumps(row) + "\n" for row in made))
    assert "60 micro-batches, 2 of them outliers" in (shown := run("fit", "log.jsonl").out)
    assert "Outliers are in lines 9, 35." in shown


def test_the_numbers_as_json_and_a_file_of_ones_own(run: Any, tmp_path: Path) -> None:
    other = tmp_path / "mine.json"
    numbers = run("fit", log(tmp_path), "--json", "--windows", "1024", "--output", other).json
    assert list(numbers["rates"]) == ["pairs", "window_pairs[1024]", "tokens", "documents", "micro_batches"]
    assert numbers["micro_batches"] == 60
    assert wlb.CostModel.from_json(json.dumps(numbers["cost_model"])) == wlb.CostModel.from_json(other.read_text())


def test_rows_of_several_ranks(run: Any, tmp_path: Path) -> None:
    """Their pairs and tokens are shared; without the column the same log would have other costs."""
    path = tmp_path / "log.jsonl"
    made = [row | {"ranks": 1 + number % 3} for number, row in enumerate(rows())]
    path.write_text("".join(json.dumps(row | {"seconds": row["seconds"] / row["ranks"]}) + "\n" for row in made))
    rates = run("fit", path, "--json").json["rates"]
    assert rates == {"pairs": pytest.approx(3e-10), "tokens": pytest.approx(2e-6), "documents": 0, "micro_batches": 0}


def test_other_commands_take_the_file(run: Any, tmp_path: Path) -> None:
    assert run("fit", log(tmp_path), "--quiet").out == ""
    rng = np.random.default_rng(1)
    np.save(tmp_path / "lengths.npy", np.minimum(50 + rng.pareto(1.1, 3000) * 300, 16_384).astype(int))
    common = ["lengths.npy", "--cost-model", "log.cost.json", "--context", "16384", "--json"]
    assert run("pack", *common, "--micro-batches", "4", "--release", "adaptive", "--delay-price", "0.03").json
    assert run("tune", *common, "--micro-batches", "4", "--steps", "5", "--queues", "1").json
    variants = ("--variants", "original,wlb_llm")
    simulated = run("simulate", *common, "--steps", "4", *variants, "--cp", "1", "--tp", "8").json
    assert simulated["settings"]["cost_model"] == "log.cost.json"
    for command, option, value, expected in (
        ("pack", "--model", "llama2-7b", "--model: --cost-model says what documents cost"),
        ("pack", "--gpu", "h100", "--gpu: --cost-model says what documents cost"),
        ("pack", "--attention-efficiency", "1", "--attention-efficiency: --cost-model says what documents cost"),
        ("simulate", "--attention-efficiency", "1", "--attention-efficiency: --cost-model says what documents cost"),
        ("tune", "--gpu", "h100", "--cost-model: tuning on a cluster fits"),
    ):
        refused = run(command, *common, option, value)
        assert (refused.code, expected in refused.err) == (2, True), refused.err
    (tmp_path / "log.cost.json").write_text("{}")
    assert "is no cost model" in run("pack", *common).err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"lengths": [5, 6], "seco', "line 61: is no JSON (it is the last, and may be cut)"),
        ('{"lengths": [5, 6]}\n', "line 61: has no seconds"),
        ('{"seconds": 1}\n', "line 61: has no lengths"),
        ('{"lengths": [5, 0], "seconds": 1}\n', "line 61: lengths hold 0"),
        ('{"lengths": [5, 1.5], "seconds": 1}\n', "line 61: lengths hold 1.5"),
        ('{"lengths": 5, "seconds": 1}\n', "line 61: lengths = 5: must be a list"),
        ('{"lengths": [5], "seconds": 0}\n', "line 61: seconds = 0: must be a number above 0"),
        ('{"lengths": [5], "seconds": NaN}\n', "line 61: seconds = nan"),
        ('{"lengths": [5], "seconds": "x"}\n', "line 61: seconds = 'x'"),
        ('{"lengths": [5], "seconds": 1, "ranks": 0}\n', "line 61: ranks = 0: must be an integer from 1"),
        ('{"lengths": [5], "seconds": 1, "ranks": 1.5}\n', "line 61: ranks = 1.5"),
        ("[1]\n", "line 61: is no JSON object"),
    ],
)
def test_a_wrong_line_is_named(run: Any, line: str, message: str, tmp_path: Path) -> None:
    path = log(tmp_path)
    with path.open("a") as file:
        file.write(line)
    refused = run("fit", path)
    assert (refused.code, message in refused.err) == (2, True), refused.err
    assert not (tmp_path / "log.cost.json").exists()


def test_a_log_that_is_none_is_refused(run: Any, tmp_path: Path) -> None:
    for name, text, message in (
        ("a.csv", "tokens,seconds\n5,1\n", "line 1: has no column lengths"),
        ("b.csv", "lengths,seconds\n5 x,1\n", "line 2: lengths = '5 x'"),
        ("c.txt", "", "give a .jsonl or a .csv"),
        ("d.jsonl", "", "rows are too few"),
        ("e.jsonl", '{"lengths": [5, 5], "seconds": 1}\n' * 20, "all documents have the same length"),
    ):
        path = tmp_path / name
        path.write_text(text)
        refused = run("fit", path)
        assert (refused.code, message in refused.err) == (2, True), refused.err
    assert "no such file" in run("fit", "none.jsonl").err


def test_the_log_is_not_written_over(run: Any, tmp_path: Path) -> None:
    path = log(tmp_path)
    before = path.read_bytes()
    (tmp_path / "link.json").symlink_to(path)
    for output in (path, tmp_path / "link.json"):
        refused = run("fit", path, "--output", output)
        assert (refused.code, "--output" in refused.err) == (2, True)
        assert path.read_bytes() == before
