"""The packing methods on a user's stream, with a progress bar."""

from collections.abc import Iterator
from typing import Any, Literal

from rich.progress import Progress

import wlb
from wlb.cli.inputs.stream import Stream
from wlb.cli.output.console import counted
from wlb.simulation import plans
from wlb.simulation.plans import Plan, Release, Setup, Step, fixed_length, original, var_length

__all__ = ["Plan", "Release", "Setup", "Step", "collect", "fixed_length", "original", "tune", "var_length", "waiting"]

PackerMethod = Literal["var_length", "refined"]


def collect(
    name: str,
    steps: Iterator[Step],
    stream: Stream,
    progress: Progress,
    thresholds: tuple[int, ...] = (),
    release: Release = "fifo",
) -> Plan:
    """Runs a method over the stream, as :func:`wlb.simulation.plans.collect`."""
    tracked = progress.track(steps, total=stream.batches, description=f"Packing: {name}")
    return plans.collect(name, tracked, stream, thresholds, release)


def waiting(
    setup: Setup,
    release: Release,
    delay_price: float | None = None,
    method: PackerMethod = "var_length",
) -> dict[str, Any]:
    """Options of a packer: what waits, and how the rest is placed. A global batch is what the price counts in."""
    return {
        "release": release,
        "delay_price": delay_price,
        "max_document_tokens": setup.context,
        "method": method,
    }


def tune(
    stream: Stream,
    setup: Setup,
    *,
    batches: int,
    queues: int | None,
    max_mean_delay: float,
    max_delay: int | None,
    progress: Progress,
    method: PackerMethod = "var_length",
) -> wlb.TuneResult:
    """The best thresholds, or without `queues` the best price of delay, for the first `batches` global batches."""
    what = "the price of delay" if queues is None else counted(queues, "queue")
    task = progress.add_task(f"Tuning {what}", total=None)
    result = plans.tune_waiting(
        stream.head(batches),
        {**plans.packer_options(setup, max_delay), "method": method},
        tokens_per_batch=setup.tokens_per_batch,
        queues=queues,
        max_mean_delay=max_mean_delay,
    )
    progress.update(task, total=result.evaluated, completed=result.evaluated)
    return result
