"""Attention, the loss and what is sent to a device never wait for a device: no value of a tensor is asked for.

A dispatch mode sees every operation. On the CPU it finds values that are read; with fake CUDA tensors also copies
between devices, and that shapes, dtypes and devices of the CUDA paths fit, without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import wlb
import wlb.torch as wt
from benches import attention as bench
from tests.torch import processes
from tests.torch.upstream import UPSTREAM, bound
from wlb.integrations.megatron.sharing import Sharing
from wlb.integrations.with_labels import steps_with_labels
from wlb.torch import attention
from wlb.torch.attention import kernels
from wlb.torch.collectives import device_of
from wlb.torch.host import host_group

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
    monkeypatch.setattr(kernels, "_flash_attn_4", lambda: None)
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


@pytest.mark.parametrize("transport", ["all_gather", "ring"])
def test_a_prepared_plan_on_a_gpu_is_the_one_that_a_layer_takes(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in buckets, for which a layer has to know its kernel."""
    shapes = [(int(SHARD.tokens_per_rank[1]), heads, 64) for heads in (8, 4, 4)]
    with bench.world(1, 4) as group, bench.no_network(), fake_cuda(monkeypatch):
        wt.prepare_attention(SHARD, rank=1, device="cuda:0", transport=transport)
        q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda:0") for shape in shapes)
        wt.context_parallel_attention(q, k, v, SHARD, group=group, transport=transport)
        made = [made.cache_info().misses for made in (attention.plan.keys_plan, attention.plan.ring_plan)]
    assert sum(made) == 1


def shapes_alone(version: int) -> ModuleType:
    """Flash-attn without its kernels: it checks what it is given as upstream does, and gives what is not filled."""

    def check(options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        q, k, v = (options[name] for name in ("q", "k", "v"))
        assert {x.device for x in options.values() if isinstance(x, Tensor)} == {q.device}
        assert q.dtype == k.dtype == v.dtype == torch.bfloat16
        assert options["cu_seqlens_q"].dtype == options["cu_seqlens_k"].dtype == torch.int32
        assert options["cu_seqlens_q"].shape == options["cu_seqlens_k"].shape
        assert q.shape[2] == k.shape[2]
        assert k.shape[:2] == v.shape[:2]
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    def forward(options: dict[str, Any]) -> tuple[Tensor, ...]:
        out, lse = check(options)
        into = options.get("out", options.get("out_"))
        if into is not None:
            assert (into.shape, into.dtype, into.stride(-1)) == (out.shape, out.dtype, 1)
        return out if into is None else into, lse, out.new_empty(0), out.new_empty(0)

    def backward(options: dict[str, Any]) -> Tensor:
        out, lse = check(options)
        given = options["softmax_lse" if version < 4 else "lse"]
        assert (given.shape, given.dtype) == (lse.shape, lse.dtype)
        for name, like in (
            ("out", out),
            ("dout", out),
            ("dq", options["q"]),
            ("dk", options["k"]),
            ("dv", options["v"]),
        ):
            assert (options[name].shape, options[name].dtype, options[name].stride(-1)) == (like.shape, like.dtype, 1)
        return lse

    module, names, *parameters = UPSTREAM[version]
    made = ModuleType(module)
    for name, given, compute in zip(names, parameters, (forward, backward), strict=True):
        setattr(made, name, bound(given, compute))
    return made


@pytest.mark.parametrize("transport", ["all_gather", "fetch", "ring", "ulysses"])
@pytest.mark.parametrize("widths", [(64, 64), (192, 128)], ids=str)
@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attn_gets_what_it_takes(
    version: int, widths: tuple[int, int], transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward on a GPU that is not there, with a cap and sinks: shapes, dtypes, devices; nothing waits."""
    tokens = int(SHARD.tokens_per_rank[1])
    shapes = [(tokens, 8, widths[0]), (tokens, 4, widths[0]), (tokens, 4, widths[1])]
    with bench.world(1, 4) as group, bench.no_network(), fake_cuda(monkeypatch):
        monkeypatch.setattr(kernels, f"_flash_attn_{version}", lambda: shapes_alone(version))
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda:0", requires_grad=True) for shape in shapes]
        sinks = torch.empty(8, dtype=torch.float32, device="cuda:0", requires_grad=True)
        options: dict[str, Any] = {"group": group, "transport": transport, "softcap": 30.0, "sinks": sinks}
        with Waits() as waits:
            out: Any = wt.context_parallel_attention(*tensors, SHARD, kernel="flash_attn", **options)
            # Autograd has no thread for a device that is not there: the backward is called by itself.
            node = out.grad_fn
            while "_Attention" not in node.name():
                node = node.next_functions[0][0]
            attended = node.saved_tensors[5]
            *gradients, _, _, _, _, d_sinks, _, _ = node.apply(torch.empty_like(attended), None)
        assert (out.shape, out.dtype, out.device) == ((tokens, 8, widths[1]), torch.bfloat16, tensors[0].device)
        assert attended.shape[2] == (widths[1] if version > 2 else widths[0])
        for x, gradient in zip(node.saved_tensors[:3], gradients, strict=True):
            assert (x.shape, x.dtype, x.device) == (gradient.shape, gradient.dtype, gradient.device)
        assert (d_sinks.shape, d_sinks.dtype) == (node.saved_tensors[3].shape, sinks.dtype)
    assert waits.found == []


def on_the_host(rank: int) -> tuple[int, bool, int | None, str | None]:
    """Over groups that have no backend for the host, as with NCCL alone; there is no GPU that could help."""
    group = dist.new_group(backend="cuda:gloo")
    assert group is not None
    with pytest.raises((RuntimeError, AssertionError)):
        dist.all_reduce(torch.zeros(1, device=device_of(group)), group=group)
    made = host_group(group, description="test")
    loader = wt.balanced_loader(
        [np.arange(1, 9), np.arange(1, 5)] * 4,
        max_tokens=16,
        tokens_per_batch=32,
        cost_model=wlb.CostModel(attention=1.0, linear=1.0),
        group=dist.group.WORLD,
    )
    _, labels = next(steps_with_labels(loader, group=group))
    one = dist.new_group([rank], use_local_synchronization=True)
    assert one is not None
    header = Sharing[str](tp=group, pp=one, device=torch.device("cuda")).header("known" if rank == 0 else None)
    return made.size(), made is host_group(group, description="again"), labels, header


def test_what_a_step_is_divided_by_waits_for_no_device() -> None:
    found = processes.run(2, on_the_host)
    assert found == [(2, True, found[0][2], "known")] * 2
    assert found[0][2] is not None
    assert found[0][2] > 0


def test_a_group_that_talks_on_the_host_is_its_own() -> None:
    assert processes.run(2, is_its_own) == [True, True]


def is_its_own(rank: int) -> bool:
    return host_group(description="test") is dist.group.WORLD
