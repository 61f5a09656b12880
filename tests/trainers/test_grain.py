"""Grain's pipelines give balanced micro-batches, and resume on other ranks and workers without loss or repeat."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import wlb

grain = pytest.importorskip("grain")

from absl import flags  # noqa: E402
from grain._src.python.dataset import dataset as grain_dataset  # noqa: E402
from grain.sharding import ShardOptions  # noqa: E402

from wlb.integrations.grain import BalancedIterDataset  # noqa: E402

if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # Grain's workers read flags

COST = wlb.CostModel(attention=1.0, linear=50.0)
MICRO_BATCHES = 24  # which 2, 3 and 8 ranks divide
MAX_TOKENS = 32
BUCKETS = (8, 16, 32)
NO_THREADS = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


class Corpus:
    """Documents whose tokens are their number, of random length; some longer than a micro-batch."""

    def __init__(self, rng: np.random.Generator, size: int, shortest: int, longest: int) -> None:
        self.lengths = rng.integers(shortest, longest + 1, size)
        self.rows = [np.full(length, number) for number, length in enumerate(self.lengths)]

    def map(self) -> Any:
        return grain.MapDataset.source(self.rows)


def packer(rule: str, oversize: str) -> wlb.Packer:
    rules: dict[str, dict[str, Any]] = {
        "fifo": {"release": "fifo"},
        "adaptive": {"release": "adaptive", "max_delay": 3},
        "queues": {"outlier_thresholds": (12, 24)},
    }
    return wlb.Packer(
        num_micro_batches=MICRO_BATCHES,
        max_tokens=MAX_TOKENS,
        cost_model=COST,
        token_buckets=BUCKETS,
        oversize=oversize,  # type: ignore[arg-type]
        **rules[rule],
    )


def is_even(row: np.ndarray[Any, Any]) -> bool:
    return bool(row[0] % 2 == 0)


def pipeline(kind: str, corpus: Corpus, rng: np.random.Generator) -> tuple[Any, dict[str, Any], set[int], int]:
    """A pipeline, the arguments that go with it, the documents that it gives, and how often."""
    everything, even = set(range(len(corpus.rows))), set(range(0, len(corpus.rows), 2))
    if kind == "indexed":
        epochs = int(rng.integers(1, 3))
        given = {"shuffle": bool(rng.integers(2)), "seed": 3, "num_epochs": epochs, "lengths": corpus.lengths}
        return corpus.map(), given, everything, epochs
    if kind == "map":
        return corpus.map()[::-1].repeat(2), {}, everything, 2
    if kind == "filtered map":
        return corpus.map().filter(is_even), {}, even, 1
    rows = corpus.map()[::-1].to_iter_dataset(NO_THREADS)
    if kind == "iter":
        return rows, {}, everything, 1
    if kind == "filtered iter":
        return rows.filter(is_even), {}, even, 1
    assert kind == "shuffled iter"
    return grain.experimental.WindowShuffleIterDataset(rows.filter(is_even), window_size=5, seed=1), {}, even, 1


KINDS = ("indexed", "map", "filtered map", "iter", "filtered iter", "shuffled iter")
OFTEN = (0.4, 0.2, 0.2, 0.1, 0.09, 0.01)  # Grain takes 15 ms to shuffle a few rows


def real(element: dict[str, np.ndarray[Any, Any]]) -> list[bytes]:
    """The packed tokens of each row of an element, with the borders of documents."""
    return [
        np.stack([ids[segments > 0], segments[segments > 0], positions[segments > 0]]).tobytes()
        for ids, segments, positions in zip(
            element["input_ids"], element["segment_ids"], element["position_ids"], strict=True
        )
    ]


class Run:
    """Iterators of all ranks, read together."""

    def __init__(self, ds: Any, arguments: dict[str, Any], *, ranks: int, rows: int = 1, workers: int = 0) -> None:
        options = grain.MultiprocessingOptions(num_workers=workers, per_worker_buffer_size=2) if workers else None
        shards = ranks // rows
        of_ranks = [
            BalancedIterDataset(
                ds, shard_options=ShardOptions(shard, shards), rows=rows, multiprocessing_options=options, **arguments
            )
            for shard in range(shards)
        ]
        self.per_step = of_ranks[0].num_micro_batches_per_rank
        self.iterators = [iter(each) for each in of_ranks]

    def __iter__(self) -> Iterator[list[bytes]]:
        """The micro-batches that all ranks are given at once."""
        for elements in zip(*self.iterators, strict=True):
            assert len({tuple((name, array.shape) for name, array in each.items()) for each in elements}) == 1
            assert elements[0]["input_ids"].shape[1] in BUCKETS
            yield [micro_batch for each in elements for micro_batch in real(each)]

    def state(self, rng: np.random.Generator) -> str:
        """As a checkpoint keeps it; any rank's."""
        states = [each.get_state() for each in self.iterators]
        assert all(each == states[0] for each in states)
        return json.dumps(states[int(rng.integers(len(states)))])

    def load(self, state: str) -> None:
        for each in self.iterators:
            each.set_state(json.loads(state))

    def close(self) -> None:
        for each in self.iterators:
            each.close()


def steps_of(micro_batches: list[list[bytes]], per_step: int) -> list[Counter[bytes]]:
    assert len(micro_batches) % per_step == 0
    return [
        Counter(each for given in micro_batches[at : at + per_step] for each in given)
        for at in range(0, len(micro_batches), per_step)
    ]


def history(seed: int, *, stops: int = 4, workers: tuple[int, ...] = (0, 0, 0, 2, 3)) -> None:
    """A run that stops several times, and goes on with other ranks and workers, against a run without a stop."""
    rng = np.random.default_rng(seed)
    shortest, longest = [(1, 8), (1, 32), (1, 70), (24, 70)][int(rng.integers(4))]
    corpus = Corpus(rng, size=int(rng.integers(5, 45)), shortest=shortest, longest=longest)
    oversize = "split" if corpus.lengths.max() > MAX_TOKENS else str(rng.choice(["split", "error"]))
    ds, arguments, given, times = pipeline(str(rng.choice(KINDS, p=OFTEN)), corpus, rng)
    arguments["packer"] = packer(str(rng.choice(["fifo", "adaptive", "queues"], p=[0.1, 0.3, 0.6])), oversize)
    if rng.integers(5):
        arguments["read_options"] = NO_THREADS
    arguments["tokens_per_batch"] = int(rng.choice([60, 200, 500, 700]))
    can_work = isinstance(ds, grain.MapDataset)

    whole = Run(ds, arguments, ranks=1)
    expected = steps_of(list(whole), whole.per_step)
    tokens = Counter[int]()
    for step in expected:
        for micro_batch, times_given in step.items():
            ids = np.frombuffer(micro_batch, np.int32).reshape(3, -1)[0]
            tokens.update(times_given * ids.tolist())
    assert tokens == {number: int(corpus.lengths[number]) * times for number in given}

    found: list[Counter[bytes]] = []
    inside: list[list[bytes]] = []  # micro-batches of a step that has begun
    state, ranks = None, 0
    for _ in range(int(rng.integers(1, stops + 1))):
        if not inside:
            ranks = int(rng.choice([1, 2, 3, 8]))
        some = int(rng.choice(workers))
        rows = int(rng.choice([rows for rows in (1, 2, 3, 4, 8) if ranks % rows == 0]))
        run = Run(ds, arguments, ranks=ranks, rows=rows, workers=some if can_work else min(some, 1))
        if state is not None:
            run.load(state)
        left = (len(expected) - len(found)) * run.per_step - len(inside)
        wanted = int(rng.integers(0, left + 1))
        if rng.integers(4):  # mostly after a whole step
            wanted = -(-wanted // run.per_step) * run.per_step - len(inside)
        rest = iter(run)
        for _ in range(min(max(wanted, 0), left)):
            inside.append(next(rest))
            if len(inside) == run.per_step:
                found += steps_of(inside, run.per_step)
                inside = []
        state = run.state(rng)
        run.close()
    run = Run(ds, arguments, ranks=ranks if inside else 3)
    run.load(state or run.state(rng))
    found += steps_of(inside + list(run), run.per_step)
    run.close()
    assert found == expected, f"seed {seed}"


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grain's workers are threads, as it has them on a Python without a global lock: thousands of runs take no hour."""
    monkeypatch.setattr(grain_dataset, "is_in_free_threaded_python", lambda: True)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seed", range(20))
def test_histories_lose_and_repeat_nothing(seed: int) -> None:
    for part in range(10):
        history(1000 * seed + part)


@pytest.mark.long
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("seed", range(100))
def test_ten_thousand_histories_lose_and_repeat_nothing(seed: int) -> None:
    for part in range(100):
        history(100_000 + 100 * seed + part)


def test_no_torch_is_imported() -> None:
    program = "import sys, wlb.integrations.grain; assert not [m for m in sys.modules if m.split('.')[0] == 'torch']"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
