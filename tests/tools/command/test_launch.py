"""Launch files of trainers as options: what is taken, what is left out and why, and that they run as they are."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb_tools
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.cluster import Cluster
from wlb_tools.command.inputs.launch import read_launch
from wlb_tools.simulation.data import read_toml

MEGATRON = """#!/bin/bash
# 8 nodes
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-8}
TP=4
DTYPE="fp8"
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # a comment
    --nnodes $NNODES
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu
    --untie-embeddings-and-output-weights --vocab-size 128256
)
TRAINING_ARGS="--micro-batch-size 2 --global-batch-size 128 --bf16 \\
    --recompute-granularity selective --sequence-parallel --use-distributed-optimizer --lr 1e-4"
FP8_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    FP8_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-param-gather"
    )
fi
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${FP8_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2 --num-distributed-optimizer-instances 2
"""
EXPERTS = """GPUS_PER_NODE=8
NNODES=4
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
  --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 4096 --swiglu \\
  --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1408 --expert-model-parallel-size 4 \\
  --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 --global-batch-size 256 --bf16 \\
  --vocab-size 32000 --use-distributed-optimizer --optimizer-cpu-offload --sequence-parallel \\
  --recompute-granularity full --recompute-method block --recompute-num-layers 2
"""
ARGUMENTS = """--num-layers 24
--hidden-size 2048
--num-attention-heads 16
--seq-length 4096
--micro-batch-size 4
--global-batch-size 256
--tensor-model-parallel-size 1
--pipeline-model-parallel-size 4
--decoder-first-pipeline-num-layers 5
--decoder-last-pipeline-num-layers 5
--context-parallel-size 2
--recompute-granularity selective
--recompute-modules layernorm core_attn
--vocab-size 50304
--bf16
"""
MODEL_ARGS = """ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
MODEL_ARGS:
  --num-layers: 8
  --hidden-size: 1024
  --num-attention-heads: 16
  --seq-length: 4096
  --micro-batch-size: 1
  --global-batch-size: 32
  --tensor-model-parallel-size: 2
  --sequence-parallel: true
  --use-distributed-optimizer: true
  --vocab-size: 32000
  --bf16: true
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
converters = ["quantize.linear.float8"]
[training]
local_batch_size = 1
seq_len = 8192
global_batch_size = 32
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
context_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
selective_ac_option = "2"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
"""
AXOLOTL = """base_model: {model}
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
adapter: lora
lora_r: 32
lora_target_linear: true
load_in_8bit: true
deepspeed: deepspeed_configs/zero3_bf16.json
learning_rate: 0.0002
optimizer: adamw_bnb_8bit
"""
AXOLOTL_FSDP = """base_model: {model}
sequence_len: 4096
micro_batch_size: 1
gradient_accumulation_steps: 2
dp_shard_size: 4
dp_replicate_size: 2
fp8: true
fp8_enable_fsdp_float8_all_gather: true
fsdp_config:
  fsdp_version: 2
  offload_params: true
  reshard_after_forward: true
  activation_checkpointing: true
"""
FACTORY = """model_name_or_path: {model}
stage: sft
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
deepspeed: examples/deepspeed/ds_z2_offload_config.json
"""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
FILES = {
    "pretrain.sh": MEGATRON,
    "experts.sh": EXPERTS,
    "arguments.txt": ARGUMENTS,
    "model_args.yaml": MODEL_ARGS,
    "titan.toml": TITAN,
    "axolotl.yaml": AXOLOTL,
    "axolotl_fsdp.yaml": AXOLOTL_FSDP,
    "factory.yaml": FACTORY,
}
"""Eight kinds of launch files, as people write them: none needs another option."""


def written(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    path = folder / name
    path.write_text(FILES[name].replace("{model}", str(folder / "config.json")))
    return path


def test_every_key_that_matters_is_taken_or_left_out_with_a_reason(tmp_path: Path) -> None:
    launch = read_launch(written(tmp_path, "pretrain.sh"))
    assert launch.kind == "arguments of Megatron"
    sizes = launch.settings.pop("model")
    assert (sizes["hidden_size"], sizes["num_layers"], sizes["num_kv_heads"]) == (4096, 32, 8)
    assert launch.settings == {
        "layout.tp": 4,
        "layout.pp": 2,
        "layout.cp": 1,
        "layout.ep": 1,
        "context": 8192,
        "gpus": 64,
        "micro_batch_size": 2,
        "num_micro_batches": 64,
        "layout.recompute": "attention",
        "layout.fsdp": "zero1",
        "layout.dp_replicate": 2,
        "layout.fp8": "parameters",
    }
    assert launch.left == ["--fp8-amax-history-len = 1024: FP8 is priced alike in every recipe"]


@pytest.mark.parametrize(
    ("name", "settings", "left"),
    [
        (
            "experts.sh",
            {
                "layout.virtual_stages": 2,
                "num_micro_batches": 256,
                "layout.expert_tp": 1,
                "layout.offload_optimizer": 1,
                "layout.recompute": "full",
                "layout.recompute_layers": 2,
            },
            [],
        ),
        (
            "arguments.txt",
            {"layout.stage_layers": [5, 7, 7, 5], "layout.recompute": "selective"},
            ["--recompute-modules = core_attn"],
        ),
        (
            "titan.toml",
            {
                "model": "llama3-8b",
                "layout.dp": 16,
                "layout.dp_replicate": 2,
                "num_micro_batches": 32,
                "layout.fp8": "parameters",
                "layout.recompute": "full",
                "layout.recompute_layers": 16,
            },
            [],
        ),
        (
            "axolotl.yaml",
            {"layout.fsdp": "zero3", "layout.recompute": "full", "layout.lora_rank": 32},
            ["optimizer = adamw_bnb_8bit", "load_in_8bit = True"],
        ),
        (
            "axolotl_fsdp.yaml",
            {
                "layout.dp": 8,
                "layout.dp_replicate": 2,
                "layout.fp8": "parameters",
                "layout.fsdp": "zero3",
                "layout.recompute": "full",
                "layout.offload_optimizer": 1,
            },
            ["offload of parameters = True"],
        ),
        ("factory.yaml", {"layout.fsdp": "zero2", "layout.offload_optimizer": 1}, []),
    ],
)
def test_what_a_file_says_and_what_is_left_out(
    tmp_path: Path, name: str, settings: dict[str, Any], left: list[str]
) -> None:
    launch = read_launch(written(tmp_path, name))
    assert settings.items() <= launch.settings.items()
    assert [line.split(":")[0] for line in launch.left] == left


def test_torchtitans_resolved_configuration_is_its_toml(tmp_path: Path) -> None:
    """The file that torchtitan writes is JSON with the same tables."""
    path = tmp_path / "resolved.json"
    path.write_text(json.dumps(read_toml(written(tmp_path, "titan.toml"))))
    assert read_launch(path).settings == read_launch(tmp_path / "titan.toml").settings


def test_a_scenario_is_read_as_it_stands(run: Any, tmp_path: Path) -> None:
    """And options override it, as they override a launch file."""
    path = tmp_path / "mine.toml"
    path.write_text('model = "llama3-8b"\ngpu = "b200"\ncontext = 4096\n[layout]\ntp = 4\npp = 2\ncp = 1\n')
    scenario = Cluster(launch_file=path).read().scenario()
    assert scenario == wlb_tools.Scenario.from_toml(path)
    changed = Cluster(launch_file=path, tp=8, changes=("layout.fsdp=zero3", "cp_overlap=0.5")).read().scenario()
    assert (changed.layout.tp, changed.layout.fsdp, changed.cp_overlap) == (8, "zero3", 0.5)
    path.write_text("[layuot]\ntp = 4\n")
    assert "layuot" in run("simulate", "x.npy", "--from", path).err


def test_a_file_of_deepspeed_is_read_where_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, "factory.yaml")
    (tmp_path / "examples/deepspeed").mkdir(parents=True)
    deepspeed = tmp_path / "examples/deepspeed/ds_z2_offload_config.json"
    deepspeed.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    launch = read_launch(path)
    assert launch.settings["layout.fsdp"] == "zero3"
    assert "layout.offload_optimizer" not in launch.settings
    assert [line.split(":")[0] for line in launch.left] == ["offload of parameters = True"]
    deepspeed.write_text("{")
    with pytest.raises(CliError, match="is no JSON"):
        read_launch(path)
    path.write_text(path.read_text().replace("ds_z2_offload_config", "ds_own"))
    with pytest.raises(CliError, match="there is no such file, and its name has no stage"):
        read_launch(path)


def test_accumulation_counts_on_the_ranks_that_there_are(tmp_path: Path) -> None:
    """Steps of gradient accumulation are a rank's; ranks are typed, or as few as there can be."""

    def completed(name: str, batch_given: bool = False, **typed: int) -> dict[str, Any]:
        launch = read_launch(written(tmp_path, name))
        names = {axis if axis == "gpus" else f"layout.{axis}": value for axis, value in typed.items()}
        launch.complete(names, batch_given=batch_given)
        return launch.settings

    assert completed("axolotl.yaml")["num_micro_batches"] == 4
    assert completed("axolotl.yaml", dp=8)["num_micro_batches"] == 32
    assert completed("axolotl.yaml", gpus=16, cp=2)["num_micro_batches"] == 32
    assert "num_micro_batches" not in completed("axolotl.yaml", batch_given=True, dp=8)
    assert "num_micro_batches" not in completed("titan.toml", batch_given=True)
    assert completed("axolotl_fsdp.yaml")["num_micro_batches"] == 16
    text = EXPERTS.replace("--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES", "").replace("GPUS_PER_NODE=8", "")
    path = tmp_path / "no_gpus.sh"
    path.write_text(text)
    launch = read_launch(path)
    launch.complete({})
    assert launch.settings["layout.dp"] == 2, "two ranks of tp 2 for the four that divide experts"
    assert any("not said; as few as there can be" in line for line in launch.lines(path))


QUOTED = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def test_options_that_are_quoted_exist(tmp_path: Path) -> None:
    """In texts of the tools, in what is said of launch files, and in what would make a model fit."""
    from wlb_tools.cluster import capacity
    from wlb_tools.command.app import _COMMANDS, _options
    from wlb_tools.command.errors import setting
    from wlb_tools.command.inputs.launch import settings as module

    existing = {each.__name__: _options([each.__name__, "x"]) for each in _COMMANDS}
    anywhere = set().union(*existing.values(), {"--help", "--help-all", "--version"})
    # Options of nvidia-smi and Megatron, and the beginning of options that switch something off.
    of_others = {"--format", "--id", "--query-gpu", "--expert-tensor-parallel-size", "--no-"}
    for path in Path(wlb_tools.__file__).parent.rglob("*.py"):
        if path.is_relative_to(Path(module.__file__).parent):
            continue
        texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        quoted = {word for text in texts if isinstance(text, str) for word in QUOTED.findall(text)}
        assert quoted - of_others <= anywhere, path
    fields = {field.name for field in dataclasses.fields(wlb_tools.Scenario)}
    fields |= {f"layout.{field.name}" for field in dataclasses.fields(wlb_tools.ParallelLayout)}

    def exists(text: str) -> None:
        assert {*QUOTED.findall(text)} <= existing["simulate"], text
        assert {*re.findall(r"--set ([\w.]+\w)", text)} <= fields, text

    for _, reason in module._REASONS:
        exists(reason)
    for name in FILES:
        launch = read_launch(written(tmp_path, name))
        launch.complete({})
        assert launch.settings.keys() <= fields | {"gpus", "micro_batch_size"}
        for line in (*launch.taken, *launch.left):
            exists(line.partition(": ")[2])
    changes = [(name, value) for name, values in capacity._SAVINGS.items() for value in values]
    for name, value in (*changes, *((axis, 2) for axis in (*capacity._AXES, "ep", "schedule"))):
        exists(setting(name, value))


def test_what_would_make_a_model_fit_does(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.full(4000, 4096))
    command = ("simulate", "lengths.npy", "--model", "llama2-70b", "--tp", 4, "--context", "64k", "--steps", 1)
    shown = run(*command)
    advice = shown.err.partition("it would fit with ")[2].strip().split(", or with ")
    assert len(advice) > 1
    for each in advice:
        words = re.sub(r"\(.*\)", "", each).replace(" and ", " ").split()
        again = run(*command, *words, "--variants", "original")
        assert again.code == 0, (each, again.err)


@pytest.mark.a_few(5)
@pytest.mark.parametrize("name", FILES)
def test_launch_files_run_as_they_are(name: str, run: Any, tmp_path: Path) -> None:
    written(tmp_path, name)
    lengths = np.minimum(4096, (np.random.default_rng(0).pareto(1.1, 8000) * 300).astype(int) + 10)
    np.save(tmp_path / "lengths.npy", lengths)
    options = ("--from", name, "--steps", 2, "--variants", "original", "--json")
    shown = run("simulate", "lengths.npy", *options)
    assert shown.code == 0, shown.err
    assert "Taken:" in shown.err
    assert shown.json


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_known_by_what_is_in_it(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, name)
    known = read_launch(path)
    other = path.rename(tmp_path / "launch.txt")
    assert read_launch(other) == known


def test_no_model_is_taken_that_a_file_does_not_say(run: Any, tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("torchrun x --seq-length 4096 --tensor-model-parallel-size 2 --lr 3e-4")
    np.save(tmp_path / "lengths.npy", np.full(4000, 1024))
    shown = run("simulate", "lengths.npy", "--from", "run.sh", "--steps", 1)
    assert (shown.code, "does not say which model it trains; give --model" in shown.err) == (2, True)
    shown = run("simulate", "lengths.npy", "--from", "run.sh", "--steps", 1, "--model", "llama3-8b")
    assert "Of no use to a prediction: --lr." in shown.err


def test_what_is_typed_wins(tmp_path: Path) -> None:
    run = Cluster(launch_file=written(tmp_path, "pretrain.sh"), tp=8, changes=("layout.fp8=none",)).read()
    assert (run.layout.tp, run.layout.fp8, run.layout.pp, run.layout.dp) == (8, "none", 2, 4)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.sh", "echo hello", "has none of what is known: Megatron"),
        ("bad.sh", "x --num-layers $UNSET --seq-length 4096", "--num-layers .UNSET: is computed; put echo before"),
        ("sum.sh", "x --num-layers $((2 * 16)) --seq-length 4096", "is computed; put echo before torchrun"),
        ("asks.sh", "x --num-layers $(cat n) --seq-length 4096", "is computed; put echo before torchrun"),
        ("more.sh", "source sizes.sh\nx --num-layers $N --seq-length 4096", "sources another file .source sizes.sh.;"),
        ("word.sh", "x --num-layers many --seq-length 4096", "--num-layers many: must be a whole number"),
        ("other.json", "{}", "has none of what is known: Megatron"),
        (
            "uneven.sh",
            "x --num-layers 4 --micro-batch-size 3 --global-batch-size 128",
            "no multiple of micro-batches of 3",
        ),
        ("prime.toml", '[trainer.model]\nname = "x"\n[training]\nsteps = 3', "has none of what is known"),
        ("bad.toml", "[a", "is no TOML"),
        ("bad.yaml", "a: [", "is no YAML"),
        ("list.yaml", "- a", "is no YAML of keys and values"),
        ("other.yaml", "a: 1", "has none of what is known: Megatron"),
        ("stage.yaml", "base_model: x\ndeepspeed: own.json", "its name has no stage"),
    ],
)
def test_other_files_are_refused_by_name(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CliError, match=said):
        read_launch(tmp_path / name)
    with pytest.raises(CliError, match="cannot be read"):
        read_launch(tmp_path / "nowhere.sh")


def test_advice_on_several_ranks_and_on_one(run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    lengths = np.minimum(65536, (np.random.default_rng(0).pareto(0.9, 20000) * 300).astype(int) + 10)
    np.save(tmp_path / "lengths.npy", lengths)
    common = ("advise", "lengths.npy", "--model", "config.json", "--context", "64k", "--tp", 1, "--pp", 1)
    ranks = ("--dp", 4, "--cp", 2, "--micro-batches", 8, "--steps", 6)
    assert run(*common, *ranks, "--trainer", "trl").code == 2
    nothing = run(*common, *ranks, "--trainer", "verl")
    assert (nothing.code, "there is nothing to choose" in nothing.err) == (2, True)
    shown = run(*common, *ranks, "--json").json
    assert "wlb.Packer(" in shown["lines"]
    shown = run(*common, *ranks, "--trainer", "Megatron-LM", "--json").json
    assert shown["gain"] > 1.01
    assert shown["range"][0] <= shown["gain"] <= shown["range"][1]
    assert shown["answer"].startswith("Use ")
    assert "megatron.data_iterator(" in shown["lines"]
    assert 0 < shown["unequal"]["of_tokens"] < shown["unequal"]["of_attention"] < 1
    alone = run(*common, "--cp", 1, "--dp", 1, "--micro-batches", 1, "--set", "layout.recompute=full", "--json").json
    assert alone["answer"] == "Nothing is to be gained: there is one GPU, so nothing waits for it."
    printed = run(*common, "--cp", 1, "--dp", 1, "--micro-batches", 1, "--set", "layout.recompute=full").out
    assert printed.index("Nothing is to be gained") < printed.index("The documents")


@pytest.mark.parametrize("command", ["simulate", "tune", "advise"])
def test_what_is_assumed_of_a_model_is_printed(command: str, run: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(100, 4096, 300))
    cluster = ("--context", "4k", "--tp", 1, "--pp", 1, "--cp", 1, "--dp", 2, "--steps", 4)
    shown = run(command, "lengths.npy", "--model", "config.json", *cluster)
    assert shown.code == 0, shown.err
    assert "Assumed of the model: it has one layer, as draft heads" in " ".join(shown.out.split())


def test_sizes_and_names_of_models(run: Any) -> None:
    from wlb_tools.command.inputs.model import model_config
    from wlb_tools.command.output.configuration import model_code

    sizes = "hidden_size=64,num_layers=2,num_heads=4,num_kv_heads=2,ffn_hidden_size=96,vocab_size=101,gated_ffn=false"
    model = model_config(sizes)
    assert (model.num_kv_heads, model.gated_ffn) == (2, False)
    import wlb

    assert eval(model_code(sizes), {"wlb": wlb}) == model
    assert eval(model_code("llama2-7b"), {"wlb": wlb}) == model_config("llama2-7b")
    assert model_code("org/name") == 'wlb.ModelConfig.from_hugging_face("org/name")'
    for text, said in {
        "hidden_size=64": "lacks vocab_size, num_layers, num_heads",
        "hidden=64": "'hidden' is no size; known are hidden_size",
        "hidden_size=big": "neither a whole number nor true or false",
    }.items():
        with pytest.raises(CliError, match=said):
            model_config(text)
    with pytest.raises(CliError, match="no heads that predict"):
        model_config("llama2-7b", multi_token_prediction=True)
    assert run("simulate", "--help").code == 0
