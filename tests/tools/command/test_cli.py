"""The `wlb` command, run as a user runs it, on sources made here."""

import inspect
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb
import wlb_tools

pytest.importorskip("cyclopts")
pytest.importorskip("jinja2")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from tests.profiles import profile
from wlb_tools.command.app import app
from wlb_tools.command.commands.tune import _OF_A_CLUSTER
from wlb_tools.command.errors import CliError, setting
from wlb_tools.command.inputs.documents import Documents
from wlb_tools.command.inputs.stream import Reading
from wlb_tools.command.output import loaders, render
from wlb_tools.command.output.columns import Column
from wlb_tools.command.output.console import progress
from wlb_tools.command.output.figures import style
from wlb_tools.command.output.plan_files import write_names
from wlb_tools.command.output.report import Code, Heading, Headline, Paragraphs, Picture, Report, Table
from wlb_tools.simulation import DEFAULT, VARIANTS

CONTEXT = 1024
SMALL = ("--context", str(CONTEXT), "--micro-batches", "4")


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out pictures, most of the time of a run, where a test is about plans."""
    monkeypatch.setattr(style, "png", lambda _: b"")
    monkeypatch.setattr(render, "_svg", lambda *_: "")
    monkeypatch.setattr(Picture, "wide", None)


def long_tailed(count: int, seed: int = 0) -> NDArray[np.int64]:
    """int64[count] lengths: many short documents, a few as long as the context and longer."""
    lengths = np.random.default_rng(seed).lognormal(4.0, 1.2, count)
    return np.clip(lengths, 1, 2 * CONTEXT).astype(np.int64)


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    np.save(tmp_path / "lengths.npy", long_tailed(2000))
    return tmp_path / "lengths.npy"


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"body": "x" * n}) + "\n" for n in long_tailed(600)))
    return path


def read(source: Path, **options: Any) -> Documents:
    with progress(quiet=True) as bars:
        return Reading(**options).documents((str(source),), bars)


# --- demo ---


def test_demo_compares_the_methods(run: Any, npy: Path) -> None:
    results = run("demo", npy, *SMALL, "--steps", 48, "--json").json
    methods = {m["method"]: m for m in results["methods"]}
    assert list(methods) == [
        "original order",
        *(f"fixed length, {g} step{'s' * (g > 1)} at once" for g in (1, 2, 4, 8)),
        "WLB-LLM, 0 queues",
        "WLB-LLM, 1 queue",
        "WLB-LLM, 2 queues",
        "WLB-LLM, 3 queues",
        "wlb",
    ]
    assert methods["wlb"]["release"] == "adaptive"
    assert methods["wlb"]["imbalance_mean"] < methods["original order"]["imbalance_mean"]
    assert methods["WLB-LLM, 2 queues"]["imbalance_mean"] < methods["original order"]["imbalance_mean"]
    for m in results["methods"]:
        assert 1 <= m["imbalance_mean"] <= m["imbalance_worst"]
        assert m["imbalance_p95"] <= m["imbalance_worst"]
        assert 0 <= m["delay_mean"] <= m["delay_max"]
        assert m["delay_p99"] <= m["delay_max"]
        assert m["steps"] - m["steps_of_flush"] <= 48
        assert m["planning_microseconds"] > 0
    assert methods["original order"]["delay_max"] == 0
    for g in (1, 2, 4, 8):
        window = methods[f"fixed length, {g} step{'s' * (g > 1)} at once"]
        assert window["delay_max"] == 2 * (g - 1)
        assert window["delay_mean"] == pytest.approx(g - 1, rel=0.1)
    for queues in range(4):
        assert methods[f"WLB-LLM, {queues} queue{'s' * (queues != 1)}"]["documents_cut"] == 0

    documents = results["documents"]
    assert documents["distinct"] == 2000
    assert documents["global_batches"] == 48
    assert documents["epochs"] == 1
    assert documents["streamed_tokens"] <= 48 * 4 * CONTEXT

    balance = {(b["cp_size"], b["strategy"]): b for b in results["context_parallel"]["balance"]}
    for size in (2, 4, 8, 16):
        assert 1 <= balance[size, "per_document"]["mean"] < balance[size, "per_sequence"]["mean"]


def test_demo_writes_a_picture_and_a_page_that_loads_nothing(run: Any, npy: Path, tmp_path: Path) -> None:
    result = run("demo", npy, *SMALL, "--steps", 70, "--output", "here")
    assert result.code == 0
    assert "WLB-LLM, 2 queues" in result.out
    assert (tmp_path / "here/demo.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "here/demo.html").read_text(encoding="utf-8")
    for loads in ("<script", "<link", "<img", "src=", "@import", "url(http"):
        assert loads not in page
    assert f"wlb demo {npy} --context 1024" in page
    assert wlb.__version__ in page

    # The same again, and what the page says is also there to be read by programs.
    first = json.loads((tmp_path / "here/results.json").read_text())
    assert first["documents"]["epochs"] == 2
    second = run("demo", npy, *SMALL, "--steps", 70, "--json").json
    assert [m["digest"] for m in second["methods"]] == [m["digest"] for m in first["methods"]]


def test_demo_finds_documents_by_itself(run: Any) -> None:
    results = run("demo", "--context", 4096, "--micro-batches", 4, "--steps", 4, "--json").json
    assert results["documents"]["distinct"] > 100
    assert results["documents"]["unit"] == "bytes"


def test_any_report_is_a_page_of_html() -> None:
    """What it says is text wherever it stands, and every element is closed."""
    hostile = '<b>&"'
    table = Table(hostile, (hostile,), ((hostile,), ("plain",)), ((hostile, 1),), strong={1})
    blocks = (Heading(hostile), Code(hostile, hostile), Paragraphs([hostile], small=True), table)
    report = Report(
        command="pack",
        subject=hostile,
        title=hostile,
        sentences=[hostile],
        headlines=[Headline(hostile, hostile, hostile)],
        blocks=blocks,
        details=blocks,
        numbers={},
        facts={hostile: {"a_name": None, "flag": True, hostile: 1234.5}},
    )
    page = render.page(report, f"wlb pack {hostile}")
    assert hostile not in page
    assert "<td>a name</td><td>none</td>" in page
    assert "<td>flag</td><td>yes</td>" in page

    class Elements(HTMLParser):
        """Which elements are open."""

        opened: ClassVar[list[str]] = []

        def handle_starttag(self, tag: str, attrs: object) -> None:
            self.opened += [tag] * (tag != "meta")

        def handle_endtag(self, tag: str) -> None:
            assert self.opened.pop() == tag

    parser = Elements()
    parser.feed(page)
    assert not parser.opened


def test_a_table_shows_what_is_known() -> None:
    columns = {
        "a": Column("", "one", ".2f"),
        "b": Column("both", "two"),
        "c": Column("both", "three", ".1%"),
        "d": Column("", "GiB", ".1f", 2**30),
        "e": Column("", "band"),
        "f": Column("", "plan"),
    }
    of = {"a": 1, "b": 12345, "c": None, "d": 3 * 2**29, "e": [0.5, 1.25], "f": "original order"}
    table = Table.of("title", "names", columns, [("x", of, True)], columns)
    assert table.columns == ("names", "one", "two", "three", "GiB", "band", "plan")
    assert table.groups == (("", 1), ("", 1), ("both", 2), ("", 3))
    assert (table.rows, table.strong) == ([("x", "1.00", "12,345", "", "1.5", "0.500-1.250", "original order")], {0})
    narrow = Console(width=20, file=io.StringIO())
    render.show(Report(command="pack", blocks=[table], numbers={}), narrow)
    assert isinstance(narrow.file, io.StringIO)
    printed = narrow.file.getvalue()
    assert "original order" in printed, "a table that is too wide runs over"
    assert "…" not in printed
    assert narrow.width == 20


# --- pack ---


def test_pack_writes_plans_and_pictures(run: Any, npy: Path, tmp_path: Path) -> None:
    run("pack", npy, *SMALL, "--output", "here", "--quiet")
    written = {path.name for path in (tmp_path / "here").iterdir()}
    assert written == {"pack.png", "pack.html", "results.json", "plans.npz", "plans.jsonl"}


def covered(pieces: list[tuple[int, int, int]]) -> Counter[int]:
    """How many tokens of each document the pieces hold: no gap, no overlap."""
    end: Counter[int] = Counter()
    for document, start, length in sorted(pieces):
        assert start == end[document]
        end[document] += length
    return end


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    "method",
    [
        ("--method", "original"),
        ("--method", "fixed_length", "--window", "3"),
        ("--thresholds", "512,800"),
        ("--queues", "1", "--max-delay", "5", "--seed", "3"),
        ("--release", "adaptive", "--delay-price", "0.01", "--max-delay", "5"),
        ("--release", "adaptive", "--method", "refined"),
        ("--release", "adaptive", "--max-step-cost", "1.5"),
    ],
)
def test_pack_places_every_document_once(run: Any, jsonl: Path, tmp_path: Path, method: tuple[str, ...]) -> None:
    results = run("pack", jsonl, *SMALL, "--field", "body", "--dp-size", 2, *method, "--json").json
    expected = dict(enumerate(long_tailed(600).tolist()))

    plan = np.load(tmp_path / "wlb-pack/plans.npz")
    pieces = [plan[name].tolist() for name in ("document_id", "start", "length")]
    assert covered(list(zip(*pieces, strict=True))) == expected
    steps, n = plan["costs"].shape
    assert n == 4
    assert plan["offsets"].size == steps * n + 1
    place = np.repeat(np.arange(steps * n), np.diff(plan["offsets"]))
    np.testing.assert_array_equal(plan["step"] * n + plan["micro_batch"], place)
    tokens = np.bincount(place, weights=plan["length"], minlength=steps * n).reshape(steps, n)
    np.testing.assert_array_equal(plan["tokens"], tokens)
    assert tokens.max() <= CONTEXT * 3 // 2
    for dealt in plan["deal"]:
        assert sorted(dealt.ravel().tolist()) == [0, 1, 2, 3]

    lines = [json.loads(line) for line in (tmp_path / "wlb-pack/plans.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(steps))
    rows = [tuple(row) for line in lines for micro_batch in line["micro_batches"] for row in micro_batch]
    assert rows == list(zip(*pieces, strict=True))
    np.testing.assert_array_equal([line["costs"] for line in lines], plan["costs"])
    np.testing.assert_array_equal([line["deal"] for line in lines], plan["deal"])
    assert results["methods"][-1]["steps"] == steps


@pytest.mark.usefixtures("undrawn")
def test_pack_measures_what_the_packer_measures(run: Any, npy: Path) -> None:
    """The figures of the report come from flat arrays; the packer keeps its own."""
    results = run("pack", npy, *SMALL, "--thresholds", "300,700", "--json").json
    ours = results["methods"][-1]

    stream = Reading().order(read(npy), context=CONTEXT, tokens_per_batch=4 * CONTEXT)
    cost_model = wlb.ModelConfig.preset("llama2-7b").cost_model(attention_efficiency=0.85)  # assumed of a H100
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=CONTEXT * 3 // 2,
        cost_model=cost_model,
        outlier_thresholds=(300, 700),
    )
    for first, last in zip(stream.offsets[:-1], stream.offsets[1:], strict=True):
        packer.push(stream.lengths[first:last])
    packer.flush()
    theirs = packer.metrics()
    assert ours["imbalance_mean"] == pytest.approx(theirs.imbalance_mean)
    assert ours["imbalance_worst"] == pytest.approx(theirs.imbalance_worst)
    assert ours["memory_skew"] == pytest.approx(theirs.memory_skew_mean)
    assert ours["delay_mean"] == pytest.approx(theirs.delay_mean)
    assert (ours["delay_p99"], ours["delay_max"]) == (theirs.delay_p99, theirs.delay_max)


@pytest.mark.usefixtures("undrawn")
def test_pack_by_the_documents_own_costs(run: Any, tmp_path: Path) -> None:
    """Rows belong to document ids, empty ones counted; a piece has its share; figures are those of the packer."""
    lengths = long_tailed(600)
    lengths[::50] = 0
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in lengths.tolist()))
    rng = np.random.default_rng(0)
    costs = np.column_stack([lengths.astype(float) ** 2, rng.random(600) * lengths, lengths])
    np.save(tmp_path / "costs.npy", costs)
    options = ("--costs", "costs.npy", "--limits", "inf,inf,1400", "--thresholds", 700)
    results = run("pack", "texts.jsonl", *SMALL, *options, "--json").json
    ours, plan = results["methods"][-1], np.load(tmp_path / "wlb-pack/plans.npz")

    place = plan["step"] * 4 + plan["micro_batch"]
    share = (plan["length"] / lengths[plan["document_id"]])[:, None]
    sums = np.zeros((plan["costs"].size, 3))
    np.add.at(sums, place, costs[plan["document_id"]] * share)
    np.testing.assert_allclose(plan["column_costs"].reshape(-1, 3), sums)
    np.testing.assert_allclose(plan["costs"].ravel(), sums[:, :2].sum(axis=1))
    assert sums[:, 2].max() <= 1400

    stream = Reading().order(read(tmp_path / "texts.jsonl"), context=CONTEXT, tokens_per_batch=4 * CONTEXT)
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=CONTEXT * 3 // 2,
        max_document_tokens=CONTEXT,
        outlier_thresholds=(700,),
        cost_columns=3,
        limits=[np.inf, np.inf, 1400],
        on_backlog="error",
    )
    arrived = costs[stream.ids] * (stream.lengths / lengths[stream.ids])[:, None]
    for first, last in zip(stream.offsets[:-1], stream.offsets[1:], strict=True):
        packer.push(stream.lengths[first:last], costs=arrived[first:last])
    assert ours["imbalance_mean"] == pytest.approx(packer.metrics().imbalance_mean)
    assert ours["imbalance_worst"] == pytest.approx(packer.metrics().imbalance_worst)
    lines = [json.loads(line) for line in (tmp_path / "wlb-pack/plans.jsonl").read_text().splitlines()]
    np.testing.assert_array_equal([line["column_costs"] for line in lines], plan["column_costs"])
    streamed = len(lines) - ours["steps_of_flush"]
    assert np.mean([line["imbalance"] for line in lines[:streamed]]) == pytest.approx(ours["imbalance_mean"])

    # Of the time that steps take, the columns have all; the third takes none.
    columns = ours["columns"]
    assert [column["limit"] for column in columns] == [None, None, 1400]
    assert columns[0]["share"] + columns[1]["share"] == pytest.approx(1)
    assert [column["share"] for column in results["methods"][0]["columns"]][2] is None
    assert columns[2]["heaviest"] == pytest.approx(sums[:, 2].max())


@pytest.mark.usefixtures("undrawn")
def test_given_costs_of_a_model_make_its_plans(run: Any, npy: Path, tmp_path: Path) -> None:
    model = wlb.CostModel(attention=1.0, linear=2000.0)
    (tmp_path / "cost.json").write_text(model.to_json())
    np.save(tmp_path / "costs.npy", model.cost(long_tailed(2000)))
    waiting = ("--release", "adaptive", "--delay-price", 0.03)
    fitting = ("--oversize", "truncate", "--context", 2048, "--micro-batches", 4)  # nothing is cut
    by_model, given = (
        run("pack", npy, *fitting, *waiting, "--method", "refined", *costs, "--json").json["methods"][-1]
        for costs in (("--cost-model", "cost.json"), ("--costs", "costs.npy"))
    )
    for name in ("imbalance_mean", "lost_time", "delay_mean", "memory_skew"):
        assert given[name] == pytest.approx(by_model[name], rel=1e-12)


@pytest.mark.usefixtures("undrawn")
def test_thresholds_are_tuned_by_the_documents_own_costs(run: Any, tmp_path: Path) -> None:
    """By those of the pieces that arrive, with the limits; columns of zeros at the head of a stream say nothing."""
    lengths = long_tailed(400)
    np.save(tmp_path / "lengths.npy", lengths)
    costs = np.column_stack([lengths.astype(float) ** 2, np.zeros(400), lengths])
    costs[-1, 1] = 1.0  # beyond the head
    np.save(tmp_path / "costs.npy", costs)
    options = ("--costs", "costs.npy", "--limits", "inf,inf,2000", "--queues", 1, "--max-mean-delay", 2)
    ours = run("pack", "lengths.npy", *SMALL, *options, "--json").json
    stream = Reading().order(read(tmp_path / "lengths.npy"), context=CONTEXT, tokens_per_batch=4 * CONTEXT)
    head = stream.lengths[: stream.offsets[min(stream.batches, 100)]]
    ids = stream.ids[: head.size]
    arrived = costs[ids] * (head / lengths[ids])[:, None]
    present = arrived.any(axis=0)
    tuned = wlb.tune(
        head,
        costs=arrived[:, present],
        limits=np.array([np.inf, np.inf, 2000])[present],
        num_micro_batches=4,
        max_tokens=CONTEXT * 3 // 2,
        max_document_tokens=CONTEXT,
        num_queues=1,
        max_mean_delay=2.0,
    )
    assert tuned.thresholds
    assert ours["methods"][-1]["thresholds"] == list(tuned.thresholds)


@pytest.mark.usefixtures("undrawn")
def test_a_batch_without_costs_is_a_batch(run: Any, tmp_path: Path) -> None:
    """A column may be all zeros for a while: a batch without images."""
    lengths = np.full(64, 256)
    np.save(tmp_path / "lengths.npy", lengths)
    images = np.where(np.arange(64) < 16, 0.0, 5.0)
    np.save(tmp_path / "images.npy", images)
    np.save(tmp_path / "both.npy", np.column_stack([images, lengths]))
    for file in ("images.npy", "both.npy"):
        results = run("pack", "lengths.npy", *SMALL, "--costs", file, "--thresholds", "", "--json").json
        assert [method["imbalance_mean"] for method in results["methods"]] == [1.0, 1.0]


@pytest.mark.usefixtures("undrawn")
def test_pack_truncates_or_refuses_long_documents(run: Any, npy: Path, tmp_path: Path) -> None:
    arguments = ("pack", npy, *SMALL, "--thresholds", 512, "--quiet", "--oversize")
    result = run(*arguments, "truncate")
    assert (result.code, result.out, result.err) == (0, "", "")
    plan = np.load(tmp_path / "wlb-pack/plans.npz")
    by_document = np.bincount(plan["document_id"], weights=plan["length"])
    np.testing.assert_array_equal(by_document, np.minimum(long_tailed(2000), CONTEXT))

    result = run(*arguments, "error")
    assert result.code == 2
    assert f"document {long_tailed(2000).argmax()} has 2,048 tokens" in result.err


@pytest.mark.usefixtures("undrawn")
def test_pack_names_the_files_of_a_directory(run: Any, tmp_path: Path) -> None:
    folder = tmp_path / "t\udce9xts"  # not UTF-8: drawn and printed all the same
    (folder / "sub").mkdir(parents=True)
    for i, length in enumerate([700, 0, 300, 900, 1000, 20]):
        (folder / ("sub" if i % 2 else "") / f"{i}.md").write_text("x" * length)
    (folder / "other.bin").write_bytes(b"x" * 5000)
    (folder / ".hidden.md").write_text("x" * 5000)
    assert "t�xts: 5 documents" in run("pack", folder, "--pattern", "*.md", "--context", 1000, "--micro-batches", 2).out
    names = (tmp_path / "wlb-pack/documents.txt").read_text().splitlines()
    plan = np.load(tmp_path / "wlb-pack/plans.npz")
    packed = {names[i]: n for i, n in zip(plan["document_id"].tolist(), plan["length"].tolist(), strict=True)}
    assert packed == {"0.md": 700, "2.md": 300, "sub/3.md": 900, "4.md": 1000, "sub/5.md": 20}


def test_any_path_is_one_line_of_the_names(tmp_path: Path) -> None:
    paths = ["a.md", "zwölf/日本 語.md", "a\\n.md", "a\nb.md", "a\u2028b.md", '"quoted".md', "\udcff\udcfe.md"]
    write_names(tmp_path / "documents.txt", paths)
    lines = (tmp_path / "documents.txt").read_text(encoding="utf-8").splitlines()
    assert lines[:3] == paths[:3]
    assert [json.loads(line) if line.startswith('"') else line for line in lines] == paths


def test_a_full_disk_leaves_the_plan_that_was_there(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    write_names(tmp_path / "documents.txt", ["old.md"])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            write_names(tmp_path / "documents.txt", ["new.md"] * 10000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["documents.txt"]
    assert (tmp_path / "documents.txt").read_text() == "old.md\n"


# --- tune ---


def test_tune_stays_within_the_delay(run: Any, npy: Path, tmp_path: Path) -> None:
    slow = ("--attention-efficiency", 0.55)
    results = run("tune", npy, *SMALL, "--steps", 40, "--max-mean-delay", 0.8, *slow, "--json").json
    assert results["best"]["delay_mean"] <= 0.8
    assert len(results["best"]["thresholds"]) == 2
    by_delay = sorted(results["pareto"], key=lambda point: point["delay_mean"])
    imbalances = [point["imbalance_mean"] for point in by_delay]
    assert imbalances == sorted(imbalances, reverse=True)
    adaptive = results["adaptive"]["best"]
    assert adaptive["delay_mean"] <= 0.8
    assert adaptive["delay_price"] > 0
    assert adaptive["held_out_delay"] <= 0.8, "on other orders, too, where prices are judged"
    assert results["best"]["held_out_delay"] is None, "thresholds are not"
    assert (tmp_path / "wlb-tune/tune.png").read_bytes().startswith(b"\x89PNG")
    # Both choices, by attention rates that they were not found by: the figures of `wlb pack` with the same settings.
    queues, released = results["methods"]
    assert queues["thresholds"] == results["best"]["thresholds"]
    for graded, found in ((queues, results["best"]), (released, adaptive)):
        assert graded["imbalance_mean"] == pytest.approx(found["imbalance_mean"])
        assert graded["lost_time"] == pytest.approx(found["lost_time"])
        least, most = graded["imbalance_band"]
        assert least <= graded["imbalance_mean"] < most
        assert graded["step_work_heaviest"] > 1
        assert graded["step_work_cv"] > 0
    assert "The same plans, if attention" in (tmp_path / "wlb-tune/tune.html").read_text(encoding="utf-8")


CLUSTER = ("--context", CONTEXT, "--pp", 2, "--cp", 2, "--dp", 2, "--tp", 1)


@pytest.mark.parametrize("limit", [0, 2])
def test_tune_on_a_cluster_gives_a_configuration_that_runs(run: Any, npy: Path, tmp_path: Path, limit: float) -> None:
    arguments = ("tune", npy, *CLUSTER, "--steps", 6, "--max-tokens", 2 * CONTEXT, "--max-mean-delay", limit)
    printed = run(*arguments).out
    results = json.loads((tmp_path / "wlb-tune/results.json").read_text())
    cluster, best = results["cluster"], results["cluster"]["best"]
    assert cluster["kernel_model"] == "analytic: h100"
    assert best["delay_mean"] <= limit
    tried = [choice for name in ("by_delay", "by_strategy", "by_plan") for choice in cluster[name]]
    assert 1.003 * best["speedup"] >= max(
        choice["speedup"] for choice in tried if choice["delay_mean"] + choice["early_mean"] <= limit
    )
    limits = [choice["max_tokens"] for choice in cluster["by_memory"]]
    assert limits == sorted(limits)
    assert (limits[0], limits[-1]) == (CONTEXT, 2 * CONTEXT)
    made: dict[str, Any] = {}
    configuration = (tmp_path / "wlb-tune/configuration.py").read_text()
    assert configuration.strip() in printed, "ready to paste: no line is broken"
    assert "…" not in printed, "nor is a number cut off, however wide a table"
    exec(configuration, made)
    if "loader" in made:
        assert inspect.getsource(loaders.loader) in configuration, "tests run what is printed"
    lengths = [100, 200, 300, 400]
    if "packer" in made:
        assert made["packer"].delay_price == best["delay_price"]
        lengths = [length for batch in made["packer"].push(lengths) for length in batch.lengths]
    if "plan" in made:
        plan = made["plan"](lengths)
        assert (plan.world_size, plan.num_stages) == (4, 2)
        assert plan.cp_sizes.max() <= 4
    else:
        assert made.get("packer", made.get("pack")) is not None
        assert len(made["shard"](lengths)) == 2
    assert (tmp_path / "wlb-tune/tune.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "wlb-tune/simulate.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "wlb-tune/tune.html").read_text(encoding="utf-8")
    assert page.count('<figure class="wide">') == 6, "the choices, the overview, and two steps of two methods"
    assert f"{VARIANTS[best['kind']].title}" in page
    simulated = results["simulation"]["variants"][best["kind"]]
    assert simulated["digest"] == best["digest"]
    assert simulated["seconds"] == pytest.approx(best["seconds"], rel=1e-12)


def test_the_loader_of_a_configuration_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = wlb.CostModel(attention=1.0, linear=0.0)

    class Dataset(list[str]):
        lengths = (5, 50, 6, 5, 40, 60, 7)

    dataset = Dataset("abcdefg")
    read = []
    for rank in range(2):
        ranks = SimpleNamespace(get_local_rank=lambda rank=rank: rank, size=lambda: 2)
        packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost, outlier_thresholds=(10,))
        monkeypatch.setattr(loaders, "packer", packer, raising=False)
        read.append(list(loaders.released(dataset, [[0, 1, 2], [3, 4], [5, 6]], ranks)))
    assert len(read[0]) == len(read[1]) > 3, "a step more, of what waited"
    assert sorted(itertools.chain(*read[0], *read[1])) == list(dataset)


# --- simulate ---


def test_simulate_compares_methods_on_a_cluster(run: Any, npy: Path, tmp_path: Path) -> None:
    result = run("simulate", npy, *CLUSTER, "--gpus", 8, "--steps", 12, "--set", "noise=0.02", "--output", "here")
    assert result.code == 0, result.err
    assert "analytic: h100 (an assumption, measured nowhere)" in result.out
    assert "llama2-7b, 1K context, 8 x h100" in result.out
    page = (tmp_path / "here/simulate.html").read_text(encoding="utf-8")
    for loads in ("<script src", "<link", "<img", "src=", "@import", "url(http"):
        assert loads not in page
    assert "an assumption, measured nowhere" in page
    assert "(predicted)" in page
    assert page.count('<figure class="wide">') == 5, "the overview, and two steps of two methods"
    assert (tmp_path / "here/simulate.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "here/results.json").read_text())
    assert results["assumptions"]["attention"].startswith("analytic: h100")
    assert list(results["variants"]) == list(DEFAULT)
    for variant in results["variants"].values():
        assert variant["tokens"] == results["documents"]["streamed_tokens"]
        assert sum(variant["attribution"].values()) == pytest.approx(1)
        assert variant["peak_bytes"] <= 81559 * 2**20
    again = run("simulate", npy, *CLUSTER, "--steps", 12, "--set", "noise=0.02", "--json").json
    assert again["variants"] == results["variants"]


def test_simulate_with_a_measured_kernel(run: Any, npy: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text(json.dumps(profile()))
    measured = ("--variants", "fixed_length,wlb_llm_fitted", "--kernel-profile", "mine.json")
    arguments = ("simulate", npy, *CLUSTER, "--steps", 4, *measured)
    results = run(*arguments, "--json").json
    assert results["kernel_model"].startswith("measured: ")
    assert "Warning: that is another GPU than h100." in " ".join(run(*arguments).out.split())
    assert list(results["variants"]) == ["fixed_length", "wlb_llm_fitted"]
    assert results["variants"]["fixed_length"]["speedup"] == 1


def test_simulate_says_what_does_not_fit(run: Any, npy: Path) -> None:
    """A limit that was given is believed; the memory that it would take is not."""
    large = ("--model", "llama2-70b", "--max-tokens", 2048)
    result = run("simulate", npy, *CLUSTER, *large, "--steps", 4, "--variants", "original")
    assert result.code == 0
    assert "Original order does not fit: it needs " in result.out


def test_simulate_draws_any_number_of_ranks(run: Any, npy: Path, tmp_path: Path) -> None:
    """Of many replicas as many as fit into a picture, and none of a pipeline that is too deep for one."""
    deep = ("--context", CONTEXT, "--cp", 1, "--tp", 8, "--steps", 1, "--variants", "original")
    for pp, dp, pictures in ((32, 4, 3), (80, 1, 1)):
        model = "llama2-7b" if pp == 32 else "llama2-70b"
        result = run("simulate", npy, *deep, "--pp", pp, "--dp", dp, "--model", model)
        assert result.code == 0, result.err
        page = (tmp_path / "wlb-simulate/simulate.html").read_text(encoding="utf-8")
        assert page.count('<figure class="wide">') == pictures
        assert ("Too many pipeline ranks for a picture" in page) == (pp > 64)


def test_documents_come_in_order_unless_a_seed_shuffles_them(run: Any, tmp_path: Path) -> None:
    """A curriculum is simulated as it is."""
    lengths = np.sort(long_tailed(1500)).clip(1, CONTEXT)
    np.save(tmp_path / "ascending-lengths.npy", lengths)
    arguments = ("simulate", "ascending-lengths.npy", *CLUSTER, "--steps", 8, "--variants", "original", "--json")
    variants = [run(*arguments, *seed).json["variants"]["original"] for seed in ((), ("--seed", 0))]
    first = lengths[: wlb.batch_offsets(lengths, tokens_per_batch=4 * CONTEXT)[8]]
    scenario = wlb_tools.Scenario(
        model=wlb.ModelConfig.preset("llama2-7b"),
        layout=wlb_tools.ParallelLayout(pp=2, cp=2, dp=2),
        hardware=wlb_tools.Hardware.preset("h100"),
        context=CONTEXT,
    )
    assert (
        variants[0]["digest"]
        == wlb_tools.simulate(first, scenario, variants=("original",)).baseline.summary()["digest"]
    )
    assert variants[1]["digest"] != variants[0]["digest"]


def test_tune_searches_the_layout(run: Any, npy: Path, tmp_path: Path) -> None:
    own = ("--tp", 8, "--cp", 1, "--pp", 1, "--dp", 1)
    printed = run("tune", npy, "--context", CONTEXT, "--gpus", 8, "--global-batch", "8K", *own).out
    results = json.loads((tmp_path / "wlb-tune/results.json").read_text())
    assert results["best"] == results["ranked"][0]
    assert results["own"]["layout"]["tp"] == 8
    assert results["own"]["gain"] >= 1 <= results["without_wlb"]["gain"]
    assert f"{results['simulated']} of them simulated" in " ".join(printed.split())
    assert "(an assumption, measured nowhere)" in printed
    sizes = results["best"]["layout"]
    assert f"--tp {sizes['tp']} --cp {sizes['cp']} --pp {sizes['pp']} --dp {sizes['dp']}" in printed
    assert "The fastest layouts" in (tmp_path / "wlb-tune/tune.html").read_text(encoding="utf-8")


def test_tune_prints_how_experts_are_divided(run: Any, npy: Path, tmp_path: Path) -> None:
    """As many as divide the 8 ranks: with all experts on each the model would not fit."""
    config = {
        "model_type": "mixtral",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "num_experts_per_tok": 2,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ("tune", npy, "--context", CONTEXT, "--gpus", 8, "--global-batch", "8K", "--model", "config.json")
    printed = " ".join(run(*arguments).out.split())
    sizes = json.loads((tmp_path / "wlb-tune/results.json").read_text())["best"]["layout"]
    assert sizes["ep"] > 1
    assert f"--set layout.ep={sizes['ep']}" in printed
    # Of an own layout that divides them otherwise, too.
    printed = " ".join(run(*arguments, "--tp", 1, "--cp", 1, "--pp", 1, "--dp", 8, "--set", "layout.ep=8").out.split())
    sizes = json.loads((tmp_path / "wlb-tune/results.json").read_text())["best"]["layout"]
    continued = printed[printed.rindex("wlb tune") :]
    assert continued.count("layout.ep=") == (sizes["ep"] > 1)


def test_any_option_of_the_cluster_tunes_on_one(run: Any, npy: Path) -> None:
    options = ("--set", "layout.fsdp=zero3", "--steps", 4, "--queues", 1)
    results = run("tune", npy, "--context", CONTEXT, *options, "--json").json
    assert "1f1b, 4 ranks x 1 stages" in results["assumptions"]["pipeline"]
    assert "fsdp zero3" in results["assumptions"]["memory"]
    for option, known in (
        (("--set", "layout.recompute=full"), True),
        (("--gpus", "64"), True),
        (("--tp", "4"), True),
        (("--model", "llama2-13b"), False),
        (("--max-step-cost", "2"), False),
    ):
        _, bound, _ = app.parse_args(["tune", str(npy), *option], exit_on_error=False)
        assert bool(bound.arguments["cluster"].given & _OF_A_CLUSTER) is known, option


def test_replicas_are_what_the_gpus_leave(run: Any, npy: Path) -> None:
    """And they meet in every micro-batch, where one asks for it; then the packer plans for them."""
    sizes = ("--context", CONTEXT, "--tp", 8, "--cp", 1, "--pp", 1, "--gpus", 32, "--micro-batches", 8)
    arguments = (*sizes, "--steps", 4, "--variants", "original", "--json")
    results = run("simulate", npy, *arguments).json
    assert results["settings"]["dp"] == 4
    assert results["assumptions"]["data parallelism"] == "ranks wait for each other once a step"
    results = run("simulate", npy, *arguments, "--set", "layout.fsdp=zero3").json
    assert results["settings"]["sync"] == "micro_batch"
    assert results["assumptions"]["data parallelism"] == "ranks wait for each other in every micro-batch"
    assert results["variants"]["original"]["attribution"]["dp_communication"] > 0


def test_layers_that_stages_share_unevenly(run: Any, npy: Path) -> None:
    arguments = ("simulate", npy, "--context", CONTEXT, "--tp", 8, "--cp", 1, "--steps", 1, "--variants", "original")
    results = run(*arguments, "--pp", 16, "--dp", 1, "--model", "llama3-405b", "--json").json
    assert results["assumptions"]["layers of the stages"] == ", ".join(["7", *["8"] * 14, "7"])
    results = run(*arguments, "--pp", 3, "--set", "layout.stage_layers=[12,12,8]", "--json").json
    assert results["assumptions"]["layers of the stages"] == "12, 12, 8"


def test_advice_can_be_followed_on_the_command_line(run: Any, npy: Path) -> None:
    """Every option that an error recommends is one."""
    message = run("simulate", npy, "--pp", 1, "--tp", 4).err
    assert "it would fit with --" in message
    advice = message.split("it would fit with ")[1].split(", or with ")[0].split(" (")[0]
    options = [word for word in advice.split() if word != "and"]
    result = run("simulate", npy, "--pp", 1, "--tp", 4, *options, "--steps", 1, "--variants", "original")
    assert result.code == 0, result.err
    assert [setting("fused_loss", True), setting("fused_ffn", False), setting("num_micro_batches", 8)] == [
        "--set layout.fused_loss=true",
        "--set layout.fused_ffn=false",
        "--micro-batches 8",
    ]


# --- sources ---


def test_stream_is_shuffled_anew_every_epoch_and_complete(npy: Path) -> None:
    documents = read(npy)
    streams = [
        Reading(seed=seed).order(documents, context=CONTEXT, tokens_per_batch=4 * CONTEXT, steps=100)
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(streams[0].ids, streams[1].ids)
    assert streams[0].ids.tolist() != streams[2].ids.tolist()
    stream = streams[0]
    assert stream.batches == 100
    tokens = np.add.reduceat(stream.lengths, stream.offsets[:-1])
    assert 3 * CONTEXT <= tokens.min() <= tokens.max() <= 4 * CONTEXT
    whole_epochs = (stream.starts == 0).sum() // 2000
    assert stream.epochs == whole_epochs + 1
    seen = stream.ids[stream.starts == 0][: whole_epochs * 2000].reshape(whole_epochs, 2000)
    np.testing.assert_array_equal(np.sort(seen), np.tile(np.arange(2000), (whole_epochs, 1)))
    assert seen[0].tolist() != np.arange(2000).tolist()


def test_stream_counts_the_tokens_that_truncation_leaves(tmp_path: Path) -> None:
    np.save(tmp_path / "long-lengths.npy", np.full(4, 100 * CONTEXT))
    documents = read(tmp_path / "long-lengths.npy")
    reading = Reading(seed=0, oversize="truncate")
    assert reading.order(documents, context=CONTEXT, tokens_per_batch=2 * CONTEXT, steps=10).batches == 10
    with pytest.raises(CliError, match="4 documents with 4,096 tokens do not fill"):
        reading.order(documents, context=CONTEXT, tokens_per_batch=8 * CONTEXT, steps=10)


def test_sources_agree_on_lengths(tmp_path: Path) -> None:
    texts = ["plain", "", "zwölf Boxkämpfer", "日本語", "end"]
    lengths = [len(text.encode()) for text in texts]
    (tmp_path / "a.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "folder").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / f"folder/{i}").write_text(text, encoding="utf-8")
    for name in ("a.txt", "a.jsonl", "folder"):
        documents = read(tmp_path / name)
        assert documents.ids.tolist() == [0, 2, 3, 4]
        assert documents.lengths.tolist() == [n for n in lengths if n]
        assert documents.empty == 1


def test_tokenizer_counts_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("one two three\n\nfour\n")
    documents = read(tmp_path / "a.txt", tokenizer=tmp_path / "tokenizer.json")
    assert documents.unit == "tokens"
    assert documents.lengths.tolist() == [3, 1]


# --- errors ---


def npy_header(text: str) -> bytes:
    """The beginning of a .npy file."""
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def test_errors_are_one_line(run: Any, tmp_path: Path, npy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    (tmp_path / "other.jsonl").write_text('{"a": "fine", "b": "fine"}\n')
    (tmp_path / "empty.txt").write_text("\n\n")
    (tmp_path / "broken.npy").write_text("not an array")
    (tmp_path / "header.npy").write_bytes(npy_header("{(("))
    (tmp_path / "huge.npy").write_bytes(
        npy_header("{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000000,)}")
    )
    (tmp_path / "kernel_model.json").write_text("{")
    (tmp_path / "pp=4").mkdir()
    (tmp_path / "pp=4/config.json").write_text("[]")
    np.save(tmp_path / "floats.npy", np.array([1.0, 2.5]))
    np.save(tmp_path / "matrix.npy", np.ones((2, 2), dtype=np.int64))
    np.save(tmp_path / "negative-lengths.npy", np.array([3, 4, -5]))
    np.save(tmp_path / "short.npy", np.array([3, 4]))
    two = np.column_stack([long_tailed(2000), long_tailed(2000)]).astype(float)
    np.save(tmp_path / "two.npy", two)
    two[17, 1] = np.nan
    np.save(tmp_path / "nan.npy", two)
    np.save(tmp_path / "zeros.npy", np.column_stack([long_tailed(2000), np.zeros(2000)]))
    np.savez(tmp_path / "several.npz", a=two)
    cases = {
        ("demo", "nowhere"): "nowhere: no such file or directory",
        ("demo", "bad.jsonl"): "bad.jsonl:2: not JSON",
        (
            "demo",
            "other.jsonl",
        ): "other.jsonl:1: which of its columns has the documents is not clear: --field NAME; its columns: a, b",
        ("demo", "empty.txt"): "empty.txt: no documents, or only empty ones",
        ("demo", "broken.npy"): "broken.npy: ",
        ("demo", "header.npy"): "header.npy: ",
        ("demo", "huge.npy"): "huge.npy: ",
        ("demo", "floats.npy"): "floats.npy: ",
        ("tune", "matrix.npy"): "matrix.npy: ",
        ("pack", "negative-lengths.npy"): "-5",
        ("pack", "short.npy", "--lengths"): "2 documents with 7 tokens do not fill a global batch of 2,097,152",
        ("pack", npy, *SMALL, "--max-tokens", 1000): "--max-tokens",
        ("pack", npy, *SMALL, "--dp-size", 3): "--dp-size",
        ("pack", npy, *SMALL, "--thresholds", "a,b"): "--thresholds",
        ("pack", npy, *SMALL, "--thresholds", "800,512"): "--thresholds",
        ("pack", npy, *SMALL, "--release", "adaptive", "--thresholds", "512"): "--thresholds: --release adaptive",
        ("pack", npy, *SMALL, "--release", "adaptive", "--queues", 3): "--queues: --release adaptive",
        ("pack", npy, *SMALL, "--queues", 0, "--delay-price", 0.1): "--delay-price: only --release adaptive",
        ("pack", npy, *SMALL, "--max-step-cost", 1.5): "--max-step-cost: only --release adaptive",
        ("pack", npy, *SMALL, "--window", 4): "--window: only --method fixed_length",
        ("pack", npy, *SMALL, "--method", "original", "--delay-price", 0.1): "--delay-price: --method original",
        ("pack", npy, *SMALL, "--method", "original", "--max-tokens", 9000): "--max-tokens: --method original",
        ("pack", npy, *SMALL, "--method", "fixed_length", "--release", "fifo"): "--release: --method fixed_length",
        ("pack", npy, *SMALL, "--method", "fixed_length", "--thresholds", 9): "--thresholds: --method fixed_length",
        ("pack", npy, *SMALL, "--method", "fixed_length", "--max-delay", 3): "--max-delay: --method fixed_length",
        ("pack", npy, *SMALL, "--thresholds", 512, "--queues", 1): "--queues: --thresholds",
        ("pack", npy, *SMALL, "--thresholds", 512, "--max-mean-delay", 1): "--max-mean-delay: is for tuning",
        ("pack", npy, *SMALL, "--release", "adaptive", "--delay-price", "inf"): "--delay-price = inf",
        ("pack", npy, *SMALL, "--costs", "none.npy"): "none.npy: no such file",
        ("pack", npy, *SMALL, "--costs", "several.npz"): "several.npz: holds several arrays",
        ("pack", npy, *SMALL, "--costs", "short.npy"): "short.npy: has 2 rows, and lengths.npy 2,000 documents",
        ("pack", npy, *SMALL, "--costs", "nan.npy"): "nan.npy: costs[17, 1] = NaN",
        ("pack", npy, *SMALL, "--costs", "zeros.npy"): "zeros.npy: costs[:, 1]: is 0 for every document",
        ("pack", npy, *SMALL, "--costs", "two.npy", "--limits", "9"): "--limits has 1 entries",
        ("pack", npy, *SMALL, "--costs", "two.npy", "--limits", "inf,9"): "--limits inf,9: document ",
        ("pack", npy, *SMALL, "--limits", "9"): "--limits: are of the columns of --costs",
        ("pack", npy, *SMALL, "--costs", "two.npy", "--gpu", "h100"): "--gpu: --costs says what documents cost",
        ("pack", npy, *SMALL, "--costs", "two.npy", "--queues", 1, "--thresholds", 9): "--queues: --thresholds says",
        ("pack", npy, *SMALL, "--costs", "two.npy", "--release", "adaptive"): "--release adaptive: weighs one column",
        ("pack", npy, *SMALL, "--costs", "two.npy", "--method", "fixed_length"): "--costs: --method fixed_length",
        ("pack", npy, *SMALL, "--attention-efficiency", 0): "Must be >= 0.01",
        ("demo", npy, "--model", "gpt-9"): "--model gpt-9",
        ("simulate", npy, *CLUSTER, "--gpus", 16): "--gpus = 16: dp 2 x pp 2 x cp 2 x tp 1 = 8 GPUs",
        ("simulate", npy, "--gpus", 96): "--gpus = 96: dp 1 x pp 4 x cp 2 x tp 8 = 64 GPUs",
        (
            "simulate",
            npy,
            "--set",
            "layout.ep=4",
        ): "it would with --tp 4 --dp 2, or with --pp 2 --dp 2, or with --dp 2 (on 2 times",
        (
            "tune",
            npy,
            "--gpus",
            64,
            "--set",
            "layout.ep=4",
            "--global-batch",
            "4M",
        ): "it would with --tp 4 --dp 2, or with --pp 2",
        (
            "simulate",
            npy,
            *CLUSTER,
            "--set",
            "layout.fsdp=zero3",
            "--set",
            "sync=step",
        ): "--set sync = 'step': ZeRO-3 gathers parameters",
        ("simulate", npy, *CLUSTER, "--gpu", "abacus"): "--gpu abacus: must be one of a100",
        ("simulate", npy, *CLUSTER, "--variants", "original,best"): "--variants[1] = 'best': must be one of original",
        ("simulate", npy, *CLUSTER, "--variants", "wlb,wlb"): "--variants[1] = 'wlb': is given twice",
        ("simulate", npy, *CLUSTER, "--kernel-profile", "no.json"): "--kernel-profile no.json",
        ("simulate", npy, *CLUSTER, "--set", "schedule=2f2b"): '--set schedule = "2f2b": must be one of',
        ("simulate", npy, *CLUSTER, "--micro-batches", 3): "--micro-batches = 3",
        ("simulate", npy, *CLUSTER, "--micro-batches", 10**23): "--micro-batches = ",
        ("simulate", npy, *CLUSTER, "--max-tokens", 1000): "--max-tokens = 1000: must be at least the context",
        ("simulate", npy, *CLUSTER, "--model", "llama3-405b"): "GiB more than the",
        ("simulate", npy, *CLUSTER, "--model", "kernel_model.json"): "config 'kernel_model.json' cannot be read",
        ("simulate", npy, *CLUSTER, "--set", "reserved_bytes=inf"): "--set reserved_bytes = 'inf': must be an integer",
        ("simulate", npy, *CLUSTER, "--set", "layout.fdsp=x"): "--set layout.fdsp is no setting of a scenario; do you",
        ("simulate", npy, *CLUSTER, "--set", "zero3"): "--set zero3: must be NAME=VALUE",
        ("simulate", npy, *CLUSTER, "--steps", 10**9): "--steps 1,000,000,000: ",
        ("simulate", npy, *CLUSTER, "--oversize", "error"): "more than --context 1,024",
        ("simulate", npy, *CLUSTER, "--set", "layout.stage_layers=[20,13]"): "--set layout.stage_layers add up to 33",
        ("simulate", npy, *CLUSTER, "--set", "layout.stage_layers=a"): "--set layout.stage_layers = 'a'",
        ("simulate", npy, "--set", "schedule=zbv"): "--set layout.virtual_stages = 1",
        ("tune", npy, "--global-batch", "130000"): "--global-batch 130,000 tokens: is below --context",
        ("tune", npy, "--gpus", 8, "--global-batch", "8KB"): "--global-batch 8KB: must be tokens, such as 4M",
        ("tune", npy, "--gpus", 8, "--global-batch", "8K"): "--global-batch 8,192 tokens: is below --context 131,072",
        ("simulate", npy, "--global-batch", "200K"): "--global-batch 204,800 tokens: is no multiple of",
        ("simulate", npy, "--global-batch", "0samples"): "--global-batch 0samples: must be tokens",
        ("simulate", npy, "--global-batch", "7samples", "--micro-batch-size", 2): "7 sequences are no multiple of",
        ("simulate", npy, "--global-batch", "4M", "--micro-batches", 8): "--global-batch says how large",
        ("tune", npy, *CLUSTER, "--gpus", 9, "--global-batch", "8K"): "--gpus = 9: dp 2 x pp 2 x cp 2 x tp 1 = 8 GPUs",
        ("tune", npy, *CLUSTER, "--attention-efficiency", 0.1): "--attention-efficiency: tuning on a cluster",
        ("tune", npy, *CLUSTER, "--gpus", 16): "--gpus = 16: dp 2 x pp 2 x cp 2 x tp 1 = 8 GPUs",
        ("tune", npy, *SMALL, "--oversize", "error"): "more than --context 1,024",
        ("tune", npy, *SMALL, "--max-tokens", 1000): "--max-tokens 1,000: below --context 1,024",
        ("tune", npy, *SMALL, "--model", "pp=4/config.json"): "config 'pp=4/config.json' is not a JSON object",
        ("tune", npy, "--tp", 3): "--tp = 3: does not divide num_heads = 32",
        ("demo", npy, "--tokenizer", "t.json"): "--tokenizer t.json: no such tokenizer file",
        ("demo", "empty.txt", "--tokenizer", "t.json"): "t.json: no such tokenizer file",
    }
    for arguments, expected in cases.items():
        result = run(*arguments)
        assert result.code == 2, arguments
        assert expected in result.err, arguments
        assert result.err.count("\n") == 1, result.err
        assert result.err.startswith("wlb: "), result.err
        assert result.out == ""

    for command in ("demo", "simulate", "tune"):
        result = run(command, npy, *SMALL, "--seed", -1)
        assert result.code == 2
        assert result.err == 'wlb: Invalid value "-1" for --seed. Must be >= 0.\n'
    for option, value in [
        ("--release", "lifo"),
        ("--method", "best"),
        ("--delay-price", "-1"),
        ("--delay-price", "nan"),
        ("--delay-price", "cheap"),
    ]:
        result = run("pack", npy, *SMALL, "--release", "adaptive", option, value)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("wlb: Invalid value ")
        assert f"for {option}" in result.err
        assert result.err.count("\n") == 1

    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    assert "pip install tokenizers" in run("demo", "empty.txt", "--tokenizer", "tokenizer.json").err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run("demo")
    assert (result.code, result.err) == (2, "wlb: matplotlib not installed; run: pip install matplotlib\n")


def test_model_may_be_a_config_file(run: Any, npy: Path, tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    best = [
        run("tune", npy, *SMALL, "--steps", 8, "--queues", 1, "--model", model, "--json").json["best"]
        for model in ("llama2-7b", "config.json")
    ]
    assert best[0] == best[1]


def test_import_wlb_needs_none_of_the_commands_packages() -> None:
    code = "import sys, wlb; assert not {'cyclopts', 'jinja2', 'rich', 'matplotlib', 'plotly'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_ctrl_c_ends_the_command_quietly(tmp_path: Path) -> None:
    """From its first line on, so also while it imports: no traceback, one line at most, status 130."""
    # What is before that line is Python's own start.
    code = "import os; from wlb_tools.__main__ import main; os.write(1, b'.'); main()"
    outcomes: Counter[int] = Counter()
    for delay in (0.005, 0.02, 0.1, 0.3, 0.8, 2.0):
        command = [sys.executable, "-c", code, "demo", "--quiet", "--output", str(tmp_path / str(delay))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.read(1) == b"."
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=500)
        outcomes[process.returncode] += 1
        # At its very end, with all that it writes written, Python has taken its handlers away.
        ended = (0, -signal.SIGINT) if (tmp_path / str(delay) / "demo.html").exists() else ()
        assert process.returncode in (130, *ended), stderr.decode()
        assert stderr in (b"", b"wlb: interrupted\n")
    assert outcomes[130] > 0
