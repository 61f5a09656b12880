"""Grain's pipelines give balanced micro-batches, and resume on other ranks and workers without loss or repeat."""

from __future__ import annotations

import itertools
import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb

grain = pytest.importorskip("grain")

from absl import flags  # noqa: E402
from grain._src.python.dataset import dataset as grain_dataset  # noqa: E402
from grain.sharding import ShardOptions  # noqa: E402

from tests.trainers.page import block  # noqa: E402
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


# --- with Grain's worker processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["indexed", "filtered map", "iter"])
def test_worker_processes_give_the_same_and_resume_on_others(kind: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    corpus = Corpus(rng, 40, 1, 32)
    ds, arguments, _, _ = pipeline(kind, corpus, rng)
    arguments |= {"packer": packer("queues", "split"), "tokens_per_batch": 200}
    if kind == "indexed":
        np.save(tmp_path / "lengths.npy", corpus.lengths)
        arguments["lengths"] = np.load(tmp_path / "lengths.npy", mmap_mode="r")  # workers map it again
    whole = Run(ds, arguments, ranks=1)
    expected = steps_of(list(whole), whole.per_step)
    first = Run(ds, arguments, ranks=2, rows=2, workers=1)
    given = [next(rest) for rest in [iter(first)] for _ in range(2 * first.per_step)]
    state = first.state(rng)
    first.close()
    second = Run(ds, arguments, ranks=3, rows=3, workers=1 if kind == "iter" else 2)
    second.load(state)
    found = steps_of(given, first.per_step) + steps_of(list(second), second.per_step)
    second.close()
    assert found == expected


# --- elements --------------------------------------------------------------------------------------------------------


def elements(rows: list[Any], *, indexed: bool, **options: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    lengths = [len(row["input_ids"] if isinstance(row, dict) else row) for row in rows] if indexed else None
    options = {"packer": wlb.Packer(num_micro_batches=2, max_tokens=8, cost_model=COST, release="fifo")} | options
    return list(BalancedIterDataset(grain.MapDataset.source(rows), lengths=lengths, **options))


def by_first_token(found: list[dict[str, np.ndarray[Any, Any]]]) -> dict[int, dict[str, list[Any]]]:
    """The columns of each document, by its first token."""
    result = {}
    for element in found:
        for row in range(len(element["input_ids"])):
            segments = element["segment_ids"][row]
            for segment in range(1, segments.max(initial=0) + 1):
                at = segments == segment
                document = {name: array[row][..., at].tolist() for name, array in element.items()}
                result[document["input_ids"][0]] = document
    return result


@pytest.mark.parametrize("indexed", [True, False])
def test_labels_weights_and_columns_are_those_of_the_documents(indexed: bool) -> None:
    rows = [
        {"input_ids": [10, 11, 12], "labels": [-100, -100, 12], "source": 7, "place": np.eye(2, 3)},
        {"input_ids": [20, 21], "loss_weights": [1.0, 0.5], "source": 8, "place": np.ones((2, 2))},
        {"input_ids": [30], "source": 9, "place": np.zeros((2, 1))},
        {"input_ids": [40, 41, 42, 43], "position_ids": [5, 6, 7, 8], "source": 9, "place": np.zeros((2, 4))},
    ]
    found = elements(rows, indexed=indexed, columns=["source", "place"], labels_ahead=2)
    assert all(set(element) == set(found[0]) for element in found)
    documents = by_first_token(found)
    assert documents[10]["labels"] == [-100, 12, -100]
    assert documents[10]["loss_weights"] == [0, 1, 0]
    assert documents[10]["labels_ahead"] == [[12, -100, -100]]
    assert documents[10]["source"] == [7, 7, 7]
    assert documents[10]["place"] == np.eye(2, 3).tolist()
    assert documents[20]["loss_weights"] == [0.5, 0]
    assert documents[40]["position_ids"] == [5, 6, 7, 8]
    assert documents[40]["labels"] == [41, 42, 43, -100]
    assert found[0]["input_ids"].dtype == found[0]["labels"].dtype == np.int32


@pytest.mark.parametrize("indexed", [True, False])
def test_a_piece_of_a_cut_document_predicts_the_next_piece(indexed: bool) -> None:
    cuts = wlb.Packer(num_micro_batches=3, max_tokens=8, cost_model=COST, release="fifo", oversize="split")
    found = elements([list(range(100, 120))], indexed=indexed, packer=cuts)
    pairs = {
        (token, label)
        for element in found
        for token, label in zip(element["input_ids"].ravel().tolist(), element["labels"].ravel().tolist(), strict=True)
        if label != -100
    }
    assert pairs == {(token, token + 1) for token in range(100, 119)}


def test_all_ranks_have_the_shape_of_the_largest_micro_batch_in_its_place() -> None:
    rows = [[number] * length for number, length in enumerate([8, 1, 1, 1, 5, 5, 2])]
    plain = wlb.Packer(num_micro_batches=4, max_tokens=8, cost_model=COST, release="fifo")
    shapes = []
    for rank in range(2):
        shard = ShardOptions(rank, 2)
        ds = BalancedIterDataset(grain.MapDataset.source(rows), packer=plain, shard_options=shard)
        shapes.append([element["input_ids"].shape for element in ds])
    assert shapes[0] == shapes[1]
    assert max(shape[1] for shape in shapes[0]) == 8


def test_plans_for_ranks_that_meet_in_every_micro_batch_resume_on_others() -> None:
    """The plan then depends on the ranks, and documents are trained once all the same."""
    rng = np.random.default_rng(6)
    corpus = Corpus(rng, 150, 1, 32)
    tokens: Counter[int] = Counter()
    state = None
    for ranks, steps in ((2, 3), (3, 2), (8, None)):
        meeting = wlb.Packer(
            num_micro_batches=MICRO_BATCHES,
            max_tokens=MAX_TOKENS,
            cost_model=COST,
            token_buckets=BUCKETS,
            outlier_thresholds=(12, 24),
            dp_size=ranks,
            sync="micro_batch",
        )
        run = Run(corpus.map(), {"packer": meeting, "tokens_per_batch": 300}, ranks=ranks)
        if state is not None:
            run.load(state)
        for given in itertools.islice(run, None if steps is None else steps * run.per_step):
            for micro_batch in given:
                tokens.update(np.frombuffer(micro_batch, np.int32).reshape(3, -1)[0].tolist())
        state = run.state(rng)
    assert tokens == dict(enumerate(corpus.lengths.tolist()))


def test_grains_own_transformations_come_behind_and_keep_the_state() -> None:
    rng = np.random.default_rng(3)
    corpus = Corpus(rng, 60, 1, 32)
    bucket = wlb.Packer(
        num_micro_batches=8, max_tokens=32, cost_model=COST, token_buckets=[32], outlier_thresholds=(12, 24)
    )

    def iterator() -> Any:
        ds = BalancedIterDataset(corpus.map(), packer=bucket, lengths=corpus.lengths, tokens_per_batch=150)
        ds = ds.map(lambda element: element["input_ids"][0]).batch(8)  # a step
        return iter(grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2))

    whole = list(iterator())
    assert whole[0].shape == (8, 32)
    for done in (0, 1, 3):
        first, second = iterator(), iterator()
        for _ in range(done):
            next(first)
        second.set_state(json.loads(json.dumps(first.get_state())))
        np.testing.assert_array_equal(np.stack(list(second)), np.stack(whole[done:]))


# --- what is refused -------------------------------------------------------------------------------------------------

ROWS = [[1, 2, 3], [4, 5], [6]]
MAP = grain.MapDataset.source(ROWS)


@pytest.mark.parametrize(
    ("ds", "options", "match"),
    [
        (ROWS, {}, "must be a grain.MapDataset or grain.IterDataset"),
        (MAP, {"lengths": [3, 2]}, "pipeline has 3 rows"),
        (MAP.repeat(), {"lengths": [3, 2, 1]}, "repeat with num_epochs"),
        (MAP.to_iter_dataset(), {"lengths": [3, 2, 1]}, "leave them out"),
        (MAP, {"num_epochs": 2}, "needs lengths"),
        (MAP, {"shuffle": True}, "needs lengths"),
        (MAP, {"max_early": 2}, "needs lengths"),
        (MAP, {"rows": 3}, "does not divide 4"),
        (MAP, {"columns": "source"}, "sequence of names"),
        (MAP, {"costs": [1, 2, 3]}, "not a function|no meaning"),
        (
            MAP.to_iter_dataset(),
            {"multiprocessing_options": grain.MultiprocessingOptions(num_workers=2)},
            "have one order",
        ),
    ],
)
def test_wrong_arguments_are_refused(ds: Any, options: dict[str, Any], match: str) -> None:
    fifo = wlb.Packer(num_micro_batches=4, max_tokens=8, cost_model=COST, release="fifo")
    with pytest.raises(wlb.WlbError, match=match):
        BalancedIterDataset(ds, packer=fifo, **options)


@pytest.mark.parametrize(
    ("rows", "lengths", "match"),
    [
        ([[1, 2], [3]], [2, 2], r"has 1 tokens, but lengths\[1\] = 2"),
        ([[1, 2], {"input_ids": [3, 4], "seq_lengths": [1, 1]}], [2, 2], "2 documents"),
        ([[1, 2], {"input_ids": [3, 4], "other": [1, 1]}], [2, 2], "'other', which has no known meaning"),
        ([[1, 2], [3, 2**40]], [2, 2], "must fit into int32"),
        ([[1, 2], {"input_ids": [3, 4], "position_ids": [[0, 1]] * 3}], [2, 2], "name the column otherwise"),
    ],
)
def test_wrong_rows_are_named(rows: list[Any], lengths: list[int], match: str) -> None:
    fifo = wlb.Packer(num_micro_batches=2, max_tokens=8, cost_model=COST, release="fifo")
    with pytest.raises(wlb.WlbError, match=match):
        list(BalancedIterDataset(grain.MapDataset.source(rows), packer=fifo, lengths=lengths))


def test_a_filter_before_known_lengths_is_named() -> None:
    ds = MAP.filter(lambda row: len(row) > 1)
    fifo = wlb.Packer(num_micro_batches=2, max_tokens=8, cost_model=COST, release="fifo")
    with pytest.raises(wlb.WlbError, match="is nothing"):
        list(BalancedIterDataset(ds, packer=fifo, lengths=[3, 2, 1]))


def test_workers_behind_it_are_refused(threads: None) -> None:
    fifo = wlb.Packer(num_micro_batches=2, max_tokens=8, cost_model=COST, release="fifo")
    ds = BalancedIterDataset(MAP, packer=fifo, lengths=[3, 2, 1])
    with pytest.raises(wlb.WlbError, match="give it multiprocessing_options instead"):
        next(iter(ds.mp_prefetch(grain.MultiprocessingOptions(num_workers=2))))


@pytest.mark.parametrize("indexed", [True, False])
def test_states_that_do_not_fit_are_refused_and_change_nothing(indexed: bool) -> None:
    corpus = Corpus(np.random.default_rng(4), 40, 1, 32)
    arguments: dict[str, Any] = {"packer": packer("queues", "split"), "tokens_per_batch": 100}
    if indexed:
        arguments["lengths"] = corpus.lengths

    def begun(ranks: int, given: int, **others: Any) -> Any:
        ds = BalancedIterDataset(corpus.map(), shard_options=ShardOptions(0, ranks), **arguments | others)
        iterator = iter(ds)
        for _ in range(given):
            next(iterator)
        return iterator

    inside = begun(2, 5).get_state()
    here = begun(3, 8)
    before = here.get_state()
    changed = inside | {"steps": inside["steps"].replace('"step": 0', '"step": 1')}
    for state, match in (
        (inside, "inside a step of 24 on 2 ranks"),
        (changed | {"given": 0}, "changed after it was saved"),
        (inside | {"given": 0, "steps": inside["steps"][:-5]}, "cut or changed"),
        ({"given": 0, "ranks": 2}, "has no 'steps'"),
        (begun(2, 12, packer=packer("fifo", "split")).get_state(), "configuration|fingerprint|release"),
    ):
        with pytest.raises(wlb.WlbError, match=match):
            here.set_state(state)
        assert here.get_state() == before
    assert real(next(here)) == real(next(begun(3, 9 - 1)))


def test_a_pipeline_that_changed_is_noticed() -> None:
    corpus = Corpus(np.random.default_rng(4), 40, 24, 70)
    arguments: dict[str, Any] = {"packer": packer("queues", "split"), "tokens_per_batch": 200}
    first = iter(BalancedIterDataset(corpus.map(), **arguments))
    for _ in range(2 * MICRO_BATCHES):
        next(first)
    second = iter(BalancedIterDataset(grain.MapDataset.source([row[:20] for row in corpus.rows]), **arguments))
    second.set_state(first.get_state())
    with pytest.raises(wlb.WlbError, match="gives other rows than before its state was saved"):
        next(second)


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_pages_jax_program_trains_and_packing_changes_no_loss() -> None:
    jax = pytest.importorskip("jax")
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 60)
    rows = [rng.integers(0, 8, length) + 8 * (number % 8) for number, length in enumerate(lengths)]
    names: dict[str, Any] = {"documents": grain.MapDataset.source(rows), "lengths": lengths}
    exec(block("import grain, jax"), names)
    assert names["step"]._cache_size() == 2  # a compilation for each bucket
    assert sum(names["losses"][-8:]) < 0.9 * sum(names["losses"][:8])
    assert json.loads(json.dumps(names["state"]))["given"] == 0
    loss, table = names["loss"], names["table"]
    element = next(iter(names["ds"]))
    assert element["input_ids"].shape in ((1, 256), (1, 512))
    alone = 0.0
    segments = element["segment_ids"][0]
    for segment in range(1, segments.max() + 1):
        document = {name: array[:, segments == segment] for name, array in element.items()}
        alone += float(loss(table, document))
    assert float(loss(table, element)) == pytest.approx(alone, rel=1e-5)
    del jax


def test_two_jax_processes_train_the_sum_of_their_rows(tmp_path: Path) -> None:
    """The page's global arrays: loss and gradient are those of both processes' rows, in four micro-batches."""
    pytest.importorskip("jax")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.trainers.jax_processes"]
    root = Path(__file__).parents[2]
    outputs = [
        tmp_path / str(rank) for rank in range(2)
    ]  # files: a full pipe would stop a process that others wait for
    started = []
    for rank, output in enumerate(outputs):
        with output.open("w") as out:
            started.append(subprocess.Popen([*command, str(rank), port], cwd=root, stdout=out))
    try:
        assert [each.wait(timeout=300) for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
    found = [json.loads(output.read_text().splitlines()[-1]) for output in outputs]
    assert len(found[0]) == 4
    for (loss, gradient, mine, own), (other_loss, other_gradient, theirs, other) in zip(*found, strict=True):
        assert loss == other_loss
        assert mine != theirs
        assert loss == pytest.approx(mine + theirs, rel=1e-5)
        np.testing.assert_array_equal(gradient, other_gradient)
        np.testing.assert_allclose(gradient, np.add(own, other), rtol=1e-4, atol=1e-4 * np.abs(gradient).max())
