"""`data_iterator`: turns documents into steps for Megatron-Core."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state

import wlb
from wlb._errors import check_integer, error
from wlb.integrations.megatron.documents import PaddedDocuments, source
from wlb.integrations.megatron.iterator import DataIterator, Header
from wlb.integrations.megatron.refusals import require_masks
from wlb.integrations.megatron.rows import Ranks
from wlb.integrations.megatron.setup import Setup
from wlb.integrations.megatron.sharing import Sharing
from wlb.torch.data import DynamicCpLoader, PackedBatch, StepLoader, collate
from wlb.torch.data.peers import Peers


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
            together), `oversize`, `max_delay`, `sync` (by default "micro_batch" under FSDP), `cost_model` (by default
            the model's FLOPs), `lengths` (if they are known and there is no index), `num_epochs`, ...; and of
            `wlb.plan_dynamic_cp`: `max_cp_size`, ...

    Returns:
        An iterator of steps, equally many on all ranks. Close it at the end.

    Raises:
        wlb.WlbError: an argument is invalid, the model's configuration does not allow packed rows, or megatron-core is
            too old. Raised before anything is read.
    """
    check_integer("pad_token", pad_token, minimum=0)
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    setup = Setup.of(
        model,
        world_size=everyone.size(),
        max_tokens_per_rank=max_tokens_per_rank,
        tokens_per_batch=tokens_per_batch,
        dynamic_cp=dynamic_cp,
        multiple_of_tokens=multiple_of_tokens,
        options=options,
        function=data_iterator,
    )
    ranks = _ranks(setup, everyone)
    sharing: Sharing[Header] = Sharing(
        tp=parallel_state.get_tensor_model_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
        predicts=bool(getattr(setup.config, "mtp_num_layers", None)),
        each=each_rank_reads,
    )
    readers = everyone if dynamic_cp else parallel_state.get_data_parallel_group()
    packer = setup.packer(readers.size())
    steps, padded = _reader(setup, dataset, packer, readers, pad_token) if sharing.reads else (None, None)
    return DataIterator(
        config=setup.config,
        sharing=sharing,
        ranks=ranks,
        peers=None if dynamic_cp else Peers(everyone, description="megatron"),
        steps=steps,
        dynamic=_dynamic(setup, steps, everyone) if dynamic_cp else None,
        documents=padded,
        row_multiple=setup.row_multiple,
        pad_token=pad_token,
        padded=setup.padded,
        hooks=require_masks(setup.chunks, setup.config, padded=setup.padded),
    )


def _reader(
    setup: Setup, dataset: Any, packer: wlb.Packer, readers: Any, pad_token: int
) -> tuple[StepLoader[Any], PaddedDocuments | None]:
    """The steps of a rank that reads, and its documents if they are padded."""
    documents, lengths = source(dataset, setup.loading.lengths)
    padded = None
    if (multiple := setup.document_multiple) > 1:
        marked = bool(getattr(setup.config, "num_moe_experts", None))
        padded = PaddedDocuments(documents, lengths, multiple=multiple, token=pad_token, marked=marked)
        documents, lengths = padded, padded.lengths
    sampler = setup.loading.sampler(lengths, packer, rank=readers.rank(), ranks=readers.size())
    rank = parallel_state.get_context_parallel_rank()
    keep = partial(collate, cp_rank=rank, strategy="per_document", **{"cp_size": setup.cp_size, **setup.shape})
    return StepLoader(setup.loading.loader(documents, sampler, list if setup.dynamic_cp else keep)), padded


def _dynamic(setup: Setup, steps: StepLoader[Any] | None, everyone: Any) -> DynamicCpLoader[PackedBatch]:
    """Steps whose micro-batches have their own groups of ranks; every data x context rank takes part in the plans."""
    config = setup.config
    plan = partial(
        wlb.plan_dynamic_cp,
        world_size=everyone.size(),
        num_stages=config.pipeline_model_parallel_size,
        num_virtual_stages=config.virtual_pipeline_model_parallel_size or 1,
        max_tokens_per_rank=setup.max_tokens_per_rank,
        cost_model=setup.loading.cost_model,
        **setup.planning,
    )
    return DynamicCpLoader(() if steps is None else steps, plan=plan, group=everyone)


def _ranks(setup: Setup, everyone: Any) -> Ranks:
    """The groups for rows.

    Raises:
        wlb.WlbError: a group that a Dynamic-CP plan may need was not made.
    """
    group = parallel_state.get_context_parallel_group()
    if not setup.dynamic_cp:
        return Ranks(lambda size: group if size > 1 else None, group, dynamic=False)
    sizes = [1 << power for power in range(setup.cp_size.bit_length())]
    groups = {size: _group_of(size, everyone) if size > 1 else None for size in sizes}
    return Ranks(groups.__getitem__, group, dynamic=True)


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
