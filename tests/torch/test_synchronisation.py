"""Attention, the loss and what is sent to a device never wait for a device: no value of a tensor is asked for.

A dispatch mode sees every operation. On the CPU it finds values that are read; with fake CUDA tensors also copies
between devices, and that shapes, dtypes and devices of the CUDA paths fit, without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import wlb
import wlb.torch as wt
from benches import attention as bench
from wlb.torch import attention
from wlb.torch.attention import kernels

READ = {"_local_scalar_dense", "item", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2", "unique_dim"}


class Waits(TorchDispatchMode):
    """Operations for which the host has to wait."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        devices = {x.device.type for x in tensors if x.ndim > 0 or x.device.type != "cpu"}
        to_device = name == "_to_copy" and args[0].device.type == "cpu" and (kwargs or {}).get("non_blocking")
        if name in READ or (len(devices) > 1 and not to_device):
            self.found.append(str(func))
        return result


OPTIONS: list[dict[str, Any]] = [
    *({"transport": transport} for transport in ("all_gather", "fetch", "ring", "ulysses")),
    {"transport": "usp", "ulysses_size": 2},
    {"transport": "fetch", "window": 50},
]
SHARD = wlb.shard([300, 90, 40, 40, 40, 30, 30, 30, 20, 20], cp_size=4)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_layers_read_no_value(options: dict[str, Any]) -> None:
    layer = bench.Layer(heads=4, kv_heads=4, head_dim=8, **{k: v for k, v in options.items() if k != "window"})
    inputs = layer.inputs(int(SHARD.tokens_per_rank[1]), "cpu", torch.bfloat16)
    with bench.world(1, 4) as group, Waits() as waits:
        for _ in range(2):  # with the plan, and without
            out = wt.context_parallel_attention(*inputs, SHARD, group=group, kernel="reference", **options)
            torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert waits.found == []


def test_the_prepared_operator_reads_nothing_of_a_device() -> None:
    q, k, v = (torch.randn(9, 2, 8) for _ in range(3))
    prepared = wt.prepare_attention(wlb.shard([9], cp_size=1), rank=0, device="cpu")
    with Waits() as waits:
        wt.context_parallel_attention(q, k, v, prepared)
    assert set(waits.found) <= {"aten._local_scalar_dense.default"}  # the number, which lies on the CPU


def test_what_waits_is_seen() -> None:
    with Waits() as waits:
        torch.ones(3).sum().item()
        torch.ones(3).nonzero()
    assert waits.found == ["aten._local_scalar_dense.default", "aten.nonzero.default"]
    with FakeTensorMode(), Waits() as waits:
        there = torch.ones(3).to("cuda:0", non_blocking=True)
        assert waits.found == []
        there.cpu()
        torch.ones(3).to("cuda:0")
    assert waits.found == ["aten._to_copy.default"] * 2


def test_losses_read_no_value() -> None:
    batch = wt.collate([np.arange(1, 9), np.arange(1, 5)])
    logits = torch.randn(12, 11, requires_grad=True)
    with Waits() as waits:
        loss = wt.token_normalized_loss(logits, batch.labels, num_valid_tokens=batch.num_valid_tokens)
        torch.autograd.grad(loss, logits)
    assert waits.found == []


@contextmanager
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on a Hopper GPU that is not there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, *_: tensor)
    monkeypatch.setattr(kernels, "_flash_attn_2", lambda: None)
    monkeypatch.setattr(kernels, "_flash_attn_3", lambda: None)
    monkeypatch.setattr(bench.dist, "all_reduce", lambda *_, **__: None)
    attention.forget()
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield
    attention.forget()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("rank", [0, 3])
def test_cuda_paths_fit_and_wait_for_nothing(
    options: dict[str, Any], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(int(SHARD.tokens_per_rank[rank]), heads, 64) for heads in (8, 4, 4)]
    with bench.world(rank, 4) as group, bench.no_network(), fake_cuda(monkeypatch):
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda:0") for shape in shapes)
        with Waits() as waits:
            out = wt.context_parallel_attention(q, k, v, SHARD, group=group, kernel="varlen", **options)
        assert (out.shape, out.dtype, out.device) == (q.shape, q.dtype, q.device)
    assert waits.found == []
