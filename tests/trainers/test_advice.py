"""What `wlb advise` pastes into a trainer makes the plan that it recommends: the lines run in the real trainers.

Lines for axolotl, LLaMA-Factory, TRL and torchtitan run in the test files of these trainers.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import Trainer, TrainingArguments

import wlb_tools
from tests.torch import processes
from tests.trainers.advised import CONTEXT, LENGTHS, RANKS, Made, advised, of, predicted, rows, running
from tests.trainers.small_corpus import llama
from wlb.integrations.huggingface.balance import check_named
from wlb_tools.command.errors import CliError
from wlb_tools.command.inputs.stream import trainer_named
from wlb_tools.command.output.trainers import ENTRIES


def hugging_face(rank: int, folder: str, lines: str) -> Made:
    arguments: Any = {"use_cpu": True, "report_to": [], "max_steps": 2, "per_device_train_batch_size": 1}
    return running(lines, {"trainer": Trainer(llama(), TrainingArguments(folder, **arguments), train_dataset=rows())})


@pytest.mark.parametrize(("sync", "best"), [("micro_batch", "wlb"), ("step", "no_waiting")])
def test_in_hugging_faces_trainer(sync: str, best: str, tmp_path: Path) -> None:
    tuned = advised("huggingface", of(llama().config), best, sync=sync)
    expected = predicted(tuned).packers[0]
    assert (expected["shape"]["ranks"] is not None) == (sync == "micro_batch")
    for made in processes.run(RANKS, hugging_face, str(tmp_path), ENTRIES["huggingface"].written(tuned)):
        assert expected in made.packers


def test_in_lightning() -> None:
    lightning = pytest.importorskip("lightning")
    tuned = advised("lightning", of(llama().config), "wlb", layout={"dp": 1})
    model = llama()

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, row: Any) -> Any:
            return self.model(**row).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, max_steps=1, enable_checkpointing=False, **quiet
    )
    names = {"documents": rows(), "model": model, "Module": Module, "trainer": trainer}
    made = running(f"{ENTRIES['lightning'].written(tuned)}trainer.fit(Module(), data)\n", names)
    assert predicted(tuned).packers[0] in made.packers


def megatrons(rank: int, lines: str, dynamic_cp: bool) -> Made:
    from tests.trainers.megatron_run import Run, build, configuration, initialize, on_cpu

    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(dynamic_cp=dynamic_cp)
        initialize(run)
        names = {"model": build(run, configuration(run, finalize_model_grads_func=print))}
        made_by = "plan_dynamic_cp" if dynamic_cp else "Packer"
        return running(f"{lines}next(iter(data))\ndata.close()\n", names, made_by)


@pytest.mark.parametrize("best", ["wlb", "dynamic_cp"])
def test_in_megatron(best: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    from tests.trainers.megatron_run import VOCABULARY, Run, configuration
    from tests.trainers.test_megatron_data import files
    from wlb.integrations.megatron.costs import cost_of

    monkeypatch.chdir(tmp_path)
    prefix = files(tmp_path, [[np.ones(length, dtype=np.int32)] for length in LENGTHS.tolist()])
    for ending in (".bin", ".idx"):
        Path(prefix + ending).rename(tmp_path / f"corpus_text_document{ending}")
    costs = cost_of(configuration(Run()), vocab_size=VOCABULARY)
    tuned = advised("megatron", of(llama().config), best, cost_model=costs)
    expected = predicted(tuned)
    for made in processes.run(RANKS, megatrons, ENTRIES["megatron"].written(tuned), best == "dynamic_cp"):
        if best == "dynamic_cp":
            assert made.planned
            assert expected.planned[0].items() <= made.planned[0].items()
        else:
            assert expected.packers[0] in made.packers


def test_arguments_of_other_trainers_are_those_of_balance() -> None:
    """Axolotl and LLaMA-Factory pass them on, TRL's trainer is one of Hugging Face's."""
    tuned = advised("axolotl", of(llama().config), "no_waiting", sync="micro_batch")
    told = yaml.safe_load(ENTRIES["axolotl"].written(tuned))
    check_named(told["wlb"])
    assert told["wlb"]["sync"] == "micro_batch"
    call = "balanced(run_exp, " + ", ".join(f"{name}={value!r}" for name, value in told["wlb"].items())
    written = "".join(ENTRIES["llamafactory"].written(tuned).split()).replace(",)", ")")
    assert "".join(call.split()).replace("'", '"') in written
    assert ENTRIES["trl"].written(tuned).endswith(ENTRIES["huggingface"].written(tuned).partition("\n\n")[2])


def test_a_layout_that_the_trainer_does_not_run_is_refused() -> None:
    layout = wlb_tools.ParallelLayout(tp=2, cp=2, dp=2)
    scenario = wlb_tools.Scenario(
        model=of(llama().config), hardware=wlb_tools.Hardware.preset("h100"), layout=layout, context=CONTEXT
    )
    with pytest.raises(CliError, match="--tp 2 --cp 2; give --tp 1 --cp 1 --dp 8"):
        ENTRIES["trl"].check("trl", scenario)
    ENTRIES["megatron"].check("megatron", scenario)


@pytest.mark.parametrize(
    ("text", "name"),
    [("TRL", "trl"), ("Hugging Face", "huggingface"), ("LLaMA-Factory", "llamafactory"), ("Megatron-LM", "megatron")],
)
def test_names_of_trainers(text: str, name: str) -> None:
    assert trainer_named(text) == name
    with pytest.raises(CliError, match="--trainer nemo: must be one of loop, hugging"):
        trainer_named("nemo")
    with pytest.raises(CliError, match=r"--trainer Grain: it takes a wlb\.Packer of your own .* give --trainer loop"):
        trainer_named("Grain")
