"""`wlb demo`: every method on the same stream of real documents."""

import json as jsonlib
from pathlib import Path

import typer

from wlb.cli.inputs import options
from wlb.cli.inputs.documents import read_documents
from wlb.cli.inputs.model import cost_model
from wlb.cli.inputs.stream import build_stream
from wlb.cli.output.console import counted, progress, results
from wlb.cli.output.context_parallel import cp_balances
from wlb.cli.output.packing import Report
from wlb.cli.packing import Setup, collect, fixed_length, original, tune, var_length, waiting

WINDOWS = (1, 2, 4, 8)
QUEUES = (0, 1, 2, 3)
_TUNED_SHARE = 4  # thresholds are tuned on the first 1/4 of the stream


def demo(
    context_: typer.Context,
    source: options.OptionalSource = None,
    field: options.Field = "text",
    pattern: options.Pattern = "*",
    tokenizer: options.TokenizerFile = None,
    seed: options.Seed = 0,
    steps: options.Steps = 200,
    micro_batches: options.MicroBatches = 16,
    context: options.Context = 131072,
    memory_factor: options.MemoryFactor = 1.5,
    max_mean_delay: options.MaxMeanDelay = 0.6,
    max_delay: options.MaxDelay = None,
    model: options.Model = "llama2-7b",
    attention_efficiency: options.AttentionEfficiency = 0.55,
    output_dir: options.OutputDir = Path("wlb-demo"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Compares the packing methods on real documents: balance, delay, memory and planning time.

    Documents arrive in random order. Every method gets the same global batches: the original order, the
    fixed-length greedy over 1, 2, 4 and 8 global batches, WLB with 0 to 3 outlier queues, and WLB with the
    adaptive release; thresholds and the price of delay are tuned on the first quarter of the stream. Then
    come the two ways to shard a micro-batch over context-parallel ranks.
    """
    setup = Setup(
        num_micro_batches=micro_batches,
        context=context,
        max_tokens=options.whole("--memory-factor", memory_factor, context),
        cost_model=cost_model(model, attention_efficiency=attention_efficiency),
    )
    with progress(quiet) as bars:
        documents = read_documents(source, field=field, pattern=pattern, tokenizer=tokenizer, progress=bars)
        stream = build_stream(
            documents, context=context, tokens_per_batch=setup.tokens_per_batch, seed=seed, steps=steps
        )
        output_dir.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
        plans = [collect("original", original(stream, setup), stream, bars)]
        for window in WINDOWS:
            name = f"fixed-length, g={window}"
            plans.append(collect(name, fixed_length(stream, setup, window), stream, bars))
        tuned_batches = max(1, stream.batches // _TUNED_SHARE)
        for queues in QUEUES:
            thresholds: tuple[int, ...] = ()
            if queues:
                thresholds = tune(
                    stream,
                    setup,
                    batches=tuned_batches,
                    queues=queues,
                    max_mean_delay=max_mean_delay,
                    max_delay=max_delay,
                    progress=bars,
                ).thresholds
            name = f"WLB, {counted(queues, 'queue')}"
            plan = var_length(stream, setup, thresholds, max_delay)
            plans.append(collect(name, plan, stream, bars, thresholds))
        price = tune(
            stream,
            setup,
            batches=tuned_batches,
            queues=None,
            max_mean_delay=max_mean_delay,
            max_delay=max_delay,
            progress=bars,
        ).delay_price
        plan = var_length(stream, setup, (), max_delay, waiting(setup, "adaptive", price))
        shown = collect("WLB, adaptive", plan, stream, bars, release="adaptive")
        plans.append(shown)
        report = Report(
            name="demo",
            documents=documents,
            stream=stream,
            setup=setup,
            settings={
                "micro_batches": micro_batches,
                "context": context,
                "max_tokens": setup.max_tokens,
                "model": model,
                "attention_efficiency": attention_efficiency,
                "seed": seed,
                "oversize": "split",
                "max_mean_delay": max_mean_delay,
                "max_delay": max_delay,
                "tuned_batches": tuned_batches,
            },
            plans=tuple(plans),
            shown=shown,
            balances=cp_balances(shown, bars),
            remark=f"Thresholds and the price of delay ({price:g}) are tuned on the first {tuned_batches:,} global"
            f" batches, for a mean delay of at most {counted(max_mean_delay, 'iteration')}, and then tried on all of"
            " them.",
        )
        files = report.write(output_dir, context_.obj)
    if json:
        print(jsonlib.dumps(report.as_json(), indent=2))
    elif not quiet:
        report.print(results(), files)
