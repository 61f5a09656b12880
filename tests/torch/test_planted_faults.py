"""`verify` names each fault that is planted, on data-parallel, context-parallel and pipeline ranks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.small_decoder import WIDTH, Decoder, Loop, alone, dynamic_step, step_of, with_shard_of_one
from wlb.torch.data import IGNORE, PackedBatch

LAYOUTS = {"dp": {"dp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}}


class Planted:
    """A right model, loop and step on this layout, of which a fault changes something."""

    def __init__(self, mesh: Any, seed: int, **model: Any) -> None:
        self.mesh, self.seed = mesh, seed
        self.step: Any = step_of(mesh, seed)
        self.make(**model)

    def make(self, seed: int | None = None, **model: Any) -> None:
        pipeline = self.mesh["pp"]
        stage, stages = pipeline.get_local_rank(), pipeline.size()
        self.model = Decoder(self.seed if seed is None else seed, stage=stage, num_stages=stages, **model)
        given: Any = self.model
        if stages > 1:
            group = pipeline.get_group()
            given = wt.VarlenPipelineStage(self.model, stage, stages, "cpu", group=group, hidden_size=WIDTH)
        self.loop = Loop(given, self.mesh)

    def verify(self) -> None:
        given = [self.loop.model] if self.mesh["pp"].size() > 1 else self.loop.model
        wt.verify(given, self.step, train=self.loop, alone=alone, group=self.loop.share, report=None)


def own_positions(case: Planted) -> None:
    case.make(own=True)


def positions_of_a_part(case: Planted) -> None:
    case.loop.batch = lambda batch: replace(batch, position_ids=torch.arange(batch.tokens.numel()))


def one_document(case: Planted) -> None:
    if case.mesh["cp"].size() > 1:
        case.step = step_of(case.mesh, case.seed, "per_sequence")
    case.loop.batch = with_shard_of_one


def another_group(case: Planted) -> None:
    """Attention of each rank alone."""

    def local(batch: PackedBatch) -> PackedBatch:
        numbers = np.searchsorted(
            np.cumsum(batch.shard.lengths), batch.shard.rank(batch.cp_rank).token_indices, side="right"
        )
        lengths = np.unique(numbers, return_counts=True)[1]
        return replace(batch, shard=wlb.shard(lengths, cp_size=1))

    case.loop.batch = local


def shifted_again(labels: Tensor) -> Tensor:
    return torch.cat([labels[1:], labels.new_full((min(labels.numel(), 1),), IGNORE)])


def shifted_twice(case: Planted) -> None:
    case.loop.batch = lambda batch: replace(batch, labels=shifted_again(batch.labels))


def shifted_in_a_part(case: Planted) -> None:
    case.loop.batch = lambda batch: replace(batch, labels=shifted_again(batch.tokens))


def prompts_too(case: Planted) -> None:
    """Every token of a document predicts the next, as if no label were masked."""

    def unmasked(batch: PackedBatch) -> PackedBatch:
        shard = batch.shard
        mine = torch.from_numpy(shard.rank(batch.cp_rank).token_indices.astype(np.int64))
        whole = torch.zeros(2, shard.num_tokens + 1, dtype=torch.int64)
        whole[0, mine], whole[1, mine] = batch.tokens, batch.labels - IGNORE
        group = case.loop.group(batch)
        if group is not None:
            dist.all_reduce(whole, group=group)
        labels = whole[0, 1:].clone()
        ends = torch.from_numpy(np.cumsum(shard.lengths).astype(np.int64)) - 1
        labels[ends] = whole[1, ends] + IGNORE
        return replace(batch, labels=labels[mine])

    case.loop.batch = unmasked


def divided(case: Planted) -> None:
    if case.mesh["pp"].size() > 1:
        case.loop.loss = lambda logits, labels, valid: _sum(logits, labels) / valid / 2
    else:
        case.loop.model = DistributedDataParallel(case.model)
        case.loop.exchange = lambda loop, step: None


def means(case: Planted) -> None:
    def mean(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
        return _sum(logits, labels) / max(int((labels != IGNORE).sum()), 1)

    case.loop.loss = mean


def _sum(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")


def other_ranks(case: Planted) -> None:
    """Wrapped over one rank alone."""
    alone_here = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    case.loop.model = DistributedDataParallel(case.model, process_group=alone_here)
    case.loop.exchange = lambda loop, step: None


def seeded_apart(case: Planted) -> None:
    case.make(seed=dist.get_rank())


def sampled_twice(case: Planted) -> None:
    step, rank = case.step, dist.get_rank()
    case.step = replace(step, micro_batches=step.micro_batches[rank::2])


def not_tied(case: Planted) -> None:
    if case.mesh["pp"].size() > 1:
        case.make(tied=True)
    else:
        case.model.config.tie_word_embeddings = True


def not_added(case: Planted) -> None:
    """Copies of a weight that stages share, whose gradients are not added up."""
    case.make(tied=True)
    case.kept = wt.TiedWeights(case.model.embedding.weight, group=case.mesh["pp"].get_group())  # type: ignore[attr-defined]


def statistics(case: Planted) -> None:
    case.make(norm=nn.BatchNorm1d)


def left_in_eval(case: Planted) -> None:
    case.model.eval()


def eval_in_loop(case: Planted) -> None:
    case.loop.before = lambda loop: loop.modules.train(False)


def stepped(case: Planted) -> None:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    exchange = case.loop.exchange

    def and_step(loop: Loop, step: Any) -> None:
        exchange(loop, step)
        optimizer.step()

    case.loop.exchange = and_step


FAULTS: dict[str, tuple[Callable[[Planted], None], str, str]] = {
    "positions made by the model": (own_positions, "dp cp pp", "position"),
    "positions of the part": (positions_of_a_part, "dp cp pp", "is trained at other positions"),
    "attention over the row": (one_document, "dp cp pp", "lets documents of a row see each other"),
    "attention of one rank": (another_group, "cp", "attention over the tokens of one context-parallel rank"),
    "labels shifted twice": (shifted_twice, "dp cp pp", "labels shifted twice"),
    "labels shifted in a part": (shifted_in_a_part, "dp cp pp", "labels that were shifted on each rank"),
    "masks": (prompts_too, "dp cp pp", "learns tokens whose labels are masked"),
    "divisor": (divided, "dp cp pp", "0.5 times the gradient"),
    "mean of means": (means, "dp cp pp", "mean of the means of (parts of )?micro-batches"),
    "wrapper's ranks": (other_ranks, "dp cp", r"over ranks \[\d\], but ranks \[0, 1\] share the global batch"),
    "weights apart": (seeded_apart, "dp cp", "weights that differ between ranks"),
    "sampler twice": (sampled_twice, "dp cp pp", "a sampler or a loader is wrapped twice"),
    "tied weights": (not_tied, "dp cp pp", "says tie_word_embeddings = True, .* two weights"),
    "tied gradients": (not_added, "pp", "without the gradient of the others"),
    "batch statistics": (statistics, "dp cp pp", "statistics of whole rows in BatchNorm1d"),
    "evaluation mode": (left_in_eval, "dp cp pp", "trained in evaluation mode"),
    "evaluation mode in the loop": (eval_in_loop, "dp cp pp", "trained in evaluation mode"),
    "optimizer step": (stepped, "dp cp pp", "holds an optimizer step"),
}


def planted(rank: int, layout: str, seeds: list[int], only: str = "") -> dict[tuple[str, int], str]:
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(**LAYOUTS[layout], device_type="cpu")
    found = {}
    for seed in seeds:
        if not only:
            Planted(mesh, seed).verify()  # nothing is accused before
        for name, (plant, layouts, _) in FAULTS.items():
            if layout in layouts.split() and only in (name, ""):
                case = Planted(mesh, seed)
                plant(case)
                try:
                    case.verify()
                    found[name, seed] = ""
                except wlb.WlbError as wrong:
                    found[name, seed] = str(wrong)
    return found


def named(layout: str, seeds: list[int], only: str = "") -> None:
    first, second = processes.run(2, planted, layout, seeds, only)
    assert first == second
    wrong = {key: text for key, text in first.items() if not re.search(FAULTS[key[0]][2], text)}
    assert not wrong, f"{len(wrong)} of {len(first)}: {wrong}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_planted_fault_is_named(layout: str) -> None:
    named(layout, [0])


def test_faults_that_look_alike_are_both_named() -> None:
    """Both micro-batches of this step have as many labels: the sum of their means is twice the gradient."""
    named("pp", [8], "mean of means")


def of_a_dynamic_plan(rank: int) -> list[str]:
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(dp=2, device_type="cpu")
    step = dynamic_step(mesh)
    groups = wt.ContextParallelGroups(mesh)
    local = replace_positions(Loop(Decoder(), mesh, groups=groups))
    made = Loop(Decoder(own=True), mesh, groups=groups)
    return [refused(loop, step) for loop in (local, made)]


def replace_positions(loop: Loop) -> Loop:
    loop.batch = lambda batch: replace(batch, position_ids=torch.arange(batch.tokens.numel()))
    return loop


def refused(loop: Loop, step: Any) -> str:
    with pytest.raises(wlb.WlbError) as raised:
        wt.verify(loop.model, step, train=loop, alone=alone, group=loop.share, report=None)
    return str(raised.value)


def test_positions_of_a_dynamic_plan_are_named() -> None:
    for passed, made in processes.run(2, of_a_dynamic_plan):
        assert "is trained at other positions" in passed
        assert "divided over context-parallel ranks" in made
        assert "positions are those of this rank's part" in made


def over_other_ranks(rank: int) -> list[str]:
    """As wrapped before context parallelism came: over data-parallel ranks alone."""
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(dp=2, cp=2, device_type="cpu")
    step, found = step_of(mesh, 0), []
    for wrapped in (
        DistributedDataParallel(Decoder(), process_group=mesh["dp"].get_group()),
        fully_shard(Decoder(), mesh=mesh["dp"]),
    ):
        loop = Loop(wrapped, mesh, exchange=lambda loop, step: None)
        found.append(refused(loop, step))
    return found


def test_wrappers_over_data_parallel_ranks_alone_are_named() -> None:
    for texts in processes.run(4, over_other_ranks):
        for text in texts:
            assert re.search(r"over ranks \[\d, \d\], but ranks \[0, 1, 2, 3\] share the global batch", text), text


@pytest.mark.long
@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for name, (_, layouts, _) in FAULTS.items() for layout in layouts.split()]
)
def test_each_planted_fault_is_named_whatever_the_seed(layout: str, name: str) -> None:
    named(layout, [*range(25)], name)


def right(rank: int, layout: str, seeds: list[int]) -> None:
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(**LAYOUTS[layout], device_type="cpu")
    for seed in seeds:
        Planted(mesh, seed).verify()


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_accused_whatever_the_seed(layout: str) -> None:
    processes.run(2, right, layout, [*range(25)])
