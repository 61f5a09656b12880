"""Real process groups for tests: forked processes that talk over gloo."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

TIMEOUT = 500.0  # seconds: more than any test takes on a busy machine, less than forever

# Trainers ask for an address though they use the group there is, and for more threads unless told otherwise: matrix
# products hang in a forked process whose parent had several.
ENVIRONMENT = {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}


class RankFailed(RuntimeError):
    """A process raised, or died; `.rank` tells which was first, the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank}: {message}")
        self.rank = rank


def run(
    world_size: int,
    work: Callable[..., Any],
    *args: Any,
    timeout: float = TIMEOUT,
    patience: float | None = None,
    lost: Collection[int] = (),
) -> list[Any]:
    """Calls `work(rank, *args)` in `world_size` processes of one gloo group; gives what each returned.

    All together may take `timeout` seconds. Collectives wait for `patience` seconds, if that is given, else as long.

    The first failure ends all processes and is raised here, but for ranks that are to be `lost`: they give nothing.
    Returned values are pickled: no tensors that share memory,
    plain numbers and numpy arrays are best.
    """
    context = mp.get_context("fork")  # importing torch again in each process would take most of the time
    with tempfile.TemporaryDirectory() as folder:
        readers: list[Connection] = []
        processes = []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            arguments = (rank, world_size, Path(folder) / "store", patience or timeout, writer, work, args, bool(lost))
            process = context.Process(target=_main, args=arguments)
            process.start()
            writer.close()
            readers.append(reader)
            processes.append(process)
        try:
            return _gather(readers, processes, time.monotonic() + timeout, lost)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _gather(readers: list[Connection], processes: list[Any], until: float, lost: Collection[int]) -> list[Any]:
    results: dict[int, Any] = dict.fromkeys(lost)
    waiting = {id(reader): rank for rank, reader in enumerate(readers) if rank not in lost}
    while waiting:
        ready = wait([reader for reader in readers if id(reader) in waiting], until - time.monotonic())
        if not ready:
            raise TimeoutError(f"no answer from ranks {sorted(waiting.values())}")
        for reader in ready:
            assert isinstance(reader, Connection)
            rank = waiting.pop(id(reader))
            try:
                failed, result = reader.recv()
            except EOFError:
                processes[rank].join(1.0)
                raise RankFailed(rank, f"died, with exit code {processes[rank].exitcode}") from None
            if failed:
                raise RankFailed(rank, result)
            results[rank] = result
    return [results[rank] for rank in range(len(readers))]


def _main(
    rank: int,
    world_size: int,
    store: Path,
    patience: float,
    writer: Connection,
    work: Callable[..., Any],
    args: tuple[Any, ...],
    alone: bool,
) -> None:
    torch.set_num_threads(1)
    # A schedule that fails logs all of its actions, on every rank: pages under which the failure itself is not found.
    logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), **ENVIRONMENT}
    if "accelerate" in sys.modules:  # a forked process has its parent's
        sys.modules["accelerate"].state.AcceleratorState._reset_state(reset_partial_state=True)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(store), world_size),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=patience),
        )
        result = work(rank, *args)
        if not alone:
            dist.barrier()
        writer.send((False, result))
    except BaseException:
        writer.send((True, traceback.format_exc()))
    finally:
        writer.close()
        sys.stderr.flush()  # what threads raised stands there
        os._exit(0)  # no destructors: what a test left open must not hang it
