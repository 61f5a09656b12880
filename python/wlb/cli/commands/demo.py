"""`wlb demo`: every method on the same stream of real documents."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter, validators
from cyclopts.types import NonNegativeInt, PositiveInt

from wlb._choices import Release
from wlb.cli.inputs.model import Cost
from wlb.cli.inputs.options import BATCHES, CommandLine, options, settings, whole
from wlb.cli.inputs.packing import Batches, Waiting
from wlb.cli.inputs.stream import Ordered
from wlb.cli.output.console import Output
from wlb.cli.output.packing import packing_report
from wlb.cli.packing import Comparison, collect, cp_balances, tune, waiting
from wlb.cli.words import counted
from wlb.simulation.methods import Setup, fixed_length, original, var_length

WINDOWS = (1, 2, 4, 8)
QUEUES = (0, 1, 2, 3)
_TUNED_SHARE = 4  # thresholds are tuned on the first 1/4 of the stream


@options("Documents")
@dataclass(frozen=True, kw_only=True)
class Shuffled(Ordered):
    """Documents in random order."""

    seed: NonNegativeInt | None = 0


def demo(
    source: Path | None = None,
    /,
    *,
    reading: Shuffled = Shuffled(),
    batches: Batches = Batches(),
    steps: Annotated[PositiveInt, BATCHES] = 200,
    memory_factor: Annotated[float, BATCHES, Parameter(validator=validators.Number(gte=1, lte=1000))] = 1.5,
    delay: Waiting = Waiting(),
    cost: Cost = Cost(),
    output: Output = Output(),
    command_line: CommandLine,
) -> None:
    """Compares the packing methods on real documents: balance, delay, memory and planning time.

    Documents arrive in random order. Every method gets the same global batches: the original order, the
    fixed-length greedy over 1, 2, 4 and 8 global batches, WLB with 0 to 3 outlier queues, and WLB with the
    adaptive release; thresholds and the price of delay are tuned on the first quarter of the stream. Then
    come the two ways to shard a micro-batch over context-parallel ranks.

    Args:
        source: a directory (a document a file), a .jsonl or .txt (a document a line), or a .npy of lengths; by default
            the Python files of this interpreter and its packages.
        steps: global batches to form.
        memory_factor: the most tokens of a micro-batch of variable length, in contexts: what memory allows.
    """
    setup = Setup(
        num_micro_batches=batches.num_micro_batches,
        context=batches.context,
        max_tokens=whole("--memory-factor", memory_factor, batches.context),
        cost_model=cost.cost_model(),
    )
    with output.progress() as bars:
        documents = reading.documents(source, bars)
        stream = reading.stream(
            documents, context=batches.context, tokens_per_batch=setup.tokens_per_batch, steps=steps
        )
        output.folder("demo")
        plans = [collect("original", original(stream, setup), stream, bars)]
        plans += [
            collect(f"fixed-length, g={window}", fixed_length(stream, setup, window), stream, bars)
            for window in WINDOWS
        ]
        tuned_batches = max(1, stream.batches // _TUNED_SHARE)
        for queues in (*QUEUES, None):
            found = None
            if queues != 0:
                found = tune(
                    stream,
                    setup,
                    batches=tuned_batches,
                    queues=queues,
                    max_mean_delay=delay.max_mean_delay,
                    max_delay=delay.max_delay,
                    progress=bars,
                )
            thresholds = found.thresholds if found else ()
            price = found.delay_price if found else None
            name = "WLB, adaptive" if queues is None else f"WLB, {counted(queues, 'queue')}"
            release: Release = "adaptive" if queues is None else "fifo"
            plan = var_length(stream, setup, thresholds, delay.max_delay, waiting(setup, release, price))
            plans.append(collect(name, plan, stream, bars, thresholds, release))
        shown = plans[-1]
        report = packing_report(
            "demo",
            Comparison(
                documents=documents,
                stream=stream,
                setup=setup,
                plans=tuple(plans),
                shown=shown,
                balances=cp_balances(shown, bars),
            ),
            settings=settings(batches, cost, reading, delay)
            | {"max_tokens": setup.max_tokens, "tuned_batches": tuned_batches},
            remark=f"Thresholds and the price of delay ({price:g}) are tuned on the first {tuned_batches:,} global"
            f" batches, for a mean delay of at most {counted(delay.max_mean_delay, 'iteration')}, and then tried on all"
            " of them.",
        )
    output.give(report, command_line)
