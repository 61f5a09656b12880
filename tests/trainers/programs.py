"""Inside programs of others that make their own trainers."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from transformers import Trainer

from tests.torch import processes
from tests.trainers.small_corpus import StopAt, flat, llama, outcome
from tests.trainers.text_corpus import Row, planned, reference, tokenizer

STEPS = 20
Program = Callable[[Path, Path, dict[str, Any]], None]  # of a model's folder, an output folder, options of `balance`


def save_model(folder: Path) -> Path:
    """What programs read: a model and a tokeniser."""
    tokenizer().save_pretrained(folder / "model")
    llama().save_pretrained(folder / "model")
    return folder / "model"


def run(rank: int, program: Program, model: Path, output: Path, stop: int, killed: bool = False) -> Any:
    """What the program's trainer did until it was stopped: losses, weights, and this rank's part of the plan."""
    begun: list[Any] = []
    own = Trainer.train

    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        begun.append(trainer)
        trainer.add_callback(StopAt(stop, killed=killed))
        return own(trainer, *args, **kwargs)

    Trainer.train = train  # type: ignore[method-assign, assignment]
    dist.destroy_process_group = lambda *group: None  # programs end it, but here the test does
    program(model, output, {"max_tokens": 64, "max_document_tokens": 48})
    assert begun[0].args.world_size == dist.get_world_size()
    return *outcome(begun[0]), planned(begun[0])


def check_losses(program: Program, rows: list[Row], ranks: int, folder: Path) -> None:
    """Those of one document at a time."""
    found = processes.run(ranks, run, program, save_model(folder), folder / "out", STEPS)
    parts = [plan[:STEPS] for _, _, plan in found]
    losses, model = reference([list(chain(*step)) for step in zip(*parts, strict=True)], rows)
    for found_losses, weights, _ in found:
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(weights, flat(model), rtol=0, atol=1e-5 * np.abs(flat(model)).max())


def check_resuming(program: Program, folder: Path) -> None:
    """Killed, and on bit for bit after the last checkpoint; the program finds it by itself."""
    model = save_model(folder)
    with pytest.raises(processes.RankFailed, match="died"):
        processes.run(2, run, program, model, folder / "out", 6, True)
    found = processes.run(2, run, program, model, folder / "out", 9)[0]
    whole = processes.run(2, run, program, model, folder / "whole", 9)[0]
    assert found[0] == whole[0]
    np.testing.assert_array_equal(found[1], whole[1])
