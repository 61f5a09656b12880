"""Launch files as options: arguments of Megatron, torchtitan's TOML, axolotl's and LLaMA-Factory's YAML.

Every key of a file is taken, or left out with the reason. What is taken becomes options of the command, before those
that are typed: those win.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.options import tokens_of


@dataclass
class Launch:
    """What a launch file says.

    Args:
        kind: of which trainer it is.
        options: of `wlb simulate` and `wlb tune`.
        taken: sentences about keys that became options.
        left: keys that did not, with the reason.
    """

    kind: str
    options: dict[str, str | None] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def take(self, key: str, value: object, option: str, given: object = ...) -> None:
        """Notes that a key became an option; `given` is its value where it is not the key's own."""
        said = value if given is ... else given
        self.options[option] = None if said is True else str(said)
        self.taken.append(f"{key} = {value}: --{option}{'' if said is True else f' {said}'}")

    def leave(self, key: str, value: object, reason: str) -> None:
        """Notes that a key did not."""
        self.left.append(f"{key} = {value}: {reason}")

    def argv(self) -> list[str]:
        """The options, as they are typed."""
        words = []
        for name, value in self.options.items():
            words += [f"--{name}"] if value is None else [f"--{name}", value]
        return words

    def lines(self, path: Path) -> list[str]:
        """What was taken and what was left out."""
        return [
            f"{path}: {self.kind}. Taken:",
            *(f"  {each}" for each in self.taken),
            *(["Left out:"] if self.left else []),
            *(f"  {each}" for each in self.left),
        ]


def with_launch_file(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command with the options of its `--from FILE` before the others; and what is to be said.

    Raises:
        CliError: there is no such file, or it is of no trainer that is known.
    """
    words = [*argv]
    for place, word in enumerate(words):
        name, _, joined = word.partition("=")
        if name != "--from" or words[:1] not in (["simulate"], ["tune"], ["advise"]):
            continue
        if not joined and place + 1 == len(words):
            raise CliError("--from: give a file")
        path = Path(joined or words[place + 1])
        launch = read_launch(path)
        if words[0] != "simulate" and (size := launch.options.pop("micro-batch-size", None)):
            launch.leave("sequences of a micro-batch", size, "wlb chooses the tokens of a micro-batch")
            if count := launch.options.get("micro-batches"):  # the global batch stays what it is
                launch.options["micro-batches"] = str(int(count) * int(size))
        return [words[0], *launch.argv(), *words[1:]], launch.lines(path)
    return words, []


def read_launch(path: Path) -> Launch:
    """What a launch file says.

    Raises:
        CliError: it cannot be read, or is of no trainer that is known.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise CliError(f"--from {path}: cannot be read: {problem}") from None
    if path.suffix == ".toml":
        return _torchtitan(_toml(path, text))
    if path.suffix in (".yaml", ".yml"):
        content = _yaml(path, text)
        if "stage" in content or "finetuning_type" in content or "cutoff_len" in content:
            return _llama_factory(content)
        if "base_model" in content:
            return _axolotl(content)
        if "ModelParallel" in content or "MODEL_ARGS" in content:
            return _megatron(_flags_of_yaml(content), {})
        raise CliError(f"--from {path}: is YAML of neither axolotl (base_model) nor LLaMA-Factory (stage, cutoff_len)")
    flags, variables = _flags(text)
    if not {"num-layers", "seq-length", "tensor-model-parallel-size"} & flags.keys():
        known = "Megatron's arguments, torchtitan's .toml, axolotl's and LLaMA-Factory's .yaml"
        raise CliError(f"--from {path}: holds no arguments of Megatron; read are {known}")
    return _megatron(flags, variables)


# Megatron.


def _flags(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Options of a shell script, or of a list of arguments, and its variables, with those put in that are known."""
    variables: dict[str, str] = {}
    lines = re.sub(r"\\\n", " ", text).splitlines()
    words: list[str] = []
    for line in lines:
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        found = re.match(r"(?:export\s+)?([A-Za-z_]\w*)=\(?(.*?)\)?$", line)
        if found and not line.startswith("--"):
            name, value = found.groups()
            value = _filled(value.strip().strip("\"'"), variables)
            if not value.startswith("--"):
                variables[name] = value
                continue
            line = value
        line = _filled(line, variables)
        try:
            words += shlex.split(line.strip("()"), comments=True)
        except ValueError:
            words += line.split()
    flags: dict[str, str] = {}
    for place, word in enumerate(words):
        if not word.startswith("--") or len(word) < 3:
            continue
        name, has, value = word[2:].partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        value = value if has else "" if following.startswith("--") else following
        flags[name.replace("_", "-")] = value
    return flags, variables


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Text with `$NAME`, `${NAME}`, `${NAME:-default}` and `$((a * b))` put in."""

    def value(found: re.Match[str]) -> str:
        name, default = found.group(1) or found.group(3), found.group(2)
        return variables.get(name, default if default is not None else found.group(0))

    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)

    def product(found: re.Match[str]) -> str:
        numbers = [part.strip() for part in found.group(1).split("*")]
        result = 1
        for number in (variables.get(each, each) for each in numbers):
            if not number.isdigit():
                return found.group(0)
            result *= int(number)
        return str(result)

    return re.sub(r"\$\(\(([\w\s*]+)\)\)", product, text)


def _flags_of_yaml(content: Mapping[str, Any]) -> dict[str, str]:
    inner = content.get("MODEL_ARGS", content)
    return {str(name).lstrip("-").replace("_", "-"): str(value) for name, value in inner.items()}


def _megatron(flags: Mapping[str, str], variables: Mapping[str, str]) -> Launch:
    launch = Launch("arguments of Megatron")
    rest = dict(flags)

    def number(name: str, default: int | None = None) -> int | None:
        value = rest.pop(name, None)
        if value is None:
            return default
        try:
            return tokens_of(value)
        except ValueError:
            raise CliError(f"--from: --{name} {value}: must be a whole number (is a variable not set?)") from None

    sizes = {"tensor-model-parallel-size": "tp", "pipeline-model-parallel-size": "pp", "context-parallel-size": "cp"}
    layout = {"tp": 1, "pp": 1, "cp": 1, "ep": 1}
    for name, option in (*sizes.items(), ("expert-model-parallel-size", "ep")):
        given = name in rest
        layout[option] = number(name) or 1
        launch.take(f"--{name}" if given else f"--{name} (not given)", layout[option], option)
    expert_tp = number("expert-tensor-parallel-size")
    if expert_tp is not None and expert_tp != layout["tp"]:
        reason = f"experts are taken to be divided by tp = {layout['tp']} as all other matrices"
        launch.leave("--expert-tensor-parallel-size", expert_tp, reason)
    layers = number("num-layers")
    virtual = number("num-virtual-stages-per-pipeline-rank")
    each = number("num-layers-per-virtual-pipeline-stage")
    if each and layers:
        virtual = layers // layout["pp"] // each
    if virtual and virtual > 1:
        launch.take("virtual stages", virtual, "virtual-stages")
    context = number("seq-length")
    if context:
        launch.take("--seq-length", context, "context")
    gpus = _world(rest, variables)
    if gpus:
        launch.take("GPUs (nodes x processes)", gpus, "gpus")
    _batch(launch, number("micro-batch-size") or 1, number("global-batch-size"), layout, gpus)
    _megatron_model(launch, rest, number, layers)
    granularity = rest.pop("recompute-granularity", None)
    method, count = rest.pop("recompute-method", None), rest.pop("recompute-num-layers", None)
    if granularity in ("full", "selective"):
        launch.take("--recompute-granularity", granularity, "recompute")
        if count and granularity == "full" and layers and int(count) < layers // layout["pp"] and method == "block":
            launch.leave("--recompute-num-layers", count, "all layers are taken to be recomputed")
    distributed = rest.pop("use-distributed-optimizer", None) is not None
    launch.take("--use-distributed-optimizer", distributed, "fsdp", "zero1" if distributed else "none")
    if rest.pop("sequence-parallel", None) is None and layout["tp"] > 1:
        launch.take("--sequence-parallel", False, "no-sequence-parallel", True)
    for name, value in rest.items():
        if said := _reason(name):
            launch.leave(f"--{name}", value or "set", said)
    return launch


def _world(rest: dict[str, str], variables: Mapping[str, str]) -> int | None:
    nodes = rest.pop("nnodes", "") or variables.get("NNODES") or variables.get("NUM_NODES") or "1"
    each = rest.pop("nproc-per-node", "") or variables.get("GPUS_PER_NODE", "")
    world = variables.get("WORLD_SIZE")
    if each and each.isdigit() and nodes.isdigit():
        return int(each) * int(nodes)
    return int(world) if world and world.isdigit() else None


def _batch(launch: Launch, size: int, samples: int | None, layout: Mapping[str, int], gpus: int | None) -> None:
    """Sequences of a micro-batch, and micro-batches of a global batch."""
    if size > 1:
        launch.take("sequences of a micro-batch", size, "micro-batch-size")
    if not samples:
        return
    if samples % size:
        raise CliError(f"--from: a global batch of {samples} sequences is no multiple of micro-batches of {size}")
    dp = gpus // (layout["tp"] * layout["pp"] * layout["cp"]) if gpus else None
    count = samples // size
    if dp and count % dp:
        launch.leave("global batch", f"{samples} sequences", f"{count} micro-batches are no multiple of dp = {dp}")
        return
    launch.take(f"global batch of {samples} sequences", count, "micro-batches")


def _megatron_model(
    launch: Launch, rest: dict[str, str], number: Callable[..., int | None], layers: int | None
) -> None:
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
    words = ",".join(f"{name}={str(value).lower()}" for name, value in found.items())
    launch.take("sizes of the model", f"{layers} layers of {hidden}", "model", words)


# Why a key has no place; keys of logging, data, learning rates and the like have none to have.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"fp8|float8|fp4", "FP8 is not modelled: rates and parameters are those of bfloat16"),
    (r"offload", "optimizer states are taken to be on the GPU"),
    (r"lora|qlora|peft|adapter", "adapters are not modelled: all parameters are taken to be trained"),
    (r"load-in|load_in|quantiz", "quantised weights are not modelled"),
    (r"replicate", "hybrid sharding is not modelled: all data-parallel ranks share out the state"),
    (r"moe-shared|shared-expert|moe-layer-freq|moe-latent", "part of the model that --model sizes cannot say"),
    (r"multi-latent|kv-lora|q-lora|qk-head|qk-pos|v-head", "latent attention: give --model a config.json"),
    (r"mtp", "heads of multi-token prediction: --multi-token-prediction, with --model a config.json"),
    (r"moe-(token-dispatcher|a2a|expert-cap|grouped|aux|router-(load|bias))", "of how experts run, not of what"),
    (r"window", "a sliding window: give --model a config.json"),
    (r"overlap", "shares of communication that computation hides: --dp-overlap, --tp-overlap and the like"),
    (r"decoder-(first|last)|account-for", "layers of stages: --stage-layers"),
)


def _reason(name: str) -> str | None:
    """Why a key that matters was left out; None: it does not matter to a prediction."""
    return next((reason for pattern, reason in _REASONS if re.search(pattern, name)), None)


# torchtitan.


def _toml(path: Path, text: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[import-not-found, no-redef, unused-ignore]
        except ModuleNotFoundError:
            raise CliError(f"--from {path}: needs Python 3.11, or: pip install tomli") from None
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise CliError(f"--from {path}: is no TOML: {problem}") from None


def _torchtitan(content: Mapping[str, Any]) -> Launch:
    launch = Launch("torchtitan's configuration")
    keys = {
        f"{section}.{name}": value
        for section, inner in content.items()
        if isinstance(inner, Mapping)
        for name, value in inner.items()
    }

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
    shard = int(pop(*(f"{section}.data_parallel_shard_degree" for section in parallel), default=-1))
    replicas = int(pop(*(f"{section}.data_parallel_replicate_degree" for section in parallel), default=1))
    if shard > 0:
        launch.take("data_parallel_shard_degree x data_parallel_replicate_degree", shard * replicas, "dp")
    if replicas > 1:
        launch.leave("data_parallel_replicate_degree", replicas, _reason("replicate") or "")
    launch.take("fully_shard", "parameters", "fsdp", "zero3")
    if context := pop("training.seq_len"):
        launch.take("training.seq_len", context, "context")
    size = int(pop("training.local_batch_size", "training.batch_size", default=1))
    total = int(pop("training.global_batch_size", default=-1))
    micro = int(pop("parallelism.pipeline_parallel_microbatch_size", default=size if layout["pp"] == 1 else 1))
    if total > 0:
        _batch(launch, micro, total, layout, None)
    elif shard > 0:
        _batch(launch, micro, size * shard * replicas, layout, None)
    else:
        launch.leave("training.local_batch_size", size, "of how many GPUs is not said: --gpus and --micro-batches")
    mode = pop("activation_checkpoint.mode", default="none")
    if mode in ("none", "full"):
        launch.take("activation_checkpoint.mode", mode, "recompute")
    else:
        launch.take("activation_checkpoint.mode", mode, "recompute", "selective")
    name, flavor = pop("model.name", default=""), pop("model.flavor", default="")
    preset = f"{name}-{flavor}".lower()
    if preset in ("llama3-8b", "llama3-70b", "llama3-405b"):
        launch.take("model.name, model.flavor", f"{name} {flavor}", "model", preset)
    else:
        launch.leave("model.name, model.flavor", f"{name} {flavor}", "its sizes are not in the file: --model")
    for key, value in keys.items():
        if (reason := _reason(key)) and value not in (False, [], "", 1):
            launch.leave(key, value, reason)
    return launch


# YAML.


def _yaml(path: Path, text: str) -> dict[str, Any]:
    try:
        import yaml
    except ModuleNotFoundError:
        raise CliError(f"--from {path}: needs the package pyyaml; run: pip install pyyaml") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as problem:
        raise CliError(f"--from {path}: is no YAML: {problem}") from None
    if not isinstance(content, dict):
        raise CliError(f"--from {path}: is no YAML of keys and values")
    return content


def _trainer(launch: Launch, content: Mapping[str, Any], names: Mapping[str, str]) -> Launch:
    """A trainer on one model with data parallelism, as axolotl's and LLaMA-Factory's."""
    rest = dict(content)
    model = rest.pop(names["model"], None)
    if model:
        launch.take(names["model"], model, "model")
    if context := rest.pop(names["context"], None):
        launch.take(names["context"], context, "context")
    cp = int(rest.pop("context_parallel_size", None) or rest.pop("sequence_parallel_degree", None) or 1)
    tp = int(rest.pop("tensor_parallel_size", None) or 1)
    for option, value in (("tp", tp), ("pp", 1), ("cp", cp)):
        launch.take(f"{option} ranks", value, option)
    size = int(rest.pop(names["size"], None) or 1)
    steps = int(rest.pop("gradient_accumulation_steps", None) or 1)
    if size > 1:
        launch.take(names["size"], size, "micro-batch-size")
    launch.leave("gradient_accumulation_steps", steps, "of how many ranks is not said: --micro-batches steps x ranks")
    deepspeed = str(rest.pop("deepspeed", "") or "")
    found = re.search(r"(?:zero|z)_?(?:stage_?)?([0-3])", deepspeed)
    if found:
        launch.take("deepspeed", deepspeed, "fsdp", "none" if found.group(1) == "0" else f"zero{found.group(1)}")
    elif rest.pop("fsdp", None) or rest.pop("fsdp_config", None):
        launch.take("fsdp", "on", "fsdp", "zero3")
    else:
        launch.take("fsdp and deepspeed", "neither", "fsdp", "none")
    if names["recompute"] in rest:
        on = bool(rest.pop(names["recompute"]))
        on = on if names["recompute"] == "gradient_checkpointing" else not on
        launch.take(names["recompute"], on, "recompute", "full" if on else "none")
    for name, value in rest.items():
        said = str(value) if name in ("adapter", "finetuning_type") else name
        if name == "finetuning_type" and value in ("full", "freeze"):
            continue
        reason = _reason(said) or (_reason("adapter") if name in ("adapter",) and value else None)
        if reason and value not in (None, False, ""):
            launch.leave(name, value, reason)
    return launch


def _axolotl(content: Mapping[str, Any]) -> Launch:
    names = {
        "model": "base_model",
        "context": "sequence_len",
        "size": "micro_batch_size",
        "recompute": "gradient_checkpointing",
    }
    return _trainer(Launch("axolotl's configuration"), content, names)


def _llama_factory(content: Mapping[str, Any]) -> Launch:
    names = {
        "model": "model_name_or_path",
        "context": "cutoff_len",
        "size": "per_device_train_batch_size",
        "recompute": "disable_gradient_checkpointing",
    }
    return _trainer(Launch("LLaMA-Factory's configuration"), content, names)
