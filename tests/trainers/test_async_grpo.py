"""TRL's asynchronous GRPO with rows planned by wlb: the same samples in each micro-batch, in lighter rows."""

from __future__ import annotations

import importlib
import queue
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wlb
from tests.torch import processes
from tests.trainers.page import block
from wlb.integrations import trl as ours

pytest.importorskip("trl", reason="trl is not installed: pip install trl")
reason = "this trl has no asynchronous GRPO that can be imported"
grpo = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", reason=reason, exc_type=ImportError)

COST = wlb.CostModel(attention=3.0, linear=2000.0)
BATCHERS = ("TokenBudgetBatcher", "FixedCountBatcher")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in BATCHERS:
        monkeypatch.setattr(grpo, name, getattr(grpo, name))
    ours.install(cost_model=COST)
    return grpo


def rollouts(prompts: int = 24, n: int = 6) -> list[dict[str, Any]]:
    """Samples in groups that share a prompt, with completions of very unequal lengths."""
    rng = np.random.default_rng(11)
    samples = []
    for group in range(prompts):
        prompt = rng.integers(0, 50, rng.integers(10, 60))
        for _ in range(n):
            completion = rng.integers(0, 50, int(rng.lognormal(4, 1).__ceil__()) % 400 + 1)
            mask = np.append(np.zeros(prompt.size, int), np.ones(completion.size, int))
            samples.append(
                {
                    "input_ids": torch.tensor(np.append(prompt, completion)),
                    "completion_mask": torch.tensor(mask),
                    "old_log_probs": torch.zeros(mask.size),
                    "advantage": float(rng.normal()),
                    "group_id": group,
                    "metrics": {},
                }
            )
    return samples


def heaviest(rows: list[Any]) -> tuple[float, float]:
    costs = [ours._cost(row, COST) for row in rows]
    return max(costs), sum(costs)


@pytest.mark.parametrize("name", BATCHERS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_have_the_same_samples_and_are_lighter(name: str, ranks: int, installed: Any) -> None:
    samples, budget = rollouts(), 1200
    more: tuple[Any, ...] = (budget, defaultdict(list)) if name == "TokenBudgetBatcher" else (12 * ranks,)
    batcher = getattr(installed, name)
    planned, theirs = [*batcher(samples, ranks, *more)], [*batcher._of_trl(samples, ranks, *more)]
    assert len(planned) == len(theirs) > 2
    longer, even = np.zeros(2), 0.0
    for ours_rows, their_rows in zip(planned, theirs, strict=True):
        held = [{id(sample) for row in rows for sample in row.samples} for rows in (ours_rows, their_rows)]
        assert held[0] == held[1], "another choice of samples would change the losses"
        assert all(row.samples for row in ours_rows)
        if name == "TokenBudgetBatcher":
            assert all(len(row.tokens) <= budget and row.trained <= budget for row in ours_rows)
        assert heaviest(ours_rows)[0] <= heaviest(their_rows)[0]
        longer += heaviest(ours_rows)[0], heaviest(their_rows)[0]
        even += heaviest(their_rows)[1] / ranks
    print(f"{name}, {ranks} ranks: {longer[0] / even:.3f} of even work, TRL alone {longer[1] / even:.3f}")
    assert longer[0] < longer[1]


def test_costs_of_trees_are_those_of_the_forest() -> None:
    samples = rollouts(2, 3)
    row = grpo.TreeRow()
    for sample in samples[:1]:
        row.add(sample)
    assert ours._cost(row, COST) == pytest.approx(COST.cost([len(samples[0]["input_ids"])])[0])
    row.add(samples[0])
    assert ours._cost(row, COST) == pytest.approx(COST.cost([len(samples[0]["input_ids"])])[0]), "shared as a whole"


def test_the_trainers_loader_uses_them(installed: Any) -> None:
    """`get_train_dataloader` takes the batcher by its name in the module."""
    assert installed.TokenBudgetBatcher._of_trl is not installed.TokenBudgetBatcher
    assert "TokenBudgetBatcher" in installed.AsyncGRPOTrainer.get_train_dataloader.__code__.co_names
    exec(block("import wlb.integrations.trl"), {})
    assert not hasattr(installed.TokenBudgetBatcher._of_trl, "_of_trl"), "installed once, however often"


def test_another_trl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self, dataset: Any, budget: int) -> None:
            """Another version's."""

        def __iter__(self) -> Iterator[Any]:
            return iter(())

    monkeypatch.setattr(grpo, "TokenBudgetBatcher", Other)
    with pytest.raises(wlb.WlbError, match=r"trl .*\(self, dataset, budget\), but wlb expects .*, as in TRL 1.16"):
        ours.install(cost_model=COST)
    monkeypatch.setattr(importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(wlb.WlbError, match="trl is needed, and cannot be imported"):
        ours.install(cost_model=COST)


# --- the trainer itself ----------------------------------------------------------------------------------------------

STEPS, RANKS = 20, 2


class Attention:
    """What TRL's attention over trees calls, on a CPU: each segment of queries sees its path, causally."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: float, **more: Any
    ) -> Any:
        out = torch.empty_like(q)
        heads = q.shape[1] // k.shape[1]
        for (a, b), (c, d) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
            keys, values = (x[c:d].repeat_interleave(heads, 1).transpose(0, 1) for x in (k, v))
            scores = q[a:b].transpose(0, 1) @ keys.transpose(1, 2) * softmax_scale
            hidden = torch.arange(d - c) > torch.arange(b - a)[:, None] + (d - c) - (b - a)
            out[a:b] = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values).transpose(0, 1)
        return out


class Worker:
    """Rollouts that are there from the start, instead of vLLM's."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self.metrics_queue: Any = queue.Queue()
        for sample in rollouts(160, 4):
            values = {name: sample[name].numpy() for name in ("input_ids", "completion_mask", "old_log_probs")}
            values["old_log_probs"] = np.full(values["input_ids"].size, -4.0)
            told = {"advantage": sample["advantage"], "group_id": sample["group_id"], "model_version": 0}
            self.rollout_buffer.put(grpo.RolloutSample(prompt=[], completion=[], metrics={}, **told, **values))

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class Nothing:
    """Weights are sent nowhere."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def trained(rank: int, folder: str, planned: bool) -> tuple[list[float], np.ndarray]:
    """Losses of 20 steps, and the weights after them."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    if planned:
        ours.install(cost_model=COST)
    importlib.import_module("trl.experimental.async_grpo.packing")._flash_attn = Attention
    grpo.get_peak_flops_per_device = lambda accelerator, dtype: 1e12  # of a GPU, for a figure in its log
    losses: list[float] = []

    class Trainer(grpo.AsyncGRPOTrainer):  # type: ignore[name-defined,misc]
        def compute_loss(self, model: Any, inputs: Any, **more: Any) -> Any:
            loss = super().compute_loss(model, inputs, **more)
            losses.append(float(self.accelerator.reduce(loss.detach(), reduction="mean")))
            return loss

    arguments = importlib.import_module("trl.experimental.async_grpo").AsyncGRPOConfig(
        f"{folder}/out{planned}",
        token_budget=900,
        max_steps=STEPS,
        use_cpu=True,
        bf16=False,
        report_to=[],
        learning_rate=1e-2,
        max_staleness=10**6,
        save_strategy="no",
        gradient_checkpointing=False,
        optim="sgd",
    )
    trainer = Trainer(
        folder,
        args=arguments,
        reward_funcs=lambda completions, **more: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["a"] * 640}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        rollout_worker=Worker(),
        weight_transfer=Nothing(),
    )
    trainer.train()
    weights = torch.cat([value.detach().flatten() for value in trainer.model.parameters()])
    return losses, weights.numpy()


def saved(folder: Path) -> str:
    """A small model and its tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 16,
    }
    config = Qwen3Config(vocab_size=64, num_key_value_heads=1, eos_token_id=1, pad_token_id=0, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = {f"w{number}": number for number in range(64)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1", unk_token="w2")
    whole.chat_template = "{{ messages }}"
    whole.save_pretrained(folder)
    return str(folder)


def test_losses_and_updates_stay_what_they_were(tmp_path: Path) -> None:
    """Twenty steps of TRL's trainer on two ranks, with its batcher and with ours: the same losses, the same weights."""
    folder = saved(tmp_path / "model")
    theirs, planned = (processes.run(RANKS, trained, folder, planned)[0] for planned in (False, True))
    assert len(theirs[0]) == STEPS
    assert len(set(np.round(theirs[0], 6).tolist())) == STEPS, "the model learns"
    np.testing.assert_allclose(planned[0], theirs[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(planned[1], theirs[1], rtol=0, atol=1e-5)
    assert planned[0] != theirs[0], "other rows, so sums are rounded otherwise"
