"""Refuses configurations of torchtitan that contradict a plan, by name and before anything is built."""

from __future__ import annotations

from typing import Any

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common.attention import FlexAttention, GQAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.trainer import Trainer

from wlb._errors import error
from wlb._warned import warn
from wlb.integrations.torchtitan.experts import check_experts

_HOOKS = ("init_distributed", "post_dataloading_process", "train_step", "close")


def check_config(config: Any) -> None:
    """Refuses configurations that cannot be balanced.

    Raises:
        wlb.WlbError: the first reason, and what to do about it.
    """
    if not isinstance(config, Trainer.Config):
        kind = f"{type(config).__module__}.{type(config).__qualname__}"
        raise error("config", f"is a {kind}, not torchtitan's Trainer.Config", value=kind)
    missing = [name for name in _HOOKS if not hasattr(Trainer, name)]
    if missing:
        raise error("torchtitan", f"has no Trainer.{missing[0]}: it is newer than this version of wlb knows")
    if config.model_spec is None:
        raise error("config", "has no model_spec: there is nothing to train")
    _check_model(config)
    _check_parallelism(config)
    _check_shapes(config)
    check_experts(config)


def check_dataloader(loader: Any) -> None:
    """Refuses a data loader from which no data set can be taken, if balance got no documents.

    Raises:
        wlb.WlbError: it packs by itself, which a plan cannot keep; or it has no data set.
    """
    if type(loader) in (BaseDataLoader.Config, HuggingFaceTextDataLoader.Config):
        return
    kind = type(loader).__qualname__
    raise error("dataloader", f"is a {kind}, which packs in its own way: give balance documents or streams", value=kind)


def inner_attentions(model: Any) -> list[Any]:
    """The attention kernels of a model's configuration, layer by layer."""
    attentions = [getattr(layer, "attention", None) for layer in model.layers]
    return [attention.inner_attention for attention in attentions if attention is not None]


def _is_varlen(model: Any) -> bool:
    return any(isinstance(inner, VarlenAttention.Config) for inner in inner_attentions(model))


def _check_model(config: Any) -> None:
    model = config.model_spec.model
    if not isinstance(model, Decoder.Config):
        kind = type(model).__qualname__
        raise error("model_spec", f"is a {kind}: rows of documents are for torchtitan's decoders", value=kind)
    if hasattr(model, "vision_encoder"):
        raise error("model_spec", "has a vision encoder: rows of documents bring no pictures")
    for index, inner in enumerate(inner_attentions(model)):
        if not isinstance(inner, (FlexAttention.Config, VarlenAttention.Config)):
            kind = type(inner).__qualname__.removesuffix(".Config")
            message = f"has {kind}, in which documents see each other: take attn_backend='flex' or 'varlen'"
            raise error("model_spec", message, index=index, value=kind)


def _check_parallelism(config: Any) -> None:
    parallelism, model = config.parallelism, config.model_spec.model
    varlen = _is_varlen(model)
    pp, cp = parallelism.pipeline_parallel_degree, parallelism.context_parallel_degree
    if pp > 1 and parallelism.pipeline_parallel_schedule_csv:
        message = "gives a schedule for one number of micro-batches: name one in pipeline_parallel_schedule"
        raise error("pipeline_parallel_schedule_csv", message, value=parallelism.pipeline_parallel_schedule_csv)
    if config.validator.enable and (pp > 1 or (cp > 1 and varlen)):
        what = "wlb's pipeline stages, which need a plan for every step" if pp > 1 else "sharded varlen attention"
        raise error("validator", f"= enabled: cannot run in {what}; evaluate in a run of its own", value=True)
    if cp == 1:
        return
    ours = __name__.rpartition(".")[0]
    sharding = (cls for cls in type(config)._owner.__mro__ if "post_dataloading_process" in vars(cls))
    own = next(cls for cls in sharding if not cls.__module__.startswith(ours))
    if own is not Trainer:
        message = f"has a post_dataloading_process of its own ({own.__name__}), which shards in another way"
        raise error("context_parallel_degree", message, value=cp)
    if parallelism.spmd_backend != "spmd_types":
        message = f"= {parallelism.spmd_backend!r}: context parallelism is here for 'spmd_types'"
        raise error("spmd_backend", message, value=parallelism.spmd_backend)
    if not varlen:
        return
    for index, layer in enumerate(model.layers):
        attention = layer.attention
        if not isinstance(attention, GQAttention.Config) or not isinstance(
            attention.inner_attention, VarlenAttention.Config
        ):
            message = "is no grouped-query attention over varlen: shard this model with attn_backend='flex'"
            raise error("model_spec", message, index=index, value=type(attention).__qualname__)
        if attention.inner_attention.window_size[1] != 0:
            message = f"has window_size {attention.inner_attention.window_size}: only causal attention is sharded"
            raise error("model_spec", message, index=index, value=attention.inner_attention.window_size)


def _check_shapes(config: Any) -> None:
    buckets = getattr(config.dataloader, "token_buckets", ())
    graphs = not config.training.disable_cuda_graphs
    if graphs and sum(bucket <= config.dataloader.max_tokens for bucket in buckets) != 1:
        message = "= False: a graph has one shape, and micro-batches are of unequal length; make it True, or give one "
        message += "token bucket"
        raise error("disable_cuda_graphs", message, value=False)
    if graphs and _is_varlen(config.model_spec.model):
        message = "= False: a graph has one shape, and varlen attention takes as many offsets as a row has documents; "
        message += "make it True, or take attn_backend='flex'"
        raise error("disable_cuda_graphs", message, value=False)
    if config.compile.enable and not buckets:
        message = "compile.enable without token_buckets: every length of a micro-batch may be compiled anew"
        warn(message)
