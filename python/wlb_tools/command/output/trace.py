"""Writes timelines as traces for Perfetto (https://ui.perfetto.dev) and Chrome (chrome://tracing).

timelines = [wlb.simulate_pipeline(costs[row], num_stages=4) for row in order]  # a data-parallel rank each
write_chrome_trace(timelines, path="step.json")
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from wlb._errors import error
from wlb._results import PipelineTimeline

__all__ = ["chrome_trace", "write_chrome_trace"]

_LETTERS = ("F", "B", "I", "W")  # as torch.distributed.pipelining writes them
_MICROSECONDS = 1e6


def chrome_trace(
    timelines: PipelineTimeline | Sequence[PipelineTimeline], *, pipelines: str = "DP rank"
) -> dict[str, Any]:
    """A step in Chrome's trace event format.

    Args:
        timelines: Timeline of one pipeline, or of each data-parallel rank.
        pipelines: Name of a pipeline in the trace; its index is added.

    Returns:
        A JSON object. Each pipeline is a process, each pipeline rank a thread, and each op a complete event ("X"). The
        event's name is a letter (F forward, B backward, I input gradient, W weight gradient) and the micro-batch. Its
        arguments are the micro-batch, the model's stage, and whether the op is on the critical path of its pipeline.
        Times are in microseconds.

    Raises:
        WlbError: no timeline.

    O(ops).
    """
    each = [timelines] if isinstance(timelines, PipelineTimeline) else list(timelines)
    if not each:
        raise error("timelines", "must not be empty", value=timelines)
    events: list[dict[str, Any]] = []
    for process, timeline in enumerate(each):
        events.append(_named("process_name", f"{pipelines} {process}", process))
        for thread in range(timeline.num_stages):
            events.append(_named("thread_name", f"PP rank {thread}", process, thread))
            events.append(_metadata("thread_sort_index", {"sort_index": thread}, process, thread))
        critical = set(timeline.critical_path.tolist())
        starts, ends = timeline.starts * _MICROSECONDS, timeline.ends * _MICROSECONDS
        columns = (timeline.ranks, timeline.kinds, timeline.micro_batches, timeline.stages, starts, ends - starts)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        for index, (rank, kind, micro_batch, stage, start, duration) in enumerate(rows):
            events.append(
                {
                    "ph": "X",
                    "name": f"{_LETTERS[kind]}{micro_batch}",
                    "cat": timeline.KINDS[kind],
                    "pid": process,
                    "tid": rank,
                    "ts": start,
                    "dur": duration,
                    "args": {"micro_batch": micro_batch, "stage": stage, "critical": index in critical},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_chrome_trace(
    timelines: PipelineTimeline | Sequence[PipelineTimeline],
    *,
    path: str | os.PathLike[str],
    pipelines: str = "DP rank",
) -> None:
    """Writes `chrome_trace` to a file.

    Raises:
        WlbError: no timeline.
        OSError: the file cannot be written.
    """
    trace = json.dumps(chrome_trace(timelines, pipelines=pipelines))
    with open(path, "w", encoding="utf-8") as file:
        file.write(trace)


def _named(event: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return _metadata(event, {"name": name}, process, thread)


def _metadata(event: str, arguments: dict[str, Any], process: int, thread: int) -> dict[str, Any]:
    return {"ph": "M", "name": event, "pid": process, "tid": thread, "args": arguments}
