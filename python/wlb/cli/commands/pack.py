"""`wlb pack`: plans for a user's documents, as files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import NonNegativeFloat, NonNegativeInt, PositiveInt

from wlb._choices import Release
from wlb.cli.errors import CliError, option
from wlb.cli.inputs.cluster import token_limit
from wlb.cli.inputs.documents import Source
from wlb.cli.inputs.model import Cost
from wlb.cli.inputs.options import PANELS, CommandLine, Numbers, options, settings
from wlb.cli.inputs.packing import Batches, Waiting
from wlb.cli.inputs.stream import Ordered
from wlb.cli.output.console import Output
from wlb.cli.output.packing import packing_report
from wlb.cli.output.plan_files import deal, write_jsonl, write_names, write_npz
from wlb.cli.packing import Comparison, collect, cp_balances, tune, waiting
from wlb.cli.words import counted
from wlb.simulation.methods import Setup, fixed_length, original, var_length

_TUNED_BATCHES = 100  # at most so many, from the start of the stream

Method = Literal["original", "fixed_length", "var_length", "refined"]


@options(PANELS["batches"])
@dataclass(frozen=True, kw_only=True)
class PackedBatches(Batches):
    """Global batches, and what they become.

    Args:
        max_tokens: the most tokens of a micro-batch of var_length and refined; by default 1.5 contexts.
        window: global batches that fixed_length plans at once.
        dp_size: also deal the micro-batches to so many DP ranks.
    """

    max_tokens: int | None = None
    window: PositiveInt = 1
    dp_size: PositiveInt | None = None


@options(PANELS["waiting"])
@dataclass(frozen=True, kw_only=True)
class Held(Waiting):
    """What waits, and how long.

    Args:
        release: fifo: queues with thresholds. adaptive: what cannot be balanced now waits; no thresholds.
        delay_price: with adaptive release: the imbalance that the first iteration of waiting of a global batch is
            worth; higher waits less. By default it is tuned.
        num_queues: number of outlier queues; their thresholds are tuned.
        outlier_thresholds: thresholds of the queues in tokens, ascending, such as 49152,98304; none are tuned then.
    """

    release: Release = "fifo"
    delay_price: NonNegativeFloat | None = None
    num_queues: NonNegativeInt = 2
    outlier_thresholds: Annotated[tuple[int, ...] | None, Numbers] = None


def pack(
    source: Source,
    /,
    *,
    method: Annotated[Method, Parameter(group=PANELS["methods"])] = "var_length",
    reading: Ordered = Ordered(),
    batches: PackedBatches = PackedBatches(),
    held: Held = Held(),
    cost: Cost = Cost(),
    output: Output = Output(),
    command_line: CommandLine,
) -> None:
    """Packs the documents of SOURCE, each exactly once, and writes the plans.

    plans.npz holds flat arrays: step, micro_batch, document_id, start and length of every piece of a document
    (docs/semantics.md); plans.jsonl a line per global batch; pack.html and pack.png compare the plan with the original
    order. The last global batches empty the queues and may be small. Of a directory, line i of
    documents.txt is the path of document i; a path with unusual characters is a JSON string, in quotation marks.

    Args:
        method: var_length: equal work, whole documents. refined: the same, balanced better where --max-tokens binds.
            The others fill and cut at the context.
    """
    for name, reason in _useless(method, batches, held):
        raise CliError(f"--{option(name)}: {reason}")
    setup = Setup(
        num_micro_batches=batches.num_micro_batches,
        context=batches.context,
        max_tokens=token_limit(batches.max_tokens, batches.context) or batches.context * 3 // 2,
        cost_model=cost.cost_model(),
    )
    if batches.dp_size is not None and setup.num_micro_batches % batches.dp_size:
        raise CliError(f"--dp-size {batches.dp_size}: does not divide --micro-batches {setup.num_micro_batches}")
    levels, price = held.outlier_thresholds, held.delay_price

    with output.progress() as bars:
        documents = reading.documents(source, bars)
        stream = reading.stream(documents, context=setup.context, tokens_per_batch=setup.tokens_per_batch, steps=None)
        folder = output.folder("pack")
        before = plan = collect("original", original(stream, setup), stream, bars)
        if method == "fixed_length":
            packed = fixed_length(stream, setup, batches.window)
            plan = collect(f"fixed-length, g={batches.window}", packed, stream, bars)
        elif method != "original":
            adaptive = held.release == "adaptive"
            if price is None if adaptive else levels is None and held.num_queues > 0:
                tuned = tune(
                    stream,
                    setup,
                    batches=min(stream.batches, _TUNED_BATCHES),
                    queues=None if adaptive else held.num_queues,
                    max_mean_delay=held.max_mean_delay,
                    max_delay=held.max_delay,
                    progress=bars,
                    method=method,
                )
                levels, price = tuned.thresholds, tuned.delay_price
            levels = levels or ()
            queued = f"adaptive, price {price:g}" if adaptive else counted(len(levels), "queue")
            name = f"WLB{' refined' if method == 'refined' else ''}, {queued}"
            rule = waiting(setup, held.release, price, method)
            packed = var_length(stream, setup, levels, held.max_delay, rule)
            plan = collect(name, packed, stream, bars, levels, held.release)
        flushed = len(plan.digests) - plan.streamed
        report = packing_report(
            "pack",
            Comparison(
                documents=documents,
                stream=stream,
                setup=setup,
                plans=(before,) if plan is before else (before, plan),
                shown=plan,
                balances=cp_balances(plan, bars),
            ),
            settings={"method": method}
            | settings(batches, cost, reading, held)
            | {"max_tokens": setup.max_tokens, "delay_price": price, "queues": len(plan.thresholds)},
            remark=f"{len(plan.digests):,} global batches planned"
            f"{f', the last {flushed:,} of them to empty the queues' if flushed else ''}.",
        )
        deals = None if batches.dp_size is None else deal(plan, setup, batches.dp_size)
        files = [folder / "plans.npz", folder / "plans.jsonl"]
        write_npz(files[0], plan, stream, deals)
        write_jsonl(files[1], plan, stream, deals)
        if documents.names is not None:
            files.append(folder / "documents.txt")
            write_names(files[2], documents.names)
    output.give(report, command_line, files)


def _useless(method: Method, batches: PackedBatches, held: Held) -> Iterator[tuple[str, str]]:
    """Options that are given and have nothing to do beside the others, and why."""
    fills = method in ("original", "fixed_length")
    tuned = held.outlier_thresholds is None and held.delay_price is None
    everything = tuple(Held.__dataclass_fields__)
    for useless, given, names, reason in (
        (
            method != "fixed_length",
            batches,
            ("window",),
            "only --method fixed_length plans several global batches at once",
        ),
        (fills, batches, ("max_tokens",), f"--method {method} fills micro-batches up to --context"),
        (fills, held, everything, f"--method {method} holds nothing back"),
        (
            held.release == "adaptive",
            held,
            ("outlier_thresholds", "num_queues"),
            "--release adaptive finds what has to wait without queues",
        ),
        (held.release == "fifo", held, ("delay_price",), "only --release adaptive has a price of delay"),
        (not tuned, held, ("num_queues",), "--thresholds says how many there are"),
        (not tuned, held, ("max_mean_delay",), "is for tuning, which --thresholds and --delay-price leave out"),
    ):
        if useless:
            yield from ((name, reason) for name in names if name in given.given)
