"""The measured device: its name, memory, clocks, and how to time a call on it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import wlb
from wlb._errors import error

REPEATS = (5, 50)
_WARM_UPS = 2
LEAST_CALLS = _WARM_UPS + REPEATS[0]
"""Least number of times that `Device.time` makes a call."""

_SLEEP = 2.0  # multiple of the time that the host took to enqueue the call when warming up
_CYCLES_PER_SECOND = 3e9  # above the clock of today's GPUs; a slower GPU sleeps longer, which does no harm

_CPU_BYTES = 2 * 2**30
_FREE_SHARE = 0.8


@dataclass(frozen=True)
class Device:
    """A device, timed by CUDA events or, on the CPU, by the wall clock.

    If torch computes on one thread (`torch.set_num_threads(1)`), the CPU is timed by that thread's processor time, so
    that other programs do not count.
    """

    device: torch.device
    memory_bytes: int
    _flushed: Tensor | None = field(repr=False)  # twice the L2 cache

    @classmethod
    def open(cls, device: torch.device | str | None, *, memory_bytes: int | None = None) -> Device:
        """The device by its name, by default the current CUDA device.

        Raises:
            WlbError: there is no such device, or it is neither a GPU nor the CPU.
        """
        if device is None:
            if not torch.cuda.is_available():
                raise error(
                    "device", "is not given and torch sees no GPU; 'cpu' measures the CPU, to try it", value=None
                )
            device = torch.device("cuda", torch.cuda.current_device())
        try:
            chosen = torch.empty(0, device=device).device
        except (RuntimeError, AssertionError) as problem:
            reason = str(problem).strip().partition("\n")[0]
            raise error("device", f"{str(device)!r} cannot be used: {reason}", value=device) from problem
        if chosen.type == "cpu":
            return cls(chosen, memory_bytes or _CPU_BYTES, None)
        if chosen.type != "cuda":
            raise error("device", f"{str(device)!r}: must be a CUDA device or the CPU", value=device)
        cache = torch.cuda.get_device_properties(chosen).L2_cache_size
        flushed = torch.empty(2 * cache, dtype=torch.int8, device=chosen)
        free, _ = torch.cuda.mem_get_info(chosen)
        return cls(chosen, memory_bytes or int(_FREE_SHARE * free), flushed)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the measurement: bfloat16 on a GPU; float32 on the CPU, which often has no bfloat16 arithmetic."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def processors(self) -> int:
        """Multiprocessors that a call has to fill."""
        if self.device.type == "cpu":
            return 1
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    @property
    def assumed_flops(self) -> float:
        """A rough rate, used only to choose how many segments a call needs to take long enough."""
        return 2e14 if self.device.type == "cuda" else 1e10

    def identity(self) -> dict[str, Any]:
        """Device, driver and versions; records of another device are refused."""
        versions: dict[str, Any] = {"wlb": wlb.__version__, "torch": torch.__version__, "cuda": torch.version.cuda}
        for package in ("flash_attn", "flash_attn_3", "flash-attn-4"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                versions[package] = importlib.metadata.version(package)
        if self.device.type == "cuda":
            versions["driver"] = _nvidia_smi("driver_version", self.device)
        return {"gpu": self.name, "dtype": str(self.dtype).removeprefix("torch."), "versions": versions}

    @property
    def name(self) -> str:
        """Name of the device, from its driver."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def clock_mhz(self) -> int | None:
        """Present clock rate of the multiprocessors, in MHz; None if it is not known."""
        if self.device.type == "cpu":
            return None
        try:
            return torch.cuda.clock_rate(self.device)
        except (RuntimeError, ImportError, AttributeError):  # no NVML binding is installed
            text = _nvidia_smi("clocks.sm", self.device)
            return int(text.split()[0]) if text and text.split()[0].isdigit() else None

    def time(self, calls: dict[str, Callable[[], object]], *, seconds: float) -> dict[str, list[float]]:
        """Seconds of each of these calls, made in turn, as many times as `seconds` allow within `REPEATS`.

        Two rounds warm up, and the second one decides how many rounds follow. Before each call the L2 cache is
        overwritten, and the GPU sleeps for longer than the host takes to enqueue the call, so that only the GPU's work
        is timed.
        """
        gpu = self.device.type == "cuda"
        with torch.cuda.device(self.device) if gpu else contextlib.nullcontext():  # events are recorded on its stream
            for _ in range(_WARM_UPS):
                start = time.perf_counter()
                enqueued = [_host_seconds(call) for call in calls.values()]
                self._synchronize()
                round_seconds = time.perf_counter() - start
            sleeps = [_SLEEP * host if gpu else 0.0 for host in enqueued]
            repeats = repetitions(seconds, round_seconds=round_seconds + sum(sleeps))
            samples = [
                [self._timed(*each) for each in zip(calls.values(), sleeps, strict=True)] for _ in range(repeats)
            ]
            self._synchronize()
            return {name: [sample[i]() for sample in samples] for i, name in enumerate(calls)}

    def _timed(self, call: Callable[[], object], sleep: float) -> Callable[[], float]:
        """Makes the call; the returned function gives its seconds once the device is done."""
        if self._flushed is None:
            elapsed = _cpu_seconds(call)
            return lambda: elapsed
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self._flushed.zero_()
        torch.cuda._sleep(int(sleep * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
        before.record()
        call()
        after.record()
        return lambda: before.elapsed_time(after) / 1e3

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _host_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call by the wall clock."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _cpu_seconds(call: Callable[[], object]) -> float:
    """Seconds of a call on the CPU: processor time if it runs on one thread, else by the wall clock."""
    if torch.get_num_threads() > 1:
        return _host_seconds(call)
    start = time.thread_time()
    call()
    return time.thread_time() - start


def repetitions(seconds: float, *, round_seconds: float) -> int:
    """Rounds of calls that take about `seconds` together with their warm-up."""
    return min(max(int(seconds / max(round_seconds, 1e-9)) - _WARM_UPS, REPEATS[0]), REPEATS[1])


def _nvidia_smi(query: str, device: torch.device) -> str | None:
    uuid = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
