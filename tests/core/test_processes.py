"""Processes, threads and forks compute the same plans; none blocks another; a shared packer loses nothing."""

import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import wlb
from tests.core import plans
from tests.plain import leftover_of, pieces_of

WATCHDOG = 500  # seconds until a deadlock is called one


def test_resuming_changes_nothing() -> None:
    digests = plans.stream_digests()
    assert plans.stream_digests(resume_every_step=True) == digests
    assert len(set(digests)) == len(digests), "the plans differ from each other"


@pytest.mark.parametrize("hash_seed", ["0", "1", "random"])
def test_other_processes(hash_seed: str) -> None:
    environment = os.environ | {"PYTHONHASHSEED": hash_seed}
    program = [sys.executable, str(Path(plans.__file__))]
    output = subprocess.run(program, env=environment, check=True, capture_output=True, timeout=WATCHDOG).stdout
    assert json.loads(output) == plans.digests()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children(method: str) -> None:
    expected = plans.digests()  # so that a forked child inherits a library that was used
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(plans.digests).get(WATCHDOG) == expected


def test_forks_while_a_thread_packs() -> None:
    """A child inherits no lock that a thread of its parent held."""
    expected = plans.stream_digests()
    with in_the_background(lambda: plans.pack_digests(plans.batch(0))):
        for _ in range(5):
            with multiprocessing.get_context("fork").Pool(1) as pool:
                assert pool.apply_async(plans.stream_digests).get(WATCHDOG) == expected


def test_forks_while_a_thread_pushes_to_the_same_packer() -> None:
    """The child's copy of the packer is whole: before or after the push that was under way, and not locked."""
    shared = plans.packer()
    first_id = itertools.count(step=1500)

    def push() -> None:
        first = next(first_id)
        shared.push(plans.batch(0), np.arange(first, first + 1500))

    def flush_in_the_child(sender: Connection) -> None:
        shared.push(plans.batch(1), np.arange(-1500, 0))
        shared.flush()
        sender.send((shared.pending, shared.metrics().documents, shared.iteration > 0))

    context = multiprocessing.get_context("fork")
    with in_the_background(push):
        for _ in range(20):
            receiver, sender = context.Pipe(duplex=False)
            child = context.Process(target=flush_in_the_child, args=(sender,))
            child.start()
            sender.close()
            try:
                assert receiver.poll(WATCHDOG), "the child hangs"
                pending, documents, went_on = receiver.recv()
            finally:
                child.kill()
                child.join()
            assert pending == 0
            assert documents % 1500 == 0
            assert went_on


@contextmanager
def in_the_background(work: Callable[[], object]) -> Iterator[None]:
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            work()

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WATCHDOG)
        assert not thread.is_alive()


def test_threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(plans.digests) for _ in range(8)]
        assert all(result.result(WATCHDOG) == plans.digests() for result in results)


def test_packing_releases_the_gil() -> None:
    lengths = np.random.default_rng(0).integers(1, 10_000, 2_000_000)
    sizes: dict[str, Any] = {"num_micro_batches": 1024, "max_tokens": 2**31 - 1, "cost_model": plans.cost_model()}
    assert lets_other_threads_run(lambda: wlb.pack(lengths, **sizes))


@pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")  # far more than the packer admits
def test_other_threads_run_while_what_waits_is_packed() -> None:
    """What a push takes depends on what waits: one document may mean 300,000."""
    cost = wlb.CostModel(attention=1e-9, linear=1e-5)
    packer = wlb.Packer(num_micro_batches=16, max_tokens=200_000, cost_model=cost, release="adaptive")
    packer.push(np.full(1_000_000, 10_000))
    assert lets_other_threads_run(lambda: packer.push([5]))


def lets_other_threads_run(call: Callable[[], object]) -> bool:
    """Whether another thread goes on in the middle of the call, and not only around it.

    A busy machine may starve it for some calls, not for all of them; who holds the GIL starves it for all.
    """
    ticks: list[float] = []
    stop = threading.Event()

    def count() -> None:
        while not stop.is_set():
            ticks.append(time.perf_counter())
            time.sleep(0.001)

    def ticks_in_the_middle() -> int:
        start = time.perf_counter()
        call()
        quarter = (time.perf_counter() - start) / 4
        return sum(start + quarter < tick < start + 3 * quarter for tick in ticks)

    counter = threading.Thread(target=count)
    counter.start()
    until = time.monotonic() + WATCHDOG
    try:
        while not ticks_in_the_middle():
            if time.monotonic() > until:
                return False
        return True
    finally:
        stop.set()
        counter.join()


def test_an_array_that_is_written_to_while_it_is_packed() -> None:
    """The lengths are those at some moment, or an error that names a bad one: never what was not checked.

    numpy releases the GIL while it fills a large array: even a call that holds it meets a moving target.
    """
    lengths = np.full(200_000, 100)
    good, bad = 100 * len(lengths), -5
    stop = threading.Event()

    def scribble() -> None:
        while not stop.is_set():
            lengths[::7] = -5
            lengths[::7] = 100
            time.sleep(0.0002)  # now and then all is well

    writer = threading.Thread(target=scribble)
    writer.start()
    outcomes = set()
    try:
        for number in range(200):
            outcomes.add(tokens_or_bad_length(lengths))
            time.sleep(0.0001 * (number % 10))  # else the writer may always wait for the GIL at the same place
    finally:
        stop.set()
        writer.join()
    assert outcomes <= {good, bad}


def tokens_or_bad_length(lengths: NDArray[np.int64]) -> int:
    try:
        packing = wlb.pack(lengths, num_micro_batches=8, max_tokens=10**7, cost_model=plans.cost_model())
    except wlb.WlbError as error:
        return int(error.value)
    return int(packing.tokens.sum())


def test_threads_share_a_packer() -> None:
    """Concurrent pushes come one after the other: every document comes out once."""
    shared = plans.packer()
    num_threads, num_pushes, size = 4, 12, 1500

    def push(thread: int) -> list[wlb.Packing]:
        packings = []
        for number in range(num_pushes):
            first = (thread * num_pushes + number) * size
            packings.append(shared.push(plans.batch(number % 5), np.arange(first, first + size)))
            assert shared.pending >= shared.carried >= 0
            pickle.dumps(shared)
        return packings

    with ThreadPoolExecutor(num_threads) as pool:
        results = [pool.submit(push, thread) for thread in range(num_threads)]
        packings = [packing for result in results for packing in result.result(WATCHDOG)]
    packings += shared.flush()
    batches = [batch for packing in packings for batch in packing.micro_batches]
    out = sorted(piece.id for batch in batches for piece in pieces_of(batch))
    assert out == list(range(num_threads * num_pushes * size))
    assert leftover_of(packings[-1]) == []
    assert shared.pending == 0
    assert shared.iteration == len(packings)
