"""Every setting of a trainer's own loader is carried, derived or refused, as a page's tables say."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from transformers import Trainer, TrainerCallback, TrainerControl
from transformers.trainer_pt_utils import AcceleratorConfig

import wlb
from tests.torch import processes
from tests.trainers import test_lightning
from tests.trainers.small_corpus import documents, flat, llama, outcome
from tests.trainers.test_balance import arguments, balanced, together
from wlb.integrations.huggingface import balance

PAGE = Path(__file__).parents[2] / "docs/reference/settings.md"
FATES = ("carried", "derived", "refused")


def fates(heading: str) -> dict[str, str]:
    """What becomes of each setting, by the tables under a heading of the page."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.S | re.M)
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")]
    found = [(name, fate.strip()) for names, fate in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(found) == len(dict(found)), "a setting has two rows"
    assert {fate for _, fate in found} <= set(FATES)
    return dict(found)


def read_by(functions: Iterable[str]) -> set[str]:
    """Training arguments that methods of the Trainer read."""
    found: set[str] = set()
    for name in functions:
        tree = ast.parse(textwrap.dedent(inspect.getsource(getattr(Trainer, name))))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self.args", "args"):
                found.add(node.attr)
    return found


LOADERS = [
    name
    for name in ("_get_dataloader", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader",
                 "_get_train_sampler", "_get_eval_sampler")
    if hasattr(Trainer, name)
]  # fmt: skip
LOOPS = [
    name
    for name in ("_inner_training_loop", "_run_epoch", "get_batch_samples", "_get_num_items_in_batch",
                 "set_initial_training_values", "_prepare_for_training", "_init_training_state",
                 "_load_callback_state")
    if hasattr(Trainer, name)
]  # fmt: skip


def fields(kind: type[Any]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize(
    ("heading", "installed"),
    [
        ("transformers", read_by([*LOADERS, *LOOPS]) | fields(TrainerControl)),
        ("accelerate", fields(AcceleratorConfig) | fields(DataLoaderConfiguration)),
        ("Lightning", {*inspect.signature(lightning.Trainer.__init__).parameters} - {"self"}),
    ],
)
def test_each_setting_is_in_a_table(heading: str, installed: set[str]) -> None:
    assert len(installed) > 7
    assert sorted(installed - fates(heading).keys()) == []


# --- refused ---------------------------------------------------------------------------------------------------------

REFUSED: dict[str, dict[str, Any]] = {
    "dataloader_in_order": {"dataloader_in_order": False},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "split_batches": {"accelerator_config": {"split_batches": True}},
    "dispatch_batches": {"accelerator_config": {"dispatch_batches": True}},
}


def refused(*headings: str) -> set[str]:
    return {name for heading in headings for name, fate in fates(heading).items() if fate == "refused"}


def test_what_the_tables_call_refused_is_tried() -> None:
    assert refused("transformers", "accelerate") == {*REFUSED, "n_gpu", "average_tokens_across_devices"}
    assert refused("Lightning") == {*LIGHTNING}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_argument_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        balanced(tmp_path, **REFUSED[name])
    assert raised.value.argument == name


def test_several_devices_of_one_process_are_refused(tmp_path: Path) -> None:
    trainer: Any = Trainer(llama(), arguments(tmp_path), train_dataset=documents(), data_collator=together)
    trainer.args._n_gpu = 2
    with pytest.raises(wlb.WlbError, match="n_gpu = 2"):
        balance(trainer, max_tokens=64)


def apart(rank: int, folder: Path) -> str:
    with pytest.raises(wlb.WlbError) as raised:
        balanced(folder, 2, average_tokens_across_devices=False)
    return str(raised.value)


def test_ranks_that_count_alike_are_refused(tmp_path: Path) -> None:
    assert all("average_tokens_across_devices = False" in text for text in processes.run(2, apart, tmp_path))


LIGHTNING: dict[str, dict[str, Any]] = {
    "overfit_batches": {"overfit_batches": 4},  # whole steps
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
}


@pytest.mark.parametrize("name", LIGHTNING)
def test_a_refused_argument_of_lightning_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        test_lightning.fit(tmp_path, stop=2, **LIGHTNING[name])
    assert raised.value.argument == name


# --- carried ---------------------------------------------------------------------------------------------------------


def test_arguments_of_the_loader_are_carried(tmp_path: Path) -> None:
    trainer = balanced(
        tmp_path,
        dataloader_num_workers=2,
        dataloader_prefetch_factor=3,
        dataloader_persistent_workers=True,
        dataloader_pin_memory=False,
        dataloader_multiprocessing_context="spawn",
    )
    loader = trainer.get_train_dataloader().steps._loader
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (2, 3, True)
    assert loader.pin_memory is False
    assert loader.multiprocessing_context.get_start_method() == "spawn"


def test_rows_are_put_on_the_device_without_waiting(tmp_path: Path) -> None:
    given = []
    for non_blocking in (False, True):
        trainer = balanced(tmp_path, accelerator_config={"non_blocking": non_blocking}, max_steps=3)
        loader = trainer.get_train_dataloader()
        assert loader._device == (trainer.args.device if non_blocking else None)
        given.append([row["input_ids"] for row in loader])
    assert all(torch.equal(one, other) for one, other in zip(*given, strict=True))


class Counts(TrainerCallback):
    """Has a state of its own."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"steps": self.steps}}


def test_states_of_callbacks_are_restored_and_training_goes_on(tmp_path: Path) -> None:
    saving = {
        "save_strategy": "steps",
        "save_steps": 3,
        "max_steps": 6,
        "restore_callback_states_from_checkpoint": True,
    }
    whole = balanced(tmp_path, **saving)
    whole.train()
    resumed = balanced(tmp_path / "resumed", **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert np.array_equal(flat(whole.model), flat(resumed.model))
    assert outcome(whole)[0] == outcome(resumed)[0]
    assert whole._wlb_callback.state()["steps"] == resumed._wlb_callback.state()["steps"]


class Flags(TrainerCallback):
    """Sets one flag after the third step."""

    def __init__(self, flag: str) -> None:
        self.flag = flag

    def on_step_end(self, args: Any, state: Any, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == 3:
            setattr(control, self.flag, True)


def test_a_flag_does_what_it_does_in_a_plain_trainer(tmp_path: Path) -> None:
    expected = {
        "should_training_stop": lambda trainer: trainer.state.global_step == 3,
        "should_save": lambda trainer: Path(trainer.args.output_dir, "checkpoint-3").is_dir(),
        "should_evaluate": lambda trainer: [
            line["step"] for line in trainer.state.log_history if "eval_loss" in line
        ] == [3],
        "should_log": lambda trainer: [line["step"] for line in trainer.state.log_history if "loss" in line] == [3],
    }  # fmt: skip
    assert {*expected, "should_epoch_stop"} == fields(TrainerControl)  # test_own_loaders.py has the last one
    for flag, holds in expected.items():
        options = {"logging_strategy": "no", "callbacks": [Flags(flag)], "max_steps": 4}
        trainer = balanced(tmp_path / flag, **options)
        trainer.train()
        assert holds(trainer), flag


class Leaves(test_lightning.Module):
    """Leaves each epoch at its seventh micro-batch, inside of the second step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 6 else None

    def on_train_epoch_start(self) -> None:
        state = self.trainer.datamodule._given.state()["steps"]  # type: ignore[attr-defined]
        self.began = [*getattr(self, "began", []), (state["epoch"], state["position"])]


def test_a_module_of_lightning_leaves_the_rest_of_an_epoch(tmp_path: Path) -> None:
    module, trainer = test_lightning.fit(tmp_path, stop=-1, module=Leaves(), fitted=True)
    assert trainer.accumulate_grad_batches == 4
    assert module.began == [(0, 0), (1, 0)]  # the second one would go on in the first
    assert (trainer.global_step, trainer.current_epoch) == (2, 2)
    state = trainer.datamodule.state_dict()
    assert (state["trained"], state["steps"]["epoch"]) == (2, 2)
