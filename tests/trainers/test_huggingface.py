"""Packed micro-batches in real Hugging Face models and the real `Trainer`, against one document at a time."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaForCausalLM,
    Trainer,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import small_corpus
import wlb
from small_corpus import VOCABULARY, flat, outcome
from wlb.integrations.huggingface import MicroBatchCallback, MicroBatchLoader, PackedCollator
from wlb.torch.data import BalancedBatchSampler, BalancedStream, StepLoader


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    return small_corpus.llama(attn_implementation=attention, max_position_embeddings=128).double()


def documents(lengths: list[int]) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(len(lengths))
    return [{"input_ids": torch.randint(VOCABULARY, (length,), generator=random)} for length in lengths]


def one_by_one(model: LlamaForCausalLM, features: list[dict[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Logits [tokens, vocabulary] and the loss per predicted token, with no packing anywhere."""
    logits = [model(input_ids=feature["input_ids"][None], use_cache=False).logits[0] for feature in features]
    losses = [
        torch.nn.functional.cross_entropy(logit[:-1], feature["input_ids"][1:], reduction="sum")
        for logit, feature in zip(logits, features, strict=True)
    ]
    predictions = sum(len(feature["input_ids"]) - 1 for feature in features)
    return torch.cat(logits), torch.stack(losses).sum() / predictions


def gradients(model: LlamaForCausalLM, loss: Tensor) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(model.parameters()))])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_equals_document_by_document(attention: str) -> None:
    model, features = llama(attention), documents([1, 17, 5, 40, 1])
    packed = model(**PackedCollator()(features))
    logits, loss = one_by_one(model, features)
    assert (packed.logits[0] - logits).abs().max() / logits.abs().max() < 1e-6
    torch.testing.assert_close(packed.loss, loss.float(), rtol=1e-6, atol=0.0)  # the model's loss is fp32
    expected = gradients(model, loss)
    error = (gradients(model, packed.loss) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_flex_attention_forward() -> None:
    features = documents([1, 17, 5, 40, 1])
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        packed = llama("flex_attention").float()(**PackedCollator()(features)).logits[0]
        logits, _ = one_by_one(llama("eager").float(), features)
    assert (packed - logits).abs().max() / logits.abs().max() < 1e-6


@pytest.mark.parametrize("change", [{"use_cache": True}, {"attention_mask": torch.ones(1, 64)}, {"position_ids": None}])
def test_documents_mix_without_what_the_collator_says(change: dict[str, Any]) -> None:
    features = documents([1, 17, 5, 40, 1])
    batch = PackedCollator()(features)
    assert not batch["use_cache"]
    assert "attention_mask" not in batch
    model = llama()
    assert not torch.allclose(model(**batch | change).logits, model(**batch).logits, atol=1e-3)


def test_batch_equals_that_of_transformers() -> None:
    features = documents([3, 1, 6])
    expected = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(features)
    batch = PackedCollator()(features)
    assert batch.pop("use_cache") is False
    assert batch.pop("shift_labels").tolist() == [[*expected["labels"][0, 1:].tolist(), -100]]
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, Tensor):
            assert batch[name].dtype == value.dtype
            assert batch[name].equal(value)
        else:
            assert batch[name] == value
            assert type(batch[name]) is int
    plain = PackedCollator(flash_attention_kwargs=False)(features)
    assert plain.keys() == {"input_ids", "position_ids", "labels", "use_cache"}


def test_labels_given_are_kept_but_for_the_first_of_a_document() -> None:
    features = [
        {"input_ids": [1, 2, 3], "labels": [1, -100, 3]},
        {"input_ids": np.array([4, 5]), "labels": [4, 5]},
        {"input_ids": [6, 7], "labels": None},
    ]
    assert PackedCollator()(features)["labels"].tolist() == [[-100, -100, 3, -100, 5, -100, 7]]


@pytest.mark.parametrize(
    "feature",
    [{"input_ids": []}, {"input_ids": [[1, 2]]}, {"input_ids": [1, 2], "labels": [1]}],
)
def test_bad_documents_are_named(feature: dict[str, Any]) -> None:
    with pytest.raises(wlb.WlbError) as refused:
        PackedCollator()([{"input_ids": [1]}, feature])
    assert (refused.value.argument, refused.value.index) == ("features", 1)


LENGTHS = [30, 1, 7, 12, 3, 25, 9, 1, 40, 2, 16, 5, 8, 11, 38]
MICRO_BATCHES = 4


def packer() -> wlb.Packer:
    return wlb.Packer(
        num_micro_batches=MICRO_BATCHES,
        max_tokens=64,
        max_document_tokens=40,
        outlier_thresholds=(30,),
        cost_model=wlb.CostModel(attention=1.0, linear=10.0),
    )


def sampler(dp_rank: int = 0, dp_size: int = 1, lengths: list[int] = LENGTHS) -> BalancedBatchSampler:
    """4 steps in epoch 0 and 5 in the next. Documents wait, also from one to the other, and micro-batches are empty."""
    return BalancedBatchSampler(
        lengths, packer=packer(), dp_rank=dp_rank, dp_size=dp_size, tokens_per_batch=80, num_epochs=2
    )


class PackedTrainer(Trainer):
    def get_train_dataloader(self) -> MicroBatchLoader:
        batches = sampler(self.args.process_index, self.args.world_size)
        documents = DataLoader(
            self.train_dataset,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
        )
        return MicroBatchLoader(StepLoader(documents))


def train(rank: int, folder: Path, dp_size: int, stop: int) -> tuple[list[float], np.ndarray]:
    """Trains up to a step, from the checkpoint that there is, or else from the beginning."""
    return outcome(trained(PackedTrainer, LENGTHS, folder, dp_size, stop, dataloader_num_workers=2 - dp_size))


def trained(kind: type[Trainer], lengths: list[int], folder: Path, dp_size: int, stop: int, **options: Any) -> Any:
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        max_steps=stop,
        gradient_accumulation_steps=MICRO_BATCHES // dp_size,
        ignore_data_skip=True,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        logging_steps=1,
        save_steps=stop,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    data: Any = documents(lengths)
    trainer = kind(
        llama(), arguments, train_dataset=data, data_collator=PackedCollator(), callbacks=[MicroBatchCallback()]
    )
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return trainer


def reference(steps: int) -> tuple[list[float], np.ndarray]:
    """So many of the same steps with a plain loop, one document at a time."""
    model, features, losses = llama(), documents(LENGTHS), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = sampler()
    micro_batches = [*batches, *batches]  # two epochs
    for first in range(0, steps * MICRO_BATCHES, MICRO_BATCHES):
        ids = list(itertools.chain(*micro_batches[first : first + MICRO_BATCHES]))
        _, loss = one_by_one(model, [features[index] for index in ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, flat(model)


def test_trainer_takes_the_steps_of_one_document_at_a_time(tmp_path: Path) -> None:
    """From epoch 0 into the next on two ranks; there interrupted, while documents wait, and resumed on one."""
    assert sampler().total_steps() == 9
    losses, parameters = reference(8)
    processes.run(2, train, tmp_path, 2, 5)
    ((found, found_parameters),) = processes.run(1, train, tmp_path, 1, 8)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    # As close as the losses: norms and rotations are in float32, and sums in another order.
    np.testing.assert_allclose(found_parameters, parameters, rtol=0, atol=1e-5 * np.abs(parameters).max())


class StreamTrainer(Trainer):
    """Documents of streams, which no index describes."""

    def get_train_dataloader(self) -> MicroBatchLoader:
        documents: Any = self.train_dataset
        streams = [documents[number::4] for number in range(4)]
        self.stream = BalancedStream(
            streams, packer=packer(), collate_fn=self.collated, group=torch.distributed.group.WORLD, tokens_per_batch=80
        )
        return MicroBatchLoader(self.stream)

    def collated(self, documents: list[Any]) -> dict[str, Any]:
        collator: Any = self.data_collator
        batch: dict[str, Any] = collator([{"input_ids": np.asarray(document.tokens, int)} for document in documents])
        return batch


def train_stream(rank: int, folder: Path, dp_size: int, stop: int) -> tuple[list[float], int]:
    """As `train`; also the steps that the checkpoint says are done."""
    trainer = trained(StreamTrainer, LENGTHS * 3, folder, dp_size, stop)
    trainer.stream.close()
    saved = json.loads((folder / f"checkpoint-{stop}" / "trainer_state.json").read_text())
    return outcome(trainer)[0], saved["stateful_callbacks"]["MicroBatchCallback"]["steps"]["step"]


def test_trainer_takes_a_stream(tmp_path: Path) -> None:
    """Rank 0 alone writes the checkpoint, with documents of both; it goes on from there on one rank."""
    ((expected, _),) = processes.run(1, train_stream, tmp_path / "whole", 1, 8)
    (_, done), _ = processes.run(2, train_stream, tmp_path / "parts", 2, 5)
    assert done == 5
    ((found, _),) = processes.run(1, train_stream, tmp_path / "parts", 1, 8)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def micro_batch_loader() -> MicroBatchLoader:
    numbers: Any = range(len(LENGTHS))
    return MicroBatchLoader(StepLoader(DataLoader(numbers, batch_sampler=sampler(), collate_fn=list)))


def test_an_iteration_after_any_step_gives_documents() -> None:
    """Where the rest of an epoch has none too: the Trainer would take the end of an iteration for that of all data."""
    whole = micro_batch_loader()
    expected = [*whole, *whole]
    found, state = [], micro_batch_loader().steps.state_dict()
    for _ in range(9):
        loader = micro_batch_loader()
        loader.steps.load_state_dict(state)
        found += itertools.islice(loader, MICRO_BATCHES)
        state = loader.steps.state_dict()
    assert found == expected


def test_documents_of_one_token_have_nothing_to_predict() -> None:
    numbers: Any = range(9)
    documents = DataLoader(numbers, batch_sampler=sampler(lengths=[1] * 9), collate_fn=list)
    with pytest.raises(wlb.WlbError, match="nothing to predict"):
        next(iter(MicroBatchLoader(StepLoader(documents))))


def micro_batches_of_masked(rank: int, labelled: int) -> int:
    """Micro-batches that the Trainer gets of two steps; only documents of the first one, on one rank, have labels."""
    features: Any = [
        feature | {"labels": torch.full_like(feature["input_ids"], -100)} for feature in documents([9] * 8)
    ]
    packer = wlb.Packer(
        num_micro_batches=4, max_tokens=20, max_document_tokens=9, cost_model=wlb.CostModel(attention=1.0, linear=1.0)
    )
    batches = BalancedBatchSampler(
        [9] * 8, packer=packer, dp_rank=rank, dp_size=dist.get_world_size(), tokens_per_batch=36, shuffle=False
    )
    if rank == labelled:
        for feature in features[:4]:
            feature["labels"] = feature["input_ids"]
    loader = MicroBatchLoader(StepLoader(DataLoader(features, batch_sampler=batches, collate_fn=PackedCollator())))
    with pytest.warns(UserWarning, match="step 1 has no label that counts on any rank"):
        return len(list(loader))


@pytest.mark.parametrize("labelled", [0, 1])
def test_a_step_is_passed_over_if_no_rank_has_a_label(labelled: int) -> None:
    """On all ranks or none: the model's loss would be 0 / 0."""
    nothing = llama()(
        **PackedCollator()([{"input_ids": [1, 2], "labels": [-100, -100]}]), num_items_in_batch=0 * torch.ones(())
    )
    assert nothing.loss.isnan()
    assert processes.run(2, micro_batches_of_masked, labelled) == [2, 2]


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"ignore_data_skip": False}, "ignore_data_skip"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps"),
        ({"loader": DataLoader([1])}, "train_dataloader"),
        ({"saved": {}}, "state"),
    ],
)
def test_a_trainer_that_would_train_other_documents_is_refused(
    change: dict[str, Any], argument: str, tmp_path: Path
) -> None:
    loader = change.pop("loader", micro_batch_loader())
    state = TrainerState(global_step=3, stateful_callbacks=change.pop("saved", None))
    options = {"gradient_accumulation_steps": MICRO_BATCHES, "ignore_data_skip": True} | change
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, **options)
    with pytest.raises(wlb.WlbError) as refused:
        MicroBatchCallback().on_train_begin(arguments, state, TrainerControl(), train_dataloader=loader)
    assert refused.value.argument == argument


def test_an_empty_micro_batch_counts_nothing() -> None:
    batch = PackedCollator()([])
    assert batch["input_ids"].shape == (1, 1)
    output = llama()(**batch, num_items_in_batch=7)
    assert output.loss.item() == 0.0
    assert output.loss.requires_grad
