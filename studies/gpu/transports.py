"""Every transport, by several processes on one GPU, against float64.

python -m torch.distributed.run --standalone --nproc-per-node 4 -m studies.gpu.transports FOUND.json
"""

from __future__ import annotations

import functools
import itertools
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from studies.gpu.host import collectives_through_host
from studies.gpu.items import Item, Row
from studies.gpu.parity import HEADS, LENGTHS_OF_CPU, MASKS, NAMES, Problem, compared, right_answer
from wlb.torch.attention import context_parallel_attention

TRANSPORTS = ("all_gather", "fetch", "ring", "ulysses", "usp")
SIZES = (2, 4)
HEAD_DIM = 64


def items(device: torch.device) -> Iterator[Item]:
    """A launch for each number of processes."""
    for size in SIZES:
        yield f"{size} processes", functools.partial(launched, size, device)


def launched(size: int, device: torch.device) -> Row:
    """The worst of all cases, and those that are out of tolerance."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
        command = [sys.executable, *launcher, "-m", "studies.gpu.transports", str(path), device.type]
        ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
        if ran.returncode or not path.exists():
            raise RuntimeError(f"{size} processes ended with {ran.returncode}: {ran.stderr[-2000:]}")
        cases: dict[str, Row] = json.loads(path.read_text())
    worst = {name: max(row[name] for row in cases.values()) for name in NAMES}
    return {**worst, "cases": len(cases), "wrong": [name for name, row in cases.items() if not row["ok"]]} | {
        "ok": all(row["ok"] for row in cases.values())
    }


def main() -> None:
    """One rank."""
    path, kind = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    # A GPU for each rank where there are so many: collectives go through the host all the same.
    index = dist.get_rank() % max(1, torch.cuda.device_count())
    device = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    collectives_through_host()
    found: dict[str, Row] = {}
    for transport, heads, mask in itertools.product(TRANSPORTS, HEADS, MASKS):
        problem = Problem(heads, HEAD_DIM, mask, LENGTHS_OF_CPU, device)
        found[f"{transport}, {heads}, {mask}"] = of_rank(problem, transport)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        worst = {}
        for case in found:
            row = {name: max(rank[case][name] for rank in everyone) for name in NAMES if name in found[case]}
            worst[case] = {**row, "ok": all(rank[case]["ok"] for rank in everyone)}
        path.write_text(json.dumps(worst))
    dist.barrier()
    dist.destroy_process_group()


def of_rank(problem: Problem, transport: str) -> Row:
    """What this rank computes of its tokens."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shard = problem.shard(size)
    held = torch.from_numpy(shard.rank(rank).token_indices.astype("int64")).to(problem.device)
    *leaves, d_out = (x[held] for x in problem.tensors()[:4])
    q, k, v = (x.requires_grad_() for x in leaves)
    kinds: Any = transport
    out = context_parallel_attention(
        q,
        k,
        v,
        shard,
        group=dist.group.WORLD,
        transport=kinds,
        ulysses_size=2 if transport == "usp" else None,
        window=MASKS[problem.mask],
    )
    out.backward(d_out)
    got = [x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None]
    return compared(got, [x[held] for x in right_answer(problem)])


if __name__ == "__main__":
    main()
