"""What a layer of context-parallel attention costs beside its kernel, and its plan.

No GPU and no second process: the kernel is a stand-in that makes outputs of the right shape and computes nothing, the
collectives are those of torch's fake process group. Operations are what a dispatch mode sees, views and new memory
among them. Bytes are what operations read and write, counted on meta tensors of the true sizes; the network's are not
among them. Host time is measured on tensors so small that only the host's part is left.

    python -m benches.attention --record benches/records/attention.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import wlb
from benches.common import CONTEXT, Lengths, synthetic
from wlb.torch import attention
from wlb.torch.attention import context_parallel_attention, kernels, prepare_attention
from wlb.torch.data import collate

# --- a world that is not there ----------------------------------------------------------------------------------------


@contextmanager
def world(rank: int, size: int) -> Iterator[dist.ProcessGroup]:
    """A group of which this process is `rank`; what is sent goes nowhere, what arrives is whatever memory held."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        """Returns at once."""


@contextmanager
def no_network() -> Iterator[None]:
    """Collectives of meta tensors, which no backend takes."""

    def collective(*_: Any, **options: Any) -> Done | None:
        return Done() if options.get("async_op") else None

    replaced: dict[str, Any] = dict.fromkeys(("all_gather_into_tensor", "all_to_all_single"), collective)
    with mock.patch.multiple(dist, **replaced):
        yield


@contextmanager
def only(stub: Stub) -> Iterator[None]:
    """A stand-in is the kernel of all layers, also of those that have been called before."""
    attention.forget()
    with mock.patch.object(kernels, "choose", new=stub.chosen):
        yield
    attention.forget()


class Stub:
    """A kernel that computes nothing, and writes where it is told, as flash-attn 3 does; else its outputs are new."""

    counting: Counting | None = None

    def chosen(self, *_: Any, **__: Any) -> Stub:
        """Itself, whatever the tensors: in place of `kernels.choose`, since a mock takes longer than that does."""
        return self

    @staticmethod
    def tiles(head_dim: int) -> tuple[int, int]:
        """As the flash kernels'."""
        return 128, 128

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Any, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Output like `q`, and the log-sum-exp."""
        with self._apart():
            lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
            return torch.empty_like(q) if out is None else out, lse

    def backward(
        self,
        d_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        call: Any,
        into: tuple[Tensor | None, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of queries, and of keys and values."""
        with self._apart():
            dq, d_keys = into or (None, k.new_empty((k.shape[0], 2, *k.shape[1:])))
            return torch.empty_like(q) if dq is None else dq, d_keys

    def _apart(self) -> Any:
        return nullcontext() if self.counting is None else self.counting.kernel()


VIEWS = {
    *("view", "slice", "select", "unbind", "split", "split_with_sizes", "t", "transpose", "unsqueeze", "squeeze"),
    *("expand", "alias", "detach", "as_strided", "_unsafe_view", "permute", "narrow"),
}
NEW = {"empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"}
PICKS = {"index_select", "index", "gather"}
PLACES = {"index_copy_", "index_put_", "index_copy"}
ADDS = {"index_add_"}
SUMS = {"_embedding_bag_forward_only"}
FILLS = {"zero_", "fill_", "zeros", "new_zeros", "full", "new_full", "zeros_like", "full_like", "index_fill_"}


def _is_tensor(x: Any) -> bool:
    return isinstance(x, Tensor)


@dataclass
class Counting(TorchDispatchMode):
    """Counts what runs beside the kernel; the network apart."""

    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    bytes_by: Counter[str] = field(default_factory=Counter)
    held: int = 0
    peak: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self._in_kernel = False
        self._storages: dict[int, Any] = {}

    @contextmanager
    def kernel(self) -> Iterator[None]:
        """What runs inside belongs to the kernel; its outputs are memory all the same."""
        self._in_kernel = True
        try:
            yield
        finally:
            self._in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(x, Tensor)]
        before = {x.untyped_storage()._cdata for x in torch.utils._pytree.tree_leaves((args, kwargs)) if _is_tensor(x)}
        for output in outputs:
            if output.untyped_storage()._cdata not in before:
                self._hold(output)
        name = func.overloadpacket.__name__
        if self._in_kernel or func.namespace == "c10d":
            return result
        self.operations[name] += 1
        given = {name: value for name, value in (kwargs or {}).items() if name != "out"}
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, given)) if isinstance(x, Tensor)]
        moved = self._moved(name, inputs, outputs)
        self.bytes += moved
        self.bytes_by[name] += moved
        return result

    @staticmethod
    def _moved(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> int:
        size = {id(x): x.numel() * x.element_size() for x in (*inputs, *outputs)}
        written = sum(size[id(x)] for x in outputs)
        if name in VIEWS or name in NEW:
            return 0
        if name in PICKS:  # from a tensor of which only some rows are read
            return 2 * written + sum(size[id(x)] for x in inputs[1:] if not x.is_floating_point())
        if name in PLACES:
            return 2 * size[id(inputs[-1])] + sum(size[id(x)] for x in inputs[1:-1])
        if name in SUMS:  # rows are read where they are, and each result is written once
            row = inputs[0].element_size() * (inputs[0].numel() // max(inputs[0].shape[0], 1))
            return inputs[1].numel() * row + size[id(outputs[0])] + sum(size[id(x)] for x in inputs[1:])
        if name in ADDS:  # a row is read and written again
            into = inputs[-1].numel() * inputs[0].element_size()
            return sum(size[id(x)] for x in inputs[1:]) + 2 * into
        if name in FILLS:
            return written if name != "index_fill_" else 0
        if name == "copy_":
            return size[id(inputs[0])] + size[id(inputs[1])]
        distinct = {id(x) for x in inputs} - {id(x) for x in outputs}
        in_place = sum(size[id(x)] for x in outputs if any(x is y for y in inputs))
        return written + in_place + sum(size[key] for key in distinct)

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()

        def free(_: Any) -> None:
            self.held -= size
            self._storages.pop(key, None)

        self._storages[key] = weakref.ref(storage, free)
        self.held += size
        self.peak = max(self.peak, self.held)


# --- one layer --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """How attention is called."""

    transport: str = "all_gather"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ulysses_size: int | None = None

    def attend(self, inputs: tuple[Tensor, Tensor, Tensor], shard: wlb.Shard, group: Any) -> Tensor:
        """Forward."""
        return context_parallel_attention(
            *inputs,
            shard,
            group=group,
            transport=self.transport,  # type: ignore[arg-type]
            ulysses_size=self.ulysses_size,
        )

    def inputs(self, tokens: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values."""
        shapes = [(tokens, heads, self.head_dim) for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (torch.empty(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes)
        return q, k, v


def counted(layer: Layer, shard: wlb.Shard, rank: int) -> dict[str, Any]:
    """Operations, bytes and transient memory of a forward and a backward of one rank, on meta tensors."""
    stub = Stub()
    inputs = layer.inputs(int(shard.tokens_per_rank[rank]), "meta", torch.bfloat16)
    found: dict[str, Any] = {}
    with world(rank, shard.cp_size) as group, no_network(), only(stub):
        layer.attend(inputs, shard, group)  # the plan
        with Counting() as forward:
            stub.counting = forward
            out = layer.attend(inputs, shard, group)
        d_out = torch.empty_like(out)
        with Counting() as backward:
            stub.counting = backward
            gradients = torch.autograd.grad(out, inputs, d_out)
        del gradients
    for name, counting in (("forward", forward), ("backward", backward)):
        found[name] = {
            "operations": counting.operations.total(),
            "moving": sum(n for op, n in counting.operations.items() if op not in VIEWS | NEW),
            "bytes": counting.bytes,
            "peak": counting.peak,
            "by_operation": dict(counting.operations),
            "bytes_by": {op: n for op, n in counting.bytes_by.items() if n},
        }
    return found


def floor(layer: Layer, shard: wlb.Shard, rank: int) -> tuple[int, int]:
    """Bytes of packing each of the rank's keys and values once; of that, and adding each gradient to a float32 once."""
    elements = int(shard.tokens_per_rank[rank]) * layer.kv_heads * layer.head_dim * 2
    return elements * 4, elements * (4 + 2 + 8)


def host_seconds(layer: Layer, shard: wlb.Shard, rank: int, repeats: int = 60) -> tuple[float, float]:
    """Median microseconds of a forward and of a backward, on small tensors."""
    stub = Stub()
    inputs = layer.inputs(int(shard.tokens_per_rank[rank]), "cpu", torch.bfloat16)
    forward, backward = [], []
    with world(rank, shard.cp_size) as group, only(stub):
        for _ in range(repeats):
            started = time.thread_time()
            out = layer.attend(inputs, shard, group)
            forward.append(time.thread_time() - started)
            d_out = torch.empty_like(out)
            with torch.autograd.set_multithreading_enabled(False):
                started = time.thread_time()
                torch.autograd.grad(out, inputs, d_out)
                backward.append(time.thread_time() - started)
    return statistics.median(forward) * 1e6, statistics.median(backward) * 1e6


def plan_seconds(shard: wlb.Shard, repeats: int = 7, **options: Any) -> float:
    """Median milliseconds of the slowest rank's plan, of this thread's time."""
    slowest = 0.0
    for rank in {0, shard.cp_size // 2, shard.cp_size - 1}:
        taken = []
        for _ in range(repeats):
            attention.forget()
            started = time.thread_time()
            prepare_attention(shard, rank=rank, device="cpu", **options)
            taken.append(time.thread_time() - started)
        slowest = max(slowest, statistics.median(taken))
    return slowest * 1e3


def context(tokens: int, seed: int = 3) -> Lengths:
    """Documents of one micro-batch, the last cut to fill it."""
    lengths = synthetic(4 * tokens // 3000, seed)
    ends = np.minimum(np.cumsum(lengths), tokens)
    found: Lengths = np.diff(ends, prepend=0)
    return found[found > 0]


def loader_seconds(repeats: int = 5) -> float:
    """Median milliseconds of this thread for what a rank does for 64 micro-batches of 128K tokens at CP 8.

    It collates them, and plans their attention (`fetch`).
    """
    random = np.random.default_rng(0)
    lengths = [context(CONTEXT, seed) for seed in range(8)]
    documents = [[random.integers(0, 50_000, length) for length in row] for row in lengths]
    taken = []
    for _ in range(repeats):
        attention.forget()
        started = time.thread_time()
        for number in range(64):
            batch = collate(documents[number % 8][: -1 - number // 8], cp_rank=1, cp_size=8)
            prepare_attention(batch.shard, rank=1, device="cpu", transport="fetch")
        taken.append(time.thread_time() - started)
    return statistics.median(taken) * 1e3


BIG = {
    "CP 8, kv 8, auto, all_gather": (Layer("all_gather", kv_heads=8), 8, "auto"),
    "CP 8, kv 8, auto, fetch": (Layer("fetch", kv_heads=8), 8, "auto"),
    "CP 4, kv 32, per_document, all_gather": (Layer("all_gather", kv_heads=32), 4, "per_document"),
    "CP 4, kv 32, per_document, fetch": (Layer("fetch", kv_heads=32), 4, "per_document"),
    "CP 8, kv 8, per_document, ring": (Layer("ring", kv_heads=8), 8, "per_document"),
}


def moved(name: str, lengths: Lengths) -> dict[str, dict[str, float]]:
    """Bytes of the slowest rank of a layer, over the floor too, and the most memory that any rank holds."""
    layer, cp_size, strategy = BIG[name]
    shard = wlb.shard(lengths, cp_size=cp_size, strategy=strategy)  # type: ignore[arg-type]
    counts = [counted(layer, shard, rank) for rank in range(cp_size)]
    floors = [floor(layer, shard, rank) for rank in range(cp_size)]
    found = {}
    for i, of in enumerate(("forward", "backward")):
        worst = max(range(cp_size), key=lambda rank: counts[rank][of]["bytes"])
        found[of] = {
            "gigabytes": round(counts[worst][of]["bytes"] / 1e9, 2),
            "over_floor": round(counts[worst][of]["bytes"] / floors[worst][i], 2),
            "peak_gigabytes": round(max(count[of]["peak"] for count in counts) / 1e9, 2),
        }
    return found


def measure(progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Everything."""
    lengths = context(CONTEXT)
    record: dict[str, Any] = {"plan_ms": {}, "host_us": {}, "operations": {}, "bytes": {}}
    for cp_size in (2, 8, 32):
        for strategy in ("auto", "per_document"):
            shard = wlb.shard(lengths, cp_size=cp_size, strategy=strategy)  # type: ignore[arg-type]
            for transport in ("all_gather", "fetch", "ring"):
                key = f"{transport}, CP {cp_size}, {strategy}"
                record["plan_ms"][key] = round(plan_seconds(shard, transport=transport), 3)
                progress(f"plan {key}: {record['plan_ms'][key]} ms")

    small = wlb.shard([300, 90, 40, 40, 40, 30, 30, 30, 20, 20], cp_size=8)
    tiny = {"heads": 8, "kv_heads": 8, "head_dim": 8}
    layers = {
        "all_gather": (Layer("all_gather", **tiny), small),
        "fetch": (Layer("fetch", **tiny), small),
        "ring": (Layer("ring", **tiny), small),
        "ulysses": (Layer("ulysses", **tiny), small),
        "usp": (Layer("usp", ulysses_size=2, **tiny), small),
        "ring, CP 16": (Layer("ring", **tiny), wlb.shard([300, 90, 40, 30, 20], cp_size=16, strategy="per_document")),
    }
    for name, (layer, shard) in layers.items():
        counts = [counted(layer, shard, rank) for rank in range(shard.cp_size)]
        record["operations"][name] = {
            of: {key: max(count[of][key] for count in counts) for key in ("operations", "moving")}
            for of in ("forward", "backward")
        }
        forward, backward = np.max([host_seconds(layer, shard, rank) for rank in range(0, shard.cp_size, 3)], axis=0)
        record["host_us"][name] = {"forward": round(float(forward)), "backward": round(float(backward))}
        progress(f"{name}: {record['operations'][name]} {record['host_us'][name]} us")

    for name in BIG:
        record["bytes"][name] = moved(name, lengths)
        progress(f"{name}: {record['bytes'][name]}")
    record["loader_ms"] = round(loader_seconds(), 1)
    progress(f"loader: {record['loader_ms']} ms")
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--record", type=Path, help="a JSON file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    record = measure()
    if options.record:
        options.record.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
