"""Thousands of ranks: what starting costs a rank, how long planning takes, what ranks hear of one that is lost.

    make scale                          # writes benches/records/scale.json and docs/results/scale.md, in ten minutes
    python -m benches.scale --planning  # only how long planning takes, with exchange free and priced

Start-up is counted on one rank after another, whose neighbours in the tree are faked: each is a mailbox that says what
a neighbour would say. Up to 512 ranks all are real, threads of one process, and have to count the same. Plans are those
of one rank, since every rank makes the same. Ranks that are late, raise or are killed are real processes.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import wlb
from benches.common import COST, DOCS, Row, machine, markdown, options, parse, rounded, write_record
from benches.results import described
from tests.torch import processes
from wlb.torch import tree
from wlb.torch.host import HostGroup
from wlb.torch.mailbox import Address, Mailbox

WORLDS = (512, 1024, 2048, 4096, 8192)
THREADS = 512
PROCESSES = 16
LATE = 5.0  # seconds after which a rank is late
HEALTHY = timedelta(seconds=60)


# --- start-up --------------------------------------------------------------------------------------------------------


class Counting:
    """A launcher's store that counts requests, and their bytes of keys and values."""

    def __init__(self, store: Any) -> None:
        self._store, self.requests, self.bytes = store, 0, 0

    def clone(self) -> Counting:
        """A connection: one request."""
        self.requests += 1
        return self

    def __getattr__(self, name: str) -> Any:
        def ask(*arguments: Any) -> Any:
            result = getattr(self._store, name)(*arguments)
            self.requests += 1
            keys = arguments[0] if isinstance(arguments[0], list) else [arguments[0]]
            values = [value for value in (*arguments[1:], result) if isinstance(value, bytes)]
            self.bytes += sum(map(len, [*keys, *values]))
            return result

        return ask


class Counted(Mailbox):
    """A mailbox that counts the bytes which go out and come in, and to how many ranks it connects."""

    def __init__(self, host: str, place: int) -> None:
        super().__init__(host, place)
        self.bytes, self.to = 0, set[Address]()

    def put(self, to: Address, message: bytes, **how: Any) -> None:
        """Counts what goes out."""
        self.bytes += len(message)
        self.to.add(to)
        self.deliver(to, message, **how)

    def deliver(self, to: Address, message: bytes, **how: Any) -> None:
        """Sends it."""
        super().put(to, message, **how)

    def take(self, sources: Any, seconds: float) -> dict[int, bytes]:
        """Counts what comes in."""
        found = self.arrive(sources, seconds)
        self.bytes += sum(map(len, found.values()))
        return found

    def arrive(self, sources: Any, seconds: float) -> dict[int, bytes]:
        """Waits for it."""
        return super().take(sources, seconds)


class Faked(Counted):
    """A mailbox without neighbours: it makes up what each of them would say while a tree is made."""

    size = 0
    calls = 0

    def deliver(self, to: Address, message: bytes, **how: Any) -> None:
        """Goes nowhere."""

    def arrive(self, sources: Any, seconds: float) -> dict[int, bytes]:
        """The addresses of children, then those of the ranks below each, then those of all from the parent."""
        self.calls += bool(sources)
        found = {}
        for source in sources:
            if source < self._place:
                said: Any = {place: address_of(place) for place in range(self.size)}
            elif self.calls == 1:
                said = tuple(address_of(source))
            else:
                said = {place: address_of(place) for place in below(source, self.size)}
            found[source] = pickle.dumps(said)
        return found


def address_of(place: int) -> Address:
    """As long as a real one of this machine."""
    return Address("localhost", 32768 + place, place.to_bytes(16, "little"))


def below(place: int, size: int) -> Iterator[int]:
    """A rank and all ranks that hear of the rest through it."""
    yield place
    for child in tree.children_of(place, size):
        yield from below(child, size)


def of_each(trees: list[tree.Tree], stores: list[Counting]) -> Row:
    """The most of any rank."""
    mailboxes: list[Any] = [each._mailbox for each in trees]
    return {
        "requests": max(store.requests for store in stores),
        "store_bytes": max(store.bytes for store in stores),
        "connections": max(len(mailbox.to) for mailbox in mailboxes),
        "bytes": max(mailbox.bytes for mailbox in mailboxes),
    }


def faked_start(size: int) -> Row:
    """What the first rank, ranks with a full node below them, and leaves ask and send."""
    places = sorted({0, 8, 64, 7, size - 8, size - 1})
    stores, trees = [], []
    for place in places:
        store = dist.HashStore()
        parent = tree.parent_of(place)
        with (
            mock.patch.object(tree, "Mailbox", type("Faked", (Faked,), {"size": size})),
            mock.patch.dict(tree._MADE, clear=True),
        ):
            stores.append(Counting(AnyKey(store, parent)))
            trees.append(tree.Tree(stores[-1], range(size), place, what="scale", timeout=HEALTHY))  # type: ignore[arg-type]
    found = of_each(trees, stores)
    for each in trees:
        each.close()
    return {"ranks": size, **found}


class AnyKey:
    """A launcher's store in which the parent's address stands already."""

    def __init__(self, store: Any, parent: int | None) -> None:
        self._store, self._parent = store, parent

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Puts it there."""
        assert self._parent is not None
        self._store.set(keys[0], pickle.dumps(tuple(address_of(self._parent))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def real_start(size: int) -> Row:
    """What each rank does at its start if all ranks run as threads of this process, and how long they take."""
    shared = dist.HashStore()
    keys = shared.num_keys()
    stores = [Counting(shared) for _ in range(size)]
    with mock.patch.object(tree, "Mailbox", Counted), ThreadPoolExecutor(size) as threads:
        make: Any = functools.partial(tree.Tree, ranks=range(size), what="scale", timeout=timedelta(minutes=5))
        begun = time.perf_counter()
        trees = list(threads.map(lambda store, place: make(store, place=place), stores, range(size)))
        seconds = time.perf_counter() - begun
        found = of_each(trees, stores)
        begun = time.perf_counter()
        list(threads.map(lambda each: each.gather(None), trees))
        gather = time.perf_counter() - begun
        left = shared.num_keys() - keys
        for each in trees:
            each.close()
    return {"ranks": size, **found, "seconds": seconds, "gather_seconds": gather, "keys_left": left}


# --- planning --------------------------------------------------------------------------------------------------------


def planning(size: int) -> Row:
    """Milliseconds of a plan: 8 micro-batches a data-parallel rank, 10 documents each; and of Dynamic-CP.

    Dynamic-CP is planned with free exchange, and at 7e-6 of the cost of 8,192 tokens for each token. Beside it is how
    far the step of each plan is above its bound.
    """
    lengths = np.clip(np.random.default_rng(5).lognormal(8, 1.3, 80 * size), 64, 131072).astype(np.int64)
    packer = wlb.Packer(num_micro_batches=8 * size, max_tokens=262144, cost_model=COST, max_document_tokens=131072)
    push = least(lambda: packer.push(lengths))
    few = lengths[: 32 * size]
    dynamic: Any = functools.partial(wlb.plan_dynamic_cp, cost_model=COST, num_stages=8, max_tokens_per_rank=8192)
    row: Row = {"ranks": size, "push_ms": push}
    price = wlb.Exchange(seconds_per_token=7e-6 * float(COST.cost([8192])[0]))
    for name, exchange in (("dynamic_cp", None), ("priced", price)):
        plan = functools.partial(dynamic, few, world_size=size, exchange=exchange)
        row[f"{name}_ms"] = least(plan)
        row[f"{name}_over_bound"] = (made := plan()).seconds / made.lower_bound - 1
    return row


def measure_planning(show: Any) -> Row:
    """Rows for all numbers of ranks, and the machine that they were measured on."""
    rows = []
    for size in (64, *WORLDS):
        rows.append(planning(size))
        show(rows[-1])
    return {"planning_machine": machine([]), "planning": rows}


def least(work: Any) -> float:
    """Milliseconds of CPU time, the least of five."""
    found = []
    for _ in range(5):
        begun = time.thread_time()
        work()
        found.append((time.thread_time() - begun) * 1e3)
    return min(found)


# --- lost ranks ------------------------------------------------------------------------------------------------------


def survives(rank: int, how: str, lost: int) -> tuple[str, float]:
    """What a rank hears while it waits for another one, and after how many seconds."""
    timeout = timedelta(seconds=LATE) if how == "late" else HEALTHY
    group = HostGroup(dist.group.WORLD, description="scale", timeout=timeout)
    group.gather_objects(None)
    begun = time.monotonic()
    if rank == lost:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raises":
            raise ValueError("outside of the group")
        if how == "late":
            os.kill(os.getpid(), signal.SIGSTOP)
    text = ""
    try:
        for _ in range(100):
            group.gather_objects(rank)
    except RuntimeError as heard:
        text = str(heard)
    seconds = time.monotonic() - begun
    time.sleep(2.0)  # who ends is missed, too
    return text, seconds if text else seconds / 100


def lost_ranks() -> Iterator[Row]:
    """By fate and by place in the tree."""
    for how, lost in [("none", -1), *((how, lost) for how in ("late", "raises", "killed") for lost in (0, 3, 15))]:
        found = processes.run(PROCESSES, survives, how, lost, lost=[lost] if lost >= 0 else [])
        heard = [each for rank, each in enumerate(found) if rank != lost]
        yield {
            "how": how,
            "lost": lost,
            "texts": sorted({text for text, _ in heard}),
            "seconds": max(seconds for _, seconds in heard),
        }


# --- the page --------------------------------------------------------------------------------------------------------


def page(record: Row) -> str:
    """docs/results/scale.md."""
    about, planned, real = record["machine"], record["planning_machine"], record["real"]
    most = max(row["requests"] for row in record["faked"])
    start = Table(
        "ranks",
        "requests to the store",
        "their bytes",
        "ranks it connects to",
        "in a gloo group",
        "kB sent and received",
    )
    for row in record["faked"]:
        cells = (row["requests"], row["store_bytes"], row["connections"], row["ranks"] - 1, round(row["bytes"] / 1e3))
        start.add_row(*(f"{cell:,}" for cell in (row["ranks"], *cells)))
    plans = Table(
        "data-parallel ranks",
        "`Packer.push`, ms",
        "`plan_dynamic_cp`, ms",
        "step over bound",
        "exchange priced, ms",
        "times as long",
        "step over bound",
    )
    for row in record["planning"]:
        free, priced = row["dynamic_cp_ms"], row["priced_ms"]
        plans.add_row(
            f"{row['ranks']:,}",
            f"{row['push_ms']:.1f}",
            f"{free:.1f}",
            f"{row['dynamic_cp_over_bound']:.1%}",
            f"{priced:.1f}",
            f"{priced / free:.1f}",
            f"{row['priced_over_bound']:.1%}",
        )
    lost = Table("what happens", "to rank", "what all others raise", "seconds, the last of them")
    healthy = next(row for row in record["lost"] if row["how"] == "none")
    for row in record["lost"]:
        if row is not healthy:
            lost.add_row(row["how"], str(row["lost"]), "; ".join(row["texts"]), f"{row['seconds']:.1f}")
    connections = max(row["connections"] for row in record["faked"])
    counted = f"{real['requests']} requests, {real['connections']} connections and {real['bytes'] / 1e3:,.0f} kB"
    took = f"started in {real['seconds']:.1f} s, and gathered in {real['gather_seconds']:.2f} s"
    text = [
        "Written by `make scale` from benches/records/scale.json; do not edit.",
        "",
        "# Thousands of ranks",
        "",
        f"A rank asks the launcher's store {most} times, for any number of ranks, and connects to {connections} other",
        "ranks. When a rank is lost, all others name it.",
        "",
        f"Measured {about['time'][:10]} on {described(about)}, commit {about['commit']}.",
        "",
        "## What a rank does at its start",
        "",
        "For one group of all ranks, in which each gets the addresses of all. **Faked:** six ranks run, one at a time:",
        "the first one, inner ones and leaves of the tree. The table has the most of them. Their neighbours are made",
        "up, and there is no network. A rank in the middle, of which none ran, may send a quarter more bytes.",
        "",
        *markdown(start),
        "",
        "A rank of a gloo group connects to all others; that column is not measured.",
        "",
        f"**Real:** {real['ranks']:,} ranks as threads of one process. They counted at most",
        f"{counted} a rank, {took}.",
        f"They left {real['keys_left']} keys in the store.",
        "",
        "## Planning",
        "",
        "**Real**, CPU time of one core, as every rank makes the same plan. `Packer.push` has 8 micro-batches a rank",
        "and 10 documents in each; Dynamic-CP has 32 documents a rank and 8 stages. Its exchange is free at first, and",
        "then costs, for each token, 7 millionths of a document of 8,192 tokens. Each plan's step is compared",
        "with its `lower_bound`.",
        f"Measured {planned['time'][:10]} on {described(planned)}, commit {planned['commit']}.",
        "",
        *markdown(plans),
        "",
        "## A rank that is lost",
        "",
        f"**Real:** {PROCESSES} processes of one machine gather in a loop, in {healthy['seconds'] * 1e3:.0f} ms each.",
        f"*Late* is stopped with SIGSTOP, under a timeout of {LATE:.0f} s. A rank waits up to 3 s longer for each",
        "level of the tree, so that it hears the cause.",
        "",
        *markdown(lost),
    ]
    return "\n".join(text) + "\n"


def main() -> None:
    parser = options(__doc__, record="scale.json")
    parser.add_argument("--page", type=Path, default=DOCS / "results" / "scale.md", help="where the page goes")
    parser.add_argument("--planning", action="store_true", help="measure planning alone; the record keeps the rest")
    arguments = parse(parser)
    show = Console(stderr=True).print
    if arguments.planning:
        record: Row = json.loads(arguments.record.read_text())
        record |= measure_planning(show)
        write_record(arguments.record, rounded(record))
        arguments.page.write_text(page(record))
        return
    lost = []
    for row in lost_ranks():  # first: processes are forked before there are threads
        show(row)
        lost.append(row)
    record = {"machine": machine(["torch"]), "lost": lost, "faked": []}
    for size in WORLDS:
        record["faked"].append(faked_start(size))
        show(record["faked"][-1])
    record |= measure_planning(show)
    record["real"] = real_start(THREADS)
    show(record["real"])
    for name in ("requests", "connections"):
        assert record["real"][name] == record["faked"][0][name], name
    record = rounded(record)
    write_record(arguments.record, record)
    arguments.page.write_text(page(record))


if __name__ == "__main__":
    main()
