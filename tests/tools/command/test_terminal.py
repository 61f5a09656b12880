"""What people see in a terminal: tables, bars, files, help, and words that go wrong."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb
import wlb_tools
from wlb.models import preset_named

pytest.importorskip("cyclopts")
pytest.importorskip("jinja2")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

from rich.console import Console

from wlb_tools.command import help
from wlb_tools.command.app import app
from wlb_tools.command.inputs.formats import is_lengths
from wlb_tools.command.output import console, render, written
from wlb_tools.command.output.columns import COLUMNS
from wlb_tools.command.output.figures import style
from wlb_tools.command.output.report import Headline, Picture, Report, Table

SMALL = ("--context", "1024", "--micro-batches", "4", "--oversize", "split")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pictures: they take most of the time."""
    monkeypatch.setattr(style, "png", lambda _: b"")
    monkeypatch.setattr(render, "_svg", lambda *_: "")
    monkeypatch.setattr(Picture, "wide", None)


@pytest.fixture
def npy(tmp_path: Path) -> Path:
    lengths = np.random.default_rng(0).lognormal(4.0, 1.2, 1200)
    np.save(tmp_path / "lengths.npy", np.clip(lengths, 1, 2000).astype(np.int64))
    return tmp_path / "lengths.npy"


def printed(report: Report, width: int) -> list[str]:
    out = io.StringIO()
    render.show(report, Console(file=out, width=width, highlight=False, markup=False))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_tables_fit_the_terminal(width: int) -> None:
    """Every column that there is, and a name too long for a line: all cells are there, in whole columns."""
    values = dict.fromkeys(COLUMNS, 1234.5)
    bands = {key: [0.123, 12.345] for key in COLUMNS if key.endswith("band")}
    named = {"most_lost": "communication: CP 45%", "plan": "wlb"}
    rows = [
        (name, {**values, **bands, **named}, name == "second")
        for name in ("first of all the many names that somebody may give to a method", "second")
    ]
    table = Table.of("All columns", "method", COLUMNS, rows)
    lines = printed(Report(command="x", blocks=[table], numbers={}), width)
    assert max(map(len, lines)) <= width
    whole = "\n".join(lines)
    for column in COLUMNS.values():
        assert column.heading in whole
    assert whole.count(COLUMNS["tokens_per_second"].cell(1234.5)) >= 2
    assert whole.count("0.123-12.345") == 2 * len(bands)


@pytest.mark.parametrize(("before", "after", "change"), [(2.0, 1.0, "better"), (1.0, 2.0, "worse"), (1, 1.0001, None)])
def test_less_imbalance_is_better(before: float, after: float, change: str | None) -> None:
    assert Headline.of("imbalance", before, after, COLUMNS["imbalance_mean"]).change == change
    rows = [("a", {"imbalance_mean": before}, False), ("b", {"imbalance_mean": after}, True)]
    table = Table.of("x", "method", ("imbalance_mean",), rows, against_first=True)
    assert table.changes.get((1, 1)) == change
    out = io.StringIO()
    report = Report(command="x", blocks=[table], numbers={})
    render.show(report, Console(file=out, width=60, force_terminal=True, color_system="standard", highlight=False))
    assert ("36m" in out.getvalue()) == (change == "better")  # cyan
    assert ("31m" in out.getvalue()) == (change == "worse")  # red


def test_bars_end_full(run: Any, npy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushed steps come on top of the global batches; a search tries fewer choices than it could."""
    made: list[console.Bars] = []
    own = console.Bars.__init__

    def noted(self: console.Bars, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(console.Bars, "__init__", noted)
    for words in (
        ("demo", npy, *SMALL, "--steps", 12, "--quiet"),
        ("tune", npy, *SMALL, "--steps", 12, "--quiet"),
        ("simulate", npy, *SMALL, "--steps", 6, "--variants", "original,wlb_llm", "--quiet"),
        ("advise", npy, *SMALL, "--steps", 2, "--quiet"),
    ):
        assert run(*words).code == 0
    ended = [(task.description, task.completed, task.total) for bars in made for task in bars.tasks]
    assert len(ended) > 10
    assert [end for end in ended if end[2] is not None and end[1] != end[2]] == []


def test_a_bar_that_fails_stays_where_it_was() -> None:
    bars = console.progress(quiet=True)
    bars.advance(bars.add_task("work", total=4))
    bars.__exit__(RuntimeError, RuntimeError(), None)
    assert bars.tasks[0].completed == 1


def test_nobody_elses_file_is_replaced(run: Any, npy: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for name in ("results.json", "plans.npz", "page.html", "configuration.py"):
        (own / name).write_text("{}")
        result = run("tune", npy, *SMALL, "--steps", 2, "--output", "own")
        assert result.code == 2
        assert f"--output own: {name} is there, and is not of a report of wlb" in result.err
        assert (own / name).read_text() == "{}"
        (own / name).unlink()
    (own / "notes.md").write_text("mine")
    assert run("tune", npy, *SMALL, "--steps", 2, "--output", "own").code == 0
    assert "is a file" in run("tune", npy, *SMALL, "--output", npy).err

    for words, file in (
        (("lengths", npy, "--output", "mine.npy"), "mine.npy"),
        (("fit", "log.jsonl", "--output", "mine.json"), "mine.json"),
    ):
        (tmp_path / "log.jsonl").write_text('{"lengths": [8, 9], "seconds": 0.5}\n')
        (tmp_path / file).write_text('{"mine": 1}')
        result = run(*words)
        assert (result.code, (tmp_path / file).read_text()) == (2, '{"mine": 1}')
        assert f"--output {file}: is there, and wlb did not write it" in result.err
    (tmp_path / "new.ids.npy").write_text("mine")
    assert "new.ids.npy is there" in run("lengths", npy, "--output", "new.npy").err
    assert (tmp_path / "new.ids.npy").read_text() == "mine"


def test_what_is_replaced_is_said(run: Any, npy: Path) -> None:
    for first, words in (
        ("Wrote wlb-tune/tune.png", ("tune", npy, *SMALL, "--steps", 2)),
        ("Wrote new.npy", ("lengths", npy, "--output", "new.npy")),
    ):
        assert first in run(*words).out
        again = run(*words).out
        assert first.replace("Wrote", "Replaced") in again
        assert "Wrote" not in again


def test_files_know_who_wrote_them(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content in ("", "{", "[]", '{"gpu": 1}'):
        path.write_text(content)
        assert not any(ours(path) for ours in (is_lengths, written.costs_file, written.profile_file))
    path.write_text(wlb.CostModel(attention=1e-9, linear=1e-6).to_json())
    assert written.costs_file(path)
    path.write_text(json.dumps({"gpu": "CPU", "kernel": "varlen", "query_lengths": [1]}))
    assert written.profile_file(path)


@pytest.mark.skipif(os.name == "nt", reason="there are no broken pipes of this kind")
def test_head_ends_the_command_quietly(npy: Path) -> None:
    for words in (("tune", str(npy), *SMALL, "--steps", "2", "--json"), ("simulate", "--help-all")):
        command = [sys.executable, "-m", "wlb_tools", *words]
        ran = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=npy.parent, env=dict(os.environ)
        )
        assert ran.stdout is not None
        assert ran.stderr is not None
        ran.stdout.close()  # as `head -0`
        assert ran.stderr.read() == ""
        assert ran.wait() == 141


@pytest.mark.parametrize("command", list(help.EXAMPLES))
def test_help_shows_an_example_first_and_fits_two_screens(run: Any, command: str) -> None:
    for flag in ("--help", "-h"):
        result = run(*[command] * bool(command), flag)
        lines = result.out.splitlines()
        assert result.code == 0
        assert len(lines) <= 48
        assert max(map(len, lines)) <= 80
        assert lines[0] in ("Example:", "Examples:")
        assert lines[1].startswith(f"  wlb {command}")
    if command:  # every option is there, and all of them are explained elsewhere
        collected = app[command].assemble_argument_collection(default_parameter=app.default_parameter)
        whole = run(command, "--help-all").out
        assert whole.splitlines()[0] == lines[0]
        for argument in collected:
            if argument.show and argument.names[0].startswith("--"):
                assert re.search(rf"{argument.names[0]}\b", result.out), argument.names
                assert re.search(rf"{argument.names[0]}\b", whole), argument.names


@pytest.mark.parametrize("command", [name for name in help.EXAMPLES if name])
def test_examples_of_the_help_are_commands(command: str) -> None:
    for example in help.EXAMPLES[command]:
        words = example.split()[1:]
        assert words[0] == command
        app.parse_args(words, print_error=False, exit_on_error=False)


def test_the_command_runs_as_a_module() -> None:
    ran = subprocess.run([sys.executable, "-m", "wlb_tools", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout == f"wlb {wlb.__version__}\n"


def test_presets_and_gpus_are_read_in_any_case(run: Any, npy: Path, tmp_path: Path) -> None:
    assert wlb.ModelConfig.preset("LLaMA3_8B") == wlb.ModelConfig.preset("llama3-8b")
    assert wlb_tools.Hardware.preset("H100") == wlb_tools.Hardware.preset("h100")
    made = [wlb.KernelModel.analytic(name, num_heads=8, head_dim=128).source for name in ("H100", "h100")]
    assert made[0] == made[1]
    words = ("pack", npy, *SMALL, "--model", "LLAMA3-8B", "--gpu", "H200", "--quiet")
    assert run(*words).code == 0
    assert preset_named("no-such-model") is None
    assert preset_named(3) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"12 13 14\n", "it is a text file; name it .txt, .jsonl or .csv"),
        (b"", "it is empty"),
        (b"\x80\x04\x95", "it is a pickle, which is not read"),
        (b"\0\0\1", "it does not begin as one"),
        (b"\x93NUMPY\x01\x00", ""),
    ],
)
def test_what_is_no_array_is_said_in_words(run: Any, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.npy").write_bytes(content)
    result = run("pack", "x.npy")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert f"wlb: x.npy: is no array of numpy: {said}" in result.err
    assert "allow_pickle" not in result.err


def test_simulate_refuses_a_model_by_name() -> None:
    with pytest.raises(wlb.WlbError, match=r"scenario is a ModelConfig, not a Scenario") as refused:
        wlb_tools.simulate([100, 200], wlb.ModelConfig.preset("llama2-7b"))  # type: ignore[arg-type]
    assert refused.value.argument == "scenario"


def test_torch_layer_without_torch_says_what_to_install() -> None:
    code = (
        "import sys, importlib.abc, importlib.util\n"
        "own = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else own(name, *rest)\n"
        "import wlb.torch"
    )
    for module in ("wlb.torch", "wlb.integrations.huggingface"):
        ran = subprocess.run(
            [sys.executable, "-c", code.replace("wlb.torch", module)], capture_output=True, text=True, check=False
        )
        assert 'wlb.torch needs torch 2.11 or newer: pip install "torch>=2.11"' in ran.stderr, module


def test_the_layout_page_lists_the_settings_of_its_layout(run: Any, npy: Path) -> None:
    words = ("--gpus", 8, "--global-batch", "8k", "--context", "1024", "--steps", 2, "--oversize", "split")
    room = ("--set", f"reserved_bytes={6 * 2**30}")
    found = run("tune", npy, *words, "--tp", 4, "--cp", 2, "--pp", 1, *room, "--json").json
    best, shown = found["ranked"][0]["layout"], found["settings"]
    assert shown["reserved_bytes"] == 6 * 2**30
    for name in ("tp", "cp", "pp", "dp"):
        assert shown[name] == best[name], name
