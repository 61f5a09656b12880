"""Dynamic-CP loaders that `wlb tune` prints, function by function. Tests run them as they are printed.

They use `packer` and `plan`, which the printed configuration defines above them.
"""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="var-annotated"
# ruff: noqa: F821 - the printed configuration defines names that are only declared here

from collections.abc import Callable

import wlb

packer: wlb.Packer
plan: Callable[..., wlb.DynamicCpPlan]


def loader(batches, ranks):
    """Loader of a Dynamic-CP plan. `batches` yields the documents that this rank reads for each step."""
    from wlb.torch.data import DynamicCpLoader

    return DynamicCpLoader(batches, plan=plan, group=ranks.get_group())


def sampled(dataset, ranks):
    """Shuffled epochs of a dataset for `loader`; ranks: wlb.torch.data_and_context(mesh)."""
    from torch.utils.data import DataLoader

    from wlb.torch.data import BalancedBatchSampler, Documents, StepLoader

    sampler = BalancedBatchSampler(
        dataset.lengths,
        packer=packer,
        dp_rank=ranks.get_local_rank(),
        dp_size=ranks.size(),
    )
    return StepLoader(DataLoader(Documents(dataset), batch_sampler=sampler, collate_fn=list))


def released(dataset, global_batches, ranks):
    """Lists of documents that this rank reads; all ranks get the same global batches of indices."""

    def share(packing):
        indices = sorted(int(index) for micro_batch in packing for index in micro_batch.document_ids)
        return [dataset[index] for index in indices[ranks.get_local_rank() :: ranks.size()]]

    for batch in global_batches:
        yield share(packer.push([dataset.lengths[index] for index in batch], batch))
    for packing in packer.flush():
        yield share(packing)
