"""Packers side by side, on the same documents: planning time, balance, pipeline, delay, padding, memory.

`make compare` runs it, and prints a table for each set of lengths. Real packages from PyPI, called as their trainers
call them; one that cannot be imported is listed as missing, with the reason. What is compared is one training step:
`MICRO_BATCHES` of `CONTEXT` tokens on average, judged by wlb's cost model.

- Packers of one global batch (wlb, the partitioners, the solver) get the documents of one step after the other.
  Partitioners know no token limit: the memory column says how far they go.
- Packers of a whole data set (first fit and its kin) fill bins of `CONTEXT` tokens from the whole stream, however
  many that takes. Each `MICRO_BATCHES` consecutive bins are a step; before that, bins are shuffled where the trainer
  shuffles packed rows, and in the packer's order where its sampler emits them itself. An incomplete last step is not
  judged. They see all documents beforehand, so that their delay has no meaning.
- The pipeline column is the same simulator for all: a step's micro-batches, in the order given, through 1F1B over
  `STAGES` stages, over the time that equal micro-batches of the same total take.
- Megatron-Core's scheduler spreads documents over a pool of as many GPUs as there are micro-batches, in groups that end
  in a barrier: its step costs the sum over groups of the busiest GPU.

Timings on shared machines are noisy: read the ratios.
"""

from __future__ import annotations

import heapq
import importlib
import importlib.util
import itertools
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from rich.progress import Progress
from rich.table import Table

import wlb
from benches.common import CONTEXT, COST, Lengths, read_lengths, synthetic

# How many documents these trainers hand their packer at a time.
TRL_BATCH = LLAMA_FACTORY_BATCH = 1000
AXOLOTL_BIN_SIZE, AXOLOTL_GROUP_SIZE = 200, 100_000
WARM = 0.03  # seconds of repetitions of a fast call
BATCHES, MICRO_BATCHES, STAGES = 8, 16, 4
MAX_TOKENS = int(1.5 * CONTEXT)
SIZES: dict[str, Any] = {"num_micro_batches": MICRO_BATCHES, "max_tokens": MAX_TOKENS, "cost_model": COST}
SOLVER_BATCHES = 2  # steps that HiGHS gets


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Documents in arrival order."""

    name: str
    batches: list[Lengths]
    solver_seconds: float

    @property
    def lengths(self) -> Lengths:
        """All of them."""
        return np.concatenate(self.batches)


@dataclass(kw_only=True)
class Result:
    """What a packer made of a stream.

    `steps` holds, for every step and micro-batch, the lengths of its pieces; `costs` what each micro-batch costs, where
    that is not the sum over them.
    """

    steps: list[list[Sequence[int]]]
    seconds: list[float]
    costs: list[list[float]] | None = None
    delay: float | None = 0.0
    padding: float | None = None
    left_out: float = 0.0
    note: str = ""


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """The least time of a call, and what it returned."""
    least, result, until = float("inf"), None, time.perf_counter() + WARM
    while True:
        started = time.perf_counter()
        result = work()
        ended = time.perf_counter()
        least = min(least, ended - started)
        if ended > until:
            return least, result


def tokens_of(steps: list[list[Sequence[int]]]) -> int:
    return sum(int(np.sum(part)) for step in steps for part in step)


def per_batch(partition: Callable[[Lengths], Sequence[Sequence[int]]]) -> Callable[[Stream], Result]:
    """A packer that gives, for the documents of one step, the indices of each micro-batch."""

    def run(stream: Stream) -> Result:
        partition(stream.batches[0])  # imports, compiles
        steps, seconds = [], []
        for lengths in stream.batches:
            least, parts = timed(lambda lengths=lengths: partition(lengths))
            seconds.append(least)
            steps.append([lengths[list(part)] for part in parts])
        return Result(steps=steps, seconds=seconds, left_out=1.0 - tokens_of(steps) / stream.lengths.sum())

    return run


def whole_stream(
    pack: Callable[[Lengths, int], Sequence[Sequence[int]]], *, shuffled: bool = True
) -> Callable[[Stream], Result]:
    """A packer that gives, for all documents, the lengths in each bin."""

    def run(stream: Stream) -> Result:
        n, lengths = MICRO_BATCHES, stream.lengths
        pack(lengths[:100], CONTEXT)  # imports, compiles
        elapsed, bins = timed(lambda: list(pack(lengths, CONTEXT)))
        packed = sum(map(sum, bins))
        padding, left_out = 1.0 - packed / (len(bins) * CONTEXT), 1.0 - packed / int(lengths.sum())
        if shuffled:
            bins = [bins[i] for i in np.random.default_rng(0).permutation(len(bins))]
        steps = [bins[i : i + n] for i in range(0, len(bins) - n + 1, n)]
        seconds = [elapsed * n / len(bins)]
        return Result(steps=steps, seconds=seconds, delay=None, padding=padding, left_out=left_out)

    return run


# --- loading ---------------------------------------------------------------------------------------------------------


@contextmanager
def standing_in(names: Sequence[str]) -> Iterator[None]:
    """Modules that the file to be loaded imports but that packing does not use."""
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update({name: MagicMock(name=name, __path__=[]) for name in names})
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def one_file(package: str, module: str, stand_ins: Sequence[str] = ()) -> ModuleType:
    """One file of an installed distribution, without running its package: that would import all it depends on."""
    name = f"peer:{module}"
    if name not in sys.modules:
        path = Path(str(distribution(package).locate_file(module.replace(".", "/") + ".py")))
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None or not path.exists():
            raise ImportError(f"{package} {version(package)} has no {module}")
        with standing_in(stand_ins):
            loaded = sys.modules[name] = importlib.util.module_from_spec(spec)
            try:
                spec.loader.exec_module(loaded)
            except BaseException:
                del sys.modules[name]
                raise
    return sys.modules[name]


# --- packers of one global batch -------------------------------------------------------------------------------------


def ours(method: Any) -> Callable[[Stream], Result]:
    def run(stream: Stream) -> Result:
        steps, seconds = [], []
        for lengths in stream.batches:
            least, plan = timed(lambda lengths=lengths: wlb.pack(lengths, method=method, leftover="return", **SIZES))
            seconds.append(least)
            steps.append([batch.lengths for batch in plan.micro_batches])
        return Result(steps=steps, seconds=seconds, left_out=1.0 - tokens_of(steps) / stream.lengths.sum())

    return run


def queues(stream: Stream) -> Result:
    """Two queues, tuned on this very stream for a mean delay of half an iteration."""
    tuned = wlb.tune_outlier_thresholds(
        stream.lengths,
        num_queues=2,
        max_mean_delay=0.5,
        tokens_per_batch=MICRO_BATCHES * CONTEXT,
        **SIZES,
    )
    return streamed(wlb.Packer(outlier_thresholds=tuned.thresholds, **SIZES), stream)


def adaptive(stream: Stream) -> Result:
    sizes = SIZES | {"max_document_tokens": CONTEXT, "max_delay": 16}
    return streamed(wlb.Packer(release="adaptive", **sizes), stream)


def streamed(packer: wlb.Packer, stream: Stream) -> Result:
    """Delay is of all tokens, up to the end of the stream for those that still wait then."""
    steps, seconds, waiting, waited = [], [], 0, 0
    for lengths in stream.batches:
        started = time.perf_counter()
        plan = packer.push(lengths)
        seconds.append(time.perf_counter() - started)
        steps.append([batch.lengths for batch in plan.micro_batches])
        waiting += int(lengths.sum()) - plan.num_tokens
        waited += waiting
    tokens = int(stream.lengths.sum())
    note = f"{waiting / tokens * len(steps):.2f} steps' tokens wait at the end"
    return Result(steps=steps, seconds=seconds, delay=waited / tokens, note=note)


def heapq_algorithm_1(lengths: Lengths) -> list[list[int]]:
    """Algorithm 1 as one writes it in Python: sort, a heap of costs, the fewest tokens where those do not fit.

    The same job as `wlb.pack`: from an array of lengths to the documents of each micro-batch, costs included.
    """
    attention, linear = float(COST.attention_cost([1])[0]), float(COST.linear_cost([1])[0])  # of one pair, of one token
    documents, bins = lengths.tolist(), MICRO_BATCHES
    heap = [(0.0, j) for j in range(bins)]
    tokens = [0] * bins
    micro_batches: list[list[int]] = [[] for _ in range(bins)]
    for i in sorted(range(len(documents)), key=lambda i: -documents[i]):
        length = documents[i]
        added = attention * (length * (length + 1) // 2) + linear * length
        cost, j = heap[0]
        if tokens[j] + length > MAX_TOKENS:
            j = min(range(bins), key=tokens.__getitem__)
            if tokens[j] + length > MAX_TOKENS:
                continue
            cost = next(c for c, k in heap if k == j)
            heap.remove((cost, j))
            heapq.heapify(heap)
            heapq.heappush(heap, (cost + added, j))
        else:
            heapq.heapreplace(heap, (cost + added, j))
        tokens[j] += length
        micro_batches[j].append(i)
    return micro_batches


def highs(stream: Stream) -> Result:
    import benches.exact  # needs the solver

    result = Result(steps=[], seconds=[])
    optimal = 0
    for lengths in stream.batches[:SOLVER_BATCHES]:
        solution = benches.exact.solve(lengths, time_limit=stream.solver_seconds, **SIZES)
        optimal += solution.optimal
        result.seconds.append(solution.seconds)
        result.steps.append([batch.lengths for batch in solution.packing.micro_batches])
    result.note = f"{optimal} of {len(result.steps)} proved optimal in {stream.solver_seconds:g} s; first steps only"
    return result


def binpacking(lengths: Lengths) -> list[list[int]]:
    costs = dict(enumerate(COST.cost(lengths).tolist()))
    return [list(part) for part in importlib.import_module("binpacking").to_constant_bin_number(costs, MICRO_BATCHES)]


def prtpy(lengths: Lengths) -> list[list[int]]:
    prtpy = importlib.import_module("prtpy")
    costs = dict(enumerate(COST.cost(lengths).tolist()))
    return list(prtpy.partition(algorithm=prtpy.partitioning.greedy, numbins=MICRO_BATCHES, items=costs))


def numberpartitioning(lengths: Lengths) -> list[list[int]]:
    karmarkar_karp = importlib.import_module("numberpartitioning").karmarkar_karp
    return list(karmarkar_karp(COST.cost(lengths).tolist(), num_parts=MICRO_BATCHES, return_indices=True).partition)


def verl_balancing() -> ModuleType:
    stand_ins = ("verl", "verl.protocol", "verl.utils", "verl.utils.device", "verl.utils.tensordict_utils")
    return one_file("verl", "verl.utils.seqlen_balancing", stand_ins)


def verl(lengths: Lengths) -> list[list[int]]:
    workload = verl_balancing().calculate_workload(lengths).tolist()
    return verl_balancing().get_seqlen_balanced_partitions(workload, MICRO_BATCHES, equal_size=False)


def verl_with_our_costs(lengths: Lengths) -> list[list[int]]:
    return verl_balancing().get_seqlen_balanced_partitions(COST.cost(lengths).tolist(), MICRO_BATCHES, equal_size=False)


def megatron(stream: Stream) -> Result:
    """Hybrid context parallelism over as many GPUs as there are micro-batches, each with its share of the context."""
    module = importlib.import_module("megatron.core.pipeline_parallel.hybrid_cp_schedule")
    gpus, result, failures = MICRO_BATCHES, Result(steps=[], seconds=[], costs=[]), []
    pool = MagicMock(**{"size.return_value": gpus})
    for lengths in stream.batches:
        documents = list(enumerate(lengths.tolist()))
        scheduler = module.BalancedCPScheduler(max_seq_len_per_rank=CONTEXT // gpus, dp_cp_group=pool)
        try:
            least, (_, groups) = timed(
                lambda scheduler=scheduler, documents=documents: scheduler.get_groups_and_subsamples(documents, None)
            )
        except Exception as error:
            failures.append(type(error).__name__)
            continue
        step = 0.0
        for group in groups:
            members = np.bincount([sample for gpu in group for sample in gpu], minlength=len(lengths))
            share = COST.cost(lengths) / np.maximum(members, 1)
            step += max(float(share[gpu].sum()) for gpu in group)
        result.seconds.append(least)
        # One entry stands for the step; the others make the mean that of perfect balance.
        total = float(COST.cost(lengths).sum())
        result.costs.append([step] + [(total - step) / (gpus - 1)] * (gpus - 1))
        result.steps.append([lengths.tolist()])
    result.note = f"{gpus} GPUs, {CONTEXT // gpus} tokens each"
    if failures:
        result.note += f"; {len(failures)} of {len(stream.batches)} steps failed: {failures[0]}"
    return result


# --- packers of a data set -------------------------------------------------------------------------------------------


def trl(strategy: str) -> Callable[[Lengths, int], list[list[int]]]:
    def pack(lengths: Lengths, context: int) -> list[list[int]]:
        import pyarrow
        from datasets import Dataset, disable_progress_bars
        from datasets.table import InMemoryTable

        disable_progress_bars()
        pack_dataset = importlib.import_module("trl.data_utils").pack_dataset
        # Each token is the number of its document: what lies in a bin is then known, wherever it was cut.
        tokens = pyarrow.array(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths))
        offsets = pyarrow.array(np.concatenate([[0], np.cumsum(lengths)]), type=pyarrow.int32())
        table = InMemoryTable(pyarrow.table({"input_ids": pyarrow.ListArray.from_arrays(offsets, tokens)}))
        # Fingerprints of our own: there is nothing to cache, and hashing all tokens takes longer than packing.
        dataset = Dataset(table, fingerprint="documents")
        options = {"batch_size": TRL_BATCH, "keep_in_memory": True, "new_fingerprint": "packed"}
        packed = pack_dataset(dataset, seq_length=context, strategy=strategy, map_kwargs=options)
        return [_runs(row.values.to_numpy()) for row in packed.data.column("input_ids").combine_chunks()]

    return pack


def _runs(values: Lengths) -> list[int]:
    edges = np.flatnonzero(np.diff(values)) + 1
    return np.diff([0, *edges, len(values)]).tolist()


def axolotl(lengths: Lengths, context: int) -> list[list[int]]:
    stand_ins = ("axolotl", "axolotl.utils", "axolotl.utils.distributed", "axolotl.utils.logging")
    module = one_file("axolotl", "axolotl.utils.samplers.multipack", stand_ins)
    # What its batch sampler calls. The sampler also collects garbage, which takes longer than packing.
    bins = module.pack_parallel(
        lengths.astype(np.int32),
        bin_capacity=context,
        group_size=AXOLOTL_GROUP_SIZE,
        bin_size=AXOLOTL_BIN_SIZE,
        num_processes=1,
    )
    return [lengths[indices].tolist() for indices in bins]


def llama_factory(lengths: Lengths, context: int) -> list[list[int]]:
    module = one_file("llamafactory", "llamafactory.data.processor.processor_utils")
    starts = range(0, len(lengths), LLAMA_FACTORY_BATCH)
    documents = (lengths[start : start + LLAMA_FACTORY_BATCH].tolist() for start in starts)
    return [knapsack for numbers in documents for knapsack in module.greedy_knapsack(numbers, context)]


def nemo(algorithm: str) -> Callable[[Lengths, int], list[list[int]]]:
    def pack(lengths: Lengths, context: int) -> list[list[int]]:
        module = one_file("nemo-toolkit", "nemo.utils.sequence_packing_utils", ("nemo", "nemo.utils"))
        np.random.seed(0)  # noqa: NPY002 - what the packer draws from
        return getattr(module, algorithm)(lengths.tolist(), context)

    return pack


def automodel(lengths: Lengths, context: int) -> list[list[int]]:
    module = one_file("nemo-automodel", "nemo_automodel.components.datasets.llm.neat_packing")
    return [lengths[indices].tolist() for indices in module.greedy_knapsack(lengths.tolist(), context)]


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    run: Callable[[Stream], Result]
    note: str = field(default="", kw_only=True)


ALONE = "without its dependencies"
PEERS = [
    Peer("var_length", "wlb", ours("var_length")),
    Peer("refined", "wlb", ours("refined")),
    Peer("2 queues, tuned", "wlb", queues),
    Peer("release adaptive", "wlb", adaptive, note="max_delay 16"),
    Peer("fixed_length", "wlb", ours("fixed_length"), note="cuts documents"),
    Peer("Algorithm 1 in Python", "", per_batch(heapq_algorithm_1), note="sort and heapq, written in this bench"),
    Peer("mixed-integer program", "highspy", highs),
    Peer("greedy, equal bins", "binpacking", per_batch(binpacking)),
    Peer("greedy partition", "prtpy", per_batch(prtpy)),
    Peer("Karmarkar-Karp", "numberpartitioning", per_batch(numberpartitioning)),
    Peer("Karmarkar-Karp, its workload", "verl", per_batch(verl), note=ALONE),
    Peer("Karmarkar-Karp, our costs", "verl", per_batch(verl_with_our_costs), note=ALONE),
    Peer("BalancedCPScheduler", "megatron-core", megatron),
    Peer("multipack (first fit)", "axolotl", whole_stream(axolotl, shuffled=False), note=ALONE),
    Peer("greedy knapsack", "llamafactory", whole_stream(llama_factory), note=ALONE),
    Peer("first fit decreasing", "nemo-toolkit", whole_stream(nemo("first_fit_decreasing")), note=ALONE),
    Peer("first fit shuffle", "nemo-toolkit", whole_stream(nemo("first_fit_shuffle")), note=ALONE),
    Peer("neat packing", "nemo-automodel", whole_stream(automodel), note=ALONE),
    Peer("best fit decreasing", "trl", whole_stream(trl("bfd"))),
    Peer("wrapped", "trl", whole_stream(trl("wrapped")), note="cuts documents"),
]
PACKAGES = sorted({peer.package for peer in PEERS} - {"", "wlb"})
# In their repositories, in no release on PyPI.
UNRELEASED = [
    "megatron-core: dp_balanced and DefaultDynamicCPScheduler are in no release on PyPI (looked at up to 0.19.2)"
]


def measure(peer: Peer, stream: Stream) -> dict[str, Any]:
    """One row of the table."""
    row: dict[str, Any] = {"lengths": stream.name, "package": peer.package, "packer": peer.name, "note": peer.note}
    try:
        # wlb may be imported from its sources, and be installed nowhere.
        row["version"] = wlb.__version__ if peer.package == "wlb" else version(peer.package) if peer.package else ""
        result = peer.run(stream)
    except (ImportError, PackageNotFoundError) as error:
        return row | {"missing": f"missing: {error}".rstrip(".")}
    except Exception as error:
        traceback.print_exc()
        return row | {"missing": f"failed: {type(error).__name__}: {error}"}
    row["note"] = "; ".join(filter(None, [result.note, peer.note]))
    row["seconds_per_step"] = result.seconds
    row["steps"] = len(result.steps)
    costs = result.costs or [[float(COST.cost(part).sum()) for part in step] for step in result.steps]
    ratios = np.array([max(step) * len(step) / sum(step) for step in costs])
    row["imbalance"] = [float(ratios.mean()), float(np.quantile(ratios, 0.95)), float(ratios.max())]
    if result.costs is None:
        row["pipeline"] = float(np.mean([over_equal(step, STAGES) for step in costs]))
    row["delay"], row["padding"] = result.delay, result.padding
    if result.costs is None:
        tokens = np.array([[sum(part) for part in step] for step in result.steps])
        row["memory"] = float((tokens.max(axis=1) / tokens.mean(axis=1)).mean())
        row["steps_over_max_tokens"] = int((tokens.max(axis=1) > MAX_TOKENS).sum())
    row["left_out"] = result.left_out
    return row


def over_equal(costs: list[float], stages: int) -> float:
    """Time of 1F1B over that of equal micro-batches."""

    def seconds(costs: list[float]) -> float:
        return wlb.simulate_pipeline(costs, schedule="1f1b", num_stages=stages).seconds

    return seconds(costs) / seconds([sum(costs) / len(costs)] * len(costs))


def streams(paths: Sequence[Path], solver_seconds: float) -> Iterator[Stream]:
    rng = np.random.default_rng(0)
    sources = {"synthetic": synthetic(2 * BATCHES * MICRO_BATCHES * CONTEXT // 4000)}
    sources |= {path.stem: rng.permutation(read_lengths(path)) for path in paths}
    for name, lengths in sources.items():
        pieces = wlb.split_documents(lengths, max_document_tokens=CONTEXT)[2]
        offsets = wlb.batch_offsets(pieces, tokens_per_batch=MICRO_BATCHES * CONTEXT)
        batches = [pieces[a:b] for a, b in itertools.pairwise(offsets)]
        # The last batch of a stream is as long as it happens to be.
        yield Stream(name=name, batches=batches[: min(BATCHES, len(batches) - 1)], solver_seconds=solver_seconds)


def compare(
    paths: Sequence[Path], solver_seconds: float, progress: Progress
) -> tuple[list[Stream], list[dict[str, Any]]]:
    """Every peer on a synthetic stream and on those of these .npy files; a row for each, in this order."""
    all_streams, rows = list(streams(paths, solver_seconds)), []
    task = progress.add_task("", total=len(all_streams) * len(PEERS))
    for stream in all_streams:
        for peer in PEERS:
            progress.update(task, description=f"{stream.name}: {peer.package} {peer.name}")
            rows.append(measure(peer, stream))
            progress.advance(task)
    return all_streams, rows


def table(stream: Stream, rows: list[dict[str, Any]]) -> Table:
    title = f"{stream.name}: {len(stream.batches)} steps of {MICRO_BATCHES} x {CONTEXT:,} tokens"
    caption = (
        f"max_tokens {MAX_TOKENS:,}. ms: planning of a step. x: over wlb's var_length. Imbalance: heaviest over "
        "mean micro-batch. Delay: iterations a token waits. Out: tokens not placed in their step. Pad: of bins filled "
        "up to the context. Memory: most over mean tokens. Without its dependencies: so installed, one file imported. "
        "BalancedCPScheduler: not micro-batches but groups over a pool of GPUs, which end in a barrier; its imbalance "
        "is that of the GPUs, and does not compare with the rows above it."
    )
    result = Table(
        "package",
        "packer",
        "ms",
        "x",
        "imbalance",
        "p95",
        "worst",
        "pipeline",
        "delay",
        "out",
        "pad",
        "memory",
        "",
        title=title,
    )
    result.caption = caption
    fastest = float(np.mean(rows[0]["seconds_per_step"]))
    for row in rows:
        package = f"{row['package']} {row.get('version', '')}".strip()
        if "missing" in row:
            result.add_row(package, row["packer"], *[""] * 10, row["missing"])
            continue
        seconds = float(np.mean(row["seconds_per_step"]))
        over = row.get("steps_over_max_tokens", 0)
        notes = [f"{over} of {row['steps']} steps over max_tokens" if over else "", row["note"]]
        result.add_row(
            package,
            row["packer"],
            f"{seconds * 1e3:,.3f}",
            f"{seconds / fastest:,.1f}",
            *(f"{value:.4f}" for value in row["imbalance"]),
            f"{row['pipeline']:.4f}" if "pipeline" in row else "",
            f"{row['delay']:.2f}" if row["delay"] is not None else "",
            f"{row['left_out']:.2%}" if row["left_out"] > 1e-9 else "",
            f"{row['padding']:.2%}" if row["padding"] is not None else "",
            f"{row['memory']:.3f}" if "memory" in row else "",
            "; ".join(filter(None, notes)),
        )
    return result
