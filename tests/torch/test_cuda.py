"""What needs a GPU: kernels that write beside other rows, and layers for which the host does not wait."""

from __future__ import annotations

import pytest
import torch

import wlb
import wlb.torch as wt
from studies.gpu import parity
from wlb.torch import attention
from wlb.torch.attention import kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

LENGTHS = (1, 300, 77, 2, 40)


@pytest.mark.parametrize("mask", parity.MASKS)
@pytest.mark.parametrize("heads", parity.HEADS)
def test_every_kernel_is_right_on_each_rank(mask: str, heads: str) -> None:
    """Each rank of four by itself: outputs and gradients of its rows are written where they belong."""
    device = torch.device("cuda")
    problem = parity.Problem(heads, 64, mask, LENGTHS, device)
    for name, kernel in parity.installed(device).items():
        found = parity.one(kernel, problem, 4)
        assert found["ok"], (name, found)


@pytest.mark.parametrize("mask", ["causal", "window 37"])
@pytest.mark.parametrize("scores", parity.SCORES)
def test_caps_sinks_and_narrow_values_are_right_on_each_rank(scores: str, mask: str) -> None:
    device = torch.device("cuda")
    problem = parity.Problem("GQA", parity.SCORES[scores][0], mask, LENGTHS, device, scores)
    for name, kernel in parity.installed(device).items():
        if parity.runs(kernel, problem):
            found = parity.one(kernel, problem, 4)
            assert found["ok"], (name, found)


def test_buckets_change_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    shard = wlb.shard([*[3] * 60, 4096], cp_size=1)
    q, k, v = (torch.randn(shard.num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    found = []
    for gains in (True, False):
        monkeypatch.setattr(kernels, "gains_by_buckets", lambda kernel, gains=gains: gains)
        attention.forget()
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = wt.context_parallel_attention(*leaves, shard)
        found.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    attention.forget()
    for ours, right in zip(*found, strict=True):
        torch.testing.assert_close(ours, right, atol=1e-2, rtol=1e-2)


def test_the_host_does_not_wait() -> None:
    shard = wlb.shard(LENGTHS, cp_size=1)
    q, k, v = (torch.randn(sum(LENGTHS), 4, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    wt.prepare_attention(shard, rank=0, device="cuda")
    torch.autograd.backward(wt.context_parallel_attention(q, k, v, shard).sum())  # loads what is loaded once
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.backward(wt.context_parallel_attention(q, k, v, shard).sum())
    finally:
        torch.cuda.set_sync_debug_mode("default")
