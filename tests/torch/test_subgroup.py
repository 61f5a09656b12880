"""Subgroups in real process groups, beside groups that torch makes."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.collectives import device_of, timeout_of
from wlb.torch.subgroup import Subgroup

RANKS = [1, 3, 4]


def collectives(rank: int, group: Any) -> dict[str, Any]:
    """What each collective gives on a rank, of tensors that follow from its rank."""
    generator = torch.Generator().manual_seed(rank)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    me, size = dist.get_rank(group), dist.get_world_size(group)
    found: dict[str, Any] = {"place": [me, size, *dist.get_process_group_ranks(group)]}
    rows = np.random.default_rng(0).integers(0, 4, (size, size))  # from each rank to each
    rows[0, 1] = 0
    sent, output = draw(int(rows[me].sum()), 2), torch.empty(int(rows[:, me].sum()), 2)
    dist.all_to_all_single(output, sent, rows[:, me].tolist(), rows[me].tolist(), group=group)
    found["all_to_all_single"] = output
    output = torch.empty(size, 2)
    dist.all_to_all_single(output, draw(size, 2), group=group)
    found["all_to_all_single, equal parts"] = output
    output = torch.empty(size * 3, 2)
    dist.all_gather_into_tensor(output, draw(3, 2), group=group)
    found["all_gather_into_tensor"] = output
    outputs = [torch.empty(2) for _ in range(size)]
    dist.all_gather(outputs, draw(2), group=group)
    found["all_gather"] = outputs
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, [rank] * rank, group=group)
    found["all_gather_object"] = objects
    for name in ("SUM", "AVG", "MAX", "MIN"):
        tensor = draw(3, 2).mT  # not contiguous
        if name == "AVG" and not isinstance(group, Subgroup):  # which gloo has not
            dist.all_reduce(tensor, group=group)
            tensor /= size
        else:
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name), group=group)
        found[name] = tensor
    tensor = draw(3, 2).mT
    dist.broadcast(tensor, src=RANKS[0], group=group)
    found["broadcast"] = tensor
    waiting = []
    for _ in range(3):  # several under way
        output = torch.empty(size)
        waiting.append((output, dist.all_gather_into_tensor(output, draw(1), group=group, async_op=True)))
    for _, work in waiting:
        work.wait()
        assert work.is_completed()
    found["async_op"] = [output for output, _ in waiting]
    dist.barrier(group=group)
    return found


def beside_torch(rank: int) -> bool:
    """Whether collectives of the subgroup give what those of a group of torch with the same ranks do."""
    theirs = dist.new_group(RANKS)
    if rank not in RANKS:
        return True
    mine = Subgroup(None, RANKS)
    torch.testing.assert_close(collectives(rank, mine), collectives(rank, theirs))
    assert mine.group_name != Subgroup(None, RANKS).group_name
    assert (dist.get_backend(mine), device_of(mine)) == (dist.get_backend(theirs), device_of(theirs))
    return timeout_of(mine, "cpu") == timedelta(seconds=processes.TIMEOUT)


def test_collectives_give_what_those_of_torch_give() -> None:
    assert all(processes.run(5, beside_torch))


def refusals(rank: int) -> list[str]:
    group = Subgroup(None, [0, 2]) if rank != 1 else None
    one, said = torch.ones(1), []
    calls: list[Callable[[], object]] = [lambda: Subgroup(None, [0, 3 - rank])]
    if rank == 1:
        part = dist.new_group([0, 1])
        calls.append(lambda: Subgroup(part, [1, 2]))
    else:
        dist.new_group([0, 1])
        calls += [
            lambda: dist.reduce(one, 0, group=group),
            lambda: dist.gather(one, [one, one] if rank == 0 else None, 0, group=group),
            lambda: dist.send(one, 2 - rank, group=group),
            lambda: dist.all_reduce(one, dist.ReduceOp.PRODUCT, group=group),
        ]
    for call in calls:
        with pytest.raises(wlb.WlbError) as caught:
            call()
        said.append(str(caught.value))
    return said


def test_what_a_subgroup_cannot_do_is_refused_by_name() -> None:
    first, second, _ = processes.run(3, refusals)
    assert "rank 1, which asks, is not among them" in second[0]
    assert "ranks [2] are not in the parent [0, 1]" in second[1]
    assert ["no reduce" in first[1], "no gather" in first[2], "no send" in first[3]] == [True] * 3
    assert "a subgroup has SUM, AVG, MAX and MIN" in first[4]


def tied(rank: int) -> list[float]:
    """Ranks 0 and 2 of a pipeline tie a weight; then the world makes a group, whatever they were in before."""
    weight = nn.Parameter(torch.full((3,), 1.0 + rank)) if rank != 1 else None
    if rank == 0:
        Subgroup(None, [0])
    copies = wt.TiedWeights(weight)
    if weight is not None:
        weight.grad = torch.full((3,), float(rank + 5))
    copies.all_reduce_gradients()
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group())
    return [total.item()] if weight is None or weight.grad is None else [*weight.tolist(), *weight.grad.tolist()]


def test_tied_weights_make_no_group() -> None:
    assert processes.run(3, tied, timeout=60) == [[1.0] * 3 + [12.0] * 3, [3.0], [1.0] * 3 + [12.0] * 3]


def compiled(rank: int) -> float:
    """Attention over a subgroup in a compiled function, against the same as it is. The largest difference."""
    if rank == 0:
        return 0.0
    group = Subgroup(None, [1, 2])
    shard = wlb.shard([20, 7], cp_size=2)
    rows = shard.rank(rank - 1).token_indices.size
    given = [torch.randn(rows, 2, 8, requires_grad=True) for _ in range(3)]
    prepared = wt.prepare_attention(shard, rank=rank - 1, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor, shard: Tensor) -> Tensor:
        return wt.context_parallel_attention(q, k, v, shard, group=group) * 2

    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = function(*given, prepared)
        results.append([out, *torch.autograd.grad(out.sum(), given)])
    return max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))


def test_attention_compiles_over_a_subgroup() -> None:
    assert max(processes.run(3, compiled)) == 0.0
