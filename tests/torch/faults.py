"""Ranks that fail on purpose, each in its own way, and what the others make of it.

`python tests/torch/faults.py --trials 200 --seed 0` has a random rank fail in a random way, place and moment.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import wlb
from wlb.torch import heartbeat
from wlb.torch.attention import context_parallel_attention
from wlb.torch.data import BalancedStream, Document, DynamicCpLoader, collate
from wlb.torch.groups import ContextParallelGroups, build_mesh
from wlb.torch.pipeline import PipelineMicroBatch, VarlenPipelineStage, failures_explained, pipeline_step

TIMEOUT = 5.0  # seconds that a rank may be behind the others
LOOKING = 55.0  # seconds until all know whose fault it is, on the busiest machine: two or three on another
COST = wlb.CostModel(attention=1e-3, linear=1e-2)
HIDDEN = 4

# What a rank does in the middle of its work, and what the others are to hear of it.
KINDS = {
    "raises": "the reason",
    "SystemExit": "SystemExit: 3",
    "KeyboardInterrupt": "KeyboardInterrupt",
    "os._exit": "ended without a word",
    "killed": "ended without a word",
    "stopped": "was stopped",
    "hangs": "its heartbeat goes on, its step does not; it is at .*faults.py:.* in fail",
}
# At any moment, from a thread beside.
SIGNALS = {"SIGKILL": "killed", "SIGSTOP": "stopped", "SIGINT": "KeyboardInterrupt"}


def fail(kind: str) -> None:
    """As the kind says."""
    if kind == "raises":
        raise ValueError("the reason")
    if kind == "SystemExit":
        raise SystemExit(3)
    if kind == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if kind == "os._exit":
        os._exit(1)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:  # "hangs"
        time.sleep(1)


@contextmanager
def logged(texts: list[str]) -> Iterator[None]:
    """What wlb logs meanwhile."""
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("wlb").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("wlb").removeHandler(handler)


class Fault:
    """Happens on one rank, in the step after `step`, and tells when."""

    def __init__(self, kind: str, *, here: bool, step: int, moment: Any) -> None:
        self.kind, self.here, self.step, self.moment, self.sent = kind, here, step, moment, False

    def __call__(self, step: int) -> None:
        if self.here and step >= self.step:
            if self.kind not in SIGNALS:
                self.moment.value = time.monotonic()
                fail(self.kind)
            elif not self.sent:
                self.sent = True
                threading.Timer(random.random() * 0.2, self.send).start()

    def send(self) -> None:
        self.moment.value = time.monotonic()
        signal.pthread_kill(threading.main_thread().ident or 0, getattr(signal, self.kind))


# --- what the ranks do, without end ----------------------------------------------------------------------------------


def text(fault: Fault | None) -> Iterator[Any]:
    """One document of a step: 64 tokens."""
    for number in range(1_000_000):
        if fault is not None:
            fault(number)
        yield np.arange(64) + number


def stream(fault: Fault | None = None, collate_fn: Any = collate, timeout: float = TIMEOUT) -> BalancedStream[Any]:
    packer = wlb.Packer(
        num_micro_batches=dist.get_world_size(), max_tokens=64, cost_model=COST, oversize="split", release="fifo"
    )
    texts = [text(fault) for _ in range(dist.get_world_size())]
    return BalancedStream(
        texts, packer=packer, collate_fn=collate_fn, group=dist.group.WORLD, timeout=timedelta(seconds=timeout)
    )


def reading_a_stream(fault: Fault) -> None:
    for _step in stream(fault):
        time.sleep(0.02)


def collating(fault: Fault) -> None:
    made = iter(range(1_000_000))

    def collated(documents: list[Document]) -> Any:
        fault(next(made))
        return collate(documents)

    for _step in stream(collate_fn=collated):
        time.sleep(0.02)


def plan(lengths: Any, max_tokens_per_rank: int = 128) -> wlb.DynamicCpPlan:
    size = dist.get_world_size()
    return wlb.plan_dynamic_cp(
        lengths, world_size=size, num_stages=1, max_tokens_per_rank=max_tokens_per_rank, cost_model=COST
    )


def dynamic(batches: Any, *, plan: Any = plan, prepare: Any = None) -> DynamicCpLoader[Any]:
    timeout = timedelta(seconds=TIMEOUT)
    return DynamicCpLoader(batches, plan=plan, group=dist.group.WORLD, prepare=prepare, timeout=timeout)


def reading_for_dynamic_cp(fault: Fault) -> None:
    for _step in dynamic([document] for document in text(fault)):
        time.sleep(0.02)


def planning_dynamic_cp(fault: Fault) -> None:
    calls = iter(range(1_000_000))

    def planned(lengths: Any) -> wlb.DynamicCpPlan:
        fault(next(calls))
        return plan(lengths)

    for _step in dynamic(([document] for document in text(None)), plan=planned):
        time.sleep(0.02)


def preparing_dynamic_cp(fault: Fault) -> None:
    calls = iter(range(1_000_000))
    batches = ([document] for document in text(None))
    for _step in dynamic(batches, prepare=lambda batch: (fault(next(calls)), batch)):
        time.sleep(0.02)


def in_a_dynamic_cp_step(fault: Fault) -> None:
    """Its group waits for it in attention, the others where gradients are added up."""
    timeout = timedelta(seconds=TIMEOUT)
    groups = ContextParallelGroups(build_mesh(dp=dist.get_world_size(), device_type="cpu"), timeout=timeout)
    everyone = dist.new_group(timeout=timeout)
    weight = nn.Parameter(torch.ones(3, 1, HIDDEN))
    for step in dynamic([document, document[:8], document[:5]] for document in text(None)):
        with failures_explained(step.number):
            for batch in step.micro_batches:
                x = batch.tokens.reshape(-1, 1, 1, 1) * weight
                out = context_parallel_attention(*x.unbind(1), batch.shard, group=groups.of(batch))
                fault(step.number)
                out.sum().backward()
            dist.all_reduce(weight.grad, group=everyone)


def between_steps(fault: Fault) -> None:
    for step in stream():
        time.sleep(0.02)
        fault(step.number)


def training(fault: Fault) -> None:
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    for step in range(1_000_000):
        with failures_explained(step):
            dist.all_reduce(torch.ones(1), group=group)
            fault(step)
            dist.all_reduce(torch.ones(1), group=group)


class Weighted(nn.Module):
    def __init__(self, fault: Callable[[], None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        self.fault()
        return x * self.weight


def pipeline(fault: Callable[[], None]) -> VarlenPipelineStage:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    return VarlenPipelineStage(Weighted(fault), rank, size, "cpu", group=group, hidden_size=HIDDEN)


def micro_batches(sizes: list[int]) -> list[PipelineMicroBatch]:
    return [PipelineMicroBatch(tokens=n, args=(torch.ones(n, HIDDEN),), target=torch.zeros(n)) for n in sizes]


def summed(output: Tensor, _target: Tensor) -> Tensor:
    return output.sum()


def in_the_pipeline(fault: Fault) -> None:
    calls = iter(range(1_000_000))
    stage = pipeline(lambda: fault(next(calls)))
    while True:
        pipeline_step([stage], micro_batches([3, 1, 5, 2]), loss_fn=summed)


PLACES: dict[str, Callable[[Fault], None]] = {
    work.__name__: work
    for work in (
        reading_a_stream,
        collating,
        reading_for_dynamic_cp,
        planning_dynamic_cp,
        preparing_dynamic_cp,
        in_a_dynamic_cp_step,
        between_steps,
        training,
        in_the_pipeline,
    )
}


# --- and how it ends -------------------------------------------------------------------------------------------------


@dataclass
class Ending:
    """Of a rank that could tell.

    Attributes:
        names: Of the classes of its exception.
        text: Its message.
        rank: That it names, if it is a `PeerFailed`.
        seconds: After the fault.
    """

    names: list[str]
    text: str
    rank: int | None
    seconds: float


def endings(
    world_size: int, work: Callable[..., None], kind: str = "", *, rank: int = -1, step: int = 3, tcp: bool = False
) -> dict[int, Ending]:
    """How each rank ended, but for those that could not tell; `rank` fails in a step after `step`.

    Begins again if a rank failed before that: the machine was too busy for the timeout.

    Args:
        world_size: Ranks.
        work: What they do.
        kind: How `rank` fails.
        rank: Which; -1 for none.
        step: After which it does.
        tcp: Whether rank 0 keeps the store.
    """
    for _attempt in range(5):
        found = _endings(world_size, work, kind, rank=rank, step=step, tcp=free_port() if tcp else 0)
        if rank < 0 or all(ending.seconds >= 0 for ending in found.values()):
            break
    return found


def _endings(
    world_size: int, work: Callable[..., None], kind: str, *, rank: int, step: int, tcp: int
) -> dict[int, Ending]:
    context = mp.get_context("fork")
    moment = context.Value("d", time.monotonic() + 1e9)
    with tempfile.TemporaryDirectory() as folder:
        readers, processes = {}, []
        for number in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            fault = Fault(kind, here=number == rank, step=step, moment=moment)
            store = tcp or Path(folder) / "store"
            process = context.Process(target=_main, args=(number, world_size, store, writer, work, fault))
            process.start()
            writer.close()
            readers[number] = reader
            processes.append(process)
        try:
            return _gather(readers, {rank} if kind in ("stopped", "hangs", "SIGSTOP") else set(), moment)
        finally:
            for process in processes:
                process.kill()
                process.join()


def wrong(found: dict[int, Ending], kind: str, *, world_size: int, failed: int, keeper: bool = False) -> str:
    """What is not as it should be: every survivor ends in time with an error that says who failed, where and why.

    With `keeper`, the rank that failed kept the store: then it is enough to say that it is gone.
    """
    survivors = set(range(world_size)) - {failed}
    if not set(found) >= survivors:
        return f"only ranks {sorted(found)} ended"
    for rank in sorted(survivors):
        ending = found[rank]
        reason = KINDS[SIGNALS.get(kind, kind)] + ("|which keeps the store, is gone or hangs" if keeper else "")
        for holds in (
            "WlbError" in ending.names,
            f"rank {failed}" in ending.text,
            re.search(reason, ending.text),
            re.search(r"step \d+", ending.text),
            "by peer" not in ending.text.partition(" (Connection")[0],
            ending.rank in (failed, None),
            ending.seconds < TIMEOUT + LOOKING,
        ):
            if not holds:
                return f"rank {rank}: {ending}"
    return ""


def _gather(readers: dict[int, Connection], never: set[int], moment: Any) -> dict[int, Ending]:
    found = {}
    waiting = {reader: rank for rank, reader in readers.items() if rank not in never}
    until = time.monotonic() + 120
    while waiting:
        ready = wait(list(waiting), until - time.monotonic())
        if not ready:
            raise TimeoutError(f"ranks {sorted(waiting.values())} do not end")
        for reader in ready:
            rank = waiting.pop(reader)  # type: ignore[call-overload]
            try:
                ending = reader.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionResetError):
                continue
            ending.seconds -= moment.value
            found[rank] = ending
    return found


def wait_for_the_store() -> None:
    """On a busy machine it is not gone where it takes its time."""
    heartbeat.Heartbeat.ask.__kwdefaults__["patience"] = 100.0


def _main(
    rank: int, world_size: int, store: Path | int, writer: Connection, work: Callable[..., None], fault: Fault
) -> None:
    torch.set_num_threads(1)
    atexit._clear()  # what the parent registered is not for here
    atexit.register(heartbeat._at_exit)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(store, int):
        kept: Any = dist.TCPStore("127.0.0.1", store, world_size, rank == 0, timeout=timedelta(seconds=60))  # type: ignore[attr-defined]
    else:
        kept = dist.FileStore(str(store), world_size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=kept, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    if not fault.kind:
        wait_for_the_store()
    try:
        work(fault)
    except BaseException as reason:
        sys.last_value = reason
        names = [cls.__name__ for cls in type(reason).__mro__]
        writer.send(Ending(names, str(reason), getattr(reason, "rank", None), time.monotonic()))
    writer.close()
    atexit._run_exitfuncs()  # as the interpreter does when it ends
    os._exit(0)


def free_port() -> int:
    """Of a store that waits for nobody."""
    return int(dist.TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False).port)  # type: ignore[attr-defined]


def main(trials: int, seed: int) -> None:
    """Counts how many trials held."""
    chance = random.Random(seed)
    held: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    latest: dict[str, float] = {}
    for trial in range(trials):
        kind, place = chance.choice([*KINDS, *SIGNALS]), chance.choice([*PLACES])
        world_size, tcp = chance.randint(2, 4), chance.random() < 0.5
        failed, step = chance.randrange(world_size), chance.randrange(12)
        what = f"{trial}: {kind} in {place}, rank {failed} of {world_size}, step {step}, {'TCP' if tcp else 'file'}"
        tried[kind] += 1
        try:
            found = endings(world_size, PLACES[place], kind, rank=failed, step=step, tcp=tcp)
            problem = wrong(found, kind, world_size=world_size, failed=failed, keeper=tcp and failed == 0)
            survivors = [ending.seconds for rank, ending in found.items() if rank != failed]
            latest[kind] = max(latest.get(kind, 0.0), *survivors)
        except TimeoutError as reason:
            problem = str(reason)
        held[kind] += not problem
        if problem:
            print(f"{what}: {problem}", flush=True)
    for kind, count in sorted(tried.items()):
        print(f"{kind:18} {held[kind]:4} of {count:4} held; the last rank ended after {latest[kind]:.1f} s")
    print(f"{held.total()} of {tried.total()}, timeout {TIMEOUT:g} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
