"""The loss study compares methods seed by seed."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]

for needed in ("cyclopts", "matplotlib"):
    pytest.importorskip(needed)
loss_curves = pytest.importorskip("studies.loss_curves")


def test_a_difference_that_the_seeds_share_is_found_below_their_spread() -> None:
    original = np.array([[9.0, 2.0], [9.0, 3.0], [9.0, 4.0]])  # [seeds, points]; the spread is 1
    relative, t = loss_curves.paired(original + np.array([[0.0, 0.29], [0.0, 0.3], [0.0, 0.31]]), original)
    assert relative == pytest.approx(0.1)
    assert t == pytest.approx(0.3 / (0.01 / 3**0.5))
    assert math.isnan(loss_curves.paired(original[:1] + 1, original[:1])[1])


def test_what_the_readme_says_of_the_record() -> None:
    runs = json.loads((ROOT / "benches" / "records" / "loss_curves.json").read_text())["runs"]
    tokens, found = loss_curves.at_equal_tokens(runs)
    assert round(tokens[-1]) == 306950
    relative, t = loss_curves.paired(found["wlb"], found["original"])
    assert f"{relative:+.2%} {t:.1f}" == "+0.97% 2.4"
    relative, t = loss_curves.paired(found["fixed, 8 batches"], found["original"])
    assert f"{relative:+.2%} {t:.1f}" == "-0.55% -2.3"
    cells = [list(column.cells) for column in loss_curves.summary(tokens, found).columns]
    assert "+0.97%" in cells[3]
    assert "2.4" in cells[4]
