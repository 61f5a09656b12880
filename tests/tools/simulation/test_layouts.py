"""The search for layouts: what pruning leaves out is slower, and what cannot be is told."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

import wlb
import wlb_tools
from tests.tools.simulation.test_simulate import documents
from wlb_tools.simulation import LayoutSearch, search_layouts, simulate
from wlb_tools.simulation.layouts import RANKED, WITHOUT_WLB, Bounds
from wlb_tools.simulation.tuning import Settings

MODEL = wlb.ModelConfig.preset("llama2-7b")
H100 = wlb_tools.Hardware.preset("h100")


def search(gpus: int = 16, **changes: Any) -> LayoutSearch:
    options: dict[str, Any] = {
        "model": MODEL,
        "hardware": H100,
        "gpus": gpus,
        "tokens_per_batch": 8 * 4096,
        "context": 4096,
    }
    return search_layouts(documents(150), **options | changes)


def times(found: LayoutSearch) -> list[float]:
    return [found.gain(choice) for choice in (*found.ranked, found.without)]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param({"gpus": 8, "by": "tokens"}, marks=pytest.mark.long),
        {"gpus": 4, "by": "flops", "hardware": dataclasses.replace(H100, gpus_per_node=2), "cp_keys": "needed"},
        {"gpus": 6, "by": "tokens", "cp_overlap": 1.0},
    ],
)
def test_pruning_finds_what_exhaustive_search_finds(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pruned = search(**case)
    monkeypatch.setattr(Bounds, "seconds", lambda *_: 1e-9)  # rules nothing out
    exhaustive = search(**case)
    assert exhaustive.simulated == exhaustive.candidates
    assert pruned.simulated < 0.7 * pruned.candidates
    assert times(pruned) == times(exhaustive)
    assert [choice.outcome.scenario.layout for choice in pruned.ranked] == [
        choice.outcome.scenario.layout for choice in exhaustive.ranked
    ]
    assert len(pruned.ranked) == RANKED
    assert times(pruned)[:RANKED] == sorted(times(pruned)[:RANKED])
    assert pruned.without.kind in WITHOUT_WLB


def test_a_bound_counts_no_keys_where_a_plan_may_need_none() -> None:
    """Documents of one token, which are level however they are packed, and of which no rank needs another's keys."""
    lengths = np.ones(3 * 4 * 256, dtype=np.int64)
    layout = wlb_tools.ParallelLayout(cp=4)
    for keys in ("all", "needed"):
        case = wlb_tools.Scenario(
            model=MODEL, layout=layout, hardware=H100, context=256, num_micro_batches=4, max_tokens=256, cp_keys=keys
        )
        taken = simulate(lengths, case, variants=("original",)).baseline.total_seconds
        bound = Bounds(lengths, lengths).seconds(case, Settings(kind="original", max_tokens=256))
        assert 0.8 * taken < bound <= taken * (1 + 1e-9)


def test_every_layout_is_tried_or_refused_for_a_reason_and_what_is_tried_fits() -> None:
    found = search(gpus=16, hardware=dataclasses.replace(H100, memory_bytes=26 * 2**30))
    triples = [(a, b, c) for a, b, c in itertools.product(range(1, 17), repeat=3) if 16 % (a * b * c) == 0]
    assert found.layouts + sum(found.refused.counts.values()) == sum(1 if pp == 1 else 4 for _, _, pp in triples)
    assert found.refused.nearest is not None
    assert found.refused.lacking_bytes > 0
    assert "lacks" in found.refused.sentences()[-1]
    for choice in found.ranked:
        assert choice.outcome.scenario.layout.world_size == 16
        assert choice.outcome.memory.total.max() <= choice.outcome.scenario.hardware.memory_bytes
        assert choice.delay <= choice.outcome.scenario.max_mean_delay


def test_gains_over_the_own_layout_and_over_the_best_without_wlb() -> None:
    own = wlb_tools.ParallelLayout(tp=8, pp=2, recompute="selective")
    found = search(own=own, max_mean_delay=0)
    assert found.own is not None
    assert found.own_without is not None
    assert found.own.outcome.scenario.layout == own
    assert {choice.outcome.scenario.layout.recompute for choice in found.ranked} == {"selective"}
    assert found.own_without.kind in WITHOUT_WLB
    assert all(choice.delay == 0 for choice in found.ranked)
    plain = wlb_tools.simulate(documents(150), found.own.outcome.scenario, variants=("original",)).baseline
    assert found.own_without.outcome.steady_seconds <= plain.steady_seconds
    assert found.gain(found.own) >= 1
    least, most = found.gain_band(found.own_without)
    assert least <= found.gain(found.own_without) <= most
    rows = found.as_json()
    assert rows["own"]["layout"] == {"tp": 8, "cp": 1, "pp": 2, "dp": 1, "virtual_stages": 1, "ep": 1}
    assert rows["ranked"][0] == rows["best"]


def test_what_cannot_be_searched() -> None:
    cases: dict[str, dict[str, Any]] = {
        "gpus": {"hardware": dataclasses.replace(H100, memory_bytes=8 * 2**30)},
        "tokens_per_batch": {"tokens_per_batch": 4095},
        "world_size": {"own": wlb_tools.ParallelLayout(tp=8)},
        "by": {"by": "time"},
    }
    for argument, changes in cases.items():
        with pytest.raises(wlb.WlbError) as raised:
            search(**changes)
        assert raised.value.argument == argument
    with pytest.raises(wlb.WlbError, match=r"lacks .* GiB"):
        search(**cases["gpus"])
