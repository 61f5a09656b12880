"""`wlb pack`: writes plans for a user's documents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from wlb._choices import StreamMethod
from wlb_tools.command.errors import CliError, option
from wlb_tools.command.inputs.given import DocumentCosts
from wlb_tools.command.inputs.options import (
    COST,
    DOCUMENTS,
    GLOBAL_BATCHES,
    HELD,
    OUTPUT,
    PANELS,
    CommandLine,
    options,
    settings,
)
from wlb_tools.command.inputs.packing import Batches, Held
from wlb_tools.command.inputs.stream import Reading, Source
from wlb_tools.command.output.console import Output
from wlb_tools.command.output.packing import packing_report
from wlb_tools.command.output.plan_files import plan_files
from wlb_tools.command.packing import collect, cp_balance, wlb_plan
from wlb_tools.command.words import counted, listed
from wlb_tools.simulation.methods import fixed_length, original

_TUNED_BATCHES = 100  # most global batches to tune on, from the start of the stream

Method = Literal["original", "fixed_length", StreamMethod]


@options
class PackedBatches(Batches):
    """Global batches, and their plans.

    Args:
        window: global batches that fixed_length plans at once.
        dp_size: number of DP ranks to deal the micro-batches to.
    """

    window: PositiveInt = 1
    dp_size: PositiveInt | None = None


def pack(
    sources: Source,
    /,
    *,
    method: Annotated[Method, Parameter(group=PANELS["methods"])] = "var_length",
    reading: Annotated[Reading, DOCUMENTS] = Reading(),
    batches: Annotated[PackedBatches, GLOBAL_BATCHES] = PackedBatches(),
    held: Annotated[Held, HELD] = Held(),
    cost: Annotated[DocumentCosts, COST] = DocumentCosts(),
    output: Annotated[Output, OUTPUT] = Output(),
    command_line: CommandLine,
) -> None:
    """Packs the documents of SOURCE, each exactly once, and writes the plans.

    plans.npz has flat arrays: step, micro_batch, document_id, start and length of every piece of a document
    (docs/semantics.md). plans.jsonl has a line for each global batch. pack.html and pack.png compare the plan with the
    original order. The last global batches empty the queues and may be small. For a directory, line i of documents.txt
    is the path of document i; a path with unusual characters is a JSON string, in quotation marks.

    Args:
        method: var_length: equal work, whole documents. refined: more even if --max-tokens leaves little room. The
            others fill micro-batches up to the context and cut documents there.
    """
    for name, reason in _useless(method, batches, held, cost):
        raise CliError(f"--{option(name)}: {reason}")
    columns = cost.columns()
    if columns is not None and held.release == "adaptive" and len(columns.limits) > 1:
        raise CliError(
            f"--release adaptive: weighs one column, and {cost.costs} has {len(columns.limits)}; take --release fifo,"
            " or give the sum of those that take time"
        )
    setup = batches.setup(cost, held, dp_size=batches.dp_size or 1)
    if setup.num_micro_batches % setup.dp_size:
        raise CliError(f"--dp-size {setup.dp_size}: does not divide --micro-batches {setup.num_micro_batches}")
    price = None
    with output.progress() as bars:
        stream = reading.stream(sources, setup, bars, columns=columns)
        output.folder("pack")
        plans = [collect("original order", original(stream, setup), stream, bars)]
        if method == "fixed_length":
            packed = fixed_length(stream, setup, batches.window)
            plans.append(collect(f"fixed length, {counted(batches.window, 'step')} at once", packed, stream, bars))
        elif method != "original":
            tuned = min(stream.batches, _TUNED_BATCHES)
            plan, price = wlb_plan(stream, setup, held, bars, tuned_batches=tuned, method=method)
            plans.append(plan)
        plan = plans[-1]
        flushed = len(plan.digests) - plan.streamed
        remark = (
            f"{cost.in_words() if columns is None else columns.in_words()} {len(plan.digests):,} global batches planned"
        )
        remark += f", the last {flushed:,} of them to empty the queues." if flushed else "."
        if plan.thresholds:
            remark += f" Documents wait in queues from {listed(plan.thresholds, ' and ')} tokens on."
        if price is not None:
            remark += f" The price of delay is {price:g}."
        report = packing_report(
            "pack",
            stream,
            setup,
            plans,
            cp_balance(plan, bars),
            settings={"method": method}
            | settings(batches, cost, reading, held)
            | {"attention_efficiency": None if columns is not None else cost.shown_efficiency()}
            | {"max_tokens": setup.max_tokens, "delay_price": price, "queues": len(plan.thresholds)},
            remark=remark,
            files=plan_files(plan, stream, dealt=batches.dp_size is not None),
        )
    output.write(report, command_line)


def _useless(method: Method, batches: PackedBatches, held: Held, cost: DocumentCosts) -> Iterator[tuple[str, str]]:
    """Options that are given and have no effect beside the others, and why."""
    fills = method in ("original", "fixed_length")
    fixed = held.outlier_thresholds is not None or held.delay_price is not None
    adaptive = held.release == "adaptive"
    reasons = (
        (method != "fixed_length", ("window",), "only --method fixed_length plans several global batches at once"),
        (fills, ("max_tokens",), f"--method {method} fills micro-batches up to --context"),
        (fills, tuple(Held.__dataclass_fields__), f"--method {method} holds nothing back"),
        (adaptive, ("outlier_thresholds", "num_queues"), "--release adaptive finds what has to wait without queues"),
        (not adaptive, ("delay_price",), "only --release adaptive has a price of delay"),
        (not adaptive, ("max_step_cost",), "only --release adaptive bounds the work of a step"),
        (fixed, ("num_queues",), "--thresholds says how many there are"),
        (fixed, ("max_mean_delay",), "is for tuning, which --thresholds and --delay-price leave out"),
        (method == "fixed_length", ("costs",), "--method fixed_length goes by lengths alone"),
        (fills, ("limits",), f"--method {method} cuts documents wherever they end"),
    )
    given = batches.given | held.given | cost.given
    yield from ((name, reason) for useless, names, reason in reasons if useless for name in names if name in given)
