"""One attention layer of a 7B model under context parallelism, emulated rank by rank on one GPU.

    python benches/attention.py                         # 64K and 128K tokens, CP 4, synthetic lengths
    python benches/attention.py --lengths x.npy         # real lengths: micro-batches drawn from the file
    python benches/attention.py --kernel varlen --strategies per_document hybrid --hybrid-threshold 16384

For every micro-batch and strategy each rank's work runs alone: forward and backward of its queries over all keys that
its route names, as `all_gather` does it (index_select of keys, varlen calls, sums of gradients), without the
communication. The layer takes as long as its slowest rank. First the kernel is compared with float64 on a small
micro-batch. Writes benches/records/attention-<gpu>.json, with all samples. Without a GPU it runs on tiny sizes, only to
show that it runs, and writes a record only where told to.
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RECORDS, Lengths, bars, machine, options, read_lengths, synthetic, write_record
from rich.console import Console
from rich.table import Table
from torch import Tensor

import wlb
from wlb.torch.attention import kernels, routes
from wlb.torch.attention.all_gather import GatherRoute
from wlb.torch.attention.merge import attention
from wlb.torch.attention.segments import Call

STRATEGIES = ["per_sequence", "per_document", "hybrid"]


@dataclass(frozen=True)
class GatheredKeys:
    """The keys of all ranks, as if the gather were over; their gradients stay where they are."""

    route: GatherRoute
    k: Tensor
    v: Tensor

    def forward(self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], None]) -> None:
        attend(k, v, self.route.local)
        attend(self.k, self.v, self.route.remote)

    def backward(
        self, k: Tensor, v: Tensor, attend: Callable[[Tensor, Tensor, Sequence[Call]], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        dk, dv = attend(k, v, self.route.local)
        attend(self.k, self.v, self.route.remote)
        return dk, dv


@dataclass(frozen=True)
class Layer:
    """A layer's attention, and how it is measured."""

    heads: int
    kv_heads: int
    head_dim: int
    device: torch.device
    kernel: str
    repeats: int

    def tensors(self, tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator(self.device).manual_seed(tokens)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(tokens, h, self.head_dim) for h in heads]
        return [torch.randn(s, generator=generator, device=self.device, dtype=dtype) for s in shapes]

    def choose(self, q: Tensor) -> kernels.Kernel:
        name: Any = self.kernel
        return kernels.choose(name, q, scale=self.head_dim**-0.5, alibi_slopes=None, alibi_aligned=True)

    def rank_seconds(self, shard: wlb.Shard, rank: int, tensors: list[Tensor]) -> list[tuple[float, float]]:
        """Forward and backward of one rank, once for every repeat, after one that does not count."""
        everyone = [
            routes.gather_route(shard, r, window=None, biased=False, device=self.device) for r in range(len(shard))
        ]
        route = everyone[rank]
        gathered = torch.zeros(route.cp_size * route.rows, dtype=torch.int64, device=self.device)
        for r, other in enumerate(everyone):
            sent = self.tokens(shard, r)
            sent = sent if other.sent is None else sent[other.sent]
            gathered[r * route.rows : r * route.rows + len(sent)] = sent
        q, k, v, d_out = (x[self.tokens(shard, rank)] for x in tensors)
        exchange = GatheredKeys(route, tensors[1][gathered], tensors[2][gathered])
        kernel = self.choose(q)
        samples = []
        for _ in range(self.repeats + 1):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            start = self.now()
            out = attention(*leaves, exchange, kernel)
            middle = self.now()
            out.backward(d_out)
            samples.append((middle - start, self.now() - middle))
        return samples[1:]

    def tokens(self, shard: wlb.Shard, rank: int) -> Tensor:
        return torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64)).to(self.device)

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def parity(self) -> dict[str, float]:
        """Largest deviation of output and gradients from the reference kernel in float64, over the largest value."""
        shard = wlb.shard([700, 1, 130, 5, 260], cp_size=1)
        route = routes.gather_route(shard, 0, window=None, biased=False, device=self.device)
        found = []
        for dtype in (torch.bfloat16, torch.float64):
            *leaves, d_out = (x.to(dtype) for x in self.tensors(shard.num_tokens))
            q, k, v = (x.requires_grad_() for x in leaves)
            kernel = self.choose(q) if dtype == torch.bfloat16 else kernels.ReferenceKernel(self.head_dim**-0.5)
            out = attention(q, k, v, GatheredKeys(route, k[:0], v[:0]), kernel)
            out.backward(d_out)
            found.append([out.detach(), q.grad, k.grad, v.grad])
        pairs = zip(("out", "dq", "dk", "dv"), *found, strict=True)
        return {name: float((got.double() - right).abs().max() / right.abs().max()) for name, got, right in pairs}


def micro_batches(lengths: Lengths, tokens: int, count: int) -> list[Lengths]:
    """Documents in random order, cut where a micro-batch is full."""
    order = np.random.default_rng(0).permutation(lengths)
    ends = np.cumsum(order)
    if ends[-1] < tokens * count:
        raise SystemExit(f"{ends[-1]:,} tokens in all: too few for {count} micro-batches of {tokens:,}")
    cuts = np.union1d(np.append(0, ends[ends < tokens * count]), np.arange(count + 1) * tokens)
    pieces = np.diff(cuts)
    return [pieces[(cuts[:-1] >= i * tokens) & (cuts[:-1] < (i + 1) * tokens)] for i in range(count)]


def measure(layer: Layer, lengths: Lengths, tokens: int, strategy: str, cp_size: int, threshold: int) -> dict[str, Any]:
    """One micro-batch under one strategy."""
    options = {"hybrid_threshold": threshold} if strategy == "hybrid" else {}
    shard = wlb.shard(lengths, cp_size=cp_size, strategy=strategy, **options)
    tensors = layer.tensors(tokens)
    samples = [layer.rank_seconds(shard, rank, tensors) for rank in range(cp_size)]
    forward, backward = (
        [statistics.median(sample[part] for sample in rank) * 1e3 for rank in samples] for part in (0, 1)
    )
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    pairs = shard.pairs_per_rank
    return {
        "tokens": tokens,
        "strategy": strategy,
        **options,
        "documents": len(lengths),
        "longest": int(lengths.max()),
        "pairs_imbalance": float(pairs.max() / pairs.mean()),
        "forward_ms": forward,
        "backward_ms": backward,
        "slowest_rank_ms": max(both),
        "mean_rank_ms": statistics.mean(both),
        "keys_over_sequence": [float(shard.rank(r).cu_seqlens_k[-1] / tokens) for r in range(cp_size)],
        "samples_s": samples,
    }


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = options(__doc__)
    add = parser.add_argument
    add("--lengths", type=Path, help=".npy file of document lengths; default: synthetic")
    add("--tokens", type=int, nargs="+", default=[65536, 131072] if gpu else [512, 1024], help="per micro-batch")
    add("--micro-batches", type=int, default=4, help="of each size")
    add("--cp", type=int, default=4)
    add("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    add("--hybrid-threshold", type=int, default=8192 if gpu else 128, help="tokens")
    add("--heads", type=int, default=32 if gpu else 4)
    add("--kv-heads", type=int, help="default: as many as heads")
    add("--head-dim", type=int, default=128 if gpu else 32)
    add("--kernel", choices=["auto", "flash_attn", "varlen", "reference"], default="auto")
    add("--repeats", type=int, default=5 if gpu else 2)
    add("--record", type=Path, help="where the raw record goes")
    arguments = parser.parse_args()

    device = torch.device("cuda" if gpu else "cpu")
    kv_heads = arguments.kv_heads or arguments.heads
    layer = Layer(arguments.heads, kv_heads, arguments.head_dim, device, arguments.kernel, arguments.repeats)
    if arguments.lengths is None:
        longest = max(arguments.tokens)
        lengths = synthetic(8000) if gpu else np.maximum(1, synthetic(8000) * longest // 131072)
    else:
        lengths = read_lengths(arguments.lengths)
    name = torch.cuda.get_device_name(device) if gpu else "CPU"
    record: dict[str, Any] = {
        "what": "attention of one layer, bf16, forward + backward, rank by rank on one device, no communication",
        "label": "GPU" if gpu else "CPU, tiny sizes: shows that the bench runs, says nothing about speed",
        "device": name,
        "kernel": type(layer.choose(layer.tensors(1)[0])).__name__,
        "versions": versions(),
        "layer": {"heads": layer.heads, "kv_heads": kv_heads, "head_dim": layer.head_dim, "cp_size": arguments.cp},
        "lengths": arguments.lengths.stem if arguments.lengths else "synthetic",
        "parity_with_float64": layer.parity(),
        "machine": machine(),
        "rows": [],
    }
    with bars() as progress:
        total = len(arguments.tokens) * arguments.micro_batches * len(arguments.strategies)
        task = progress.add_task("attention", total=total)
        for tokens in arguments.tokens:
            for index, batch in enumerate(micro_batches(lengths, tokens, arguments.micro_batches)):
                for strategy in arguments.strategies:
                    row = measure(layer, batch, tokens, strategy, arguments.cp, arguments.hybrid_threshold)
                    record["rows"].append({"micro_batch": index, **row})
                    progress.advance(task)

    path = arguments.record or (RECORDS / f"attention-{name.replace(' ', '-').lower()}.json" if gpu else None)
    if path is not None:
        write_record(path, record)
    report(record)


def versions() -> dict[str, Any]:
    installed = {distribution.name: distribution.version for distribution in importlib.metadata.distributions()}
    flash = {name: installed.get(name, "missing") for name in ("flash_attn", "flash_attn_3")}
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), **flash}


def report(record: dict[str, Any]) -> None:
    """The slowest rank's time over all micro-batches of a size, and how much of it balance would save."""
    console = Console()
    table = Table("tokens", "strategy", "slowest, ms", "mean, ms", "slowest / mean", "pairs max / mean")
    table.title = f"{record['label']}: {record['device']}, {record['kernel']}, torch {record['versions']['torch']}"
    groups: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault((row["tokens"], row["strategy"]), []).append(row)
    for (tokens, strategy), rows in groups.items():
        slowest, mean = (statistics.mean(row[f"{which}_rank_ms"] for row in rows) for which in ("slowest", "mean"))
        pairs = statistics.mean(row["pairs_imbalance"] for row in rows)
        table.add_row(f"{tokens:,}", strategy, f"{slowest:.2f}", f"{mean:.2f}", f"{slowest / mean:.3f}", f"{pairs:.3f}")
    console.print(table)
    console.print(
        "largest deviation from float64:",
        ", ".join(f"{name} {value:.1e}" for name, value in record["parity_with_float64"].items()),
    )


if __name__ == "__main__":
    main()
