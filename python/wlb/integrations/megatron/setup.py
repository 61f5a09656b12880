"""The sizes of a run's rows and its options, checked against the model before anything is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from megatron.core.distributed import TorchFullyShardedDataParallel
from megatron.core.utils import get_model_config, unwrap_model

import wlb
from wlb._errors import check_integer, error
from wlb.integrations.megatron.costs import cost_of
from wlb.integrations.megatron.groups import NOT_HERE
from wlb.integrations.megatron.multiples import required_multiple, row_multiple
from wlb.integrations.megatron.refusals import check_config, check_experts, check_layers, check_version
from wlb.reading.sizes import ROOM, micro_batches
from wlb.torch.data.loading import Loading

# Arguments of plans that are computed from the model and the ranks.
_SET_HERE: Final = ("options", "world_size", "num_stages", "num_virtual_stages", "costs", "attention_costs", "ids")


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """A model, the sizes of its rows in tokens, and the options of its reader.

    Attributes:
        config: the model's `TransformerConfig`.
        chunks: its chunks on this rank; empty if only the configuration is known.
        dynamic_cp: whether every micro-batch has its own groups of ranks.
        loading: options of the reader, with `cost_model` and `max_document_tokens`.
        planning: options of `wlb.plan_dynamic_cp`, with `max_cp_size`; empty without Dynamic-CP.
        max_tokens_per_rank: most tokens of a row on a rank.
        tokens_per_batch: tokens of a step on all ranks.
        cp_size: number of ranks of a row; with Dynamic-CP the most.
        document_multiple: documents are padded to a multiple of it.
        row_multiple: a rank's rows are padded to a multiple of it.
    """

    config: Any
    chunks: list[Any]
    dynamic_cp: bool
    loading: Loading
    planning: dict[str, Any]
    max_tokens_per_rank: int
    tokens_per_batch: int
    cp_size: int
    document_multiple: int
    row_multiple: int

    @classmethod
    def of(
        cls,
        model: Any,
        *,
        world_size: int,
        max_tokens_per_rank: int,
        tokens_per_batch: int,
        dynamic_cp: bool,
        multiple_of_tokens: int,
        options: Mapping[str, Any],
        function: Callable[..., Any],
    ) -> Setup:
        """Checks the arguments of `data_iterator`, which is `function`; `world_size` counts data x context ranks.

        Raises:
            wlb.WlbError: as `data_iterator`.
        """
        loading, planning = Loading.of(options, wlb.plan_dynamic_cp, function, but=(*_SET_HERE, *NOT_HERE))
        check_version()
        config, chunks = _parts_of(model)
        check_config(config, dynamic_cp=dynamic_cp)
        if dynamic_cp:
            if not chunks:
                message = "is a configuration: with dynamic_cp give the model itself, whose layers are looked at"
                raise error("model", message)
            check_layers(chunks)
        _check_options(loading, planning, dynamic_cp=dynamic_cp)
        check_integer("max_tokens_per_rank", max_tokens_per_rank, minimum=1)
        check_integer("tokens_per_batch", tokens_per_batch, minimum=1)
        cp_size = config.context_parallel_size
        if dynamic_cp:
            largest = planning.get("max_cp_size")
            largest = world_size if largest is None else largest
            check_integer("max_cp_size", largest, minimum=1, maximum=world_size)
            cp_size = 1 << (largest.bit_length() - 1)  # groups are powers of two
            planning = {**planning, "max_cp_size": cp_size}
        setup = cls(
            config=config,
            chunks=chunks,
            dynamic_cp=dynamic_cp,
            loading=replace(loading, cost_model=_cost_model(loading, config, chunks)),
            planning=planning,
            max_tokens_per_rank=max_tokens_per_rank,
            tokens_per_batch=tokens_per_batch,
            cp_size=cp_size,
            document_multiple=required_multiple(cp_size=cp_size),
            row_multiple=row_multiple(config, cp_size=cp_size, multiple_of_tokens=multiple_of_tokens),
        )
        return setup._checked()

    @property
    def padded(self) -> bool:
        """Whether rows may have padding."""
        return self.document_multiple > 1 or self.row_multiple > 1

    @property
    def held(self) -> int:
        """Tokens that the ranks of a micro-batch hold together."""
        return self.max_tokens_per_rank * self.cp_size

    @property
    def shape(self) -> dict[str, Any]:
        """Padding of the packer's micro-batches; with Dynamic-CP they only decide which rank reads a document."""
        return {} if self.dynamic_cp else {"multiple_of_tokens": self.row_multiple, "cp_size": self.cp_size}

    def packer(self, readers: int) -> wlb.Packer:
        """The packer for this number of ranks that read different documents."""
        if self.dynamic_cp:
            count, context = readers, self.loading.max_document_tokens or 0
            most = max(context, math.ceil(ROOM * self.tokens_per_batch / readers))
        else:
            # The fewest micro-batches with some room that the schedule accepts.
            virtual = self.config.virtual_pipeline_model_parallel_size
            together = self.config.microbatch_group_size_per_vp_stage if virtual else 1
            most = self.held
            each = micro_batches(self.tokens_per_batch, ranks=readers, max_tokens=most, together=together)
            count = readers * each
        limits = {"max_tokens": most, "tokens_per_batch": self.tokens_per_batch, **self.shape}
        meet = not self.dynamic_cp and any(map(_is_sharded, self.chunks))
        return self.loading.packer(count, ranks=readers, meet=meet, cost_model=self.loading.cost_model, **limits)

    def _checked(self) -> Setup:
        """Itself, with the most tokens of a document."""
        if self.padded:
            check_experts(self.config)
        given, multiple = self.max_tokens_per_rank, self.row_multiple
        if given % multiple:
            less = given // multiple * multiple or multiple
            message = f"= {given}: rows are padded to multiples of {multiple}, and would be longer; make it {less}"
            raise error("max_tokens_per_rank", message, value=given)
        longest, multiple = self.loading.max_document_tokens, self.document_multiple
        longest = self.held // multiple * multiple if longest is None else longest
        check_integer("max_document_tokens", longest, minimum=1, maximum=self.held)
        if longest % multiple:
            message = f"= {longest}: documents are padded to multiples of {multiple}; make it one"
            raise error("max_document_tokens", message, value=longest)
        return replace(self, loading=replace(self.loading, max_document_tokens=longest))


def _parts_of(model: Any) -> tuple[Any, list[Any]]:
    """The configuration of a model, and its chunks. For a configuration: itself, and no chunks."""
    if hasattr(model, "calculate_per_token_loss"):
        return model, []
    chunks = model if isinstance(model, list) else [model]
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        found = type(model).__name__
        raise error("model", f"is a {found}: must be a model of Megatron-Core, or its configuration", value=found)
    return get_model_config(chunks[0]), chunks


def _is_sharded(chunk: Any) -> bool:
    """Whether FSDP makes ranks wait in every micro-batch: there they gather parameters, or add up gradients."""
    if isinstance(chunk, TorchFullyShardedDataParallel):
        return True
    config = getattr(chunk, "ddp_config", None)
    divided = getattr(config, "data_parallel_sharding_strategy", None)
    return getattr(config, "use_megatron_fsdp", False) and divided in ("optim_grads", "optim_grads_params")


def _check_options(loading: Loading, planning: Mapping[str, Any], *, dynamic_cp: bool) -> None:
    """Refuses options that Megatron-Core's batches, or plans without Dynamic-CP, have no place for."""
    refused = [
        (name, "is an option of Dynamic-CP plans: give dynamic_cp=True with it", value)
        for name, value in planning.items()
        if not dynamic_cp
    ]
    if names := list(loading.columns):
        message = f"= {names}: Megatron-Core's batches have no place for further columns; leave it out"
        refused.append(("columns", message, names))
    if (ahead := loading.labels_ahead) > 1:
        message = f"= {ahead}: Megatron-Core's multi-token prediction looks ahead by itself; leave it out"
        refused.append(("labels_ahead", message, ahead))
    for name, message, value in refused:
        raise error(name, message, value=value)


def _cost_model(loading: Loading, config: Any, chunks: list[Any]) -> wlb.CostModel:
    if loading.cost_model is not None:
        return loading.cost_model
    vocab_size = getattr(unwrap_model(chunks[0]), "vocab_size", None) if chunks else None
    if vocab_size is None:
        message = "is missing: wlb cannot make it without the vocab_size of a model; a configuration has none"
        raise error("cost_model", message)
    return cost_of(config, vocab_size=vocab_size)
