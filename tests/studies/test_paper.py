"""The study of the paper: its numbers, the inputs, and small runs of everything."""

import dataclasses
import importlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb
from studies.paper import RESULTS, SWEEP, Inputs, Result, Study
from studies.paper.corpora import CORPORA
from studies.paper.dynamic_cp import Protocol, throughputs
from studies.paper.inputs import PUBLISHED, documents, kernel, points, scenario
from studies.paper.needed import REACH, needed, where
from studies.paper.published import (
    CONFIGURATIONS,
    DYNAMIC_CP,
    FIGURE_6,
    FIGURE_12,
    FIGURE_13,
    FIGURE_14,
    FIGURE_15,
    TABLE_2,
    Configuration,
)
from studies.paper.results import Row, holds_at, influence, row
from studies.paper.statistics import Paired, student_cdf, student_quantile
from studies.paper.study import METHODS, ceiling, even, run
from tests.profiles import profile

SMALL = Study(steps=6, sweep=False, solver_seconds=0.5, solver_samples=1)
TINY = Configuration("wlb-llm-550m", 16 * 1024, 2, 2, 4, 1)


@pytest.fixture(scope="module")
def made() -> dict[str, Result]:
    return {name: make(SMALL) for name, make in RESULTS.items()}


def test_the_papers_numbers() -> None:
    assert CONFIGURATIONS["550M-64K"] == Configuration("wlb-llm-550m", 65536, tp=2, cp=2, pp=4, dp=2)
    assert CONFIGURATIONS["7B-128K"] == Configuration("wlb-llm-7b", 131072, tp=8, cp=2, pp=4, dp=1)
    assert CONFIGURATIONS["70B-128K"] == Configuration("wlb-llm-70b", 131072, tp=16, cp=4, pp=4, dp=1)
    gpus = [c.tp * c.cp * c.pp * c.dp for c in CONFIGURATIONS.values()]
    assert gpus == [32, 32, 32, 64, 64, 128, 256, 256]
    assert [p.imbalance for p in TABLE_2.values()] == [1.44, 1.41, 1.22, 1.11, 1.08, 1.40, 1.18, 1.09, 1.24, 1.05, 1.05]
    assert [p.milliseconds for p in TABLE_2.values()][5:] == [467, 1488, 25313, 8, 20, 23]
    assert list(FIGURE_13.values()) == [1.02, 1.05, 1.28, 1.33]
    assert FIGURE_12["WLB-LLM"]["mean of 64K"] == 1.15
    assert FIGURE_12["WLB-LLM"]["mean of 128K"] == 1.30
    assert FIGURE_14[128] == FIGURE_13["all"] == FIGURE_12["WLB-LLM"]["7B-128K"] == 1.33
    assert FIGURE_14[160] == 1.40
    first, second, over_sequence, over_document = FIGURE_15.values()
    assert (first + second) / 2 * over_document == pytest.approx(over_sequence, abs=5e-4)
    assert [round(one.speedup, 2) for one in DYNAMIC_CP.values()] == [1.48, 1.25]


def test_every_input_is_swept_around_its_central_value() -> None:
    fields = {field.name for field in dataclasses.fields(Inputs)} - {"profile"}
    assert {one.field for one in SWEEP} | set(PUBLISHED) == fields
    assert not {one.field for one in SWEEP} & set(PUBLISHED)
    # What the paper says: interleaved stages, communication of tensor-parallel ranks that is overlapped.
    assert min(point.inputs.virtual_stages for point in points()) > 1
    assert min(point.inputs.tp_overlap for point in points()) > 0
    assert all(one.central not in one.values and one.reason for one in SWEEP)
    every = list(points())
    assert every[0].inputs == Inputs()
    alone = [point for point in every if point.swept is not None]
    assert len(alone) == sum(len(one.values) for one in SWEEP)
    assert len({point.label for point in every}) == len(every)
    assert every == list(points())  # draws are seeded


def test_points_leave_out_what_makes_no_difference() -> None:
    for point in points(from_file=True, without=("noise",)):
        assert (point.inputs.tail, point.inputs.outliers, point.inputs.noise) == ("window", 0.0275, 0.02)


@pytest.mark.parametrize("crossing", ["whole", "cut"])
@pytest.mark.parametrize("tail", ["window", "fixed"])
def test_documents_are_those_of_the_generator(tail: Any, crossing: Any) -> None:
    inputs = Inputs(tail=tail, crossing=crossing)
    configuration = CONFIGURATIONS["7B-128K"]
    lengths = documents(configuration, inputs, steps=40)
    offsets = wlb.batch_offsets(lengths, tokens_per_batch=4 * 131072)
    assert offsets.size == 41
    assert lengths.min() >= 1
    assert lengths.max() <= 125000
    if crossing == "cut":
        assert np.all(np.add.reduceat(lengths, offsets[:-1]) == 4 * 131072)
        assert np.isin(np.arange(1, 160) * 131072, lengths.cumsum()).all()
    else:
        assert lengths.mean() == pytest.approx(4130, rel=0.1)
        assert lengths[lengths <= 65536].sum() / lengths.sum() == pytest.approx(0.87, abs=0.04)


def test_documents_of_a_file_are_shuffled_repeated_and_cut_to_the_window() -> None:
    source = np.array([10, 20000, 300, 16384])
    lengths = documents(TINY, Inputs(), steps=3, source=source)
    assert set(lengths.tolist()) == {10, 300, 16384, 20000 - 16384}
    assert wlb.batch_offsets(lengths, tokens_per_batch=4 * TINY.context).size == 4


def test_the_score_is_not_what_plans_are_made_by() -> None:
    lengths = documents(TINY, Inputs(), steps=4)
    world = scenario(TINY, Inputs(), lengths)
    assert world.selector is not None
    assert world.selector != world.attention
    assert world.noise > 0
    assert isinstance(world.packer_cost, wlb.CostModel)
    exact = kernel(4, 128)
    wrong = kernel(4, 128, error=0.05)
    queries, keys = [16, 256, 4096], [512, 4096, 65536]
    off = wrong.segment_seconds(queries, keys) / exact.segment_seconds(queries, keys)
    assert np.all(off != 1)
    assert np.all(np.abs(np.log(off)) < 0.3)
    assert kernel(4, 128, error=0.05, seed=1) != wrong


def test_max_contexts_never_exceeds_memory() -> None:
    configuration = CONFIGURATIONS["30B-128K"]
    lengths = documents(configuration, Inputs(), steps=1)
    fits = scenario(configuration, Inputs(), lengths).limit
    assert scenario(configuration, Inputs(max_contexts=1.0), lengths).limit == configuration.context
    assert scenario(configuration, Inputs(max_contexts=100.0), lengths).limit == fits


def test_perfect_balance_is_no_slower_than_anything_on_the_same_documents() -> None:
    simulation = run(6, None, TINY, Inputs(crossing="cut", noise=0.0), METHODS)
    plain = simulation.outcomes["plain"]
    assert even(plain).total_seconds <= plain.total_seconds
    best = max(simulation.speedup(name) for name in METHODS)
    assert 1 <= best <= ceiling(plain) * 1.005  # a step more, or one that is not full, costs less than that


def test_dynamic_cp_gives_long_documents_enough_ranks() -> None:
    source = np.repeat([1000, 20_000, 100_000], [1000, 10, 1])  # 16,384 tokens fit a rank
    packed, dynamic, sizes = throughputs(1, source, Inputs(), Protocol(), "GitHub")
    assert 0 < packed < 989
    assert 0 < dynamic < 989
    assert sum(sizes.values()) == pytest.approx(1)
    only_long = throughputs(1, np.full(3, 100_000), Inputs(), Protocol(), "GitHub")
    assert min(only_long[2]) == 8
    assert throughputs(1, source, Inputs(), Protocol(), "GitHub") == (packed, dynamic, sizes)


def test_noise_of_dynamic_cp_is_new_in_every_step_and_the_same_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(throughputs.__module__)
    made: list[NDArray[np.float64]] = []
    factors = module._factors
    monkeypatch.setattr(module, "_factors", lambda *arguments: made.append(factors(*arguments)) or made[-1])
    throughputs(2, np.full(1, 2000), Inputs(), Protocol(), "GitHub")
    packed, dynamic = ([factor.ravel()[:500] for factor in made[first::2]] for first in (0, 1))
    np.testing.assert_array_equal(packed, dynamic)
    assert np.unique(packed).size == 2 * 500


def test_rows_and_influence() -> None:
    every = list(points())[:4]
    series = {point.label: value for point, value in zip(every, (1.2, 1.1, 1.3, 1.25), strict=True)}
    made = row("speed-up", "all", "simulated", 1.28, series)
    assert (made.ours, made.low, made.high) == (1.2, 1.1, 1.3)
    assert (made.low_at, made.high_at) == (every[1].label, every[2].label)
    assert made.inside
    assert (made.recovered, made.width) == (pytest.approx(0.2 / 0.28), pytest.approx(0.2))
    assert row("ms", "all", "measured", 4.0, series, ratio=False).recovered is None
    assert influence(every, series)["S_max in contexts"] == (1.2, 1.3)
    assert list(influence(every, series).values()) == sorted(
        influence(every, series).values(), key=lambda x: x[0] - x[1]
    )
    assert holds_at(every, [True, True, False, True]) == f"at 3 of 4 points of the sweep, not at {every[2].label}"


def test_every_row_says_how_it_came_about(made: dict[str, Result]) -> None:
    assert {row.kind for row in made["table2"].rows} == {"measured", "simulated"}
    for name in ("fig12", "fig13", "fig14", "fig15"):
        assert {row.kind for row in made[name].rows} == {"simulated"}
    assert {row.kind for row in made["dynamic_cp"].rows} == {"emulated"}
    assert {row.kind for row in made["fig6"].rows} == {"simulated", "measured"}
    timed = [row for row in made["table2"].rows if row.quantity.startswith("packing, ms")]
    assert all(row.kind == "measured" for row in timed)
    assert {row.name for row in timed} <= set(TABLE_2)


def test_every_published_number_stands_in_a_row(made: dict[str, Result]) -> None:
    def papers(name: str) -> list[float]:
        return [row.paper for row in made[name].rows if row.paper is not None]

    assert sorted(papers("fig12")) == sorted(value for one in FIGURE_12.values() for value in one.values())
    assert papers("fig6") == list(FIGURE_6.values())
    assert papers("fig13") == list(FIGURE_13.values())
    assert papers("fig14") == [value for value in FIGURE_14.values() if value is not None]
    assert papers("fig15") == list(FIGURE_15.values())
    assert papers("dynamic_cp")[:2] == [1.48, 1.25]
    shown = [row.name for row in made["table2"].rows if row.quantity.startswith("imbalance of forward")]
    assert shown == [name for name in TABLE_2 if name in shown]
    assert {"original", "WLB-LLM, 3 queues"} <= set(shown)


def test_figure_6_has_every_window_and_the_losses_of_the_record(made: dict[str, Result]) -> None:
    imbalance = [row.ours for row in made["fig6"].rows if row.quantity.startswith("imbalance")]
    of_table = {row.name: row.ours for row in made["table2"].rows if row.quantity.startswith("imbalance of forward")}
    for window, found in zip((1, 2, 4, 8), imbalance, strict=False):
        assert found == of_table[f"fixed-length greedy, {window} batch{'es' * (window > 1)}"]
    assert len(imbalance) == 5
    losses = {row.name: row for row in made["fig6"].rows if row.quantity.startswith("training loss")}
    assert list(losses) == ["2 batches", "4 batches", "8 batches"]
    assert all(
        row.low is not None and row.high is not None and row.low < row.ours < row.high for row in losses.values()
    )
    # docs/results/loss_curves.md, of the same record, over order of arrival: 5.042 for 8 batches and 5.017 for one.
    assert losses["8 batches"].ours == pytest.approx(5.042 / 5.017, abs=3e-4)


@pytest.mark.parametrize(
    ("probability", "degrees", "t"),
    [  # tables of Student's t; with 1 and 2 degrees of freedom it is written out below
        (0.975, 4, 2.776445),
        (0.95, 19, 1.729133),
        (0.975, 19, 2.093024),
        (0.995, 30, 2.749996),
        (0.975, 200, 1.971896),
    ],
)
def test_quantiles_of_students_t(probability: float, degrees: int, t: float) -> None:
    assert student_quantile(probability, degrees) == pytest.approx(t, abs=1e-6)
    assert student_quantile(1 - probability, degrees) == pytest.approx(-t, abs=1e-6)


@pytest.mark.parametrize("t", [-7.0, -0.3, 0.0, 0.5, 3.0, 40.0])
def test_students_t_where_it_has_a_formula(t: float) -> None:
    assert student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_paired_differences_by_hand() -> None:
    reference = np.array([2.0, 4.0, 8.0, 5.0])  # seeds differ by more than the methods do
    found = Paired.of(reference * [1.01, 1.02, 1.03, 1.02], reference)
    assert found.mean == pytest.approx(0.02)
    assert found.deviation == pytest.approx(math.sqrt(2e-4 / 3))
    assert found.half_width() == pytest.approx(3.182446 * math.sqrt(2e-4 / 12))  # t of 0.975, 3 degrees of freedom
    assert math.isnan(Paired.of([1.0], [2.0]).half_width())


def test_what_lies_outside_the_bands_is_named(made: dict[str, Result]) -> None:
    pytest.importorskip("cyclopts")
    from studies.paper.page import misses

    rows = (
        Row("speed-up", "packing", "simulated", 1.28, 1.003, 0.942, 1.232, "a", "b"),
        Row("speed-up", "all", "simulated", 1.33, 1.113, 1.031, 1.412, "c", "a"),
        Row("packing, ms", "original", "measured", 4.0, 0.01, 0.005, 0.02, "a", "b"),
        Row("speed-up", "ours alone", "simulated", None, 1.1, 1.0, 1.2, "a", "b"),
    )
    (said,) = misses([Result(name="fig13", title="", rows=rows)])
    assert said.startswith("Of 2 rows")
    assert " 1 have it" in said
    assert said.endswith("Outside: fig13 packing 1.28 (ours 0.942 to 1.232).")
    assert misses(list(made.values())) == ()  # no sweep, no band


def test_what_would_have_to_be_true() -> None:
    assert where([(0.1, 2.0), (0.5, 1.2), (1.0, 1.1)], 1.6) == pytest.approx(0.3)
    assert where([(0.1, 2.0), (0.5, 1.2), (1.0, 1.1)], 1.2) == 0.5
    assert where([(0.1, 1.3), (1.0, 1.1)], 1.5) is None

    asked: list[Inputs] = []

    def evaluate(every: Sequence[Inputs]) -> list[dict[str, float]]:
        asked.extend(every)
        found = [{"rate": one.attention_rate, "mean delay": one.max_mean_delay} for one in every]
        return [one | {"both": sum(one.values())} for one in found]

    (facts,) = needed(Study(), {"rate": 0.8, "mean delay": 3.0, "both": 9.0}, evaluate, without=("noise",))
    assert facts.rows == (
        ("rate", "0.8", "attention's rate, of the default: 0.8", "0.100 to 1.500"),
        ("mean delay", "3", "limit of the mean delay: 3", "0.100 to 4.000"),
        ("both", "9", "none", "0.600 to 5.000"),
    )
    assert len(asked) == sum(len(values) for field, values in REACH.items() if field != "noise")
    assert needed(dataclasses.replace(Study(), sweep=False), {}, evaluate) == ()
    central = Inputs()
    for field, values in REACH.items():
        assert list(values) == sorted(values)
        assert getattr(central, field) in (None, *values)


def test_a_solver_without_time_says_so(made: dict[str, Result]) -> None:
    pytest.importorskip("highspy")
    notes = [note for note in made["table2"].notes if note.startswith("solver,")]
    assert len(notes) == 3
    assert all("gap" in note or "no packing" in note for note in notes)


def test_table_2_of_one_global_batch_and_of_equal_documents() -> None:
    """Nothing was timed where no global batch is full, and what attention would need is no number where all is even."""
    study = dataclasses.replace(SMALL, steps=1, solver_seconds=0)
    quantities = {row.quantity for row in RESULTS["table2"](study).rows}
    assert "imbalance of attention work" in quantities
    equal = RESULTS["table2"](dataclasses.replace(study, source=np.full(100, 131072)))
    assert {row.ours for row in equal.rows if row.quantity == "imbalance of attention work"} == {1}
    assert not any(note.startswith("Original packing") for note in equal.notes)


def test_runs_are_deterministic_in_one_process_and_in_two(made: dict[str, Result]) -> None:
    again = RESULTS["fig14"](dataclasses.replace(SMALL, workers=2, _speedups={}))
    assert again == made["fig14"]


def test_a_sweep_holds_the_central_value_and_says_where_its_ends_are() -> None:
    swept = RESULTS["fig15"](Study(steps=1))
    for one in swept.rows:
        assert isinstance(one, Row)
        assert one.low is not None
        assert one.high is not None
        assert one.low <= one.ours <= one.high
        assert one.low_at
    assert set(swept.influence) <= {one.label for one in SWEEP}


@pytest.mark.parametrize("name", RESULTS)
def test_command(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("cyclopts", "jinja2", "rich", "matplotlib", "plotly"):
        pytest.importorskip(module)
    from studies.paper.__main__ import main

    monkeypatch.chdir(tmp_path)
    options = ["--steps", "2", "--no-sweep", "--workers", "1", "--solver-seconds", "0"]
    main([name, *options])
    printed = capsys.readouterr()
    assert "paper" in printed.out
    assert any(kind in printed.out for kind in ("measured", "simulated", "emulated"))
    folder = tmp_path / "wlb-reproduce"
    (result,) = json.loads((folder / "results.json").read_text())["results"]
    assert result["name"] == name
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "reproduce.html").read_text()
    widths = [float(width) for width in re.findall(r'<svg[^>]*viewBox="0 0 ([\d.]+)', page)]
    assert len(widths) == 2, "one picture, for a screen and for a phone"
    assert widths[1] <= 390 - 2 * 16
    assert min(float(size) for size in re.findall(r"<text[^>]*font-size: ([\d.]+)px", page)) >= 11
    assert "Inputs that are not published" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_command_with_lengths_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cyclopts")
    pytest.importorskip("matplotlib")
    from studies.paper.__main__ import main

    monkeypatch.chdir(tmp_path)
    np.save("lengths.npy", np.random.default_rng(0).integers(1, 60000, 500))
    options = ["--lengths", "lengths.npy", "--json", "--steps", "2", "--no-sweep", "--workers", "1"]
    main(["fig13", *options])
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"]["documents"] == "lengths.npy (tokens)"
    assert [row["kind"] for row in printed["results"][0]["rows"]] == ["simulated"] * 5


def test_command_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cyclopts")
    from studies.paper.__main__ import main

    with pytest.raises(SystemExit) as exit_:
        main(["fig99"])
    assert exit_.value.code == 2
    assert "fig99" in capsys.readouterr().err


def test_a_measured_kernel_runs_instead_of_the_assumed_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(profile()))
    study = Study(steps=2, sweep=True, profile=str(path))
    assert all(point.inputs.profile == str(path) for point in study.points())
    assumed = {one.label for one in SWEEP if one.field in ("attention_rate", "kernel_error")}
    assert assumed.isdisjoint(point.swept for point in study.points())
    world = scenario(TINY, study.central, documents(TINY, study.central, steps=2))
    assert world.attention.source.startswith("measured: ")
    assert world.selector is not None
    assert world.selector != world.attention


def test_corpora_have_the_published_facts() -> None:
    """The Stack: the longest 2 % of the files hold 20 % of the tokens. RedPajama-V2: 6.66 M of 14.5 B reach 64 Ki."""
    generator = np.random.default_rng(5)
    drawn = {name: corpus.lengths(2_000_000, 1 << 40, generator) for name, corpus in CORPORA.items()}
    code, web = np.sort(drawn["GitHub"]), drawn["CommonCrawl"]
    assert code.mean() == pytest.approx(1822, rel=0.01)
    assert code[-40_000:].sum() / code.sum() == pytest.approx(0.2, rel=0.02)
    assert web.mean() == pytest.approx(1414, rel=0.02)
    assert (web >= 65536).mean() == pytest.approx(6_661_465 / 14.5e9, rel=0.15)
    wider = CORPORA["GitHub"].wider(1.25).lengths(2_000_000, 1 << 40, generator)
    assert wider.mean() == pytest.approx(1822, rel=0.02)
    assert wider.std() > code.std()
    assert CORPORA["CommonCrawl"].lengths(50_000, 4096, generator).max() == 4096
