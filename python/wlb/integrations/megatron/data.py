"""`data_iterator`: turns documents into steps for Megatron-Core."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config, unwrap_model

import wlb
from wlb._errors import check_integer, error
from wlb.integrations.megatron.costs import cost_of
from wlb.integrations.megatron.documents import PaddedDocuments, source
from wlb.integrations.megatron.groups import NOT_HERE
from wlb.integrations.megatron.iterator import DataIterator, Header
from wlb.integrations.megatron.multiples import required_multiple, row_multiple
from wlb.integrations.megatron.refusals import check_config, check_experts, check_layers, check_version, told
from wlb.integrations.megatron.rows import Ranks
from wlb.integrations.megatron.sharing import Sharing
from wlb.torch.data import DynamicCpLoader, PackedBatch, StepLoader, collate
from wlb.torch.data.loading import ROOM, Loading, micro_batches
from wlb.torch.data.peers import Peers

# Arguments of plans that are computed from the model and the ranks.
_SET_HERE: Final = ("options", "world_size", "num_stages", "num_virtual_stages", "costs", "attention_costs", "ids")


def data_iterator(
    dataset: Any,
    *,
    model: Any,
    max_tokens_per_rank: int,
    tokens_per_batch: int,
    dynamic_cp: bool = False,
    pad_token: int = 0,
    each_rank_reads: bool = False,
    multiple_of_tokens: int = 1,
    **options: Any,
) -> DataIterator:
    """Steps of micro-batches of equal work for Megatron-Core's `forward_backward_func`, with any schedule.

    All ranks call this together, after `initialize_model_parallel`. Among the ranks that train the same documents (all
    stages, all tensor-parallel ranks) the first one reads. It sends tokens to the first stage, labels to the last one,
    and the lengths of rows to all. Each context-parallel rank reads for itself and keeps its part.

        data = data_iterator("corpus_text_document", model=model, max_tokens_per_rank=8192, tokens_per_batch=2**20)
        for step in data:
            reports = forward_backward_func(forward_step_func=forward_step, model=model, forward_only=False,
                                            **step.arguments)

        def forward_step(data_iterator, model):
            batch = get_batch(data_iterator)
            output = model(batch.tokens, batch.position_ids, None, labels=batch.labels, loss_mask=batch.loss_mask,
                           packed_seq_params=batch.packed_seq_params, padding_mask=batch.padding_mask)
            return output, functools.partial(loss_func, batch.loss_mask)

    **Padding.** Documents are padded to multiples of `2 * context_parallel_size`, because Megatron-Core cuts them so.
    With `dynamic_cp` the largest group counts, which `max_cp_size` limits; with a size of 1 they are not padded. Rows
    are padded to the multiple that `row_multiple` returns: the tensor-parallel size for sequence parallelism, 16 or 32
    for FP8, MXFP8 and FP4. The plan counts padding as tokens. A row without documents has padding of that size.
    `MegatronStep.padding_tokens` is the sum of all padding. Nothing learns from it: `loss_mask` excludes it from
    losses, also of multi-token prediction, and `padding_mask` from the routers of experts. A model that needs one of
    these masks and does not get it stops at its first forward pass. Experts that cannot leave padding out are refused
    (capacities, sinkhorn, ...).

    Args:
        dataset: `.bin` and `.idx` files: an `IndexedDataset`, `IndexedDocuments`, or the path of the files without
            these endings. Or `dataset[i]` gives document `i`: its tokens, or a mapping with `input_ids` and maybe
            `labels` (-100 where nothing is learnt). The same on every rank; only ranks that read use it.
        model: the model, or its chunks; or its `TransformerConfig`, with `cost_model` and without `dynamic_cp`.
        max_tokens_per_rank: most tokens of a micro-batch on a rank, limited by its memory.
        tokens_per_batch: tokens of a step, on all ranks.
        dynamic_cp: whether every document gets as many of the data-parallel ranks as it needs (`wlb.plan_dynamic_cp`).
            Needs `initialize_model_parallel(hybrid_context_parallel=True)`, and layers of `packed_layers`.
        pad_token: token id of padding.
        each_rank_reads: whether every rank reads for itself, so that nothing is sent. Needed in loops that fetch a step
            inside a schedule, as `pretrain` does, where stages must not wait for each other.
        multiple_of_tokens: a rank's rows are also padded to a multiple of this, such as 128 for HybridEP. Divides
            `max_tokens_per_rank`.
        **options: of `wlb.torch.Loading`: `max_document_tokens` (by default what the ranks of a micro-batch hold
            together), `oversize`, `max_delay`, `cost_model` (by default the model's FLOPs), `lengths` (if they are
            known and there is no index), `num_epochs`, ...; and of `wlb.plan_dynamic_cp`: `max_cp_size`, ...

    Returns:
        An iterator of steps, equally many on all ranks. Close it at the end.

    Raises:
        wlb.WlbError: an argument is invalid, the model's configuration does not allow packed rows, or megatron-core is
            too old. Raised before anything is read.
    """
    loading, planning = Loading.of(options, wlb.plan_dynamic_cp, data_iterator, but=(*_SET_HERE, *NOT_HERE))
    check_version()
    config, chunks = _parts_of(model)
    check_config(config, dynamic_cp=dynamic_cp)
    if dynamic_cp and not chunks:
        raise error("model", "is a configuration: with dynamic_cp give the model itself, whose layers are looked at")
    if dynamic_cp:
        check_layers(chunks)
    for name, value, minimum in (
        ("max_tokens_per_rank", max_tokens_per_rank, 1),
        ("tokens_per_batch", tokens_per_batch, 1),
        ("pad_token", pad_token, 0),
    ):
        check_integer(name, value, minimum=minimum)
    if planning and not dynamic_cp:
        name = next(iter(planning))
        raise error(name, "is an option of Dynamic-CP plans: give dynamic_cp=True with it", value=planning[name])
    cost_model = loading.cost_model
    if cost_model is None:
        vocab_size = getattr(unwrap_model(chunks[0]), "vocab_size", None) if chunks else None
        if vocab_size is None:
            message = "is missing: wlb cannot make it without the vocab_size of a model; a configuration has none"
            raise error("cost_model", message)
        cost_model = cost_of(config, vocab_size=vocab_size)

    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    ranks, cp_size = _ranks(config, everyone, dynamic_cp=dynamic_cp, planning=planning)
    multiple = required_multiple(cp_size=cp_size)
    if loading.columns:
        message = f"= {list(loading.columns)}: Megatron-Core's batches have no place for further columns; leave it out"
        raise error("columns", message, value=loading.columns)
    if loading.labels_ahead > 1:
        message = (
            f"= {loading.labels_ahead}: Megatron-Core's multi-token prediction looks ahead by itself; leave it out"
        )
        raise error("labels_ahead", message, value=loading.labels_ahead)
    of_rows = row_multiple(config, cp_size=cp_size, multiple_of_tokens=multiple_of_tokens)
    rows_are_padded = multiple > 1 or of_rows > 1
    if rows_are_padded:
        check_experts(config)
    if max_tokens_per_rank % of_rows:
        less = max_tokens_per_rank // of_rows * of_rows or of_rows
        message = f"= {max_tokens_per_rank}: rows are padded to multiples of {of_rows}, and would be longer; make it "
        message += f"{less}"
        raise error("max_tokens_per_rank", message, value=max_tokens_per_rank)
    held = max_tokens_per_rank * cp_size
    context = loading.max_document_tokens
    context = held // multiple * multiple if context is None else context
    check_integer("max_document_tokens", context, minimum=1, maximum=held)
    if context % multiple:
        message = f"= {context}: documents are padded to multiples of {multiple}; make it one"
        raise error("max_document_tokens", message, value=context)

    sharing: Sharing[Header] = Sharing(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
        predicts=bool(getattr(config, "mtp_num_layers", None)),
        each=each_rank_reads,
    )
    readers = everyone if dynamic_cp else parallel_state.get_data_parallel_group()
    shares = readers.size() * _shares(config, readers.size(), held, tokens_per_batch, dynamic_cp=dynamic_cp)
    padding: dict[str, Any] = {"multiple_of_tokens": cp_size * of_rows}
    if dynamic_cp:  # the packer's micro-batches only decide which rank reads a document
        held, padding = max(context, math.ceil(ROOM * tokens_per_batch / shares)), {}
    loading = replace(loading, max_document_tokens=context)
    limits = {"max_tokens": held, "tokens_per_batch": tokens_per_batch, **padding}
    packer = loading.packer(shares, cost_model=cost_model, **limits)
    steps: StepLoader[Any] | None = None
    padded: PaddedDocuments | None = None
    if sharing.reads:
        documents, known = source(dataset, loading.lengths)
        if multiple > 1:
            marked = bool(getattr(config, "num_moe_experts", None))
            documents = padded = PaddedDocuments(documents, known, multiple=multiple, token=pad_token, marked=marked)
            known = padded.lengths
        sampler = loading.sampler(known, packer, rank=readers.rank(), ranks=readers.size())
        rank = parallel_state.get_context_parallel_rank()
        keep = partial(collate, cp_size=cp_size, cp_rank=rank, strategy="per_document", **padding)
        steps = StepLoader(loading.loader(documents, sampler, list if dynamic_cp else keep))
    dynamic: DynamicCpLoader[PackedBatch] | None = None
    if dynamic_cp:
        plan = partial(
            wlb.plan_dynamic_cp,
            world_size=everyone.size(),
            num_stages=config.pipeline_model_parallel_size,
            num_virtual_stages=config.virtual_pipeline_model_parallel_size or 1,
            max_tokens_per_rank=max_tokens_per_rank,
            cost_model=cost_model,
            **{**planning, "max_cp_size": cp_size},
        )
        dynamic = DynamicCpLoader(() if steps is None else steps, plan=plan, group=everyone)
    return DataIterator(
        config=config,
        sharing=sharing,
        ranks=ranks,
        peers=None if dynamic_cp else Peers(everyone, description="megatron"),
        steps=steps,
        dynamic=dynamic,
        documents=padded,
        row_multiple=of_rows,
        pad_token=pad_token,
        padded=rows_are_padded,
        hooks=told(chunks, config),
    )


def _parts_of(model: Any) -> tuple[Any, list[Any]]:
    """The configuration of a model, and its chunks. For a configuration: itself, and no chunks."""
    if hasattr(model, "calculate_per_token_loss"):
        return model, []
    chunks = model if isinstance(model, list) else [model]
    if not chunks or not all(isinstance(chunk, torch.nn.Module) for chunk in chunks):
        found = type(model).__name__
        raise error("model", f"is a {found}: must be a model of Megatron-Core, or its configuration", value=found)
    return get_model_config(chunks[0]), chunks


def _ranks(config: Any, everyone: Any, *, dynamic_cp: bool, planning: dict[str, Any]) -> tuple[Ranks, int]:
    """The groups for rows, and the largest number of ranks of a group.

    Raises:
        wlb.WlbError: A group that a Dynamic-CP plan may need was not made.
    """
    group = parallel_state.get_context_parallel_group()
    if not dynamic_cp:
        return Ranks(lambda size: group if size > 1 else None, group, dynamic=False), config.context_parallel_size
    largest = planning.get("max_cp_size")
    if largest is None:
        largest = everyone.size()
    check_integer("max_cp_size", largest, minimum=1, maximum=everyone.size())
    largest = 1 << (largest.bit_length() - 1)  # groups are powers of two
    groups = {1 << power: None for power in range(largest.bit_length())}
    for size in groups:
        if size > 1:
            groups[size] = _group_of(size, everyone)
    return Ranks(groups.__getitem__, group, dynamic=True), largest


def _group_of(size: int, everyone: Any) -> Any:
    """This rank's group of `size` ranks; None if it is one of the last ranks, too few for a group."""
    if size == everyone.size():
        return everyone
    kind = "hybrid" if hasattr(parallel_state, "get_hybrid_data_context_parallel_groups") else "dynamic"
    try:
        group = getattr(parallel_state, f"get_{kind}_data_context_parallel_groups")(group_size=size)
    except (KeyError, AssertionError, TypeError):
        message = "= False: there are no groups of 2, 4, ... ranks; give initialize_model_parallel "
        message += f"{kind}_context_parallel=True, or leave max_cp_size below {size}"
        raise error(f"{kind}_context_parallel", message, value=size) from None
    return group if group.size() == size else None


def _shares(config: Any, readers: int, held: int, tokens_per_batch: int, *, dynamic_cp: bool) -> int:
    """Micro-batches of a data-parallel rank in a step: the fewest with some room that the schedule accepts."""
    if dynamic_cp:
        return 1
    virtual = config.virtual_pipeline_model_parallel_size
    together = config.microbatch_group_size_per_vp_stage if virtual else 1
    return micro_batches(tokens_per_batch, ranks=readers, max_tokens=held, together=together)
