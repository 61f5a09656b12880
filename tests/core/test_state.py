"""Saved packers: plain data, and refused when they are anything else.

That a change of any byte or number is noticed is tested in `rust/wlb-core/tests/state.rs`.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given

import wlb
from wlb import testing

# Pushes of anything, whatever waits: the bounds are tested in test_admission.py.
pytestmark = pytest.mark.filterwarnings("ignore::wlb.BacklogWarning")

Path = tuple[Any, ...]


def a_packer() -> wlb.Packer:
    """One packer with something in every field of its state."""
    cost = wlb.CostModel.from_tables([10, 100], attention_seconds=[0.1, 7.3], linear_seconds=[0.3, 2.9])
    packer = wlb.Packer(
        num_micro_batches=3,
        max_tokens=100,
        cost_model=cost,
        outlier_thresholds=(40, 70),
        max_delay=5,
        oversize="split",
    )
    packer.push([50, 90, 45, 130, 20, 20], ids=[4, 9, 2, 6, 1, 8])
    packer.push([39] * 9)
    assert all(packer.queued)
    assert packer.carried
    return packer


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """The way to every key, element and leaf below `value`."""
    inside: Iterator[tuple[Any, Any]] = iter(())
    if isinstance(value, dict):
        inside = iter(value.items())
    elif isinstance(value, list):
        inside = iter(enumerate(value))
    for key, child in inside:
        yield (*path, key)
        yield from paths(child, (*path, key))


def at(state: Any, path: Path) -> Any:
    for key in path:
        state = state[key]
    return state


def test_unknown_keys_are_refused() -> None:
    """A state of a later version may hold what this one cannot keep."""
    valid = a_packer().state_dict()
    for path in [(), *(path for path in paths(valid) if isinstance(at(valid, path), dict))]:
        damaged = copy.deepcopy(valid)
        at(damaged, path)["a key from the future"] = 1
        with pytest.raises(wlb.StateError):
            wlb.Packer.from_state_dict(damaged)


class Foreign:
    """No JSON value."""

    def __repr__(self) -> str:  # the name of a test, alike in all processes that collect it
        return "Foreign()"


def cyclic() -> dict[str, Any]:
    state = a_packer().state_dict()
    state["carried"] = state
    return state


def deep() -> dict[str, Any]:
    state: dict[str, Any] = {}
    for _ in range(100_000):
        state = {"carried": state}
    return a_packer().state_dict() | state


FOREIGN: list[Any] = [
    None,
    0,
    "wlb.packer",
    b"wlb.packer",
    [],
    {},
    {"format": "wlb.packer"},
    {"format": "wlb.packer", "version": 1},
    {"format": "wlb.packer", "version": 2},
    {"format": "torch", "version": 1},
    {1: 2},
    {"format": Foreign()},
    Foreign(),
    [("format", "wlb.packer")],
    *({**a_packer().state_dict(), "iteration": value} for value in (10**30, -(2**63) - 1, 1.5, float("nan"), True)),
]


@pytest.mark.parametrize("foreign", FOREIGN, ids=str)
def test_a_foreign_state_is_refused(foreign: Any) -> None:
    packer = a_packer()
    before = packer.state_dict()
    for load in (packer.load_state_dict, wlb.Packer.from_state_dict):
        with pytest.raises((wlb.StateError, TypeError)):
            load(foreign)
    assert packer.state_dict() == before


@pytest.mark.parametrize("make", [cyclic, deep])
def test_a_state_without_end_is_refused(make: Any) -> None:
    state = make()
    packer = a_packer()
    before = packer.state_dict()
    with pytest.raises(wlb.StateError):
        packer.load_state_dict(state)
    assert packer.state_dict() == before


def test_a_state_is_plain_json_and_a_snapshot() -> None:
    packer = a_packer()
    state = packer.state_dict()
    leaves = {type(value) for value in (at(state, path) for path in paths(state))}
    assert leaves <= {dict, list, str, int, float, bool, type(None)}
    assert {type(key) for path in paths(state) for key in path} <= {str, int}
    text = json.dumps(state, allow_nan=False)
    assert json.loads(text) == state
    packer.push([1])
    assert json.dumps(state, allow_nan=False) == text, "the packer went on, its snapshot did not"
    now = packer.state_dict()
    state["carried"] = state["queues"] = None
    assert packer.state_dict() == now


@given(testing.packer_settings(), testing.cost_models())
def test_equal_configurations_have_equal_fingerprints(settings: dict[str, Any], cost: wlb.CostModel) -> None:
    first, second = (wlb.Packer(cost_model=cost, **settings | {"num_micro_batches": size}) for size in (3, 17))
    assert first.fingerprint == second.fingerprint == first.state_dict()["fingerprint"] != a_packer().fingerprint
    with pytest.raises(wlb.StateError):
        first.load_state_dict(a_packer().state_dict())


def test_a_state_says_what_it_is() -> None:
    state = a_packer().state_dict()
    assert (state["format"], state["version"]) == ("wlb.packer", 1)
    names = "format version fingerprint config iteration next_id carried queues metrics first_cost_model arrived digest"
    assert state.keys() == set(names.split())
    state["version"] = 2
    with pytest.raises(wlb.StateError, match="version"):
        wlb.Packer.from_state_dict(state)
