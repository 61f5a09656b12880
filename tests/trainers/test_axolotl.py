"""The plugin inside axolotl; `make test-trainers` runs it with the versions that this asks for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from tests.torch import processes
from tests.trainers import advised, programs
from tests.trainers.page import block
from tests.trainers.programs import check_losses, check_resuming, save_model
from tests.trainers.small_corpus import llama
from tests.trainers.text_corpus import texts, tokenised
from wlb._errors import WlbError
from wlb_tools.command.output.trainers import ENTRIES

pytest.importorskip("axolotl")

from axolotl.cli.train import do_cli
from axolotl.integrations.base import BasePlugin

from wlb.integrations.axolotl import BalancePlugin


class OnCpu(BasePlugin):
    """axolotl takes it for granted that each of several ranks has a GPU."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = None  # in this hook: all others come too late


def configuration(model: Path, output: Path, options: dict[str, Any], **changes: Any) -> str:
    """A YAML file, with what the page adds to it; of `wlb` with these options."""
    page = yaml.safe_load(block("BalancePlugin"))
    assert (set(page), page["wlb"]) == ({"plugins", "wlb"}, {"max_tokens": 65536})
    rows = []
    for text in texts():
        segments = [{"label": name == "completion", "text": text[name]} for name in ("prompt", "completion")]
        rows.append(json.dumps({"segments": segments}))
    documents = model / "documents.jsonl"
    documents.write_text("\n".join(rows))
    found: dict[str, Any] = {
        "plugins": [*page["plugins"], f"{__name__}.{OnCpu.__name__}"],
        "wlb": options,
        "base_model": str(model),
        "datasets": [{"path": str(documents), "ds_type": "json", "type": "input_output"}],
        "dataset_prepared_path": str(model / "prepared"),
        "dataset_num_proc": 1,
        "output_dir": str(output),
        "auto_resume_from_checkpoints": True,
        "shuffle_merged_datasets": False,
        "sequence_len": 200,
        "micro_batch_size": 8 // int(os.environ.get("WORLD_SIZE", 1)),
        "gradient_accumulation_steps": 1,
        "num_epochs": 4,
        "learning_rate": 0.1,
        "lr_scheduler": "constant",
        "optimizer": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_steps": 4,
        "attn_implementation": "sdpa",
        "bf16": False,
    }
    file = model / f"{output.name}{os.environ.get('RANK', '')}.yaml"
    file.write_text(yaml.safe_dump(found | changes))
    return str(file)


def program(model: Path, output: Path, options: dict[str, Any]) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as `accelerate launch --cpu`
    # Between two ranks it asks CUDA whether devices reach each other: the answer where there are none.
    with mock.patch("axolotl.utils.environment.check_cuda_p2p_support", return_value=True):
        do_cli(configuration(model, output, options))


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_takes_the_steps_of_one_document_at_a_time(ranks: int, tmp_path: Path) -> None:
    check_losses(program, [tokenised(text) for text in texts()], ranks, tmp_path)


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_resuming(program, tmp_path)


def from_lines(rank: int, model: Path, output: Path, lines: str) -> advised.Made:
    def as_written(model: Path, output: Path, options: dict[str, Any]) -> None:
        assert yaml.safe_load(lines)["plugins"] == yaml.safe_load(block("BalancePlugin"))["plugins"]
        program(model, output, yaml.safe_load(lines)["wlb"])

    return advised.calling(lambda: programs.run(rank, as_written, model, output, 2))


def test_the_lines_of_advice_make_the_plan_that_they_recommend(tmp_path: Path) -> None:
    tuned = advised.advised("axolotl", advised.of(llama().config), "wlb")
    lines = ENTRIES["axolotl"].written(tuned)
    for made in processes.run(2, from_lines, save_model(tmp_path), tmp_path / "out", lines):
        assert advised.predicted(tuned).packers[0] in made.packers


@pytest.mark.parametrize(
    ("argument", "options", "changes"),
    [
        ("wlb", {}, {}),
        ("max_delays", {"max_tokens": 64, "max_delays": 3}, {}),
        ("sample_packing", {"max_tokens": 64}, {"sample_packing": True, "pad_to_sequence_len": False}),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    argument: str, options: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(WlbError) as refused:
        do_cli(configuration(save_model(tmp_path), tmp_path / "out", options, **changes))
    assert refused.value.argument == argument


def test_a_version_that_would_not_ask_the_plugin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(BasePlugin, "post_trainer_create")
    with pytest.raises(WlbError, match=r"plugins have no post_trainer_create: take 0.19"):
        BalancePlugin().get_input_args()
