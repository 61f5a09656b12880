"""The Chrome trace holds every op once, at its time."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

import wlb
from wlb_tools.command.output.trace import chrome_trace, write_chrome_trace


def test_the_trace_conserves_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    timelines = [
        wlb.simulate_pipeline(rng.lognormal(size=8), schedule="zb_h1", num_stages=4, p2p_seconds=0.01) for _ in range(2)
    ]
    write_chrome_trace(timelines, path=tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    assert trace == chrome_trace(timelines)
    ops = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(ops) == sum(map(len, timelines))
    for process, timeline in enumerate(timelines):
        for rank in range(4):
            mine = [event for event in ops if (event["pid"], event["tid"]) == (process, rank)]
            assert sum(event["dur"] for event in mine) == pytest.approx(1e6 * timeline.busy[rank], rel=1e-12)
            assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-6 for a, b in itertools.pairwise(mine))
        names = {event["name"] for event in ops if event["pid"] == process}
        assert names == {f"{letter}{j}" for letter in "FIW" for j in range(8)}
        assert sum(event["args"]["critical"] for event in ops if event["pid"] == process) == len(timeline.critical_path)
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert threads[1, 3] == "PP rank 3"
    assert len(threads) == 8
    assert chrome_trace(timelines[0])["traceEvents"] == [e for e in trace["traceEvents"] if e["pid"] == 0]
    with pytest.raises(wlb.WlbError, match="timelines must not be empty") as caught:
        chrome_trace([])
    assert caught.value.argument == "timelines"
