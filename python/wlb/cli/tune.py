"""`wlb tune`: settings for a user's documents, and with a cluster what each of them costs there."""

import json as jsonlib
from pathlib import Path
from typing import Annotated, Any

import typer

from wlb.cli import cluster, options
from wlb.cli.console import progress, results
from wlb.cli.cost import cost_model, model_config
from wlb.cli.plans import Setup
from wlb.cli.plans import tune as tune_stream
from wlb.cli.sources import read_documents
from wlb.cli.stream import build_stream
from wlb.cli.tuning_report import ThresholdReport, TuningReport
from wlb.hardware import presets as gpus
from wlb.simulation import Scenario
from wlb.simulation import tune as tune_cluster

_MICRO_BATCHES = 16
_MEMORY_FACTOR = 1.5
_CLUSTER = "Cluster (any of these: speed and memory are predicted, too)"


def _ranks(name: str, kind: str) -> Any:
    return typer.Option(
        f"--{name}", min=1, help=f"{kind}-parallel ranks; by default 1.", show_default=False, rich_help_panel=_CLUSTER
    )


def tune(
    source: options.Source,
    field: options.Field = "text",
    pattern: options.Pattern = "*",
    tokenizer: options.TokenizerFile = None,
    seed: options.OptionalSeed = None,
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
    memory_factor: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            max=1000.0,
            help="The most tokens of a micro-batch, in contexts; by default"
            f" {_MEMORY_FACTOR}, on a cluster what fits into memory.",
            show_default=False,
            rich_help_panel="Global batches",
        ),
    ] = None,
    queues: options.TunedQueues = 2,
    max_mean_delay: options.MaxMeanDelay = 0.6,
    max_delay: options.MaxDelay = None,
    model: options.Model = "llama2-7b",
    attention_efficiency: options.AttentionEfficiency = 0.55,
    gpu: Annotated[
        str | None,
        typer.Option(help=f"Kind of GPU: {', '.join(gpus())}.", show_default=False, rich_help_panel=_CLUSTER),
    ] = None,
    dp: Annotated[int | None, _ranks("dp", "Data")] = None,
    pp: Annotated[int | None, _ranks("pp", "Pipeline")] = None,
    cp: Annotated[int | None, _ranks("cp", "Context")] = None,
    tp: Annotated[int | None, _ranks("tp", "Tensor")] = None,
    virtual_stages: cluster.VirtualStages = 1,
    schedule: cluster.ScheduleName = None,
    kernel_profile: cluster.KernelProfile = None,
    fsdp: cluster.FsdpStage = "zero1",
    recompute: cluster.Recomputation = "none",
    output_dir: options.OutputDir = Path("wlb-tune"),
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Finds settings within a limit of the mean delay: the best balance, or on a cluster the best speed.

    Without a cluster: the thresholds of the outlier queues, and the Pareto front of imbalance against delay. With
    --gpu, --dp, --pp, --cp or --tp also `S_max`, the sharding strategy and the packer's costs, what each choice costs
    in delay and memory, and the configuration to paste. Speed is predicted; the report says on what grounds.
    """
    scenario = None
    if virtual_stages > 1 or any(given is not None for given in (gpu, dp, pp, cp, tp, schedule, kernel_profile)):
        config = model_config(model)
        scenario = Scenario(
            model=config,
            layout=cluster.layout(
                dp=dp or 1,
                pp=pp or 1,
                cp=cp or 1,
                tp=tp or 1,
                virtual_stages=virtual_stages,
                fsdp=fsdp,
                recompute=recompute,
            ),
            hardware=cluster.hardware(gpu or "h100"),
            context=context,
            kernel_model=cluster.kernel_model(kernel_profile, config, tp or 1),
            max_tokens=cluster.token_limit(None, memory_factor, context),
            num_micro_batches=micro_batches,
            schedule=schedule,  # type: ignore[arg-type]  # checked there
            num_queues=queues,
            max_mean_delay=max_mean_delay,
            max_delay=max_delay,
        )
    setup = Setup(
        num_micro_batches=micro_batches or (scenario.micro_batches if scenario else _MICRO_BATCHES),
        context=context,
        max_tokens=int((memory_factor or _MEMORY_FACTOR) * context),
        cost_model=cost_model(model, attention_efficiency=attention_efficiency),
    )
    with progress(quiet) as bars:
        documents = read_documents(source, field=field, pattern=pattern, tokenizer=tokenizer, progress=bars)
        stream = build_stream(
            documents, context=context, tokens_per_batch=setup.tokens_per_batch, seed=seed, steps=steps
        )
        output_dir.mkdir(parents=True, exist_ok=True)  # before the long work, so that it fails early
        report: ThresholdReport | TuningReport
        if scenario is None:
            found = tune_stream(
                stream,
                setup,
                batches=stream.batches,
                queues=queues,
                max_mean_delay=max_mean_delay,
                max_delay=max_delay,
                progress=bars,
            )
            report = ThresholdReport(result=found, max_mean_delay=max_mean_delay)
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
                documents=documents, stream=stream, tuning=tuning, model=model, profile=kernel_profile
            )
        files = report.write(output_dir)
    if json:
        print(jsonlib.dumps(report.as_json(), indent=2))
    elif not quiet:
        report.print(results(), files)
