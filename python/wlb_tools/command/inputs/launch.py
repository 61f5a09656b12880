"""Reads launch files as settings of a scenario: Megatron's arguments, torchtitan's, axolotl's, LLaMA-Factory's.

Every key of a file is taken, or left out with the reason. A scenario's own TOML is read as it stands.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wlb
from wlb.models.presets import PRESETS
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.options import tokens_of
from wlb_tools.simulation import Scenario
from wlb_tools.simulation.data import read_toml

_WAY_OUT = (
    "put echo before torchrun, run the script, and give what it prints:"
    " bash pretrain.sh > arguments.txt; wlb simulate --from arguments.txt"
)


@dataclass
class Launch:
    """Settings that a launch file gives.

    Args:
        kind: name of the trainer.
        settings: fields of a scenario by name, such as "layout.tp"; "gpus" and "micro_batch_size".
        taken: sentences about keys that became settings.
        left: keys that did not, with the reason.
        unused: names of keys that a prediction has no use for.
        accumulation: micro-batches of a data-parallel rank, if the file says them instead of a global batch.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    taken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    accumulation: int = 0

    def take(self, key: str, value: object, name: str, given: object = ...) -> None:
        """Notes that a key became a setting; `given` is the setting's value if it is not that of the key."""
        name = f"layout.{name}" if name in ParallelLayout.__dataclass_fields__ else name
        self.settings[name] = value if given is ... else given
        self.taken.append(f"{key} = {value}: {name} = {_shown(self.settings[name])}")

    def leave(self, key: str, value: object, reason: str) -> None:
        """Notes that a key did not become a setting."""
        self.left.append(f"{key} = {value}: {reason}")

    def size(self, name: str, typed: Mapping[str, Any], default: int = 1) -> int:
        """A number: as typed, else as in the file."""
        value = typed.get(name, self.settings.get(name))
        return value if isinstance(value, int) and value > 0 else default

    def complete(self, typed: Mapping[str, Any], *, batch_given: bool = False) -> None:
        """Sets what needs the number of ranks, which may be typed: data-parallel ranks and micro-batches.

        Args:
            typed: settings of the command line, by name.
            batch_given: whether the command line gives the size of a global batch.
        """
        if not self.kind:
            return
        tp, cp, pp, ep = (self.size(f"layout.{axis}", typed) for axis in ("tp", "cp", "pp", "ep"))
        gpus = self.size("gpus", typed, 0)
        dp = gpus // (tp * cp * pp) if gpus else self.size("layout.dp", typed, 0)
        if not dp:
            dp = max(1, math.ceil(ep * self.size("layout.expert_tp", typed, tp) / (tp * cp)))
            self.take("GPUs", "not said; as few as there can be", "dp", dp)
        if self.accumulation and "num_micro_batches" not in typed and not batch_given:
            said = f"{self.accumulation} on each of dp = {dp} ranks"
            self.take("gradient accumulation", said, "num_micro_batches", self.accumulation * dp)
        if batch_given:
            self.settings.pop("num_micro_batches", None)

    def lines(self, path: Path) -> list[str]:
        """Lines that say what was taken and what was left out."""
        return [
            f"{path}: {self.kind}. Taken:" if self.kind else f"{path}: a scenario.",
            *(f"  {each}" for each in self.taken),
            *(["Left out:"] if self.left else []),
            *(f"  {each}" for each in self.left),
            *([f"Of no use to a prediction: {', '.join(sorted(self.unused))}."] if self.unused else []),
        ]


def _shown(value: object) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, Mapping):
        return ",".join(f"{name}={_shown(each)}" for name, each in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def read_launch(path: Path) -> Launch:
    """Settings that a launch file gives.

    Raises:
        CliError: it cannot be read, or its trainer is unknown, or it is a script that computes them.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise CliError(f"--from {path}: cannot be read: {problem}") from None
    content = _tables(path, text)
    if content is None:
        flags, variables = _flags(path, text)
        if {"num-layers", "seq-length", "tensor-model-parallel-size"} & flags.keys():
            return _megatron(flags, variables)
        raise CliError(f"--from {path}: {_UNKNOWN}")
    keys = dict(_flat(content))
    if any(_OF_TITAN.fullmatch(key) for key in keys):
        return _torchtitan(content)
    if "base_model" in content:
        return _axolotl(content, path)
    if {"stage", "finetuning_type", "cutoff_len"} & content.keys():
        return _llama_factory(content, path)
    if "ModelParallel" in content or "MODEL_ARGS" in content:
        return _megatron(_flags_of_yaml(content), {})
    if content.keys() & _OF_SCENARIO:
        return Launch("", settings=keys)
    found = ", ".join(map(str, itertools.islice(content, 8)))
    raise CliError(f"--from {path}: {_UNKNOWN}; found are {found or 'no keys'}")


_UNKNOWN = (
    "has none of what is known: Megatron's arguments, as a script, a list or YAML (MODEL_ARGS); torchtitan's"
    " configuration, as TOML or resolved as JSON (training.seq_len, parallelism.tensor_parallel_degree); axolotl's YAML"
    " (base_model); LLaMA-Factory's (stage, cutoff_len); a scenario of wlb as TOML (model, layout)"
)

_OF_TITAN = re.compile(
    r"(parallelism|training|experimental)\.\w+_parallel_(shard_|replicate_)?degree"
    r"|training\.(seq_len|local_batch_size|global_batch_size)|model\.flavor"
)
"""Keys of torchtitan's configuration, of which a file must have one to be taken for it."""

_OF_SCENARIO = {*Scenario.__dataclass_fields__, "gpu", "gpus"}


def _tables(path: Path, text: str) -> dict[str, Any] | None:
    """The keys of TOML, JSON or YAML, known by what is in it; None: it is a script or a list of arguments.

    Raises:
        CliError: the ending of its name says one of these, and it is none.
    """
    if path.suffix == ".toml":
        try:
            return read_toml(path)
        except wlb.WlbError as problem:
            raise CliError(f"--from {problem.args[0].removeprefix('path = ')}") from None
    if path.suffix == ".json":
        return _json(path, text)
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path, text)
    if text.lstrip().startswith("{"):
        return _json(path, text)
    reads: tuple[Callable[[], dict[str, Any]], ...] = (lambda: read_toml(path), lambda: _yaml(path, text))
    for read in reads:
        with contextlib.suppress(CliError, wlb.WlbError):
            content = read()
            if (
                any(isinstance(value, Mapping) for value in content.values())
                or {"base_model", "stage"} & content.keys()
            ):
                return content
    return None


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as problem:
        raise CliError(f"--from {path}: {path} is no JSON: {problem}") from None
    return content if isinstance(content, dict) else {}


# Megatron.


def _flags(path: Path, text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Options and variables of a shell script or of a list of arguments; variables and arrays are put in.

    Raises:
        CliError: the script sources another file, whose variables are unknown here.
    """
    variables: dict[str, str] = {}
    words: list[str] = []
    for line in re.sub(r"\\\n", " ", text).splitlines():
        line = re.sub(r"(^|\s)#.*", "", line).strip()
        if re.match(r"(source|\.)\s+\S", line):
            raise CliError(f"--from {path}: sources another file ({line}); {_WAY_OUT}")
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
    words = [part for word in words for part in (word.split() if word.startswith("--") and " " in word else [word])]
    for place, word in enumerate(words):
        if not word.startswith("--") or len(word) < 3:
            continue
        name, has, value = word[2:].partition("=")
        following = words[place + 1] if place + 1 < len(words) else "--"
        value = value if has else "" if following.startswith("--") else following
        if name.replace("_", "-") in _SEVERAL and value and not has:
            value = " ".join(itertools.takewhile(lambda word: not word.startswith("-"), words[place + 1 :]))
        flags[name.replace("_", "-")] = value
    return flags, variables


_SEVERAL = ("recompute-modules",)
"""Options of Megatron with several values."""


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Text in which `$NAME`, `${NAME}` and `${NAME:-default}` are put in."""

    def value(found: re.Match[str]) -> str:
        name, default = found.group(1) or found.group(3), found.group(2)
        return variables.get(name, default if default is not None else found.group(0))

    return re.sub(r"\$\{(\w+)(?::-([^}]*))?\}|\$(\w+)", value, text)


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
            why = "is computed" if re.search(r"[$`(]", value) else "must be a whole number"
            raise CliError(f"--from: --{name} {value}: {why}; {_WAY_OUT}") from None

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
    _batch(launch, number("micro-batch-size") or 1, number("global-batch-size"), layout, gpus)
    _megatron_model(launch, rest, number, layers)
    _megatron_memory(launch, rest, number, given)
    if not given("sequence-parallel") and layout["tp"] > 1:
        launch.take("--sequence-parallel", False, "sequence_parallel")
    for name, value in rest.items():
        if reason := _reason(name):
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


def _megatron_memory(
    launch: Launch,
    rest: dict[str, str],
    number: Callable[..., int | None],
    given: Callable[[str], bool],
) -> None:
    """Reads the settings of recomputation, sharding, offloading, FP8 and frozen weights."""
    _megatron_recompute(launch, rest, number)
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


def _megatron_recompute(launch: Launch, rest: dict[str, str], number: Callable[..., int | None]) -> None:
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


def _batch(launch: Launch, size: int, samples: int | None, layout: Mapping[str, int], gpus: int | None) -> None:
    """Sequences of a micro-batch, and micro-batches of a global batch."""
    if size > 1:
        launch.take("sequences of a micro-batch", size, "micro_batch_size")
    if not samples:
        return
    if samples % size:
        raise CliError(f"--from: a global batch of {samples} sequences is no multiple of micro-batches of {size}")
    dp = gpus // (layout["tp"] * layout["pp"] * layout["cp"]) if gpus else None
    count = samples // size
    if dp and count % dp:
        launch.leave("global batch", f"{samples} sequences", f"{count} micro-batches are no multiple of dp = {dp}")
        return
    launch.take(f"global batch of {samples} sequences", count, "num_micro_batches")


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
    launch.take("sizes of the model", f"{layers} layers of {hidden}", "model", found)


# Reasons why a key is left out; keys of logging, data, learning rates and the like need none.
_REASONS: tuple[tuple[str, str], ...] = (
    (r"fp4", "FP4 is not modelled"),
    (r"fp8|float8", "FP8 is priced alike in every recipe"),
    (r"offload", "of what is offloaded only optimizer states are modelled: --set layout.offload_optimizer"),
    (r"load-in|load_in|quantiz", "frozen weights are counted in bfloat16"),
    (r"lora.*(target|modules)", "adapters are counted on every matrix but routers and routed experts"),
    (r"moe-shared|shared-expert|moe-layer-freq|moe-latent", "part of the model that --model sizes cannot say"),
    (r"multi-latent|kv-lora|q-lora|qk-head|qk-pos|v-head", "latent attention: give --model a config.json"),
    (r"mtp", "heads of multi-token prediction: --multi-token-prediction, with --model a config.json"),
    (r"moe-(token-dispatcher|a2a|expert-cap|grouped|aux|router-(load|bias))", "of how experts run, not of what"),
    (r"window", "a sliding window: give --model a config.json"),
    (r"overlap", "shares of communication that computation hides: --set dp_overlap, --set tp_overlap and the like"),
    (r"cp-comm-type", "keys and values are taken to be gathered, or with --set cp_keys=needed only a part of them"),
)


def _reason(name: str) -> str | None:
    """Why a key that matters was left out; None: it does not matter to a prediction."""
    return next((reason for pattern, reason in _REASONS if re.search(pattern, name)), None)


# torchtitan.


def _flat(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of all levels, joined by dots, and their values."""
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _torchtitan(content: Mapping[str, Any]) -> Launch:
    launch = Launch("torchtitan's configuration")
    keys = dict(_flat(content))

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
    _titan_pipeline(launch, pop, layout["pp"])
    size = int(pop("training.local_batch_size", "training.batch_size", default=1))
    total = int(pop("training.global_batch_size", default=-1))
    micro = int(pop("parallelism.pipeline_parallel_microbatch_size", default=size if layout["pp"] == 1 else 1))
    if total > 0:
        _batch(launch, micro, total, layout, None)
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
    _titan_recompute(launch, pop, layers)
    _titan_float8(launch, keys, [str(each) for each in pop("model.converters", default=())])
    if pop("training.enable_cpu_offload"):
        launch.take("training.enable_cpu_offload", True, "offload_optimizer", 1)
        launch.leave("training.enable_cpu_offload", True, "parameters and gradients are taken to stay on the GPU")
    if str(pop("training.dtype", default="float32")) == "bfloat16":
        launch.take("training.dtype", "bfloat16", "optimizer_bytes", 4)
    for key, value in keys.items():
        if (reason := _reason(key)) and value not in (False, [], "", 1):
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


def _titan_pipeline(launch: Launch, pop: Callable[..., Any], pp: int) -> None:
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


def _titan_recompute(launch: Launch, pop: Callable[..., Any], layers: int | None) -> None:
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


def _titan_float8(launch: Launch, keys: dict[str, Any], converters: list[str]) -> None:
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


def _trainer(launch: Launch, content: Mapping[str, Any], names: Mapping[str, str], path: Path) -> Launch:
    """Reads a trainer of one model with data parallelism, such as axolotl's and LLaMA-Factory's."""
    rest = dict(content)
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
        if (reason := _reason(name)) and value not in (None, False, "", [], {}):
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
            return _json(folder / name, (folder / name).read_text(encoding="utf-8"))
    return None


def _axolotl(content: Mapping[str, Any], path: Path) -> Launch:
    names = {
        "model": "base_model",
        "context": "sequence_len",
        "size": "micro_batch_size",
        "recompute": "gradient_checkpointing",
    }
    return _trainer(Launch("axolotl's configuration"), content, names, path)


def _llama_factory(content: Mapping[str, Any], path: Path) -> Launch:
    names = {
        "model": "model_name_or_path",
        "context": "cutoff_len",
        "size": "per_device_train_batch_size",
        "recompute": "disable_gradient_checkpointing",
    }
    return _trainer(Launch("LLaMA-Factory's configuration"), content, names, path)
