"""torchtitan where there is no GPU: what of it asks for one, and a configuration that is quick.

Its kernels have no gradients on the CPU: FlexAttention and varlen attention become softmax written out, by the very
masks that torchtitan makes. All else is torchtitan's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_cp

from tests.trainers import small_corpus

pytest.importorskip("torchtitan", reason="torchtitan is not installed: make test-trainers installs it")

import torchtitan.tools.utils as titan_utils

# Before any other file of torchtitan is read: they take these names over.
_ANSWERS: dict[str, Any] = {
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "get_device_name": lambda device: "CPU",
    "get_device_properties": lambda device: SimpleNamespace(total_memory=2**30),
    "memory_stats": lambda device: {},
    "get_rng_state": torch.get_rng_state,
    "set_rng_state": torch.set_rng_state,
}
_SILENT = ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize")
titan_utils.device_type = "cpu"
titan_utils.device_module = SimpleNamespace(**_ANSWERS, **dict.fromkeys(_SILENT, lambda *_: None))  # type: ignore

import torchtitan.trainer  # noqa: E402
from torchtitan.components.checkpointer import CheckpointManager  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common import attention as titan_attention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

VOCABULARY = 2048


def _flex(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: Any, enable_gqa: bool, **_: Any) -> Any:
    queries, keys = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None]
    seen = block_mask.mask_mod(torch.tensor(0), torch.tensor(0), queries, keys)
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, scale=scale, enable_gqa=enable_gqa)
    return out, SimpleNamespace(lse=None)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, *_: Any, scale: Any, **__: Any) -> Tensor:
    parts = []
    for begin, end in zip(cu_q[:-1].tolist(), cu_q[1:].tolist(), strict=True):
        rows = [row[begin:end].transpose(0, 1)[None] for row in (q, k, v)]
        parts.append(torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True, scale=scale))
    return torch.cat([part[0].transpose(0, 1) for part in parts])


titan_attention.FlexAttention.compiled_flex_attn = staticmethod(_flex)  # type: ignore[assignment]
titan_attention._compiled_create_block_mask = titan_attention.create_block_mask  # as it is: to compile takes longer
titan_attention.varlen_attn = _varlen
torchtitan.trainer.time = SimpleNamespace(**vars(torchtitan.trainer.time) | {"sleep": lambda _: None})  # type: ignore


def _on_gloo() -> None:
    """It does not multiply before it sums, which NCCL does for a divisor: sums are divided after it."""
    divide = FSDPModule.set_gradient_divide_factor

    def after(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        divide(self, factor)

    FSDPModule.set_gradient_divide_factor = after  # type: ignore[method-assign]


class Letters(BaseTokenizer):
    """A token for each letter."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, tokenizer_path: str) -> None:
        super().__init__()
        self.eos_id = 1

    def encode(self, text: str, *, add_bos: bool = False, add_eos: bool = False) -> list[int]:
        return [*[2] * add_bos, *map(ord, text), *[1] * add_eos]

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


def documents() -> list[dict[str, list[int]]]:
    """Those of the other trainers' tests, in this model's words."""
    return small_corpus.documents(VOCABULARY)


def config(
    folder: Path, *, attention: str = "flex", steps: int = 20, layers: int = 2, **options: Any
) -> Trainer.Config:
    """Of torchtitan's smallest Llama, as its registry would give it."""
    spec = model_registry("debugmodel", attn_backend=attention)
    spec.model.layers = spec.model.layers[:layers]
    parallelism = options.pop("parallelism", {})
    made = Trainer.Config(
        model_spec=spec,
        tokenizer=Letters.Config(),
        loss=options.pop("loss", CrossEntropyLoss.Config(global_vocab_size=VOCABULARY)),
        optimizer=default_adamw(lr=1e-3, eps=1e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1,
            global_batch_size=4,
            seq_len=small_corpus.CONTEXT,
            steps=steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(**parallelism),
        checkpoint=CheckpointManager.Config(enable=True, interval=7, last_save_model_only=False, keep_latest_k=0),
        activation_checkpoint=None,
        dump_folder=str(folder),
    )
    if made.parallelism.pipeline_parallel_degree > 1:
        made.training.local_batch_size = 4 // max(1, made.parallelism.data_parallel_shard_degree)
    made.metrics.log_freq = 1
    made.debug.enable_structured_logging = False
    made.debug.seed = 0
    for name, value in options.items():
        setattr(made, name, value)
    return made


def same_weights(parameters: Any) -> None:
    """By their names alone, however they are sharded."""
    for name, parameter in parameters:
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        whole = torch.randn(parameter.shape, generator=generator) * 0.05 + (parameter.ndim == 1)
        with torch.no_grad():
            if isinstance(parameter, torch.distributed.tensor.DTensor):
                mesh, placements = parameter.device_mesh, parameter.placements
                whole = torch.distributed.tensor.distribute_tensor(whole, mesh, placements, src_data_rank=None)
            parameter.copy_(whole)


def weights(model_parts: list[Any]) -> np.ndarray:
    found = {}
    for part in model_parts:
        for name, parameter in part.named_parameters():
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[name] = whole.detach().flatten()
    return torch.cat([found[name] for name in sorted(found)]).numpy()


def train(made: Any, *, after_step: Any = None) -> tuple[list[float], Any, list[dict[str, float]]]:
    """Losses of the steps, the trainer, and what its loggers got. In a process of its own, which it changes."""
    _on_gloo()
    torch_cp._compiled_create_block_mask = titan_attention.create_block_mask
    trainer = made.build()
    for part in trainer.model_parts:
        same_weights(part.named_parameters())
    losses: list[float] = []
    logged: list[dict[str, float]] = []

    class Logger:
        def log(self, metrics: dict[str, Any], step: int) -> None:
            logged.append(metrics)
            losses.append(metrics["loss_metrics/global_avg_loss"])

        def close(self) -> None:
            pass

    trainer.metrics_processor.logger = Logger()
    if after_step is not None:
        save = trainer.checkpointer.save

        def saving(step: int, **kwargs: Any) -> None:
            save(step, **kwargs)
            after_step(step)

        trainer.checkpointer.save = saving
    trainer.train()
    assert dist.is_initialized()
    return losses, trainer, logged
