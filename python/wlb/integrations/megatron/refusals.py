"""Refuses configurations of Megatron-Core that contradict a plan, by name and before anything is read."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from packaging.version import Version
from torch.utils.hooks import RemovableHandle

from wlb._errors import error
from wlb._warned import warn
from wlb.integrations.megatron.attention import PackedSelfAttention, ShardedSeqParams
from wlb.integrations.versions import OLDEST

NEWEST = (0, 20)  # the newest version that was checked


def check_version() -> None:
    """Refuses a megatron-core that is too old, and warns of one that is newer than the newest checked version.

    Raises:
        wlb.WlbError: it is older than 0.16, or its `PackedSeqParams` do not name the ranks of a row.
    """
    try:
        found = version("megatron-core")
    except PackageNotFoundError:  # sources on the path
        found = ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
    fields = {field.name for field in dataclasses.fields(PackedSeqParams)}
    missing = {"local_cp_size", "cp_group"} - fields
    needed = OLDEST["megatron-core"]
    if missing or (numbers and numbers < Version(needed).release):
        message = f"= {found or 'unknown'}: megatron-core >= {needed} is needed (its packed rows name their ranks)"
        raise error("megatron-core", message, value=found)
    if numbers > NEWEST:
        newest = ".".join(map(str, NEWEST))
        warn(f"megatron-core {found} is newer than {newest}, the last that wlb was tried with")


# Options that contradict packed rows: the reason, and what to do.
_SWITCHED_ON = {
    "hybrid_context_parallel": "plans groups by itself: leave it False, and give data_iterator dynamic_cp=True",
    "sequence_packing_scheduler": "packs by itself: leave it out",
    "dynamic_context_parallel": "plans groups by itself: leave it False, and give data_iterator dynamic_cp=True",
    "tp_comm_overlap": "needs rows of one length: leave it False",
    "reset_position_ids": "is for documents that are joined without plans: leave it False",
    "reset_attention_mask": "is for documents that are joined without plans: leave it False",
    "sft": "packs by itself: leave it False",
    "use_ring_exchange_p2p": "needs rows of one length: leave it False",
}


def check_config(config: Any, *, dynamic_cp: bool) -> None:
    """Refuses configurations that would train other documents than the plan, or weigh them differently.

    Raises:
        wlb.WlbError: naming the first such field.
    """
    for name, why in _SWITCHED_ON.items():
        if value := getattr(config, name, None):
            raise error(name, f"= {value!r}: {why}", value=value)
    if not config.calculate_per_token_loss:
        message = "= False: micro-batches would count alike, although their numbers of labels differ; set it to True"
        raise error("calculate_per_token_loss", message, value=False)
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        message = "= False: stages would expect micro-batches of equal length; set it to True"
        raise error("variable_seq_lengths", message, value=False)
    two_interleaved = config.virtual_pipeline_model_parallel_size and config.pipeline_model_parallel_size == 2
    if two_interleaved and not config.overlap_p2p_comm:
        message = "= False: two interleaved stages would mix up the shapes of both directions; "
        message += "set it to True, and batch_p2p_comm=False"
        raise error("overlap_p2p_comm", message, value=False)
    if (graphs := getattr(config, "cuda_graph_impl", "none")) not in ("none", None):
        raise error("cuda_graph_impl", f"= {graphs!r}: needs rows of one length; leave it out", value=graphs)
    if dynamic_cp and config.context_parallel_size != 1:
        size = config.context_parallel_size
        message = f"= {size}: with dynamic_cp the groups are the plan's, among all data-parallel ranks; leave it at 1"
        raise error("context_parallel_size", message, value=size)
    for name in ("multi_latent_attention", "mtp_num_layers"):
        if dynamic_cp and (value := getattr(config, name, None)):
            raise error(name, f"= {value}: Megatron-Core does not run it over a micro-batch's own ranks", value=value)


def routers_learn(config: Any) -> bool:
    """Whether routers of experts learn from the distribution of tokens, by a loss or by counts."""
    if not getattr(config, "num_moe_experts", None):
        return False
    kinds, found = config.moe_router_load_balancing_type, config.moe_aux_loss_coeff
    coefficients = found if isinstance(found, list) else [found]
    balanced = kinds not in ("none", ["none"]) and any(coefficients)
    return bool(balanced or config.moe_z_loss_coeff or config.moe_router_enable_expert_bias)


def check_experts(config: Any) -> None:
    """Refuses experts that padding takes room from, or whose routers would learn from padding.

    Raises:
        wlb.WlbError: naming the first such field of the configuration.
    """
    if not getattr(config, "num_moe_experts", None):
        return
    refused = {}
    if config.moe_expert_capacity_factor is not None:
        refused["moe_expert_capacity_factor"] = "padding would take room of the experts from real tokens"
    kinds = config.moe_router_load_balancing_type
    if "sinkhorn" in (kinds if isinstance(kinds, list) else [kinds]):
        refused["moe_router_load_balancing_type"] = "real tokens would be routed by what padding takes"
    if config.moe_router_enable_expert_bias and not _bias_leaves_out_padding():
        refused["moe_router_enable_expert_bias"] = (
            "this version of Megatron-Core cannot leave padding out of its counts"
        )
    if getattr(config, "mtp_num_layers", None) and routers_learn(config):
        refused["mtp_num_layers"] = (
            "layers of multi-token prediction are not told which tokens are padding, from which their routers would "
            "learn; make moe_aux_loss_coeff and moe_z_loss_coeff 0"
        )
    for name, why in refused.items():
        value = getattr(config, name)
        message = f"= {value!r}: rows are padded (context or sequence parallelism, FP8, multiple_of_tokens), and {why}"
        raise error(name, message, value=value)


def _bias_leaves_out_padding() -> bool:
    """Whether the counts behind the biases of experts leave out padding; 0.16 fails if there is padding."""
    counting = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2))
    count = inspect.unwrap(TopKRouter._apply_expert_bias)
    try:
        with torch.enable_grad():
            count(counting, torch.ones(3, 2, dtype=torch.bool), torch.tensor([False, False, True]))
    except RuntimeError:
        return False
    return bool((counting.local_tokens_per_expert == 2).all())


def require_masks(chunks: Sequence[Any], config: Any, *, padded: bool) -> list[RemovableHandle]:
    """Stops a model at its first forward pass of packed rows if it needs a mask of padding and does not get it.

    Args:
        chunks: of the model on this rank; empty if only its configuration is known.
        config: of the model.
        padded: whether rows may have padding.

    Returns:
        Hooks to remove at the end.

    Warns:
        UserWarning: the model needs a mask, and without the model itself nobody sees whether it gets one.
    """
    predicts, learns = bool(getattr(config, "mtp_num_layers", None)), routers_learn(config)
    if not predicts and not learns:
        return []
    masks = [name for name, needed in (("loss_mask", predicts), ("padding_mask", learns and padded)) if needed]
    if masks and not chunks:
        given = ", ".join(f"{name}=batch.{name}" for name in masks)
        warn(
            f"model is a configuration, so it is not checked that the forward step calls model(..., {given}), without "
            "which the model learns where there is no label, or from padding: give data_iterator the model itself, or "
            "make sure of it"
        )

    def check(model: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(type(model).forward).bind(model, *args, **kwargs).arguments
        row = given.get("packed_seq_params")
        if not isinstance(row, ShardedSeqParams):
            return
        if predicts and given.get("labels") is not None and given.get("loss_mask") is None:
            message = (
                "is not given to the model, which would learn further tokens at every position, also where there is no "
                "label: model(..., loss_mask=batch.loss_mask)"
            )
            raise error("loss_mask", message)
        if learns and row.padded and given.get("padding_mask") is None:
            message = (
                "is not given to the model, whose routers would learn from padding: "
                "model(..., padding_mask=batch.padding_mask)"
            )
            raise error("padding_mask", message)

    return [unwrap_model(chunk).register_forward_pre_hook(check, with_kwargs=True) for chunk in chunks]


def check_layers(chunks: list[Any]) -> None:
    """Refuses layers that use the ranks of the model, because in a Dynamic-CP plan each micro-batch has its own ranks.

    Raises:
        wlb.WlbError: they are recurrent, or their attention takes positions for the ranks of the model.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        name = type(module).__name__
        if name in _RECURRENT:
            message = f"has layers of the kind {name}, which go by the model's ranks, not by those of a micro-batch"
            raise error("model", message, value=name)
        if isinstance(module, SelfAttention) and not isinstance(module, PackedSelfAttention):
            message = "takes positions by the model's ranks, not by those of a micro-batch: make its layers of "
            message += "wlb.integrations.megatron.packed_layers(spec, core_attention=False)"
            raise error("model", f"has layers whose {name} {message}", value=name)


_RECURRENT = {"MambaMixer", "GatedDeltaNet"}


def check_interleaved(num_microbatches: int, config: Any) -> None:
    """Refuses a number of micro-batches that Megatron-Core's interleaved schedule cannot run.

    Raises:
        wlb.WlbError: it is smaller than a group of them, or leaves a last group smaller than the number of stages.
    """
    if not config.virtual_pipeline_model_parallel_size:
        return
    group, stages = config.microbatch_group_size_per_vp_stage, config.pipeline_model_parallel_size
    if num_microbatches < group or 0 < num_microbatches % group < stages:
        message = f"= {group}: does not go with {num_microbatches} micro-batches and {stages} stages"
        raise error("microbatch_group_size_per_vp_stage", message, value=num_microbatches)
