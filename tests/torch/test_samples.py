"""Sums and counts of each sample under any cut, beside one process that has whole samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.test_dynamic_cp_loader import DATA, make
from wlb.torch.groups import ContextParallelGroups, build_mesh


def documents() -> list[wt.Document]:
    """Documents of unequal lengths, with prompts that bear no loss; one has no loss at all."""
    rng, made = np.random.default_rng(0), []
    for number, length in enumerate((37, 5, 1, 64, 12)):
        tokens = rng.integers(1, 60, length)
        labels = np.where(np.arange(length) < (length if number == 4 else length // 3), wt.IGNORE, tokens)
        made.append(wt.Document(tokens, number, labels=labels))
    return made


class Scores(torch.nn.Module):
    """A score for each (token, label), in float64."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(260, 260, generator=generator, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.table[tokens, labels.clamp(min=0)].tanh() * (labels != wt.IGNORE)


def loss_of(sums: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """As of sequences: no sum over tokens, but a function of each sample's mean."""
    return ((sums / counts.clamp(min=1)).exp() * torch.arange(1, sums.numel() + 1)).sum()


def found(batch: Any, scores: Scores, group: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(batch, wt.ForestBatch):
        values = batch.to_samples(scores(batch.tokens[batch.edge_rows], batch.edge_targets))
    else:
        values = scores(batch.tokens, batch.labels)
    return wt.sample_sums(values, batch, group=group), wt.sample_predictions(batch, group=group)


def alone(batch: Any) -> tuple[list[int], float, np.ndarray]:
    scores = Scores()
    sums, counts = found(batch, scores)
    loss = loss_of(sums, counts)
    loss.backward()
    assert scores.table.grad is not None
    return counts.tolist(), loss.item(), scores.table.grad.numpy()


def on_rank(batch: Any, group: Any, members: int) -> tuple[list[int], float, np.ndarray]:
    """Counts, the loss and its gradients, added up over the ranks of the group."""
    scores = Scores()
    sums, counts = found(batch, scores, group)
    loss = loss_of(sums, counts) / members
    loss.backward()
    assert scores.table.grad is not None
    total = torch.tensor(loss.item(), dtype=torch.float64)
    if members > 1:
        dist.all_reduce(scores.table.grad, group=group)
        dist.all_reduce(total, group=group)
    return counts.tolist(), total.item(), scores.table.grad.numpy()


def same(mine: tuple[list[int], float, np.ndarray], whole: tuple[list[int], float, np.ndarray]) -> None:
    assert mine[0] == whole[0]
    np.testing.assert_allclose(mine[1], whole[1], rtol=0, atol=1e-10)
    np.testing.assert_allclose(mine[2], whole[2], rtol=0, atol=1e-10)


def packed(rank: int, size: int, strategy: str) -> Any:
    return wt.collate(documents(), cp_rank=rank, cp_size=size, strategy=strategy, multiple_of_tokens=16)


def static(rank: int, size: int, strategy: str) -> Any:
    return on_rank(packed(rank, size, strategy), None, size)


@pytest.mark.parametrize("strategy", ["per_sequence", "per_document", "contiguous"])
@pytest.mark.parametrize("size", [2, 3])
def test_documents(size: int, strategy: str) -> None:
    whole = alone(packed(0, 1, "per_document"))
    assert whole[0] == [25, 4, 0, 43, 0]
    for mine in processes.run(size, static, size, strategy):
        same(mine, whole)


def tree(rank: int, size: int) -> Any:
    rng = np.random.default_rng(1)
    prompt = rng.integers(1, 60, 21)
    samples = [np.append(prompt, rng.integers(1, 60, length)) for length in (3, 17, 8)] + [rng.integers(1, 60, 9)]
    offsets = np.cumsum([0, *(sample.size for sample in samples)])
    forest = wlb.PrefixForest.from_tokens(np.concatenate(samples), offsets)
    return wt.collate(samples, forest, cp_rank=rank, cp_size=size, multiple_of_tokens=8)


def of_tree(rank: int, size: int) -> Any:
    return on_rank(tree(rank, size), None, size)


@pytest.mark.parametrize("size", [2, 3])
def test_forests(size: int) -> None:
    whole = alone(tree(0, 1))
    for mine in processes.run(size, of_tree, size):
        same(mine, whole)


def dynamic(rank: int) -> list[tuple[list[int], tuple[list[int], float, np.ndarray], int]]:
    groups = ContextParallelGroups(build_mesh(dp=2, cp=2, device_type="cpu"))
    loader = make([[wt.Documents(DATA)[number] for number in range(rank, 40, 4)]], 4)
    (step,) = loader
    loader.close()
    batches = [(batch, groups.of(batch)) for batch in step.micro_batches]
    return [
        (batch.document_ids.tolist(), on_rank(batch, group, batch.cp_size), batch.cp_size) for batch, group in batches
    ]


def test_dynamic_cp() -> None:
    sizes = set()
    for of_rank in processes.run(4, dynamic):
        for ids, mine, size in of_rank:
            sizes.add(size)
            same(mine, alone(wt.collate([wt.Documents(DATA)[number] for number in ids])))
    assert len(sizes) > 1, "one size of groups only"


def test_wrong_calls_are_refused() -> None:
    batch = packed(0, 1, "per_document")
    with pytest.raises(wlb.WlbError, match=r"values has shape \(3,\): must be \[128, ...\], one for each token"):
        wt.sample_sums(torch.zeros(3), batch)
    with pytest.raises(wlb.WlbError, match="one for each prediction: what to_samples gives"):
        wt.sample_sums(torch.zeros(3), tree(0, 1))


def with_another_group(rank: int) -> str:
    with pytest.raises(wlb.WlbError) as refused:
        wt.sample_predictions(packed(rank, 3, "per_document"))
    return str(refused.value)


def test_another_group_is_refused() -> None:
    said = processes.run(2, with_another_group)
    assert said == ["group has 2 ranks, and the batch is divided over 3: give its context-parallel group"] * 2


def weighted(rank: int, mean: Any) -> np.ndarray:
    """The gradient that DDP's average over ranks leaves of weight times summed token loss."""
    plan, weights = planned(mean)
    scores = Scores()
    for held in plan.micro_batches(0, rank):
        batch = wt.collate([documents()[sample] for sample in held])
        sums = wt.sample_sums(scores(batch.tokens, batch.labels), batch)
        (sums * torch.from_numpy(weights[held])).sum().backward()
    assert scores.table.grad is not None
    dist.all_reduce(scores.table.grad)
    return (scores.table.grad / dist.get_world_size()).numpy()


def planned(mean: Any) -> tuple[Any, np.ndarray]:
    lengths = [document.tokens.size for document in documents()]
    cost = wlb.CostModel(attention=1.0, linear=100.0)
    plan = wlb.rl.plan(lengths, dp_size=2, max_tokens=70, cost_model=cost, groups=[0, 0, 1, 1, 2])
    return plan, plan.weights([25, 4, 0, 43, 0], mean=mean)


@pytest.mark.parametrize("mean", ["token", "sample", "prompt"])
def test_weights_of_a_round_train_the_mean_that_is_meant(mean: Any) -> None:
    scores = Scores()
    found = [scores(batch.tokens, batch.labels) for batch in (wt.collate([document]) for document in documents())]
    totals, counts = [values.sum() for values in found], [25, 4, 0, 43, 0]
    if mean == "token":
        loss = sum(totals) / 72
    elif mean == "sample":
        loss = (totals[0] / 25 + totals[1] / 4 + totals[3] / 43) / 3
    else:
        loss = ((totals[0] + totals[1]) / 29 + totals[3] / 43) / 2
    loss.backward()
    assert scores.table.grad is not None
    assert [int((wt.collate([document]).labels != wt.IGNORE).sum()) for document in documents()] == counts
    for gradient in processes.run(2, weighted, mean):
        np.testing.assert_allclose(gradient, scores.table.grad.numpy(), rtol=0, atol=1e-10)
