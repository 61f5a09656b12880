"""Hypothesis profiles, and lengths and cost models that several tests use.

`WLB_HYPOTHESIS_PROFILE=long` looks for what the default 200 examples of each property did not find.
"""

import os
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

import wlb

COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", COMMON, max_examples=200)
settings.register_profile("long", COMMON, max_examples=5000, stateful_step_count=100)
settings.load_profile(os.environ.get("WLB_HYPOTHESIS_PROFILE", "default"))


@pytest.hookimpl(tryfirst=True)  # before cases that are `long` are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("a_few") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for some in cases.values():
        number = some[0].get_closest_marker("a_few").args[0]  # type: ignore[union-attr]
        kept = {int(place) for place in np.linspace(0, len(some) - 1, number)}
        for place, item in enumerate(some):
            if place not in kept:
                item.add_marker(pytest.mark.long)
    # No reader lets more wait than the packer's bounds allow.
    for item in items:
        if item.path.parent.name in ("torch", "trainers"):
            item.add_marker(pytest.mark.filterwarnings("error::wlb.BacklogWarning"), append=False)


@pytest.fixture(scope="session")
def llama_cost() -> wlb.CostModel:
    """FLOPs of a 7B Llama."""
    return wlb.CostModel.from_flops(
        hidden_size=4096, ffn_hidden_size=11008, num_layers=32, num_heads=32, vocab_size=32000
    )


@pytest.fixture(scope="session")
def corpus() -> NDArray[np.int64]:
    """A long-tailed stream of 20 000 documents: 97 % below 6250 tokens, the rest up to 125 000."""
    rng = np.random.default_rng(0)
    short = rng.integers(1, 6251, 20_000)
    long = np.exp(rng.uniform(np.log(6250), np.log(125_000), 20_000)).astype(np.int64)
    return np.where(rng.random(20_000) < 0.0275, long, short)
