"""`wlb profile`: what attention and a layer take on the GPU at hand."""

import json as jsonlib
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from wlb.cli.inputs import options
from wlb.cli.inputs.model import model_config
from wlb.cli.output.console import CliError, progress, results
from wlb.cli.output.tables import Table
from wlb.models import presets

_MEASURED = "What is measured"
_SHOWN = 9  # columns and rows of the table


def profile(
    model: Annotated[
        str,
        typer.Option(
            help=f"Model whose heads and layers are measured: {', '.join(presets())}, or a Hugging Face config.json.",
            rich_help_panel=_MEASURED,
        ),
    ] = "llama2-7b",
    tp: Annotated[
        int,
        typer.Option(
            min=1,
            help="Tensor-parallel ranks that heads and layers are divided by: give what `wlb simulate --tp` gets, 8"
            " there by default.",
            rich_help_panel=_MEASURED,
        ),
    ] = 1,
    device: Annotated[
        str | None,
        typer.Option(
            help="A device as torch names it; by default the current GPU.",
            show_default=False,
            rich_help_panel=_MEASURED,
        ),
    ] = None,
    kernel: Annotated[str, typer.Option(help="auto, flash_attn, varlen or sdpa.", rich_help_panel=_MEASURED)] = "auto",
    queries: Annotated[
        tuple[int, int],
        typer.Option(
            metavar="SHORT LONG",
            help="Shortest and longest queries of a segment, such as --queries 16 8192.",
            rich_help_panel=_MEASURED,
        ),
    ] = (16, 8192),
    keys: Annotated[
        tuple[int, int],
        typer.Option(
            metavar="SHORT LONG",
            help="Shortest and longest keys of a segment, such as --keys 128 131072.",
            rich_help_panel=_MEASURED,
        ),
    ] = (128, 131072),
    tokens: Annotated[
        tuple[int, int],
        typer.Option(
            metavar="FEW MANY",
            help="Fewest and most tokens of the layer, such as --tokens 1024 131072.",
            rich_help_panel=_MEASURED,
        ),
    ] = (1024, 131072),
    held_out: Annotated[
        int, typer.Option(min=0, help="Segments to test the model with.", rich_help_panel=_MEASURED)
    ] = 24,
    budget: Annotated[
        float, typer.Option(min=1.0, help="Seconds that this run may take.", rich_help_panel=_MEASURED)
    ] = 300.0,
    output: Annotated[
        Path | None,
        typer.Option(
            help="File to write, its records beside it; by default named after GPU, kernel and heads.",
            show_default=False,
            rich_help_panel="Output",
        ),
    ] = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measures this GPU: attention over lengths of queries and keys, and the rest of a transformer layer.

    Writes a profile for `wlb.KernelModel` and `wlb.CostModel`, and beside it the records with every sample. A run
    that is cut off goes on where it was when started again. At the end, the model's error on segments that it was
    not made of.
    """
    if find_spec("torch") is None:
        raise CliError('torch not installed; run: pip install "wlb[torch]"')
    import wlb
    from wlb.torch.profile import Grid, Profiler, held_out_errors

    kernel_name: Any = kernel
    profiler = Profiler(model_config(model), tp=tp, device=device, kernel=kernel_name)
    grid = Grid.default(queries=queries, keys=keys, tokens=tokens, held_out=held_out)
    path = output or Path(f"{profiler.name}.json")
    records = path.with_suffix(".records.jsonl")
    skipped: list[str] = []
    with progress(quiet) as bars:
        task = bars.add_task("Measuring", total=None)
        measured = profiler.measure(
            records=records,
            grid=grid,
            budget_seconds=budget,
            progress=lambda done, total, name: bars.update(task, completed=done, total=total, description=name),
            skipped=skipped.append,
        )
    path.write_text(jsonlib.dumps(measured, indent=1) + "\n", encoding="utf-8")
    errors = held_out_errors(path)
    if json:
        summary = {
            "profile": str(path),
            "records": str(records),
            "source": wlb.KernelModel.from_profile(path).source,
            "skipped": skipped,
            "held_out": errors and {"segments": errors.relative.size, "median": errors.median, "p95": errors.p95},
        }
        print(jsonlib.dumps(summary, indent=2))
    elif not quiet:
        console = results()
        console.print(rate_table(measured).for_terminal())
        for line in skipped:
            console.print(f"Left out: {line}")
        if errors is not None:
            console.print(
                f"Error of the model on {errors.relative.size} other segments:"
                f" median {errors.median:.1%}, p95 {errors.p95:.1%}"
            )
        if measured["gpu"] == "CPU":
            console.print("This was the CPU: it shows that measuring works and says nothing about a GPU.")
        console.print(f"Wrote {path} and {records}")


def rate_table(measured: dict[str, Any]) -> Table:
    """TFLOP/s of attention, forward and backward together, counting only the pairs that were asked for."""
    rows, columns = (thin(measured[f"{name}_lengths"]) for name in ("query", "key"))

    def cell(i: int, j: int) -> str:
        seconds = [measured[name]["median_seconds"][i][j] for name in ("forward", "backward")]
        if None in seconds:
            return ""
        q, k = measured["query_lengths"][i], measured["key_lengths"][j]
        flops = 3.5 * 4 * measured["num_heads"] * measured["head_dim"] * (q * (k - q) + q * (q + 1) / 2)
        return f"{flops / sum(seconds) / 1e12:.3g}"

    return Table(
        title=f"{measured['gpu']}, {measured['kernel']}: TFLOP/s by queries and keys of a segment",
        groups=(("", 1), ("keys", len(columns))),
        columns=("queries", *(f"{measured['key_lengths'][j]:,}" for j in columns)),
        rows=tuple((f"{measured['query_lengths'][i]:,}", *(cell(i, j) for j in columns)) for i in rows),
    )


def thin(values: list[int]) -> list[int]:
    """Indices of at most `_SHOWN` of them, the last one included."""
    step = -(-len(values) // _SHOWN)
    return sorted(range(len(values) - 1, -1, -step))
