"""The YAML of axolotl and LLaMA-Factory as settings of a scenario."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.launch.settings import Launch, reason_for
from wlb_tools.command.inputs.launch.texts import json_of

AXOLOTL = {
    "kind": "axolotl's configuration",
    "model": "base_model",
    "context": "sequence_len",
    "size": "micro_batch_size",
    "recompute": "gradient_checkpointing",
}
LLAMA_FACTORY = {
    "kind": "LLaMA-Factory's configuration",
    "model": "model_name_or_path",
    "context": "cutoff_len",
    "size": "per_device_train_batch_size",
    "recompute": "disable_gradient_checkpointing",
}
"""What the report calls a trainer's file, and the trainer's names of keys that the other trainer names otherwise."""


def fine_tuning(content: Mapping[str, Any], names: Mapping[str, str], path: Path) -> Launch:
    """Settings that the YAML of axolotl or LLaMA-Factory gives: one model, with data parallelism."""
    launch, rest = Launch(names["kind"]), dict(content)
    model = rest.pop(names["model"], None)
    if model:
        launch.take(names["model"], model, "model")
    if context := rest.pop(names["context"], None):
        launch.take(names["context"], int(context), "context")
    cp = int(rest.pop("context_parallel_size", None) or rest.pop("sequence_parallel_degree", None) or 1)
    tp = int(rest.pop("tensor_parallel_size", None) or 1)
    for option, value in (("tp", tp), ("pp", 1), ("cp", cp)):
        launch.take(f"{option} ranks", value, option)
    replicas, shard = (int(rest.pop(f"dp_{name}_size", None) or 0) for name in ("replicate", "shard"))
    if shard:
        launch.take("dp_shard_size x dp_replicate_size", shard * max(1, replicas), "dp")
    size = int(rest.pop(names["size"], None) or 1)
    launch.accumulation = int(rest.pop("gradient_accumulation_steps", None) or 1)
    if size > 1:
        launch.take(names["size"], size, "micro_batch_size")
    _sharing(launch, rest, path)
    if replicas > 1 and launch.settings["layout.fsdp"] != "none":
        launch.take("dp_replicate_size", replicas, "dp_replicate")
    if names["recompute"] in rest:
        on = bool(rest.pop(names["recompute"]))
        on = on if names["recompute"] == "gradient_checkpointing" else not on
        launch.take(names["recompute"], on, "recompute", "full" if on else "none")
    kind = str(rest.pop("adapter", None) or rest.pop("finetuning_type", None) or "full")
    rank = rest.pop("lora_r", None) or rest.pop("lora_rank", None) or 8
    if kind in ("lora", "qlora"):
        launch.take("rank of LoRA", int(rank), "lora_rank")
    elif kind != "full":
        launch.leave("finetuning_type" if "stage" in content else "adapter", kind, "all parameters are trained")
    if rest.pop("fp8", None):
        gathered = bool(rest.pop("fp8_enable_fsdp_float8_all_gather", None))
        launch.take("fp8", True, "fp8", "parameters" if gathered else "matmul")
    if (optimizer := str(rest.pop("optimizer", None) or rest.pop("optim", None) or "")) and "8bit" in optimizer:
        launch.leave(
            "optimizer", optimizer, "its state is counted as 12 bytes a parameter: --set layout.optimizer_bytes"
        )
    everything = ("all", "all-linear", True)
    if rest.pop("lora_target_linear", None) is True or rest.get("lora_target") in everything:
        rest.pop("lora_target", None)
    for name, value in rest.items():
        if (reason := reason_for(name)) and value not in (None, False, "", [], {}):
            launch.leave(name, value, reason)
        else:
            launch.unused.append(str(name))
    return launch


def _sharing(launch: Launch, rest: dict[str, Any], path: Path) -> None:
    """Reads what data-parallel ranks shard, and whether the optimizer is offloaded: from DeepSpeed's file, or FSDP."""
    deepspeed, fsdp, config = (rest.pop(name, None) for name in ("deepspeed", "fsdp", "fsdp_config"))
    if deepspeed:
        name = deepspeed if isinstance(deepspeed, str) else "deepspeed"
        content = deepspeed if isinstance(deepspeed, Mapping) else _deepspeed_file(path, name)
        offloaded = re.search(r"offload", name) is not None
        found = re.search(r"(?:zero|z)_?(?:stage_?)?([0-3])", name)
        stage = found.group(1) if found else None
        parameters = offloaded and stage == "3"
        if content is not None:
            zero = content.get("zero_optimization") or {}
            stage = str(zero.get("stage", 0))
            offloaded, parameters = (
                (zero.get(f"offload_{what}") or {}).get("device", "none") != "none" for what in ("optimizer", "param")
            )
        if stage is None:
            raise CliError(f"--from {path}: deepspeed = {name}: there is no such file, and its name has no stage")
        launch.take("deepspeed", name, "fsdp", "none" if stage == "0" else f"zero{stage}")
    elif fsdp or config:
        inner = config if isinstance(config, Mapping) else {}
        said = {str(key).removeprefix("fsdp_"): value for key, value in inner.items()}
        strategy = str(said.get("sharding_strategy") or fsdp or "FULL_SHARD").lower()
        kept = "shard_grad_op" in strategy or said.get("reshard_after_forward") is False
        launch.take("fsdp", strategy, "fsdp", "zero2" if kept else "zero3")
        if "hybrid" in strategy:
            launch.leave("fsdp", strategy, "of how many replicas is not said: --set layout.dp_replicate")
        parameters = offloaded = bool(said.get("offload_params") or said.get("cpu_offload"))
        if said.pop("activation_checkpointing", None):
            launch.take("activation_checkpointing", True, "recompute", "full")
    else:
        launch.take("fsdp and deepspeed", "neither", "fsdp", "none")
        return
    if offloaded:
        launch.take("offload of the optimizer", True, "offload_optimizer", 1)
    if parameters:
        launch.leave("offload of parameters", True, "parameters are taken to be on the GPU")


def _deepspeed_file(path: Path, name: str) -> Mapping[str, Any] | None:
    """DeepSpeed's JSON beside the launch file, or at its relative path; None if it does not exist."""
    for folder in (path.parent, Path()):
        if (folder / name).is_file():
            return json_of(folder / name, (folder / name).read_text(encoding="utf-8"))
    return None
