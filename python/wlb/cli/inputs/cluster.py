"""A model on a cluster, from the options of a command."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

import wlb
from wlb.cli.inputs.options import parse_numbers, whole
from wlb.cli.output.console import CliError
from wlb.hardware import GIB
from wlb.hardware import presets as gpus
from wlb.layout import Fsdp, Recompute
from wlb.simulation import Scenario, Schedule

_CLUSTER = "Cluster"
_BATCHES = "Global batches"
_MEMORY = "Memory"

Gpu = Annotated[str, typer.Option(help=f"Kind of GPU: {', '.join(gpus())}.", rich_help_panel=_CLUSTER)]
Dp = Annotated[int, typer.Option("--dp", min=1, help="Data-parallel ranks.", rich_help_panel=_CLUSTER)]
Pp = Annotated[int, typer.Option("--pp", min=1, help="Pipeline ranks.", rich_help_panel=_CLUSTER)]
Cp = Annotated[int, typer.Option("--cp", min=1, help="Context-parallel ranks.", rich_help_panel=_CLUSTER)]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel ranks.", rich_help_panel=_CLUSTER)]
WorldSize = Annotated[
    int | None,
    typer.Option(
        "--gpus",
        min=1,
        help="GPUs there are: checks that DP x PP x CP x TP is that.",
        show_default=False,
        rich_help_panel=_CLUSTER,
    ),
]
VirtualStages = Annotated[
    int, typer.Option(min=1, help="Stages of a pipeline rank; above 1: interleaved.", rich_help_panel=_CLUSTER)
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help=f"Of the pipeline: {', '.join(get_args(Schedule))}; by default 1f1b, interleaved with --virtual-stages.",
        show_default=False,
        rich_help_panel=_CLUSTER,
    ),
]
KernelProfile = Annotated[
    str | None,
    typer.Option(
        help="Measured attention kernel, from `wlb profile`: a name or a .json; by default an analytic assumption.",
        show_default=False,
        rich_help_panel=_CLUSTER,
    ),
]
GemmEfficiency = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Share of the GPU's peak that the linear part of a layer reaches; by default the preset's.",
        show_default=False,
        rich_help_panel=_CLUSTER,
    ),
]
CpOverlap = Annotated[
    float,
    typer.Option(min=0, max=1, help="Share of CP communication that computation hides.", rich_help_panel=_CLUSTER),
]
TpOverlap = Annotated[
    float,
    typer.Option(min=0, max=1, help="Share of TP communication that computation hides.", rich_help_panel=_CLUSTER),
]
DpOverlap = Annotated[
    float,
    typer.Option(min=0, max=1, help="Share of DP communication that computation hides.", rich_help_panel=_CLUSTER),
]
FsdpStage = Annotated[
    str,
    typer.Option(
        help=f"What DP and CP ranks share out: {', '.join(get_args(Fsdp))}.",
        rich_help_panel=_MEMORY,
    ),
]
Recomputation = Annotated[
    str,
    typer.Option(
        help=f"What the backward computes again: {', '.join(get_args(Recompute))}.",
        rich_help_panel=_MEMORY,
    ),
]
ReservedGib = Annotated[
    float, typer.Option(min=0, help="GiB of a GPU that are not available.", rich_help_panel=_MEMORY)
]
FusedLoss = Annotated[
    bool,
    typer.Option(
        "--fused-loss/--no-fused-loss",
        help="The loss is computed in chunks that never hold all logits.",
        rich_help_panel=_MEMORY,
    ),
]
FusedFfn = Annotated[
    bool,
    typer.Option(
        "--fused-ffn/--no-fused-ffn",
        help="The gated product keeps its inputs only.",
        rich_help_panel=_MEMORY,
    ),
]
SequenceParallel = Annotated[
    bool,
    typer.Option(
        "--sequence-parallel/--no-sequence-parallel",
        help="TP ranks share out norms, dropouts and their activations.",
        rich_help_panel=_MEMORY,
    ),
]
StageLayers = Annotated[
    str | None,
    typer.Option(
        help="Layers of each pipeline stage, such as 7,8,8,7; by default as equal as can be, ends with fewer.",
        show_default=False,
        rich_help_panel=_CLUSTER,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The most tokens of a micro-batch of variable length; on a cluster by default what fits into memory.",
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]
OptionalMemoryFactor = Annotated[
    float | None,
    typer.Option(
        "--memory-factor",
        min=1.0,
        max=1000.0,
        help="The same in contexts.",
        show_default=False,
        rich_help_panel=_MEMORY,
    ),
]
OptionalMicroBatches = Annotated[
    int | None,
    typer.Option(
        "--micro-batches",
        min=1,
        help="Micro-batches of a global batch, a multiple of DP; by default PP x DP.",
        show_default=False,
        rich_help_panel=_BATCHES,
    ),
]


def hardware(gpu: str, gemm_efficiency: float | None, attention_efficiency: float) -> wlb.Hardware:
    """The GPU of that name."""
    if gpu not in gpus():
        raise CliError(f"--gpu {gpu}: must be one of {', '.join(gpus())}")
    preset = wlb.Hardware.preset(gpu)
    if gemm_efficiency is None:
        gemm_efficiency = preset.gemm_efficiency
    return dataclasses.replace(preset, attention_efficiency=attention_efficiency, gemm_efficiency=gemm_efficiency)


def profile(name: str | None) -> str | None:
    """A measured profile, if there is such a file."""
    if name is not None and name.endswith(".json") and not Path(name).is_file():
        raise CliError(f"--kernel-profile {name}: no such file")
    return name


def token_limit(max_tokens: int | None, memory_factor: float | None, context: int) -> int | None:
    """The limit that the options give, or None without them."""
    if max_tokens is not None and memory_factor is not None:
        raise CliError("--max-tokens and --memory-factor: give one of them")
    if max_tokens is not None and max_tokens < context:
        raise CliError(
            f"--max-tokens {max_tokens:,}: below --context {context:,}, so the longest documents fit nowhere"
        )
    return max_tokens if memory_factor is None else whole("--memory-factor", memory_factor, context)


def kernel_sentence(scenario: Scenario) -> str:
    """What attention's times rest on, with a warning where that is another GPU."""
    source = scenario.attention.source
    label = "measured on a GPU" if source.startswith("measured") else "an assumption, measured nowhere"
    warning = (
        f" Warning: that is another GPU than --gpu {scenario.hardware.name}." if scenario.measured_elsewhere else ""
    )
    return f"Every time is predicted. Attention: {source} ({label}).{warning}"


def assumptions(scenario: Scenario) -> dict[str, str]:
    """What the predictions rest on, in words; the first says whether attention was measured."""
    hardware, layout = scenario.hardware, scenario.layout
    layers = layout.layers_of_stages(scenario.model).tolist()
    memory = hardware.memory_bytes / GIB
    return {
        "attention": f"{scenario.attention.source}, {scenario.attention.num_heads} heads of a GPU",
        "linear part": f"{hardware.gemm_efficiency:.0%} of {hardware.peak_flops / 1e12:,.0f} TFLOP/s (assumed)"
        if scenario.linear is None
        else f"measured: {scenario.profile}",
        "links": f"{hardware.intra_node.bandwidth / 1e9:.0f} GB/s between {hardware.gpus_per_node} GPUs of a node,"
        f" {hardware.inter_node.bandwidth / 1e9:.0f} GB/s between nodes",
        "hidden communication": f"CP {scenario.cp_overlap:.0%}, TP {scenario.tp_overlap:.0%},"
        f" DP {scenario.dp_overlap:.0%}",
        "pipeline": f"{scenario.pipeline_schedule}, {layout.pp} ranks x {layout.virtual_stages} stages,"
        f" {scenario.micro_batches} micro-batches a step",
        "memory": f"{memory:.1f} GiB, {scenario.reserved_bytes / GIB:g} of them reserved; fsdp {layout.fsdp},"
        f" recompute {layout.recompute}",
        **({"layers of the stages": ", ".join(map(str, layers))} if len(set(layers)) > 1 else {}),
        "S_max": f"{scenario.limit:,} tokens ({'given' if scenario.max_tokens is not None else 'what fits'})",
        "noise": f"{scenario.noise:.1%} of every pass, seed {scenario.noise_seed}" if scenario.noise else "none",
        "not modelled": "optimizer step, kernel launches between layers, stragglers, loading",
    }


_LAYOUT = (
    "dp",
    "pp",
    "cp",
    "tp",
    "virtual_stages",
    "fsdp",
    "recompute",
    "fused_loss",
    "fused_ffn",
    "sequence_parallel",
)
_SCENARIO = ("schedule", "cp_overlap", "tp_overlap", "dp_overlap")
OPTIONS = (*_LAYOUT, *_SCENARIO, "gpu", "gpus", "stage_layers", "kernel_profile", "gemm_efficiency", "reserved_gib")
"""Parameters of a command that only mean something on a cluster."""


def given(context: typer.Context, names: tuple[str, ...] = OPTIONS) -> list[str]:
    """Which of these parameters the command line has."""
    sources = {name: context.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def scenario(context: typer.Context, model: wlb.ModelConfig, **changes: Any) -> Scenario:
    """What a command's options say, its parameters named as here; `changes` are further arguments of the scenario."""
    options = context.params
    return Scenario(
        model=model,
        layout=_layout(options),
        hardware=hardware(options["gpu"], options["gemm_efficiency"], options["attention_efficiency"]),
        context=options["context"],
        profile=profile(options["kernel_profile"]),
        max_tokens=token_limit(options["max_tokens"], options["memory_factor"], options["context"]),
        num_micro_batches=options["micro_batches"],
        num_queues=options["queues"],
        max_mean_delay=options["max_mean_delay"],
        max_delay=options["max_delay"],
        reserved_bytes=whole("--reserved-gib", options["reserved_gib"], GIB),
        **{name: options[name] for name in _SCENARIO},
        **changes,
    )


def _layout(options: Mapping[str, Any]) -> wlb.ParallelLayout:
    """The layout, of as many GPUs as there are."""
    made = wlb.ParallelLayout(**{name: options[name] for name in _LAYOUT})
    if options["stage_layers"] is not None:
        layers = parse_numbers("--stage-layers", options["stage_layers"], "7,8,8,7")
        made = dataclasses.replace(made, stage_layers=layers)
    if options["gpus"] not in (None, made.world_size):
        sizes = " x ".join(f"{name.upper()} {options[name]}" for name in ("dp", "pp", "cp", "tp"))
        raise CliError(f"--gpus {options['gpus']}: {sizes} = {made.world_size}")
    return made


def describe(model: wlb.ModelConfig, layout: wlb.ParallelLayout, gpu: str, context: int) -> str:
    """A model on a cluster in one line."""
    sizes = ", ".join(f"{name} {getattr(layout, name.lower())}" for name in ("TP", "CP", "PP", "DP"))
    window = f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
    return f"{model.name}, {window} context, {layout.world_size} x {gpu} ({sizes})"
