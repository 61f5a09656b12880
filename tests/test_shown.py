"""Objects that explain themselves: a short repr, figures, tables, and an `==` that answers."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import wlb
import wlb_tools
from wlb._shown import LONGEST, explained, short

MODULES = (
    "wlb",
    "wlb.models",
    "wlb.ledger",
    "wlb.reading.filling",
    "wlb.timings",
    "wlb.torch",
    "wlb_tools",
    "wlb_tools.simulation",
    "wlb_tools.cluster",
    "wlb_tools.profiling",
    "wlb_tools.audit",
)


def public_classes() -> Iterator[type[Any]]:
    """Every class that a module names in `__all__`, once."""
    seen = set()
    for name in MODULES:
        if name == "wlb.torch":
            pytest.importorskip("torch")
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", ()):
            found = getattr(module, each)
            if inspect.isclass(found) and found not in seen:
                seen.add(found)
                yield found


LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.5, 1.2, 3000), 1, 4096).astype(np.int64)


@pytest.fixture(scope="module")
def scenario() -> wlb_tools.Scenario:
    return wlb_tools.Scenario(
        model=wlb.ModelConfig.preset("llama2-7b"),
        hardware=wlb_tools.Hardware.preset("h100"),
        layout=wlb_tools.ParallelLayout(tp=8, cp=2, pp=4),
        context=4096,
    )


@pytest.fixture(scope="module")
def simulation(scenario: wlb_tools.Scenario) -> wlb_tools.Simulation:
    return wlb_tools.simulate(LENGTHS, scenario, variants=("original", "wlb_llm", "dynamic_cp"))


@pytest.fixture(scope="module")
def packing() -> wlb.Packing:
    return wlb.pack(LENGTHS, num_micro_batches=None, max_tokens=4096, costs=LENGTHS.astype(float))


@pytest.fixture(scope="module")
def timeline() -> wlb.PipelineTimeline:
    return wlb.simulate_pipeline(np.linspace(1, 2, 400), num_stages=4)


def test_no_public_class_prints_all_that_it_holds() -> None:
    """A dataclass prints its fields whole, arrays and lists of documents included, unless it is `explained`."""
    whole = [
        cls.__name__
        for cls in public_classes()
        if dataclasses.is_dataclass(cls)
        and "_shown" not in cls.__repr__.__code__.co_filename
        and cls.__dataclass_params__.repr  # type: ignore[attr-defined]
    ]
    assert whole == []
    assert len(list(public_classes())) > 60


def test_reprs_of_large_objects_are_short(
    simulation: wlb_tools.Simulation, packing: wlb.Packing, timeline: wlb.PipelineTimeline
) -> None:
    tuned = wlb.tune(
        LENGTHS, num_micro_batches=8, max_tokens=8192, cost_model=wlb.CostModel(attention=1e-3, linear=1), num_queues=2
    )
    shard = wlb.shard(LENGTHS[:500], cp_size=8)
    dynamic = wlb.plan_dynamic_cp(
        LENGTHS[:300],
        world_size=16,
        num_stages=2,
        max_tokens_per_rank=4096,
        cost_model=wlb.CostModel(attention=1e-3, linear=1),
    )
    packer = wlb.Packer(num_micro_batches=8, max_tokens=8192, cost_model=wlb.CostModel(attention=1e-3, linear=1))
    packer.push(LENGTHS[:200])
    profile = wlb.CostModel.from_profile  # a table of thousands of seconds
    assert callable(profile)
    steps = wlb.simulate_steps(np.ones((50, 2, 16)), num_stages=4)
    held: list[Any] = [
        *(simulation, simulation.scenario, simulation.baseline, *simulation.outcomes.values()),
        *(outcome.run for outcome in simulation.outcomes.values()),
        *(simulation.baseline.memory, simulation.scenario.hardware, simulation.scenario.model),
        *(packing, packing[0], shard, shard.rank(0), timeline, tuned, tuned.best, dynamic, dynamic[0], dynamic[0][0]),
        *(packer, packer.metrics(), packer.bounds(), steps),
    ]
    for each in held:
        assert len(repr(each)) <= LONGEST, type(each).__name__
        assert type(each).__name__ in repr(each)


@pytest.mark.parametrize("fields", [1, 60])
def test_a_repr_is_short_whatever_it_holds(fields: int) -> None:
    values: list[Any] = [
        np.zeros((1000, 7)),
        "x" * 5000,
        list(range(10_000)),
        {str(k): k for k in range(1000)},
        [["y" * 3000] * 5],
        (1,),
        {"a": np.zeros(9)},
        type("Long", (), {"__repr__": lambda self: "z" * 9000})(),
    ]
    made = explained(
        dataclasses.make_dataclass("Made", [(f"a{k}_{'n' * 30}", Any) for k in range(fields)], frozen=True)
    )
    for value in values:
        assert len(short(value)) <= 125
        text = repr(made(*[value] * fields))
        assert len(text) <= LONGEST
        assert text.startswith("Made(")
    assert short(np.zeros((1000, 7))) == "float64[1000, 7]"
    assert short((1,)) == "(1,)"


def test_small_objects_are_printed_whole() -> None:
    link = wlb_tools.Link(latency=1e-6, bandwidth=1e9)
    assert repr(link) == "Link(latency=1e-06, bandwidth=1000000000.0)"
    assert eval(repr(link), {"Link": wlb_tools.Link}) == link


def test_simulations_can_be_compared(scenario: wlb_tools.Scenario, simulation: wlb_tools.Simulation) -> None:
    again = wlb_tools.simulate(LENGTHS, scenario, variants=("original", "wlb_llm", "dynamic_cp"))
    assert simulation == again
    assert simulation.baseline == again.baseline
    other = wlb_tools.simulate(LENGTHS[::-1], scenario, variants=("original", "wlb_llm", "dynamic_cp"))
    assert simulation != other
    assert simulation.baseline != other.baseline
    assert simulation != 3


def figures_of(simulation: wlb_tools.Simulation, packing: wlb.Packing, timeline: wlb.PipelineTimeline) -> list[Any]:
    return [
        *(
            packing,
            wlb.shard([100, 200, 30], cp_size=4),
            timeline,
            wlb.simulate_steps(np.ones((5, 2, 8)), num_stages=2),
        ),
        *(simulation, *simulation.outcomes.values()),
    ]


def test_objects_sum_up_and_show_themselves(
    simulation: wlb_tools.Simulation, packing: wlb.Packing, timeline: wlb.PipelineTimeline
) -> None:
    for each in figures_of(simulation, packing, timeline):
        figures = each.summary()
        assert all(isinstance(name, str) for name in figures)
        html = each._repr_html_()
        assert html.startswith("<table>")
        for name in figures:
            assert name.replace("_", " ") in html
    assert packing.summary()["tokens"] == LENGTHS.sum()
    assert packing.summary()["imbalance"] == packing.imbalance
    assert timeline.summary()["seconds"] == timeline.seconds
    assert simulation.summary()["fastest"] == "Dynamic-CP"
    assert wlb.pack([], num_micro_batches=2, max_tokens=8, costs=[]).summary()["documents"] == 0


def test_objects_become_data_frames(
    simulation: wlb_tools.Simulation, packing: wlb.Packing, timeline: wlb.PipelineTimeline
) -> None:
    pytest.importorskip("pandas")
    frame = packing.to_pandas()
    assert frame["length"].sum() == LENGTHS.sum()
    assert frame.groupby("micro_batch")["length"].sum().tolist() == packing.tokens.tolist()
    shard = wlb.shard([100, 200, 30], cp_size=4)
    assert shard.to_pandas()["pairs"].tolist() == shard.pairs_per_rank.tolist()
    assert timeline.to_pandas()["end"].max() == timeline.seconds
    assert len(simulation.to_pandas()) == 3
    for each in figures_of(simulation, packing, timeline):
        assert len(each.to_pandas()) > 0


def test_without_pandas_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
    simulation: wlb_tools.Simulation,
    packing: wlb.Packing,
    timeline: wlb.PipelineTimeline,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pandas", None)
    for each in figures_of(simulation, packing, timeline):
        with pytest.raises(wlb.WlbError, match="to_pandas needs pandas, which is not installed: pip install pandas"):
            each.to_pandas()


def test_columns_of_data_frames_are_of_one_length(
    simulation: wlb_tools.Simulation, packing: wlb.Packing, timeline: wlb.PipelineTimeline
) -> None:
    """What pandas is given, where it is not installed too."""
    from wlb import _shown

    for each in figures_of(simulation, packing, timeline):
        columns = each._columns() if hasattr(each, "_columns") else _shown._COLUMNS[type(each).__name__](each)
        assert len({len(column) for column in columns.values()}) == 1


def test_plot_draws_what_is_better_seen(
    simulation: wlb_tools.Simulation, packing: wlb.Packing, timeline: wlb.PipelineTimeline
) -> None:
    pytest.importorskip("matplotlib")
    few = wlb.pack([5, 3, 2], num_micro_batches=2, max_tokens=8, costs=[5, 3, 2])
    small = wlb.simulate_pipeline([1.0, 2.0, 1.0], num_stages=2)
    for each in (packing, few, small, [small, small], simulation):
        figure = wlb_tools.plot(each)
        assert figure.axes
        assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    for wrong in (3, [], [3], "x"):
        with pytest.raises(wlb.WlbError, match="plot draws a Packing, a Pipe") as refused:
            wlb_tools.plot(wrong)
        assert refused.value.argument == "shown"
