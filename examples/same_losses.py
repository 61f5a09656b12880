"""Trains the same model on the same text twice, on 4 processes (pp 2 x cp 2) and on one, and compares the losses.

python examples/same_losses.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

TRAIN = Path(__file__).parent / "train.py"
LAYOUTS = {"pp 2 x cp 2, ring": (4, ["--pp", "2", "--cp", "2", "--transport", "ring"]), "one process": (1, [])}
TOLERANCE = 1e-4  # float32, summed in another order; a wrong mask, position or gradient shows in the first digits


def losses(processes: int, layout: list[str], common: list[str]) -> list[float]:
    """Runs the trainer under torchrun; gives the loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, str(TRAIN), *layout, *common]
        print("$ torchrun", *command[4:], flush=True)
        subprocess.run([*command, "--metrics-file", str(log)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def main(steps: Annotated[int, typer.Option(help="Global batches.")] = 8) -> None:
    """Shows that a run on 4 processes has the losses of a run on one."""
    size = ["--context", "512", "--micro-batches", "4", "--hidden", "64", "--ffn", "176", "--warmup", "2"]
    common = ["--steps", str(steps), "--workers", "0", *size]
    found = {name: losses(processes, layout, common) for name, (processes, layout) in LAYOUTS.items()}
    table = Table("step", *found, "relative difference", title="Loss of the same global batches")
    worst = 0.0
    for step, (several, one) in enumerate(zip(*found.values(), strict=True), start=1):
        difference = abs(several - one) / one
        worst = max(worst, difference)
        table.add_row(str(step), f"{several:.6f}", f"{one:.6f}", f"{difference:.1e}")
    Console().print(table)
    if not worst <= TOLERANCE:
        sys.exit(f"the losses differ by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    typer.run(main)
