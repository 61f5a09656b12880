"""`wlb fit`: logs of any trainer in, costs out, wrong lines named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
from wlb.cli.app import run

COST = wlb.CostModel(attention=3e-10, linear=2e-6)


def rows(count: int = 60) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        lengths = np.minimum(50 + rng.pareto(1.1, rng.integers(5, 40)) * 300, 65_536).astype(int)
        found.append({"step": number, "lengths": lengths.tolist(), "seconds": float(COST.cost(lengths).sum())})
    return found


def wlb_command(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run([*argv])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def log(folder: Path, form: str = "jsonl") -> Path:
    path = folder / f"log.{form}"
    if form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    else:
        lines = [f"{' '.join(map(str, row['lengths']))},{row['seconds']!r}" for row in rows()]
        path.write_text("\n".join(["lengths,seconds", *lines]) + "\n")
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_the_costs_of_a_log(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert wlb_command("fit", str(log(tmp_path, form))) == 0
    shown = capsys.readouterr().out
    assert "pairs" in shown
    assert "half are off by at most" in shown
    cost = wlb.CostModel.from_json((tmp_path / "log.cost.json").read_text())
    assert cost.terms == pytest.approx(COST.terms, rel=1e-6)
    assert cost.unit == "seconds"


def test_the_numbers_as_json_and_a_file_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "mine.json"
    assert wlb_command("fit", str(log(tmp_path)), "--json", "--windows", "1024", "--output", str(other)) == 0
    numbers = json.loads(capsys.readouterr().out)
    assert list(numbers["rates"]) == ["pairs", "window_pairs[1024]", "tokens", "documents", "micro_batches"]
    assert numbers["micro_batches"] == 60
    assert wlb.CostModel.from_json(json.dumps(numbers["cost_model"])) == wlb.CostModel.from_json(other.read_text())


def test_rows_of_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their pairs and tokens are shared; without the column the same log would have other costs."""
    path = tmp_path / "log.jsonl"
    made = [row | {"ranks": 1 + number % 3} for number, row in enumerate(rows())]
    path.write_text("".join(json.dumps(row | {"seconds": row["seconds"] / row["ranks"]}) + "\n" for row in made))
    assert wlb_command("fit", str(path), "--json") == 0
    rates = json.loads(capsys.readouterr().out)["rates"]
    assert rates == {"pairs": pytest.approx(3e-10), "tokens": pytest.approx(2e-6), "documents": 0, "micro_batches": 0}


def test_other_commands_take_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wlb_command("fit", str(log(tmp_path)), "--quiet")
    cost, lengths, folder = tmp_path / "log.cost.json", tmp_path / "lengths.npy", str(tmp_path / "out")
    rng = np.random.default_rng(1)
    np.save(lengths, np.minimum(50 + rng.pareto(1.1, 3000) * 300, 16_384).astype(int))
    common = [str(lengths), "--cost-model", str(cost), "--context", "16384", "--output-dir", folder, "--json"]
    assert wlb_command("pack", *common, "--micro-batches", "4", "--release", "adaptive", "--delay-price", "0.03") == 0
    assert wlb_command("tune", *common, "--micro-batches", "4", "--steps", "5", "--queues", "1") == 0
    assert wlb_command("simulate", *common, "--steps", "4", "--variants", "plain,wlb", "--cp", "1", "--tp", "8") == 0
    assert '"cost_model"' in capsys.readouterr().out
    assert wlb_command("pack", *common, "--model", "llama2-7b") == 2
    assert "--model: --cost-model says what documents cost" in capsys.readouterr().err
    for option, value in (("--gpu", "h100"), ("--attention-efficiency", "1")):
        assert wlb_command("pack", *common, option, value) == 2
        assert f"{option}: --cost-model says what documents cost" in capsys.readouterr().err
    assert wlb_command("simulate", *common, "--attention-efficiency", "1") == 2
    assert "--attention-efficiency: --cost-model says what documents cost" in capsys.readouterr().err
    assert wlb_command("tune", *common, "--gpu", "h100") == 2
    assert "--cost-model: tuning on a cluster fits" in capsys.readouterr().err
    cost.write_text("{}")
    assert wlb_command("pack", *common) == 2
    assert "is no cost model" in capsys.readouterr().err


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
def test_a_wrong_line_is_named(line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path)
    with path.open("a") as file:
        file.write(line)
    assert wlb_command("fit", str(path)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "log.cost.json").exists()


def test_a_log_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text, message in (
        ("a.csv", "tokens,seconds\n5,1\n", "line 1: has no column lengths"),
        ("b.csv", "lengths,seconds\n5 x,1\n", "line 2: lengths = '5 x'"),
        ("c.txt", "", "give a .jsonl or a .csv"),
        ("d.jsonl", "", "rows are too few"),
        ("e.jsonl", '{"lengths": [5, 5], "seconds": 1}\n' * 20, "all documents have the same length"),
    ):
        path = tmp_path / name
        path.write_text(text)
        assert wlb_command("fit", str(path)) == 2
        assert message in capsys.readouterr().err
    assert wlb_command("fit", str(tmp_path / "none.jsonl")) == 2
    assert "no such file" in capsys.readouterr().err


def test_the_log_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path)
    before = path.read_bytes()
    (tmp_path / "link.json").symlink_to(path)
    for output in (path, tmp_path / "link.json"):
        assert wlb_command("fit", str(path), "--output", str(output)) == 2
        assert "--output" in capsys.readouterr().err
        assert path.read_bytes() == before
