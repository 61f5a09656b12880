"""A program that reads torchtitan's own GrainDataLoader, from a checkout, with wlb in its packing slot.

PYTHONPATH=CHECKOUT python -m tests.trainers.titan_packing
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import grain
import numpy as np
from torchtitan.components.data import (
    ConcatThenSplitPackingConfig,
    FirstFitPackingConfig,
    GrainDataLoader,
    SampleProcessor,
    SingleDatasetConfig,
    TextSequence,
)
from torchtitan.config import Configurable

import wlb
from tests.trainers.page import block
from wlb.integrations.torchtitan_packing import BalancedPackingConfig, for_ranks

RNG = np.random.default_rng(0)
# Some documents are longer than the context, and none has fewer than two tokens, which torchtitan drops.
LENGTHS = np.minimum(2 + RNG.geometric(0.02, 300), 200)
CONTEXT, ROW = 128, 256
COST = wlb.CostModel(attention=1.0, linear=100.0)


class Source(Configurable):
    """Document `i` has the tokens 1000 * i, 1000 * i + 1, ..."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        pass

    def __init__(self, config: Config, *, dataset_iteration_policy: Any) -> None:
        del config, dataset_iteration_policy

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> Any:
        return 1000 * int(index) + np.arange(LENGTHS[index])


class Processor(SampleProcessor):
    """As torchtitan's README has it; the loss of even documents leaves out their first four targets."""

    @dataclass(kw_only=True, slots=True)
    class Config(SampleProcessor.Config):
        pass

    def __init__(self, config: Config, *, context: Any) -> None:
        del config, context

    def __call__(self, token_ids: Any, rng: Any) -> TextSequence:
        del rng
        labels = token_ids[1:].copy()
        if token_ids[0] // 1000 % 2 == 0:
            labels[: min(4, labels.size - 1)] = -100
        return TextSequence(input_ids=token_ids[:-1], labels=labels)


DOCUMENTS = SingleDatasetConfig(source=Source.Config(), processor=Processor.Config())


def loader(packing: Any, rank: int, ranks: int) -> GrainDataLoader:
    config = GrainDataLoader.Config(
        dataset=packing, read_options=grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    )
    return GrainDataLoader(
        config,
        dp_world_size=ranks,
        dp_rank=rank,
        tokenizer=None,  # type: ignore[arg-type]
        max_context_length=CONTEXT,
        num_tokens_per_batch=ROW,
    )


def targets(row: Any) -> Counter[tuple[int, int]]:
    """Each target of a row, with its token."""
    inputs, labels = row
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (ROW,)
    assert int(inputs["positions"].max()) < max(CONTEXT, ROW)
    found = [(token, label) for token, label in zip(inputs["input"].tolist(), labels.tolist(), strict=True)]
    return Counter(pair for pair in found if pair[1] != -100)


def work(row: Any) -> float:
    """Cost of the documents of a row, whose positions begin at 0."""
    inputs, labels = row
    borders = np.flatnonzero(np.append(inputs["positions"].numpy() == 0, True))
    parts = np.split(labels.numpy(), borders[1:-1])
    return float(COST.cost([part.size for part in parts if (part != -100).any()]).sum())


def expected() -> Counter[tuple[int, int]]:
    """Each target of one epoch."""
    found: Counter[tuple[int, int]] = Counter()
    for number, length in enumerate(LENGTHS.tolist()):
        tokens = (1000 * number + np.arange(length)).tolist()
        skipped = min(4, length - 2) if number % 2 == 0 else 0
        found.update(list(itertools.pairwise(tokens))[skipped:])
    return found


def read(loaders: list[GrainDataLoader], rows: int) -> list[Any]:
    """The next `rows` rows of all ranks: the first row of each rank, then the second."""
    iterators = [iter(each) for each in loaders]
    return [next(each) for _ in range(rows) for each in iterators]


def main() -> None:
    whole = expected()
    for lengths in (None, LENGTHS):
        # `lengths` are those of whole documents, as `Source` gives them.
        packing = {
            ranks: BalancedPackingConfig(
                dataset=DOCUMENTS, cost_model=COST, micro_batches=8 // ranks, lengths=lengths, max_delay=4
            )
            for ranks in (1, 2, 4, 8)
        }
        for before, after in ((2, 4), (4, 1), (8, 2)):
            steps = (5, 9)
            first = [loader(packing[before], rank, before) for rank in range(before)]
            rows = read(first, steps[0] * 8 // before)
            states = [json.loads(json.dumps(each.state_dict())) for each in first]
            assert len({json.dumps(state[f"dp_rank_{rank}"]) for rank, state in enumerate(states)}) == 1
            second = [loader(packing[after], rank, after) for rank in range(after)]
            for each in second:
                each.load_state_dict(for_ranks(states[-1], after))
            rows += read(second, steps[1] * 8 // after)
            alone = [loader(packing[1], 0, 1)]
            unbroken = read(alone, (steps[0] + steps[1]) * 8)
            for at in range(0, len(rows), 8):
                found, wanted = (
                    sum((targets(row) for row in part[at : at + 8]), Counter[tuple[int, int]]())
                    for part in (rows, unbroken)
                )
                assert found == wanted
            total = sum((targets(row) for row in rows), Counter[tuple[int, int]]())
            assert total.keys() == whole.keys()
            assert max(total.values()) == 2  # the second epoch has begun
            for each in [*first, *second, *alone]:
                each.close()

    def largest(packing: Any) -> float:
        """Work of the busiest of 4 ranks, over the mean, in 12 rows of each."""
        loaders = [loader(packing, rank, 4) for rank in range(4)]
        rows = read(loaders, 12)
        for each in loaders:
            each.close()
        busy = np.array([work(row) for row in rows]).reshape(-1, 4)
        return float((busy.max(axis=1) / busy.mean(axis=1)).mean())

    names: dict[str, Any] = {"config": SimpleNamespace(), "documents": DOCUMENTS, "cost": COST}
    exec(block("packing = BalancedPackingConfig("), names)
    ours = largest(names["config"].dataloader.dataset)
    kinds = (FirstFitPackingConfig, ConcatThenSplitPackingConfig)
    theirs = {kind.__name__: largest(kind(dataset=DOCUMENTS)) for kind in kinds}
    print(json.dumps({"wlb": ours, **theirs}))
    assert ours < min(theirs.values())


if __name__ == "__main__":
    main()
