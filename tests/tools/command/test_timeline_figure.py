"""The picture of a step holds every op, and what each rank waits for."""

from typing import Any

import numpy as np
import pytest

import wlb


def test_the_picture() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.path import Path

    from wlb_tools.command.output.figures.style import png
    from wlb_tools.command.output.figures.timeline import draw_timelines

    costs = np.random.default_rng(3).lognormal(size=(2, 8))
    layout: dict[str, Any] = {"schedule": "interleaved_1f1b", "num_stages": 2, "num_virtual_stages": 2}
    timelines = [wlb.simulate_pipeline(row, **layout) for row in costs]
    figure = draw_timelines(timelines)
    boxes = sum(int((drawn.get_path().codes == Path.MOVETO).sum()) for drawn in figure.axes[0].patches)
    critical = max(timelines, key=lambda timeline: timeline.seconds).critical_path
    # Ops, the critical path once more, and of every rank the idle and of one pipeline the waiting.
    assert boxes == sum(map(len, timelines)) + len(critical) + 4 + 2
    assert png(figure) == png(draw_timelines(timelines))
    assert "waiting for the slowest DP rank" in figure.axes[0].get_title(loc="left")
    rows = [label.get_text() for label in draw_timelines(timelines, numbers=[5, 2]).axes[0].get_yticklabels()]
    assert rows == ["DP 5 · PP 0", "DP 5 · PP 1", "DP 2 · PP 0", "DP 2 · PP 1"]
    draw_timelines(wlb.simulate_pipeline(np.zeros(4), num_stages=2), title="nothing to do")
    with pytest.raises(wlb.WlbError, match="rows"):
        draw_timelines([])
