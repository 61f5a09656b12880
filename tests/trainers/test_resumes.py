"""Resumes of loops and of transformers' Trainer: every document once an epoch, wherever a run was saved.

Lightning's are in test_lightning_resumes.py, torchtitan's in test_torchtitan.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import TrainerCallback

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.trainers.test_live import Counting, Stream, balanced, counting, rows, tokens_of

EPOCHS = 2
ROWS = rows(1, 26)
EACH = tokens_of(ROWS)
KINDS = ["inside an epoch", "end of an epoch", "twice without reading", "other ranks", "another batch"]


# --- loops -----------------------------------------------------------------------------------------------------------


def loop(kind: str, tokens_per_batch: int) -> Any:
    group = dist.group.WORLD if dist.is_initialized() else None
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    if kind == "balanced_loader":
        options: dict[str, Any] = {"num_epochs": EPOCHS, "max_document_tokens": 48, "cost_model": cost}
        return wt.balanced_loader(ROWS, max_tokens=64, tokens_per_batch=tokens_per_batch, group=group, **options)
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=64,
        max_document_tokens=48,
        oversize="split",
        cost_model=cost,
        release="adaptive",
    )
    streams = [ROWS[:5] * EPOCHS, ROWS[5:] * EPOCHS]
    return wt.BalancedStream(
        streams, packer=packer, collate_fn=wt.collate, group=group, tokens_per_batch=tokens_per_batch
    )


def steps_of(loader: Any, most: int = 10**9) -> tuple[Counter[int], list[tuple[int, Any]]]:
    """Tokens of the next steps, and of each its epoch and its state."""
    found: Counter[int] = Counter()
    states: list[tuple[int, Any]] = []
    ended = False
    while not ended and len(states) < most:
        for step in loader:
            found.update(token for batch in step.micro_batches for token in batch.tokens.tolist())
            states.append((step.epoch, step.state))
            if len(states) == most:
                break
        ended = isinstance(loader, wt.BalancedStream) or loader.ended
    return found, states


def rest_of(rank: int, kind: str, tokens_per_batch: int, state: Any) -> Counter[int]:
    loader = loop(kind, tokens_per_batch)
    loader.load_state_dict(state)
    return steps_of(loader)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["balanced_loader", "BalancedStream"])
def test_a_loop_goes_on(name: str, kind: str) -> None:
    _, states = steps_of(loop(name, 160))
    most = sum(epoch == 0 for epoch, _ in states) if kind == "end of an epoch" else 2
    found, given = steps_of(loop(name, 160), most)
    state = given[-1][1]
    if kind == "twice without reading":
        for _ in range(2):
            loader = loop(name, 160)
            loader.load_state_dict(state)
            state = copy.deepcopy(loader.state_dict())
    if kind == "other ranks":
        found = sum(processes.run(2, rest_of, name, 160, state), found)
    else:
        found += rest_of(0, name, 90 if kind == "another batch" else 160, state)
    assert found == Counter({token: EPOCHS * count for token, count in EACH.items()})


# --- transformers ----------------------------------------------------------------------------------------------------


class Killed(Exception):
    """A run that ends after it has saved."""


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > self.step:
            raise Killed


class SaveFirst(TrainerCallback):
    trainer: Any

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._save_checkpoint(self.trainer.model, None)
        raise Killed


class ByStep(Counting):
    """Writes down the tokens of each step."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps = getattr(self, "steps", [])
        self.steps.append((self.state.global_step, Counter(inputs["input_ids"].flatten().tolist())))
        return super().training_step(model, inputs, *args, **kwargs)


class Rates(TrainerCallback):
    """Writes down the rate of each step; saves after one and ends the run at the next."""

    def __init__(self, save: int | None = None) -> None:
        self.save = save
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_save = state.global_step == self.save
        if self.save is not None and state.global_step > self.save:
            raise Killed


def rates_of(rank: int, folder: Path, save: int | None, resume: bool, options: dict[str, Any]) -> tuple[Any, int, int]:
    given: dict[str, Any] = {"num_train_epochs": EPOCHS, "save_strategy": "no", "warmup_steps": 4, "seed": 3} | options
    trainer = balanced(counting(folder, data=ROWS * 4, **given))
    seen = Rates(save)
    trainer.add_callback(seen)
    with contextlib.suppress(Killed):
        trainer.train(resume_from_checkpoint=resume)
    return seen.rates, trainer.args.max_steps, trainer.args.gradient_accumulation_steps


def linear(position: float, length: int) -> float:
    """Hugging Face's schedule: up in 4 steps, and down to 0."""
    return 1e-2 * (position / 4 if position < 4 else max(0.0, (length - position) / (length - 4)))


@pytest.mark.a_few(4)
@pytest.mark.parametrize("save", [2, 9])  # while it rises, and after
@pytest.mark.parametrize(
    ("ranks", "options", "pace"),
    [
        (1, {"per_device_train_batch_size": 2}, 0.5),
        (1, {"per_device_train_batch_size": 6}, 1.5),
        (2, {}, 2.0),
        (2, {"per_device_train_batch_size": 2}, 1.0),
        (1, {"num_train_epochs": EPOCHS + 1}, 1.0),
        (1, {"max_steps": 40, "per_device_train_batch_size": 2}, None),
    ],
    ids=["half", "half more", "ranks", "ranks with the same batch", "another epoch", "steps were given"],
)
def test_a_learning_rate_goes_on_where_the_documents_stand(
    ranks: int, options: dict[str, Any], pace: float | None, save: int, tmp_path: Path
) -> None:
    first, whole, _ = rates_of(0, tmp_path, save, False, {})
    parts = processes.run(ranks, rates_of, tmp_path, None, True, options)
    steps = parts[0][1]
    each = 1.0 if pace is None else pace
    length = int(save + (steps - save) * each + 0.5)
    assert first[:save] == pytest.approx([linear(at, whole) for at in range(save)], abs=1e-12)
    for rates, _, _ in parts:
        assert rates[0] == pytest.approx(linear(save, whole), abs=1e-12), "which is in the checkpoint"
        places = [int(save + at * each + 0.5) for at in range(1, steps - save)]
        assert rates[1:] == pytest.approx([linear(at, length) for at in places], abs=1e-12)
        assert rates[-1] <= 1e-2 * (each + 1) / (length - 4)
    if pace not in (None, 1.0):
        assert abs(length - whole) <= 3, "as long as it was, but for what ends are filled with"


def test_a_learning_rate_goes_on_through_several_resumes(tmp_path: Path) -> None:
    """By half a step, then by one again, and again after nothing was read."""
    _, whole, _ = rates_of(0, tmp_path, 6, False, {})
    half, longer, _ = rates_of(0, tmp_path, 16, True, {"per_device_train_batch_size": 2})
    rest, total, _ = rates_of(0, tmp_path, None, True, {})
    length = int(6 + 10 * 0.5 + (total - 16) + 0.5)
    assert abs(length - whole) <= 3 < longer - whole
    assert rest[1:] == pytest.approx([linear(11 + at, length) for at in range(1, total - 16)], abs=1e-12)
    places = [int(6 + at / 2 + 0.5) for at in range(1, 10)]
    assert half[1:10] == pytest.approx([linear(at, int(6 + (longer - 6) / 2 + 0.5)) for at in places], abs=1e-12)


def train(rank: int, folder: Path, streamed: bool, callback: Any, resume: bool, options: dict[str, Any]) -> Any:
    defaults: dict[str, Any] = {"num_train_epochs": EPOCHS, "seed": 3}
    if streamed:  # ended by its data
        defaults |= {"max_steps": 500, "gradient_accumulation_steps": 4 // dist.get_world_size()}
        defaults |= {"accelerator_config": {"dispatch_batches": None}}
    trainer = counting(folder, data=Stream(ROWS * EPOCHS) if streamed else ROWS, **defaults | options)
    trainer.__class__ = ByStep
    trainer = balanced(trainer)
    if callback is not None:
        callback.trainer = trainer
        trainer.add_callback(callback)
    with contextlib.suppress(Killed):
        trainer.train(resume_from_checkpoint=resume)
    return getattr(trainer, "steps", [])


@pytest.mark.a_few(4)
@pytest.mark.parametrize(
    ("streamed", "kind"),
    [(False, kind) for kind in KINDS] + [(True, kind) for kind in KINDS if kind != "end of an epoch"],  # has none
)
def test_transformers_trainer_goes_on(streamed: bool, kind: str, tmp_path: Path) -> None:
    saves = {"save_strategy": "epoch"} if kind == "end of an epoch" else {"save_strategy": "steps", "save_steps": 2}
    (whole,) = processes.run(1, train, tmp_path / "whole", streamed, None, False, {"save_strategy": "no"})
    last = max(step for step, _ in whole)
    killed = Kill(last - 1 if kind == "end of an epoch" else 2)
    (first,) = processes.run(1, train, tmp_path, streamed, killed, False, saves | {"save_total_limit": 1})
    (saved,) = (int(path.name.partition("-")[2]) for path in tmp_path.glob("checkpoint-*"))
    if kind == "twice without reading":
        processes.run(1, train, tmp_path, streamed, SaveFirst(), True, saves)
    options: dict[str, Any] = {}
    if kind == "another batch":
        options = {"gradient_accumulation_steps": 3} if streamed else {"per_device_train_batch_size": 2}
    ranks = 2 if kind == "other ranks" else 1
    parts = processes.run(ranks, train, tmp_path, streamed, None, True, {"save_strategy": "no"} | options)
    before = [tokens for step, tokens in first if step < saved]
    found = sum((tokens for part in parts for _, tokens in part), sum(before, Counter[int]()))
    expected = {token: EPOCHS * count for token, count in EACH.items()}
    assert {token: found[token] for token in expected} == expected, "0 fills up empty rows"
    if kind in KINDS[:3]:
        assert parts[0] == [each for each in whole if each[0] >= saved]
