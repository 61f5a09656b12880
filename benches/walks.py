"""Two walks of a stranger with their own files, run as written, with what each command prints.

    python -m benches.walks       # writes docs/results/walks.md

An engineer has a Megatron data set, a launch script and a cluster; a researcher has a Parquet file and a laptop. The
files are made here, small and alike everywhere; the commands are those that a person types.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benches.common import DOCS

PAGE = DOCS / "results" / "walks.md"

LAUNCH = """#!/bin/bash
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-8}
DISTRIBUTED_ARGS=(--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES)
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --swiglu --untie-embeddings-and-output-weights
    --seq-length 32768 --max-position-embeddings 32768 --vocab-size 128256
)
TRAINING_ARGS=(--micro-batch-size 1 --global-batch-size 16 --bf16 --lr 3e-4 --train-iters 100000)
FP8_ARGS=(--fp8-format hybrid --fp8-param-gather)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 2
    --sequence-parallel --use-distributed-optimizer --overlap-grad-reduce
    --recompute-granularity full --recompute-method block --recompute-num-layers 4
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${TRAINING_ARGS[@]} ${FP8_ARGS[@]} \\
    ${PARALLEL_ARGS[@]} --data-path corpus_text_document
"""
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def engineers_files() -> None:
    """A data set of Megatron, whose index alone is read, and a launch script."""
    lengths = np.random.default_rng(0).lognormal(7.2, 1.5, size=20000).astype(np.int32).clip(1, 32768)
    pointers = np.concatenate([[0], 4 * lengths.cumsum(dtype=np.int64)[:-1]])
    ends = np.arange(lengths.size + 1, dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, lengths.size, ends.size)
    Path("corpus_text_document.idx").write_bytes(
        header + b"".join(each.tobytes() for each in (lengths, pointers, ends))
    )
    Path("corpus_text_document.bin").write_bytes(bytes(4 * int(lengths.sum())))
    Path("pretrain.sh").write_text(LAUNCH)


def researchers_files() -> None:
    """A Parquet file of texts, a tokenizer of whole words, and the configuration of a model."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import tokenizers

    random = np.random.default_rng(1)
    words = [f"word{number}" for number in range(500)]
    lengths = random.lognormal(5.5, 1.4, size=4000).astype(int).clip(1, 16384)
    texts = [" ".join(words[each] for each in random.integers(0, 500, size=length)) for length in lengths]
    pq.write_table(pa.table({"text": texts}), "train.parquet")
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save("tokenizer.json")
    Path("config.json").write_text(json.dumps(CONFIG))


@dataclass(frozen=True)
class Walk:
    """One user's session: title, story, input files and commands.

    Args:
        title: a heading.
        story: who it is, and what they have.
        files: makes these in the current folder.
        commands: what they type, one after the other.
    """

    title: str
    story: str
    files: Callable[[], None]
    commands: tuple[str, ...]


WALKS = (
    Walk(
        "An engineer with a Megatron data set, a launch script and a cluster",
        "There are `corpus_text_document.bin` and `.idx`, `pretrain.sh`, and 64 H100. The last command prints what to\n"
        "paste.",
        engineers_files,
        (
            "wlb lengths corpus_text_document",
            "wlb simulate lengths.npy --from pretrain.sh --steps 20"
            " --variants original,per_document,wlb_llm_fitted,dynamic_cp",
            "wlb advise lengths.npy --from pretrain.sh --trainer megatron",
        ),
    ),
    Walk(
        "A researcher with a Parquet file and a laptop",
        "There are `train.parquet`, the model's `tokenizer.json` and `config.json`, and the wish to train on 8 A100.",
        researchers_files,
        (
            "wlb lengths train.parquet --tokenizer tokenizer.json --no-cache",
            "wlb advise lengths.npy --model config.json --gpu A100 --gpus 8 --tp 1 --cp 1 --pp 1"
            " --set layout.fsdp=zero3 --context 16k --global-batch 16samples --trainer huggingface",
        ),
    ),
)


def typed(command: str) -> str:
    """Runs a command; its standard output and errors as one text."""
    from wlb_tools.command import main

    printed = io.StringIO()
    code: object = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            main(shlex.split(command)[1:])
        except SystemExit as exit_:
            code = exit_.code
    if code:
        raise RuntimeError(f"{command} ended with {code}: {printed.getvalue()}")
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def walked(walk: Walk, folder: Path) -> list[tuple[str, str]]:
    """Each command of a walk with what it prints, in a folder with the files."""
    here = Path.cwd()
    width = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "120"
    os.chdir(folder)
    try:
        walk.files()
        return [(command, typed(command)) for command in walk.commands]
    finally:
        os.chdir(here)
        if width is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = width


def page() -> str:
    """The page."""
    parts = [
        "Written by `python -m benches.walks`; do not edit.",
        "# Two walks",
        "From a stranger's files to advice: three commands with a cluster, two with a laptop. Every command ran as it\n"
        "stands, in this order, and printed what follows it. A test runs them again.",
    ]
    for walk in WALKS:
        parts += [f"## {walk.title}", walk.story]
        with tempfile.TemporaryDirectory() as folder:
            parts += [f"```console\n$ {command}\n{printed}\n```" for command, printed in walked(walk, Path(folder))]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
