"""Kills the example trainer with SIGKILL at random moments, and compares what it learns with a run that nobody killed.

    python -m studies.trainer.kills                        # 100 kills of one process, 100 of two ranks; a few minutes
    python -m studies.trainer.kills --kills 10 --flips 20  # fewer

A run is killed and started again until it is done: on one process, or on two ranks that share data, a pipeline or a
context. One rank dies first, chosen at random, or both at once. Half of the kills are aimed at a save: the moment when
its folder appears, and up to as long as a save takes; whether one hit is read from what lies in the folder after all
ranks are dead. At the end, of every run: each line that any of its lives logged has the loss, the gradient norm and the
digest of the plan of the run without kills, bit for bit, no step is missing, the files of the last checkpoint (weights,
moments of the optimizer, sealed state of the packer) are byte for byte the same, and its ledger proves that every
document was trained once.

Then single bits of the newest checkpoint are flipped, in any of its files: each must be seen, and the checkpoint before
be taken. Prints the tables, writes benches/records/kills.json. Ends with an error if anything differs.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benches.common import machine, options, write_record
from studies.trainer import checkpoints, train
from wlb_tools.audit import audit

STEPS = 20
LIFE_SECONDS = 120.0  # no life takes so long: it hangs
# Ranks, and the options of the trainer; kills of each number of ranks are dealt to its layouts in turn.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (1, {}),
    "data worker": (1, {"workers": 1}),
    "dp 2": (2, {}),
    "pp 2": (2, {"pp": 2}),
    "cp 2": (2, {"cp": 2}),
    "dynamic cp": (2, {"plan": "dynamic_cp"}),
}
# So small that a life takes about a second, most of it its start; every other step is saved.
OPTIONS: dict[str, Any] = {
    "pattern": "*.txt",
    "context": 128,
    "micro_batches": 4,
    "threshold": (80,),
    "max_delay": 3,
    "workers": 0,
    "model": train.Shape(hidden_size=32, ffn_hidden_size=48, num_layers=2, num_heads=4, num_kv_heads=2),
    "steps": STEPS,
    "warmup": 2,
    "checkpoint_every": 2,
}


class Life:
    """One life of a run: all ranks, forked from this process, which has imported torch for them."""

    def __init__(self, folder: Path, world_size: int, options: dict[str, Any]) -> None:
        store = Path(tempfile.mkdtemp(dir=folder)) / "store"
        self.folder = folder
        self.started, self.started_at = time.monotonic(), time.time()
        context = multiprocessing.get_context("fork")
        self.ranks: list[ForkProcess] = [
            context.Process(target=rank_main, args=(rank, world_size, store, folder / "output.txt", options))
            for rank in range(world_size)
        ]
        for rank in self.ranks:
            rank.start()

    def wait(self, until: Callable[[], bool]) -> bool:
        """Until that is so; False if the run ended first.

        Raises:
            RuntimeError: a rank failed by itself, or all hang.
        """
        while not until():
            codes = [rank.exitcode for rank in self.ranks]
            if all(code == 0 for code in codes):
                return False
            if any(code not in (None, 0) for code in codes) or time.monotonic() > self.started + LIFE_SECONDS:
                self.kill(random.Random(0))
                raise RuntimeError(f"ranks ended with {codes}:\n{(self.folder / 'output.txt').read_text()[-4000:]}")
            time.sleep(0.0002)
        return True

    def kill(self, choose: random.Random) -> None:
        """Kills all: one first and the others up to 50 ms later, or together. Returns when nothing of them runs."""
        pause = choose.choice([0.0, choose.uniform(0, 0.05)])
        for rank in choose.sample(self.ranks, len(self.ranks)):
            rank.kill()
            time.sleep(pause)
        for rank in self.ranks:
            rank.join()
            assert rank.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)  # its data workers


def rank_main(rank: int, world_size: int, store: Path, output: Path, options: dict[str, Any]) -> None:
    """One rank of the trainer, as torchrun would start it."""
    os.setsid()
    with output.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    code = 1
    try:
        meeting = dist.FileStore(str(store), world_size)
        wait = timedelta(seconds=LIFE_SECONDS)
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=world_size, timeout=wait)
        train.main(settings=train.Settings(**options))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)


class Run:
    """A folder in which a run lives, dies and goes on."""

    def __init__(self, folder: Path, corpus: Path, layout: str) -> None:
        folder.mkdir()
        self.folder, self.saves = folder, folder / "run"
        self.saves.mkdir()
        self.world_size, options = LAYOUTS[layout]
        paths = {"corpus": corpus, "checkpoint_dir": self.saves, "metrics_file": folder / "log.jsonl"}
        self.options = {**OPTIONS, **options, **paths}

    def live(self) -> Life:
        return Life(self.folder, self.world_size, self.options)

    def saving(self, life: Life) -> bool:
        """Whether this life is writing a checkpoint, or removing an old one; not what the one before has left."""
        for partial in self.saves.glob("*.partial"):
            with contextlib.suppress(FileNotFoundError):
                if partial.stat().st_mtime > life.started_at:
                    return True
        return False

    def logged(self) -> bool:
        """Whether a step was trained."""
        return (self.folder / "log.jsonl").exists()

    def rows(self) -> list[list[Any]]:
        """Of every step that any life logged: its number, loss, gradient norm and plan."""
        log = self.folder / "log.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [[row[key] for key in ("step", "loss", "gradient_norm", "digest")] for row in map(json.loads, lines)]

    def last_files(self) -> dict[str, bytes]:
        """The last checkpoint, but for torch's table of contents, which holds the path and a random number."""
        last = checkpoints.checkpoints(self.saves)[-1]
        return {path.name: path.read_bytes() for path in sorted(last.glob("*.distcp"))}


class Reference:
    """The run without kills, and how long it and its saves take."""

    def __init__(self, run: Run) -> None:
        self.run = run
        life = run.live()
        self.save_seconds: list[float] = []
        life.wait(run.logged)
        self.start_seconds = time.monotonic() - life.started
        while life.wait(lambda: run.saving(life)):
            began = time.monotonic()
            alive = life.wait(lambda: not run.saving(life))
            self.save_seconds.append(time.monotonic() - began)
            if not alive:
                break
        self.seconds = time.monotonic() - life.started
        self.rows = run.rows()
        self.files = run.last_files()
        assert [row[0] for row in self.rows] == list(range(1, STEPS + 1))

    def seconds_left(self, run: Run) -> float:
        """About how long the next life of a run takes."""
        saved = checkpoints.checkpoints(run.saves)
        left = STEPS - int(saved[-1].name.removeprefix("step-")) if saved else STEPS
        return self.start_seconds + (self.seconds - self.start_seconds) * left / STEPS

    def differences(self, run: Run) -> list[str]:
        """What a run that was killed did differently."""
        found = [f"logged {row}" for row in run.rows() if row != self.rows[row[0] - 1]]
        missing = set(range(1, STEPS + 1)) - {row[0] for row in run.rows()}
        found += [f"has not logged steps {sorted(missing)}"] if missing else []
        files = run.last_files()
        proof = audit(run.saves / "ledger")
        found += [f"has a ledger of {proof.num_steps} steps: {finding}" for finding in proof.findings]
        names = sorted(files | self.files)
        return found + [f"has another {name}" for name in names if files.get(name) != self.files.get(name)]


def kills(folder: Path, corpus: Path, layout: str, count: int, seed: int) -> dict[str, Any]:
    """Kills runs of one layout `count` times, at least half of them in a save; each run is then lived to its end."""
    choose = random.Random(f"{layout} {seed}")
    reference = Reference(Run(folder / "reference", corpus, layout))
    began = time.monotonic()
    where: Counter[str] = Counter()
    differences: list[str] = []
    in_saves = (count + 1) // 2
    runs = lives = 0
    while where["a save"] < in_saves or where.total() < count:
        run = Run(folder / f"run-{runs}", corpus, layout)
        done = False
        while not done:
            lives += 1
            logged = len(run.rows())
            saves_to_hit = in_saves - where["a save"]
            others_to_hit = count - where.total() - max(saves_to_hit, 0)
            life = run.live()
            if saves_to_hit > 0 and (others_to_hit <= 0 or choose.random() < 0.5):
                due = in_a_save(run, life, reference, choose)
            elif others_to_hit > 0:
                due = after(life.started + choose.uniform(0, reference.seconds_left(run)))
            else:
                due = after(float("inf"))
            done = not life.wait(due)
            if not done:
                life.kill(choose)
                phase = "a save" if run.saving(life) else "a step" if len(run.rows()) > logged else "the start"
                where[phase] += 1
        runs += 1
        differences += [f"{layout}, run {runs}: {difference}" for difference in reference.differences(run)]
        shutil.rmtree(run.folder)
    return {
        "layout": layout,
        "kills": where.total(),
        "in": dict(where),
        "runs": runs,
        "lives": lives,
        "start_seconds": reference.start_seconds,
        "save_seconds": reference.save_seconds,
        "seconds_per_kill": (time.monotonic() - began) / where.total(),
        "differences": differences,
    }


def after(moment: float) -> Callable[[], bool]:
    """True from that moment on."""
    return lambda: time.monotonic() > moment


def in_a_save(run: Run, life: Life, reference: Reference, choose: random.Random) -> Callable[[], bool]:
    """True at some moment of the first or the second save of a life."""
    delay = choose.uniform(0, float(np.median(reference.save_seconds)))
    skip = choose.randrange(2)
    saving, due_at = False, float("inf")

    def due() -> bool:
        nonlocal saving, skip, due_at
        before, saving = saving, run.saving(life)
        if saving and not before:
            skip -= 1
            if skip < 0:
                due_at = min(due_at, time.monotonic() + delay)
        return time.monotonic() > due_at

    return due


def flips(run: Run, count: int, seed: int) -> dict[str, Any]:
    """Flips one bit of the newest checkpoint, `count` times: is it seen, and the one before taken?"""
    *_, before, last = checkpoints.checkpoints(run.saves)
    choose = random.Random(seed)
    files: Counter[str] = Counter()
    differences = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(count):
        path = choose.choice(sorted(last.iterdir()))
        content = path.read_bytes()
        bit = choose.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with contextlib.redirect_stderr(io.StringIO()) as said:
            taken = checkpoints.newest(run.saves)
        aside = last.with_suffix(".damaged")
        if taken != before or f"{last} is damaged" not in said.getvalue() or not aside.exists():
            differences.append(f"bit {bit} of {path.name}: {taken} was taken")
        if aside.exists():
            aside.rename(last)
        path.write_bytes(content)
        files[path.name] += 1
    assert checkpoints.newest(run.saves) == last
    dist.destroy_process_group()
    return {"flips": count, "files": dict(files), "differences": differences}


def write_corpus(folder: Path) -> None:
    """Documents of very different lengths."""
    folder.mkdir()
    for number, length in enumerate(np.random.default_rng(0).lognormal(3.5, 1.2, 120).astype(int)):
        (folder / f"{number}.txt").write_text("to be or not to be, " * (length // 20) + "!" * (1 + length % 20))


def main() -> None:
    """Kills runs, and compares each with the run that nobody killed."""
    parser = options(__doc__, record="kills.json")
    parser.add_argument("--kills", type=int, default=100, help="of each number of ranks")
    parser.add_argument("--flips", type=int, default=100, help="single bits")
    parser.add_argument("--seed", type=int, default=0, help="of the moments, victims and bits")
    arguments = parser.parse_args()
    console = Console()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder / "corpus")
        for number, (layout, (world_size, _)) in enumerate(LAYOUTS.items()):
            alike = [other for other, (size, _) in LAYOUTS.items() if size == world_size]
            count = arguments.kills // len(alike) + (alike.index(layout) < arguments.kills % len(alike))
            if count:
                (folder / str(number)).mkdir()
                rows.append(kills(folder / str(number), folder / "corpus", layout, count, arguments.seed))
                console.print(f"{layout}: {rows[-1]['kills']} kills, {rows[-1]['seconds_per_kill']:.2f} s for each")
        run = Run(folder / "flips", folder / "corpus", "dp 2")
        Reference(run)
        flipped = flips(run, arguments.flips, arguments.seed)

    places = ("the start", "a step", "a save")
    table = Table("ranks", "", "kills", *(f"in {place}" for place in places), "runs", "differ", "s/kill")
    table.title = "Killed with SIGKILL, and beside a run that nobody killed"
    for row in rows:
        differ = len({text.split(":")[0] for text in row["differences"]})
        hits = [str(row["in"].get(place, 0)) for place in places]
        numbers = [str(row["runs"]), str(differ), f"{row['seconds_per_kill']:.2f}"]
        table.add_row(str(LAYOUTS[row["layout"]][0]), row["layout"], str(row["kills"]), *hits, *numbers)
    console.print(table)
    total, in_saves = sum(row["kills"] for row in rows), sum(row["in"].get("a save", 0) for row in rows)
    differ, unseen = sum(len(row["differences"]) for row in rows), len(flipped["differences"])
    console.print(f"{total} kills, {in_saves} of them in a save: {differ} differences")
    console.print(f"{arguments.flips} bits flipped in the newest checkpoint: {unseen} not seen")
    differences = [text for row in rows for text in row["differences"]] + flipped["differences"]
    command = f"make kills KILLS_FLAGS='{' '.join(sys.argv[1:])}'" if sys.argv[1:] else "make kills"
    record = {"machine": machine(["torch"]), "command": command, "kills": rows, "flips": flipped}
    write_record(arguments.record, record)
    if differences:
        sys.exit("\n".join(differences))


if __name__ == "__main__":
    main()
