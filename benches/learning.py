"""Costs from measured times: how many it takes, what measuring costs, and what a wrong start ends at.

    python -m benches.learning                   # prints the tables, writes benches/records/learning.json

Three questions. How far off is a fit on times with noise, for micro-batches that it has not seen? What does `StepTimer`
cost, as a share of a training step? And training from an attention rate that is wrong by a factor of four, with real
attention on real clocks in two processes: how even are the steps before and after `CostTracker` has looked? The last is
measured by the CPU time of each process, beside a packer that was told a fit of many steps before, a step of each in
turn: so other work on the machine is neither taken for imbalance nor for a difference between them.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from benches.common import COST, machine, options, parse, rounded, synthetic, write_record
from tests.torch import processes

CONTEXT = 1024
KNOWN, STEPS, EVERY = 100, 300, 25
TOLD, LEARNT = "told the truth", "attention rate / 4, learnt"


# --- the fit ---------------------------------------------------------------------------------------------------------


def errors(rows: int, noise: float, seeds: int) -> list[float]:
    """Mean relative error on 50 new micro-batches, by seed."""
    found = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        lengths = synthetic(60_000, seed)
        cuts = rng.integers(4, 40, rows + 50)
        parts = np.split(lengths, cuts.cumsum())[: rows + 50]
        truth = np.array([COST.cost(part).sum() for part in parts]) * 1e-15
        measured = truth[:rows] * (1 + noise * rng.standard_normal(rows))
        fit = wlb.CostModel.fit(parts[:rows], measured)
        predicted = np.array([fit.cost_model.cost(part).sum() for part in parts[rows:]])
        predicted += fit.cost_model.terms.get("micro_batches", 0.0)
        found.append(float(np.abs(predicted / truth[rows:] - 1).mean()))
    return found


# --- a model that really takes as long as its documents --------------------------------------------------------------


class Layer(nn.Module):
    """Attention inside each document, and a feed-forward network."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))

    def forward(self, x: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        parts = []
        for part in self.qkv(x).split(lengths):
            q, k, v = part.view(1, part.shape[0], 3, 4, 64).permute(2, 0, 3, 1, 4)
            # Written out: the work grows with the square of the length, as a kernel's does.
            scores = (q @ k.transpose(-1, -2)) * 0.125
            mask = torch.ones(part.shape[0], part.shape[0], dtype=torch.bool).tril()
            out = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
            parts.append(out.transpose(1, 2).reshape(part.shape[0], -1))
        x = x + self.out(torch.cat(parts))
        return x + self.ffn(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(256, 256), Layer(), nn.Linear(256, 256)

    def forward(self, batch: wt.PackedBatch) -> torch.Tensor:
        x = self.layer(self.embedding(batch.tokens), batch.shard.lengths.tolist())
        return nn.functional.cross_entropy(self.head(x), batch.tokens)


class CpuTimer(wt.StepTimer):
    """By the CPU time of this process."""

    def micro_batch(self, index: int) -> Any:
        return _CpuPart(self._spans.setdefault(index, []))


class _CpuPart:
    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __enter__(self) -> None:
        self.started = time.process_time()

    def __exit__(self, *_: object) -> None:
        self.parts.append(time.process_time() - self.started)


def a_loader(cost_model: wlb.CostModel, rank: int, size: int) -> wt.StepLoader[Any]:
    rng = np.random.default_rng(0)
    lengths = np.minimum(30 + rng.pareto(1.1, 12_000) * 60, CONTEXT).astype(int)
    generator = torch.Generator().manual_seed(0)
    dataset = [torch.randint(256, (length,), generator=generator) for length in lengths.tolist()]
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=3 * CONTEXT,
        max_document_tokens=CONTEXT,
        release="adaptive",
        cost_model=cost_model,
    )
    sampler = wt.BalancedBatchSampler(lengths, packer=packer, dp_rank=rank, dp_size=size)
    return wt.StepLoader(DataLoader(wt.Documents(dataset), batch_sampler=sampler, collate_fn=wt.collate))  # type: ignore[arg-type]


class Arm:
    """One run of training: its model, its documents, and the costs that its packer plans by."""

    def __init__(self, rank: int, cost_model: wlb.CostModel, learn: bool, verbose: bool) -> None:
        torch.manual_seed(0)
        self.model, self.loader, timer = Model(), a_loader(cost_model, rank, 2), CpuTimer()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        switch_above = 0.01 if learn else 1e9
        self.tracker = wt.CostTracker(self.loader, every=EVERY, switch_above=switch_above, window=KNOWN, timer=timer)
        self.timer, self.verbose, self.steps = timer, verbose, iter(self.loader)
        self.seconds: list[list[float]] = []
        self.lengths: list[list[list[int]]] = []
        read = timer.read

        def keep() -> list[wt.TimedStep]:
            steps = read()
            self.seconds.extend(step.seconds.tolist() for step in steps)
            return steps

        timer.read = keep  # type: ignore[method-assign]

    def step(self) -> None:
        """Trains the next step."""
        step = next(self.steps)
        for index, batch in enumerate(step.micro_batches):
            with self.timer.micro_batch(index):
                self.model(batch).backward()
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lengths.append([part.lengths.tolist() for part in step.packing])
        update = self.tracker.step(step)
        if update is not None and self.verbose:
            print(update.report(), file=sys.stderr)

    def run(self) -> dict[str, Any]:
        """Seconds of every micro-batch [steps, 2] of this rank, the documents of each, and what the tracker said."""
        fit = self.tracker.updates[-1].fit
        return {
            "seconds": self.seconds,
            "lengths": self.lengths,
            "fit": None if fit is None else fit.cost_model.to_json(),
            "switched_from": [update.switched_from for update in self.tracker.updates],
        }


def train(rank: int, steps: int, arms: dict[str, tuple[wlb.CostModel, bool]]) -> dict[str, Any]:
    """A run for each arm, a step of each in turn: what else the machine does meets all of them alike."""
    made = {name: Arm(rank, *how, verbose=rank == 0 and how[1]) for name, how in arms.items()}
    names = list(made)
    for number in range(steps):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            made[name].step()
    return {name: arm.run() for name, arm in made.items()}


def imbalances(ranks: list[dict[str, Any]]) -> NDArray[np.float64]:
    """Of each step, by clocks: the longest over the mean of its four micro-batches."""
    seconds = np.concatenate([rank["seconds"] for rank in ranks], axis=1)
    return np.asarray(seconds.max(axis=1) / seconds.mean(axis=1))


def interval(learnt: NDArray[np.float64], told: NDArray[np.float64]) -> tuple[float, float]:
    """Between which shares the one mean lies over the other, in 95 % of resamplings of their steps."""
    drawn = np.random.default_rng(0).integers(len(told), size=(2, 10_000, len(told)))
    low, high = np.quantile(learnt[drawn[0]].mean(axis=1) / told[drawn[1]].mean(axis=1) - 1, [0.025, 0.975])
    return float(low), float(high)


def by_costs(run: dict[str, Any], cost_model: wlb.CostModel) -> NDArray[np.float64]:
    costs = np.array([[cost_model.cost(part).sum() for part in step] for step in run["lengths"]])
    return np.asarray(costs.max(axis=1) / costs.mean(axis=1))


# --- the timer -------------------------------------------------------------------------------------------------------


def timer_overhead() -> dict[str, float]:
    """Seconds of one use, and its share of a step of the model above with two micro-batches of two contexts."""
    timer, uses = wt.StepTimer("cpu"), []
    for _ in range(50):
        started = time.perf_counter()
        for index in range(200):
            with timer.micro_batch(index):
                pass
        timer.end_step()
        timer.read()
        uses.append((time.perf_counter() - started) / 200)
    model, batch = Model(), wt.collate([torch.zeros(CONTEXT // 2, dtype=torch.long)] * 4)
    steps = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(2):
            model(batch).backward()
        steps.append(time.perf_counter() - started)
    step = min(steps)
    use = statistics.median(uses)
    return {"seconds_per_use": use, "step_seconds": step, "share_of_step": 2 * use / step}


def main() -> None:
    """Prints the tables and writes the record."""
    arguments = parse(options(__doc__, record="learning.json"))
    console = Console()
    record: dict[str, Any] = {"machine": machine(), "fit": [], "timer": timer_overhead()}
    table = Table("micro-batches", "noise", "mean error on 50 new ones", "worst of 20", title="A fit")
    for rows in (50, 100, 200, 400):
        found = errors(rows, 0.05, 20)
        record["fit"].append({"micro_batches": rows, "noise": 0.05, "errors": found})
        table.add_row(f"{rows}", "5 %", f"{np.mean(found):.2%}", f"{max(found):.2%}")
    console.print(table)
    timer = record["timer"]
    console.print(
        f"StepTimer: {1e6 * timer['seconds_per_use']:.2f} us a use, {timer['share_of_step']:.4%} of a step of"
        f" {1e3 * timer['step_seconds']:.0f} ms with two micro-batches"
    )

    start = wlb.CostModel(attention=1.0, linear=100.0)
    known = processes.run(2, train, KNOWN, {"known": (start, False)}, timeout=900.0)
    truth = wlb.CostModel.from_json(known[0]["known"]["fit"])
    terms = truth.terms
    wrong = wlb.CostModel(attention=terms["pairs"] / 4, linear=terms["tokens"])
    arms = {TOLD: (truth, False), "attention rate / 4, stays": (wrong, False), LEARNT: (wrong, True)}
    ranks = processes.run(2, train, STEPS, arms, timeout=1800.0)
    columns = ("packer", "first 25 steps", "after 50 steps", "by the costs told")
    table = Table(*columns, title="Imbalance of a step, by clocks")
    record["training"] = {"terms": terms, "known_steps": KNOWN, "steps": STEPS, "every": EVERY, "runs": {}}
    by_clocks = {}
    for name in arms:
        clocks, costs = imbalances([rank[name] for rank in ranks]), by_costs(ranks[0][name], truth)
        table.add_row(name, f"{clocks[:25].mean():.4f}", f"{clocks[50:].mean():.4f}", f"{costs[50:].mean():.4f}")
        by_clocks[name] = clocks
        record["training"]["runs"][name] = {
            "by_clocks": clocks.tolist(),
            "by_costs_told": costs.tolist(),
            "switched_from": ranks[0][name]["switched_from"],
        }
    low, high = interval(by_clocks[LEARNT][50:], by_clocks[TOLD][50:])
    record["training"]["learnt_over_told"] = [low, high]
    over = by_clocks[LEARNT][50:].mean() / by_clocks[TOLD][50:].mean() - 1
    console.print(table)
    console.print(
        f"learnt over told, after 50 steps: {over:+.2%}, 95 % of resamplings within {low:+.2%} and {high:+.2%}"
    )
    write_record(arguments.record, rounded(record))
    console.print(f"wrote {arguments.record}")


if __name__ == "__main__":
    main()
