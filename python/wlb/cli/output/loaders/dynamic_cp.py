"""Dynamic-CP on global batches as they come."""

# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: F821 - the configuration defines what is only declared here

from collections.abc import Callable

import wlb

plan: Callable[..., wlb.DynamicCpPlan]


def loader(batches, ranks):
    """Of every step: a list of the documents that this one of the data x context ranks reads."""
    from wlb.torch.data import DynamicCpLoader

    return DynamicCpLoader(batches, plan=plan, group=ranks.get_group())
