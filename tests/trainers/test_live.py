"""What a trainer has when it begins to train counts, whatever it had when it was balanced."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

import wlb
from tests.torch import processes
from tests.trainers.small_corpus import CONTEXT, LENGTHS, documents, llama, mean_over_tokens, outcome
from tests.trainers.test_balance import arguments, together
from wlb.integrations.huggingface import MicroBatchCallback, balance


class Counting(Trainer):
    """Counts the tokens and labels that it trains."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.seen = getattr(self, "seen", Counter())
        self.seen.update(inputs["input_ids"].flatten().tolist())
        self.labels = getattr(self, "labels", 0) + int((inputs["shift_labels"] != -100).sum())
        return super().training_step(model, inputs, *args, **kwargs)


def counting(folder: Path, *, data: Any = None, collator: Any = together, **options: Any) -> Any:
    data = documents() if data is None else data
    args = arguments(folder, **{"num_train_epochs": 1} | options)
    return Counting(llama(), args, train_dataset=data, data_collator=collator)


def balanced(trainer: Any) -> Any:
    return balance(trainer, max_tokens=64, verify=False)


def rows(first: int, count: int) -> list[dict[str, list[int]]]:
    """Documents of a token of their own each."""
    lengths = np.random.default_rng(first).integers(4, 60, count).tolist()
    return [{"input_ids": [first + at] * n, "labels": [first + at] * n} for at, n in enumerate(lengths)]


def tokens_of(data: Any) -> Counter[int]:
    return Counter(token for row in data for token in row["input_ids"])


class LastThree:
    """A collator that learns the last three tokens of each document; or all of them, if it is told so."""

    every = False

    def __call__(self, features: Any) -> Any:
        batch = together(features)
        if not self.every:
            for row, feature in zip(batch["labels"], features, strict=True):
                row[: max(len(feature["input_ids"]) - 3, 0)] = -100
        return batch


def labels_of(data: Any) -> int:
    return sum(sum(label != -100 for label in row["labels"][1:]) for row in data)


# --- data, collators, arguments, models ------------------------------------------------------------------------------


def test_a_data_set_that_was_set_afterwards_is_trained(tmp_path: Path) -> None:
    first, second = rows(0, 20), rows(30, 30)
    trainer = balanced(counting(tmp_path, data=first))
    steps = trainer.args.max_steps
    trainer.train_dataset = second
    trainer.train()
    assert trainer.seen - Counter({0: trainer.seen[0]}) == tokens_of(second), "but for what fills up empty rows"
    assert trainer.state.epoch == 1.0
    # A second stage of a curriculum.
    trainer.seen.clear()
    trainer.train_dataset = first
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps == steps
    assert all(trainer.seen[token] >= count for token, count in tokens_of(first).items())
    assert trainer.state.epoch == 1.0


def test_a_collator_that_was_set_afterwards_says_what_is_learnt(tmp_path: Path) -> None:
    trainer = balanced(counting(tmp_path))
    trainer.data_collator = LastThree()
    trainer.train()
    assert trainer.labels == sum(
        sum(label != -100 for label in row["labels"][max(len(row["labels"]) - 3, 1) :]) for row in documents()
    )
    trainer.labels = 0
    trainer.data_collator.every = True  # in its place
    trainer.train()
    assert trainer.labels == labels_of(documents())


@pytest.mark.a_few(4)
@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ({"num_train_epochs": 2}, {"num_train_epochs": 2}),
        ({"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 8}),
        ({"gradient_accumulation_steps": 5}, {"gradient_accumulation_steps": 5}),
        ({"max_steps": 3}, {"max_steps": 3}),
        ({"data_seed": 5, "train_sampling_strategy": "random"}, {"data_seed": 5}),
        ({"train_sampling_strategy": "sequential"}, {"train_sampling_strategy": "sequential"}),
    ],
)
def test_arguments_that_were_changed_afterwards_count(changes: Any, equal: Any, tmp_path: Path) -> None:
    """As if they had been so before."""
    trainer, before = balanced(counting(tmp_path)), balanced(counting(tmp_path, **equal))
    for name, value in changes.items():
        setattr(trainer.args, name, value)
    trainer.train()
    before.train()
    assert outcome(trainer)[0] == outcome(before)[0]
    assert (trainer.args.max_steps, trainer.state.epoch) == (before.args.max_steps, before.state.epoch)


def test_other_arguments_and_another_model_count(tmp_path: Path) -> None:
    trainer = balanced(counting(tmp_path))
    trainer.args = copy.copy(trainer.args)
    trainer.args.max_steps = 2
    trainer.model = larger = llama(max_position_embeddings=32, num_hidden_layers=1)
    with pytest.raises(wlb.WlbError, match="model is a LlamaForCausalLM that was set after the trainer was made"):
        trainer.train()
    trainer.model_wrapped = larger
    before = [parameter.clone() for parameter in larger.parameters()]
    trainer.train()
    assert trainer.state.global_step == 2
    assert not all(torch.equal(*pair) for pair in zip(before, larger.parameters(), strict=True))
    assert trainer._wlb_plan.packer.max_document_tokens == 32


def refuse_drop_last(trainer: Any) -> None:
    trainer.args.dataloader_drop_last = True


def refuse_no_callback(trainer: Any) -> None:
    trainer.remove_callback(MicroBatchCallback)


def refuse_no_data(trainer: Any) -> None:
    trainer.train_dataset = []


def refuse_text(trainer: Any) -> None:
    trainer.train_dataset = [{"text": "abc"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (refuse_drop_last, "dataloader_drop_last = True: documents would be left out"),
        (refuse_no_callback, "trainer has no MicroBatchCallback any more"),
        (refuse_no_data, "train_dataset is empty"),
        (refuse_text, "train_dataset.* has no 'input_ids', but 'text'"),
    ],
)
def test_what_cannot_be_balanced_any_more_is_refused_when_it_trains(change: Any, message: str, tmp_path: Path) -> None:
    trainer = balanced(counting(tmp_path))
    change(trainer)
    with pytest.raises(wlb.WlbError, match=message):
        trainer.train()


def test_lengths_are_those_of_the_data_set_that_they_were_given_for(tmp_path: Path) -> None:
    trainer = balance(counting(tmp_path), max_tokens=64, verify=False, lengths=LENGTHS)
    trainer.train_dataset = documents()
    with pytest.raises(wlb.WlbError, match="lengths are those of the data set that the trainer had"):
        trainer.train()


# --- resumes ---------------------------------------------------------------------------------------------------------


def trained(rank: int, folder: Path, stop: int, resume: bool, options: dict[str, Any]) -> Any:
    """The tokens that this rank trains, steps, epochs, and losses of all."""
    trainer = counting(folder, data=rows(1, 40), **{"num_train_epochs": 3, "save_strategy": "epoch"} | options)
    trainer.add_callback(StopAtEpoch(stop))
    balanced(trainer).train(resume_from_checkpoint=resume)
    seen = getattr(trainer, "seen", Counter())
    return seen, trainer.state.global_step, trainer.args.max_steps, trainer.state.epoch, outcome(trainer)[0]


class StopAtEpoch(TrainerCallback):
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.epoch >= self.epoch


@pytest.mark.parametrize(
    ("ranks", "options"),
    [(2, {}), (1, {"per_device_train_batch_size": 8}), (2, {"per_device_train_batch_size": 2})],
    ids=["ranks", "batch", "ranks with the same batch"],
)
def test_other_ranks_or_another_batch_train_all_epochs_to_their_end(
    ranks: int, options: dict[str, Any], tmp_path: Path
) -> None:
    data = rows(1, 40)
    first = processes.run(1, trained, tmp_path, 1, False, {})[0]
    assert first[3] == 1.0
    rest = processes.run(ranks, trained, tmp_path, 3, True, options)
    seen = sum((part[0] for part in rest), first[0])
    assert {token: seen[token] for token in tokens_of(data)} == {token: 3 * n for token, n in tokens_of(data).items()}
    for _, steps, planned, epoch, _ in rest:
        assert (steps, epoch) == (planned, 3.0)


def test_a_part_of_an_epoch_goes_on_to_its_end(tmp_path: Path) -> None:
    """Half an epoch more, with steps of half as many tokens."""
    first = trained(0, tmp_path, 1, False, {"num_train_epochs": 1.5})
    rest = trained(0, tmp_path, 3, True, {"num_train_epochs": 1.5, "per_device_train_batch_size": 2})
    assert rest[1] == rest[2]
    assert rest[3] == pytest.approx(1.5, abs=0.2)
    assert rest[2] - first[1] == pytest.approx(first[1], abs=1.5)


def test_a_checkpoint_of_other_steps_is_refused(tmp_path: Path) -> None:
    trained(0, tmp_path, 1, False, {})
    (state,) = tmp_path.glob("checkpoint-*/trainer_state.json")
    text = state.read_text()
    state.write_text(text.replace('"trained": ', '"trained": 1'))
    with pytest.raises(wlb.WlbError, match=r"resume_from_checkpoint holds the data after \d+ steps"):
        trained(0, tmp_path, 3, True, {})


# --- evaluation ------------------------------------------------------------------------------------------------------


class Stream(torch.utils.data.IterableDataset[Any]):
    """Without a length."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Sized(Stream):
    """With a length, as many streams have."""

    def __len__(self) -> int:
        return len(self.rows)


KINDS: dict[str, Any] = {"list": list, "stream": Stream, "stream with a length": Sized}


def evaluated(rank: int, folder: Path, numbers: list[int], kind: str, options: dict[str, Any]) -> Any:
    """The losses of `evaluate` and `predict`, and what the predictions hold; collated to different widths."""
    found: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        rows = sorted(tuple(row[row != -100].tolist()) for row in prediction.label_ids)
        found.append((len(prediction.predictions), rows))
        return {}

    data = KINDS[kind]([documents()[number] for number in numbers])
    trainer: Any = Trainer(
        llama(max_position_embeddings=64),
        arguments(folder, 2, per_device_eval_batch_size=3, **options),
        train_dataset=documents(),
        eval_dataset=data,
        data_collator=together,
        compute_metrics=metrics,
    )
    trainer = balance(trainer, max_tokens=64)
    return [trainer.evaluate()["eval_loss"], trainer.predict(data).metrics["test_loss"]], found


@pytest.mark.a_few(4)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("list", {}),
        ("stream", {}),
        ("stream", {"accelerator_config": {"dispatch_batches": False}}),
        ("stream", {"accelerator_config": {"dispatch_batches": False}, "dataloader_num_workers": 1}),
        ("stream with a length", {}),
        ("stream with a length", {"accelerator_config": {"dispatch_batches": False}}),
    ],
)
def test_rows_that_fill_up_the_last_batch_are_evaluated_once(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    all_numbers = [number for number in range(len(LENGTHS)) if 3 < LENGTHS[number] <= CONTEXT]
    model = llama(max_position_embeddings=64)
    for count in (2, 7, 10, 12):
        numbers = all_numbers[:count]
        labels = [row["labels"] for row in (documents()[number] for number in numbers)]
        for losses, found in processes.run(2, evaluated, tmp_path, numbers, kind, options):
            assert losses == pytest.approx([mean_over_tokens(model, numbers)] * 2, rel=1e-6)
            assert found == [(count, sorted(tuple(i for i in row if i != -100) for row in labels))] * 2


class Broken(Stream):
    def __iter__(self) -> Any:
        yield self.rows[0]
        raise OSError("no such shard")


def evaluates_a_broken_stream(rank: int, folder: Path) -> str:
    trainer: Any = Trainer(
        llama(),
        arguments(folder, 2),
        train_dataset=documents(),
        eval_dataset=Broken(documents()),
        data_collator=together,
    )
    trainer = balance(trainer, max_tokens=64)
    with pytest.raises(OSError, match="shard") as raised:
        trainer.evaluate()
    return str(raised.value)


def test_a_stream_that_breaks_ends_the_evaluation_on_every_rank(tmp_path: Path) -> None:
    assert processes.run(2, evaluates_a_broken_stream, tmp_path) == ["no such shard"] * 2
