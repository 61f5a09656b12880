"""Trains the same model on the same text on 4 processes (pp 2 x cp 2) and on one, and compares the losses.

The text is real files of two kinds: many short ones, and as many tokens in a few that almost fill the context. Packed
in order of arrival, such files make micro-batches of very unequal work.

    python examples/same_losses.py
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import wlb

TRAIN = Path(__file__).parent / "train.py"
LAYOUTS = {"pp 2 x cp 2": (4, ["--pp", "2", "--cp", "2"]), "1 process": (1, [])}
TOLERANCE = 1e-4  # float32, summed in another order; a wrong mask, position or gradient shows in the first digits
CONTEXT, MICRO_BATCHES = 2048, 8
COST = wlb.CostModel.from_flops(  # of the model in train.py
    hidden_size=64,
    ffn_hidden_size=176,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    vocab_size=257,
    attention_efficiency=0.55,
)


def link_documents(folder: Path) -> list[int]:
    """Fills `folder` with links to files of Python's library, as many tokens in long ones as in short ones."""
    files = [(path, path.stat().st_size + 1) for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))]
    short = [(path, length) for path, length in files if 16 <= length <= CONTEXT // 4]
    long = [(path, length) for path, length in files if 3 * CONTEXT // 4 <= length <= CONTEXT]
    every = max(sum(length for _, length in long) // sum(length for _, length in short), 1)
    chosen = short + long[::every]
    for number, (path, _) in enumerate(chosen):
        (folder / f"{number:05d}.py").symlink_to(path)
    return [length for _, length in chosen]


def imbalance_in_order_of_arrival(lengths: list[int]) -> float:
    """The mean over an epoch in which documents come in random order and are cut where a micro-batch is full."""
    arrived = np.random.default_rng(0).permutation(lengths)
    offsets = wlb.batch_offsets(arrived, tokens_per_batch=MICRO_BATCHES * CONTEXT)
    sizes: dict[str, Any] = {"num_micro_batches": MICRO_BATCHES, "max_tokens": CONTEXT, "cost_model": COST}
    steps = [arrived[first:end] for first, end in itertools.pairwise(offsets)]
    return float(np.mean([wlb.pack(step, method="original", **sizes).imbalance for step in steps]))


def train(processes: int, layout: list[str], options: list[str]) -> list[dict[str, Any]]:
    """Runs the trainer under torchrun; returns what it logged of each step."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        command = [str(TRAIN), *layout, *options]
        print("\n$ torchrun", *launcher[2:], *command, flush=True)
        subprocess.run(
            [sys.executable, "-m", *launcher, *command, "--metrics-file", str(log)],
            check=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        return [json.loads(line) for line in log.read_text().splitlines()]


def main() -> None:
    """Prints a line for each step, and a verdict."""
    parser = argparse.ArgumentParser(description="Shows that a run on 4 processes has the losses of a run on one.")
    parser.add_argument("--steps", type=int, default=8, help="global batches")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        lengths = link_documents(Path(folder))
        options = ["--context", CONTEXT, "--micro-batches", MICRO_BATCHES, "--steps", steps, "--corpus", folder]
        several, one = (train(*layout, [str(option) for option in options]) for layout in LAYOUTS.values())

    print(f"\n{'step':>4}  documents  tokens of micro-batches  {'  '.join(f'loss, {name}' for name in LAYOUTS)}")
    for ours, alone in zip(several, one, strict=True):
        tokens = f"{min(ours['tokens']):,} to {max(ours['tokens']):,}"
        print(f"{ours['step']:>4}  {ours['documents']:>9}  {tokens:>23}  {ours['loss']:>17.6f}  {alone['loss']:>15.6f}")
    worst = max(abs(ours["loss"] / alone["loss"] - 1) for ours, alone in zip(several, one, strict=True))
    before, after = imbalance_in_order_of_arrival(lengths), np.mean([row["imbalance"] for row in several])
    print(
        f"\nLosses on 4 processes and on one agree to {worst:.0e}; work of the heaviest micro-batch over the mean: "
        f"{before:.2f} in order of arrival, {after:.2f} with wlb."
    )
    if worst > TOLERANCE:
        sys.exit(f"the losses differ by more than {TOLERANCE:.0e}")
    if not after < before:
        sys.exit("wlb did not even out these documents")


if __name__ == "__main__":
    main()
