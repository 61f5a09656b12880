"""Launch files of trainers as options: what is taken, what is left out and why, and that they run as they are."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.launch import read_launch, with_launch_file

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
  --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 --global-batch-size $((8 * 32)) --bf16 \\
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
    model = launch.options.pop("model")
    assert model is not None
    assert model.startswith("hidden_size=4096,num_layers=32,num_heads=32,num_kv_heads=8,ffn_hidden_size=14336")
    assert launch.options == {
        "tp": "4",
        "pp": "2",
        "cp": "1",
        "ep": "1",
        "context": "8192",
        "gpus": "64",
        "micro-batch-size": "2",
        "micro-batches": "64",
        "recompute": "attention",
        "fsdp": "zero1",
        "dp-replicate": "2",
        "fp8": "parameters",
    }
    assert launch.left == ["--fp8-amax-history-len = 1024: FP8 is priced alike in every recipe"]

    launch = read_launch(written(tmp_path, "experts.sh"))
    assert launch.options["virtual-stages"] == "2"
    assert launch.options["micro-batches"] == "256"
    assert "num_experts=8,experts_per_token=2" in str(launch.options["model"])
    assert "ffn_hidden_size=1408" in str(launch.options["model"])
    assert launch.options["expert-tp"] == "1"
    assert launch.options["offload-optimizer"] == "1"
    assert (launch.options["recompute"], launch.options["recompute-layers"]) == ("full", "2")
    assert launch.left == []

    launch = read_launch(written(tmp_path, "arguments.txt"))
    assert launch.options["stage-layers"] == "5,7,7,5"
    assert launch.options["recompute"] == "selective"
    assert [line.split(":")[0] for line in launch.left] == ["--recompute-modules = core_attn"]

    launch = read_launch(written(tmp_path, "titan.toml"))
    assert launch.options["model"] == "llama3-8b"
    assert (launch.options["dp"], launch.options["dp-replicate"]) == ("16", "2")
    assert launch.options["micro-batches"] == "32"
    assert launch.options["fp8"] == "parameters"
    assert (launch.options["recompute"], launch.options["recompute-layers"]) == ("full", "16")
    assert launch.left == []

    launch = read_launch(written(tmp_path, "axolotl.yaml"))
    assert launch.options["fsdp"] == "zero3"
    assert launch.options["recompute"] == "full"
    assert launch.options["lora-rank"] == "32"
    assert [line.split(" ")[0] for line in launch.left] == ["optimizer", "load_in_8bit"]
    launch = read_launch(written(tmp_path, "axolotl_fsdp.yaml"))
    assert {"dp": "8", "dp-replicate": "2", "fp8": "parameters", "fsdp": "zero3"}.items() <= launch.options.items()
    assert (launch.options["recompute"], launch.options["offload-optimizer"]) == ("full", "1")
    assert [line.split(":")[0] for line in launch.left] == ["offload of parameters = True"]
    launch = read_launch(written(tmp_path, "factory.yaml"))
    assert (launch.options["fsdp"], launch.options["offload-optimizer"]) == ("zero2", "1")


def test_a_file_of_deepspeed_is_read_where_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, "factory.yaml")
    (tmp_path / "examples/deepspeed").mkdir(parents=True)
    deepspeed = tmp_path / "examples/deepspeed/ds_z2_offload_config.json"
    deepspeed.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    launch = read_launch(path)
    assert launch.options["fsdp"] == "zero3"
    assert "offload-optimizer" not in launch.options
    assert [line.split(":")[0] for line in launch.left] == ["offload of parameters = True"]
    deepspeed.write_text("{")
    with pytest.raises(CliError, match="is no JSON"):
        read_launch(path)
    path.write_text(path.read_text().replace("ds_z2_offload_config", "ds_own"))
    with pytest.raises(CliError, match="there is no such file, and its name has no stage"):
        read_launch(path)


def test_accumulation_counts_on_the_ranks_that_there_are(tmp_path: Path) -> None:
    """Steps of gradient accumulation are a rank's; ranks are typed, or as few as there can be."""

    def options(name: str, *typed: str) -> dict[str, str]:
        words, _ = with_launch_file(["simulate", "x.npy", "--from", str(written(tmp_path, name)), *typed])
        return {word: words[place + 1] for place, word in enumerate(words[:-1]) if word.startswith("--")}

    assert options("axolotl.yaml")["--micro-batches"] == "4"
    assert options("axolotl.yaml", "--dp", "8")["--micro-batches"] == "32"
    assert options("axolotl.yaml", "--gpus=16", "--cp", "2")["--micro-batches"] == "32"
    assert "--micro-batches" not in options("axolotl.yaml", "--dp", "8", "--global-batch", "64samples")
    assert "--micro-batches" not in options("titan.toml", "--global-batch", "1M")
    assert options("axolotl_fsdp.yaml")["--micro-batches"] == "16"
    text = EXPERTS.replace("--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES", "").replace("GPUS_PER_NODE=8", "")
    path = tmp_path / "no_gpus.sh"
    path.write_text(text)
    words, said = with_launch_file(["simulate", "x.npy", "--from", str(path)])
    assert words[words.index("--dp") + 1] == "2", "two ranks of tp 2 for the four that divide experts"
    assert any("not said; as few as there can be" in line for line in said)


QUOTED = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")


def test_options_that_are_quoted_exist(tmp_path: Path) -> None:
    """In texts of the tools, in what is said of launch files, and in what would make a model fit."""
    import wlb_tools
    from wlb_tools.cluster import capacity
    from wlb_tools.command.app import _COMMANDS, _options
    from wlb_tools.command.errors import setting
    from wlb_tools.command.inputs import launch as module

    existing = {each.__name__: _options([each.__name__, "x"]) for each in _COMMANDS}
    anywhere = set().union(*existing.values(), {"--help", "--help-all", "--version"})
    # Options of nvidia-smi and Megatron, and the beginning of options that switch something off.
    of_others = {"--format", "--id", "--query-gpu", "--expert-tensor-parallel-size", "--no-"}
    for path in Path(wlb_tools.__file__).parent.rglob("*.py"):
        if path == Path(module.__file__):
            continue
        texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        quoted = {word for text in texts if isinstance(text, str) for word in QUOTED.findall(text)}
        assert quoted - of_others <= anywhere, path
    for _, reason in module._REASONS:
        assert {*QUOTED.findall(reason)} <= existing["simulate"], reason
    for name in FILES:
        launch = read_launch(written(tmp_path, name))
        launch.complete({})
        for command in ("simulate", "tune", "advise"):
            assert {f"--{option}" for option in launch.options} <= existing[command]
        for line in (*launch.taken, *launch.left):
            assert {*QUOTED.findall(line.partition(": ")[2])} <= existing["simulate"], line
    changes = [(name, value) for name, values in capacity._SAVINGS.items() for value in values]
    for name, value in (*changes, *((axis, 2) for axis in (*capacity._AXES, "ep", "schedule"))):
        assert setting(name, value).split(" ")[0] in existing["simulate"]


def test_what_would_make_a_model_fit_does(run: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.full(4000, 4096))
    command = ("simulate", "lengths.npy", "--model", "llama2-70b", "--tp", 4, "--context", "64k", "--steps", 1)
    shown = run(*command)
    advice = shown.err.partition("it would fit with ")[2].strip().split(", or with ")
    assert len(advice) > 1
    for each in advice:
        words = re.sub(r"\(.*\)", "", each).replace(" and ", " ").split()
        again = run(*command, *words, "--variants", "plain")
        assert again.code == 0, (each, again.err)


@pytest.mark.parametrize("name", FILES)
def test_launch_files_run_as_they_are(name: str, run: Any, tmp_path: Path) -> None:
    written(tmp_path, name)
    lengths = np.minimum(4096, (np.random.default_rng(0).pareto(1.1, 8000) * 300).astype(int) + 10)
    np.save(tmp_path / "lengths.npy", lengths)
    options = ("--from", name, "--steps", 2, "--variants", "plain", "--json")
    shown = run("simulate", "lengths.npy", *options)
    assert shown.code == 0, shown.err
    assert "Taken:" in shown.err
    assert shown.json


def test_what_is_typed_wins(tmp_path: Path) -> None:
    path = written(tmp_path, "pretrain.sh")
    words, said = with_launch_file(["simulate", "x.npy", "--from", str(path), "--tp", "8"])
    assert words.index("--tp") < len(words) - 2
    assert words[-2:] == ["--tp", "8"]
    assert said[0].endswith("Taken:")
    assert with_launch_file(["pack", "x.npy", "--from", "y"]) == (["pack", "x.npy", "--from", "y"], [])


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.sh", "echo hello", "holds no arguments of Megatron"),
        ("bad.sh", "x --num-layers $UNSET --seq-length 4096", "--num-layers .UNSET: must be a whole number"),
        (
            "uneven.sh",
            "x --num-layers 4 --micro-batch-size 3 --global-batch-size 128",
            "no multiple of micro-batches of 3",
        ),
        ("bad.toml", "[a", "is no TOML"),
        ("bad.yaml", "a: [", "is no YAML"),
        ("list.yaml", "- a", "is no YAML of keys and values"),
        ("other.yaml", "a: 1", "is YAML of neither axolotl"),
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
    shown = run(*common, "--dp", 4, "--cp", 2, "--micro-batches", 8, "--steps", 6, "--trainer", "trl", "--json").json
    assert shown["gain"] > 1.01
    assert shown["range"][0] <= shown["gain"] <= shown["range"][1]
    assert shown["answer"].startswith("Use ")
    assert "balance(trainer, max_tokens=" in shown["lines"]
    assert 0 < shown["unequal"]["of_tokens"] < shown["unequal"]["of_attention"] < 1
    alone = run(*common, "--cp", 1, "--dp", 1, "--micro-batches", 1, "--recompute", "full", "--json").json
    assert alone["answer"] == "Nothing is to be gained: there is one GPU, so nothing waits for it."
    printed = run(*common, "--cp", 1, "--dp", 1, "--micro-batches", 1, "--recompute", "full").out
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
    assert "hf_hub_download" in model_code("org/name")
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
