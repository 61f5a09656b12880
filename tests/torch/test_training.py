"""`train_step` leaves the gradients of the mean over all labels of a global batch, under any wrapper."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from tests.torch import processes
from wlb.torch.data import IGNORE, PackedBatch

VOCABULARY = 13
LENGTHS = [30, 1, 7, 12, 3, 25, 9, 1, 70, 2, 16, 5, 8, 11, 38, 4]


class Network(nn.Module):
    """Takes the batch; no attention, so that its documents are apart by themselves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.hidden = nn.Linear(6, 7)
        self.head = nn.Linear(7, VOCABULARY)

    def forward(self, batch: PackedBatch) -> Tensor:
        result: Tensor = self.head(torch.tanh(self.hidden(self.embedding(batch.tokens))))
        return result


def documents() -> list[dict[str, Tensor]]:
    """Some with masked prompts; one is longer than a micro-batch takes."""
    generator = torch.Generator().manual_seed(1)
    result = []
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(VOCABULARY, (length,), generator=generator)
        labels = tokens.clone()
        labels[: length // 3 if number % 2 else 0] = IGNORE
        result.append({"input_ids": tokens, "labels": labels})
    return result


def loader(rank: int, size: int, data: Any = None) -> wt.StepLoader[PackedBatch]:
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=64,
        max_document_tokens=40,
        oversize="split",
        cost_model=wlb.CostModel(attention=1.0, linear=50.0),
        release="fifo",
    )
    sampler = wt.BalancedBatchSampler(LENGTHS, packer=packer, dp_rank=rank, dp_size=size, tokens_per_batch=130)
    return wt.StepLoader(DataLoader(wt.Documents(data or documents()), batch_sampler=sampler, collate_fn=wt.collate))


def reference() -> list[tuple[float, np.ndarray]]:
    """Loss and gradient of each step, of all its documents at once, in float64."""
    result = []
    for step in loader(0, 1):
        model = Network().double()
        labels = torch.cat([batch.labels for batch in step.micro_batches])
        logits = torch.cat([model(batch) for batch in step.micro_batches])
        loss = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE)
        loss.backward()  # type: ignore[no-untyped-call]
        result.append((loss.item(), flat(model)))
    return result


def flat(model: nn.Module) -> np.ndarray:
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return torch.cat([getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in gradients]).numpy()


def ddp() -> nn.Module:
    return DistributedDataParallel(Network())


def sharded() -> nn.Module:
    model = Network()
    fully_shard(model.hidden)
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[], nn.Module]] = {
    "plain": Network,
    "ddp": ddp,
    "ddp, inside": lambda: torch.compile(nn.Sequential(ddp()), backend="eager"),  # type: ignore[dict-item]
    "fully_shard": sharded,
}


def train(rank: int, wrapper: str) -> list[tuple[float, np.ndarray]]:
    warnings.simplefilter("ignore")
    accelerator = None
    if wrapper == "accelerate":
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.num_processes == dist.get_world_size()
        model = accelerator.prepare(Network())
    else:
        model = WRAPPERS[wrapper]()
    result = []
    for step in loader(rank, dist.get_world_size()):
        loss = wt.train_step(model, step, accelerator=accelerator)
        result.append((loss.item(), flat(model)))
        model.zero_grad()
    return result


def train_all(rank: int) -> dict[str, list[tuple[float, np.ndarray]]]:
    return {wrapper: train(rank, wrapper) for wrapper in [*WRAPPERS, "accelerate"]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_all_documents_at_once(ranks: int) -> None:
    expected = reference()
    assert len(expected) > 2
    for of_rank in processes.run(ranks, train_all):
        for wrapper, steps in of_rank.items():
            for (loss, gradient), (true_loss, true_gradient) in zip(steps, expected, strict=True):
                assert loss == pytest.approx(true_loss, rel=1e-6), wrapper
                np.testing.assert_allclose(gradient, true_gradient, rtol=0, atol=1e-6 * np.abs(true_gradient).max())


def steps_of_two(rank: int) -> dict[str, Any]:
    """One group for all that needs two ranks and a step."""
    return {"exchanges": exchanges(rank), "nothing": nothing_to_learn(rank), "twice": twice(rank)}


@pytest.fixture(scope="module")
def of_two() -> list[dict[str, Any]]:
    return processes.run(2, steps_of_two)


def exchanges(rank: int) -> list[bool]:
    model = DistributedDataParallel(Network())
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda *_: seen.append(model.require_backward_grad_sync))
    wt.train_step(model, next(iter(loader(rank, 2))), verify=False)
    return seen


def test_ddp_exchanges_gradients_once_a_step(of_two: list[dict[str, Any]]) -> None:
    assert [found["exchanges"] for found in of_two] == [[False, True]] * 2


def nothing_to_learn(rank: int) -> tuple[float, bool]:
    masked = [{**row, "labels": torch.full_like(row["labels"], IGNORE)} for row in documents()]
    model = Network()
    step = next(iter(loader(rank, 2, masked)))
    with pytest.warns(UserWarning, match="step 0 has no label that counts on any rank"):
        loss = wt.train_step(model, step)
    return loss.item(), all(parameter.grad is None for parameter in model.parameters())


def test_a_step_without_labels_leaves_no_gradients(of_two: list[dict[str, Any]]) -> None:
    """So that an optimizer has nothing to do."""
    assert [found["nothing"] for found in of_two] == [(0.0, True)] * 2


def twice(rank: int) -> str:
    model, step = Network(), next(iter(loader(rank, 2)))
    wt.train_step(model, step)
    with pytest.raises(wlb.WlbError) as refused:
        wt.train_step(model, step)
    return str(refused.value)


def test_gradients_that_are_there_are_not_added_up_again(of_two: list[dict[str, Any]]) -> None:
    assert all("zero_grad" in found["twice"] for found in of_two)


def test_what_is_no_logits_is_named() -> None:
    class Wrong(Network):
        def forward(self, batch: PackedBatch) -> Tensor:
            return super().forward(batch).sum()

    with pytest.raises(wlb.WlbError, match="not logits"):
        wt.train_step(Wrong(), next(iter(loader(0, 1))))


def test_another_loss() -> None:
    def loss(model: nn.Module, batch: PackedBatch, valid: int) -> Tensor:
        return 2 * wt.token_normalized_loss(model(batch), batch.labels, num_valid_tokens=valid)

    model, expected = Network(), reference()[0]
    assert wt.train_step(model, next(iter(loader(0, 1))), loss=loss).item() == pytest.approx(2 * expected[0], rel=1e-6)
    np.testing.assert_allclose(flat(model), 2 * expected[1], rtol=0, atol=1e-5)


# --- as_hf ------------------------------------------------------------------------------------------------------------


def pieces() -> PackedBatch:
    cut = wt.Document([4, 5, 6], id=1, start=0, next_token=7)
    masked = wt.Document([1, 2, 3], id=2, labels=[IGNORE, 2, 3])
    return wt.collate([cut, wt.Document([9], id=0), masked])


def test_as_hf_shifts_nothing_but_what_pieces_predict() -> None:
    row = pieces().as_hf()
    assert row["input_ids"].tolist() == [[4, 5, 6, 9, 1, 2, 3]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 2]]
    assert row["labels"].tolist() == [[IGNORE, 5, 6, IGNORE, IGNORE, 2, 3]]
    assert row["shift_labels"].tolist() == [[5, 6, 7, IGNORE, 2, 3, IGNORE]]
    assert row["cu_seq_lens_q"].tolist() == [0, 3, 4, 7]
    assert row["max_length_k"] == 3
    assert row["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 2]]
    assert row["seq_idx"].dtype == torch.int32
    assert row["use_cache"] is False
    assert pieces().as_hf(plain=True).keys() == {"input_ids", "position_ids", "labels", "use_cache"}


def test_as_hf_of_an_empty_micro_batch_is_one_token_that_counts_nothing() -> None:
    row = wt.collate([]).as_hf()
    names = "input_ids", "labels", "shift_labels", "cu_seq_lens_q", "seq_idx"
    assert {name: row[name].tolist() for name in names} == {
        "input_ids": [[0]],
        "labels": [[IGNORE]],
        "shift_labels": [[IGNORE]],
        "cu_seq_lens_q": [0, 1],
        "seq_idx": [[0]],
    }


def test_as_hf_counts_padding_as_a_document_and_ends_that_repeat_as_none() -> None:
    row = wt.collate([[1, 2], [3]], multiple_of_tokens=4, max_documents=4).as_hf()
    assert row["seq_idx"].tolist() == [[0, 0, 1, 2]]
    assert row["cu_seq_lens_q"].tolist() == [0, 2, 3, 4, 4, 4]


def test_as_hf_of_a_part_is_refused() -> None:
    with pytest.raises(wlb.WlbError, match="rank 0's part of 2"):
        wt.collate([[1, 2, 3, 4]], cp_size=2).as_hf()
