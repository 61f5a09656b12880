"""`balance` in TRL's `SFTTrainer` and on Hugging Face's data sets; `make test-trainers` installs both."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

import wlb
from tests.torch import processes
from tests.trainers.advised import Made, advised, of, predicted, running
from tests.trainers.page import block
from tests.trainers.small_corpus import CONTEXT, StopAt, flat, llama, loss_of_one, outcome
from tests.trainers.text_corpus import LENGTHS, Row, planned, reference, texts, tokenised, tokenizer
from wlb.integrations.huggingface import balance
from wlb.integrations.rows import Rows
from wlb.integrations.streams import streams_of
from wlb_tools.command.output.trainers import ENTRIES

datasets = pytest.importorskip("datasets")
trl = pytest.importorskip("trl")

STEPS = 20


def text() -> Any:
    return datasets.Dataset.from_list(texts())


def tokens_and_labels(row: dict[str, str]) -> Row:
    return tokenised(row, end=[0])  # `<eos>`, as SFTTrainer adds


def trained(
    folder: Path, dp_size: int, stop: int = STEPS, *, stream: bool = False, killed: bool = False, **options: Any
) -> Any:
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "num_train_epochs": 3,
        "max_length": None,
        "per_device_train_batch_size": 4 // dp_size,
        "gradient_accumulation_steps": 2,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }
    return trl.SFTTrainer(
        llama(),
        trl.SFTConfig(str(folder), **defaults | options),
        train_dataset=text().to_iterable_dataset(num_shards=4) if stream else text(),
        eval_dataset=text().select(range(0, 60, 3)),
        processing_class=tokenizer(),
        callbacks=[StopAt(stop, killed=killed)],
    )


def train(rank: int, folder: Path, stop: int = STEPS, resume: bool = False, **options: Any) -> Any:
    trainer = balance(trained(folder, dist.get_world_size(), stop, **options), max_tokens=64)
    assert trainer.args.world_size == dist.get_world_size()
    trainer.train(resume_from_checkpoint=resume)
    return *outcome(trainer), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_sft_takes_the_steps_of_one_document_at_a_time(ranks: int, tmp_path: Path) -> None:
    found = processes.run(ranks, train, tmp_path)
    plan = planned(balance(trained(tmp_path, 1), max_tokens=64))[:STEPS]
    losses, model = reference(plan, [tokens_and_labels(row) for row in text()])
    weights = flat(model)
    with torch.no_grad():
        total = count = 0.0
        for row in text().select(range(0, 60, 3)):
            tokens, labels = tokens_and_labels(row)
            for start in range(0, len(tokens), CONTEXT):
                predicted = [*labels[1:], -100][start : start + CONTEXT]
                if max(predicted) >= 0:
                    total += loss_of_one(model, tokens[start : start + CONTEXT], predicted).item()
                    count += sum(label != -100 for label in predicted)
    for found_losses, found_weights, evaluated in found:
        np.testing.assert_allclose(found_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(found_weights, weights, rtol=0, atol=1e-5 * np.abs(weights).max())
        assert evaluated == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("stream", [False, True])
def test_a_killed_run_goes_on_bit_for_bit(stream: bool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"stream": stream, "save_strategy": "steps", "save_steps": 4}
    if stream:
        options |= {"max_steps": 9}
    with pytest.raises(processes.RankFailed, match="died"):
        processes.run(2, partial_train, tmp_path, 6, False, options | {"killed": True})
    found = processes.run(2, partial_train, tmp_path, 9, True, options)[0]
    whole = processes.run(2, partial_train, tmp_path / "whole", 9, False, options)[0]
    assert found[0] == whole[0]
    np.testing.assert_array_equal(found[1], whole[1])


def partial_train(rank: int, folder: Path, stop: int, resume: bool, options: dict[str, Any]) -> Any:
    return train(rank, folder, stop, resume, **options)


def from_lines(rank: int, folder: Path, lines: str) -> Made:
    """As they are pasted; that there is no GPU, and which tokenizer it is, TRL is told in another way."""
    few = {"use_cpu": True, "bf16": False, "report_to": [], "max_steps": 2, "disable_tqdm": True}
    config = partial(trl.SFTConfig, str(folder), **few)
    trainer = partial(trl.SFTTrainer, processing_class=tokenizer())
    with mock.patch.multiple(trl, SFTConfig=config, SFTTrainer=trainer):
        return running(f"{lines}trainer.train()\n", {"model": llama(), "dataset": text()})


def test_the_lines_of_advice_make_the_plan_that_they_recommend(tmp_path: Path) -> None:
    tuned = advised("trl", of(llama().config), "wlb")
    for made in processes.run(2, from_lines, tmp_path, ENTRIES["trl"].written(tuned)):
        assert predicted(tuned).packers[0] in made.packers


def counted(rank: int, folder: Path, fill: int) -> tuple[list[int], list[int]]:
    """Tokens that TRL logs as trained so far, and those of the steps' documents."""
    few: dict[str, Any] = {"use_cpu": True, "bf16": False, "max_steps": 4, "save_strategy": "no", "report_to": []}
    few |= {"logging_steps": 1, "disable_tqdm": True, "gradient_accumulation_steps": 2, "max_length": None}
    trainer = trl.SFTTrainer(
        llama(), trl.SFTConfig(str(folder), **few), train_dataset=text(), processing_class=tokenizer()
    )
    trainer = balance(trainer, max_tokens=64, **({} if fill == 1 else {"multiple_of_tokens": fill}))
    trainer.train()
    lines = [line for line in trainer.state.log_history if "num_tokens" in line and "wlb/tokens" in line]
    return [int(line["num_tokens"]) for line in lines], [int(line["wlb/tokens"]) for line in lines]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fill", [1, 32])
def test_its_count_of_tokens_is_that_of_documents(ranks: int, fill: int, tmp_path: Path) -> None:
    """TRL counts the tokens of rows, those of all ranks: what fills rows up is no token that was trained."""
    for found, planned_tokens in processes.run(ranks, counted, tmp_path, fill):
        assert len(found) == 4
        assert found == np.cumsum(planned_tokens).tolist()


# --- its own figures --------------------------------------------------------------------------------------------------

WORDS = 203  # of a model that knows nothing, 5.31 is the entropy
OF_A_RANK = 6


def partly_masked(masked: int) -> Any:
    """Documents of a micro-batch each, twelve a step, of which so many have no label."""
    rows = np.random.default_rng(3).integers(3, WORDS, (4 * 2 * OF_A_RANK, 38)).tolist()
    without = [number % (2 * OF_A_RANK) < masked for number in range(len(rows))]
    return datasets.Dataset.from_list(
        [
            {"input_ids": row, "labels": [-100] * len(row) if none else row}
            for row, none in zip(rows, without, strict=True)
        ]
    )


def figures(rank: int, folder: Path, masked: int) -> tuple[Any, Any, Any]:
    """Lines that TRL logs, those of its evaluation, and the documents of each step's micro-batches."""
    options: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": [],
        "max_length": None,
    }
    options |= {"max_steps": 4, "logging_steps": 1, "learning_rate": 0.0, "disable_tqdm": True}
    options |= {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}
    options |= {"gradient_accumulation_steps": OF_A_RANK, "train_sampling_strategy": "sequential"}
    data = partly_masked(masked)
    trainer = trl.SFTTrainer(
        llama(vocab_size=WORDS),
        trl.SFTConfig(str(folder), **options),
        train_dataset=data,
        eval_dataset=data.select(range(12)),
        processing_class=tokenizer(),
    )
    trainer = balance(trainer, max_tokens=48, max_delay=0)
    batches = [list(batch) for batch in trainer._wlb_plan.sampler()]
    trainer.train()
    evaluated = trainer.evaluate()
    lines = [line for line in trainer.state.log_history if "wlb/tokens" in line]
    return lines, evaluated, [batches[first : first + OF_A_RANK] for first in range(0, len(batches), OF_A_RANK)]


def alone(row: dict[str, list[int]]) -> np.ndarray:
    """Sums over a document's labels: of the entropies, of right guesses, and how many there are."""
    with torch.no_grad():
        logits = llama(vocab_size=WORDS)(input_ids=torch.tensor(row["input_ids"])[None]).logits[0, :-1].double()
    labels = torch.tensor(row["labels"][1:])
    of = labels != -100
    chances = logits.log_softmax(-1)
    entropies = -(chances.exp() * chances).sum(-1)
    return np.array([float(entropies[of].sum()), float((logits.argmax(-1) == labels)[of].sum()), float(of.sum())])


@pytest.mark.parametrize("masked", [2, 3])
def test_entropy_and_accuracy_are_those_of_labels(masked: int, tmp_path: Path) -> None:
    """Micro-batches in which no rank has a label, or one rank has none: TRL's mean had a 0 for the former."""
    found = processes.run(2, figures, tmp_path, masked)
    data = partly_masked(masked)
    sums = [alone(row) for row in data]
    for step in range(4):
        micro_batches = [
            sum((sums[document] for _, _, plan in found for document in plan[step][place]), np.zeros(3))
            for place in range(OF_A_RANK)
        ]
        ranks_with_labels = [
            sum(any(sums[document][2] for document in plan[step][place]) for _, _, plan in found)
            for place in range(OF_A_RANK)
        ]
        assert sorted(ranks_with_labels) == ([0, 2, 2, 2, 2, 2] if masked == 2 else [0, 1, 2, 2, 2, 2])
        means = [each[:2] / each[2] for each in micro_batches if each[2]]
        entropy, accuracy = np.mean(means, axis=0)
        assert f"{entropy:.2f} {entropy * 5 / 6:.2f}" == "5.31 4.42"
        for lines, _, _ in found:
            assert lines[step]["entropy"] == pytest.approx(entropy, abs=1e-4)
            assert lines[step]["mean_token_accuracy"] == pytest.approx(accuracy, abs=1e-4)
            assert lines[step]["num_tokens"] == 38 * 12 * (step + 1)
    for _, evaluated, _ in found:
        assert f"{evaluated['eval_entropy']:.2f}" == "5.31"


def run_page(rank: int, folder: Path) -> tuple[str, float]:
    tokenizer().save_pretrained(folder)
    llama().save_pretrained(folder)
    few = {"use_cpu": True, "bf16": False, "max_steps": 2, "save_strategy": "no", "report_to": [], "disable_tqdm": True}
    names: dict[str, Any] = {
        "SFTTrainer": trl.SFTTrainer,
        "SFTConfig": partial(trl.SFTConfig, str(folder), **few),
        "model": llama().from_pretrained(folder),
        "dataset": text(),
        "balance": balance,
    }
    exec(block("SFTTrainer"), names)
    return type(names["trainer"]).__name__, names["trainer"].train().training_loss


def test_the_page_says_what_runs(tmp_path: Path) -> None:
    [(name, loss)] = processes.run(1, run_page, tmp_path)
    assert name == "SFTTrainer"
    assert np.isfinite(loss)


@pytest.mark.parametrize("name", ["packing", "eval_packing"])
def test_its_own_packing_is_refused(name: str, tmp_path: Path) -> None:
    trainer = trained(tmp_path, 1, **{name: True, "max_length": 32})
    with pytest.raises(wlb.WlbError, match="wlb packs") as refused:
        balance(trainer, max_tokens=64)
    assert refused.value.argument == name


# --- Hugging Face's data sets -----------------------------------------------------------------------------------------


def rows() -> Any:
    return datasets.Dataset.from_list([{"input_ids": list(range(1, 1 + length))} for length in LENGTHS.tolist()])


def as_it_is(features: list[dict[str, Any]]) -> dict[str, Any]:
    return {name: torch.tensor([feature[name] for feature in features]) for name in features[0]}


@pytest.mark.parametrize("change", ["none", "shuffled", "transformed"])
def test_lengths_are_those_of_the_documents(change: str) -> None:
    data, expected = rows(), LENGTHS
    if change == "shuffled":
        data, expected = data.shuffle(seed=1), None
    if change == "transformed":
        data.set_transform(lambda batch: {"input_ids": [[*row, 1] for row in batch["input_ids"]]})
        expected = LENGTHS + 1
    found = Rows(data, as_it_is).lengths()
    if expected is None:
        expected = [len(data[index]["input_ids"]) for index in range(len(data))]
    np.testing.assert_array_equal(found, expected)


def read(stream: Any) -> list[list[int]]:
    return [document["input_ids"].tolist() for document in stream]


@pytest.mark.parametrize("kind", ["as it is", "mapped", "shuffled"])
def test_streams_go_on_where_they_stood(kind: str) -> None:
    """By their own state where it is exact: not where there is a shuffle buffer, nor under every `map` of datasets."""
    data, expected = rows().to_iterable_dataset(num_shards=4), LENGTHS
    if kind != "as it is":
        data, expected = data.map(lambda row: {"input_ids": [*row["input_ids"], 5]}), LENGTHS + 1
    if kind == "shuffled":
        data = data.shuffle(seed=3, buffer_size=8)
    streams = streams_of(data, as_it_is)
    assert len(streams) == 4
    resuming = {hasattr(stream, "state_dict") for stream in streams}
    assert kind == "mapped" or resuming == {kind == "as it is"}
    everything = [document for stream in streams for document in read(stream)]
    assert sorted(map(len, everything)) == sorted(expected)
    if resuming == {True}:
        stream, again = streams_of(data, as_it_is)[1], streams_of(data, as_it_is)[1]
        iterator: Any = iter(stream)
        before = [next(iterator)["input_ids"].tolist() for _ in range(6)]
        again.load_state_dict(stream.state_dict())  # type: ignore[attr-defined]
        assert before + read(again) == read(streams[1])


def test_a_part_of_a_rank_is_refused() -> None:
    from datasets.distributed import split_dataset_by_node

    data = split_dataset_by_node(rows().to_iterable_dataset(num_shards=4), rank=0, world_size=2)
    with pytest.raises(wlb.WlbError, match="split by node"):
        streams_of(data, as_it_is)
