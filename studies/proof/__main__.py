"""``make proof``: see `studies.proof`. Writes the page, the picture and the record of every layout.

A run that is cut off goes on with the layouts that it lacks when it is started again with the same options.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import numpy as np
import torch
from cyclopts import App, Parameter
from cyclopts.types import PositiveInt
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress

import wlb
import wlb_tools
from benches.common import machine as this_machine
from benches.common import rounded, write_record
from studies.proof import (
    CONTEXT_OF_7B,
    METHODS,
    Bench,
    Layout,
    machine,
    pace,
    page,
    probe,
    processes,
    slices,
    system,
)
from wlb_tools.command.inputs.cells import Wanted
from wlb_tools.command.inputs.documents import read_documents
from wlb_tools.command.inputs.options import plain
from wlb_tools.simulation import Outcome

BYTES_PER_TOKEN = 4  # of the documents of this machine, which are measured in bytes
Row = dict[str, Any]
Floats = NDArray[np.float64]
PACE = "even micro-batches: "  # among the methods of a run


@dataclass(frozen=True, kw_only=True)
class Options(Bench):
    """What is run.

    Args:
        layouts: layouts that are trained, a process for each rank; such as pp2. On a GPU each rank takes one.
        sliced: layouts whose ranks' work is run and timed one after the other; such as dp2pp2cp2. One GPU is enough.
        methods: what is compared, by a part of its name; default: everything.
        lengths: .npy of document lengths in tokens; default: the Python files of this machine.
        window: tokens of these documents that stand for a context.
        repeats: how often every step is trained, methods in turn; of few an odd number, whose median no outlier moves.
        sliced_repeats: how often every part of a sliced layout is run; the same holds.
        clock: of slices and profile on the CPU: processor time of the thread, or the wall's. On a GPU it is the wall's.
        device: cpu or cuda; default: cuda where there is one for every rank.
        profile: a profile of this machine for this model, from an earlier run; default: it is measured.
        profile_seconds: that measuring it may take.
        output_dir: where records of layouts go, and an interrupted run goes on from.
        record: where all records go together.
        page: where the page goes.
        picture: where the picture goes.
    """

    layouts: tuple[str, ...] = ("pp2", "dp2", "cp2")
    sliced: tuple[str, ...] = ("dp2pp2cp2",)
    methods: tuple[str, ...] = ()
    lengths: Path | None = None
    window: PositiveInt = CONTEXT_OF_7B
    repeats: PositiveInt = 5
    sliced_repeats: PositiveInt = 5
    clock: Literal["thread", "wall"] = "thread"
    device: Literal["cpu", "cuda"] | None = None
    profile: Path | None = None
    profile_seconds: PositiveInt = 400
    output_dir: Path = Path("wlb-proof")
    record: Path | None = None
    page: Path | None = None
    picture: Path | None = None


# What is inherited is annotated with names that only the module of its class knows.
Options.__init__.__annotations__ = get_type_hints(Options, include_extras=True)

app = App(name="python -m studies.proof", version_flags=[])


@app.default
def main(*, options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measures what methods of packing take on this machine, and compares it with what was predicted."""
    if wlb.BUILD_PROFILE != "release":
        sys.exit("wlb is a debug build: its timings mean nothing. Build a wheel: pip install .")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    with Progress(console=Console(stderr=True), transient=True) as bars:
        proof = Proof(options, bars)
        records = [proof.layout(name, kind) for kind, name in proof.layouts]
    about = {"machine": proof.about, "documents": proof.documents, "command": command()}
    record = about | {"found": page.found(records), "layouts": records}
    record = rounded(record)
    folder = options.output_dir
    write_record(options.record or folder / "proof.json", record)
    page.draw(record, options.picture or folder / "proof.png")
    text = page.text(record, picture=(options.picture or folder / "proof.png").name)
    (options.page or folder / "proof.md").write_text(text)
    print(text)


class Proof:
    """One run of the command."""

    def __init__(self, options: Options, bars: Progress) -> None:
        self._options, self._bars = options, bars
        torch.set_num_threads(1)
        system.keep_memory()
        wanted = [("processes", name) for name in options.layouts] + [("slices", name) for name in options.sliced]
        self.layouts = [(kind, name) for kind, name in wanted if Layout(name).sizes]
        self._device = device_of(options)
        self._clock = options.clock if self._device == "cpu" else "wall"
        self._methods = matching(options.methods)
        self._bench = plain(options, Bench, bytes_per_number=4 if self._device == "cpu" else 2)
        self.documents, lengths = self._lengths()
        window = options.window if options.lengths else options.window * BYTES_PER_TOKEN
        self._scaled = self._bench.scaled(lengths, window)
        self.about = this_machine(["torch"]) | {"device": self._device, "gpu": gpu_name(self._device)}
        self._profile = self._measured_profile()
        self.about["attention_share"] = page.attention_share(self._bench, self._profile)

    def layout(self, name: str, kind: str) -> Row:
        """The record of a layout: the one that is there, or a new one."""
        layout = Layout(name)
        settings = {
            **asdict(self._bench),
            "kind": kind,
            "layout": name,
            "methods": self._methods,
            "device": self._device,
            "repeats": self._options.repeats if kind == "processes" else self._options.sliced_repeats,
            "clock": self._clock,
            "profile": hashlib.sha256(self._profile.read_bytes()).hexdigest(),
            "documents": hashlib.sha256(self._scaled.tobytes()).hexdigest(),
        }
        path = self._options.output_dir / f"{kind}-{name}.json"
        if path.exists():
            known: Row = json.loads(path.read_text())
            if known["settings"] == settings:
                return known
        # When and on what it ran: a later run that only goes on from here is another one.
        about = this_machine(["torch"]) | {"busy": system.busy_processors()}
        record = {"settings": settings, "machine": about, **self._run(layout, kind)}
        write_record(path, record)
        return record

    def _run(self, layout: Layout, kind: str) -> Row:
        link = self._link(layout, kind)
        hardware = machine.hardware(self._bench, self._profile, processes.link_of(link), layout.world_size)
        without, probed = self._probed(layout, hardware)
        scenario = replace(without, overhead=probed.overhead)
        outcomes = self._bench.simulate(self._scaled, scenario, self._methods)
        measure = self._processes if kind == "processes" else self._slices
        made, known = measure(layout, outcomes)
        slower = pace.of(np.array(known["even"]), self._predicted_even(layout, scenario, kind))
        for name, row in made.items():
            row |= predicted(outcomes[name], slower)
        return {
            "sizes": layout.sizes,
            "title": str(layout),
            "kind": kind,
            "link": link,
            "beside": {"attention": probed.attention, "error": probed.error, **asdict(probed.overhead)},
            "pace": {"seconds": slower, **known},
            "methods": made,
        }

    def _predicted_even(self, layout: Layout, scenario: wlb_tools.Scenario, kind: str) -> list[float]:
        """Seconds of a step of even micro-batches of each sort; in slices, of one on its first rank, all stages."""
        sorts = pace.documents(self._bench.context)
        if kind == "slices":
            return [float(probe.first_rank_seconds(scenario, lengths).sum()) for lengths in sorts]
        count = self._bench.micro_batches_of(layout)
        each = (probe.pass_seconds(scenario, lengths) for lengths in sorts)
        return [probe.pipeline_seconds(scenario, passes, count) for passes in each]

    def _probed(self, layout: Layout, hardware: wlb_tools.Hardware) -> tuple[wlb_tools.Scenario, probe.Probed]:
        """This model on these ranks, attention as long as in the trainer; and what stages take beside."""
        task = self._bars.add_task(f"{layout}, probe", total=None)
        without = self._bench.scenario(layout, hardware, self._profile)
        # Groups of Dynamic-CP have any power of two.
        sizes = sorted(
            {layout.sizes["cp"], *(1 << power for power in range(without.layout.size("dp_cp").bit_length()))}
        )
        device, thread = torch.device(self._device), self._clock == "thread"
        found = probe.stages(self._bench, without, sizes, device=device, thread_clock=thread)
        path = self._options.output_dir / f"profile-{layout.name}-{self._device}.json"
        profile = probe.corrected(self._profile, found.attention, path)
        self._bars.remove_task(task)
        return self._bench.scenario(layout, hardware, profile), found

    def _processes(self, layout: Layout, outcomes: Mapping[str, Outcome]) -> tuple[dict[str, Row], Row]:
        work = processes.work_of(self._bench, layout, outcomes, self._options.repeats, self._device)
        others = even_steps(self._bench, layout, max(map(len, work.steps.values())))
        work = replace(work, steps=between(work.steps, others))
        steps = sum(map(len, work.steps.values())) * self._options.repeats
        task = self._bars.add_task(f"{layout}, processes", total=steps)
        measured = processes.launch(work, lambda: self._bars.advance(task))
        self._bars.remove_task(task)
        found = {}
        for name in outcomes:
            # Busy ranks: of each step, the repetition with the median time.
            seconds = np.array(measured["seconds"][name])
            chosen = np.argsort(seconds, axis=0)[seconds.shape[0] // 2]
            busy = [measured["busy"][name][repeat][step] for step, repeat in enumerate(chosen.tolist())]
            found[name] = {
                "seconds": np.median(seconds, axis=0).tolist(),
                "repetitions": seconds.tolist(),
                "work": [float(np.sum(step)) for step in busy],
                "levels": page.levels_of(busy, layout, dynamic=name in work.dynamic),
            }
        return found, even_seconds(measured["seconds"])

    def _slices(self, layout: Layout, outcomes: Mapping[str, Outcome]) -> tuple[dict[str, Row], Row]:
        parts = sum(1 for outcome in outcomes.values() for _ in outcome.parts()) * self._options.sliced_repeats
        task = self._bars.add_task(f"{layout}, slices", total=parts)
        measured = slices.measure(
            self._bench,
            outcomes,
            [pace.parts_of(lengths, layout.sizes["cp"])[0] for lengths in pace.documents(self._bench.context)],
            repeats=self._options.sliced_repeats,
            device=torch.device(self._device),
            thread_clock=self._clock == "thread",
            tick=lambda: self._bars.advance(task),
        )
        self._bars.remove_task(task)
        # Why a prediction is off is asked of parts, which the record has not.
        parts_path = self._options.output_dir / f"parts-{layout.name}.npz"
        np.savez_compressed(parts_path, others=measured.others, **measured.seconds)
        found = {}
        for name, outcome in outcomes.items():
            seconds = measured.seconds[name]
            middle = np.median(seconds, axis=0)
            run, evenly = (of(outcome, middle) for of in (slices.as_measured, slices.even))

            found[name] = {
                "seconds": run.seconds.tolist(),
                "work": run.work.tolist(),
                "even": evenly.seconds.tolist(),
                "attribution": {part: float(of.sum() / run.total_seconds) for part, of in run.attribution.items()},
                "levels": page.levels_of(slices.busy(outcome, middle), layout, dynamic=outcome.pipelines == "rank"),
            }
        others = {f"{PACE}{sort}": took.tolist() for sort, took in enumerate(measured.others)}
        return found, even_seconds(others)

    def _link(self, layout: Layout, kind: str) -> Row:
        """Between the ranks of a layout; of a sliced one, between as many as are trained elsewhere, or 2.

        Nothing where there are not two devices for that: what ranks send each other then takes no time.
        """
        size = layout.world_size
        if kind == "slices":
            size = min(size, max([2, *(Layout(name).world_size for name in self._options.layouts)]))
        if self._device == "cuda":
            size = min(size, torch.cuda.device_count())
        if size < 2:
            return {}
        task = self._bars.add_task(f"{layout}, link", total=None)
        work = processes.Work(self._bench, Layout(f"dp{size}"), {}, frozenset(), 1, self._device)
        found = processes.launch(work, lambda: None)
        self._bars.remove_task(task)
        return {name: found[name] for name in ("link", "all_gather")}

    def _measured_profile(self) -> Path:
        if self._options.profile is not None:
            return self._options.profile
        task = self._bars.add_task("profile", total=None)

        def show(done: int, total: int, name: str) -> None:
            self._bars.update(task, completed=done, total=total, description=f"profile: {name}")

        shape = f"h{self._bench.hidden}-c{self._bench.context}-{self._device}"
        path = self._options.output_dir / f"profile-{shape}.json"
        seconds = self._options.profile_seconds
        machine.profile(self._bench, path, device=self._device, budget_seconds=seconds, progress=show)
        self._bars.remove_task(task)
        return path

    def _lengths(self) -> tuple[str, np.ndarray]:
        if self._options.lengths is not None and self._options.lengths.suffix != ".npy":
            raise SystemExit(f"--lengths {self._options.lengths}: a .npy of lengths in tokens")
        found = read_documents(
            [str(self._options.lengths)], wanted=Wanted(holds="lengths"), pattern=None, cache=None, progress=self._bars
        )
        return f"{len(found.lengths):,} documents: {found.source}", found.lengths


def even_steps(bench: Bench, layout: Layout, turns: int) -> dict[str, processes.Steps]:
    """Steps that no method trains, `turns` of each sort, whose even micro-batches show the machine's pace."""
    count = bench.micro_batches_of(layout)
    sorts = enumerate(pace.documents(bench.context))
    return {f"{PACE}{sort}": [processes.step(layout, lengths, count)] * turns for sort, lengths in sorts}


def even_seconds(seconds: Mapping[str, list[list[float]]]) -> Row:
    """Seconds of `even_steps`: "took" by repetition and turn, "even" the median of each sort."""
    took = {name: of for name, of in seconds.items() if name.startswith(PACE)}
    return {"took": took, "even": [float(np.median(of)) for of in took.values()]}


def between(steps: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Both, the others spread among the first."""
    names, apart = list(steps), -(-len(steps) // len(others))
    made: dict[str, Any] = {}
    for index, (other, turns) in enumerate(others.items()):
        made[other] = turns
        made |= {name: steps[name] for name in names[index * apart : (index + 1) * apart]}
    return made


def predicted(outcome: Outcome, slower: float) -> Row:
    """What the simulation says of a plan, where everything takes `slower` times as long; and the plan itself."""
    return {
        "predicted": (outcome.seconds * slower).tolist(),
        "predicted_work": (outcome.work * slower).tolist(),
        "profiled": outcome.seconds.tolist(),
        "streamed": outcome.run.streamed,
        "tokens": outcome.tokens,
        "flops": outcome.flops,
        "delay": outcome.run.delay_mean,
        "digest": outcome.summary()["digest"],
    }


def matching(parts: tuple[str, ...]) -> list[str]:
    """The methods whose names have one of these parts, the baseline always; all without any."""
    for part in parts:
        if not any(part in name for name in METHODS):
            raise SystemExit(f"--methods {part}: is in the name of none of {', '.join(METHODS)}")
    first = next(iter(METHODS))
    return [name for name in METHODS if not parts or name == first or any(part in name for part in parts)]


def device_of(options: Options) -> str:
    """Where everything runs: what was asked for, or the GPUs where there is one for every rank that is trained.

    Raises:
        SystemExit: a GPU is asked for, and there are too few.
    """
    sizes = {str(layout): layout.world_size for layout in map(Layout, options.layouts)}
    widest, gpus = max(sizes, key=sizes.__getitem__, default=""), torch.cuda.device_count()
    ranks = sizes.get(widest, 1)
    if gpus >= ranks and options.device is None:
        return "cuda"
    if gpus < ranks and (gpus or options.device == "cuda"):
        few = f"{widest or 'a sliced layout'} takes {ranks} GPUs, one for each rank, and there are {gpus}"
        if options.device == "cuda":
            raise SystemExit(f"--device cuda: {few}; name layouts for them, or --empty-layouts: slices take one")
        if options.device is None:
            print(f"{few}: measured on the CPU. On the GPU: --empty-layouts, and slices alone", file=sys.stderr)
    return options.device or "cpu"


def gpu_name(device: str) -> str | None:
    """Of the first GPU, where that is what is measured."""
    return torch.cuda.get_device_name() if device == "cuda" else None


def command() -> str:
    """This one, as it was given, but where its results go; of files and folders the names."""
    kept, words = ["python -m studies.proof"], iter(sys.argv[1:])
    for word in words:
        if word in ("--page", "--picture", "--record", "--output-dir"):
            next(words, None)
        else:
            kept.append(Path(word).name)
    return " ".join(kept)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    app()
