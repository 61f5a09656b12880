"""Signals in the middle of long calls: they end soon, with what the handler raises, and nothing is half done."""

import gc
import math
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import numpy as np
import pytest

import wlb

# Far more than the packer admits.
pytestmark = pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")

COST = wlb.CostModel(attention=1e-9, linear=1e-5)
LENGTHS = np.exp(np.random.default_rng(0).normal(7.0, 1.2, 1_000_000)).astype(np.int64).clip(16, 131072)
PACKER: dict[str, Any] = {"num_micro_batches": 16, "max_tokens": 200_000, "cost_model": COST}
FEW = LENGTHS[:200_000]

# Each takes four tenths of a second or more where processors are fast.
CALLS: dict[str, Callable[[], object]] = {
    "fixed_length": lambda: wlb.pack(LENGTHS, **PACKER | {"num_micro_batches": 32768}, method="fixed_length"),
    "var_length": lambda: wlb.pack(
        np.repeat(LENGTHS, 8), num_micro_batches=1 << 20, max_tokens=131072, cost_model=COST, leftover="return"
    ),
    "as few as hold it": lambda: wlb.pack(
        np.repeat(LENGTHS, 8), num_micro_batches=None, max_tokens=131072, cost_model=COST, method="refined"
    ),
    "tune_outlier_thresholds": lambda: wlb.tune_outlier_thresholds(FEW, max_document_tokens=131072, **PACKER),
    "tune_delay_price": lambda: wlb.tune_delay_price(FEW, max_document_tokens=131072, **PACKER),
    "plan_dynamic_cp": lambda: wlb.plan_dynamic_cp(
        FEW, world_size=1000, num_stages=8, max_tokens_per_rank=8192, cost_model=COST, cp_seconds_per_token=1e-9
    ),
    "shard": lambda: wlb.shard(
        FEW[:20_000],
        cp_size=1024,
        strategy="adaptive",
        kernel_model=wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128),
    ),
    "simulate_pipeline": lambda: wlb.simulate_pipeline(
        np.ones(65536), schedule="interleaved_1f1b", num_stages=16, num_virtual_stages=4
    ),
    "simulate_steps": lambda: wlb.simulate_steps(np.ones((40_000, 1, 64)), num_stages=16),
}


class Stop(Exception):
    """What the handler raises."""


@pytest.fixture
def stop_after() -> Iterator[Callable[[float], None]]:
    """Sets a timer whose signal raises :class:`Stop`, in seconds of this process: a busy machine counts for nothing."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stop

    before = signal.signal(signal.SIGPROF, stop)
    yield lambda seconds: signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_PROF, 0.0)
    signal.signal(signal.SIGPROF, before)


def seconds_late(call: Callable[[], object], after: float, stop_after: Callable[[float], None]) -> float:
    """How much later than the signal the call ended, in processor time."""
    stop_after(after)
    began = time.process_time()
    with pytest.raises(Stop):
        call()
    return time.process_time() - began - after


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_ends_a_long_call(name: str, stop_after: Callable[[float], None]) -> None:
    """Half a second is the promise; the rest is for slow machines."""
    assert seconds_late(CALLS[name], 0.1, stop_after) < 1.5


@pytest.mark.parametrize("options", [{"release": "adaptive"}, {"outlier_thresholds": (8192,)}, {"method": "refined"}])
def test_an_interrupted_push_or_flush_changes_nothing(
    options: dict[str, Any], stop_after: Callable[[float], None]
) -> None:
    packer = wlb.Packer(**PACKER | {"num_micro_batches": 65536, "max_tokens": 140_000}, **options)
    packer.push(LENGTHS[:1000])
    state = packer.state_dict()
    many = np.full(12_000_000, 3000)  # the fastest of these pushes takes a second
    many[::7] = 100_000
    assert seconds_late(lambda: packer.push(many), 0.25, stop_after) < 1.5
    assert packer.state_dict() == state
    # And goes on as if there had been none.
    assert packer.push([500, 700]).num_tokens > 0


def test_what_a_handler_raises_while_a_state_is_read_is_no_fault_of_the_state() -> None:
    class Interrupted(dict[str, Any]):
        def items(self) -> Any:
            raise Stop

    packer = wlb.Packer(**PACKER)
    with pytest.raises(Stop):
        packer.load_state_dict(Interrupted(packer.state_dict()))


MANY = np.arange(1, 1_000_001)
LISTED = MANY.tolist()
READ: dict[str, Callable[[int], object]] = {
    "int32": lambda size: wlb._arrays.integers("lengths", MANY[:size].astype(np.int32)),
    "uint64": lambda size: wlb._arrays.integers("lengths", MANY[:size].astype(np.uint64)),
    "floats": lambda size: wlb._arrays.floats("costs", MANY[:size], 1, 1),
    "rows": lambda size: wlb._arrays.floats("costs", MANY[:size].reshape(-1, 2), 1, 2),
    "a list": lambda size: wlb._arrays.integers("lengths", LISTED[:size]),
}


@pytest.mark.parametrize("name", READ)
def test_numpy_takes_no_more_than_a_part_at_a_time(name: str) -> None:
    """Python handles signals between lines, of which it passes some for every part."""

    def lines(size: int) -> int:
        passed = 0

        def count(frame: FrameType, event: str, argument: object) -> Any:
            nonlocal passed
            if frame.f_code.co_filename != wlb._arrays.__file__:  # what the collector of garbage runs meanwhile
                return None
            passed += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            READ[name](size)
        finally:
            sys.settrace(before)
        return passed

    two = wlb._arrays._PART + 2  # parts
    assert lines(MANY.size) - lines(two) >= math.ceil(MANY.size / wlb._arrays._PART) - 2


def of_many_waiting() -> tuple[wlb.Packer, dict[str, Any]]:
    packer = wlb.Packer(**PACKER)
    packer.push(np.full(1_000_000, 150_000))
    return packer, packer.state_dict()


@pytest.mark.parametrize("name", ["int64", "state_dict", "load_state_dict", "from_state_dict"])
def test_the_bindings_listen_while_they_read_and_write(name: str) -> None:
    """A good part of the signals that Python itself would handle in as much time of this process."""
    if name == "int64":
        many = np.ones(40_000_000, np.int64)
        call: Callable[[], object] = lambda: wlb.batch_offsets(many, tokens_per_batch=1 << 31)  # noqa: E731
    else:
        packer, state = of_many_waiting()
        call = {
            "state_dict": packer.state_dict,
            "load_state_dict": lambda: packer.load_state_dict(state),
            "from_state_dict": lambda: wlb.Packer.from_state_dict(state),
        }[name]
    heard = 0

    def listen(number: int, frame: FrameType | None) -> None:
        nonlocal heard
        heard += 1

    before = signal.signal(signal.SIGPROF, listen)
    try:
        signal.setitimer(signal.ITIMER_PROF, 1e-3, 1e-3)
        began = time.process_time()
        call()
        took, during, heard = time.process_time() - began, heard, 0
        began = time.process_time()
        while time.process_time() - began < took:
            pass
        by_python = heard
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)
    assert during >= by_python / 4


def test_long_lists_are_read_as_short_ones() -> None:
    few = 400_000
    values: list[Any] = [7] * few
    assert (wlb._arrays.integers("lengths", values) == 7).all()
    assert (wlb._arrays.floats("costs", values, 1, 1) == 7.0).all()
    assert wlb._arrays.floats("costs", [[1.0, 2.0]] * few, 1, 2).shape == (few, 2)
    for wrong, problem in [
        (1.5, "must be an integer"),
        ("7", "must be an integer"),
        (2**63, "does not fit into int64"),
    ]:
        values[few - 1] = wrong
        with pytest.raises(wlb.WlbError, match=problem) as caught:
            wlb._arrays.integers("lengths", values)
        assert caught.value.index == few - 1
    values[few - 1] = [7]
    with pytest.raises(wlb.WlbError, match="is no array of numbers"):
        wlb._arrays.integers("lengths", values)


def test_what_a_handler_raises_while_a_list_is_read_is_no_fault_of_the_list(
    stop_after: Callable[[float], None],
) -> None:
    assert seconds_late(lambda: [wlb._arrays.integers("lengths", LISTED) for _ in range(50)], 0.05, stop_after) < 1.5


def test_an_interrupted_flush_changes_nothing(stop_after: Callable[[float], None]) -> None:
    packer = wlb.Packer(**PACKER)
    packer.push(np.full(300_000, 150_000))
    state = packer.state_dict()
    assert seconds_late(packer.flush, 0.3, stop_after) < 1.5
    assert packer.state_dict() == state


def test_a_handler_may_read_the_packer_but_not_change_it(stop_after: Callable[[float], None]) -> None:
    packer = wlb.Packer(**PACKER)
    packer.push(np.full(30_000, 150_000))
    seen: list[object] = []

    def look(number: int, frame: FrameType | None) -> None:
        seen.append(packer.pending)
        with pytest.raises(RuntimeError, match="cannot change the packer"):
            packer.push([1])

    before = signal.signal(signal.SIGPROF, look)
    pending = packer.pending
    signal.setitimer(signal.ITIMER_PROF, 0.1)
    assert packer.flush()
    signal.signal(signal.SIGPROF, before)
    assert seen == [pending]


def test_what_shows_a_warning_does_not_wait_for_the_push_that_warns() -> None:
    packer = wlb.Packer(num_micro_batches=2, max_tokens=1000, cost_model=COST, release="adaptive")
    told: list[str] = []

    def show(message: Warning | str, *_: object, **__: object) -> None:
        with pytest.raises(RuntimeError, match="what shows a warning, cannot change the packer"):
            packer.push([1])
        told.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        packer.push(np.full(100, 900))
    assert len(told) == 1


def test_a_refusal_is_made_where_the_packer_can_be_read() -> None:
    packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=COST)

    class Reads:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            assert packer.pending == 0

    before = gc.get_threshold()
    try:
        for _ in range(50):
            Reads()
            gc.set_threshold(1)  # what makes an exception collects, and what is collected reads the packer
            with pytest.raises(wlb.WlbError, match="lengths"):
                packer.admits([500])
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
