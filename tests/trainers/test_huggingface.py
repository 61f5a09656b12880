"""Packed micro-batches in real Hugging Face models, against one document at a time, and what feeds the `Trainer`.

The `Trainer` itself is trained in `test_balance.py`.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    DataCollatorWithFlattening,
    LlamaForCausalLM,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import wlb
from tests.torch import processes
from tests.trainers import small_corpus
from tests.trainers.small_corpus import VOCABULARY
from wlb.integrations.huggingface import MicroBatchCallback, MicroBatchLoader
from wlb.torch.data import BalancedBatchSampler, StepLoader, collate


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    return small_corpus.llama(attn_implementation=attention, max_position_embeddings=128).double()


def documents(lengths: list[int]) -> list[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(len(lengths))
    return [{"input_ids": torch.randint(VOCABULARY, (length,), generator=random)} for length in lengths]


def packed(features: list[Any]) -> dict[str, Any]:
    """A row of them, as models take it."""
    return collate(features).as_hf()


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
    output = model(**packed(features))
    logits, loss = one_by_one(model, features)
    assert (output.logits[0] - logits).abs().max() / logits.abs().max() < 1e-6
    torch.testing.assert_close(output.loss, loss.float(), rtol=1e-6, atol=0.0)  # the model's loss is fp32
    expected = gradients(model, loss)
    error = (gradients(model, output.loss) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_flex_attention_forward() -> None:
    features = documents([1, 17, 5, 40, 1])
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = llama("flex_attention").float()(**packed(features)).logits[0]
        logits, _ = one_by_one(llama("eager").float(), features)
    assert (found - logits).abs().max() / logits.abs().max() < 1e-6


@pytest.mark.parametrize("change", [{"use_cache": True}, {"attention_mask": torch.ones(1, 64)}, {"position_ids": None}])
def test_documents_mix_without_what_the_collator_says(change: dict[str, Any]) -> None:
    features = documents([1, 17, 5, 40, 1])
    batch = packed(features)
    assert not batch["use_cache"]
    assert "attention_mask" not in batch
    model = llama()
    assert not torch.allclose(model(**batch | change).logits, model(**batch).logits, atol=1e-3)


def test_batch_equals_that_of_transformers() -> None:
    features = documents([3, 1, 6])
    expected = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(features)
    batch = packed(features)
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
    plain = collate(features).as_hf(plain=True)
    assert plain.keys() == {"input_ids", "position_ids", "labels", "use_cache"}


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
        num_micro_batches=4,
        max_tokens=20,
        max_document_tokens=9,
        cost_model=wlb.CostModel(attention=1.0, linear=1.0),
        release="fifo",
    )
    batches = BalancedBatchSampler(
        [9] * 8, packer=packer, dp_rank=rank, dp_size=dist.get_world_size(), tokens_per_batch=36, shuffle=False
    )
    if rank == labelled:
        for feature in features[:4]:
            feature["labels"] = feature["input_ids"]
    loader = MicroBatchLoader(StepLoader(DataLoader(features, batch_sampler=batches, collate_fn=collate)))
    with pytest.warns(UserWarning, match="step 1 has no label that counts on any rank"):
        return len(list(loader))


@pytest.mark.parametrize("labelled", [0, 1])
def test_a_step_is_passed_over_if_no_rank_has_a_label(labelled: int) -> None:
    """On all ranks or none: the model's loss would be 0 / 0."""
    nothing = llama()(**packed([{"input_ids": [1, 2], "labels": [-100, -100]}]), num_items_in_batch=0 * torch.ones(()))
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
    batch = packed([])
    assert batch["input_ids"].shape == (1, 1)
    output = llama()(**batch, num_items_in_batch=7)
    assert output.loss.item() == 0.0
    assert output.loss.requires_grad
