"""Gains over the best without wlb: what the study computes beside the search for layouts, and its page."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("rich")
pytest.importorskip("cyclopts")

import wlb
import wlb_tools
from studies.headline import CONTEXT, LAYOUT, METHODS, gained, in_other_orders, on_one_layout, one_layout
from wlb_tools.simulation import search_layouts
from wlb_tools.simulation.tuning import Choice


def test_methods_on_one_layout_over_a_baseline_that_is_there() -> None:
    """Plain-4D over itself is 1 at any rate of attention; the others are what one simulation says of them."""
    lengths = np.random.default_rng(5).lognormal(9, 1.5, 200).astype(int).clip(1, CONTEXT)
    assumed: dict[str, Any] = {
        "model": wlb.ModelConfig.preset("llama2-7b"),
        "hardware": wlb_tools.Hardware.preset("h100"),
        "context": CONTEXT,
        "cp_overlap": 0.5,
    }
    scenario = wlb_tools.Scenario(layout=LAYOUT, num_micro_batches=4, outlier_thresholds=(), **assumed)
    simulation = wlb_tools.simulate(lengths, scenario, variants=METHODS)
    plain = Choice(kind="plain", max_tokens=CONTEXT, outcome=simulation.baseline)
    found = on_one_layout(lengths, 4 * CONTEXT, assumed | {"gpus": 64}, plain)
    assert list(found) == list(METHODS)
    assert found["plain"] == {"gain": 1, "band": [1, 1]}
    for name, row in found.items():
        steady = simulation.baseline.steady_seconds / simulation.outcomes[name].steady_seconds
        assert row["gain"] == pytest.approx(steady, rel=1e-12)
        assert row["band"][0] <= row["gain"] <= row["band"][1]
    shown = list(one_layout([{"corpus": "mine", "millions": 0.5, "hidden": 0.5, "one_layout": found}]))[-1]
    assert shown.startswith("| mine | 0.5 M | 50% | 1.00 (1.00 to 1.00) | ")
    assert shown.count(" to ") == len(METHODS)


def test_a_pair_of_plans_is_judged_in_an_order_that_was_not_searched() -> None:
    """In the searched order the gain is the search's own; in another, that of the same plans made anew."""
    lengths = np.random.default_rng(6).lognormal(9, 1.5, 300).astype(int).clip(1, CONTEXT)
    other = np.random.default_rng(7).permutation(lengths)
    search = search_layouts(
        lengths,
        model=wlb.ModelConfig.preset("llama2-7b"),
        hardware=wlb_tools.Hardware.preset("h100"),
        gpus=16,
        tokens_per_batch=4 * CONTEXT,
        context=CONTEXT,
        max_tokens=CONTEXT,
    )
    for one in (search, search.again("flops")):
        row = gained(one, [lengths, other])
        assert row["orders"][0] == pytest.approx(row["gain"], rel=1e-12)
        assert row["orders"][1] != row["gain"]
    rows = [
        {"corpus": "mine", "millions": 0.5, "hidden": 0.5, **gained(one, [lengths, other])}
        for one in (search, search.again("flops"))
    ]
    shown = list(in_other_orders(rows))
    assert shown[-1].startswith(f"| mine | 0.5 M | 50% | {rows[0]['gain']:.2f} | ")
    assert list(in_other_orders([{"by": "tokens"}])) == []
    best, without = search.best, search.without
    seconds = [
        wlb_tools.simulate(other, choice.outcome.scenario, variants={"it": choice.variant}).baseline.steady_seconds
        for choice in (without, best)
    ]
    assert gained(search, [other])["orders"] == pytest.approx([seconds[0] / seconds[1]], rel=1e-12)
