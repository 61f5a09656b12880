"""What a run of Megatron-Core must and must not be, told by name before anything is read."""

from __future__ import annotations

import dataclasses
import re
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from packaging.version import Version

from wlb._errors import error
from wlb.integrations.megatron.attention import PackedSelfAttention
from wlb.integrations.megatron.multiples import quantized_multiple
from wlb.integrations.versions import OLDEST

NEWEST = (0, 20)  # the last that was looked at


def check_version() -> None:
    """Refuses a megatron-core that is too old; warns of one that is newer than what was looked at.

    Raises:
        wlb.WlbError: It is older than 0.16, or its `PackedSeqParams` do not name the ranks of a row.
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
        message = f"= {found or 'unknown'}: megatron-core >= {needed} is needed, whose packed rows name their ranks"
        raise error("megatron-core", message, value=found)
    if numbers > NEWEST:
        newest = ".".join(map(str, NEWEST))
        warnings.warn(f"megatron-core {found} is newer than {newest}, the last that wlb was tried with", stacklevel=3)


# Switch of a configuration: what it does against packed rows, and what to do.
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
    """Refuses what would train other documents, or weigh them otherwise, than the plan says.

    Raises:
        wlb.WlbError: Naming the first field of the configuration that does.
    """
    for name, why in _SWITCHED_ON.items():
        if value := getattr(config, name, None):
            raise error(name, f"= {value!r}: {why}", value=value)
    if not config.calculate_per_token_loss:
        message = "= False: would weigh micro-batches alike, though they hold other numbers of labels; set it"
        raise error("calculate_per_token_loss", message, value=False)
    if config.pipeline_model_parallel_size > 1 and not config.variable_seq_lengths:
        message = "= False: stages would take all micro-batches for equally long; set it"
        raise error("variable_seq_lengths", message, value=False)
    two_interleaved = config.virtual_pipeline_model_parallel_size and config.pipeline_model_parallel_size == 2
    if two_interleaved and not config.overlap_p2p_comm:
        message = "= False: two interleaved stages would take the shapes of one direction for those of the other; "
        message += "set it, and batch_p2p_comm=False"
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


def alignment_of(config: Any) -> int:
    """The multiple to which Megatron-Core's own sequence packing pads a rank's rows.

    Raises:
        wlb.WlbError: the kernels of FP8 or FP4 do not take such rows.
    """
    demanded = quantized_multiple(config)
    given = getattr(config, "pad_packed_seq_alignment", None)
    rows = config.max_seqlen_per_dp_cp_rank if given == "max" else given or 1
    if rows % demanded:
        message = f"= {given}: the kernels of FP8 and FP4 take rows of multiples of {demanded} tokens; make it one"
        raise error("pad_packed_seq_alignment", message, value=given)
    return int(rows)


def check_layers(chunks: list[Any]) -> None:
    """Refuses layers that go by the model's ranks where a Dynamic-CP plan gives each micro-batch its own.

    Raises:
        wlb.WlbError: They are recurrent, or their attention takes positions so.
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
    """Refuses a number of micro-batches that Megatron-Core's interleaved schedule does not take.

    Raises:
        wlb.WlbError: It is smaller than a group of them, or leaves a last group below the number of stages.
    """
    if not config.virtual_pipeline_model_parallel_size:
        return
    group, stages = config.microbatch_group_size_per_vp_stage, config.pipeline_model_parallel_size
    if num_microbatches < group or 0 < num_microbatches % group < stages:
        message = f"= {group}: does not go with {num_microbatches} micro-batches and {stages} stages"
        raise error("microbatch_group_size_per_vp_stage", message, value=num_microbatches)
