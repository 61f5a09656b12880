"""`balanced(run_exp)` inside LLaMA-Factory; `make test-trainers` runs it with the versions that this asks for."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from tests.torch import processes
from tests.trainers import advised, programs
from tests.trainers.page import block
from tests.trainers.programs import check_losses, check_resuming, save_model
from tests.trainers.small_corpus import llama
from tests.trainers.text_corpus import texts, tokenised
from wlb._errors import WlbError
from wlb.integrations.llamafactory import balanced
from wlb_tools.command.output.trainers import ENTRIES

pytest.importorskip("llamafactory")
with mock.patch.object(torch.version, "cuda", None):  # it refuses one of another CUDA than its own, which no test needs
    pytest.importorskip("torchaudio")

from llamafactory.train.tuner import run_exp


def configuration(model: Path, output: Path, **changes: Any) -> dict[str, Any]:
    # A document without a prompt has something to learn, but LLaMA-Factory drops it.
    rows = [{"instruction": text["prompt"], "input": "", "output": text["completion"]} for text in texts()]
    (model / "documents.json").write_text(json.dumps([row for row in rows if row["instruction"].strip()]))
    described: dict[str, Any] = {"file_name": "documents.json"}
    if changes.get("stage") == "dpo":
        described |= {"ranking": True, "columns": {"prompt": "instruction", "chosen": "output", "rejected": "output"}}
    (model / "dataset_info.json").write_text(json.dumps({"documents": described}))
    options: dict[str, Any] = {
        "model_name_or_path": str(model),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "documents",
        "dataset_dir": str(model),
        "template": "empty",
        "cutoff_len": 200,
        "output_dir": str(output),
        "per_device_train_batch_size": 8 // int(os.environ.get("WORLD_SIZE", 1)),
        "num_train_epochs": 4,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_steps": 4,
        "disable_tqdm": True,
        "preprocessing_num_workers": 1,
    }
    return options | changes


def execute(code: str, model: Path, output: Path) -> None:
    """As `python train.py CONFIGURATION` runs it."""
    file = model / f"{output.name}{os.environ.get('RANK', '')}.yaml"
    file.write_text(yaml.safe_dump(configuration(model, output)))
    with mock.patch.object(sys, "argv", ["train.py", str(file)]):
        exec(code, {})


def program(model: Path, output: Path, options: dict[str, Any]) -> None:
    """The page's, with these options."""
    given = ", ".join(f"{name}={value!r}" for name, value in options.items())
    code = block("llamafactory")
    assert "max_tokens=65536" in code
    execute(code.replace("max_tokens=65536", given), model, output)


ROWS = [tokenised(text) for text in texts() if text["prompt"].strip()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_takes_the_steps_of_one_document_at_a_time(ranks: int, tmp_path: Path) -> None:
    check_losses(program, ROWS, ranks, tmp_path)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_resuming(program, tmp_path)


def from_lines(rank: int, model: Path, output: Path, lines: str) -> advised.Made:
    def as_written(model: Path, output: Path, options: dict[str, Any]) -> None:
        execute(lines, model, output)

    return advised.calling(lambda: programs.run(rank, as_written, model, output, 2))


def test_the_lines_of_advice_make_the_plan_that_they_recommend(tmp_path: Path) -> None:
    tuned = advised.advised("llamafactory", advised.of(llama().config), "wlb")
    lines = ENTRIES["llamafactory"].written(tuned)
    for made in processes.run(2, from_lines, save_model(tmp_path), tmp_path / "out", lines):
        assert advised.predicted(tuned).packers[0] in made.packers


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("packing", {"packing": True}),
        ("packing", {"stage": "pt"}),
        ("stage", {"stage": "dpo"}),
        ("stage", {"stage": "ppo"}),
    ],
)
def test_what_cannot_be_balanced_is_refused(argument: str, changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WlbError) as refused:
        balanced(run_exp, max_tokens=64)(configuration(save_model(tmp_path), tmp_path / "out", **changes))
    assert refused.value.argument == argument


def test_an_option_that_is_unknown_is_named_where_it_is_given() -> None:
    with pytest.raises(WlbError, match=r"max_delays is no option here; known are .*max_delay, "):
        balanced(run_exp, max_tokens=64, max_delays=3)


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wlb.integrations.versions.version", lambda package: "0.9.4")
    with pytest.raises(WlbError, match=r"llamafactory is 0.9.4: 0.9.5.dev0 or newer is needed"):
        balanced(run_exp, max_tokens=64)


def test_what_trains_elsewhere_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = configuration(save_model(tmp_path), tmp_path / "out")
    with monkeypatch.context() as ray:
        ray.setenv("USE_RAY", "1")
        with pytest.raises(WlbError, match="USE_RAY"):
            balanced(run_exp, max_tokens=64)(options)
    with pytest.raises(WlbError, match="none of transformers' began to train"):
        balanced(run_exp, max_tokens=64)(options | {"do_train": False})
