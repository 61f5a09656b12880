"""Steps of GRPO on a clock: two processes train a round with wlb's plan, in the plain order, and with verl's split.

    python -m benches.rl_clock --lengths man_man.npy    # prints the table, writes benches/records/rl_clock.json

Loss and model are those of examples/grpo.py, on CPUs, over gloo. A round has 6 prompts with 8 completions, whose
lengths are an eighth of some of the file's. It is one optimizer step, so that all plans train the same samples. The
plain order gives each rank an equal slice of the round and fills micro-batches in order. verl's split is that of verl
0.9.1, with its own cost; wlb's cost is fitted to micro-batches of this model on this machine first. *Once*: gradients
are added up at the end of the step. *Every*: the model is under `fully_shard`, so that ranks wait in every micro-batch.

Two clocks: the wall's, which means something on a machine that is idle, and the processors'. By the processors' a step
takes what the busiest process computes (*once*), or the sum over micro-batches of what the busiest computes (*every*).
Plans take turns; the shortest time of a step counts by the wall's clock, that of each micro-batch by the processors'.
A ratio is of sums over the rounds.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import wlb
import wlb.torch as wt
from benches.common import (
    Lengths,
    Row,
    machine,
    options,
    package_version,
    parse,
    rounded,
    sources,
    tables,
    write_record,
)
from benches.rl import clock_table, judged
from benches.rl_planners import Plan, Round, of_verl, whole
from tests.torch import processes

RANKS, PROMPTS, COMPLETIONS, LONGEST, CAP = 2, 6, 8, 1024, 1024
EXAMPLES = str(Path(__file__).parents[1] / "examples")


def drawn(lengths: Lengths, seed: int, cost: wlb.CostModel) -> tuple[Round, Lengths]:
    """A round, and the tokens of each sample's prompt."""
    rng = np.random.default_rng(seed)
    asked = rng.integers(16, 129, PROMPTS).repeat(COMPLETIONS)
    answers = (rng.choice(lengths, asked.size) // 8).clip(16, LONGEST - 128)
    held = Round(lengths=asked + answers, prompts=np.arange(PROMPTS).repeat(COMPLETIONS), steps=1, cap=CAP, cost=cost)
    return held, asked


def in_order(held: Round, ranks: int) -> Plan:
    """Equal slices of the round; micro-batches are filled in order, and the largest are halved until counts agree."""
    parts: list[list[list[int]]] = []
    for of in np.array_split(np.arange(held.lengths.size), ranks):
        parts.append([[]])
        for sample in of.tolist():
            if held.lengths[[*parts[-1][-1], sample]].sum() > held.cap:
                parts[-1].append([])
            parts[-1][-1].append(sample)
    for filled in parts:
        while len(filled) < max(map(len, parts)):
            at = max(range(len(filled)), key=lambda index: len(filled[index]))
            half = len(filled[at]) // 2
            filled[at : at + 1] = [filled[at][:half], filled[at][half:]]
    return [parts]


PLANS: dict[str, dict[str, Callable[[Round, int], Plan]]] = {
    sync: {
        "plain order": in_order,
        "verl": partial(of_verl, stepwise=False),
        "wlb": partial(whole, sync=sync),
    }
    for sync in ("step", "micro_batch")
}
"""By where ranks meet, and by name."""


# --- in a process ----------------------------------------------------------------------------------------------------


def _example() -> Any:
    if EXAMPLES not in sys.path:
        sys.path.insert(0, EXAMPLES)
    return importlib.import_module("grpo")


def _model(example: Any, seed: int) -> Any:
    model = example.LlamaStage(example.LlamaConfig(hidden_size=64, ffn_hidden_size=176, num_layers=2))
    model.initialize(seed=seed)
    return model


def _batch(samples: list[wt.Document], numbers: list[int]) -> wt.ForestBatch:
    """A micro-batch in which nothing is shared, under the numbers of the round."""
    tokens = np.concatenate([samples[number].tokens for number in numbers])
    offsets = np.cumsum([0, *(len(samples[number].tokens) for number in numbers)])
    forest = wlb.PrefixForest.from_tokens(tokens, offsets, groups=np.arange(len(numbers)))
    cost = wlb.CostModel(attention=1.0, linear=1.0)
    one = wlb.pack(forest, num_micro_batches=1, max_tokens=tokens.size, cost_model=cost)
    (batch,) = wt.Step.of(one, [samples[number] for number in numbers]).micro_batches
    return replace(batch, document_ids=torch.tensor(numbers)[batch.document_ids])


def _samples(held: Round, asked: Lengths, seed: int) -> tuple[list[wt.Document], torch.Tensor]:
    rng = np.random.default_rng(seed)
    starts = [rng.integers(0, 256, size) for size in asked[::COMPLETIONS]]
    made = []
    for number, (prompt, size) in enumerate(zip(held.prompts, held.lengths, strict=True)):
        answer = rng.integers(0, 256, size - starts[prompt].size)
        labels = np.append(np.full(starts[prompt].size, wt.IGNORE), answer)
        made.append(wt.Document(np.append(starts[prompt], answer), number, labels=labels))
    return made, torch.from_numpy(rng.standard_normal(held.lengths.size)).float()


def _step(plan: Plan, held: Round, samples: list[wt.Document], rank: int) -> wt.Step[Any]:
    (ranks,) = plan
    of, count = np.empty(held.lengths.size, np.int64), len(ranks[0])
    for number, part in enumerate(part for parts in ranks for part in parts):
        of[part] = number
    packing = wlb.Packing.from_assignment(
        held.lengths, of, num_micro_batches=RANKS * count, max_tokens=held.cap, cost_model=held.cost
    )
    batches = [_batch(samples, part) for part in ranks[rank]]
    return wt.Step(0, 0, packing, np.arange(count) + rank * count, batches)


def _fitted(example: Any, lengths: Lengths) -> wlb.CostModel:
    """The cost of a sample on this machine: of micro-batches of random samples, each twice, on one process."""
    model, rng = _model(example, 0), np.random.default_rng(99)
    sizes, seconds = [], []
    for number in range(16):
        held = (rng.choice(lengths, int(rng.integers(1, 9))) // 8).clip(16, LONGEST if number % 3 else 128)
        samples = [wt.Document(rng.integers(0, 256, size), at) for at, size in enumerate(held.tolist())]
        batch, best = _batch(samples, [*range(held.size)]), np.inf
        for _ in range(2):
            began = time.perf_counter()
            example.log_probabilities(model, batch).sum().backward()
            best = min(best, time.perf_counter() - began)
        sizes.append(held)
        seconds.append(best)
    return wlb.CostModel.fit(sizes, seconds, terms=["pairs", "tokens"]).cost_model


def _gradients(model: Any) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    return [each.full_tensor() if hasattr(each, "full_tensor") else each.clone() for each in gradients]


def _marked(loss: Any, marks: list[float], *given: Any) -> torch.Tensor:
    """The loss of a micro-batch, and when it began."""
    marks.append(time.process_time())
    result: torch.Tensor = loss(*given)
    return result


def _meeting(computed: Any, sync: str) -> float:
    """Seconds of a step whose ranks wait for the busiest; `computed` are those of this rank's micro-batches."""
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, computed.tolist())
    seconds = np.array(everyone)
    return float(seconds.sum(axis=1).max() if sync == "step" else seconds.max(axis=0).sum())


def timed(rank: int, lengths: Lengths, seeds: int, repeats: int) -> list[Row]:
    """Times of one process, which waits for the others before and after each step."""
    warnings.simplefilter("ignore")
    example = _example()
    torch.optim.SGD([torch.zeros(1)])  # loads torch._dynamo, as in the example, before threads of gloo work
    cost = [_fitted(example, lengths) if rank == 0 else None]
    dist.broadcast_object_list(cost)
    assert cost[0] is not None
    rows = []
    for sync, plans in PLANS.items():
        model, sampler = _model(example, 0), _model(example, 1)
        if sync == "micro_batch":
            for block in model.layers.values():
                fully_shard(block)
            fully_shard(model)
        for seed in range(seeds):
            held, asked = drawn(lengths, seed, cost[0])
            samples, advantages = _samples(held, asked, seed)
            steps = {name: _step(plan(held, RANKS), held, samples, rank) for name, plan in plans.items()}
            losses: dict[str, Any] = {}
            for name, step in steps.items():
                with torch.no_grad():
                    old = {int(b.document_ids[0]): example.log_probabilities(sampler, b) for b in step.micro_batches}
                losses[name] = partial(example.clipped, old=old, advantages=advantages, clip=0.2)
            found: dict[str, Row] = {
                name: {"meet": sync, "round": seed, "plan": name, "wall": []}
                | judged(plans[name](held, RANKS), held, 2)
                for name in steps
            }
            kept: dict[str, Any] = {}
            computed: dict[str, list[Any]] = {name: [] for name in steps}
            for _ in range(repeats):  # in turn, so that all meet the same disturbances
                for name, step in steps.items():
                    dist.barrier()
                    began, marks = time.perf_counter(), list[float]()
                    loss = wt.train_step(model, step, loss=partial(_marked, losses[name], marks))
                    computed[name].append(np.diff([*marks, time.process_time()]))
                    dist.barrier()
                    found[name]["wall"].append(time.perf_counter() - began)
                    kept[name] = loss, _gradients(model)
                    model.zero_grad()
            for name, seconds in computed.items():
                found[name]["processor"] = _meeting(np.min(seconds, axis=0), sync)
            plain, own = kept["plain order"]
            norm = torch.cat([each.ravel() for each in own]).norm()
            for name, (loss, gradients) in kept.items():
                apart = torch.cat([(a - b).ravel() for a, b in zip(own, gradients, strict=True)]).norm()
                found[name] |= {"loss": float(loss), "loss_apart": float(abs(loss - plain) / abs(plain))}
                rows.append(found[name] | {"gradients_apart": float(apart / norm)})
    return rows


# --- the record ------------------------------------------------------------------------------------------------------


def summed(rows: list[Row]) -> list[Row]:
    """For each plan its time over wlb's, and how far losses and gradients are apart at most."""
    result = []
    for sync in PLANS:
        of_plan = {name: [row for row in rows if (row["meet"], row["plan"]) == (sync, name)] for name in PLANS[sync]}
        for name, of in of_plan.items():
            over_wlb = {
                f"{clock}_over_wlb": sum(np.min(row[clock]) for row in of)
                / sum(np.min(row[clock]) for row in of_plan["wlb"])
                for clock in ("wall", "processor")
            }
            apart = {key: max(row[key] for row in of) for key in ("loss_apart", "gradients_apart")}
            costs = float(np.mean([row["once" if sync == "step" else "every"] for row in of]))
            result.append({"meet": sync, "plan": name, **over_wlb, "over_even_by_costs": costs, **apart})
    return result


def main() -> None:
    parser = options(__doc__, lengths=True, record="rl_clock.json")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of samples")
    parser.add_argument("--repeats", type=int, default=4, help="times that each plan trains each round")
    given = parse(parser)
    ((name, lengths),) = list(sources(given.lengths[:1], documents=20_000).items())
    rows, _ = processes.run(RANKS, timed, lengths, given.rounds, given.repeats, timeout=3600.0)
    found = summed(rows)
    tables(110).print(clock_table(found))
    about = machine() | {"packages": {name: package_version(name) for name in ("torch", "verl")}}
    write_record(given.record, rounded({"machine": about, "lengths": name, "plans": found, "rows": rows}))


if __name__ == "__main__":
    main()
