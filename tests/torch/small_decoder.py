"""A decoder with everything that can go wrong: rotary positions, attention of a group, stages, tied weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from wlb.torch.data import PackedBatch

WORDS, WIDTH, HEADS = 19, 16, 2
LENGTHS = [30, 9, 25, 12, 18, 40, 14, 22, 11, 33, 16, 28]


class Block(nn.Module):
    def __init__(self, *, norm: type[nn.Module] = nn.Identity, dropout: float = 0.1) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = norm(WIDTH) if norm is not nn.Identity else nn.Identity()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor, positions: Tensor, shard: wlb.Shard, group: Any, transport: Any) -> Tensor:
        q, k, v = (part.unflatten(1, (HEADS, -1)) for part in self.qkv(x).chunk(3, 1))
        attend: Any = partial(wt.context_parallel_attention, group=group, transport=transport)
        x = x + self.out(attend(rotated(q, positions), rotated(k, positions), v, shard).flatten(1))
        x = self.norm(x)
        hidden = nn.functional.dropout(torch.relu(self.up(x)), self.dropout, self.training)
        result: Tensor = x + self.down(hidden)
        return result


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    angles = positions[:, None, None] / 50.0 ** torch.linspace(0, 1, x.shape[2] // 2)
    first, second = x.chunk(2, -1)
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    return torch.cat(turned, -1).to(x.dtype)


class Decoder(nn.Module):
    """All of it, or a stage.

    `own` makes positions from the number of tokens that it gets, as models do that were not told any. `along` is a
    layer over the whole row, given its values and positions; `std` the deviation of all weights.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        stage: int = 0,
        num_stages: int = 1,
        own: bool = False,
        tied: bool = False,
        transport: str = "all_gather",
        depth: int = 0,
        std: float = 0.0,
        along: Any = None,
        **block: Any,
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self.own, self.transport, self.group = own, transport, None
        if self.is_first or (tied and self.is_last):
            self.embedding: Any = nn.Embedding(WORDS, WIDTH)
        if self.is_first:
            self.places = nn.Embedding(256, WIDTH)
        torch.manual_seed(seed + 1 + stage)
        self.blocks = nn.ModuleList(Block(**block) for _ in range(depth or 3 - num_stages))
        self.head = nn.Linear(WIDTH, WORDS) if self.is_last and not tied else None
        self.along = along() if along is not None and self.is_first else None
        if std:
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=std)

    def forward(self, x: Tensor, positions: Tensor, shard: wlb.Shard, group: Any = None) -> Tensor:
        positions = torch.arange(x.shape[0]) if self.own else positions
        x = self.embedding(x) + self.places(positions) if self.is_first else x
        if self.along is not None:
            x = self.along(x, positions)
        for block in self.blocks:
            x = block(x, positions, shard, group, self.transport)
        if not self.is_last:
            return x
        result: Tensor = x @ self.embedding.weight.T if self.head is None else self.head(x)
        return result

    def get_input_embeddings(self) -> Any:
        return self.embedding

    def get_output_embeddings(self) -> Any:
        return self.embedding if self.head is None else self.head


def alone(model: nn.Module, batch: PackedBatch) -> Tensor:
    """As the loop calls it, without a group."""
    result: Tensor = model(batch.tokens, batch.position_ids, batch.shard)
    return result


def documents(seed: int) -> list[dict[str, Tensor]]:
    """Prompts of some are masked."""
    generator = torch.Generator().manual_seed(1000 + seed)
    result = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(WORDS, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3 if number % 2 else 0] = wt.IGNORE
        result.append({"input_ids": tokens, "labels": labels})
    return result


def step_of(mesh: Any, seed: int, strategy: str = "auto") -> wt.Step[PackedBatch]:
    """Of a loader that takes its ranks from the mesh."""
    dp, cp = mesh["dp"], mesh["cp"]
    packer = wlb.Packer(
        num_micro_batches=2 * dp.size(),
        max_tokens=90,
        max_document_tokens=35,
        oversize="split",
        cost_model=wlb.CostModel(attention=1.0, linear=50.0),
        release="fifo",
    )
    sampler = wt.BalancedBatchSampler(
        LENGTHS,
        packer=packer,
        dp_rank=dp.get_local_rank(),
        dp_size=dp.size(),
        tokens_per_batch=60 * 2 * dp.size(),
        seed=seed,
    )
    keep: Any = partial(wt.collate, cp_rank=cp.get_local_rank(), cp_size=cp.size(), strategy=strategy)
    loader = DataLoader(wt.Documents(documents(seed)), batch_sampler=sampler, collate_fn=keep)
    return next(iter(wt.StepLoader(loader)))


def dynamic_step(mesh: Any) -> wt.DynamicCpStep[PackedBatch]:
    """The longest document is on both ranks, others on one."""
    limits: dict[str, Any] = {"num_stages": 1, "max_tokens_per_rank": 64}
    plan: Any = partial(
        wlb.plan_dynamic_cp, world_size=2, cost_model=wlb.CostModel(attention=1.0, linear=50.0), **limits
    )
    given = [torch.arange(length) * 7 % WORDS for length in (100, *[30] * 8)][dist.get_rank() :: 2]
    loader: wt.DynamicCpLoader[PackedBatch] = wt.DynamicCpLoader(
        [given], plan=plan, group=wt.data_and_context(mesh).get_group()
    )
    (step,) = loader
    loader.close()
    assert {batch.cp_size for batch in step.micro_batches} == {1, 2}
    return step


@dataclass
class Loop:
    """A training loop as people write it; each part may be exchanged for one that is wrong.

    Attributes:
        model: the outermost wrapper, or the stage of a pipeline.
        mesh: all ranks.
        batch: changes what is given for each micro-batch.
        loss: of logits, labels and the labels of the global batch.
        exchange: adds gradients up, given the step.
        before: is called before each step.
    """

    model: Any
    mesh: Any
    batch: Callable[[PackedBatch], PackedBatch] = lambda batch: batch
    loss: Callable[[Tensor, Tensor, int], Tensor] = lambda logits, labels, valid: wt.token_normalized_loss(
        logits, labels, num_valid_tokens=valid
    )
    exchange: Callable[[Loop, Any], None] = lambda loop, step: added_up(loop)
    before: Callable[[Loop], object] = lambda loop: None
    groups: Any = None
    reported: float = 1.0  # of the sum of losses

    @property
    def share(self) -> Any:
        return wt.data_and_context(self.mesh).get_group()

    @property
    def modules(self) -> nn.Module:
        module: nn.Module = getattr(self.model, "submod", self.model)
        return module

    def group(self, batch: PackedBatch) -> Any:
        if self.groups is not None:
            return self.groups.of(batch)
        return self.mesh["cp"].get_group() if batch.cp_size > 1 else None

    def __call__(self, step: Any) -> Tensor:
        self.before(self)
        valid = wt.count_valid_tokens(step, group=self.share)
        batches = [self.batch(batch) for batch in step.micro_batches]
        if self.mesh["pp"].size() > 1:
            found = wt.pipeline_step(
                [self.model],
                [
                    wt.PipelineMicroBatch(
                        tokens=batch.tokens.numel(),
                        args=(batch.tokens,),
                        kwargs={"positions": batch.position_ids, "shard": batch.shard, "group": self.group(batch)},
                        target=batch.labels,
                    )
                    for batch in batches
                ],
                loss_fn=lambda logits, labels: self.loss(logits, labels, valid),
            )
            total = torch.stack(found).sum() if found else torch.zeros(())
        else:
            total = torch.zeros(())
            for batch in batches:
                logits = self.model(batch.tokens, batch.position_ids, batch.shard, self.group(batch))
                part = self.loss(logits, batch.labels, valid)
                part.backward()  # type: ignore[no-untyped-call]
                total += part.detach()
        self.exchange(self, step)
        dist.all_reduce(total)
        return total * self.reported


def added_up(loop: Loop) -> None:
    """Gradients over all ranks that share the step."""
    for parameter in loop.modules.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=loop.share)


def with_shard_of_one(batch: PackedBatch) -> PackedBatch:
    """As if the row were one document: of a row that was cut as a whole, tokens lie on the same ranks."""
    shard = batch.shard
    cut: Any = {"strategy": "per_sequence"} if shard.cp_size > 1 else {}
    whole = np.array([shard.num_tokens], np.int64)[: bool(shard.num_tokens)]
    one = wlb.shard(whole, cp_size=shard.cp_size, **cut)
    before, after = (of.rank(batch.cp_rank).token_indices for of in (shard, one))
    order = torch.from_numpy(np.argsort(before))
    assert np.array_equal(before[order], after), "in its own order, which documents have not"
    moved = {name: getattr(batch, name)[order] for name in ("tokens", "labels", "position_ids")}
    return replace(batch, shard=one, **moved)
