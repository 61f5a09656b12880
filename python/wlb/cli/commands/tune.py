"""`wlb tune`: settings for a user's documents, and with a cluster what each of them costs there."""

import json as jsonlib
from pathlib import Path
from typing import Annotated

import typer

from wlb.cli.inputs import cluster, options
from wlb.cli.inputs.documents import read_documents
from wlb.cli.inputs.model import model_config
from wlb.cli.inputs.stream import build_stream
from wlb.cli.output.console import CliError, progress, results
from wlb.cli.output.simulation import SimulationReport
from wlb.cli.output.tuning import TuningReport, WaitingReport
from wlb.cli.packing import Setup
from wlb.cli.packing import tune as tune_stream
from wlb.simulation import tune as tune_cluster

_MICRO_BATCHES = 16
_MEMORY_FACTOR = 1.5
_SETTINGS = (
    "model",
    *cluster.OPTIONS,
    "context",
    "micro_batches",
    "seed",
    "oversize",
    "steps",
    "queues",
    "max_mean_delay",
)


def tune(
    context_: typer.Context,
    source: options.Source,
    field: options.Field = "text",
    pattern: options.Pattern = "*",
    tokenizer: options.TokenizerFile = None,
    seed: options.OptionalSeed = None,
    oversize: options.OversizeFate = "split",
    steps: options.Steps = 100,
    micro_batches: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Micro-batches of a global batch; by default {_MICRO_BATCHES}, on a cluster PP x DP.",
            show_default=False,
            rich_help_panel="Global batches",
        ),
    ] = None,
    context: options.Context = 131072,
    queues: options.TunedQueues = 2,
    max_mean_delay: options.MaxMeanDelay = 0.6,
    max_delay: options.MaxDelay = None,
    model: options.Model = "llama2-7b",
    attention_efficiency: options.AttentionEfficiency = 0.55,
    gpu: cluster.Gpu = "h100",
    dp: cluster.Dp = 1,
    pp: cluster.Pp = 4,
    cp: cluster.Cp = 2,
    tp: cluster.Tp = 8,
    gpus: cluster.WorldSize = None,
    virtual_stages: cluster.VirtualStages = 1,
    stage_layers: cluster.StageLayers = None,
    schedule: cluster.ScheduleName = None,
    kernel_profile: cluster.KernelProfile = None,
    gemm_efficiency: cluster.GemmEfficiency = None,
    cp_overlap: cluster.CpOverlap = 0.0,
    tp_overlap: cluster.TpOverlap = 0.0,
    dp_overlap: cluster.DpOverlap = 0.0,
    max_tokens: cluster.MaxTokens = None,
    memory_factor: cluster.OptionalMemoryFactor = None,
    fsdp: cluster.FsdpStage = "zero1",
    recompute: cluster.Recomputation = "none",
    fused_loss: cluster.FusedLoss = False,
    fused_ffn: cluster.FusedFfn = True,
    sequence_parallel: cluster.SequenceParallel = True,
    reserved_gib: cluster.ReservedGib = 4.0,
    output_dir: options.OutputDir = Path("wlb-tune"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Finds settings within a limit of the mean delay: for the best balance, or on a cluster for speed.

    Without a cluster: the thresholds of the outlier queues, the price of delay of the adaptive release, and for both
    the Pareto front of imbalance against delay. With any option of the panels "Cluster" and "Memory" but --max-tokens
    and --memory-factor, the plan: queues, adaptive release, Dynamic-CP or both, `S_max`, the number of micro-batches,
    the sharding strategy and the costs; what each choice costs in delay and memory, and the configuration to paste.
    On a cluster it chooses among plans that keep documents whole, one setting after the other; the report also has
    methods that cut documents, which it never chooses, though they may be faster. Speed is predicted; the report says
    on what grounds. --max-mean-delay 0 trains every document in the step that it
    arrives for.
    """
    config = model_config(model)
    scenario = cluster.scenario(context_, config) if cluster.given(context_) else None
    if scenario is not None and cluster.given(context_, ("attention_efficiency",)):
        raise CliError("--attention-efficiency: tuning on a cluster fits the packer's costs to it; leave this out")
    limit = cluster.token_limit(max_tokens, memory_factor, context)
    setup = Setup(
        num_micro_batches=micro_batches or (scenario.micro_batches if scenario else _MICRO_BATCHES),
        context=context,
        max_tokens=limit or int(_MEMORY_FACTOR * context),
        cost_model=config.cost_model(attention_efficiency=attention_efficiency),
    )
    with progress(quiet) as bars:
        documents = read_documents(source, field=field, pattern=pattern, tokenizer=tokenizer, progress=bars)
        stream = build_stream(
            documents,
            context=context,
            tokens_per_batch=setup.tokens_per_batch,
            seed=seed,
            steps=steps,
            oversize=oversize,
        )
        output_dir.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
        report: WaitingReport | TuningReport
        if scenario is None:
            queued, adaptive = (
                tune_stream(
                    stream,
                    setup,
                    batches=stream.batches,
                    queues=levels,
                    max_mean_delay=max_mean_delay,
                    max_delay=max_delay,
                    progress=bars,
                )
                for levels in (queues, None)
            )
            report = WaitingReport(queued=queued, adaptive=adaptive, max_mean_delay=max_mean_delay)
        else:
            task = bars.add_task("Tuning", total=None)
            tuning = tune_cluster(
                stream.lengths,
                scenario,
                progress=lambda what, done, total: bars.update(
                    task, description=f"Tuning: {what}", completed=done, total=total
                ),
            )
            report = TuningReport(
                documents=documents,
                stream=stream,
                tuning=tuning,
                model=model,
                profile=kernel_profile,
                simulation=SimulationReport(
                    documents=documents,
                    stream=stream,
                    simulation=tuning.simulation,
                    settings={
                        **{name: context_.params[name] for name in _SETTINGS},
                        "attention_efficiency": tuning.attention_efficiency,
                    },
                    shown=tuning.best.kind,
                    name="tune",
                ),
            )
        files = report.write(output_dir, context_.obj)
    if json:
        print(jsonlib.dumps(report.as_json(), indent=2))
    elif not quiet:
        report.print(results(), files)
