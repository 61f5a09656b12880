"""The trainer under dynamic context parallelism: it learns what one process learns, and goes on when it was killed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wlb
from tests.torch import processes
from tests.trainers.test_train import (
    CONFIG,
    SETTINGS,
    check_going_on,
    check_learnt,
    corpus,
    documents,
    example,
    mesh_of,
    rows,
    run,
    trained_whole,
    whole_gradients,
)
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


def dynamic_gradients(rank: int, settings: example.Settings, sizes: dict[str, Any]) -> list[Any]:
    """Of every step: this rank's part of the loss, the norm, the gradients of its stages, and the group sizes."""
    device, mesh = torch.device("cpu"), mesh_of(settings)
    both = data_and_context(mesh)
    me, size = both.get_local_rank(), both.size()
    group_of = example.context_groups(settings, mesh)
    stages, _ = example.build_model(settings, settings.model, mesh, device)
    cost = wlb.CostModel.from_flops(**CONFIG.shape(), attention_efficiency=0.55)

    def plan(lengths: np.ndarray) -> wlb.DynamicCpPlan:
        return wlb.plan_dynamic_cp(
            lengths,
            world_size=size,
            num_stages=settings.pp,
            num_virtual_stages=settings.virtual_stages,
            max_tokens_per_rank=32,
            group_sizes=example.group_sizes(settings, CONFIG.num_heads, CONFIG.num_kv_heads),
            cost_model=cost,
            exchange=wlb.Exchange(seconds_per_exchange=4.0 * float(cost.cost([1])[0]), overlap=0.0),
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
        found = whole_gradients(stages)
        norm = example.clip_gradients(stages, 1e9, mesh)
        for stage in stages:
            stage.submod.zero_grad()
        loss = float(sum(loss.item() for loss in losses)) / settings.tp
        results.append((loss, norm, found, step.plan.cp_sizes))
    loader.close()
    return results


def one_process(rank: int, settings: example.Settings = SETTINGS) -> list[Any]:
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
        found = whole_gradients(stages)
        norm = example.clip_gradients(stages, 1e9, mesh)
        stages[0].submod.zero_grad()
        results.append((loss.item(), norm, found))
    return results


@pytest.fixture(scope="module")
def reference() -> Any:
    return processes.run(1, one_process)[0]


@pytest.mark.a_few(2)
@pytest.mark.parametrize(
    "layout", [pytest.param(layout, marks=[pytest.mark.long] if layout == "heads" else []) for layout in LAYOUTS]
)
def test_eight_ranks_learn_what_one_learns(layout: str, reference: Any) -> None:
    results = processes.run(8, dynamic_gradients, replace(DYNAMIC, **LAYOUTS[layout]), SIZES.get(layout, {}))
    sizes = [sizes for *_, sizes in results[0]]
    assert any(len(set(row)) > 1 for step in sizes for row in step.tolist()), "several group sizes at the same time"
    assert len({len(step) for step in sizes}) > 1, "another number of micro-batches in the next step"
    for of_step, expected in zip(zip(*results, strict=True), reference, strict=True):
        check_learnt(of_step, expected)


class Rows(list[Any]):
    """A corpus."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(documents(lengths))
        self.lengths = lengths


def planned(rank: int, settings: example.Settings, lengths: list[int]) -> wlb.DynamicCpPlan:
    loader = example.build_loader(settings, Rows(lengths), CONFIG, mesh_of(settings), torch.device("cpu"))
    plan: wlb.DynamicCpPlan = loader._plan(lengths)
    loader.close()
    return plan


def test_a_plan_has_as_many_micro_batches_as_its_schedule_needs() -> None:
    settings = replace(DYNAMIC, pp=2, virtual_stages=2, schedule="dualpipev")
    assert [len(plan.cp_sizes) for plan in processes.run(2, planned, settings, [9])] == [4, 4]


def test_groups_are_as_the_settings_say() -> None:
    one, many = [90], [60, 50, 40, 30, 20, 10, 5, 5]
    settings = replace(DYNAMIC, cp=3, micro_batches=6, cp_exchange=1.0)

    def plan(lengths: list[int], **changes: Any) -> wlb.DynamicCpPlan:
        plans = processes.run(3, planned, replace(settings, **changes), lengths)
        assert len({plan.digest() for plan in plans}) == 1
        return plans[0]

    assert plan(one).cp_sizes.max() == 2
    assert plan(one, group_sizes="any").cp_sizes.max() == 3
    apart = plan(one, cp_exchange=1e6)
    assert plan(one, cp_exchange=1e6, ranks_per_node=2).seconds < apart.seconds, "no exchange inside a node"
    shaped = plan(many, token_bucket=(16, 48), max_documents=3)
    assert set(shaped.padded_tokens_per_rank.ravel().tolist()) <= {16, 48}
    assert max(len(group.lengths) for micro_batch in shaped for group in micro_batch) <= 3


def test_groups_of_any_size_and_fixed_shapes_learn_what_one_process_learns(tmp_path: Path) -> None:
    """Three ranks in groups of three, padded, beside one process and a static plan of the same documents."""
    model, texts = replace(CONFIG, num_layers=1), corpus(tmp_path / "corpus")
    settings = replace(SETTINGS, model=model, corpus=texts, pattern="*.txt", steps=3, micro_batches=6)
    shape: dict[str, Any] = {"token_bucket": (16, 32, 48), "max_documents": 9}
    groups: dict[str, Any] = {"group_sizes": "any", "ranks_per_node": 3}
    dynamic = replace(settings, plan="dynamic_cp", cp=3, **shape, **groups)
    processes.run(3, run, replace(dynamic, metrics_file=tmp_path / "dynamic.jsonl"))
    processes.run(1, run, replace(settings, metrics_file=tmp_path / "log.jsonl"))
    found, expected = rows(tmp_path / "dynamic.jsonl"), rows(tmp_path / "log.jsonl")
    assert [row["tokens"] for row in found] == [row["tokens"] for row in expected]
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)


@pytest.mark.long
def test_a_killed_run_goes_on(tmp_path: Path) -> None:
    """On the same layout bit for bit; on another one with the same documents, and the same losses up to rounding."""
    settings, whole = trained_whole(DYNAMIC, tmp_path)
    died = ("clip_gradients", 4)
    moved = check_going_on(settings, whole, died, 2, tmp_path, "micro_batches", pp=2)  # four ranks, two stages of two
    assert [row["tokens"] for row in moved] == [row["tokens"] for row in whole[2:]]
    processes.run(4, run, replace(settings, plan="static", metrics_file=tmp_path / "static.jsonl"))
    assert [row["loss"] for row in rows(tmp_path / "static.jsonl")] == pytest.approx(
        [row["loss"] for row in whole], rel=1e-4
    ), "a static plan trains the same documents"
