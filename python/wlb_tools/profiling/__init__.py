"""Measures an attention kernel and the linear part of a transformer layer on the device at hand.

    profiler = Profiler(wlb.ModelConfig.preset("llama2-7b"))
    profile = profiler.measure(records=Path("h100.records.jsonl"))
    Path("h100.json").write_text(json.dumps(profile))
    wlb.KernelModel.from_profile("h100.json")

`wlb profile` does this with a progress bar. `probe_link` measures the link between the ranks of a process group.
"""

from wlb_tools.profiling.assemble import HeldOutErrors, held_out_errors
from wlb_tools.profiling.grid import Grid, Shape
from wlb_tools.profiling.links import LinkTimes, probe_link
from wlb_tools.profiling.profiler import Profiler

__all__ = ["Grid", "HeldOutErrors", "LinkTimes", "Profiler", "Shape", "held_out_errors", "probe_link"]
