"""torchtitan's Trainer with a plan: sets micro-batches of a step, cuts rows for ranks, and logs figures."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.distributed.spmd_types import annotate_input_spmd_types
from torchtitan.models.common.attention import FlexAttention
from torchtitan.tools.logging import logger

from wlb.integrations.torchtitan.context_parallel import shard_for_flex, shard_for_varlen, with_document_attention
from wlb.integrations.torchtitan.costs import cost_of_model
from wlb.integrations.torchtitan.experts import RealTokens
from wlb.integrations.torchtitan.loader import WlbDataLoader
from wlb.integrations.torchtitan.pipeline import over_unequal_micro_batches, token_shares
from wlb.integrations.torchtitan.proof import prove
from wlb.integrations.torchtitan.refusals import check_config, inner_attentions
from wlb.reading.sizes import micro_batches

if TYPE_CHECKING:
    from torchtitan.trainer import Trainer as _Trainer
else:
    _Trainer = object


class BalancedTrainer(_Trainer):
    """Class in front of a trainer's own class."""

    _wlb_loader: WlbDataLoader
    _wlb_real: RealTokens

    def __init__(self, config: Any) -> None:
        check_config(config)
        spec, parallelism = copy.copy(config.model_spec), config.parallelism
        if parallelism.pipeline_parallel_degree > 1 and spec.pipelining_fn is not None:
            spec.pipelining_fn = over_unequal_micro_batches(spec.pipelining_fn)
        if parallelism.context_parallel_degree > 1:
            spec.model = with_document_attention(spec.model)
        super().__init__(replace(config, model_spec=spec))
        loader: Any = self.dataloader
        self._wlb_loader = loader
        self._wlb_real = RealTokens(self.model_parts)
        per_rank = self.config.dataloader.micro_batches
        self.gradient_accumulation_steps = per_rank // self.num_pipeline_parallel_microbatches
        logger.info(
            "wlb: %d micro-batches of at most %d tokens a rank and step, %d tokens a step",
            per_rank,
            self.config.dataloader.most_tokens(),
            self.config.dataloader.tokens_per_batch,
        )
        if self.config.dataloader.verify:
            loader.before_first = partial(prove, self)
        log = self.metrics_processor.log

        def with_plans(*args: Any, extra_metrics: dict[str, Any] | None = None, **kwargs: Any) -> None:
            log(*args, extra_metrics=(extra_metrics or {}) | loader.figures, **kwargs)

        self.metrics_processor.log = with_plans

    def init_distributed(self) -> Any:
        """Also sets the ranks in the loader's configuration: now they are known, and the loader is not yet built."""
        ranks = super().init_distributed()
        self.config.dataloader = _for_ranks(self.config, ranks)
        return ranks

    def batch_generator(self, data_iterable: Any) -> Any:
        """Checks that the data are at the trainer's step. Called once the checkpoint is loaded.

        Raises:
            wlb.WlbError: they are not.
        """
        if data_iterable is self._wlb_loader:
            self._wlb_loader.check_begin(self.step)
        return super().batch_generator(data_iterable)

    def post_dataloading_process(
        self, input_dict: dict[str, Any], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Input of one context-parallel rank: masks of the whole row, and the rank's part of the row.

        Padding is not counted, neither as tokens nor as visits of experts.
        """
        input_dict = dict(input_dict)
        filler, tokens = input_dict.pop("filler", 0), labels.shape[1]
        self.metrics_processor.ntokens_since_last_log -= filler
        padding = torch.arange(tokens, device=labels.device)[None] >= tokens - filler
        if not self.parallel_dims.cp_enabled:
            self.ntokens_seen -= filler
            self._wlb_real.padding = padding[0] if filler else None
            return super().post_dataloading_process(input_dict, labels)
        mesh = self.parallel_dims.get_mesh("cp")
        rows: tuple[Tensor, ...] = (input_dict["input"], labels, input_dict["positions"], padding)
        inner = self.model_config.first_attention.inner_attention
        if isinstance(inner, FlexAttention.Config):
            masks = self.model_parts[0].get_attention_masks(positions=input_dict["positions"])
            rows, masks = shard_for_flex(mesh, rows, masks, input_dict["lengths"], block=_query_block(inner))
        else:
            rows, masks = shard_for_varlen(mesh, rows, input_dict["lengths"])
        inputs, labels, positions, padding = rows
        self._wlb_real.padding = padding[0] if filler else None
        self.ntokens_seen += labels.numel() - (int(padding.sum()) if filler else 0)
        kwargs = {"positions": positions, "attention_masks": masks}
        return annotate_input_spmd_types(self.parallel_dims, inputs, labels, kwargs)

    def close(self) -> None:
        """Also ends the reading of streams."""
        if hasattr(self, "_wlb_loader"):
            self._wlb_loader.close()
        super().close()


def _query_block(inner: Any) -> int:
    size = inner.block_size
    return size if isinstance(size, int) else size[0]


def _for_ranks(config: Any, ranks: Any) -> WlbDataLoader.Config:
    """The loader's configuration, with the values that depend on the numbers of ranks."""
    loader, training, parallelism = config.dataloader, config.training, config.parallelism
    replicas = ranks.dp_replicate * ranks.dp_shard
    tokens = loader.tokens_per_batch
    if tokens is None:
        rows = training.global_batch_size
        tokens = (rows if rows > 0 else training.local_batch_size * replicas) * training.seq_len
    loader = replace(
        loader, multiple_of_tokens=math.lcm(ranks.cp * loader.multiple_of_tokens, _multiple(config, ranks))
    )
    together = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size if ranks.pp_enabled else 1
    model = config.model_spec.model
    # FSDP gathers parameters in every micro-batch, but the stages of a pipeline keep them for a step.
    meet = ranks.dp_shard > 1 and not ranks.pp_enabled
    return replace(
        loader,
        sync=("micro_batch" if meet else "step") if loader.sync is None else loader.sync,
        tokens_per_batch=tokens,
        micro_batches=micro_batches(tokens, ranks=replicas, max_tokens=loader.most_tokens(), together=together),
        cost_model=cost_of_model(model) if loader.cost_model is None else loader.cost_model,
        group=ranks.get_mesh("batch").get_group() if ranks.dp_enabled and loader.group is None else loader.group,
        give_lengths=ranks.cp_enabled,
        give_filler=True,
    )


def _multiple(config: Any, ranks: Any) -> int:
    """Multiple of a row's tokens that context- and tensor-parallel ranks and the chunks of the loss can divide."""
    chunks = config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1
    shares = token_shares(ranks, config.parallelism)
    block = 1
    if ranks.cp_enabled:
        inner = inner_attentions(config.model_spec.model)[0]
        block = _query_block(inner) if isinstance(inner, FlexAttention.Config) else 1
    return int(ranks.cp * math.lcm(chunks, shares, block))
