"""Torchtitan's configuration as settings of a scenario."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wlb.models.presets import PRESETS
from wlb_tools.command.inputs.launch.settings import Launch, reason_for, take_batch
from wlb_tools.command.inputs.launch.texts import flat


def torchtitan(content: Mapping[str, Any]) -> Launch:
    """Settings that torchtitan's configuration gives, TOML or resolved as JSON."""
    launch = Launch("torchtitan's configuration")
    keys = dict(flat(content))

    def pop(*names: str, default: Any = None) -> Any:
        return next((keys.pop(name) for name in names if name in keys), default)

    parallel = ("parallelism", "training", "experimental")
    layout = {}
    for option, name in {
        "tp": "tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "cp": "context_parallel_degree",
        "ep": "expert_parallel_degree",
    }.items():
        layout[option] = int(pop(*(f"{section}.{name}" for section in parallel), default=1))
        launch.take(name, layout[option], option)
    expert_tp = int(pop("parallelism.expert_tensor_parallel_degree", default=layout["tp"]))
    if expert_tp != layout["tp"] and layout["ep"] > 1:
        launch.take("expert_tensor_parallel_degree", expert_tp, "expert_tp")
    shard = int(pop(*(f"{section}.data_parallel_shard_degree" for section in parallel), default=-1))
    replicas = int(pop(*(f"{section}.data_parallel_replicate_degree" for section in parallel), default=1))
    if shard > 0:
        launch.take("data_parallel_shard_degree x data_parallel_replicate_degree", shard * replicas, "dp")
    if replicas > 1:
        launch.take("data_parallel_replicate_degree", replicas, "dp_replicate")
    launch.take("fully_shard", "parameters", "fsdp", "zero3")
    if context := pop("training.seq_len"):
        launch.take("training.seq_len", int(context), "context")
    _pipeline(launch, pop, layout["pp"])
    size = int(pop("training.local_batch_size", "training.batch_size", default=1))
    total = int(pop("training.global_batch_size", default=-1))
    micro = int(pop("parallelism.pipeline_parallel_microbatch_size", default=size if layout["pp"] == 1 else 1))
    if total > 0:
        take_batch(launch, micro, total, layout, None)
    else:
        if micro > 1:
            launch.take("sequences of a micro-batch", micro, "micro_batch_size")
        launch.accumulation = max(1, size // micro)
    name, flavor = str(pop("model.name", default="")), str(pop("model.flavor", default=""))
    preset = f"{name}-{flavor}".lower()
    layers = None
    if preset in PRESETS:
        launch.take("model.name, model.flavor", f"{name} {flavor}", "model", preset)
        layers = PRESETS[preset]["num_layers"] // layout["pp"] // launch.size("layout.virtual_stages", {})
    else:
        launch.leave("model.name, model.flavor", f"{name} {flavor}", "its sizes are not in the file: --model")
    _recompute(launch, pop, layers)
    _float8(launch, keys, [str(each) for each in pop("model.converters", default=())])
    if pop("training.enable_cpu_offload"):
        launch.take("training.enable_cpu_offload", True, "offload_optimizer", 1)
        launch.leave("training.enable_cpu_offload", True, "parameters and gradients are taken to stay on the GPU")
    if str(pop("training.dtype", default="float32")) == "bfloat16":
        launch.take("training.dtype", "bfloat16", "optimizer_bytes", 4)
    for key, value in keys.items():
        if (reason := reason_for(key)) and value not in (False, [], "", 1):
            launch.leave(key, value, reason)
        else:
            launch.unused.append(key)
    return launch


_SCHEDULES = {
    "gpipe": ("gpipe", 1),
    "1f1b": ("1f1b", 1),
    "interleaved1f1b": ("interleaved_1f1b", 2),
    "interleavedzerobubble": ("interleaved_zero_bubble", 2),
    "zbvzerobubble": ("zbv", 2),
    "dualpipev": ("dualpipev", 2),
}
"""torch's schedules: our name, and the stages of a rank under torchtitan."""


def _pipeline(launch: Launch, pop: Callable[..., Any], pp: int) -> None:
    schedule = str(pop("parallelism.pipeline_parallel_schedule", default=""))
    if pp == 1 or not schedule:
        return
    known = _SCHEDULES.get(schedule.lower())
    if known is None:
        launch.leave("pipeline_parallel_schedule", schedule, "is no schedule of wlb.simulate_pipeline")
        return
    launch.take("pipeline_parallel_schedule", schedule, "schedule", known[0])
    if known[1] > 1:
        launch.take("stages of a rank under this schedule", known[1], "virtual_stages")


def _recompute(launch: Launch, pop: Callable[..., Any], layers: int | None) -> None:
    """Recomputation; `layers` of a stage, where they are known."""
    mode = pop("activation_checkpoint.mode", default="none")
    option = str(pop("activation_checkpoint.selective_ac_option", default="op"))
    if mode in ("none", "full"):
        launch.take("activation_checkpoint.mode", mode, "recompute")
    elif not option.isdigit():
        launch.take("activation_checkpoint.mode", f"{mode}, {option}", "recompute", "selective")
        reason = "every second matrix product that it computes again, and does not keep, is taken to be kept"
        launch.leave("selective_ac_option", option, reason)
    elif layers is None and int(option) > 1:
        launch.leave("selective_ac_option", option, "of how many layers is not known: --set layout.recompute_layers")
    else:
        launch.take("activation_checkpoint.mode", f"every layer of {option}", "recompute", "full")
        if layers is not None and int(option) > 1:
            count = max(1, layers // int(option))
            launch.take("selective_ac_option", option, "recompute_layers", count)


def _float8(launch: Launch, keys: dict[str, Any], converters: list[str]) -> None:
    """Reads FP8, which needs its converter, whatever its section says."""
    section = [name for name in keys if "float8" in name]
    gathered = any("float8_all_gather" in name and keys[name] for name in section)
    if any("float8" in each for each in converters):
        for name in section:
            del keys[name]
        launch.take("model.converters", ", ".join(converters), "fp8", "parameters" if gathered else "matmul")
        return
    for name in section:
        launch.leave(name, keys.pop(name), "has no effect without its converter among model.converters")
