"""Dynamic-CP behind a packer with any number of micro-batches: every rank packs, and reads its share."""

# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: F821 - the configuration defines what is only declared here

from collections.abc import Callable

import wlb

packer: wlb.Packer
plan: Callable[..., wlb.DynamicCpPlan]


def released(dataset, global_batches, rank, ranks):
    """What one of the data x context ranks reads; all of them are given the same global batches of indices."""

    def share(packing):
        indices = sorted(int(index) for micro_batch in packing for index in micro_batch.document_ids)
        return [dataset[index] for index in indices[rank::ranks]]

    for batch in global_batches:
        yield share(packer.push([dataset.lengths[index] for index in batch], batch))
    for packing in packer.flush():
        yield share(packing)


def loader(dataset, global_batches, ranks):
    """ranks: wlb.torch.data_and_context(mesh)."""
    from wlb.torch.data import DynamicCpLoader

    batches = released(dataset, global_batches, ranks.get_local_rank(), ranks.size())
    return DynamicCpLoader(batches, plan=plan, group=ranks.get_group())
