"""`wlb profile`: measures attention and a layer on this GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators
from cyclopts.types import NonNegativeInt, PositiveInt

from wlb._core import pass_weights
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.model import ModelName, model_config
from wlb_tools.command.inputs.options import OUTPUT
from wlb_tools.command.output.console import Printing
from wlb_tools.command.output.report import Paragraphs, Report, Table
from wlb_tools.command.output.written import profile_file, replaces

_SHOWN = 9  # columns and rows of the table
_Range = Annotated[tuple[int, int], Parameter(negative="")]


def profile(
    *,
    model_name: ModelName = "llama2-7b",
    tp: PositiveInt = 1,
    device: str | None = None,
    kernel: str = "auto",
    queries: _Range = (16, 8192),
    keys: _Range = (128, 131072),
    tokens: _Range = (1024, 131072),
    held_out: NonNegativeInt = 24,
    budget: Annotated[float, Parameter(validator=validators.Number(gte=1))] = 300.0,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"), group="Output")] = None,
    printing: Annotated[Printing, OUTPUT] = Printing(),
) -> None:
    """Measures this GPU: attention over lengths of queries and keys, and the rest of a transformer layer.

    Writes a profile for `wlb.KernelModel` and `wlb.CostModel`, and beside it the records with every sample. If a run is
    stopped, start it again and it continues. At the end it prints the model's error on segments that were not used to
    make it.

    Args:
        tp: tensor-parallel ranks that divide heads and layers: the number that `wlb simulate --tp` gets, 8 there by
            default.
        device: a device as torch names it; by default the current GPU.
        kernel: auto, flash_attn, varlen or reference.
        queries: shortest and longest queries of a segment, such as --queries 16 8192.
        keys: shortest and longest keys of a segment, such as --keys 128 131072.
        tokens: fewest and most tokens of the layer, such as --tokens 1024 131072.
        held_out: segments on which to test the model.
        budget: seconds that this run may take.
        output: file to write, its records beside it; by default named after GPU, kernel and heads.
    """
    if find_spec("torch") is None:
        raise CliError('torch not installed; run: pip install "torch>=2.11"')
    import wlb
    from wlb_tools.profiling import Grid, Profiler, held_out_errors

    named: Any = kernel
    profiler = Profiler(model_config(model_name), tp=tp, device=device, kernel=named)
    grid = Grid.default(queries=queries, keys=keys, tokens=tokens, held_out=held_out)
    path = output or Path(f"{profiler.name}.json")
    records = path.with_suffix(".records.jsonl")
    replaced = [path] if replaces(path, profile_file) else []
    skipped: list[str] = []
    with printing.progress() as bars:
        task = bars.add_task("Measuring", total=None)
        found = profiler.measure(
            records=records,
            grid=grid,
            budget_seconds=budget,
            progress=lambda done, total, name: bars.update(task, completed=done, total=total, description=name),
            skipped=skipped.append,
        )
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    errors = held_out_errors(path)
    summary = {
        "profile": str(path),
        "records": str(records),
        "source": wlb.KernelModel.from_profile(path).source,
        "skipped": skipped,
        "held_out": errors and {"segments": errors.relative.size, "median": errors.median, "p95": errors.p95},
    }
    sentences = [f"Left out: {line}" for line in skipped]
    if errors is not None:
        sentences.append(
            f"Error of the model on {errors.relative.size} other segments: median {errors.median:.1%},"
            f" p95 {errors.p95:.1%}"
        )
    if found["gpu"] == "CPU":
        sentences.append("This was the CPU: it shows that measuring works and says nothing about a GPU.")
    blocks = (rate_table(found), Paragraphs(sentences))
    printing.give(Report(command="profile", blocks=blocks, numbers=summary), [path, records], replaced=replaced)


def rate_table(measured: dict[str, Any]) -> Table:
    """TFLOP/s of attention, forward and backward together, counting only the pairs of the mask."""
    queries, keys = (thin(measured[f"{name}_lengths"]) for name in ("query", "key"))
    weight, _ = pass_weights("forward_backward")

    def cell(i: int, j: int) -> str:
        seconds = [measured[name]["median_seconds"][i][j] for name in ("forward", "backward")]
        if None in seconds:
            return ""
        q, k = measured["query_lengths"][i], measured["key_lengths"][j]
        flops = weight * 4 * measured["num_heads"] * measured["head_dim"] * (q * (k - q) + q * (q + 1) / 2)
        return f"{flops / sum(seconds) / 1e12:.3g}"

    return Table(
        title=f"{measured['gpu']}, {measured['kernel']}: TFLOP/s by queries and keys of a segment",
        groups=(("", 1), ("keys", len(keys))),
        columns=("queries", *(f"{measured['key_lengths'][j]:,}" for j in keys)),
        rows=[(f"{measured['query_lengths'][i]:,}", *(cell(i, j) for j in keys)) for i in queries],
    )


def thin(values: list[int]) -> list[int]:
    """Indices of at most `_SHOWN` of them, with the last one."""
    step = -(-len(values) // _SHOWN)
    return sorted(range(len(values) - 1, -1, -step))
