"""The trainer's mixture of experts: on any layout every token visits the experts that it visits on one process."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from studies.trainer import experts
from tests.torch import processes
from tests.trainers.test_train import (
    CONFIG,
    MICRO_BATCHES,
    SETTINGS,
    check_learnt,
    corpus,
    documents,
    example,
    gradients,
    mesh_of,
    rows,
    run,
)
from tests.trainers.test_train_dynamic_cp import DYNAMIC, dynamic_gradients, one_process
from wlb._core import WlbError
from wlb.torch.data import collate
from wlb.torch.groups import data_and_context, expert_ranks

MODEL = replace(CONFIG, num_layers=4, num_experts=8, experts_per_token=2, shared_ffn_hidden_size=16)
MIXTURE = replace(SETTINGS, model=MODEL)
SHALLOW = replace(MIXTURE, model=replace(MODEL, num_layers=2))
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {  # dp x cp x ep
    "2x1x2": (2, {"ep": 2}),
    "1x2x2": (2, {"cp": 2, "ep": 2}),
    "2x2x2": (4, {"cp": 2, "ep": 2, "activation_checkpointing": True}),
    "2x2x4": (4, {"cp": 2, "ep": 4, "transport": "ring"}),
    "1x4x2": (4, {"cp": 4, "ep": 2}),
    "pp 2": (4, {"pp": 2, "cp": 2, "ep": 2}),
    "zero bubble": (4, {"pp": 2, "virtual_stages": 2, "schedule": "interleaved_zero_bubble", "ep": 2}),
}
Visits = Counter[tuple[int, ...]]


class Watched:
    """What a process's routers choose: for each micro-batch and layer, in the order in which they come."""

    def __init__(self) -> None:
        self.chosen: dict[int, list[torch.Tensor]] = {}
        forward = experts.Router.forward

        def watched(router: experts.Router, x: torch.Tensor) -> Any:
            weights, chosen = forward(router, x)
            if not experts._recomputing:
                self.chosen.setdefault(id(router), []).append(chosen)
            return weights, chosen

        experts.Router.forward = watched  # type: ignore[method-assign]

    def of(self, batches: list[tuple[int, Any]]) -> Visits:
        """How many tokens there are of each: number of the micro-batch, layer, token, position, experts."""
        found: Visits = Counter()
        for layer, of_layer in enumerate(self.chosen.values()):
            for (number, batch), chosen in zip(batches, of_layer, strict=True):
                tokens = zip(batch.tokens.tolist(), batch.position_ids.tolist(), chosen.tolist(), strict=True)
                found.update((number, layer, token, place, *sorted(visited)) for token, place, visited in tokens)
        return found


def learnt(rank: int, settings: example.Settings) -> tuple[float, float, dict[str, np.ndarray], Visits]:
    """As `gradients`, and what visited which experts."""
    watched = Watched()
    result = gradients(rank, settings)
    if settings.pp > 1:  # other stages have other layers
        return *result, Counter()
    mesh = mesh_of(settings)
    dp_rank, dp = mesh["dp"].get_local_rank(), mesh["dp"].size()
    cp_rank = mesh["cp"].get_local_rank()
    batches = [
        (number, collate(documents(MICRO_BATCHES[number]), cp_rank=cp_rank, cp_size=settings.cp))
        for number in range(dp_rank, len(MICRO_BATCHES), dp)
    ]
    return *result, watched.of(batches)


@pytest.fixture(scope="module")
def reference() -> Any:
    return processes.run(1, learnt, MIXTURE)[0]


@pytest.mark.a_few(3)
@pytest.mark.parametrize(
    "layout", [pytest.param(name, marks=[pytest.mark.long] if name in ("1x4x2", "pp 2") else []) for name in LAYOUTS]
)
def test_any_layout_learns_what_one_process_learns(layout: str, reference: Any) -> None:
    world, changes = LAYOUTS[layout]
    results = processes.run(world, learnt, replace(MIXTURE, **changes))
    visits = reference[3]
    assert len({visited[-2:] for visited in visits}) > 20, "of 28 pairs of experts"
    check_learnt(results, reference)
    if "pp" not in changes:
        assert sum((theirs for _, _, _, theirs in results), Counter()) == visits


@pytest.mark.parametrize("ep", [2, pytest.param(4, marks=pytest.mark.long)])
def test_dynamic_cp_learns_what_one_process_learns(ep: int) -> None:
    """Ranks of an ep group are in groups of attention of different sizes, and some have no token."""
    reference = processes.run(1, one_process, SHALLOW)[0]
    results = processes.run(4, dynamic_gradients, replace(DYNAMIC, model=SHALLOW.model, ep=ep), {})
    assert any(len(set(row)) > 1 for *_, sizes in results[0] for row in sizes.tolist()), "several group sizes"
    for of_step, expected in zip(zip(*results, strict=True), reference, strict=True):
        check_learnt(of_step, expected)


@pytest.mark.parametrize("top", [1, 3])
def test_a_mixture_is_the_weighted_sum_of_its_experts(top: int) -> None:
    """Beside every expert on every token."""
    torch.manual_seed(0)
    mixture = experts.Mixture(12, 20, 5, top)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mixture.router.bias.normal_(std=0.2)
    x = torch.randn(33, 12)
    scores = (x @ mixture.router.weight.T).softmax(-1)
    expected = torch.zeros_like(x)
    for token, score in enumerate(scores):
        best = sorted(range(5), key=lambda expert: -(score[expert] + mixture.router.bias[expert]))[:top]
        for expert in best:
            w1, w2, w3 = (w[expert] for w in (mixture.experts.w1, mixture.experts.w2, mixture.experts.w3))
            answer = (F.silu(x[token] @ w1.T) * (x[token] @ w3.T)) @ w2.T
            expected[token] += score[expert] / score[best].sum() * answer
    torch.testing.assert_close(mixture(x), expected)
    assert mixture(x[:0]).shape == (0, 12)


def test_a_run_reports_its_load_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """Visits, and so the biases that they move, do not depend on the layout; a checkpoint knows nothing of it."""
    settings = replace(
        SHALLOW,
        corpus=corpus(tmp_path / "corpus"),
        pattern="*.txt",
        context=250,
        expert_bias_rate=0.05,
        metrics_file=tmp_path / "one.jsonl",
    )
    processes.run(1, run, settings)
    one = rows(tmp_path / "one.jsonl")
    assert one[-1]["loss"] < one[0]["loss"], "it learns"
    assert one[-1]["expert_imbalance"] < one[0]["expert_imbalance"], "the bias levels"
    assert [row["expert_rank_imbalance"] for row in one] == [1.0] * 6, "one rank has no other to wait for"
    first = replace(
        settings, cp=2, ep=2, steps=4, checkpoint_dir=tmp_path / "checkpoints", metrics_file=tmp_path / "4.jsonl"
    )
    processes.run(4, run, first)
    processes.run(4, run, replace(first, steps=6, cp=1, ep=4))
    several = rows(tmp_path / "4.jsonl")
    assert [row["step"] for row in several] == list(range(1, 7))
    # The learning rate of the first four steps falls faster where there are only four.
    same = replace(settings, steps=4, metrics_file=tmp_path / "4 of one.jsonl")
    processes.run(1, run, same)
    alone = rows(tmp_path / "4 of one.jsonl")
    assert [row["loss"] for row in several[:4]] == pytest.approx([row["loss"] for row in alone], rel=1e-4)
    assert [row["expert_visits"] for row in several[:4]] == [row["expert_visits"] for row in alone]
    for row in several:
        visits = np.array(row["expert_visits"])
        assert visits.sum() == 2 * 2 * row["tokens"], "two experts in each of two layers"
        assert row["expert_imbalance"] == pytest.approx(visits.max(1).sum() / visits.mean(1).sum())
        assert sum(row["expert_rank_visits"]) == visits.sum(), "none is dropped"
        assert len(row["expert_rank_visits"]) == 4
        assert row["expert_rank_imbalance"] > 1.0
        assert row["token_imbalance"] >= 1.0
    # Each of the four ranks has two experts of its own.
    assert (
        several[4]["expert_rank_visits"] == np.array(several[4]["expert_visits"]).sum(0).reshape(4, 2).sum(1).tolist()
    )


def test_recomputed_visits_count_once(tmp_path: Path) -> None:
    settings = replace(SHALLOW, corpus=corpus(tmp_path / "corpus"), pattern="*.txt", context=250, steps=1)
    for again in (False, True):
        log = tmp_path / f"{again}.jsonl"
        processes.run(2, run, replace(settings, ep=2, activation_checkpointing=again, metrics_file=log))
    kept, recomputed = rows(tmp_path / "False.jsonl")[0], rows(tmp_path / "True.jsonl")[0]
    names = ("loss", "expert_visits", "expert_rank_visits", "expert_rank_imbalance", "token_imbalance")
    assert [kept[name] for name in names] == [recomputed[name] for name in names]


def test_load_of_ranks_by_hand() -> None:
    """Two ep groups of two ranks, one layer, two micro-batches: each group waits for its fullest rank in each."""
    arrived = torch.tensor([[[6, 1]], [[2, 3]], [[0, 4]], [[4, 4]]])
    load = experts.Load(
        torch.tensor([[8, 8, 4, 4]]), torch.tensor([[[1, 0]], [[3, 4]], [[1, 1]], [[1, 1]]]), arrived, 2
    )
    assert load.imbalance == 8 / 6
    assert load.rank_imbalance == (6 + 3 + 4 + 4) / (4 + 2 + 2 + 4)
    assert load.token_imbalance == (3 + 4 + 1 + 1) / (2 + 2 + 1 + 1)


def divided(rank: int, ep: int) -> list[list[int]]:
    """The ranks of this rank's "ep" and "edp"."""
    mesh = mesh_of(replace(SETTINGS, cp=2))
    ranks = expert_ranks(mesh, ep=ep)
    assert data_and_context(mesh).size() == int(os.environ["WORLD_SIZE"])
    return [torch.distributed.get_process_group_ranks(ranks[name].get_group()) for name in ("ep", "edp")]


def test_neighbours_divide_experts() -> None:
    assert processes.run(4, divided, 2) == [[[0, 1], [0, 2]], [[0, 1], [1, 3]], [[2, 3], [0, 2]], [[2, 3], [1, 3]]]
    with pytest.raises(processes.RankFailed, match=r"ep = 3: does not divide dp x cp = 4 ranks"):
        processes.run(4, divided, 3)
    with pytest.raises(processes.RankFailed, match=WlbError.__name__):
        processes.run(2, divided, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": replace(MODEL, experts_per_token=9)}, "--experts-per-token 9: there are 8 experts"),
        ({"model": replace(CONFIG, shared_ffn_hidden_size=8)}, "--shared-ffn goes with --experts above 1"),
        ({"model": replace(MODEL, experts_per_token=0)}, "--experts-per-token must be at least 1"),
        ({"model": replace(MODEL, shared_ffn_hidden_size=-4)}, "--shared-ffn at least 0"),
        ({"expert_bias_rate": float("nan")}, "--expert-bias-rate nan: must be at least 0"),
        ({"tp": 2}, "--tp 2 does not go with --experts"),
        ({"ep": 3}, "--ep 3 does not divide 8 experts"),
        ({"model": CONFIG, "ep": 2}, "--ep 2 does not divide 1 experts"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    mesh: Any = {}
    settings = replace(MIXTURE, **changes)
    with pytest.raises(SystemExit, match=message):
        example.divide_experts(settings, settings.model, mesh)
