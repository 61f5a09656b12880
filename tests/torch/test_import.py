"""What `import wlb.torch` loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import wlb.torch as wt

SLOW = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor"]


def test_parts_of_torch_that_take_seconds_are_not_loaded() -> None:
    program = "import json, sys, wlb.torch; print(json.dumps(list(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=300).stdout
    assert not set(json.loads(output)) & set(SLOW)


def test_names_that_are_loaded_when_asked_for_are_there() -> None:
    assert set(wt.__all__) <= set(dir(wt))
    for name in wt.__all__:
        assert getattr(wt, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        wt.nothing  # noqa: B018
