"""`wlb simulate`: what each method would give, on a user's documents, model and cluster."""

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
from wlb.simulation import DEFAULT, VARIANTS, Scenario, defaults
from wlb.simulation import simulate as run
from wlb.simulation.variants import obstacles


def simulate(
    context_: typer.Context,
    source: options.Source,
    field: options.Field = "text",
    pattern: options.Pattern = "*",
    tokenizer: options.TokenizerFile = None,
    seed: options.OptionalSeed = None,
    oversize: options.OversizeFate = "split",
    steps: options.Steps = 500,
    micro_batches: cluster.OptionalMicroBatches = None,
    context: options.Context = 131072,
    model: options.Model = "llama2-7b",
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
    thresholds: options.Thresholds = None,
    queues: options.TunedQueues = 2,
    max_mean_delay: options.MaxMeanDelay = 0.6,
    max_delay: options.MaxDelay = None,
    attention_efficiency: options.AttentionEfficiency = 0.55,
    variants: Annotated[
        str | None,
        typer.Option(
            help=f"Methods with commas between, the baseline first: {', '.join(VARIANTS)}; by default all but"
            f" {', '.join(name for name in VARIANTS if name not in DEFAULT)}.",
            show_default=False,
            rich_help_panel="Methods",
        ),
    ] = None,
    noise: Annotated[
        float,
        typer.Option(
            min=0.0, max=0.5, help="Standard deviation of every pass, relative to its time.", rich_help_panel="Methods"
        ),
    ] = 0.0,
    noise_seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.", rich_help_panel="Methods")] = 0,
    output_dir: options.OutputDir = Path("wlb-simulate"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Predicts speed, balance, delay and memory on a cluster: Plain-4D, Fixed-4D, WLB, Dynamic-CP, and their parts.

    No GPU is needed. By default the cluster is the paper's for a 7B model with 128K tokens of context. Every
    prediction says what it rests on; docs/simulation.md has the assumptions.
    """
    given = _names(variants)
    config = model_config(model)
    scenario = cluster.scenario(
        context_,
        config,
        outlier_thresholds=options.parse_thresholds(thresholds),
        noise=noise,
        noise_seed=noise_seed,
    )
    names = given or defaults(scenario)
    with progress(quiet) as bars:
        documents = read_documents(source, field=field, pattern=pattern, tokenizer=tokenizer, progress=bars)
        stream = build_stream(
            documents,
            context=context,
            tokens_per_batch=scenario.tokens_per_batch,
            seed=seed,
            steps=steps,
            oversize=oversize,
        )
        output_dir.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
        task = bars.add_task("Simulating", total=len(names))
        simulation = run(
            stream.lengths,
            scenario,
            variants=names,
            progress=lambda title, done, total: bars.update(task, description=f"Simulating: {title}", completed=done),
        )
        report = SimulationReport(
            documents=documents,
            stream=stream,
            simulation=simulation,
            settings={
                "model": config.name,
                "gpu": gpu,
                "dp": dp,
                "pp": pp,
                "cp": cp,
                "tp": tp,
                "virtual_stages": virtual_stages,
                "schedule": scenario.pipeline_schedule,
                "micro_batches": scenario.micro_batches,
                "context": context,
                "max_tokens": scenario.limit,
                "kernel_model": scenario.attention.source,
                "attention_efficiency": attention_efficiency,
                "seed": seed,
                "oversize": oversize,
                "outlier_thresholds": ", ".join(f"{threshold:,}" for threshold in simulation.thresholds) or None,
                "max_mean_delay": max_mean_delay,
                "max_delay": max_delay,
            },
            shown=max(names[1:] or names, key=simulation.speedup),
            remarks=() if given else not_compared(scenario),
        )
        files = report.write(output_dir, context_.obj)
    if json:
        print(jsonlib.dumps(report.as_json(), indent=2))
    elif not quiet:
        report.print(results(), files)


def _names(variants: str | None) -> tuple[str, ...] | None:
    if variants is None:
        return None
    names = tuple(name.strip() for name in variants.split(","))
    for index, name in enumerate(names):
        if name not in VARIANTS:
            raise CliError(f"--variants {name}: must be one of {', '.join(VARIANTS)}")
        if name in names[:index]:
            raise CliError(f"--variants {name}: given twice")
    return names


def not_compared(scenario: Scenario) -> tuple[str, ...]:
    """What is not compared by default, and why."""
    titles: dict[str, list[str]] = {}
    for name, reason in obstacles(scenario).items():
        titles.setdefault(options.as_options(str(reason)), []).append(VARIANTS[name].title)
    return tuple(f"Not compared: {' and '.join(names)}, since {reason}." for reason, names in titles.items())
