"""Trains the same model on the same text twice, on 4 processes (pp 2 x cp 2) and on one, and compares the losses.

The text is real files of two kinds: many short ones, and as many tokens in a few that almost fill the context. So every
step has documents of many lengths, and micro-batches of unequal length go through the pipeline. Both are checked, for a
proof on equal pieces would prove little.

python examples/same_losses.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from baselines import BaselineLoader
from corpus import read_corpus
from cyclopts import Parameter, run
from cyclopts.types import PositiveInt
from rich.console import Console
from rich.table import Table

import wlb
from llama import LlamaConfig

TRAIN = Path(__file__).parent / "train.py"
LAYOUTS = {"pp 2 x cp 2": (4, ["--pp", "2", "--cp", "2", "--transport", "ring"]), "1 process": (1, [])}
TOLERANCE = 1e-4  # float32, summed in another order; a wrong mask, position or gradient shows in the first digits
UNEVEN = 1.2  # the least imbalance of the documents as they arrive, for the comparison to prove something
CONTEXT = 2048
MICRO_BATCHES = 8
HIDDEN, FFN = 64, 176


def documents_with_a_tail(folder: Path) -> None:
    """Fills `folder` with links to files of Python's library: short ones, and as many tokens in nearly full windows."""
    files = read_corpus(None)
    short, long = [], []
    for path, length in zip(files.paths, files.lengths, strict=True):
        if 16 <= length <= CONTEXT // 4:
            short.append((path, length))
        elif 3 * CONTEXT // 4 <= length <= CONTEXT:
            long.append((path, length))
    wanted = sum(length for _, length in short)
    every = max(int(sum(length for _, length in long) / wanted), 1)
    for number, (path, _) in enumerate(short + long[::every]):
        (folder / f"{number:05d}.py").symlink_to(path)


def imbalance_of_arrivals(folder: Path, steps: int) -> float:
    """Mean imbalance of the first steps where documents are packed in the order in which they arrive."""
    dataset = read_corpus(folder)
    config = LlamaConfig(hidden_size=HIDDEN, ffn_hidden_size=FFN, vocab_size=dataset.vocab_size)
    loader = BaselineLoader(
        dataset,
        collate=lambda documents: documents,  # type: ignore[arg-type,return-value]
        method="original",
        window=1,
        num_micro_batches=MICRO_BATCHES,
        context=CONTEXT,
        cost_model=wlb.CostModel.from_flops(**config.shape(), attention_efficiency=0.55),
        dp_rank=0,
        dp_size=1,
        seed=0,
    )
    found = [step.packing.imbalance for step in islice(loader, steps)]
    return sum(found) / len(found)


def train(processes: int, layout: list[str], common: list[str]) -> list[dict[str, Any]]:
    """Runs the trainer under torchrun; gives what it logged of each step."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [*launcher, str(TRAIN), *layout, *common]
        print("$ torchrun", *command[4:], flush=True)
        subprocess.run([*command, "--metrics-file", str(log)], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        return [json.loads(line) for line in log.read_text().splitlines()]


def main(steps: Annotated[PositiveInt, Parameter(help="Global batches.")] = 8) -> None:
    """Shows that a run on 4 processes has the losses of a run on one."""
    size = ["--context", str(CONTEXT), "--micro-batches", str(MICRO_BATCHES), "--hidden", str(HIDDEN)]
    common = ["--steps", str(steps), "--workers", "0", *size, "--ffn", str(FFN), "--warmup", "2"]
    with tempfile.TemporaryDirectory() as folder:
        documents_with_a_tail(Path(folder))
        arrivals = imbalance_of_arrivals(Path(folder), steps)
        common += ["--corpus", folder]
        several, one = (train(processes, layout, common) for processes, layout in LAYOUTS.values())
    table = Table("step", "docs", "lengths", "tokens", *LAYOUTS, "difference")
    table.title = "The same global batches: documents, distinct lengths, tokens of micro-batches, loss"
    worst, distinct, unequal = 0.0, [], 0
    for ours, alone in zip(several, one, strict=True):
        difference = abs(ours["loss"] - alone["loss"]) / alone["loss"]
        worst = max(worst, difference)
        distinct.append(ours["distinct_lengths"])
        tokens = ours["micro_batch_tokens"]
        unequal += len(set(tokens)) > 1
        table.add_row(
            str(ours["step"]),
            str(ours["documents"]),
            str(ours["distinct_lengths"]),
            f"{min(tokens)} to {max(tokens)}",
            f"{ours['loss']:.6f}",
            f"{alone['loss']:.6f}",
            f"{difference:.1e}",
        )
    Console().print(table)
    print(
        f"at least {min(distinct)} distinct lengths in a step; micro-batches of unequal length in {unequal} of {steps} "
        f"steps; imbalance in the order of arrival {arrivals:.3f}"
    )
    if min(distinct) < 2 or unequal < steps or not arrivals > UNEVEN:
        sys.exit(
            f"these documents prove nothing: each step must have unequal ones, and {UNEVEN} of imbalance on arrival"
        )
    if not worst <= TOLERANCE:
        sys.exit(f"the losses differ by {worst:.1e}, more than {TOLERANCE:.0e}")


if __name__ == "__main__":
    run(main)
