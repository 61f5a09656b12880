"""Trains a small hybrid over context-parallel ranks: attention is cut evenly, convolutions get runs of neighbours.

    python examples/hybrid.py
    torchrun --nproc-per-node 4 examples/hybrid.py

Attention costs the square of a document's length, so the loader cuts documents such that all ranks have equal work
(`batch.shard`). A convolution needs the tokens just before its own, which that cut scatters over ranks. So hidden
states move to a second cut, one run of the packed sequence a rank, and back (`wt.recut`). There a rank lacks only the
last tokens of the rank before it (`wt.halo`). Layers of one kind in a row share a move.

A recurrent layer goes into the runs as well. It has to hand on the state of a document that two ranks share: where
`runs.rank(r).position_ids` begin above 0, rank r goes on with the state of rank r - 1.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt

WIDTH, HEADS, VOCABULARY = 32, 4, 97


class Attention(nn.Module):
    """Causal attention inside of each document, over all ranks of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shard: wlb.Shard, group: Any) -> Tensor:
        q, k, v = self.qkv(x).view(-1, 3, HEADS, WIDTH // HEADS).unbind(1)
        result: Tensor = self.leave(wt.context_parallel_attention(q, k, v, shard, group=group).flatten(1))
        return result


class ShortConvolution(nn.Module):
    """A gated causal convolution of a few taps (LFM2), which stops where a document begins."""

    def __init__(self, taps: int = 3) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.taps = nn.Parameter(torch.randn(taps, WIDTH) / taps)

    def forward(self, x: Tensor, runs: wlb.Shard, positions: Tensor, group: Any) -> Tensor:
        """Args: x, [tokens, width], in `runs`; positions, int64 [tokens], from 0 in each document."""
        before, value, after = self.enter(x).chunk(3, -1)
        value = before * value
        width = len(self.taps)
        seen = torch.cat([wt.halo(value, runs, tokens=width - 1, group=group), value])
        total = torch.zeros_like(value)
        for back in range(width):
            inside = (positions >= back).unsqueeze(1)  # the token that far back is of the same document
            total = total + self.taps[back] * seen[width - 1 - back : len(seen) - back] * inside
        result: Tensor = self.leave(after * total)
        return result


class Hybrid(nn.Module):
    """Two convolutions for each layer of attention."""

    def __init__(self, group: Any, num_layers: int = 2) -> None:
        super().__init__()
        self.group = group
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.attention = nn.ModuleList(Attention() for _ in range(num_layers))
        self.convolutions = nn.ModuleList(
            nn.ModuleList(ShortConvolution() for _ in range(2)) for _ in range(num_layers)
        )

    def forward(self, batch: wt.PackedBatch) -> Tensor:
        even = batch.shard  # equal work of attention
        runs = wlb.shard(even.lengths, cp_size=even.cp_size, strategy="contiguous")
        positions = torch.from_numpy(runs.rank(batch.cp_rank).position_ids.astype(np.int64))
        x = self.embedding(batch.tokens)
        for attention, convolutions in zip(self.attention, self.convolutions, strict=True):
            x = wt.recut(x, even, runs, group=self.group)
            for convolution in convolutions:  # type: ignore[attr-defined]
                x = x + convolution(F.rms_norm(x, (WIDTH,)), runs, positions, self.group)
            x = wt.recut(x, runs, even, group=self.group)
            x = x + attention(F.rms_norm(x, (WIDTH,)), even, self.group)
        logits: Tensor = self.head(F.rms_norm(x, (WIDTH,)))
        return logits


def train(num_steps: int = 5) -> list[float]:
    """Losses of the first steps, with all ranks in one context-parallel group."""
    group, cp_rank, cp_size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    random = np.random.default_rng(0)
    lengths = random.lognormal(3, 1, size=100).astype(int).clip(2, 256)
    documents = [torch.from_numpy(random.integers(0, VOCABULARY, length)) for length in lengths.tolist()]
    packer = wlb.Packer(
        num_micro_batches=2, max_tokens=512, cost_model=wlb.CostModel(attention=1.0, linear=500.0), release="adaptive"
    )
    sampler = wt.BalancedBatchSampler(lengths, packer=packer, dp_rank=0, dp_size=1, seed=0)
    collate = functools.partial(wt.collate, cp_rank=cp_rank, cp_size=cp_size)
    loader = wt.StepLoader(DataLoader(wt.Documents(documents), batch_sampler=sampler, collate_fn=collate))
    torch.manual_seed(0)
    model = Hybrid(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in loader:
        losses.append(wt.train_step(model, step, group=group).item())
        optimizer.step()
        optimizer.zero_grad()
        if len(losses) == num_steps:
            break
    return losses


if __name__ == "__main__":
    if "RANK" in os.environ:  # torchrun
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = train()
    if dist.get_rank() == 0:
        print("losses:", " ".join(f"{loss:.4f}" for loss in found))
    dist.destroy_process_group()
