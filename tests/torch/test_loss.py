"""The loss is the mean over all tokens, however they are packed; FLOPs come from true lengths."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import wlb
from tests.torch import processes
from wlb.models import Attention, FeedForward, Layer, Mask
from wlb.torch.flops import model_flops, model_flops_utilization, peak_flops
from wlb.torch.gradients import sum_gradients
from wlb.torch.groups import build_mesh
from wlb.torch.loss import IGNORE, count_valid_tokens, token_normalized_loss

SHAPE = {
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "vocab_size": 99,
}
VOCABULARY = 11


def batch_of(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A micro-batch whose size and share of masked labels depend on the rank; rank 2 has nothing."""
    generator = torch.Generator().manual_seed(rank)
    tokens = [7, 50, 0, 3][rank]
    inputs = torch.randn(tokens, 5, generator=generator)
    labels = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    labels[: tokens // 2 * (rank == 1)] = IGNORE
    return inputs, labels


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, VOCABULARY))


def train(rank: int) -> tuple[float, np.ndarray, int]:
    mesh = build_mesh(dp=4, device_type="cpu")
    net = model()
    fully_shard(net, mesh=mesh["dp"])
    sum_gradients(net)
    inputs, labels = batch_of(rank)
    group = mesh["dp"].get_group()
    step: Any = SimpleNamespace(number=0, num_ranks=4, parts=np.array([rank]), micro_batches=[{"labels": labels}])
    valid = count_valid_tokens(step, group=group)
    loss = token_normalized_loss(net(inputs), labels, num_valid_tokens=valid)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    gradient = torch.cat([parameter.grad.full_tensor().flatten() for parameter in net.parameters()])
    return total.item(), gradient.numpy(), valid


def test_unequal_ranks_give_the_mean_over_tokens() -> None:
    net = model()
    inputs, labels = (torch.cat(parts) for parts in zip(*map(batch_of, range(4)), strict=True))
    loss = F.cross_entropy(net(inputs), labels)
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in net.parameters()]).numpy()
    for total, summed, valid in processes.run(4, train):
        assert valid == int((labels != IGNORE).sum())
        assert total == pytest.approx(loss.item(), rel=1e-6)
        assert np.abs(summed - gradient).max() <= 1e-5 * np.abs(gradient).max()


@pytest.mark.parametrize("valid", [0, torch.tensor(0)])
def test_nothing_to_predict_is_a_loss_of_zero(valid: int | torch.Tensor) -> None:
    logits = torch.randn(3, VOCABULARY, requires_grad=True)
    loss = token_normalized_loss(logits, torch.full((3,), IGNORE), num_valid_tokens=valid)
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()
    assert token_normalized_loss(logits, torch.zeros(3).long(), num_valid_tokens=1, ignore_index=0).item() == 0


def test_counts_are_those_of_labels() -> None:
    """0 included: what a trainer looks at to skip the update."""
    step: Any = SimpleNamespace(number=0, num_ranks=1, parts=np.array([0]), micro_batches=[])
    assert count_valid_tokens(step) == 0
    step.micro_batches = [{"labels": torch.tensor([IGNORE, 1])}, {"labels": torch.tensor([2, 3])}]
    assert count_valid_tokens(step) == 3
    step.micro_batches = [object()]
    with pytest.raises(wlb.WlbError, match="without labels: count"):
        count_valid_tokens(step)
    logits = torch.randn(3, VOCABULARY)
    for count in (-1, 1.5):
        with pytest.raises(wlb.WlbError, match="num_valid_tokens"):
            token_normalized_loss(logits, torch.full((3,), IGNORE), num_valid_tokens=count)  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError, match=r"num_valid_tokens = 0, but labels"):
        token_normalized_loss(logits, torch.tensor([IGNORE, IGNORE, 4]), num_valid_tokens=0)


def test_half_precision_logits_are_computed_in_float32() -> None:
    logits, labels = torch.randn(50, VOCABULARY).bfloat16(), torch.arange(50) % VOCABULARY
    loss = token_normalized_loss(logits, labels, num_valid_tokens=50)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=1e-6)


@pytest.mark.parametrize(
    ("logits", "labels", "argument"),
    [((3, 4, 5), (3,), "logits"), ((3, 5), (4,), "labels"), ((3, 5), (3, 1), "labels")],
)
def test_wrong_shapes_are_named(logits: tuple[int, ...], labels: tuple[int, ...], argument: str) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        token_normalized_loss(torch.zeros(logits), torch.zeros(labels, dtype=torch.int64), num_valid_tokens=1)
    assert raised.value.argument == argument


def test_flops_are_those_of_the_documents() -> None:
    """6 FLOPs a parameter and token, 12 * hidden a pair and layer, whatever the documents lie next to."""
    lengths = [1, 10, 1000]
    head = 64 // 4
    parameters = 3 * (64 * head * (2 * 4 + 2 * 2) + 3 * 64 * 128) + 64 * 99
    pairs = sum(d * (d + 1) // 2 for d in lengths)
    assert model_flops(lengths, **SHAPE) == pytest.approx(
        6 * parameters * sum(lengths) + 12 * 64 * 3 * pairs, rel=1e-12
    )
    assert model_flops([1011], **SHAPE) > model_flops(lengths, **SHAPE)


def test_flops_of_layers_of_any_kind() -> None:
    layers = tuple(
        Layer((Attention(num_heads=4, num_kv_heads=2, head_dim=16, mask=mask), FeedForward(width=128)))
        for mask in (Mask("window", 8), Mask("chunk", 5), Mask())
    )
    model = wlb.ModelConfig(hidden_size=64, vocab_size=99, layers=layers)
    # 20 tokens: under the window 36 and 12 x 8 pairs, in four chunks 15 each, of all keys 210.
    parameters = 3 * (64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128) + 64 * 99
    assert model_flops([20], model) == 6 * parameters * 20 + 12 * 64 * (36 + 96 + 60 + 210)
    with pytest.raises(wlb.WlbError, match="hidden_size = 64: the model says that"):
        model_flops([20], model, hidden_size=64)


@pytest.mark.parametrize("argument", ["attention_efficiency", "flops_per_second", "recompute", "passes"])
def test_flops_take_a_shape_only(argument: str) -> None:
    with pytest.raises(wlb.WlbError, match="is no shape") as raised:
        model_flops([10], **SHAPE, **{argument: 1})
    assert raised.value.argument == argument


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H200 PCIe", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA A100X", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peaks_by_name(name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops() == peak


def test_utilization() -> None:
    assert model_flops_utilization(8e12, seconds=2.0, num_devices=4, peak=2e12) == pytest.approx(0.5)
    with pytest.raises(wlb.WlbError):
        model_flops_utilization(1.0, seconds=0.0, num_devices=4, peak=2e12)
    with pytest.raises(wlb.WlbError, match="peak = None"):
        model_flops_utilization(1.0, seconds=1.0, num_devices=4, peak=None)
