"""A rank that fails, ends or hangs is named by all others, in time."""

from __future__ import annotations

import re

import faults
import pytest
from faults import KINDS, PLACES


def check(found: dict[int, faults.Ending], kind: str, *, world_size: int, failed: int) -> None:
    survivors = set(range(world_size)) - {failed}
    assert set(found) >= survivors
    for rank in survivors:
        ending = found[rank]
        assert "WlbError" in ending.names, ending
        assert f"rank {failed}" in ending.text, ending
        assert re.search(KINDS[kind], ending.text), ending
        assert re.search(r"step \d+", ending.text), ending
        assert ending.seconds < faults.TIMEOUT + faults.LOOKING, ending


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_every_failure_everywhere(place: str, kind: str) -> None:
    check(faults.endings(3, PLACES[place], kind, rank=1), kind, world_size=3, failed=1)
