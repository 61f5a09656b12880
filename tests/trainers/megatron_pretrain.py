"""Megatron-LM's `pretrain` on CPU, in its own loop: its arguments, optimizer, checkpoints and TensorBoard writer.

`pretrain` calls for a GPU in a few places more than Megatron-Core: those are stood in for here. All else is its own.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.trainers.megatron_run import CONTEXT, VOCABULARY, Run, build, documents, initialize, of_page, on_cpu
from tests.trainers.page import UNREACHED, block

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.training", reason=UNREACHED)
    from megatron.core.enums import ModelType
    from megatron.training import get_args, pretrain
    from megatron.training import initialize as megatron_initialize
    from megatron.training import training as megatron_training
    from megatron.training.arguments import core_transformer_config_from_args

from wlb.integrations import megatron

MICRO_BATCHES = 8  # of a step, on all ranks
_ARGUMENTS = f"""
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --ffn-hidden-size 64 --seq-length {CONTEXT} --max-position-embeddings {CONTEXT} --position-embedding-type rope
    --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --use-cpu-initialization
    --tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --make-vocab-size-divisible-by {VOCABULARY}
    --dataloader-type external --calculate-per-token-loss --no-create-attention-mask-in-dataloader
    --micro-batch-size 1 --global-batch-size {MICRO_BATCHES} --eval-iters 0 --eval-interval 1000
    --lr 3e-3 --lr-decay-style constant --lr-decay-iters 100 --override-opt-param-scheduler
    --weight-decay 0 --clip-grad 0 --log-interval 1
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --no-gradient-accumulation-fusion --no-persist-layer-norm --moe-token-dispatcher-type alltoall
    --distributed-backend gloo --save-interval 1000 --ckpt-format torch --no-save-rng --no-load-rng
"""


def arguments(folder: Path, steps: int, run: Run) -> list[str]:
    layout = ["--tensor-model-parallel-size", run.tp, "--pipeline-model-parallel-size", run.pp]
    kept = ["--save", folder, "--load", folder, "--tensorboard-dir", folder / f"to {steps}"]
    return [*_ARGUMENTS.split(), *map(str, [*layout, *kept, "--train-iters", steps])]


def train(rank: int, run: Run, folder: Path, steps: int, changes: dict[str, Any], more: list[str]) -> list[Any]:
    """What the last rank's TensorBoard has is in `folder`; gives the pieces of every step, as `megatron_run.Result`.

    In step `changes["dies_in"]`, counted from 1, every rank is killed.
    """
    pieces: list[Any] = []
    begun: list[int] = []
    dies_in = changes.pop("dies_in", None)
    next_step = megatron.DataIterator.__next__

    def noting(data: megatron.DataIterator) -> megatron.MegatronStep:
        step = next_step(data)
        begun.append(step.number)
        if len(begun) == dies_in:
            dist.barrier()
            os.kill(os.getpid(), signal.SIGKILL)
        if data._sharing.leads and step.source is not None:
            found = step.source.pieces
            assert found is not None
            pieces.append(np.stack([found.ids % len(documents()), found.starts, found.lengths], axis=1))
        return step

    def in_memory(prefix: str, **options: Any) -> Any:
        return megatron.pretraining(documents(), **options | {"max_tokens_per_rank": CONTEXT} | changes)

    def model_provider(*_: Any, **__: Any) -> Any:
        get_args().variable_seq_lengths = run.pp > 1
        config = core_transformer_config_from_args(get_args())
        config.batch_p2p_comm = False  # which NCCL has, and gloo has not
        config.deallocate_pipeline_outputs = False
        return build(run, config)[0]

    nothing: dict[str, Any] = dict.fromkeys(("Stream", "memory_stats", "reset_peak_memory_stats"), mock.DEFAULT)
    nothing["get_device_properties"] = lambda _: SimpleNamespace(major=9)
    start = functools.partial(megatron_training.initialize_megatron, allow_no_cuda=True)
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
    torch._dynamo.config.disable = True
    initialize(run)
    with (
        on_cpu(),
        warnings.catch_warnings(),
        mock.patch.multiple(
            torch.cuda, get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state, **nothing
        ),
        mock.patch.object(torch.nn.Module, "cuda", lambda module, *_: module),
        mock.patch.object(megatron_training, "initialize_megatron", start),
        mock.patch.object(megatron_initialize, "_compile_dependencies"),  # of data sets that are not used
        mock.patch.object(megatron.DataIterator, "__next__", noting),
        mock.patch.object(sys, "argv", ["pretrain", *arguments(folder, steps, run), *more]),
    ):
        warnings.simplefilter("ignore")
        names = of_page() | {"pretrain": pretrain, "model_provider": model_provider, "ModelType": ModelType}
        exec(block("def provider"), names | {"megatron": SimpleNamespace(pretraining=in_memory)})
    return pieces
