"""`wlb tune`: thresholds for the outlier queues of a user's documents."""

import json as jsonlib
from pathlib import Path

from wlb import TunedPoint
from wlb.cli import options
from wlb.cli.console import progress, results
from wlb.cli.cost import cost_model
from wlb.cli.plans import Setup
from wlb.cli.plans import tune as tune_stream
from wlb.cli.sources import read_documents
from wlb.cli.stream import build_stream
from wlb.cli.tables import tuning_table


def tune(
    source: options.Source,
    field: options.Field = "text",
    pattern: options.Pattern = "*",
    tokenizer: options.TokenizerFile = None,
    seed: options.Seed = 0,
    steps: options.Steps = 100,
    micro_batches: options.MicroBatches = 16,
    context: options.Context = 131072,
    memory_factor: options.MemoryFactor = 1.5,
    queues: options.TunedQueues = 2,
    max_mean_delay: options.MaxMeanDelay = 0.6,
    max_delay: options.MaxDelay = None,
    model: options.Model = "llama2-7b",
    attention_efficiency: options.AttentionEfficiency = 0.55,
    output_dir: options.OutputDir = Path("wlb-tune"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Finds the thresholds of the outlier queues: the best balance within a limit of the mean delay.

    Also shows what other thresholds would buy: the Pareto front of imbalance against delay.
    """
    from wlb.cli.figures import draw_tuning, png

    setup = Setup(
        num_micro_batches=micro_batches,
        context=context,
        max_tokens=int(memory_factor * context),
        cost_model=cost_model(model, attention_efficiency=attention_efficiency),
    )
    with progress(quiet) as bars:
        documents = read_documents(source, field=field, pattern=pattern, tokenizer=tokenizer, progress=bars)
        stream = build_stream(
            documents, context=context, tokens_per_batch=setup.tokens_per_batch, seed=seed, steps=steps
        )
        output_dir.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
        result = tune_stream(
            stream,
            setup,
            batches=stream.batches,
            queues=queues,
            max_mean_delay=max_mean_delay,
            max_delay=max_delay,
            progress=bars,
        )
    picture = output_dir / "tune.png"
    picture.write_bytes(png(draw_tuning(result, max_mean_delay)))
    if json:
        best, pareto = as_json(result.best), [as_json(point) for point in result.pareto]
        print(jsonlib.dumps({"best": best, "pareto": pareto, "evaluated": result.evaluated}, indent=2))
    elif not quiet:
        console = results()
        console.print(tuning_table(result.pareto, result.best).for_terminal())
        console.print(f"outlier_thresholds={result.thresholds}", style="bold")
        console.print(f"Wrote {picture}")


def as_json(point: TunedPoint) -> dict[str, float | int | list[int]]:
    """One choice of thresholds and what it gives, as plain JSON values."""
    return {
        "thresholds": list(point.thresholds),
        "imbalance_mean": point.imbalance_mean,
        "imbalance_p95": point.imbalance_p95,
        "imbalance_worst": point.imbalance_worst,
        "delay_mean": point.delay_mean,
        "delay_max": point.delay_max,
        "memory_skew_mean": point.memory_skew_mean,
    }
