"""Dynamic-CP behind a packer whose micro-batches the data x context ranks divide: a sampler deals them."""

# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="var-annotated"
# ruff: noqa: F821 - the configuration defines what is only declared here

from collections.abc import Callable

import wlb

packer: wlb.Packer
plan: Callable[..., wlb.DynamicCpPlan]
TOKENS_PER_BATCH: int


def loader(dataset, ranks):
    """Shuffled epochs of a dataset; ranks: wlb.torch.data_and_context(mesh)."""
    from torch.utils.data import DataLoader

    from wlb.torch.data import BalancedBatchSampler, Documents, DynamicCpLoader, StepLoader

    sampler = BalancedBatchSampler(
        dataset.lengths,
        packer=packer,
        dp_rank=ranks.get_local_rank(),
        dp_size=ranks.size(),
        tokens_per_batch=TOKENS_PER_BATCH,
    )
    documents = StepLoader(DataLoader(Documents(dataset), batch_sampler=sampler, collate_fn=list))
    return DynamicCpLoader(documents, plan=plan, group=ranks.get_group())
