"""`balance(trainer, max_tokens=...)` in the real `Trainer`, against a plain loop, one document at a time."""

from __future__ import annotations

import json
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, WeightedRandomSampler
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    get_linear_schedule_with_warmup,
)
from transformers.trainer_pt_utils import LabelSmoother

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.trainers.reads import reads
from tests.trainers.small_corpus import (
    CONTEXT,
    LENGTHS,
    VOCABULARY,
    StopAt,
    documents,
    llama,
    mean_over_tokens,
    outcome,
    rows_of_steps,
    train_alone,
)
from wlb.integrations.huggingface import MicroBatchCallback, balance, refusals
from wlb.torch.data import Piece
from wlb.torch.layers import longest_document

STEPS = 20


def together(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A collator as people have them: pads on the right."""
    longest = max(len(feature["input_ids"]) for feature in features) + 3
    padded: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for feature in features:
        short = longest - len(feature["input_ids"])
        padded["input_ids"].append([*feature["input_ids"], *[0] * short])
        padded["labels"].append([*feature["labels"], *[-100] * short])
        padded["attention_mask"].append([1] * (longest - short) + [0] * short)
    return {name: torch.tensor(rows) for name, rows in padded.items()}


def arguments(folder: Path, dp_size: int = 1, **options: Any) -> TrainingArguments:
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "num_train_epochs": 2,
        "per_device_train_batch_size": 4 // dp_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(str(folder), **defaults | options)


def balanced(folder: Path, dp_size: int = 1, *, callbacks: Any = (), data: Any = None, **options: Any) -> Any:
    data = documents() if data is None else data
    trainer = Trainer(
        llama(),
        arguments(folder, dp_size, **options),
        train_dataset=data,
        eval_dataset=documents()[::3],
        data_collator=together,
        callbacks=list(callbacks),
    )
    if dist.is_initialized():
        assert trainer.args.world_size == dist.get_world_size()
    return balance(trainer, max_tokens=64)


def reference(plan: Any, max_steps: int, steps: int = STEPS) -> tuple[list[float], np.ndarray]:
    """The steps of the same plan in a plain loop."""
    model = llama()
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, max_steps)
    sampler = plan.sampler()
    micro_batches = [batch for _ in range(plan.num_epochs) for batch in sampler]
    rows = rows_of_steps(micro_batches, plan.packer.num_micro_batches, steps)
    return train_alone(model, optimizer, rows, schedule=schedule, max_norm=1.0)


def train(rank: int, folder: Path, stop: int = STEPS, resume: bool = False, **options: Any) -> Any:
    trainer = balanced(folder, dist.get_world_size(), callbacks=[StopAt(stop)], **options)
    trainer.train(resume_from_checkpoint=resume)
    return *outcome(trainer), trainer.args.max_steps, trainer.state.epoch, trainer.state.num_train_epochs


def test_documents_are_what_they_are_meant_to_be(tmp_path: Path) -> None:
    """Some longer than the context, steps enough, pieces and empty micro-batches among them."""
    plan = balanced(tmp_path)._wlb_plan
    assert (LENGTHS > CONTEXT).sum() >= 5
    sampler = plan.sampler()
    batches = [*sampler, *sampler]  # two epochs
    assert any(isinstance(element, Piece) for batch in batches for element in batch)
    assert plan.sampler().total_steps() >= STEPS
    assert plan.packer.num_micro_batches == 4
    assert not all(batches)


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_trainer_takes_the_steps_of_one_document_at_a_time(ranks: int, tmp_path: Path) -> None:
    found = processes.run(ranks, train, tmp_path)
    losses, parameters = reference(balanced(tmp_path)._wlb_plan, found[0][2])
    for rank in range(ranks):
        np.testing.assert_allclose(found[rank][0], losses, rtol=1e-5)
        np.testing.assert_allclose(found[rank][1], parameters, rtol=0, atol=1e-4 * np.abs(parameters).max())
    assert found[0][4] == 2


def test_what_it_logs_has_the_figures_of_the_step(tmp_path: Path) -> None:
    trainer = balanced(tmp_path, max_steps=4, logging_steps=1)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert len(lines) == 4
    assert all(line["wlb/imbalance"] >= 1 and line["wlb/lost_time"] >= 1 for line in lines)
    assert {"wlb/delay_max", "wlb/backlog_tokens", "wlb/planning_ms"} <= lines[-1].keys()


def killed(rank: int, folder: Path) -> None:
    """Saves at step 7 and dies in step 11."""

    class Die(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 10:
                os.kill(os.getpid(), signal.SIGKILL)

    balanced(folder, dist.get_world_size(), callbacks=[Die()], save_strategy="steps", save_steps=7).train()


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (2, 1)])
def test_a_killed_run_goes_on_bit_for_bit(before: int, after: int, tmp_path: Path) -> None:
    with pytest.raises(processes.RankFailed, match="died"):
        processes.run(before, killed, tmp_path)
    assert (tmp_path / "checkpoint-7").exists()
    found = processes.run(after, train, tmp_path, STEPS, True)[0]
    whole = processes.run(after, train, tmp_path / "whole")[0]
    np.testing.assert_allclose(found[0], whole[0], rtol=0 if before == after else 1e-5)
    if before == after:
        np.testing.assert_array_equal(found[1], whole[1])


def waits(rank: int, folder: Path) -> dict[str, int]:
    with reads() as found:
        options = {"eval_strategy": "epoch", "include_num_input_tokens_seen": "non_padding"}
        balanced(folder, dist.get_world_size(), data=documents()[::2], **options).train()
    return dict(found)


def test_no_step_waits_for_a_device(tmp_path: Path) -> None:
    assert processes.run(2, waits, tmp_path) == [{}, {}]


# --- epochs, evaluation, other arguments ------------------------------------------------------------------------------


def test_epochs_are_counted_by_documents(tmp_path: Path) -> None:
    """Evaluated and saved where an epoch ends; a checkpoint of it goes on with the next one."""
    trainer = balanced(tmp_path, eval_strategy="epoch", save_strategy="epoch")
    trainer.train()
    evaluated = [entry["epoch"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated == [1.0, 2.0]
    epochs = [entry["epoch"] for entry in trainer.state.log_history if "loss" in entry]
    assert epochs == sorted(epochs)
    assert len(epochs) == trainer.args.max_steps == trainer.state.max_steps
    saved = sorted(int(folder.name.partition("-")[2]) for folder in tmp_path.glob("checkpoint-*"))
    first = json.loads((tmp_path / f"checkpoint-{saved[0]}" / "trainer_state.json").read_text())
    assert (len(saved), saved[1], first["epoch"]) == (2, trainer.args.max_steps, 1.0)
    again = balanced(tmp_path, dataloader_num_workers=1)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved[0]}"))
    assert outcome(again)[0] == outcome(trainer)[0]


def evaluate(rank: int, folder: Path) -> float:
    loss: float = balanced(folder, dist.get_world_size()).evaluate()["eval_loss"]
    return loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_weighs_tokens_alike(ranks: int, tmp_path: Path) -> None:
    expected = mean_over_tokens(llama(), list(range(0, len(LENGTHS), 3)))
    assert processes.run(ranks, evaluate, tmp_path) == [pytest.approx(expected, rel=1e-5)] * ranks


def dividing(outputs: Any, labels: Tensor, num_items_in_batch: Tensor | None = None) -> Tensor:
    """A loss as people write it, which needs the number of labels."""
    assert num_items_in_batch is not None
    return torch.nn.functional.cross_entropy(outputs["logits"][0], labels[0], reduction="sum") / num_items_in_batch


def shifted(outputs: Any, labels: Any, num_items_in_batch: Tensor | None = None) -> Tensor:
    """`dividing`, of next tokens."""
    return dividing({"logits": outputs["logits"][:, :-1]}, labels[:, 1:], num_items_in_batch)


WHOLE = [number for number in range(0, len(LENGTHS), 3) if LENGTHS[number] <= CONTEXT]


def evaluate_own_loss(rank: int, folder: Path) -> float:
    trainer = balanced(folder, dist.get_world_size())
    trainer.eval_dataset = [documents()[number] for number in WHOLE]
    trainer.compute_loss_func = shifted
    loss: float = trainer.evaluate()["eval_loss"]
    return loss


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_by_a_loss_of_ones_own_gets_its_number_of_labels(ranks: int, tmp_path: Path) -> None:
    expected = mean_over_tokens(llama(), WHOLE)
    assert processes.run(ranks, evaluate_own_loss, tmp_path) == [pytest.approx(expected, rel=1e-5)] * ranks


def test_evaluation_with_metrics_keeps_the_rows_and_weighs_their_losses(tmp_path: Path) -> None:
    numbers = [number for number in range(0, len(LENGTHS), 3) if LENGTHS[number] <= CONTEXT - 3]
    seen: list[int] = []

    def metrics(prediction: Any) -> dict[str, float]:
        seen.append(len(prediction.predictions))
        return {"rows": float(seen[-1])}

    trainer: Any = Trainer(
        llama(),
        arguments(tmp_path, per_device_eval_batch_size=3),
        train_dataset=documents(),
        eval_dataset=[documents()[number] for number in numbers],
        data_collator=together,
        compute_metrics=metrics,
    )
    found = balance(trainer, max_tokens=64).evaluate()
    assert found["eval_rows"] == len(numbers)
    assert found["eval_loss"] == pytest.approx(mean_over_tokens(llama(), numbers), rel=1e-5)


def test_steps_are_as_many_as_asked_for(tmp_path: Path) -> None:
    trainer = balanced(tmp_path, max_steps=31)
    trainer.train()
    assert trainer.state.global_step == 31
    part = balanced(tmp_path, num_train_epochs=0.5)
    whole = balanced(tmp_path, num_train_epochs=1)
    assert part.args.max_steps == -(-whole.args.max_steps // 2)


def test_steps_without_labels_count_in_no_schedule(tmp_path: Path) -> None:
    """The Trainer passes over them, so that `max_steps` and the learning rate are those of the steps that it takes."""
    masked = [{**row, "labels": [-100] * len(row["labels"])} for row in documents()[:60]] + documents()[60:]
    trainer = balanced(tmp_path, data=masked, train_sampling_strategy="sequential", num_train_epochs=1)
    steps = trainer.args.max_steps
    assert steps < trainer._wlb_plan.sampler().total_steps()
    with pytest.warns(UserWarning, match="has no label"):
        trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps == steps
    assert trainer.state.epoch == 1.0
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[-1] == pytest.approx(1e-2 / (steps - 2)), "one step before 0, after a warm-up of 2"


def test_the_last_rate_is_that_of_the_steps_with_labels(tmp_path: Path) -> None:
    """Twenty of seventy steps have no label: counted with them, the last rate was 3.1e-3."""
    row = {"input_ids": [1] * 30, "labels": [1] * 30}
    masked = row | {"labels": [-100] * 30}
    trainer = balanced(
        tmp_path, data=[masked] * 160 + [row] * 400, train_sampling_strategy="sequential", num_train_epochs=1
    )
    assert trainer._wlb_plan.sampler().total_steps() == 70
    with pytest.warns(UserWarning, match="has no label"):
        trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps == 50
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates[-1] == pytest.approx(1e-2 / 48)
    assert f"{rates[-1]:.1e} {1e-2 * (70 - 49) / 68:.1e}" == "2.1e-04 3.1e-03"


def test_pieces_may_be_left_out(tmp_path: Path) -> None:
    data: Any = documents()
    for change in ({"oversize": "truncate"}, {"max_document_tokens": 150, "max_tokens": 160, "max_delay": 0}):
        trainer = Trainer(llama(), arguments(tmp_path), train_dataset=data, data_collator=together)
        plan = balance(trainer, **{"max_tokens": 64} | change)._wlb_plan  # type: ignore[arg-type, attr-defined]
        elements = [element for batch in plan.sampler() for element in batch]
        pieces = [element for element in elements if isinstance(element, Piece)]
        assert len(elements) == len(LENGTHS)
        assert {piece.length for piece in pieces} == ({CONTEXT} if "oversize" in change else set())


# --- streams ----------------------------------------------------------------------------------------------------------


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(documents() * 3)


def processed() -> Any:
    """The documents, made of text by a function while the run goes on."""
    texts = [json.dumps(row) for row in documents()]
    return wt.ProcessedRows(texts, json.loads, num_workers=1, num_epochs=3, num_shards=3)


def train_stream(rank: int, folder: Path, stop: int, data: Any = Endless) -> Any:
    options: dict[str, Any] = {"max_steps": 12, "save_strategy": "steps", "save_steps": 5}
    resume = any(folder.glob("checkpoint-*"))
    size = dist.get_world_size()
    options["gradient_accumulation_steps"] = 4 // size
    trainer = balanced(folder, size, data=data(), callbacks=[StopAt(stop)], **options)
    trainer.train(resume_from_checkpoint=resume)
    return outcome(trainer)


@pytest.mark.a_few(1)
@pytest.mark.parametrize("data", [Endless, processed])
def test_a_stream_is_trained_and_resumed(tmp_path: Path, data: Any) -> None:
    whole = processes.run(2, train_stream, tmp_path / "whole", 12, data)[0]
    processes.run(2, train_stream, tmp_path / "parts", 6, data)
    found = processes.run(2, train_stream, tmp_path / "parts", 12, data)[0]
    assert found[0] == whole[0]
    np.testing.assert_array_equal(found[1], whole[1])
    alone_ = processes.run(1, train_stream, tmp_path / "one", 12, data)[0]
    np.testing.assert_allclose(alone_[0], whole[0], rtol=1e-5)


# --- what is refused --------------------------------------------------------------------------------------------------


def no_input_ids(features: Any) -> dict[str, Tensor]:
    return {"tokens": torch.ones(1, 3)}


def pictures(features: Any) -> dict[str, Tensor]:
    return together(features) | {"pixel_values": torch.ones(1, 3, 8, 8)}


def fewer_labels(features: Any) -> dict[str, Tensor]:
    return together(features) | {"labels": torch.ones(1, 1)}


MASKED = DataCollatorForLanguageModeling.__new__(DataCollatorForLanguageModeling)  # without its tokenizer
MASKED.mlm = True


class OwnLoader(Trainer):
    def get_train_dataloader(self) -> Any:
        return super().get_train_dataloader()


class Weighted(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return WeightedRandomSampler([1.0] * 9 + [0.1] * (len(self.train_dataset) - 9), 50)  # type: ignore[arg-type]


class Repeating(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return RandomSampler(self.train_dataset, replacement=True)  # type: ignore[arg-type]


class Fewer(Trainer):
    def _get_train_sampler(self, *args: Any) -> Any:
        return RandomSampler(self.train_dataset, num_samples=10)  # type: ignore[arg-type]


class DPOTrainer(Trainer):
    """By the name of TRL's, which need not be installed."""


def masked_by_document(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """As LLaMA-Factory's neat packing: a number for each document."""
    batch = together(features)
    batch["attention_mask"][:, 1:] *= 2
    return batch


def positions_anew(features: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    batch = together(features)
    length = batch["input_ids"].shape[1]
    return batch | {"position_ids": torch.arange(length)[None] % 2}


PREFERENCES = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dataloader_drop_last": ({"dataloader_drop_last": True}, "dataloader_drop_last", "make it False"),
    "group_by_length": ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy", '"random"'),
    "batch_rebalance": ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy", '"random"'),
    "auto_find_batch_size": ({"auto_find_batch_size": True}, "auto_find_batch_size", "max_tokens"),
    "dispatch_batches": ({"accelerator_config": {"dispatch_batches": True}}, "dispatch_batches", "leave it out"),
    "text": ({"data": [{"text": "abc"}]}, "train_dataset", "'input_ids', but 'text'"),
    "preferences": (
        {"data": PREFERENCES},
        "train_dataset",
        r"several sequences are one example.*rl\.plan.*micro_batch",
    ),
    "DPO": ({"cls": DPOTrainer}, "trainer", r"is a DPOTrainer: several sequences.*rl\.plan.*micro_batch"),
    "no tokens": ({"data": [{"input_ids": [], "labels": []}]}, "data_collator", "has no tokens"),
    "no data": ({"data": []}, "train_dataset", "is empty"),
    "no input_ids": ({"collator": no_input_ids}, "data_collator", "no 'input_ids'"),
    "pictures": ({"collator": pictures}, "data_collator", "'pixel_values'"),
    "labels": ({"collator": fewer_labels}, "data_collator", "1 labels for"),
    "mask of documents": ({"collator": masked_by_document}, "data_collator", "one document in a row"),
    "several documents": ({"collator": positions_anew}, "data_collator", "position_ids that begin anew"),
    "mlm": ({"collator": MASKED}, "data_collator", "mlm=True"),
    "own loader": ({"cls": OwnLoader}, "trainer", "OwnLoader with its own get_train_dataloader"),
    "weights": ({"cls": Weighted}, "trainer", "a WeightedRandomSampler.*leave its _get_train_sampler out"),
    "replacement": ({"cls": Repeating}, "trainer", "draws documents by a RandomSampler with replacement"),
    "some documents": ({"cls": Fewer}, "trainer", "draws documents by a RandomSampler of 10 of 90"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_would_train_other_documents_is_refused(name: str, tmp_path: Path) -> None:
    options, argument, message = REFUSALS[name]
    options = {"data": documents(), "collator": together, "cls": Trainer, "remove_unused_columns": False} | options
    data, collator, cls = (options.pop(name) for name in ("data", "collator", "cls"))
    trainer = cls(llama(), arguments(tmp_path, **options), train_dataset=data, data_collator=collator)
    before = dict(vars(trainer.args))
    with pytest.raises(wlb.WlbError, match=message) as refused:
        balance(trainer, max_tokens=64)
    assert refused.value.argument == argument
    assert (type(trainer), vars(trainer.args)) == (cls, before), "half done"


def test_versions_that_are_not_known_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = documents()
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=data, data_collator=together)
    with monkeypatch.context() as older:
        older.setattr(refusals.transformers, "__version__", "4.57.1")
        with pytest.raises(wlb.WlbError, match=r"transformers 4.57.1: 5.6 or newer"):
            balance(trainer, max_tokens=64)
    with monkeypatch.context() as newer:
        newer.delattr(Trainer, "get_batch_samples")
        with pytest.raises(wlb.WlbError, match="newer than this version of wlb knows"):
            balance(trainer, max_tokens=64)

    class Smoother(LabelSmoother):
        def __call__(self, output: Any, labels: Any, shift_labels: bool = False) -> Any:
            """As transformers 5.6 calls it."""

    trainer.label_smoother = Smoother()
    with pytest.raises(wlb.WlbError, match="smooths by micro-batch"):
        balance(trainer, max_tokens=64)


def test_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError, match="balanced already"):
        balance(balanced(tmp_path), max_tokens=64)


def test_lengths_that_are_wrong_are_named(tmp_path: Path) -> None:
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=documents(), data_collator=together)  # type: ignore[arg-type]
    with pytest.raises(wlb.WlbError, match="there are 90 documents"):
        balance(trainer, max_tokens=64, lengths=[3])
    wrong = LENGTHS.copy()
    wrong[7] += 1
    with pytest.raises(wlb.WlbError, match="document 7"):
        balance(trainer, max_tokens=64, lengths=wrong, max_document_tokens=64).train()


# --- the proof before the first step ----------------------------------------------------------------------------------


def test_the_proof_is_printed_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    balanced(tmp_path, max_steps=1).train()
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    checks = ["documents", "mode", "others", "halves", "company", "ranks", "evaluation", "resume"]
    assert lines[:9] == ["found", *checks]


@pytest.mark.parametrize("num_train_epochs", [1, 3])
def test_epochs_of_a_single_step_are_proved_too(num_train_epochs: int, tmp_path: Path) -> None:
    few = [row for row in documents() if 2 < len(row["input_ids"]) < 20][:4]
    trainer = balanced(tmp_path, data=few, num_train_epochs=num_train_epochs, gradient_accumulation_steps=1)
    trainer.train()
    assert trainer.state.global_step == num_train_epochs
    assert trainer.state.epoch == num_train_epochs


def test_checkpoints_that_are_a_step_ahead_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is fetched counts as trained."""
    own = MicroBatchCallback.state
    trainer = balanced(tmp_path, max_steps=1)

    def ahead(self: Any) -> Any:
        found = own(self)
        next(iter(steps := trainer._wlb_plan.steps()))
        next(iter(steps))
        return found | {"steps": steps.state_dict()}

    monkeypatch.setattr(MicroBatchCallback, "state", ahead)
    with pytest.raises(wlb.WlbError, match=r"goes on with step 2 where step 1 was next"):
        trainer.train()


def mixed(rank: int, folder: Path) -> None:
    balanced(folder, max_steps=1, bf16=True).train()  # in a process of its own: accelerate keeps its precision


def test_a_proof_knows_what_mixed_precision_rounds(tmp_path: Path) -> None:
    processes.run(1, mixed, tmp_path)


class Plain(LlamaForCausalLM):
    """Takes no `shift_labels`."""

    accepts_loss_kwargs = True

    def forward(  # type: ignore[override]
        self,
        input_ids: Any,
        position_ids: Any = None,
        labels: Any = None,
        use_cache: Any = None,
        num_items_in_batch=None,
    ) -> Any:
        named = {"position_ids": position_ids, "labels": labels, "use_cache": use_cache}
        return super().forward(input_ids, num_items_in_batch=num_items_in_batch, **named)


def long_ones_first() -> tuple[Any, dict[str, Any]]:
    """Data of which the first step has pieces, and arguments of one step."""
    data = sorted(documents(), key=lambda row: -len(row["input_ids"]))
    return data, {"max_steps": 1, "train_sampling_strategy": "sequential"}


def test_plain_models_are_proved_on_documents_that_are_cut(tmp_path: Path) -> None:
    """What follows a cut is then not learnt, by the proof neither."""
    data, options = long_ones_first()
    trainer: Any = Trainer(Plain(llama().config), arguments(tmp_path, **options), train_dataset=data)
    trainer.data_collator = together
    with pytest.raises(wlb.WlbError, match='"split": Plain takes no shift_labels'):
        balance(trainer, max_tokens=64)
    balance(trainer, max_tokens=64, oversize="truncate").train()


def test_labels_that_a_trainer_counts_by_itself_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.6 does: it looks at `labels`, in which no row holds what the last token of a piece predicts."""

    class Older(Trainer):
        def _get_num_items_in_batch(self, batch_samples: Any, device: Any) -> Any:
            return sum((batch["labels"] != -100).sum() for batch in batch_samples)

    data, options = long_ones_first()
    trainer: Any = Older(llama(), arguments(tmp_path, **options), train_dataset=data, data_collator=together)
    monkeypatch.setattr(import_module("wlb.integrations.huggingface.balance"), "_labels_to_count", lambda batch: batch)
    with pytest.raises(wlb.WlbError, match=r"its halves|times the gradient of the mean"):
        balance(trainer, max_tokens=64).train()


def test_models_that_mix_documents_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_tokens": 64, "cost_model": wlb.CostModel(attention=0.0, linear=1.0)}
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, state_size=4, num_hidden_layers=2))
    trainer: Any = Trainer(mamba, arguments(tmp_path), train_dataset=documents(), data_collator=together)
    with pytest.raises(wlb.WlbError, match=r"MambaMixer, whose \w+ \(mamba-ssm\) is not told where documents begin"):
        balance(trainer, **options)
    rwkv = RwkvForCausalLM(RwkvConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, context_length=48))
    trainer = Trainer(rwkv, arguments(tmp_path), train_dataset=documents(), data_collator=together)
    balance(trainer, oversize="truncate", **options)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    with pytest.raises(wlb.WlbError, match=r"see each other.*RwkvSelfAttention.*look along the row"):
        trainer.train()
    assert all(torch.equal(*pair) for pair in zip(before, trainer.model.parameters(), strict=True))


def test_costs_that_are_not_known_are_asked_for(tmp_path: Path) -> None:
    class MadeUp(LlamaConfig):
        model_type = "made_up"

    data: Any = documents()
    trainer = Trainer(llama(), arguments(tmp_path), train_dataset=data, data_collator=together)
    trainer.model.config.__class__ = MadeUp
    with pytest.raises(wlb.WlbError, match="made_up"):
        balance(trainer, max_tokens=64)
    balance(trainer, max_tokens=64, cost_model=wlb.CostModel(attention=1.0, linear=1.0))


def averaged(rank: int, folder: Path) -> str:
    """A trainer that was changed: its loss is not multiplied by the ranks that DDP divides by."""

    class Averaged(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            result = super().compute_loss(*args, **kwargs)
            return (result[0] / 2, result[1]) if isinstance(result, tuple) else result / 2

    data: Any = documents()
    trainer = Averaged(llama(), arguments(folder, 2), train_dataset=data, data_collator=together)
    with pytest.raises(wlb.WlbError) as refused:
        balance(trainer, max_tokens=64).train()
    return str(refused.value)


def test_a_trainer_that_divides_is_found_out(tmp_path: Path) -> None:
    for message in processes.run(2, averaged, tmp_path):
        assert "0.5 times" in message


def test_another_loss_is_proved_on_rows_of_single_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    balanced(tmp_path, max_steps=1, label_smoothing_factor=0.1).train()
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines[1:6] == ["documents", "mode", "others", "halves", "company"]


def test_noise_that_scales_with_the_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError, match=r"neftune_noise_alpha = 5.*scales with the length of the row"):
        balanced(tmp_path, max_steps=1, neftune_noise_alpha=5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_follow_the_row_are_refused_where_documents_may_be_too_long(kind: str, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        half = llama().config.head_dim // 2
        rope |= {"short_factor": [1.0] * half, "long_factor": [2.0] * half, "original_max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**llama().config.to_dict() | {"rope_parameters": rope}))
    for most in (32, None):
        trainer: Any = Trainer(model, arguments(tmp_path), train_dataset=documents(), data_collator=together)
        limit = longest_document(model)
        assert limit is not None
        if most is None:
            with pytest.raises(wlb.WlbError, match=f"give max_document_tokens={limit}"):
                balance(trainer, max_tokens=limit + 8, max_document_tokens=limit + 1).train()
        else:
            balance(trainer, max_tokens=limit + 8, max_document_tokens=min(most, limit))


class OfRows(IterableDataset[Any]):
    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.mark.parametrize("row", [None, {"input_ids": None, "labels": None}])
def test_a_row_that_is_nothing_is_named(row: Any, tmp_path: Path) -> None:
    name = "is nothing" if row is None else "has nothing in column 'input_ids'"
    rows = [*documents()[:3], row]
    for data, options in ((rows, {}), (OfRows(rows), {"max_steps": 3})):
        with pytest.raises(wlb.WlbError, match=rf"train_dataset\[3\] {name} \(null\): filter such rows out"):
            balanced(tmp_path, data=data, **options).train()
