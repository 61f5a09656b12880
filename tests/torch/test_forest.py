"""Forests in training: every loss and gradient is that of one sample at a time, on one process and on groups."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.attention import keys
from wlb.torch.attention.plan import keys_plan

VOCABULARY, HEAD_DIM = 11, 4
CPU = torch.device("cpu")
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """Samples, and the options of attention under test."""

    samples: tuple[tuple[int, ...], ...]
    heads: tuple[int, int] = (4, 2)
    window: int | None = None


def grown(depth: int, seed: int) -> tuple[tuple[int, ...], ...]:
    """A chain of short turns at each of which another sample leaves: a tree of this depth."""
    random = np.random.default_rng(seed)
    history: tuple[int, ...] = (1,)
    samples = []
    for turn in range(depth):
        samples.append((*history, 9, *random.integers(0, 9, random.integers(1, 4)).tolist()))
        history = (*history, turn % 9)
    return (*samples, history)


GROUPS = tuple(
    (*range(2, 2 + prompt), 5, *completion) for prompt in (6, 3) for completion in ((), (1,), (1, 2, 3, 4, 1), (2, 2))
)
CASES = {
    "groups": Case(GROUPS),
    "one root for all": Case(tuple((7, first, *rest) for first in range(6) for rest in ((1, 2, 3), (1,)))),
    "one-token nodes": Case(((1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 3), (2,))),
    "depth 50": Case(grown(50, 0)),
    "no sharing": Case(((1, 2, 3), (2, 3, 4, 5), (3,))),
    "window": Case((*GROUPS, *grown(12, 1)), window=4),
    "all heads": Case(GROUPS, heads=(4, 4)),
    "long prompts": Case(
        tuple(
            (*(token % 9 for token in range(begin, begin + 100)), 9, *completion)
            for begin in (0, 1)
            for completion in ((1, 2), (2,), (3, 4), (6,), (7, 1), (8,), (0,), (5,), (4,))
        )
    ),
    "equal samples": Case(((1, 2, 3), (1, 2, 3), (1, 2))),
}


class Model(nn.Module):
    """Two layers of attention with positions; everything a shared token has depends on what is before it alone."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        torch.manual_seed(3)
        heads, kv_heads = case.heads
        width = heads * HEAD_DIM
        self.heads = [heads, kv_heads, kv_heads]
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(128, width)
        self.layers = nn.ModuleList(nn.Linear(width, sum(self.heads) * HEAD_DIM) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        self.double()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        x = self.tokens(tokens) + self.positions(positions)
        for layer, out in zip(self.layers, self.out, strict=True):
            q, k, v = layer(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, HEAD_DIM)).split(self.heads, 1)
            x = x + out(attend(q, k, v).flatten(1)).tanh()
        hidden: Tensor = x
        return hidden


def dense(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
    distance = torch.arange(len(q)).unsqueeze(1) - torch.arange(len(q))
    hidden = (distance < 0) | (distance >= (window or 1000))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def counts(sample: int, length: int) -> list[bool]:
    """Which tokens of a sample are learnt: another part in each, also of what they share."""
    return [(position + sample) % 3 != 0 for position in range(length)]


def documents(case: Case) -> list[wt.Document]:
    def labels(number: int, sample: tuple[int, ...]) -> list[int]:
        return [
            token if counts else wt.IGNORE for token, counts in zip(sample, counts(number, len(sample)), strict=True)
        ]

    return [wt.Document(sample, number, labels=labels(number, sample)) for number, sample in enumerate(case.samples)]


def losses(logp: Tensor, weights: Tensor, sample: Tensor, position: Tensor) -> Tensor:
    """Cross-entropy, a clipped ratio with an advantage of each sample's own, and a distance to a reference: summed."""
    old = -2.0 - 0.1 * (position % 5)
    advantage = torch.cos(sample.double() * 2.0 + 0.3)
    ratio = (logp - old).exp()
    clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    reference = -2.2 - 0.05 * (position % 7)
    distance = (reference - logp).exp() - (reference - logp) - 1
    return (weights * (-logp - clipped + 0.1 * distance)).sum()


@functools.cache
def one_by_one(case: Case) -> tuple[float, list[Tensor], int]:
    """Loss, gradients and counted predictions, sample after sample."""
    model = Model(case)
    total, predictions = torch.zeros((), dtype=torch.float64), 0
    for number, sample in enumerate(case.samples):
        tokens = torch.tensor(sample)
        hidden = model(tokens, torch.arange(len(sample)), functools.partial(dense, window=case.window))
        learnt = torch.tensor(counts(number, len(sample)))[1:]
        logp = model.head(hidden[:-1]).log_softmax(-1).gather(1, tokens[1:, None])[:, 0][learnt]
        position = torch.arange(1, len(sample))[learnt]
        total = total + losses(logp, torch.ones(()), torch.full_like(position, number), position)
        predictions += int(learnt.sum())
    total.backward()  # type: ignore[no-untyped-call]
    return total.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None], predictions


def as_a_forest(
    case: Case,
    group: dist.ProcessGroup | None = None,
    rank: int = 0,
    size: int = 1,
    multiple_of_tokens: int = 1,
    **transport: Any,
) -> tuple[float, list[Tensor], int]:
    model = Model(case)
    offsets = np.cumsum([0, *map(len, case.samples)])
    forest = wlb.PrefixForest.from_tokens([token for sample in case.samples for token in sample], offsets)
    batch = wt.collate(documents(case), forest, cp_rank=rank, cp_size=size, multiple_of_tokens=multiple_of_tokens)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return wt.context_parallel_attention(q, k, v, batch.shard, group=group, window=case.window, **transport)

    hidden = model(batch.tokens, batch.position_ids, attend)
    edges = model.head(hidden[batch.edge_rows]).log_softmax(-1).gather(1, batch.edge_targets[:, None])[:, 0]
    loss = losses(batch.to_samples(edges), torch.ones(()), batch.sample_of, batch.sample_positions)
    # What a loss of each token alone sums to is also a weighted sum over edges.
    entropy = batch.to_samples(edges).sum()
    torch.testing.assert_close(entropy, (edges * batch.edge_weights).sum(), rtol=1e-12, atol=1e-12)
    loss.backward()  # type: ignore[no-untyped-call]
    total = loss.detach()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    if group is not None:
        for tensor in (total, *gradients):
            dist.all_reduce(tensor, group=group)
    return total.item(), gradients, batch.num_valid_tokens


def assert_equal(found: tuple[float, list[Tensor], int], case: Case) -> None:
    loss, gradients, predictions = one_by_one(case)
    assert found[2] == predictions
    assert found[0] == pytest.approx(loss, rel=1e-12, abs=1e-12)
    for mine, theirs in zip(found[1], gradients, strict=True):
        # Of the largest entry: some entries are 0 but for rounding (a bias of keys moves all scores alike).
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-13 * theirs.abs().max().item())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("multiple_of_tokens", [1, 16])
def test_losses_and_gradients_are_those_of_one_sample_at_a_time(name: str, multiple_of_tokens: int) -> None:
    assert_equal(as_a_forest(CASES[name], multiple_of_tokens=multiple_of_tokens), CASES[name])


@pytest.mark.parametrize("multiple_of_tokens", [1, 16])
@pytest.mark.parametrize("once", [False, True])
def test_a_loss_of_routers_counts_shared_tokens_as_often_as_one_says(once: bool, multiple_of_tokens: int) -> None:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCABULARY, 64, 4, generator=generator, dtype=torch.float64, requires_grad=True)

    def balance(tokens: Tensor, positions: Tensor, weights: Tensor) -> tuple[float, Tensor]:
        logits = table[tokens, positions]  # of four experts
        loss = mixtral.load_balancing_loss_func((logits,), 4, 2, weights.unsqueeze(0))
        (gradient,) = torch.autograd.grad(loss, table)
        return loss.item(), gradient

    forest = wlb.PrefixForest.from_tokens(sum(GROUPS, ()), np.cumsum([0, *map(len, GROUPS)]))
    batch = wt.collate(GROUPS, forest, multiple_of_tokens=multiple_of_tokens)
    weights = (batch.sample_counts > 0).long() if once else batch.sample_counts
    found = balance(batch.tokens, batch.position_ids, weights)

    rows = [(token, position) for sample in GROUPS for position, token in enumerate(sample)]
    if once:  # of equal prefixes one
        prefixes = dict.fromkeys(sample[: position + 1] for sample in GROUPS for position in range(len(sample)))
        rows = [(prefix[-1], len(prefix) - 1) for prefix in prefixes]
    tokens, positions = torch.tensor(rows).unbind(1)
    expected = balance(tokens, positions, torch.ones_like(tokens))
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-10, atol=1e-13)
    parts = [
        wt.collate(GROUPS, forest, cp_rank=rank, cp_size=2, multiple_of_tokens=multiple_of_tokens) for rank in range(2)
    ]
    assert sum(int(part.sample_counts.sum()) for part in parts) == forest.raw_tokens


TRANSPORTS: dict[str, dict[str, Any]] = {
    "all_gather": {},
    "fetch": {"transport": "fetch"},
    "ring": {"transport": "ring"},
    "ulysses": {"transport": "ulysses"},
    "usp": {"transport": "usp", "ulysses_size": 2},
}


def _work(rank: int, runs: list[tuple[str, str]]) -> list[tuple[float, list[Any], int]]:
    found = []
    for name, transport in runs:
        options = TRANSPORTS[transport]
        case, size = CASES[name], dist.get_world_size()
        loss, gradients, predictions = as_a_forest(case, dist.group.WORLD, rank, size, **options)
        found.append((loss, [gradient.numpy() for gradient in gradients], predictions))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_keys_of_a_long_prompt_are_not_copied_for_short_completions(size: int) -> None:
    samples = CASES["long prompts"].samples
    forest = wlb.PrefixForest.from_tokens(np.concatenate(samples), np.cumsum([0, *map(len, samples)]))
    for rank in range(size):
        plan = keys_plan(wlb.shard(forest, cp_size=size), rank, fetch=False, window=None, biased=False, device=CPU)
        calls = (*plan.local, *plan.remote)
        assert not plan.once
        assert sum(call.num_keys for call in calls) <= plan.gathered < forest.raw_tokens / 3


@pytest.mark.parametrize("name", ["groups", "one root for all", "window", "long prompts"])
def test_heads_in_parts_give_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "GATHERED", 1)
    assert_equal(as_a_forest(CASES[name]), CASES[name])
    for loss, gradients, predictions in processes.run(2, _work, [(name, "all_gather"), (name, "fetch")])[0]:
        assert_equal((loss, [torch.from_numpy(gradient) for gradient in gradients], predictions), CASES[name])


@pytest.mark.parametrize("size", [2, 4])
def test_on_a_context_parallel_group_they_are_the_same_on_every_transport(size: int) -> None:
    runs = [(name, transport) for name in CASES for transport in TRANSPORTS]
    for of_rank in processes.run(size, _work, runs):
        for (name, _), found in zip(runs, of_rank, strict=True):
            assert_equal((found[0], [torch.from_numpy(gradient) for gradient in found[1]], found[2]), CASES[name])


@pytest.mark.parametrize("name", ["groups", "depth 50", "window"])
def test_kernels_of_lower_precision_see_the_same_keys(name: str) -> None:
    case = CASES[name]
    forest = wlb.PrefixForest.from_tokens(np.concatenate(case.samples), np.cumsum([0, *map(len, case.samples)]))
    shard = wlb.shard(forest, cp_size=1)
    torch.manual_seed(1)
    q = torch.randn(forest.unique_tokens, case.heads[0], 32, dtype=torch.float64)
    k, v = torch.randn(2, forest.unique_tokens, case.heads[1], 32, dtype=torch.float64)
    exact, lse = wt.context_parallel_attention(q, k, v, shard, window=case.window, kernel="reference", return_lse=True)
    for dtype, apart in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        q, k, v = (x.to(dtype) for x in (q, k, v))
        out, sums = wt.context_parallel_attention(q, k, v, shard, window=case.window, return_lse=True)
        torch.testing.assert_close(out.double(), exact, rtol=apart, atol=apart)
        torch.testing.assert_close(sums.double(), lse, rtol=apart, atol=apart)


def test_a_plan_of_groups_trains_like_its_samples() -> None:
    """Micro-batches of a plan, each collated by itself, add up to all samples."""
    case = CASES["groups"]
    lengths = np.cumsum([0, *map(len, case.samples)])
    forest = wlb.PrefixForest.from_tokens([token for sample in case.samples for token in sample], lengths)
    cost = wlb.CostModel(attention=1.0, linear=10.0)
    plan = wlb.pack(forest, num_micro_batches=4, max_tokens=20, cost_model=cost, dp_size=2)
    named = documents(case)
    batches = [wt.collate([named[i] for i in batch.document_ids], batch) for batch in plan]
    assert sum(batch.num_valid_tokens for batch in batches) == one_by_one(case)[2]
    assert sum(batch.tokens.numel() for batch in batches) == plan.num_tokens < (plan.raw_tokens or 0)
    for batch, planned in zip(batches, plan, strict=True):
        assert batch.document_ids.tolist() == planned.document_ids.tolist()


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"documents": [(1, 2, 3), (1, 9)]}, "tokens", "token 1 of sample 1"),
        ({"documents": [(1, 2, 3)]}, "documents", "has 2"),
        (
            {"documents": [(1, 2), (1, 2, 3)]},
            "documents",
            r"\[0\] has 2 tokens, and sample 0 .* has 3: .* another order",
        ),
        (
            {"documents": [(1, 2, 3), (1, 2, 3)]},
            "documents",
            r"\[1\] has 3 tokens, and .* has 2: .* other samples",
        ),
        (
            {"documents": [(1, 2, 3), {"input_ids": (1, 2), "reward": 1}]},
            "documents",
            r"\[1\] has the column 'reward': nodes",
        ),
        ({"documents": [(1, 2, 3), None]}, "documents", r"\[1\] is nothing \(null\)"),
        ({"documents": [(1, 2, 3), wt.Document((1, 2), 0, start=4)]}, "documents", "piece"),
        ({"documents": [(1, 2, 3), wt.Document((1, 2), 0, labels=(1, 7))]}, "documents", "label 7"),
        ({"documents": [(1, 2, 3), wt.Document((1, 2), 0, columns={"source": np.zeros(2)})]}, "documents", "source"),
        ({"micro_batch": [0, 1]}, "micro_batch", "list"),
        ({"cp_rank": 1}, "cp_rank", "0 to 0"),
        ({"strategy": "per_document"}, "strategy", "is for documents"),
        ({"causal": False}, "causal", "is for documents"),
        ({"document_ids": [0, 1]}, "document_ids", "is for documents"),
        ({"token_buckets": [8]}, "token_buckets", "is for documents"),
        ({"max_documents": 2}, "max_documents", "is for documents"),
        ({"columns": ["x"]}, "columns", "is for documents"),
        ({"labels_ahead": 2}, "labels_ahead", "is for documents"),
        ({"max_imbalance": 1.1}, "max_imbalance", "is for documents"),
    ],
)
def test_what_is_no_forest_is_refused(change: dict[str, Any], argument: str, message: str) -> None:
    forest = wlb.PrefixForest.from_prompts([2], 2, [1, 0])
    arguments: dict[str, Any] = {"documents": [(1, 2, 3), (1, 2)], "micro_batch": forest, **change}
    with pytest.raises(wlb.WlbError, match=message) as caught:
        wt.collate(**arguments)
    assert caught.value.argument == argument


def test_what_cannot_run_a_forest_says_so() -> None:
    batch = wt.collate([(1, 2, 3), (1, 2)], wlb.PrefixForest.from_prompts([2], 2, [1, 0]))
    with pytest.raises(wlb.WlbError, match="know no shared prefix"):
        batch.as_hf()
    with pytest.raises(wlb.WlbError, match="edge"):
        batch.to_samples(torch.zeros(99))


def test_a_node_that_continues_its_parent_is_one_run() -> None:
    """The prompt and its longest completion are a causal span; of the others the prompt's keys are picked again."""
    shard = wlb.shard(wlb.PrefixForest.from_prompts([100], 3, [30, 20, 10]), cp_size=1)
    plan = functools.partial(keys_plan, shard, 0, fetch=False, biased=False, device=torch.device("cpu"))
    (call,) = plan(window=None).local
    assert call.spans.tolist() == [[0, 130, 0, 130], [130, 150, 130, 250], [150, 160, 250, 360]]
    (call,) = plan(window=5).local
    assert call.cu_seqlens_k.tolist() == [0, 130, 154, 168]
