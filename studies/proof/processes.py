"""The plans trained for real: one process a rank, the steps of the example trainer, a clock around each.

    python -m torch.distributed.run --nproc-per-node 2 -m studies.proof.processes work.pickle times.json

One model is trained on, and methods take turns step by step, so that all of them see the same machine; what counts is
the time from where all ranks stand ready for a step until the last one is done. Text is read, packed and sharded before
that, as a loader does beside the step before.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import wlb_tools
from studies.proof import Bench, Layout, placed, system
from studies.proof.batches import Part, Text
from studies.proof.pace import parts_of
from studies.trainer import train
from wlb.torch.data import DynamicCpStep, Step
from wlb.torch.flops import peak_flops
from wlb.torch.groups import data_and_context
from wlb.torch.timing import StepTimer
from wlb_tools.profiling import probe_link
from wlb_tools.simulation import Outcome

Steps = list[list[list[Part]]]  # [steps][dp * cp ranks][micro-batches]
TICK = "tick"


@dataclass(frozen=True)
class Work:
    """What the processes are to do; with no steps at all they only probe their link."""

    bench: Bench
    layout: Layout
    steps: Mapping[str, Steps]  # by method
    dynamic: frozenset[str]  # methods whose plans choose groups
    repeats: int
    device: str  # cpu or cuda


def work_of(bench: Bench, layout: Layout, outcomes: Mapping[str, Outcome], repeats: int, device: str) -> Work:
    """The plans of a simulation."""
    steps = {
        name: [[[Part.of(outcome, part) for part in row] for row in step] for step in placed(outcome)]
        for name, outcome in outcomes.items()
    }
    dynamic = frozenset(name for name, outcome in outcomes.items() if outcome.pipelines == "rank")
    return Work(bench, layout, steps, dynamic, repeats, device)


def step(layout: Layout, lengths: list[int], count: int) -> list[list[Part]]:
    """A step whose micro-batches all hold documents of these lengths.

    Each micro-batch has a shard of its own, as those that are trained have: what attention keeps with a shard would
    else be in the caches already.

    Args:
        layout: the ranks.
        lengths: of the documents of a micro-batch.
        count: micro-batches of a rank.
    """
    made = [parts_of(lengths, layout.sizes["cp"]) * layout.sizes["dp"] for _ in range(count)]
    return [list(row) for row in zip(*made, strict=True)]


def launch(work: Work, tick: Callable[[], None]) -> dict[str, Any]:
    """Runs it on as many processes as the layout has ranks, and gives what they measured.

    Raises:
        SystemExit: they failed; their own words went to standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "work.pickle", Path(folder) / "times.json"
        given.write_bytes(pickle.dumps(work))
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        size = ["--nproc-per-node", str(work.layout.world_size)]
        command = [*launcher, *size, "-m", "studies.proof.processes", str(given), str(found)]
        environment = (
            os.environ | {"OMP_NUM_THREADS": "1"} | ({"CUDA_VISIBLE_DEVICES": ""} if work.device == "cpu" else {})
        )
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "cwd": Path(__file__).parents[2]}
        with subprocess.Popen(command, env=environment, **options) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.strip() == TICK:
                    tick()
        if process.returncode:
            raise SystemExit(f"{work.layout}: the processes failed ({process.returncode}); their errors stand above")
        measured: dict[str, Any] = json.loads(found.read_text())
        return measured


def main() -> None:
    """One rank."""
    given, found = map(Path, sys.argv[1:])
    work: Work = pickle.loads(given.read_bytes())
    torch.set_num_threads(1)
    system.keep_memory()
    bench, sizes = work.bench, work.layout.sizes
    settings = train.Settings(
        pp=sizes["pp"],
        cp=sizes["cp"],
        model=train.Shape(**bench.config.shape()),
        context=bench.context,
        dtype="float32" if bench.bytes_per_number == 4 else "bfloat16",
        seed=bench.seed,
    )
    device, mesh = train.set_up_ranks(settings)
    measured: dict[str, Any] = {"device": device.type, "peak_flops": peak_flops()}
    if dist.get_world_size() > 1:
        times = probe_link(device=device)
        measured["link"] = {"latency": times.link.latency, "bandwidth": times.link.bandwidth}
        measured["all_gather"] = {"bytes": times.num_bytes.tolist(), "seconds": times.seconds.tolist()}
    if work.steps:
        measured |= Runner(work, settings, device, mesh).run()
    if dist.get_rank() == 0:
        found.write_text(json.dumps(measured))
    dist.barrier()
    dist.destroy_process_group()
    # What was found is written. A thread of gloo that outlives its group aborts the program as it ends, once in many
    # runs ("terminate called without an active exception").
    sys.stdout.flush()
    os._exit(0)


class Runner:
    """One rank's part of all runs."""

    def __init__(self, work: Work, settings: train.Settings, device: torch.device, mesh: Any) -> None:
        self._work, self._settings, self._device, self._mesh = work, settings, device, mesh
        self._me = data_and_context(mesh).get_local_rank()
        self._text = Text()
        self._stages, self._optimizers = train.build_model(settings, work.bench.config, mesh, device)
        self._timer = StepTimer(device)
        self._timer.attach_stages(self._stages)
        self._groups = {False: train.context_groups(settings, mesh)}
        if work.dynamic:
            self._groups[True] = train.ContextParallelGroups(mesh).of

    def run(self) -> dict[str, Any]:
        """Every method's steps, repetition after repetition; the first step of each is trained once more, before.

        "seconds": of each step by method and repetition; "busy": of them, what every rank computes for every of its
        micro-batches (and waits for inside, as for the keys of other ranks), ranks in the order pp, dp, cp.
        """
        work, world = self._work, dist.get_world_size()
        for name, steps in work.steps.items():
            self._step(name, steps[0])
        self._timer.read()
        most = max(map(len, work.steps.values()))
        seconds: dict[str, list[list[float]]] = {name: [] for name in work.steps}
        busy: dict[str, list[list[list[list[float]]]]] = {name: [] for name in work.steps}
        for _ in range(work.repeats):
            for name in work.steps:
                seconds[name].append([])
                busy[name].append([])
            for index in range(most):
                for name, steps in work.steps.items():
                    if index < len(steps):
                        took, parts = self._step(name, steps[index])
                        row = torch.tensor([took, *parts], dtype=torch.float64, device=self._device)
                        table = row.new_empty(world * row.numel())
                        dist.all_gather_into_tensor(table, row)
                        rows = table.view(world, -1).tolist()
                        seconds[name][-1].append(max(of_rank[0] for of_rank in rows))
                        busy[name][-1].append([of_rank[1:] for of_rank in rows])
                        if dist.get_rank() == 0:
                            print(TICK, flush=True)
        return {"seconds": seconds, "busy": busy}

    def _step(self, name: str, ranks: list[list[Part]]) -> tuple[float, list[float]]:
        """Seconds of a step on this rank, and of each of its micro-batches: what it computes, and waits for inside."""
        dynamic = name in self._work.dynamic
        batches = [self._text.batch(part, self._device) for part in ranks[self._me]]
        step: Any
        if dynamic:
            valid = sum(part.valid_tokens for rank in ranks for part in rank if part.rank == 0)
            step = DynamicCpStep(0, None, batches, valid)  # type: ignore[arg-type] # the step does not look at its plan
        else:
            dp = self._mesh["dp"]
            indices = np.arange(len(batches)) * dp.size() + dp.get_local_rank()
            # Of its packing a step only looks at the number of micro-batches.
            step = Step(0, 0, range(len(batches) * dp.size()), indices, batches)  # type: ignore[arg-type]
        self._synchronize()
        dist.barrier()
        began = time.perf_counter()
        train.train_step(
            self._settings, step, self._stages, self._optimizers, self._groups[dynamic], self._mesh, self._device
        )
        self._synchronize()
        took = time.perf_counter() - began
        self._timer.end_step()
        (timed,) = self._timer.read()
        return took, timed.seconds.tolist()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def link_of(measured: Mapping[str, Any]) -> wlb_tools.Link:
    """What the probe found; on one rank, which has none, any."""
    return wlb_tools.Link(**measured.get("link", {"latency": 1e-6, "bandwidth": 1e12}))


if __name__ == "__main__":
    main()
