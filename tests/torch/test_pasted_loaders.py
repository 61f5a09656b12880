"""The loaders that `wlb tune` prints, executed as they are printed, over real process groups."""

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

import wlb
import wlb.torch.data  # before the processes fork: importing it takes most of their time
from tests.torch import processes
from wlb_tools.command.output import loaders

COST = wlb.CostModel(attention=1.0, linear=100.0)
PLAN = functools.partial(
    wlb.plan_dynamic_cp, cost_model=COST, world_size=2, num_stages=1, max_tokens_per_rank=150, min_micro_batches=1
)


class Dataset(list[np.ndarray]):
    """Documents that hold their own number, from 1 on, and their lengths."""

    def __init__(self) -> None:
        self.lengths = np.random.default_rng(0).integers(2, 100, 40)
        super().__init__(np.full(length, number) for number, length in enumerate(self.lengths, start=1))


class Ranks:
    """As much of a mesh as the loaders use."""

    get_group = staticmethod(lambda: dist.group.WORLD)
    get_local_rank = staticmethod(dist.get_rank)
    size = staticmethod(dist.get_world_size)


def printed(*functions: Callable[..., Any], **names: Any) -> dict[str, Any]:
    """What the text of functions defines, with what the configuration defines above them."""
    made = dict(names)
    for function in functions:
        exec(inspect.getsource(function), made)
    return made


def trained(steps: Any) -> list[int]:
    """Numbers of the documents that have tokens on this rank."""
    return [int(number) for step in steps for batch in step.micro_batches for number in batch.tokens.unique()]


def read(rank: int, name: str) -> list[int]:
    dataset, batches = Dataset(), [list(range(start, start + 10)) for start in range(0, 40, 10)]
    sizes: dict[str, Any] = {"num_micro_batches": 2, "max_tokens": 2000, "tokens_per_batch": 1000}
    packer = wlb.Packer(**sizes, cost_model=COST, outlier_thresholds=(80,))
    if name == "loader":
        made = printed(loaders.loader, plan=PLAN)
        shares: Any = [[dataset[index] for index in batch[rank::2]] for batch in batches]
    elif name == "released":
        made = printed(loaders.released, loaders.loader, plan=PLAN, packer=packer)
        shares = made["released"](dataset, batches, Ranks)
    else:
        made = printed(loaders.sampled, loaders.loader, plan=PLAN, packer=packer)
        shares = made["sampled"](dataset, Ranks)
    steps = made["loader"](shares, Ranks)
    if name == "sampled":
        steps = itertools.islice(steps, 3)
    return trained(steps)


@pytest.mark.parametrize("name", ["loader", "released", "sampled"])
def test_a_printed_loader_reads_documents(name: str) -> None:
    read_by_rank = processes.run(2, read, name)
    documents = set(itertools.chain(*read_by_rank)) - {0}  # padding
    if name == "sampled":  # of epochs without end
        assert len(documents) > 20
    else:
        assert documents == set(range(1, 41)), "no document is lost"
