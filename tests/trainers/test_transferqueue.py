"""TransferQueue's batches, balanced by wlb's sampler: its own tests run on ours, and its controller uses it."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wlb

pytest.importorskip("transfer_queue", reason="transferqueue is not installed: pip install transferqueue")

from transfer_queue.sampler import SeqlenBalancedSampler

from wlb.integrations import transferqueue as ours

COST = wlb.CostModel(attention=3.0, linear=5000.0)


class Partition:
    """What the controller passes: tokens of each sample."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths

    def get_custom_meta(self, samples: list[int]) -> dict[int, dict[str, int]]:
        return {sample: {"total_lengths": int(self.lengths[sample])} for sample in samples}


def asked(sampler: Any, lengths: np.ndarray, dp_size: int) -> list[list[int]]:
    """What each rank gets; ranks ask one after the other, and what is consumed is not ready any more."""
    ready, parts = [*range(lengths.size)], []
    for rank in range(dp_size):
        where = {"task_name": "train", "partition_id": "p", "dp_rank": rank, "batch_index": 0}
        sampled, consumed = sampler(ready, lengths.size // dp_size, partition=Partition(lengths), **where)
        assert sampled == consumed
        assert sampler.has_cached_result("p", "train", {"dp_rank": rank, "batch_index": 0})
        ready = [sample for sample in ready if sample not in consumed]
        parts.append(sampled)
    return parts


def spread(parts: list[list[int]], lengths: np.ndarray) -> float:
    sums = [COST.cost(lengths[part]).sum() for part in parts]
    return float(max(sums) * len(sums) / sum(sums))


def drawn(prompts: int, n: int) -> np.ndarray:
    return np.random.default_rng(5).lognormal(7, 1, prompts * n).astype(int).clip(16, 16384)


@pytest.mark.parametrize("together", ["rank", "step"])
def test_ranks_have_even_work_and_whole_prompts(together: Any) -> None:
    dp_size, n = 8, 4
    lengths = drawn(64, n)
    parts = asked(ours.BalancedSampler(n, dp_size, cost_model=COST, together=together), lengths, dp_size)
    theirs = asked(SeqlenBalancedSampler(n, dp_size), lengths, dp_size)
    assert sorted(sample for part in parts for sample in part) == list(range(lengths.size))
    assert {len(part) for part in parts} == {lengths.size // dp_size}
    # With whole prompts in equal numbers no rank is lighter than the costliest prompt with the cheapest others.
    of_prompts = np.sort(COST.cost(lengths).reshape(-1, n).sum(axis=1))
    least = (of_prompts[-1] + of_prompts[:7].sum()) * dp_size / of_prompts.sum()
    assert spread(parts, lengths) <= 1.001 * (max(least, 1) if together == "rank" else 1)
    assert spread(theirs, lengths) > 1.2
    if together == "rank":
        for part in parts:
            prompts = np.array(part) // n
            assert (prompts.reshape(-1, n) == prompts[::n, None]).all(), "a prompt's samples one after the other"


def test_steps_of_a_batch_are_even() -> None:
    dp_size, n, steps = 4, 4, 4
    lengths = drawn(64, n)
    parts = asked(ours.BalancedSampler(n, dp_size, cost_model=COST, num_steps=steps, together="step"), lengths, dp_size)
    of_step = np.array(parts).reshape(dp_size, steps, -1)
    prompts = [{sample // n for sample in of_step[:, step].ravel()} for step in range(steps)]
    assert [len(held) for held in prompts] == [16] * 4
    for step in range(steps):
        work = np.sort(COST.cost(lengths[of_step[:, step].ravel()]))
        # A sample may be more than a rank's share: its rank has the shortest others.
        least = (work[-1] + work[: of_step.shape[2] - 1].sum()) * dp_size / work.sum()
        assert spread(of_step[:, step].tolist(), lengths) <= 1.001 * max(least, 1)


def test_state_survives_a_checkpoint() -> None:
    lengths = drawn(8, 2)
    sampler = ours.BalancedSampler(2, 2, cost_model=COST)
    where = {"task_name": "train", "partition_id": "p", "batch_index": 0, "partition": Partition(lengths)}
    first, _ = sampler([*range(16)], 8, dp_rank=0, **where)
    other = ours.BalancedSampler(2, 2, cost_model=COST)
    other.load_checkpoint(sampler.save_checkpoint())
    second, _ = other([sample for sample in range(16) if sample not in first], 8, dp_rank=1, **where)
    assert sorted(first + second) == list(range(16))


def test_unready_prompts_wait() -> None:
    sampler = ours.BalancedSampler(4, 2, cost_model=COST)
    assert sampler([0, 1, 2, 4, 5, 6, 7], 4, dp_rank=0, batch_index=0) == ([], [])


def test_wrong_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = drawn(4, 2)
    sampler, partition = ours.BalancedSampler(2, 2, cost_model=COST), Partition(lengths)
    monkeypatch.setattr(partition, "get_custom_meta", lambda samples: {})
    with pytest.raises(wlb.WlbError, match=r'custom_meta of sample 0 has no "total_lengths"'):
        sampler([*range(8)], 4, partition=partition)
    with pytest.raises(wlb.WlbError, match="num_steps = 3: does not divide the 8 samples"):
        asked(ours.BalancedSampler(2, 2, cost_model=COST, num_steps=3), lengths, 2)
    with pytest.raises(wlb.WlbError, match="together = 'group'"):
        ours.BalancedSampler(cost_model=COST, together="group")  # type: ignore[arg-type]
    monkeypatch.setattr(SeqlenBalancedSampler, "sample", lambda self, ready, size: ([], []))
    with pytest.raises(wlb.WlbError, match=r"transferqueue .* has sample\(self, ready, size\), but wlb expects"):
        ours.BalancedSampler(cost_model=COST)


def test_its_own_tests_pass(tmp_path: Path) -> None:
    """`tests/test_samplers.py` of its wheel, with our sampler in the place of its `SeqlenBalancedSampler`."""
    spec = find_spec("transfer_queue")
    assert spec is not None
    assert spec.origin is not None
    own = Path(spec.origin).parents[1] / "tests" / "test_samplers.py"
    if not own.exists():
        pytest.skip("this transferqueue comes without its tests")
    text = own.read_text()
    begin = text.index("class TestSeqlenBalancedSampler")
    ours_in_place = (
        "import wlb\nfrom functools import partial\nfrom wlb.integrations.transferqueue import BalancedSampler\n"
        "SeqlenBalancedSampler = partial(BalancedSampler, cost_model=wlb.CostModel(attention=0.0, linear=1.0))\n\n\n"
    )
    (tmp_path / "test_own.py").write_text(text[:begin] + ours_in_place + text[begin:])
    program = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    program += ["test_own.py", "-k", "TestSeqlenBalancedSampler"]
    found = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert found.returncode == 0, found.stdout
    assert re.search(r"^1\d passed", found.stdout, re.MULTILINE), found.stdout
    print(found.stdout)
