"""Packed micro-batches in real Hugging Face models and the real `Trainer`, against one document at a time."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from torch import Tensor
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import wlb
from wlb.integrations.huggingface import MicroBatchLoader, PackedCollator

VOCABULARY = 64


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            attn_implementation=attention,
        )
    ).double()


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
    features = [{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, {"input_ids": np.array([4, 5]), "labels": [4, 5]}]
    assert PackedCollator()(features)["labels"].tolist() == [[-100, -100, 3, -100, 5]]


@pytest.mark.parametrize(
    "feature",
    [{"input_ids": []}, {"input_ids": [[1, 2]]}, {"input_ids": [1, 2], "labels": [1]}],
)
def test_bad_documents_are_named(feature: dict[str, Any]) -> None:
    with pytest.raises(wlb.WlbError) as refused:
        PackedCollator()([{"input_ids": [1]}, feature])
    assert (refused.value.argument, refused.value.index) == ("features", 1)


LENGTHS = [30, 1, 7, 12, 3, 25, 9, 1, 40, 2, 16, 5]
GLOBAL_BATCH = 6  # documents
MICRO_BATCHES = 4


class PlannedSampler:
    """Each global batch packed by wlb, this rank's micro-batches of it; from another document in every epoch."""

    def __init__(self, dp_rank: int, dp_size: int) -> None:
        self.dp_rank, self.dp_size, self.epoch = dp_rank, dp_size, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(LENGTHS) // GLOBAL_BATCH * MICRO_BATCHES // self.dp_size

    def __iter__(self) -> Iterator[list[int]]:
        cost = wlb.CostModel(attention=1.0, linear=10.0)
        methods = ("original", "var_length")  # all documents in one micro-batch and three empty; none empty
        batches = np.roll(np.arange(len(LENGTHS)), self.epoch).reshape(-1, GLOBAL_BATCH)
        for ids, method in zip(batches, methods, strict=True):
            options = {"num_micro_batches": MICRO_BATCHES, "max_tokens": 128, "cost_model": cost, "method": method}
            plan = wlb.pack(np.array(LENGTHS)[ids], **options)
            for index in plan.deal(self.dp_size)[self.dp_rank]:
                yield ids[plan[index].document_ids].tolist()


class PackedTrainer(Trainer):
    def get_train_dataloader(self) -> MicroBatchLoader:
        sampler = PlannedSampler(self.args.process_index, self.args.world_size)
        return MicroBatchLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)


def train(rank: int, folder: Path, dp_size: int, stops: list[int]) -> tuple[list[float], np.ndarray]:
    """Trains up to each of these steps in turn, resuming from the checkpoint of the one before."""
    # accelerate asks for an address though it uses the group there is, and for more threads unless told otherwise:
    # matrix products hang in a forked process whose parent had several.
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    for stop in stops:
        model = llama()
        arguments = TrainingArguments(
            str(folder),
            use_cpu=True,
            max_steps=stop,
            gradient_accumulation_steps=MICRO_BATCHES // dp_size,
            optim="sgd",
            learning_rate=0.5,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_steps=stop,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = PackedTrainer(model, arguments, train_dataset=documents(LENGTHS), data_collator=PackedCollator())
        trainer.train(resume_from_checkpoint=stop != stops[0])
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


def reference(epochs: int) -> tuple[list[float], np.ndarray]:
    """The same steps with a plain loop, one document at a time."""
    model, features, losses = llama(), documents(LENGTHS), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(epochs):
        for ids in np.roll(np.arange(len(LENGTHS)), epoch).reshape(-1, GLOBAL_BATCH):
            _, loss = one_by_one(model, [features[index] for index in ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()


@pytest.mark.parametrize(("dp_size", "stops"), [(2, [4]), (1, [3, 4])])
def test_trainer_takes_the_steps_of_one_document_at_a_time(dp_size: int, stops: list[int], tmp_path: Path) -> None:
    losses, parameters = reference(epochs=2)
    for rank_losses, rank_parameters in processes.run(dp_size, train, tmp_path, dp_size, stops):
        np.testing.assert_allclose(rank_losses, losses, rtol=1e-5)
        np.testing.assert_allclose(rank_parameters, parameters, rtol=0, atol=1e-6 * np.abs(parameters).max())


def test_an_empty_micro_batch_counts_nothing() -> None:
    batch = PackedCollator()([])
    assert batch["input_ids"].shape == (1, 1)
    output = llama()(**batch, num_items_in_batch=7)
    assert output.loss.item() == 0.0
    assert output.loss.requires_grad
