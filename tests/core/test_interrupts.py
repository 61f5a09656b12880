"""Signals in the middle of long calls: they end soon, with what the handler raises, and nothing is half done."""

import gc
import signal
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

# Each takes seconds.
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
    assert seconds_late(CALLS[name], 0.25, stop_after) < 1.5


@pytest.mark.parametrize("options", [{"release": "adaptive"}, {"outlier_thresholds": (8192,)}, {"method": "refined"}])
def test_an_interrupted_push_or_flush_changes_nothing(
    options: dict[str, Any], stop_after: Callable[[float], None]
) -> None:
    packer = wlb.Packer(**PACKER | {"num_micro_batches": 65536, "max_tokens": 140_000}, **options)
    packer.push(LENGTHS[:1000])
    state = packer.state_dict()
    many = np.full(4_000_000, 3000)
    many[::7] = 100_000
    assert seconds_late(lambda: packer.push(many), 0.3, stop_after) < 1.5
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
