"""`verify` proves a step of a round: the packed, rank-split, weighted step trains the mean over its samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import wlb
import wlb.torch as wt
from examples.llama import LlamaConfig, LlamaStage
from tests.torch import processes
from tests.torch.test_training import Network
from wlb.torch.data import IGNORE, PackedBatch, Step

LENGTHS = np.array([30, 9, 17, 41, 12, 25, 8, 19, 33, 14, 22, 11])
PROMPTS = np.arange(12) // 3
LOSS_TOKENS = np.array([20, 3, 9, 35, 0, 11, 4, 6, 16, 2, 13, 5])  # one sample has nothing to learn
COST = wlb.CostModel(attention=1.0, linear=50.0)


def samples() -> list[wt.Document]:
    rng = np.random.default_rng(5)
    made = []
    for number, (length, learnt) in enumerate(zip(LENGTHS, LOSS_TOKENS, strict=True)):
        tokens = rng.integers(1, 11, length)
        labels = np.where(np.arange(length) < length - learnt, IGNORE, tokens)
        made.append(wt.Document(tokens, number, labels=labels))
    return made


def step_of(
    mean: Any = "sample", *, number: int = 0, rank: int | None = None, size: int | None = None, **options: Any
) -> Step[PackedBatch]:
    size = size or (dist.get_world_size() if dist.is_initialized() else 2)
    rank = dist.get_rank() if rank is None else rank
    plan = wlb.rl.plan(LENGTHS, dp_size=size, max_tokens=64, cost_model=COST, groups=PROMPTS, num_steps=2)
    given: dict[str, Any] = {"lengths": LENGTHS, "loss_tokens": LOSS_TOKENS, "dp_rank": rank, **options}
    return wt.round_step(samples(), plan, step=number, mean=mean, **given)


def by_hand(model: nn.Module, weighted: bool = True) -> Callable[[Step[PackedBatch]], Tensor]:
    """A loop whose wrapper averages gradients over ranks."""

    def train(step: Step[PackedBatch]) -> Tensor:
        valid, total = wt.count_valid_tokens(step), torch.zeros(())
        for batch in step.micro_batches:
            losses = nn.functional.cross_entropy(model(batch), batch.labels, ignore_index=IGNORE, reduction="none")
            loss = (losses * (batch.columns["loss_weights"] if weighted else 1)).sum() / max(valid, 1)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        return total / (dist.get_world_size() if step.mean is not None and step.mean.averaged_over > 1 else 1)

    return train


def proved(rank: int, mean: str, count_empty: bool) -> str:
    warnings.simplefilter("ignore")
    model = DistributedDataParallel(Network())
    proof = wt.verify(model, step_of(mean, count_empty=count_empty), report=None)
    averaged = step_of(mean, count_empty=count_empty, averaged_over=2)
    other = DistributedDataParallel(Network())
    wt.verify(other, averaged, train=by_hand(other), report=None)
    return str(proof)


@pytest.mark.parametrize("count_empty", [False, True])
@pytest.mark.parametrize("mean", ["token", "sample", "prompt"])
def test_each_mean_is_proved(mean: str, count_empty: bool) -> None:
    """By `train_step`, and by a loop under DDP that keeps its average."""
    for table in processes.run(2, proved, mean, count_empty):
        assert "ranks" in table
        assert "wrong" not in table


def unweighted(rank: int) -> None:
    """The mean over tokens, where that over samples is meant."""
    model = DistributedDataParallel(Network())
    wt.verify(model, step_of("sample", averaged_over=2), train=by_hand(model, weighted=False), report=None)


def averaged(rank: int) -> None:
    """DDP's average is not undone."""
    model = DistributedDataParallel(Network())
    wt.verify(model, step_of("sample"), train=by_hand(model), report=None)


def other_weights(rank: int) -> None:
    """Weights of a plan are broken: those of the mean over tokens for every mean."""
    own = wlb.rl.RoundPlan.weights
    wlb.rl.RoundPlan.weights = lambda plan, tokens, *, mean, **more: own(plan, tokens, mean="token", **more)  # type: ignore[method-assign, assignment]
    wt.verify(Network(), step_of("prompt"), report=None)


@pytest.mark.parametrize(
    ("loop", "accused"),
    [(unweighted, "loss_weights"), (averaged, "averaged over 2 ranks"), (other_weights, "loss_weights")],
)
def test_a_loop_that_trains_another_mean_is_accused(loop: Callable[[int], None], accused: str) -> None:
    with pytest.raises(processes.RankFailed, match=accused):
        processes.run(2, loop)


def trained(rank: int, mean: Any, number: int) -> list[np.ndarray]:
    model = Network().double()
    wt.train_step(model, step_of(mean, number=number))
    return [parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("mean", ["token", "sample", "prompt"])
def test_the_whole_samples_train_the_mean(mean: str, number: int) -> None:
    """Gradients of whole samples on two ranks, beside the mean over samples alone, written out."""
    expected = gradients_of_samples(Network().double(), mean, number)
    for found in processes.run(2, trained, mean, number):
        for mine, true in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, true, rtol=1e-6, atol=1e-7)  # the column is float32


def gradients_of_samples(model: nn.Module, mean: Any, number: int, ranks: int = 2) -> list[np.ndarray]:
    """Gradients of the mean over the samples of a step, each sample computed alone."""
    held = samples()
    batches = [batch for rank in range(ranks) for batch in of_rank(rank, mean, number, ranks)]
    here = np.unique(np.concatenate([batch.document_ids for batch in batches]))
    losses = []
    for sample in here.tolist():
        batch = wt.collate([held[sample]])
        losses.append(nn.functional.cross_entropy(model(batch), batch.labels, ignore_index=IGNORE, reduction="sum"))
    learnt = LOSS_TOKENS[here]
    if mean == "token":
        whole = torch.stack(losses).sum() / learnt.sum()
    elif mean == "sample":
        means = [loss / int(count) for loss, count in zip(losses, learnt, strict=True) if count]
        whole = torch.stack(means).mean()
    else:
        of_prompts = [
            torch.stack([loss for loss, prompt in zip(losses, PROMPTS[here], strict=True) if prompt == one]).sum()
            / int(learnt[PROMPTS[here] == one].sum())
            for one in np.unique(PROMPTS[here])
        ]
        whole = torch.stack(of_prompts).mean()
    whole.backward()  # type: ignore[no-untyped-call]
    return [parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None]


class Attending(nn.Module):
    """The examples' Llama, on the ranks of a context-parallel group."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        shape = {"hidden_size": 16, "ffn_hidden_size": 24, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1}
        self.stage, self.group = LlamaStage(LlamaConfig(**shape, vocab_size=11)), group
        self.stage.initialize(seed=3)

    def forward(self, batch: PackedBatch) -> Tensor:
        group = self.group if batch.cp_size > 1 else None  # `verify` runs samples alone, on one rank
        result: Tensor = self.stage(batch.tokens, position_ids=batch.position_ids, shard=batch.shard, group=group)
        return result


def trained_in_context(rank: int, mean: Any, number: int) -> tuple[list[np.ndarray], str]:
    """On context-parallel groups of two neighbours; and what `verify` says of the step."""
    warnings.simplefilter("ignore")
    size = dist.get_world_size() // 2
    groups = [dist.new_group([first, first + 1]) for first in range(0, 2 * size, 2)]
    options: dict[str, Any] = {"number": number, "rank": rank // 2, "size": size, "cp_rank": rank % 2, "cp_size": 2}
    model = Attending(groups[rank // 2])
    proof = wt.verify(model, step_of(mean, **options), report=None)
    wt.train_step(model, step_of(mean, **options))
    return [parameter.grad.numpy() for parameter in model.parameters() if parameter.grad is not None], str(proof)


@pytest.mark.parametrize(("mean", "ranks"), [("token", 2), ("prompt", 2), ("sample", 4)])
def test_context_parallel_ranks_train_the_mean(mean: str, ranks: int) -> None:
    """Samples that are divided over two ranks, on one and two data-parallel ranks, beside each sample alone."""
    expected = gradients_of_samples(Attending(), mean, 1, ranks // 2)
    for found, proof in processes.run(ranks, trained_in_context, mean, 1):
        assert "wrong" not in proof
        for mine, true in zip(found, expected, strict=True):
            np.testing.assert_allclose(mine, true, rtol=1e-4, atol=1e-6)


def of_rank(rank: int, mean: Any, number: int, ranks: int) -> list[PackedBatch]:
    return step_of(mean, number=number, rank=rank, size=ranks).micro_batches


def test_what_is_refused() -> None:
    with pytest.raises(wlb.WlbError, match="loss_tokens say"):
        step_of(rank=0, loss_tokens=LENGTHS)
    with pytest.raises(wlb.WlbError, match=r"samples\[\d+\] has \d+ tokens"):
        step_of(rank=0, lengths=LENGTHS - 1)
    with pytest.raises(wlb.WlbError, match="lengths are 11, but the plan has 12"):
        step_of(rank=0, lengths=LENGTHS[1:])
    with pytest.raises(wlb.WlbError, match="step"):
        step_of(rank=0, number=2)
