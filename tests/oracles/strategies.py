"""Hypothesis strategies of the tests: those of `wlb.testing`, with costs that the oracles can read."""

from typing import Any

from hypothesis import strategies as st

from oracles.cost import AnalyticCost
from oracles.kernel import profile
from wlb.testing import cost_settings, document_lengths, packer_settings

__all__ = ["costs", "document_lengths", "kernel_profiles", "packer_settings"]


def costs(*, exact: bool = False) -> st.SearchStrategy[AnalyticCost]:
    """Cost models, see :func:`wlb.testing.cost_settings`."""
    return cost_settings(exact=exact).map(lambda settings: AnalyticCost(**settings))


@st.composite
def kernel_profiles(draw: st.DrawFn) -> dict[str, Any]:
    """Profiles with any grid and times in no order, as `wlb.KernelModel.from_profile` reads them."""
    lengths = st.sets(st.integers(1, 300) | st.sampled_from([128, 512, 4096]), min_size=1, max_size=5)
    query_lengths = sorted(draw(lengths))
    key_lengths = sorted(draw(lengths) | {query_lengths[-1]})

    def table() -> list[list[float | None]]:
        seconds = st.floats(1e-7, 1e-3)
        return [[draw(seconds) if queries <= keys else None for keys in key_lengths] for queries in query_lengths]

    return profile(
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        forward=table(),
        backward=table(),
        tile=draw(st.sampled_from([1, 16, 100, 128])),
        causal=draw(st.booleans()),
    )
