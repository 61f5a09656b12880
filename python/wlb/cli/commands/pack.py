"""`wlb pack`: plans for a user's documents, as files."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Literal

import typer

from wlb.cli.inputs import cluster, options
from wlb.cli.inputs.documents import read_documents
from wlb.cli.inputs.model import cost_model
from wlb.cli.inputs.stream import build_stream
from wlb.cli.output.console import CliError, counted, progress, results
from wlb.cli.output.context_parallel import cp_balances
from wlb.cli.output.packing import Report
from wlb.cli.output.plan_files import deal, write_jsonl, write_names, write_npz
from wlb.cli.packing import Plan, Release, Setup, collect, fixed_length, original, tune, var_length, waiting

_TUNED_BATCHES = 100  # at most so many, from the start of the stream

Method = Literal["original", "fixed_length", "var_length", "refined"]


def pack(
    context_: typer.Context,
    source: options.Source,
    method: Annotated[
        Method,
        typer.Option(
            help="var_length: equal work, whole documents. refined: the same, balanced better where --max-tokens binds."
            " The others fill and cut at the context."
        ),
    ] = "var_length",
    field: options.Field = "text",
    pattern: options.Pattern = "*",
    tokenizer: options.TokenizerFile = None,
    seed: options.OptionalSeed = None,
    oversize: options.OversizeFate = "split",
    micro_batches: options.MicroBatches = 16,
    context: options.Context = 131072,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="The most tokens of a micro-batch of var_length and refined; by default 1.5 contexts.",
            show_default=False,
            rich_help_panel="Global batches",
        ),
    ] = None,
    window: Annotated[
        int,
        typer.Option(min=1, help="Global batches that fixed_length plans at once.", rich_help_panel="Global batches"),
    ] = 1,
    dp_size: Annotated[
        int | None,
        typer.Option(min=1, help="Also deal the micro-batches to so many DP ranks.", rich_help_panel="Global batches"),
    ] = None,
    release: Annotated[
        Release,
        typer.Option(
            help="fifo: queues with thresholds. adaptive: what cannot be balanced now waits; no thresholds.",
            rich_help_panel="Outlier queues",
        ),
    ] = "fifo",
    delay_price: options.DelayPrice = None,
    queues: options.Queues = 2,
    thresholds: options.Thresholds = None,
    max_mean_delay: options.MaxMeanDelay = 0.6,
    max_delay: options.MaxDelay = None,
    model: options.Model = "llama2-7b",
    attention_efficiency: options.AttentionEfficiency = 0.55,
    output_dir: options.OutputDir = Path("wlb-pack"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Packs the documents of SOURCE, each exactly once, and writes the plans.

    plans.npz holds flat arrays: step, micro_batch, document_id, start and length of every piece of a document
    (docs/semantics.md); plans.jsonl a line per global batch; pack.html and pack.png compare the plan with the original
    order. The last global batches empty the queues and may be small. Of a directory, line i of
    documents.txt is the path of document i; a path with unusual characters is a JSON string, in quotation marks.
    """
    _refuse_useless(context_, method, release, tuned=thresholds is None and delay_price is None)
    setup = Setup(
        num_micro_batches=micro_batches,
        context=context,
        max_tokens=cluster.token_limit(max_tokens, None, context) or context * 3 // 2,
        cost_model=cost_model(model, attention_efficiency=attention_efficiency),
    )
    if dp_size is not None and micro_batches % dp_size:
        raise CliError(f"--dp-size {dp_size}: does not divide --micro-batches {micro_batches}")
    levels = options.parse_thresholds(thresholds)

    with progress(quiet) as bars:
        documents = read_documents(source, field=field, pattern=pattern, tokenizer=tokenizer, progress=bars)
        stream = build_stream(
            documents,
            context=context,
            tokens_per_batch=setup.tokens_per_batch,
            seed=seed,
            steps=None,
            oversize=oversize,
        )
        output_dir.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
        before = collect("original", original(stream, setup), stream, bars)
        plan: Plan
        if method == "original":
            plan = before
        elif method == "fixed_length":
            name = f"fixed-length, g={window}"
            plan = collect(name, fixed_length(stream, setup, window), stream, bars)
        else:
            adaptive = release == "adaptive"
            untuned = delay_price is None if adaptive else levels is None and queues > 0
            if untuned:
                tuned = tune(
                    stream,
                    setup,
                    batches=min(stream.batches, _TUNED_BATCHES),
                    queues=None if adaptive else queues,
                    max_mean_delay=max_mean_delay,
                    max_delay=max_delay,
                    progress=bars,
                    method=method,
                )
                levels, delay_price = tuned.thresholds, tuned.delay_price
            levels = levels or ()
            queued = f"adaptive, price {delay_price:g}" if adaptive else counted(len(levels), "queue")
            name = f"WLB{' refined' if method == 'refined' else ''}, {queued}"
            rule = waiting(setup, release, delay_price, method)
            plan = collect(name, var_length(stream, setup, levels, max_delay, rule), stream, bars, levels, release)
        flushed = len(plan.digests) - plan.streamed
        report = Report(
            name="pack",
            documents=documents,
            stream=stream,
            setup=setup,
            settings={
                "method": method,
                "micro_batches": micro_batches,
                "context": context,
                "max_tokens": setup.max_tokens,
                "model": model,
                "attention_efficiency": attention_efficiency,
                "seed": seed,
                "oversize": oversize,
                "window": window,
                "release": release,
                "delay_price": delay_price,
                "queues": len(plan.thresholds),
                "max_mean_delay": max_mean_delay,
                "max_delay": max_delay,
                "dp_size": dp_size,
            },
            plans=(before,) if plan is before else (before, plan),
            shown=plan,
            balances=cp_balances(plan, bars),
            remark=f"{len(plan.digests):,} global batches planned"
            f"{f', the last {flushed:,} of them to empty the queues' if flushed else ''}.",
        )
        files = report.write(output_dir, context_.obj)
        deals = None if dp_size is None else deal(plan, setup, dp_size)
        write_npz(output_dir / "plans.npz", plan, stream, deals)
        write_jsonl(output_dir / "plans.jsonl", plan, stream, deals)
        files += [output_dir / "plans.npz", output_dir / "plans.jsonl"]
        if documents.names is not None:
            write_names(output_dir / "documents.txt", documents.names)
            files.append(output_dir / "documents.txt")
    if json:
        print(jsonlib.dumps(report.as_json(), indent=2))
    elif not quiet:
        report.print(results(), files)


_WAITING = ("release", "delay_price", "queues", "thresholds", "max_mean_delay", "max_delay")


def _refuse_useless(context: typer.Context, method: Method, release: Release, *, tuned: bool) -> None:
    """Refuses options that have nothing to do beside the others."""
    fills = method in ("original", "fixed_length")
    for useless, names, reason in (
        (method != "fixed_length", ("window",), "only --method fixed_length plans several global batches at once"),
        (fills, ("max_tokens",), f"--method {method} fills micro-batches up to --context"),
        (fills, _WAITING, f"--method {method} holds nothing back"),
        (release == "adaptive", ("thresholds", "queues"), "--release adaptive finds what has to wait without queues"),
        (release == "fifo", ("delay_price",), "only --release adaptive has a price of delay"),
        (not tuned, ("queues",), "--thresholds says how many there are"),
        (not tuned, ("max_mean_delay",), "is for tuning, which --thresholds and --delay-price leave out"),
    ):
        for name in cluster.given(context, names) if useless else ():
            raise CliError(f"--{name.replace('_', '-')}: {reason}")
