"""One attention layer of an 8B model under context parallelism, rank by rank: strategies, the choice, and the glue.

For every micro-batch and strategy each rank's work runs alone: forward and backward of its queries over all keys that
its route names, as `all_gather` does it (index_select of keys, varlen calls, sums of gradients), without the
communication. The layer takes as long as its slowest rank. The kernels of the same calls are timed by themselves: the
rest of the time is spent outside of kernels.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import wlb
from studies.gpu.emulated import Rank
from studies.gpu.items import Item, Row
from wlb.torch.attention import kernels
from wlb.torch.attention.merge import attention
from wlb.torch.attention.plan import queries_of

STRATEGIES = ("per_sequence", "per_document", "hybrid", "auto", "adaptive")
Lengths = NDArray[np.int64]


@dataclass(frozen=True)
class Layer:
    """A layer's attention, and how it is measured.

    Args:
        model: what chooses shards.
        repeats: of every rank, after one that does not count.
    """

    heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    model: wlb.KernelModel
    repeats: int = 3

    @classmethod
    def of(cls, device: torch.device, model: wlb.KernelModel) -> Layer:
        """Llama 3 8B's heads; on a CPU a toy's."""
        return cls(32, 8, 128, device, model) if device.type == "cuda" else cls(2, 1, 64, device, model, repeats=2)

    @functools.lru_cache(maxsize=1)  # noqa: B019 # a layer lives as long as the program
    def tensors(self, tokens: int) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator(self.device).manual_seed(tokens)
        options: Any = {"generator": generator, "device": self.device, "dtype": torch.bfloat16}
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        return [torch.randn(tokens, count, self.head_dim, **options) for count in heads]

    def shard(self, lengths: Lengths, cp_size: int, strategy: Any) -> wlb.Shard:
        """One micro-batch under one strategy."""
        priced = {"kernel_model": self.model} if strategy in ("hybrid", "adaptive") else {}
        return wlb.shard(lengths, cp_size=cp_size, strategy=strategy, **priced)

    def seconds(self, shard: wlb.Shard, rank: int) -> tuple[float, float]:
        """Medians of a rank's forward and backward, and of the kernels in them alone."""
        made = Rank.of(shard, rank, window=None, device=self.device)
        *inputs, d_out = (x[made.tokens] for x in self.tensors(shard.num_tokens))
        exchange = made.exchange(*self.tensors(shard.num_tokens)[1:3])
        kernel = kernels.choose("auto", inputs[0], scale=self.head_dim**-0.5, alibi_slopes=None, alibi_aligned=True)

        def whole() -> None:
            attention(*(x.detach().requires_grad_() for x in inputs), exchange, None, kernel)[0].backward(d_out)

        calls = []
        for call, k, v in made.calls(*inputs[1:], exchange.buffer):
            q, d = (queries_of(x, call.q_rows) for x in (inputs[0], d_out))
            calls.append((d, q, k, v, *kernel.forward(q, k, v, call), call))

        def alone() -> None:
            for d, q, k, v, out, lse, call in calls:
                kernel.forward(q, k, v, call)
                kernel.backward(d, q, k, v, out, lse, call)

        return self._median(whole), self._median(alone)

    def _median(self, work: Any) -> float:
        took = []
        for _ in range(self.repeats + 1):
            began = self._now()
            work()
            took.append(self._now() - began)
        return statistics.median(took[1:])

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def items(layer: Layer, corpora: Mapping[str, Lengths], micro_batches: int) -> Iterator[Item]:
    """Every strategy of a micro-batch after another, so that all meet the same state of the device."""
    sizes, cp_sizes = ((65536, 131072), (4, 8)) if layer.device.type == "cuda" else ((512, 1024), (4,))
    for tokens, (name, lengths) in itertools.product(sizes, corpora.items()):
        for index, batch in enumerate(packed(lengths, tokens, micro_batches)):
            for cp_size, strategy in itertools.product(cp_sizes, STRATEGIES):
                what = f"{name}, {tokens}, micro-batch {index}, CP {cp_size}, {strategy}"
                yield what, functools.partial(measure, layer, batch, cp_size, strategy)


def packed(lengths: Lengths, tokens: int, count: int) -> list[Lengths]:
    """Micro-batches of full contexts, documents in a random order, cut where one is full."""
    order = np.random.default_rng(0).permutation(lengths)
    order = np.maximum(1, order * tokens // 131072) if tokens < 32768 else order
    ends = np.cumsum(np.tile(order, -(-tokens * count // int(order.sum()))))
    cuts = np.union1d(np.append(0, ends[ends < tokens * count]), np.arange(count + 1) * tokens)
    pieces = np.diff(cuts)
    return [pieces[(cuts[:-1] >= i * tokens) & (cuts[:-1] < (i + 1) * tokens)] for i in range(count)]


def measure(layer: Layer, lengths: Lengths, cp_size: int, strategy: str) -> Row:
    """Seconds of every rank, and of its kernels alone."""
    shard = layer.shard(lengths, cp_size, strategy)
    seconds = [layer.seconds(shard, rank) for rank in range(cp_size)]
    return {
        "chosen": shard.strategy,
        "pairs": float(shard.pairs_per_rank.max() / shard.pairs_per_rank.mean()),
        "seconds": [whole for whole, _ in seconds],
        "kernels": [alone for _, alone in seconds],
        "lengths": lengths.tolist(),
    }
