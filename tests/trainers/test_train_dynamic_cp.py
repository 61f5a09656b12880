"""The trainer under dynamic context parallelism: it learns what one process learns, and goes on when it was killed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import torch
from test_train import CONFIG, SETTINGS, documents, example, mesh_of, rows, run

import wlb
from wlb.audit import audit
from wlb.torch.data import DynamicCpLoader, collate
from wlb.torch.groups import data_and_context
from wlb.torch.loss import token_normalized_loss
from wlb.torch.pipeline import pipeline_step

# A document of one token, some shorter than their group, some that need half the ranks of a stage or all.
STEPS = [[1, 37, 5, 2, 64, 3, 1, 1, 20, 30, 28, 15, 60], [11, 9, 30, 1, 2]]
LAYOUTS: dict[str, dict[str, Any]] = {
    "all_gather": {"pp": 2},
    "ring": {"pp": 2, "cp": 2, "virtual_stages": 2, "schedule": "interleaved_1f1b", "transport": "ring"},
    "ulysses": {"pp": 2, "cp": 4, "transport": "ulysses"},
    "usp": {"pp": 2, "transport": "usp", "ulysses_size": 2, "activation_checkpointing": True},
    "heads": {"tp": 2, "transport": "ulysses"},  # one key head on a rank of two query heads: groups of at most two
}
# Where ranks run padded: the padding is learnt by nobody.
SIZES: dict[str, dict[str, Any]] = {"all_gather": {"multiple_of_tokens": 8, "max_documents": 4}}
DYNAMIC = replace(SETTINGS, plan="dynamic_cp", cp_exchange=4.0)


def dynamic_gradients(rank: int, settings: example.Settings, sizes: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every step: the group sizes, this rank's part of the loss, the norm, and the gradients of its stages."""
    device, mesh = torch.device("cpu"), mesh_of(settings)
    both = data_and_context(mesh)
    me, size = both.get_local_rank(), both.size()
    group_of = example.context_groups(settings, mesh)
    stages, _ = example.build_model(settings, settings.model, mesh, device)
    cost = wlb.CostModel.from_flops(**CONFIG.shape(), attention_efficiency=0.55)

    def plan(lengths: np.ndarray) -> wlb.DynamicCpPlan:
        heads = {"num_heads": CONFIG.num_heads // settings.tp, "num_kv_heads": CONFIG.num_kv_heads // settings.tp}
        return wlb.plan_dynamic_cp(
            lengths,
            world_size=size,
            num_stages=settings.pp,
            num_virtual_stages=settings.virtual_stages,
            max_tokens_per_rank=32,
            max_cp_size=example.max_cp_size(settings.transport, **heads),
            cost_model=cost,
            cp_seconds_per_exchange=4.0 * float(cost.cost([1])[0]),
            cp_overlap=0.0,
            **sizes,
        )

    loader = DynamicCpLoader([documents(lengths[me::size]) for lengths in STEPS], plan=plan, group=both.get_group())
    results = []
    for step in loader:
        losses = pipeline_step(
            stages,
            [example.for_pipeline(batch, group_of(batch)) for batch in step.micro_batches],
            schedule=settings.schedule,
            loss_fn=lambda logits, labels, valid=step.num_valid_tokens: token_normalized_loss(
                logits, labels, num_valid_tokens=valid
            ),
        )
        found = {}
        for stage in stages:
            for name, parameter in stage.submod.named_parameters():
                found[name] = np.array(getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)())
        norm = example.clip_gradients(stages, 1e9, mesh)
        for stage in stages:
            stage.submod.zero_grad()
        loss = float(sum(loss.item() for loss in losses)) / settings.tp
        results.append({"sizes": step.plan.cp_sizes, "loss": loss, "norm": norm, "gradients": found})
    loader.close()
    return results


def one_process(rank: int, settings: example.Settings = SETTINGS) -> list[dict[str, Any]]:
    """The same steps, all documents of one packed together, without a loader."""
    device, mesh = torch.device("cpu"), mesh_of(settings)
    stages, _ = example.build_model(settings, settings.model, mesh, device)
    results = []
    for lengths in STEPS:
        valid = sum(lengths) - len(lengths)
        (loss,) = pipeline_step(
            stages,
            [example.for_pipeline(collate(documents(lengths)))],
            loss_fn=lambda logits, labels, valid=valid: token_normalized_loss(logits, labels, num_valid_tokens=valid),
        )
        found = {}
        for name, parameter in stages[0].submod.named_parameters():
            found[name] = np.array(getattr(parameter.grad, "full_tensor", lambda grad=parameter.grad: grad)())
        norm = example.clip_gradients(stages, 1e9, mesh)
        stages[0].submod.zero_grad()
        results.append({"loss": loss.item(), "norm": norm, "gradients": found})
    return results


@pytest.fixture(scope="module")
def reference() -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = processes.run(1, one_process)[0]
    return result


@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.long] if layout == "heads" else []) for layout in LAYOUTS]
)
def test_eight_ranks_learn_what_one_learns(layout: str, reference: list[dict[str, Any]]) -> None:
    results = processes.run(8, dynamic_gradients, replace(DYNAMIC, **LAYOUTS[layout]), SIZES.get(layout, {}))
    sizes = np.concatenate([step["sizes"].ravel() for step in results[0]])
    assert len(np.unique(sizes)) > 1, "several group sizes"
    assert any(len(set(row)) > 1 for step in results[0] for row in step["sizes"].tolist()), "at the same time"
    assert len({len(step["sizes"]) for step in results[0]}) > 1, "another number of micro-batches in the next step"
    for number, expected in enumerate(reference):
        assert sum(result[number]["loss"] for result in results) == pytest.approx(expected["loss"], rel=1e-5)
        seen = set()
        for result in results:
            assert result[number]["norm"] == pytest.approx(expected["norm"], rel=1e-5)
            for name, gradient in result[number]["gradients"].items():
                wanted = expected["gradients"][name]
                assert np.abs(gradient - wanted).max() <= 1e-5 * np.abs(wanted).max(), name
            seen |= set(result[number]["gradients"])
        assert seen == set(expected["gradients"])


def micro_batches_of_one_document(rank: int, settings: example.Settings) -> int:
    loader = example.build_loader(
        settings, SimpleNamespace(lengths=[9]), CONFIG, mesh_of(settings), torch.device("cpu")
    )
    plan: wlb.DynamicCpPlan = loader._plan([9])
    loader.close()
    return len(plan.cp_sizes)


def test_a_plan_has_as_many_micro_batches_as_its_schedule_needs() -> None:
    settings = replace(DYNAMIC, pp=2, virtual_stages=2, schedule="dualpipev")
    assert processes.run(2, micro_batches_of_one_document, settings) == [4, 4]


def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """On the same layout bit for bit; on another one with the same documents, and the same losses up to rounding."""
    (tmp_path / "corpus").mkdir()
    for number, length in enumerate(np.random.default_rng(0).lognormal(3.5, 1.2, 80).astype(int)):
        (tmp_path / "corpus" / f"{number}.txt").write_text(
            "to be or not to be, " * (length // 20) + "!" * (length % 20)
        )
    settings = replace(
        DYNAMIC,
        model=replace(CONFIG, num_layers=2),
        corpus=tmp_path / "corpus",
        pattern="*.txt",
        context=250,
        threshold=(150,),
        cp=2,
    )
    processes.run(4, run, replace(settings, metrics_file=tmp_path / "whole.jsonl"))
    whole = rows(tmp_path / "whole.jsonl")
    assert [row["step"] for row in whole] == [1, 2, 3, 4, 5, 6]
    assert len({row["digest"] for row in whole}) == 6
    assert whole[-1]["loss"] < whole[0]["loss"], "it learns"
    assert whole[-1]["delay_mean"] > 0, "documents wait"

    killed = replace(settings, metrics_file=tmp_path / "killed.jsonl", checkpoint_dir=tmp_path / "checkpoints")
    with pytest.raises(processes.RankFailed):
        processes.run(4, run, killed, ("clip_gradients", 4))
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "copy")
    before = len(rows(tmp_path / "killed.jsonl"))
    processes.run(4, run, killed)
    resumed = rows(tmp_path / "killed.jsonl")[before:]
    same = ("step", "loss", "gradient_norm", "digest", "micro_batches", "imbalance", "delay_mean")
    assert [[row[key] for key in same] for row in resumed] == [[row[key] for key in same] for row in whole[2:]]
    assert audit(tmp_path / "checkpoints" / "ledger").findings == ()

    other = replace(settings, pp=2, metrics_file=tmp_path / "other.jsonl", checkpoint_dir=tmp_path / "copy")
    processes.run(4, run, other)  # four ranks become two stages of two
    moved = rows(tmp_path / "other.jsonl")
    assert [row["tokens"] for row in moved] == [row["tokens"] for row in whole[2:]]
    assert [row["loss"] for row in moved] == pytest.approx([row["loss"] for row in whole[2:]], rel=1e-4)
    assert audit(tmp_path / "copy" / "ledger").findings == ()
    static = replace(other, plan="static", pp=1, metrics_file=tmp_path / "static.jsonl", checkpoint_dir=None)
    processes.run(4, run, static)
    assert [row["loss"] for row in rows(tmp_path / "static.jsonl")] == pytest.approx(
        [row["loss"] for row in whole], rel=1e-4
    ), "a static plan trains the same documents"
