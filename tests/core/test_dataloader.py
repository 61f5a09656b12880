"""Plans made in the worker processes of a torch DataLoader."""

from collections.abc import Iterator
from typing import Any

import plans
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import wlb

TIMEOUT = 500  # seconds until a worker that says nothing is an error
START_METHODS = [("fork", 2), ("spawn", 1)]  # a spawned worker takes seconds to import torch


class Plans(Dataset[list[str]]):
    """Item i: how global batch i is packed and sharded."""

    def __len__(self) -> int:
        return plans.NUM_BATCHES

    def __getitem__(self, number: int) -> list[str]:
        lengths = plans.batch(number)
        return plans.pack_digests(lengths) + plans.shard_digests(lengths)


class Stream(IterableDataset[str]):
    """A packer that travels to the worker with what it already holds."""

    def __init__(self, packer: wlb.Packer) -> None:
        self.packer = packer

    def __iter__(self) -> Iterator[str]:
        for number in range(1, plans.NUM_BATCHES):
            yield self.packer.push(plans.batch(number)).digest()
        for packing in self.packer.flush():
            yield packing.digest()


def workers(of: Any, start_method: str, num_workers: int) -> Any:
    return DataLoader(
        of, batch_size=None, num_workers=num_workers, multiprocessing_context=start_method, timeout=TIMEOUT
    )


@pytest.mark.parametrize("how", START_METHODS)
def test_workers_plan_like_the_main_process(how: tuple[str, int]) -> None:
    dataset = Plans()
    assert list(workers(dataset, *how)) == [dataset[number] for number in range(len(dataset))]


@pytest.mark.parametrize("how", START_METHODS)
def test_a_packer_goes_on_in_a_worker(how: tuple[str, int]) -> None:
    """Each worker gets a copy of the packer, which already holds documents."""
    packer = plans.packer()
    packer.push(plans.batch(0))
    assert packer.pending > 0
    assert sorted(workers(Stream(packer), *how)) == sorted(how[1] * list(Stream(packer)))
