"""The proof before a trainer's first step: compares torchtitan's forward and backward with each document alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import utils as distributed
from torchtitan.tools.logging import logger
from torchtitan.trainer import DataloaderExhaustedError

from wlb.integrations.torchtitan.loader import WlbDataLoader, of_replicas
from wlb.torch.data import PackedBatch, Step, StepLoader, collate
from wlb.torch.proof import Proof, verify


def prove(trainer: Any, step: Step[PackedBatch]) -> None:
    """Runs `wlb.torch.verify` on a trainer's own forward and backward of a step, with all wrappers.

    If a rank has the whole model and whole rows, it compares with logits of each document alone. With pipeline, tensor
    and context parallelism, and with a loss of another kind, it compares with the same documents in rows of their own.
    The state to check is the one that the Trainer would save after a step.

    Raises:
        wlb.WlbError: as `wlb.torch.verify`.
    """
    ranks, loader = trainer.parallel_dims, trainer.dataloader
    mesh = ranks.get_optional_mesh("batch")
    shared = ranks.pp_enabled or ranks.tp_enabled or ranks.cp_enabled
    loss = trainer.loss_fn.loss_fn if isinstance(trainer.loss_fn, ChunkedLossWrapper) else trainer.loss_fn
    parts = trainer.model_parts
    with _as_it_was(trainer):
        verify(
            parts[0] if len(parts) == 1 else nn.ModuleList(parts),
            step,
            train=lambda of: _trained(trainer, [loader.row(batch) for batch in of.micro_batches]),
            alone="rows" if shared or type(loss) is not CrossEntropyLoss else partial(_alone, trainer),
            loader=(lambda: _Steps(trainer)) if isinstance(loader.steps, StepLoader) else None,
            save=lambda steps, _: steps.loader.state_dict(),
            group=of_replicas(mesh.get_group() if mesh is not None else None),
            dtype=_coarsest(trainer),
            report=_report if dist.get_rank() == 0 else None,
        )


def _report(proof: Proof) -> None:
    logger.info("wlb: packed rows against documents alone\n%s", proof)


def _coarsest(trainer: Any) -> torch.dtype:
    if has_quantization(trainer.model_config):
        return torch.float8_e4m3fn  # FP8 scales depend on all documents of a row
    return TORCH_DTYPE_MAP[trainer.config.training.mixed_precision_param]


def _trained(trainer: Any, rows: list[tuple[dict[str, Any], Tensor]]) -> float:
    """Forward and backward of a step as in torchtitan's `train_step`; the mean loss, equal on all ranks."""
    ranks, each = trainer.parallel_dims, trainer.num_pipeline_parallel_microbatches
    rows = rows + [trainer.dataloader.row(collate([]))] * (-len(rows) % each)
    valid = sum((labels != IGNORE_INDEX).sum() for _, labels in rows).to(trainer.device)  # type: ignore[union-attr]
    if ranks.dp_enabled:
        valid = distributed.dist_sum_tensor(valid, ranks.get_mesh("batch"))
    if not int(valid):
        return 0.0  # steps without labels are not trained
    total = torch.zeros((), device=trainer.device)
    for at in range(0, len(rows), each):
        inputs = [_on(row, trainer.device) for row, _ in rows[at : at + each]]
        labels = [predicted.to(trainer.device) for _, predicted in rows[at : at + each]]
        given = (inputs, labels) if ranks.pp_enabled else (inputs[0], labels[0])
        loss = trainer.forward_backward_step(input_dict=given[0], labels=given[1], global_valid_tokens=valid)
        total += loss.detach().reshape(())
    if ranks.dp_cp_enabled:
        total.fill_(distributed.dist_sum(total, ranks.get_optional_mesh("loss")))
    if ranks.pp_enabled:  # the last stage has it
        total = total if trainer.pp_has_last_stage else torch.full_like(total, -torch.inf)
        total.fill_(distributed.dist_max(total, ranks.get_mesh("pp")))
    return float(total)


def _on(row: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in row.items()}


def _alone(trainer: Any, model: Any, batch: PackedBatch) -> Tensor:
    """Logits of one document, with the masks and the context that the trainer makes."""
    row, labels = trainer.dataloader.row(batch.to("cpu"))
    inputs, _, keywords = trainer.post_dataloading_process(_on(row, trainer.device), labels.to(trainer.device))
    hidden = getattr(model, "_skip_lm_head", False)  # a chunked loss applies the head itself
    try:
        if hidden:
            model._skip_lm_head = False
        with trainer.train_context():
            logits: Tensor = model(inputs, **keywords)
    finally:
        if hidden:
            model._skip_lm_head = hidden
    return logits[0, : batch.tokens.numel()]


class _Steps:
    """Steps for the proof, from a second loader, which is read as the trainer reads its own."""

    def __init__(self, trainer: Any) -> None:
        mesh = trainer.parallel_dims.get_optional_mesh("batch")
        size, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
        config = trainer.dataloader.config
        self.loader: WlbDataLoader = config.build(
            dp_world_size=size, dp_rank=rank, tokenizer=trainer.tokenizer, seq_len=trainer.config.training.seq_len
        )
        self._rows = trainer.batch_generator(self.loader)
        self._each = trainer.gradient_accumulation_steps * trainer.num_pipeline_parallel_microbatches

    def __iter__(self) -> Iterator[Step[PackedBatch]]:
        while True:
            try:
                for _ in range(self._each):
                    next(self._rows)
            except DataloaderExhaustedError:
                return
            assert self.loader.step is not None
            yield self.loader.step

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues with the step after the one that has this state."""
        self.loader.load_state_dict(state)


@contextmanager
def _as_it_was(trainer: Any) -> Iterator[None]:
    """Runs without CUDA graphs, which have only one shape; restores the trainer's counts."""
    metrics = trainer.metrics_processor
    seen, since, times = trainer.ntokens_seen, metrics.ntokens_since_last_log, list(metrics.data_loading_times)
    captured, trainer.fwd_bwd_fn = trainer.fwd_bwd_fn, trainer._forward_backward_body
    try:
        yield
    finally:
        trainer.fwd_bwd_fn = captured
        trainer.ntokens_seen, metrics.ntokens_since_last_log, metrics.data_loading_times = seen, since, times
