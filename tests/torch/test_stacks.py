"""Where other threads are, told without looking into their frames."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from wlb.torch.stacks import Line, stacks, waits, where

WAITING = """
def waits_here(entered, leave):
    entered.set()
    leave.wait()
"""


def module_of(path: Path, text: str) -> Any:
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("of_a_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def waiting(work: Any) -> Iterator[int]:
    """The thread that is in `work(entered, leave)`."""
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(entered, leave))
    thread.start()
    assert entered.wait(500)
    assert thread.ident is not None
    try:
        yield thread.ident
    finally:
        leave.set()
        thread.join()


@pytest.mark.parametrize("name", ["plain.py", "with space.py", "größe_語_😀.py"])
def test_the_users_line_is_told(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with waiting(module_of(path, WAITING).waits_here) as thread:
        until = time.monotonic() + 500
        while not (where(stacks()[thread])).endswith(":4 in waits_here"):
            assert time.monotonic() < until, stacks()[thread]
        lines = stacks()[thread]
    assert where(lines) == f"{path}:4 in waits_here".encode("ascii", "backslashreplace").decode()
    assert lines[0].file.endswith("threading.py")
    assert waits(lines) is False


def test_who_waits_for_other_ranks() -> None:
    torchs, wlbs = Path(torch.__file__).parent, Path(stacks.__code__.co_filename).parent
    users = Line("/home/someone/train.py", "3", "main")

    def line(path: Path) -> Line:
        return Line(str(path), "1", "f")

    assert waits([]) is None
    assert waits([users]) is False
    assert waits([line(torchs / "distributed" / "distributed_c10d.py"), users]) is True
    assert waits([line(wlbs / "data" / "peers.py"), users]) is True
    assert waits([line(torchs / "nn" / "modules" / "module.py"), users]) is None
    assert waits([Line(threading.__file__, "1", "wait"), line(wlbs / "heartbeat.py"), users]) is True
    assert waits([Line(threading.__file__, "1", "wait"), users]) is False
    assert where([line(torchs / "nn" / "modules" / "module.py"), Line(threading.__file__, "1", "f"), users]) == (
        "/home/someone/train.py:3 in main"
    )
    assert where([]) == ""


def test_frames_that_come_and_go_do_no_harm() -> None:
    """Threads that call, raise and collect while they are looked at: nothing is read but lines of code."""
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            list(deep(20))

    def deep(left: int) -> Iterator[int]:
        if left:
            yield from deep(left - 1)
        yield left

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            found = stacks()
            assert all(isinstance(line, Line) for lines in found.values() for line in lines)
            assert {thread.ident for thread in threads} <= set(found)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
