"""Attention as an operator: one graph of torch.compile, selective checkpointing, sharded parameters, autocast."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.attention import operator

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
WIDTH = HEADS * HEAD_DIM
MICRO_BATCHES = ((33, 5, 10), (1, 64, 3, 9), (7,))
OPTIONS: list[dict[str, Any]] = [
    {"transport": "all_gather"},
    {"transport": "fetch", "window": 9},
    {"transport": "ulysses"},
    {"transport": "ring", "return_lse": True, "window": 6},
    {"transport": "all_gather", "sinks": True, "softcap": 3.0},
]


class Layer(nn.Module):
    """A projection, attention, a projection back."""

    def __init__(self, options: dict[str, Any], group: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.of_inputs = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.of_output = nn.Linear(WIDTH, WIDTH)
        self.options, self.group = dict(options), group
        self.sinks = nn.Parameter(torch.randn(HEADS)) if self.options.pop("sinks", False) else None

    def forward(self, x: Tensor, shard: Any) -> Tensor:
        parts = self.of_inputs(x).unflatten(1, (-1, HEAD_DIM)).split([HEADS, KV_HEADS, KV_HEADS], 1)
        out: Any = wt.context_parallel_attention(*parts, shard, group=self.group, sinks=self.sinks, **self.options)  # type: ignore[call-overload]
        if self.options.get("return_lse"):
            out = out[0] * torch.sigmoid(out[1]).unsqueeze(-1)
        result: Tensor = x + self.of_output(out.flatten(1))
        return result


def step(layer: Callable[..., Tensor], parameters: Sequence[Tensor], x: Tensor, shard: Any) -> list[Tensor]:
    """Output and gradients."""
    out = layer(x, shard)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), parameters)]


def inputs(lengths: tuple[int, ...], rank: int, size: int) -> tuple[wlb.Shard, Tensor]:
    shard = wlb.shard(lengths, cp_size=size)
    generator = torch.Generator().manual_seed(sum(lengths))
    x = torch.randn(sum(lengths), WIDTH, generator=generator)
    return shard, x[torch.from_numpy(shard.rank(rank).token_indices.astype(np.int64))]


def prepared(shard: wlb.Shard, rank: int, options: dict[str, Any]) -> Tensor:
    return wt.prepare_attention(
        shard, rank=rank, device="cpu", transport=options["transport"], window=options.get("window")
    )


def compiled_layers(rank: int) -> list[tuple[float, int, int]]:
    """Of each way of calling: the largest difference from the plain layer, graphs, operators of attention in them."""
    group = dist.group.WORLD if dist.is_initialized() else None
    size = dist.get_world_size() if group is not None else 1
    found = []
    for options in OPTIONS:
        graphs: list[torch.fx.GraphModule] = []

        def keep(graph: torch.fx.GraphModule, _: object, graphs: list[Any] = graphs) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        layer = Layer(options, group)
        parameters = list(layer.parameters())
        torch._dynamo.reset()
        compiled = torch.compile(layer, backend=keep, fullgraph=True, dynamic=True)
        worst = 0.0
        for lengths in MICRO_BATCHES:
            shard, x = inputs(lengths, rank, size)
            ours = step(compiled, parameters, x, prepared(shard, rank, options))
            plain = step(layer, parameters, x, shard)
            worst = max([worst, *(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True) if a.numel())])
        nodes = [node for graph in graphs for node in graph.graph.nodes if "wlb.attention" in str(node.target)]
        found.append((worst, len(graphs), len(nodes)))
    return found


@pytest.mark.parametrize("size", [1, 2])
def test_compiled_layers_are_one_graph_for_all_micro_batches(size: int) -> None:
    for found in processes.run(size, compiled_layers):
        for (worst, graphs, nodes), options in zip(found, OPTIONS, strict=True):
            assert worst < 1e-4, options
            assert (graphs, nodes) == (1, 1), options


TINY = ((1,), (1, 1), (2,), (1, 1, 1))
"""Ranks without tokens, and with one."""


def tiny_layers(rank: int) -> list[float]:
    """The operator, on ranks with hardly a token: differences from the plain layer."""
    found = []
    for options in OPTIONS:
        layer = Layer(options, dist.group.WORLD)
        parameters = list(layer.parameters())
        for lengths in TINY:
            shard, x = inputs(lengths, rank, 2)
            pair = [step(layer, parameters, x, shard), step(layer, parameters, x, prepared(shard, rank, options))]
            found += [float((a - b).abs().max()) for a, b in zip(*pair, strict=True) if a.numel()]
    return found


def test_the_operator_runs_on_ranks_without_tokens() -> None:
    for found in processes.run(2, tiny_layers):
        assert max(found) < 1e-5


def traced_backward(rank: int) -> float:
    """Through AOTAutograd, which traces the backward too: differences from the plain layer."""
    layer = Layer({"transport": "all_gather", "sinks": True}, None)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    worst = 0.0
    for lengths in MICRO_BATCHES:
        shard, x = inputs(lengths, 0, 1)
        pair = [step(layer, list(layer.parameters()), x, shard)]
        pair.append(step(compiled, list(layer.parameters()), x, prepared(shard, 0, layer.options)))
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(*pair, strict=True)))
    return worst


def test_the_backward_is_an_operator_too() -> None:
    assert processes.run(1, traced_backward)[0] < 1e-4


def checkpointed(rank: int) -> tuple[float, dict[str, int]]:
    """Attention is kept by a policy that names it: not computed again in the backward."""
    layer = Layer({"transport": "fetch"}, dist.group.WORLD)
    shard, x = inputs(MICRO_BATCHES[0], rank, 2)
    ran: Counter[str] = Counter()
    attend = operator._ATTEND[0]

    def counted(*args: Any, known: Any = None, **options: Any) -> Any:
        ran["forward" if known is None else "backward"] += 1
        return attend(*args, known=known, **options)

    operator.attends(counted)

    def policy(_: Any, function: Any, *args: Any, **options: Any) -> CheckpointPolicy:
        kept = function == torch.ops.wlb.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def recomputed(x: Tensor, shard: Any) -> Tensor:
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        result: Tensor = checkpoint(layer, x, shard, use_reentrant=False, context_fn=contexts)
        return result

    parameters = list(layer.parameters())
    plain = step(layer, parameters, x, shard)
    ours = step(recomputed, parameters, x, prepared(shard, rank, layer.options))
    return max(float((a - b).abs().max()) for a, b in zip(ours, plain, strict=True)), dict(ran)


def test_a_policy_of_checkpointing_keeps_attention() -> None:
    for worst, ran in processes.run(2, checkpointed):
        assert worst < 1e-5
        assert ran == {"forward": 1, "backward": 1}


def sharded_and_autocast(rank: int) -> float:
    """Under FSDP2 and autocast, against the same layer with a shard in place of the tensor."""
    from torch.distributed.fsdp import fully_shard

    shard, x = inputs(MICRO_BATCHES[1], rank, 2)
    found = []
    for stands_for in (shard, prepared(shard, rank, {"transport": "all_gather"})):
        layer = Layer({"transport": "all_gather"}, dist.group.WORLD)
        fully_shard(layer)
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x, stands_for)
        out.square().sum().backward()
        gradients = [parameter.grad.full_tensor() for parameter in layer.parameters()]  # type: ignore[union-attr]
        found.append([out.detach(), *gradients])
    return max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def test_sharded_parameters_and_autocast_change_nothing() -> None:
    assert max(processes.run(2, sharded_and_autocast)) < 1e-6


def test_a_tensor_that_stands_for_no_shard_is_refused() -> None:
    q = torch.zeros(4, 2, 8)
    for wrong, message in (
        (torch.tensor([0]), "= 0: no shard of this process"),
        (torch.tensor(1), "not what prepare_attention returned"),
        (torch.tensor([1.0]), "not what prepare_attention returned"),
    ):
        with pytest.raises(wlb.WlbError, match=message) as refused:
            wt.context_parallel_attention(q, q, q, wrong)
        assert refused.value.argument == "shard"


def test_equal_shards_have_one_number_and_the_last_ones_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "KEPT", 3)
    kept = operator._Prepared()
    numbers = [kept.add(wlb.shard([length], cp_size=1)) for length in (1, 2, 1, 3, 4)]
    assert torch.equal(numbers[0], numbers[2])
    assert kept.get(numbers[0]) == wlb.shard([1], cp_size=1)
    with pytest.raises(wlb.WlbError, match="3 others were prepared after it"):
        kept.get(numbers[1])
