"""Steps of dynamic context parallelism: what every rank gets, and that all stop, fail and go on together."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import wlb
from tests.torch import processes
from wlb._seal import seal
from wlb.torch.attention import cp_sizes
from wlb.torch.attention.arguments import check_heads
from wlb.torch.data import (
    IGNORE,
    BalancedBatchSampler,
    Document,
    Documents,
    DynamicCpLoader,
    DynamicCpStep,
    PackedBatch,
    StepLoader,
    collate,
)
from wlb.torch.groups import ContextParallelGroups, build_mesh, data_and_context

COST = wlb.CostModel.from_flops(
    hidden_size=32,
    ffn_hidden_size=48,
    num_layers=8,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=257,
    attention_efficiency=0.5,
)
# What exchange costs keeps short documents on few ranks.
PLAN = functools.partial(
    wlb.plan_dynamic_cp,
    num_stages=2,
    max_tokens_per_rank=48,
    cost_model=COST,
    exchange=wlb.Exchange(seconds_per_exchange=200_000.0, overlap=0.0),
)
LENGTHS = np.random.default_rng(3).lognormal(2.2, 1.1, 60).astype(np.int64).clip(1, 150)
LENGTHS[7], LENGTHS[31] = 150, 120
DATA: list[Any] = [np.random.default_rng(number).integers(0, 257, length) for number, length in enumerate(LENGTHS)]
for number in range(0, 60, 4):  # some have tokens that are not to be learnt
    DATA[number] = {"input_ids": DATA[number], "labels": np.where(DATA[number] % 3, DATA[number], IGNORE)}
WORLD = 6  # groups of 4 and 2: no power of two


def plain(step: DynamicCpStep[PackedBatch]) -> dict[str, Any]:
    """A step without shared memory."""
    return {
        "number": step.number,
        "plan": step.plan,
        "valid": step.num_valid_tokens,
        "micro_batches": [
            {
                "first": batch.cp_first_rank,
                "rank": batch.cp_rank,
                "size": batch.cp_size,
                "ids": batch.document_ids.tolist(),
                "tensors": {name: getattr(batch, name).numpy() for name in ("tokens", "labels", "position_ids")},
                "cu_seqlens": batch.cu_seqlens.tolist(),
                "valid": batch.num_valid_tokens,
                "padding": batch.num_padding,
            }
            for batch in step.micro_batches
        ],
    }


def check_step(ranks: list[dict[str, Any]]) -> list[int]:
    """Every rank holds what `collate` gives of its group's documents; gives the documents of the step."""
    plan = ranks[0]["plan"]
    seen: list[int] = []
    for rank, step in enumerate(ranks):
        assert step["plan"] == plan
        assert step["number"] == ranks[0]["number"]
        assert len(step["micro_batches"]) == plan.num_micro_batches
        for micro_batch, found in zip(plan.micro_batches, step["micro_batches"], strict=True):
            group = micro_batch.group_of(rank)
            assert (found["first"], found["size"]) == (group.first_rank, group.cp_size)
            assert found["rank"] == rank - group.first_rank
            assert group.lengths.tolist() == LENGTHS[found["ids"]].tolist()
            # Buckets are of all tokens of a group, multiples of each rank.
            sizes = {
                "multiple_of_tokens": plan.multiple_of_tokens,
                "token_buckets": [size * group.cp_size for size in plan.token_buckets],
                "max_documents": plan.max_documents,
            }
            if plan.multiple_of_tokens == 1 and not plan.token_buckets:
                sizes = {"max_documents": plan.max_documents}
            expected = collate(
                [DATA[id] for id in found["ids"]],
                **sizes,
                cp_rank=found["rank"],
                cp_size=found["size"],
                strategy="per_document",
            )
            for name, value in found["tensors"].items():
                np.testing.assert_array_equal(value, getattr(expected, name).numpy())
            assert found["cu_seqlens"] == expected.cu_seqlens.tolist()
            assert found["padding"] == expected.num_padding == group.padding_tokens
            assert found["valid"] == expected.num_valid_tokens
            seen += found["ids"] if found["rank"] == 0 else []
    assert len(set(seen)) == len(seen), "a document twice"
    assert ranks[0]["valid"] == collate([DATA[id] for id in seen]).num_valid_tokens
    return sorted(seen)


def test_a_step_without_labels_says_so() -> None:
    (step,) = DynamicCpLoader([[np.array([number]) for number in range(4)]], plan=functools.partial(PLAN, world_size=1))
    assert sum(batch.tokens.numel() for batch in step.micro_batches) == 4
    assert step.num_valid_tokens == 0


def shares(rank: int, size: int) -> list[list[Document]]:
    """Three batches of 20, dealt unevenly: rank 1 reads nothing after the first, rank 2 nothing before the last."""
    result = []
    for batch in np.arange(60).reshape(3, 20):
        readers = [
            reader for reader in range(size) if (reader != 1 or batch[0] == 0) and (reader != 2 or batch[0] == 40)
        ]
        mine = batch[readers.index(rank) :: len(readers)] if rank in readers else []
        result.append([Documents(DATA)[int(number)] for number in mine])
    return result[:1] if rank == 1 else result


def make(batches: Any, size: int, *, prepare: Any = None, **options: Any) -> DynamicCpLoader[PackedBatch]:
    plan = functools.partial(PLAN, world_size=size, **options)
    return DynamicCpLoader(batches, plan=plan, group=dist.group.WORLD, prepare=prepare)


def read(rank: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]], int]:
    """All steps; then those after a state that was taken when two were given; and those of a second iteration."""
    loader = make(shares(rank, WORLD), WORLD)
    steps, state = [], {}
    for step in loader:
        time.sleep(0.05)  # what is read ahead must not count
        steps.append(plain(step))
        if step.number == 1:
            state = json.loads(json.dumps(loader.state_dict()))
    again = [plain(step) for step in loader]
    loader.close()
    restored = make(shares(rank, WORLD), WORLD)
    restored.load_state_dict(state)
    rest = [plain(step) for step in restored]
    restored.close()
    return steps, rest, again, loader.tokens_moved


def test_every_rank_gets_what_it_trains() -> None:
    results = processes.run(WORLD, read)
    steps = [check_step([result[0][number] for result in results]) for number in range(3)]
    assert steps == [list(range(20)), list(range(20, 40)), list(range(40, 60))]
    plans = [step["plan"] for step in results[0][0]]
    assert len({plan.num_micro_batches for plan in plans}) > 1, "their number changes"
    assert len(set(np.concatenate([plan.cp_sizes.ravel() for plan in plans]))) > 1, "groups differ"
    for result in results:
        assert [step["number"] for step in result[1]] == [2]
        assert result[1][0]["plan"] == plans[2]
        assert [step["number"] for step in result[2]] == [3, 4, 5]
        assert [step["plan"] for step in result[2]] == plans
    assert check_step([result[1][0] for result in results]) == steps[2]
    # Twice all documents; what a rank reads and trains itself does not move.
    assert 0 < sum(result[3] for result in results) < 2 * LENGTHS.sum()


def read_sizes(rank: int, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    loader = make(shares(rank, WORLD), WORLD, **sizes)
    steps = [plain(step) for step in loader]
    loader.close()
    return steps


@pytest.mark.parametrize(
    "sizes",
    [
        {"multiple_of_tokens": 16, "max_documents": 3},
        {"token_buckets": (24, 40), "group_sizes": "any", "num_micro_batches": 12},
    ],
)
def test_every_rank_has_the_sizes_of_the_plan(sizes: dict[str, Any]) -> None:
    results = processes.run(WORLD, read_sizes, sizes)
    steps = [check_step([result[number] for result in results]) for number in range(3)]
    assert steps == [list(range(20)), list(range(20, 40)), list(range(40, 60))]
    batches = [batch for result in results for step in result for batch in step["micro_batches"]]
    assert any(batch["padding"] and not batch["ids"] for batch in batches) == ("token_buckets" in sizes)
    found = {batch["tensors"]["tokens"].size for batch in batches}
    assert found <= set(sizes.get("token_buckets") or (0, 16, 32, 48))
    assert len(found) > 1
    if most := sizes.get("max_documents"):
        assert {len(batch["cu_seqlens"]) for batch in batches} == {most + 2}


def sampled(rank: int, state: dict[str, Any] | None, num_workers: int) -> tuple[list[dict[str, Any]], list[Any], float]:
    """Two epochs, through a packer that holds long documents back."""
    size = dist.get_world_size()
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=200,
        cost_model=COST,
        outlier_thresholds=(100,),
        max_document_tokens=150,
        max_delay=3,
    )
    sampler = BalancedBatchSampler(
        LENGTHS, packer=packer, dp_rank=rank, dp_size=size, tokens_per_batch=300, num_epochs=2
    )
    source = StepLoader(
        DataLoader(Documents(DATA), batch_sampler=sampler, collate_fn=list, num_workers=num_workers)  # type: ignore[arg-type]
    )
    loader = make(source, size, max_tokens_per_rank=80)
    if state is not None:
        loader.load_state_dict(state)
    steps, states = [], [loader.state_dict()]
    for _ in range(2 - sampler.epoch):
        for step in loader:
            steps.append(plain(step))
            states.append(loader.state_dict())
    delay = loader.metrics().delay_max
    loader.close()
    return steps, states, delay


def of_other_tokens(rank: int) -> str:
    """A rank whose data set was shuffled with another seed, among documents of equal lengths."""
    rows = [row if rank == 0 else [token % 256 + 1 for token in row] for row in ([5] * 8, [6] * 8, [7] * 8, [8] * 8)]
    packer = wlb.Packer(num_micro_batches=2, max_tokens=32, cost_model=COST, release="fifo")
    sampler = BalancedBatchSampler([8] * 4, packer=packer, dp_rank=rank, dp_size=2)
    loader = make(StepLoader(DataLoader(Documents(rows), batch_sampler=sampler, collate_fn=list)), 2)  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError) as caught:
        next(loader)
    loader.close()
    return str(caught.value)


def test_ranks_that_read_other_tokens_of_equal_lengths_are_told() -> None:
    """Their plans are equal. Without this, some documents would be trained twice, and others never."""
    for message in processes.run(2, of_other_tokens):
        assert "group has ranks [1] with another content of the data set than rank 0" in message


@pytest.mark.parametrize(
    ("name", "value"), [("dp_size", 2), ("max_documents", 8), ("multiple_of_tokens", 16), ("token_buckets", (64, 160))]
)
def test_what_a_packer_promises_of_micro_batches_is_refused(name: str, value: Any) -> None:
    packer = wlb.Packer(num_micro_batches=2, max_tokens=160, cost_model=COST, release="fifo", **{name: value})
    sampler = BalancedBatchSampler(LENGTHS, packer=packer, dp_rank=0, dp_size=packer.dp_size or 1)
    source = StepLoader(DataLoader(Documents(DATA), batch_sampler=sampler, collate_fn=list))  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError, match=f"batches has a packer with {name} = .*leave {name} out"):
        make(source, 1)


def test_documents_wait_in_queues_and_in_states() -> None:
    whole = processes.run(4, sampled, None, 1)
    steps = [check_step([result[0][number] for result in whole]) for number in range(len(whole[0][0]))]
    assert sorted(itertools.chain(*steps)) == sorted([*range(60)] * 2)
    assert whole[0][2] > 0, "a document waits"
    states = whole[0][1]
    assert all(result[1] == states for result in whole), "the same on every rank"
    at = next(number for number, state in enumerate(states) if state["batches"]["packer"]["queues"][0]["ids"])
    rest = processes.run(2, sampled, json.loads(json.dumps(states[at])), 0)
    moved = [check_step([result[0][number] for result in rest]) for number in range(len(rest[0][0]))]
    assert moved == steps[at:]


DOCUMENTS = {
    "id": Document([1, 2], id=2**63),
    "name": Document([1, 2], id="3"),  # type: ignore[arg-type]
    "start": Document([1, 2], id=3, start=-1),
    "next_token": Document([1, 2], id=3, next_token=0.5),  # type: ignore[arg-type]
}


class Stateful:
    """A source with a state that it cannot give once it was read."""

    def __init__(self, batches: Iterator[list[Any]], *, fail: bool) -> None:
        self.batches, self.fail, self.read = batches, fail, False

    def __iter__(self) -> Iterator[list[Any]]:
        self.read = True
        return self.batches

    def state_dict(self) -> dict[str, Any]:
        if self.read and self.fail:
            raise OSError("state gone")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def failing(rank: int, what: str) -> str:
    """What the first or second step says."""

    def batches() -> Iterator[list[Any]]:
        yield [DATA[rank]]
        if rank == 1:
            if what == "read":
                raise OSError("disk gone")
            if what in DOCUMENTS:
                yield [DOCUMENTS[what]]
            yield [np.zeros(400 if what == "long" else 3, np.int64 if what != "type" else np.float32)]
        yield [DATA[rank]]

    def prepare(batch: PackedBatch) -> PackedBatch:
        if what == "prepare" and rank == 2:
            raise MemoryError("nothing to pin")
        return batch

    source = Stateful(batches(), fail=rank == 3) if what == "state" else batches()
    loader = make(source, 4, prepare=prepare, num_micro_batches=5 if what == "plan" and rank == 2 else None)
    try:
        with pytest.raises(wlb.WlbError) as caught:
            list(loader)
        with pytest.raises(wlb.WlbError, match="failed in an earlier step"):
            next(loader)
    finally:
        loader.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("read", "batches failed in step 1 on rank 1: OSError: disk gone"),
        ("type", "batches failed in step 1 on rank 1: WlbError: batches[0] holds float32"),
        ("long", "document 1, which rank 1 read: lengths[1] = 400 exceeds"),
        ("plan", "group has ranks [2] with another plan than rank 0"),
        ("id", f"in step 1 on rank 1: WlbError: batches[0] has id = {2**63}: must be from 0 to 2**63 - 1"),
        ("name", "batches[0] has id = '3': must be an integer"),
        ("start", "batches[0] has start = -1: must be from 0"),
        ("next_token", "batches[0] has next_token = 0.5: must be an integer"),
        ("prepare", "step 0 failed on rank 2: MemoryError: nothing to pin"),
        ("state", "step 0 failed on rank 3: OSError: state gone"),
    ],
)
def test_all_ranks_fail_alike(what: str, text: str) -> None:
    said = processes.run(4, failing, what)
    assert len(set(said)) == 1
    assert text in said[0]


def resolve(rank: int) -> tuple[list[str], str]:
    """Looks up the groups of micro-batches that came from another process; gives the plans, whoever reads what."""
    groups = ContextParallelGroups(build_mesh(dp=2, cp=2, device_type="cpu"))
    plans = []
    for reads in (range(rank, 60, 4), range(15 * rank, 15 * rank + 15)):
        loader = make([[Documents(DATA)[number] for number in reads]], 4)
        (step,) = loader
        loader.close()
        plans.append(step.plan.digest())
        for batch in step.micro_batches:
            sent = pickle.loads(pickle.dumps(batch))
            group, first, size = groups.of(sent), batch.cp_first_rank, batch.cp_size
            assert (group is None) == (size == 1)
            assert group is None or dist.get_process_group_ranks(group) == [*range(first, first + size)]
            with pytest.raises(wlb.WlbError, match=f"this is rank {rank} of 4"):
                groups.of(replace(sent, cp_rank=batch.cp_rank + 1))
    with pytest.raises(wlb.WlbError) as caught:
        groups.of(collate([DATA[0]], cp_rank=rank % 2, cp_size=2))
    return plans, str(caught.value)


def test_a_micro_batch_finds_its_group() -> None:
    results = processes.run(4, resolve)
    assert len({plan for plans, _ in results for plan in plans}) == 1
    assert "is for rank 1 of 2 from None on; this is rank 3 of 4" in results[3][1]


def groups_made_before(rank: int) -> list[list[int]]:
    """Loaders of two pipeline positions, made after groups that not every rank is in; the documents of each step."""
    mesh = build_mesh(pp=2, dp=3, device_type="cpu")
    ContextParallelGroups(mesh)
    both = data_and_context(mesh)
    loader = DynamicCpLoader(
        [[Documents(DATA)[number] for number in range(both.get_local_rank(), 20, 3)]],
        plan=functools.partial(PLAN, world_size=3, max_tokens_per_rank=150),
        group=both.get_group(),
    )
    seen = [np.concatenate([g.document_ids for m in step.plan.micro_batches for g in m.groups]) for step in loader]
    loader.close()
    return [sorted(ids.tolist()) for ids in seen]


def test_any_groups_may_be_made_before() -> None:
    assert processes.run(6, groups_made_before) == [[[*range(20)]]] * 6


def test_one_process_needs_no_group() -> None:
    loader = DynamicCpLoader(
        [DATA[:20], DATA[20:40]], plan=functools.partial(PLAN, world_size=1, max_tokens_per_rank=150)
    )
    steps = [plain(step) for step in loader]
    assert [sorted(itertools.chain(*(batch["ids"] for batch in step["micro_batches"]))) for step in steps] == [
        [*range(20)]
    ] * 2
    assert check_step(steps[:1]) == [*range(20)]
    with pytest.raises(wlb.WlbError, match="is for world_size = 2; the group has 1 ranks"):
        next(DynamicCpLoader([DATA[:20]], plan=functools.partial(PLAN, world_size=2, max_tokens_per_rank=150)))
    with pytest.raises(wlb.WlbError, match="is loaded after a step"):
        loader.load_state_dict(loader.state_dict())


def test_what_is_made_beside_the_step_before_does_not_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only `prepare` moves, which waits until a step may be made."""
    now, made = [0.0], threading.Semaphore(0)
    may_begin = [threading.Event() for _ in range(3)]
    steps = iter(may_begin)

    def prepare(batch: PackedBatch) -> PackedBatch:
        assert next(steps).wait(500)
        now[0] += 1.0
        made.release()
        return batch

    plan = functools.partial(PLAN, world_size=1, max_tokens_per_rank=1000, num_stages=1)
    loader = DynamicCpLoader([DATA[:2]] * 3, plan=plan, prepare=prepare)
    take, asked = loader._steps.take, iter(may_begin)

    def take_now() -> DynamicCpStep[PackedBatch] | None:
        next(asked).set()
        return take()

    monkeypatch.setattr(loader._steps, "take", take_now)
    with monkeypatch.context() as patch:
        patch.setattr("wlb.torch.data.dynamic_cp.time.perf_counter", lambda: now[0])
        first = next(loader)
        assert (len(first.plan), first.stall_seconds) == (1, 1.0)
        may_begin[1].set()  # while the first is trained
        assert all(made.acquire(timeout=500) for _ in range(2))
        assert next(loader).stall_seconds == 0.0
        assert next(loader).stall_seconds == 1.0, "nobody trained in between"


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes"),
    [
        (8, 8, (1, 2, 4, 8)),
        (8, 2, (1, 2, 4, 8)),
        (12, 6, (1, 2, 3, 6, 12)),
        (12, 4, (1, 2, 4, 12)),
        (3, 3, (1, 3)),
        (8, 1, (1, 2, 4, 8)),
        (28, 4, (1, 2, 4, 28)),
    ],
)
def test_heads_limit_groups(heads: int, kv_heads: int, sizes: tuple[int, ...]) -> None:
    """Just the groups that attention takes, and plans have no others."""
    assert cp_sizes("ulysses", num_heads=heads, num_kv_heads=kv_heads) == sizes
    assert cp_sizes("ring", num_heads=heads, num_kv_heads=kv_heads) == "any"
    for size in range(1, heads + 2):
        refused = contextlib.nullcontext() if size in sizes else pytest.raises(wlb.WlbError, match="cannot share")
        with refused:
            check_heads("ulysses", size, heads, kv_heads)
    with pytest.raises(wlb.WlbError, match="transport"):
        cp_sizes("star", num_heads=heads)  # type: ignore[arg-type]
    rng = np.random.default_rng(heads)
    for world_size in (3, 8, 28, 30):
        plan = wlb.plan_dynamic_cp(
            rng.integers(1, 1000, 20),
            world_size=world_size,
            num_stages=1,
            max_tokens_per_rank=1000,
            cost_model=COST,
            group_sizes=sizes,
        )
        assert set(plan.cp_sizes.ravel().tolist()) <= set(sizes)


@pytest.mark.parametrize("sizes", [(2, 4), (1, 4, 2), (), (1, 2, 2)])
def test_sizes_of_groups_ascend_from_one(sizes: tuple[int, ...]) -> None:
    with pytest.raises(wlb.WlbError, match="group_sizes"):
        wlb.plan_dynamic_cp([5], world_size=4, num_stages=1, max_tokens_per_rank=10, cost_model=COST, group_sizes=sizes)


@pytest.mark.parametrize("heads", [{"num_heads": 0}, {"num_heads": 8, "num_kv_heads": 0}, {"num_heads": -8}])
def test_no_heads_are_refused(heads: dict[str, int]) -> None:
    with pytest.raises(wlb.WlbError, match=r"heads = (0|-8): must be at least 1"):
        cp_sizes("ulysses", **heads)


def test_heads_that_keys_do_not_divide_are_refused() -> None:
    with pytest.raises(wlb.WlbError, match="num_kv_heads"):
        cp_sizes("ring", num_heads=8, num_kv_heads=3)


def alone(batches: Any, **options: Any) -> DynamicCpLoader[PackedBatch]:
    plan = functools.partial(PLAN, world_size=1, max_tokens_per_rank=1000, num_stages=1)
    return DynamicCpLoader(batches, **{"plan": plan, **options})


def test_a_state_needs_what_it_was_saved_of() -> None:
    loader = alone([DATA[:2]] * 6)
    for _ in range(5):
        next(loader)
    state = loader.state_dict()
    assert len(list(loader)) == 1
    loader.close()

    whole = alone([DATA[:2]] * 5)
    whole.load_state_dict(state)
    assert list(whole) == [], "all of it was read"
    short = alone([DATA[:2]] * 2)
    short.load_state_dict(state)
    with pytest.raises(wlb.WlbError, match="ends after 2 items, 5 were read before"):
        next(short)
    for other in ({"rank": 1}, {"num_ranks": 2}):
        refusing = alone([DATA[:2]] * 6)
        with pytest.raises(wlb.WlbError, match="was saved with"):
            refusing.load_state_dict(seal({**state, **other}))
        assert refusing.state_dict()["step"] == 0


def closing(rank: int) -> None:
    groups = dist.distributed_c10d._world.pg_map
    before = len(groups)
    loader = make(shares(rank, 4), 4, max_tokens_per_rank=150)
    assert len(groups) == before + 1
    next(loader)
    state = loader.state_dict()
    for _ in range(2):  # a step was made ahead of both
        loader.close()
        assert len(groups) == before
        with pytest.raises(wlb.WlbError, match="loader is closed"):
            next(loader)
        assert loader.state_dict() == state


def test_a_closed_loader_keeps_its_state_and_no_group() -> None:
    processes.run(4, closing)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda lengths: lengths[1:], "does not have each of 5 documents once"),
        (lambda lengths: [*lengths, 3], "does not have each of 5 documents once"),
        (lambda lengths: lengths + (np.arange(5) == 2), f"has {LENGTHS[2] + 1} tokens of document 2, which has"),
        (lambda lengths: lengths[::-1], "tokens of document 0, which has"),
    ],
)
def test_a_plan_has_every_document_whole(change: Any, text: str) -> None:
    plan = functools.partial(PLAN, world_size=1, max_tokens_per_rank=1000)
    with pytest.raises(wlb.WlbError, match=text):
        next(alone([DATA[:5]], plan=lambda lengths: plan(change(lengths))))


def test_the_thread_uses_the_device_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = threading.local()
    chosen.device = 3
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(chosen, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(chosen, "device", device))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    seen: list[int] = []

    def prepare(_batch: object) -> None:
        seen.append(torch.cuda.current_device())

    next(alone([DATA[:2]], prepare=prepare))
    packer = wlb.Packer(num_micro_batches=1, max_tokens=1000, cost_model=COST, release="fifo")
    sampler = BalancedBatchSampler(LENGTHS[:2], packer=packer, dp_rank=0, dp_size=1)
    documents: Any = Documents(DATA[:2])
    ahead: Any = DataLoader(documents, batch_sampler=sampler, collate_fn=list, num_workers=1)
    list(StepLoader(ahead, prepare=prepare))
    assert seen == [3, 3]


def read_by_costs(rank: int) -> list[wlb.DynamicCpPlan]:
    """Documents whose lengths do not tell what they cost; who read one does not change the plan."""
    batches = [[Document(np.arange(4 + number), id=number) for number in range(rank, 12, 2)]]
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=2, num_stages=1, max_tokens_per_rank=48)
    loader = DynamicCpLoader(
        batches,
        plan=functools.partial(plan, exchange=wlb.Exchange(seconds_per_token=0.25)),
        costs=lambda document: 100.0 - 8 * document.id,
        attention_costs=lambda document: 4.0,
        group=dist.group.WORLD,
    )
    plans = [step.plan for step in loader]
    loader.close()
    return plans


def test_a_plan_takes_what_documents_cost() -> None:
    ((first,), (second,)) = processes.run(2, read_by_costs)
    numbers = np.arange(12)
    expected = wlb.plan_dynamic_cp(
        4 + numbers,
        costs=100.0 - 8 * numbers,
        attention_costs=np.full(12, 4.0),
        world_size=2,
        num_stages=1,
        max_tokens_per_rank=48,
        exchange=wlb.Exchange(seconds_per_token=0.25),
    )
    assert first == second == expected
    by_tokens = wlb.plan_dynamic_cp(4 + numbers, cost_model=COST, world_size=2, num_stages=1, max_tokens_per_rank=48)
    assert by_tokens.digest() != expected.digest()


def costs_of_some(rank: int) -> str:
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=2, num_stages=1, max_tokens_per_rank=48)
    of: dict[str, Any] = {} if rank else {"costs": lambda document: 1.0}
    loader = DynamicCpLoader([[Document([1, 2], id=rank)]], plan=plan, group=dist.group.WORLD, **of)
    with pytest.raises(wlb.WlbError) as caught:
        next(loader)
    loader.close()
    return str(caught.value)


def test_ranks_of_which_some_have_costs_are_told() -> None:
    for message in processes.run(2, costs_of_some):
        assert "has ranks [1] with another step or kind of costs than rank 0" in message


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf"), None, "3", True, [], [1.0], (2.0, 1.0)])
def test_a_cost_that_is_none_is_named(cost: Any) -> None:
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=1, num_stages=1, max_tokens_per_rank=48)
    loader = DynamicCpLoader([[Document([1, 2], id=7)]], plan=plan, costs=lambda document: cost)
    with pytest.raises(wlb.WlbError, match=r"costs.*document 7"):
        next(loader)


def test_costs_of_documents_may_be_an_array() -> None:
    """By their ids; what the array cannot know is refused by name."""
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=1, num_stages=1, max_tokens_per_rank=48)
    costs = np.array([3.0, 0.0, 7.0, 5.0])
    batches = [[Document([1, 2, 3], id=3), Document([4], id=0)], [Document([5], id=1)]]
    by_array, by_function = (
        [step.plan for step in DynamicCpLoader(batches, plan=plan, costs=of, attention_costs=np.zeros(4))]
        for of in (costs, lambda document: costs[document.id])
    )
    assert by_array == by_function
    assert by_array[0].seconds == 8.0
    assert by_array[1].seconds == 0.0  # a step whose documents cost nothing is one
    for document, problem in (
        (Document([1], id=4), "has 4 numbers, and none of document 4"),
        ([1, 2], "none of document -1"),
        (Document([1], id=2, start=5), "this is a piece of document 2"),
        (Document([1], id=2, next_token=9), "this is a piece of document 2"),
    ):
        with pytest.raises(wlb.WlbError, match=problem):
            next(DynamicCpLoader([[document]], plan=plan, costs=costs))
    for wrong, problem in (
        (np.ones((2, 2, 2)), r"costs is float64 of shape \(2, 2, 2\)"),
        ([[1.0, 2.0], [3.0, 2.0]], r"costs is float64 of shape \(2, 2\)"),
        (["a"], "must be numbers"),
        ([1.0, -2.0], r"costs\[1\] has -2.0: must be a finite number"),
        ([1.0, float("nan")], r"costs\[1\] has nan"),
        ([0.0, 0.0], "costs has nothing but 0"),
    ):
        with pytest.raises(wlb.WlbError, match=problem):
            DynamicCpLoader([], plan=plan, costs=wrong)
