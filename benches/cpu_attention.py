"""Attention on the CPU beside torch's SDPA on the same document: forward, and with backward.

python -m benches.cpu_attention --record benches/records/cpu_attention.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import wlb
from wlb.torch import context_parallel_attention


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median CPU time of this process."""
    taken = []
    for _ in range(repeats + 1):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])


def measure(tokens: int, dtype: torch.dtype, kernel: str, repeats: int) -> dict[str, float]:
    """Ratios to SDPA's time."""
    heads, head_dim = 8, 64
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, head_dim, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    shard = wlb.shard([tokens], cp_size=1)

    def ours() -> Tensor:
        return context_parallel_attention(q, k, v, shard, kernel=kernel)  # type: ignore[arg-type]

    def torchs() -> Tensor:
        by_head = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        return scaled_dot_product_attention(*by_head, is_causal=True)[0].transpose(0, 1)

    def with_backward(attend: Callable[[], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(), (q, k, v), torch.ones(q.shape, dtype=dtype))

    with torch.no_grad():
        forward = seconds(ours, repeats) / seconds(torchs, repeats)
    both = seconds(with_backward(ours), repeats) / seconds(with_backward(torchs), repeats)
    return {"forward": round(forward, 2), "with_backward": round(both, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kernels", nargs="+", default=["auto", "reference"])
    parser.add_argument("--record", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = {
        f"{kernel}, {str(dtype).removeprefix('torch.')}": measure(options.tokens, dtype, kernel, options.repeats)
        for kernel in options.kernels
        for dtype in (torch.float32, torch.bfloat16)
    }
    print(json.dumps(record, indent=1))
    if options.record:
        options.record.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
