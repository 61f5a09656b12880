"""Plans made in the worker processes of a torch DataLoader."""

from collections.abc import Iterator

import plans
import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset

import wlb

TIMEOUT = 120  # seconds until a worker that says nothing is an error
START_METHODS = ["fork", "spawn"]


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


@pytest.mark.parametrize("start_method", START_METHODS)
def test_workers_plan_like_the_main_process(start_method: str) -> None:
    dataset = Plans()
    expected = [dataset[number] for number in range(len(dataset))]
    loader = DataLoader(dataset, batch_size=None, num_workers=2, multiprocessing_context=start_method, timeout=TIMEOUT)
    assert list(loader) == expected


@pytest.mark.parametrize("start_method", START_METHODS)
def test_a_packer_goes_on_in_a_worker(start_method: str) -> None:
    """Each of the two workers gets a copy of the packer, which already holds documents."""
    packer = plans.packer()
    packer.push(plans.batch(0))
    assert packer.pending > 0
    loader = DataLoader(
        Stream(packer), batch_size=None, num_workers=2, multiprocessing_context=start_method, timeout=TIMEOUT
    )
    from_workers = sorted(loader)
    assert from_workers == sorted(2 * list(Stream(packer)))
