"""`verify` refuses each fault that is planted, in each precision, on one rank and on several."""

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

LAYOUTS = {"one": {"dp": 1}, "dp": {"dp": 2}, "cp": {"cp": 2}, "pp": {"pp": 2}}
PRECISIONS = {
    "float32, 0.2": (torch.float32, 0.2),
    "bfloat16, 0.02": (torch.bfloat16, 0.02),
    "float32, 0.02": (torch.float32, 0.02),
    "bfloat16, 0.2": (torch.bfloat16, 0.2),
}


class Planted:
    """A right model, loop and step on this layout, of which a fault changes something."""

    def __init__(self, mesh: Any, seed: int, precision: str) -> None:
        self.mesh, self.seed = mesh, seed
        self.dtype, self.std = PRECISIONS[precision]
        self.step: Any = step_of(mesh, seed)
        self.make()

    def make(self, seed: int | None = None, **model: Any) -> None:
        pipeline = self.mesh["pp"]
        stage, stages = pipeline.get_local_rank(), pipeline.size()
        made = Decoder(self.seed if seed is None else seed, stage=stage, num_stages=stages, std=self.std, **model)
        self.model = made.to(self.dtype)
        given: Any = self.model
        if stages > 1:
            group = pipeline.get_group()
            given = wt.VarlenPipelineStage(
                self.model, stage, stages, "cpu", group=group, hidden_size=WIDTH, dtype=self.dtype
            )
        self.loop = Loop(given, self.mesh)

    def verify(self) -> None:
        given = [self.loop.model] if self.mesh["pp"].size() > 1 else self.loop.model
        wt.verify(given, self.step, train=self.loop, alone=alone, group=self.loop.share, report=None)


# --- documents see each other ---


def one_document(case: Planted) -> None:
    """Attention over the whole row."""
    if case.mesh["cp"].size() > 1:
        case.step = step_of(case.mesh, case.seed, "per_sequence")
    case.loop.batch = with_shard_of_one


def a_boundary_missing(case: Planted) -> None:
    """Attention in which the first two documents are one."""

    def joined(batch: PackedBatch) -> PackedBatch:
        lengths = batch.shard.lengths.astype(np.int64)
        if batch.cp_size > 1 or lengths.size < 2:
            return batch
        return replace(batch, shard=wlb.shard(np.array([lengths[0] + lengths[1], *lengths[2:]]), cp_size=1))

    case.loop.batch = joined


class Convolution(nn.Module):
    """A short causal convolution, as LFM2 and Mamba have it."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.convolution(nn.functional.pad(x.T[None], (2, 0)))[0].T  # type: ignore[no-any-return]


class State(nn.Module):
    """A state that goes along the row, and fades."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        state, found = x.new_zeros(WIDTH), []
        for value in self.inner(x):
            state = 0.5 * state + value
            found.append(x.new_zeros(WIDTH) + state)
        return x + torch.stack(found) if found else x


class Mean(nn.Module):
    """A scale of the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.factor * x.float().mean(0).to(x.dtype)


def convolution(case: Planted) -> None:
    case.make(along=Convolution)


def state(case: Planted) -> None:
    case.make(along=State)


def mean_of_row(case: Planted) -> None:
    case.make(along=Mean)


def statistics(case: Planted) -> None:
    case.make(norm=nn.BatchNorm1d)


# --- the place and the length of a row matter ---


class ByRow(nn.Module):
    """A scale that follows the longest position of the row, as the factors of dynamic RoPE."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * (1 + self.factor * int(positions.max() if positions.numel() else 0) / 64)


class ByLength(nn.Module):
    """A scale that follows the tokens of the row, as NEFTune's noise."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * (1 + self.factor * x.shape[0] ** -0.5)


def own_positions(case: Planted) -> None:
    case.make(own=True)


def positions_of_a_part(case: Planted) -> None:
    case.loop.batch = lambda batch: replace(batch, position_ids=torch.arange(batch.tokens.numel()))


def by_row(case: Planted) -> None:
    case.make(along=ByRow)


def by_length(case: Planted) -> None:
    case.make(along=ByLength)


# --- labels and divisors ---


def shifted_again(labels: Tensor) -> Tensor:
    return torch.cat([labels[1:], labels.new_full((min(labels.numel(), 1),), IGNORE)])


def shifted_twice(case: Planted) -> None:
    case.loop.batch = lambda batch: replace(batch, labels=shifted_again(batch.labels))


def not_shifted(case: Planted) -> None:
    case.loop.batch = lambda batch: replace(batch, labels=batch.tokens.where(batch.labels != IGNORE, IGNORE))


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
    case.loop.loss = lambda logits, labels, valid: _sum(logits, labels) / valid / 2


def means(case: Planted) -> None:
    def mean(logits: Tensor, labels: Tensor, valid: int) -> Tensor:
        return _sum(logits, labels) / max(int((labels != IGNORE).sum()), 1)

    case.loop.loss = mean


def _sum(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")


def dropped(case: Planted) -> None:
    """The first micro-batch is never trained."""
    first = [True]

    def begin(loop: Loop) -> None:
        first[0] = True

    def without(batch: PackedBatch) -> PackedBatch:
        mine, first[0] = first[0], False
        return replace(batch, labels=torch.full_like(batch.labels, IGNORE)) if mine else batch

    case.loop.before, case.loop.batch = begin, without


# --- ranks and loops ---


def another_group(case: Planted) -> None:
    """Attention of each rank alone."""

    def local(batch: PackedBatch) -> PackedBatch:
        numbers = np.searchsorted(
            np.cumsum(batch.shard.lengths), batch.shard.rank(batch.cp_rank).token_indices, side="right"
        )
        lengths = np.unique(numbers, return_counts=True)[1]
        return replace(batch, shard=wlb.shard(lengths, cp_size=1))

    case.loop.batch = local


def averaged_twice(case: Planted) -> None:
    case.loop.model = DistributedDataParallel(case.model)
    case.loop.exchange = lambda loop, step: None


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


# Each fault, its layouts, what the error says, and whether hypothetical gradients had passed it in some precision.
SEE = "lets documents of a row see each other"
COMPANY = "where documents share a row|than its documents alone"
FAULTS: dict[str, tuple[Callable[[Planted], None], str, str]] = {
    "attention over the row": (one_document, "one dp cp pp", SEE),
    "a boundary missing": (a_boundary_missing, "one dp", SEE),
    "convolution (passed)": (convolution, "one dp pp", f"{SEE}.*It has Conv1d, which look along the row"),
    "state (passed)": (state, "one dp", SEE),
    "mean of the row": (mean_of_row, "one", SEE),
    "batch statistics": (statistics, "one dp cp pp", f"{SEE}.*BatchNorm1d"),
    "positions made by the model (passed)": (own_positions, "one dp cp pp", COMPANY),
    "positions of the part (passed)": (positions_of_a_part, "one dp cp pp", COMPANY),
    "RoPE by the row (passed)": (by_row, "one dp", COMPANY),
    "noise by the row (passed)": (by_length, "one dp", COMPANY),
    "labels shifted twice": (shifted_twice, "one dp cp pp", "the batch's labels"),
    "labels not shifted": (not_shifted, "one dp cp pp", "the loss is not that of the batch's labels"),
    "labels shifted in a part": (shifted_in_a_part, "one dp cp pp", "the batch's labels|its halves"),
    "masks": (prompts_too, "one dp cp pp", "the batch.s labels"),
    "divisor": (divided, "one dp cp pp", "0.5 times the gradient"),
    "mean of means": (means, "one dp cp pp", "halves"),
    "dropped documents": (dropped, "one dp cp pp", "micro-batches are left out"),
    "attention of one rank": (another_group, "cp", "the group|position_ids and group"),
    "averaged twice": (averaged_twice, "dp cp", "0.5 times the gradient.*averaged over 2 ranks"),
    "wrapper's ranks": (other_ranks, "dp cp", r"over ranks \[\d\], but ranks \[0, 1\] share|another gradient on each"),
    "weights apart": (seeded_apart, "dp cp", "weights that differ between ranks"),
    "sampler twice": (sampled_twice, "dp cp pp", "a sampler or a loader is wrapped twice"),
    "tied weights": (not_tied, "one dp cp pp", "says tie_word_embeddings = True, .* two weights"),
    "tied gradients": (not_added, "pp", "than its documents alone"),
    "evaluation mode": (left_in_eval, "one dp cp pp", "trained in evaluation mode"),
    "evaluation mode in the loop": (eval_in_loop, "one dp cp pp", "trained in evaluation mode"),
    "optimizer step": (stepped, "one dp cp pp", "holds an optimizer step"),
}


def planted(rank: int, layout: str, precision: str, seeds: list[int]) -> dict[tuple[str, int], str]:
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(**LAYOUTS[layout], device_type="cpu")
    found = {}
    for seed in seeds:
        Planted(mesh, seed, precision).verify()  # nothing is accused before
        for name, (plant, layouts, _) in FAULTS.items():
            if layout in layouts.split():
                case = Planted(mesh, seed, precision)
                plant(case)
                try:
                    case.verify()
                    found[name, seed] = ""
                except wlb.WlbError as wrong:
                    found[name, seed] = str(wrong)
    return found


def refused(layout: str, precision: str, seeds: list[int]) -> None:
    ranks = processes.run(1 if layout == "one" else 2, planted, layout, precision, seeds)
    assert ranks[0] == ranks[-1]
    wrong = {key: text for key, text in ranks[0].items() if not re.search(FAULTS[key[0]][2], text)}
    assert not wrong, "\n".join(
        [f"{len(wrong)} of {len(ranks[0])}:", *(f"{key}: {text}" for key, text in wrong.items())]
    )


QUICK = [("one", "float32, 0.2"), ("one", "bfloat16, 0.02"), ("cp", "bfloat16, 0.02"), ("pp", "float32, 0.2")]
SLOW = [(layout, precision) for layout in LAYOUTS for precision in PRECISIONS if (layout, precision) not in QUICK]


@pytest.mark.parametrize(("layout", "precision"), QUICK)
def test_each_planted_fault_is_refused(layout: str, precision: str) -> None:
    refused(layout, precision, [0])


@pytest.mark.long
@pytest.mark.parametrize(("layout", "precision"), SLOW)
def test_each_planted_fault_is_refused_on_all_layouts_in_all_precisions(layout: str, precision: str) -> None:
    refused(layout, precision, [0])


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_planted_fault_is_refused_whatever_the_seed(layout: str, precision: str) -> None:
    refused(layout, precision, [*range(1, 9)])


def of_a_dynamic_plan(rank: int) -> list[str]:
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(dp=2, device_type="cpu")
    step = dynamic_step(mesh)
    groups = wt.ContextParallelGroups(mesh)
    local = Loop(Decoder(), mesh, groups=groups)
    local.batch = lambda batch: replace(batch, position_ids=torch.arange(batch.tokens.numel()))
    return [accused(loop, step) for loop in (local, Loop(Decoder(own=True), mesh, groups=groups))]


def accused(loop: Loop, step: Any) -> str:
    with pytest.raises(wlb.WlbError) as raised:
        wt.verify(loop.model, step, train=loop, alone=alone, group=loop.share, report=None)
    return str(raised.value)


def test_positions_of_a_dynamic_plan_are_refused() -> None:
    for texts in processes.run(2, of_a_dynamic_plan):
        assert all(re.search(COMPANY, text) for text in texts), texts


def over_other_ranks(rank: int) -> list[str]:
    """As wrapped before context parallelism came: over data-parallel ranks alone."""
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(dp=2, cp=2, device_type="cpu")
    step = step_of(mesh, 0)
    wrapped = (
        DistributedDataParallel(Decoder(), process_group=mesh["dp"].get_group()),
        fully_shard(Decoder(), mesh=mesh["dp"]),
    )
    return [accused(Loop(each, mesh, exchange=lambda loop, step: None), step) for each in wrapped]


def test_wrappers_over_data_parallel_ranks_alone_are_named() -> None:
    for texts in processes.run(4, over_other_ranks):
        for text in texts:
            assert re.search(r"over ranks \[\d, \d\], but ranks \[0, 1, 2, 3\] share the global batch", text), text
