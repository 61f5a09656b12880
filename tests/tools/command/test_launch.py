"""Launch files of trainers as options: what is taken, what is left out and why, and that they run as they are."""

from __future__ import annotations

import json
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
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE   # a comment
    --nnodes $NNODES
)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu
    --untie-embeddings-and-output-weights --vocab-size 128256
)
TRAINING_ARGS="--micro-batch-size 2 --global-batch-size 128 --bf16 --fp8-format hybrid \\
    --recompute-granularity selective --sequence-parallel --use-distributed-optimizer --lr 1e-4"
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} \\
    --tensor-model-parallel-size ${TP} --pipeline-model-parallel-size 2
"""
EXPERTS = """GPUS_PER_NODE=8
NNODES=4
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \\
  --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --seq-length 4096 --swiglu \\
  --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1408 --expert-model-parallel-size 4 \\
  --expert-tensor-parallel-size 1 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
  --num-layers-per-virtual-pipeline-stage 4 --micro-batch-size 1 --global-batch-size $((8 * 32)) \\
  --vocab-size 32000 --use-distributed-optimizer --optimizer-cpu-offload
"""
ARGUMENTS = """--num-layers 24
--hidden-size 2048
--num-attention-heads 16
--seq-length 4096
--micro-batch-size 4
--global-batch-size 256
--tensor-model-parallel-size 1
--pipeline-model-parallel-size 1
--context-parallel-size 2
--vocab-size 50304
"""
TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 1
seq_len = 8192
global_batch_size = 32
[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
context_parallel_degree = 1
[activation_checkpoint]
mode = "selective"
[quantize.linear.float8]
enable_fsdp_float8_all_gather = true
"""
AXOLOTL = """base_model: {model}
sequence_len: 4096
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
adapter: lora
load_in_8bit: true
deepspeed: deepspeed_configs/zero3_bf16.json
learning_rate: 0.0002
"""
FACTORY = """model_name_or_path: {model}
stage: sft
finetuning_type: full
cutoff_len: 4096
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
deepspeed: examples/deepspeed/ds_z2_config.json
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
    "titan.toml": TITAN,
    "axolotl.yaml": AXOLOTL,
    "factory.yaml": FACTORY,
}
MORE = {"arguments.txt": ("--gpus", 16), "axolotl.yaml": ("--dp", 8), "factory.yaml": ("--dp", 8)}


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
        "recompute": "selective",
        "fsdp": "zero1",
    }
    assert launch.left == ["--fp8-format = hybrid: FP8 is not modelled: rates and parameters are those of bfloat16"]

    launch = read_launch(written(tmp_path, "experts.sh"))
    assert launch.options["virtual-stages"] == "2"
    assert launch.options["micro-batches"] == "256"
    assert "num_experts=8,experts_per_token=2" in str(launch.options["model"])
    assert "ffn_hidden_size=1408" in str(launch.options["model"])
    assert [line.split(" ")[0] for line in launch.left] == ["--expert-tensor-parallel-size", "--optimizer-cpu-offload"]

    launch = read_launch(written(tmp_path, "titan.toml"))
    assert launch.options["model"] == "llama3-8b"
    assert launch.options["dp"] == "8"
    assert launch.options["micro-batches"] == "32"
    assert any("float8" in line for line in launch.left) or not launch.left

    launch = read_launch(written(tmp_path, "axolotl.yaml"))
    assert launch.options["fsdp"] == "zero3"
    assert launch.options["recompute"] == "full"
    assert [line.split(" ")[0] for line in launch.left] == ["gradient_accumulation_steps", "adapter", "load_in_8bit"]
    assert read_launch(written(tmp_path, "factory.yaml")).options["fsdp"] == "zero2"


@pytest.mark.parametrize("name", FILES)
def test_launch_files_run_as_they_are(name: str, run: Any, tmp_path: Path) -> None:
    written(tmp_path, name)
    lengths = np.minimum(4096, (np.random.default_rng(0).pareto(1.1, 8000) * 300).astype(int) + 10)
    np.save(tmp_path / "lengths.npy", lengths)
    options = ("--from", name, "--steps", 2, "--variants", "plain", "--json", *MORE.get(name, ()))
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
    words, _ = with_launch_file(["tune", "x.npy", f"--from={path}"])
    assert "--micro-batch-size" not in words
    assert words[words.index("--micro-batches") + 1] == "128", "the global batch stays what it is"
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
