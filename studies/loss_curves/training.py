"""One run: a small Llama trained on the steps of one way of packing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray

import wlb
from studies.loss_curves.arms import Step
from studies.trainer.llama import Attention, AttentionOptions, LlamaConfig, LlamaStage, rotate
from wlb.torch.data import Documents, PackedBatch, collate
from wlb.torch.loss import token_normalized_loss

Array = NDArray[Any]
EVALUATIONS = 2  # at equal tokens, the last one after all of them


@dataclass(frozen=True)
class Training:
    """How every model is trained.

    Attributes:
        hidden: Hidden size.
        layers: Layers.
        vocab_size: Different tokens.
        learning_rate: The highest.
        warmup: Share of the tokens during which the learning rate rises to it; then it falls linearly to 0.
    """

    hidden: int
    layers: int
    vocab_size: int
    learning_rate: float
    warmup: float

    def model(self, seed: int) -> LlamaStage:
        """The same weights for the same seed."""
        shape = LlamaConfig(
            hidden_size=self.hidden,
            ffn_hidden_size=self.hidden * 8 // 3,
            num_layers=self.layers,
            num_heads=self.hidden // 32,
            num_kv_heads=self.hidden // 32,
            vocab_size=self.vocab_size,
        )
        model = LlamaStage(shape)
        for block in model.layers.values():
            block.attention = OneRank(shape, AttentionOptions())
        model.initialize(seed)
        return model

    def rate(self, trained: float) -> float:
        """The learning rate where this share of all tokens is trained."""
        return self.learning_rate * min(trained / self.warmup, (1 - trained) / (1 - self.warmup))


class OneRank(Attention):
    """What `wlb.torch.context_parallel_attention` computes on one rank, by torch's fused kernel.

    A run takes half as long. That kernel gives no log-sum-exp, which several ranks need to merge what they have.
    """

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        shard: wlb.Shard,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        q, k, v = (
            tensor.transpose(0, 1).split(shard.lengths.tolist(), 1) for tensor in (rotate(q, rope), rotate(k, rope), v)
        )
        rows = zip(q, k, v, strict=True)
        attended = torch.cat(
            [F.scaled_dot_product_attention(*(x[None] for x in row), is_causal=True)[0] for row in rows], 1
        )
        return self.wo(attended.transpose(0, 1).flatten(1))


@dataclass(frozen=True)
class HeldOut:
    """Documents to evaluate on, by length: micro-batches of each bucket."""

    buckets: list[list[PackedBatch]]

    @classmethod
    def of(cls, documents: list[Array], bounds: list[int], max_tokens: int) -> HeldOut:
        """Documents whose tokens are below the first bound, below the second, ..., and all others."""
        which = np.searchsorted(bounds, [document.size for document in documents], side="right")
        buckets: list[list[PackedBatch]] = []
        for bucket in range(len(bounds) + 1):
            some = [document for document, its in zip(documents, which.tolist(), strict=True) if its == bucket]
            ends = np.cumsum([document.size for document in some])
            owner = (ends - 1) // max_tokens
            groups = [[some[i] for i in np.flatnonzero(owner == number)] for number in np.unique(owner)]
            buckets.append([collate(group) for group in groups])
        return cls(buckets)

    @property
    def tokens(self) -> list[int]:
        """Predicted tokens of each bucket."""
        return [sum(batch.num_valid_tokens for batch in bucket) for bucket in self.buckets]

    def losses(self, model: LlamaStage) -> list[float]:
        """Mean loss of each bucket, nats per token."""
        with torch.no_grad():
            sums = [
                sum(loss_of(model, batch, batch.num_valid_tokens).item() * batch.num_valid_tokens for batch in bucket)
                for bucket in self.buckets
            ]
        return [total / max(tokens, 1) for total, tokens in zip(sums, self.tokens, strict=True)]


def loss_of(model: LlamaStage, batch: PackedBatch, valid: int) -> torch.Tensor:
    """A micro-batch's share of the mean loss over `valid` tokens."""
    logits = model(batch.tokens, position_ids=batch.position_ids, shard=batch.shard)
    return token_normalized_loss(logits, batch.labels, num_valid_tokens=valid)


def run(
    training: Training,
    documents: list[Array],
    steps: list[Step],
    held_out: HeldOut,
    *,
    seed: int,
    equal_steps: int,
    rate_by_tokens: bool = False,
    tick: Callable[[], None],
) -> dict[str, Any]:
    """Trains a model on all steps.

    Args:
        training: How.
        documents: That the pieces of `steps` are of.
        steps: What is trained, each document once.
        held_out: To evaluate on.
        seed: Of the weights.
        equal_steps: After so many steps is evaluated, too, however many there are. Without waiting that is all.
        rate_by_tokens: The learning rate of a step is in proportion to its tokens, over those of a mean step: then
            every token moves the weights as far. Otherwise each step does, be it large or small.
        tick: Called after every step.

    Returns:
        `curve`: pairs of tokens trained and losses by bucket, the last after all tokens. `equal_steps`: losses by
        bucket after so many steps. `seconds`: of processor time.
    """
    started = time.process_time()
    reader = Documents(_Arrays(documents))
    model = training.model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, foreach=True)
    total = sum(document.size for document in documents)
    points = [total * number // EVALUATIONS for number in range(1, EVALUATIONS + 1)]
    curve: list[Any] = []
    at_equal_steps: list[float] = []
    tokens = 0
    for number, step in enumerate(steps, start=1):
        batches = [collate([reader[piece] for piece in batch]) for batch in step if batch]
        valid = sum(batch.num_valid_tokens for batch in batches)
        size = sum(piece.length for batch in step for piece in batch)
        if valid:
            rate = training.rate((tokens + size / 2) / total)
            for group in optimizer.param_groups:
                group["lr"] = rate * size * equal_steps / total if rate_by_tokens else rate
            for batch in batches:
                loss_of(model, batch, valid).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        tokens += size
        tick()
        losses = None
        if tokens >= points[len(curve)]:
            losses = held_out.losses(model)
            curve.append([tokens, losses])
        if number == equal_steps:
            at_equal_steps = losses or held_out.losses(model)
    return {"curve": curve, "equal_steps": at_equal_steps or curve[-1][1], "seconds": time.process_time() - started}


@dataclass(frozen=True)
class _Arrays:
    """A data set of token arrays."""

    arrays: list[Array]

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> Array:
        return self.arrays[index]
