"""Megatron's arguments as settings of a scenario."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.launch.settings import Launch, reason_for, take_batch
from wlb_tools.command.inputs.launch.texts import WAY_OUT
from wlb_tools.command.inputs.options import tokens_of


def flags_of_yaml(content: Mapping[str, Any]) -> dict[str, str]:
    """Options that a YAML file lists, under MODEL_ARGS if it has that."""
    inner = content.get("MODEL_ARGS", content)
    return {str(name).lstrip("-").replace("_", "-"): str(value) for name, value in inner.items()}


def megatron(flags: Mapping[str, str], variables: Mapping[str, str]) -> Launch:
    """Settings that Megatron's options give, with the variables of the script that has them."""
    launch = Launch("arguments of Megatron")
    rest = dict(flags)

    def number(name: str, default: int | None = None) -> int | None:
        value = rest.pop(name, None)
        if value is None:
            return default
        try:
            return tokens_of(value)
        except ValueError:
            why = "is computed" if re.search(r"[$`(]", value) else "must be a whole number"
            raise CliError(f"--from: --{name} {value}: {why}; {WAY_OUT}") from None

    def given(name: str) -> bool:
        return rest.pop(name, "false").lower() != "false"

    sizes = {"tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp"}
    layout = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
    for name, option in (*sizes.items(), ("expert-model-parallel-size", "ep")):
        said = name in rest
        layout[option] = number(name) or 1
        launch.take(f"--{name}" if said else f"--{name} (not given)", layout[option], option)
    expert_tp, routed = number("expert-tensor-parallel-size"), "num-experts" in rest
    if expert_tp is not None and expert_tp != layout["tp"] and routed:
        launch.take("--expert-tensor-parallel-size", expert_tp, "expert_tp")
    layers = number("num-layers")
    virtual = number("num-virtual-stages-per-pipeline-rank")
    each = number("num-layers-per-virtual-pipeline-stage")
    if each and layers:
        virtual = layers // layout["pp"] // each
    if virtual and virtual > 1:
        launch.take("virtual stages", virtual, "virtual_stages")
    _stages(launch, number("decoder-first-pipeline-num-layers"), number("decoder-last-pipeline-num-layers"), layers)
    context = number("seq-length")
    if context is None:
        context = number("max-length")
    if context:
        launch.take("--seq-length", context, "context")
    gpus = _world(rest, variables)
    if gpus:
        launch.take("GPUs (nodes x processes)", gpus, "gpus")
    take_batch(launch, number("micro-batch-size") or 1, number("global-batch-size"), layout, gpus)
    _model(launch, rest, number, layers)
    _memory(launch, rest, number, given)
    if not given("sequence-parallel") and layout["tp"] > 1:
        launch.take("--sequence-parallel", False, "sequence_parallel")
    for name, value in rest.items():
        if reason := reason_for(name):
            launch.leave(f"--{name}", value or "set", reason)
        else:
            launch.unused.append(f"--{name}")
    return launch


def _stages(launch: Launch, first: int | None, last: int | None, layers: int | None) -> None:
    """Layers of the first and the last stage, if a file sets them separately."""
    if first is None and last is None:
        return
    pp = launch.size("layout.pp", {})
    ends = [each for each in (first, last) if each is not None]
    between, left = divmod((layers or 0) - sum(ends), max(1, pp - len(ends)))
    if layers is None or left or between < 0 or "layout.virtual_stages" in launch.settings:
        launch.leave(
            "layers of the first and last stage", f"{first} and {last}", "give them as --set layout.stage_layers=[...]"
        )
        return
    stages = [first] * (first is not None) + [between] * (pp - len(ends)) + [last] * (last is not None)
    launch.take("layers of the first and last stage", f"{first} and {last}", "stage_layers", stages)


def _memory(
    launch: Launch,
    rest: dict[str, str],
    number: Callable[..., int | None],
    given: Callable[[str], bool],
) -> None:
    """Reads the settings of recomputation, sharding, offloading, FP8 and frozen weights."""
    _recompute(launch, rest, number)
    if given("use-torch-fsdp2") or rest.get("data-parallel-sharding-strategy") == "optim_grads_params":
        rest.pop("data-parallel-sharding-strategy", None)
        given("use-distributed-optimizer")
        launch.take("FSDP of all parameters", "set", "fsdp", "zero3")
    else:
        shared = given("use-distributed-optimizer")
        launch.take("--use-distributed-optimizer", shared, "fsdp", "zero1" if shared else "none")
    if (instances := number("num-distributed-optimizer-instances") or 1) > 1:
        launch.take("--num-distributed-optimizer-instances", instances, "dp_replicate")
    if given("optimizer-cpu-offload"):
        share = float(rest.pop("optimizer-offload-fraction", "") or 1)
        launch.take("--optimizer-cpu-offload", share, "offload_optimizer")
        if given("overlap-cpu-optimizer-d2h-h2d"):
            reason = "copies and the CPU's work are taken one after the other"
            launch.leave("--overlap-cpu-optimizer-d2h-h2d", "set", reason)
    fp8 = rest.pop("fp8-format", None) or rest.pop("fp8", None)
    gathered = given("fp8-param-gather") or given("fp8-param")
    if fp8:
        launch.take("--fp8-format", fp8, "fp8", "parameters" if gathered else "matmul")
    if not ({"bf16", "fp16"} & rest.keys()):
        launch.taken.append("bfloat16, although neither --bf16 nor --fp16 is given: an assumption (--set layout.dtype)")
    if "lora" in (rest.pop("train-type", None), rest.pop("tuner-type", None)):
        launch.take("--lora-rank", number("lora-rank", 8), "lora_rank")


def _recompute(launch: Launch, rest: dict[str, str], number: Callable[..., int | None]) -> None:
    granularity = rest.pop("recompute-granularity", None)
    if rest.pop("recompute-activations", None) is not None and granularity is None:
        granularity = "selective"
    method, count = rest.pop("recompute-method", None), number("recompute-num-layers")
    modules = set((rest.pop("recompute-modules", None) or "core_attn").split())
    if granularity == "full":
        launch.take("--recompute-granularity", granularity, "recompute")
        if count and method == "block":
            launch.take("--recompute-num-layers", count, "recompute_layers")
        elif count and count > 1:
            reason = "the input of every layer is taken to be kept, where a block of them keeps one"
            launch.leave("--recompute-num-layers", count, reason)
    elif granularity == "selective":
        said = f"selective, {' '.join(sorted(modules))}"
        attention = modules == {"core_attn"}
        launch.take("--recompute-granularity", said, "recompute", "attention" if attention else "selective")
        if not attention and (other := modules - {"layernorm", "moe_act"}):
            reason = "norms and the product of the feed-forward block are taken to be recomputed"
            launch.leave("--recompute-modules", " ".join(sorted(other)), reason)


def _world(rest: dict[str, str], variables: Mapping[str, str]) -> int | None:
    nodes = rest.pop("nnodes", "") or variables.get("NNODES") or variables.get("NUM_NODES") or "1"
    each = rest.pop("nproc-per-node", "") or variables.get("GPUS_PER_NODE", "") or variables.get("NPROC_PER_NODE", "")
    world = variables.get("WORLD_SIZE")
    if each and each.isdigit() and nodes.isdigit():
        return int(each) * int(nodes)
    return int(world) if world and world.isdigit() else None


def _model(launch: Launch, rest: dict[str, str], number: Callable[..., int | None], layers: int | None) -> None:
    hidden, heads = number("hidden-size"), number("num-attention-heads")
    if not (hidden and heads and layers):
        launch.leave("model", "", "its sizes are not in the file: --model")
        return
    ffn = number("ffn-hidden-size") or 4 * hidden
    groups = number("num-query-groups")
    grouped = rest.pop("group-query-attention", None) is not None
    vocabulary = number("vocab-size") or number("padded-vocab-size")
    if not vocabulary:
        vocabulary = 32000
        launch.taken.append("vocabulary of 32,000 tokens, which the file does not say: an assumption (--model)")
    found: dict[str, object] = {
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": groups if grouped and groups else heads,
        "ffn_hidden_size": ffn,
        "vocab_size": vocabulary,
        "gated_ffn": rest.pop("swiglu", None) is not None,
        "tied_embeddings": rest.pop("untie-embeddings-and-output-weights", None) is None,
    }
    if width := number("kv-channels"):
        found["head_dim"] = width
    if rest.pop("qk-layernorm", None) is not None:
        found["qk_norm"] = True
    if rest.pop("add-qkv-bias", None) is not None:
        found["qkv_bias"] = True
    if experts := number("num-experts"):
        found |= {"num_experts": experts, "experts_per_token": number("moe-router-topk") or 2}
        found["ffn_hidden_size"] = number("moe-ffn-hidden-size") or ffn
    launch.take("sizes of the model", f"{layers} layers of {hidden}", "model", found)
