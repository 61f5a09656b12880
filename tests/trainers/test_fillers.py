"""What fills rows up is learnt by nothing and counted by nothing: routers, token counters, multi-token prediction."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

import wlb
import wlb.torch as wt
from tests.trainers.small_corpus import documents
from wlb.integrations.huggingface import balance
from wlb.integrations.huggingface.loader import row_of
from wlb.torch import routers

COST = wlb.CostModel(attention=1.0, linear=30.0)


def mixtral(**changes: Any) -> MixtralForCausalLM:
    """The loss of its routers weighs so much that what teaches them shows."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    shape |= {"max_position_embeddings": 64, "router_aux_loss_coef": 1.0, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(**shape | changes))


def gates(model: nn.Module) -> Tensor:
    """Gradients of the routers."""
    found = [parameter.grad for name, parameter in model.named_parameters() if ".gate." in name]
    assert found
    return torch.cat([gradient.flatten() for gradient in found if gradient is not None])


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def rows(fill: int) -> list[wt.PackedBatch]:
    """Micro-batches of the same documents, with and without what fills them up; the last one has none."""
    given = [row for row in documents() if len(row["input_ids"]) > 1][:12]
    parts = [given[:5], given[5:12], []]
    return [
        wt.collate([{**row} for row in part], multiple_of_tokens=fill, document_ids=range(len(part))) for part in parts
    ]


def step_of(batches: list[wt.PackedBatch]) -> wt.Step[wt.PackedBatch]:
    packing = wlb.pack([2] * len(batches), num_micro_batches=len(batches), max_tokens=2, cost_model=COST)
    return wt.Step(0, 0, packing, np.arange(len(batches)), batches)


def alone(model: MixtralForCausalLM) -> Tensor:
    """What routers learn of the rows without filler, in the plainest words."""
    valid = sum(batch.num_valid_tokens for batch in rows(1))
    for batch in rows(1)[:2]:
        row = batch.as_hf()
        output = model(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False)
        loss = nn.functional.cross_entropy(output.logits[0], batch.labels, reduction="sum") / valid
        (loss + output.aux_loss * batch.num_valid_tokens / valid).backward()
    return gates(model)


def test_train_step_tells_routers_what_is_real() -> None:
    model = mixtral()
    expected = alone(model)
    model.zero_grad()
    assert any(batch.num_padding > 20 for batch in rows(128))
    wt.train_step(model, step_of(rows(128)))
    assert apart(gates(model), expected) < 1e-5


def test_without_being_told_they_learn_from_filler() -> None:
    """As before, and in a loop of one's own; `real_tokens` is for that."""
    model, told = mixtral(), mixtral()
    expected, valid = alone(mixtral()), sum(batch.num_valid_tokens for batch in rows(1))
    for batch in rows(128):
        share = batch.num_valid_tokens / valid
        row = batch.as_hf() | {"num_items_in_batch": valid}
        (model(**row).loss + (share - 1) * model(**row).aux_loss).backward()
        with wt.real_tokens(told, batch):
            output = told(**row)
        (output.loss + (share - 1) * output.aux_loss).backward()
    assert apart(gates(model), expected) > 0.2
    assert apart(gates(told), expected) < 1e-5


def trainer(folder: Path, model: nn.Module, **options: Any) -> Any:
    settings = {"report_to": [], "use_cpu": True, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
    settings |= {
        "include_num_input_tokens_seen": "non_padding",
        "logging_steps": 1,
        "max_steps": 3,
        "disable_tqdm": True,
    }
    arguments = TrainingArguments(output_dir=str(folder), **settings)  # type: ignore[arg-type]

    def one(features: list[dict[str, Any]]) -> dict[str, Tensor]:
        return {name: torch.tensor(value)[None] for name, value in features[0].items()}

    made = Trainer(model, arguments, train_dataset=documents(), data_collator=one)  # type: ignore[arg-type]
    return balance(made, max_tokens=96, max_document_tokens=48, max_delay=0, **options)


def test_the_trainer_tells_routers_what_is_real(tmp_path: Path) -> None:
    found = []
    for fill in (1, 128):
        balanced = trainer(tmp_path, mixtral())
        for batch in rows(fill):
            row = row_of(batch, plain=False)
            if batch.document_ids.numel() or fill > 1:
                items = torch.tensor(50)
                balanced.compute_loss(balanced.model, row, num_items_in_batch=items).backward()
        found.append(gates(balanced.model))
    assert apart(found[1], found[0]) < 1e-5


def test_a_micro_batch_without_documents_teaches_nothing(tmp_path: Path) -> None:
    balanced = trainer(tmp_path, mixtral())
    row = row_of(wt.collate([]), plain=False)
    balanced.compute_loss(balanced.model, row, num_items_in_batch=torch.tensor(9)).backward()
    assert all(not parameter.grad.any() for parameter in balanced.model.parameters() if parameter.grad is not None)


def test_the_trainer_trains_filled_rows_and_counts_tokens_of_documents(tmp_path: Path) -> None:
    balanced = trainer(tmp_path, mixtral(), multiple_of_tokens=32)
    balanced.train()
    tokens = [
        entry["num_input_tokens_seen"] for entry in balanced.state.log_history if "num_input_tokens_seen" in entry
    ]
    planned = [int(step["wlb/tokens"]) for step in balanced.state.log_history if "wlb/tokens" in step]
    assert tokens[: len(planned)] == np.cumsum(planned).tolist()


class OwnLoss(nn.Module):
    """A mixture of experts that balances them by a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = mixtral().config
        self.weight = nn.Parameter(torch.ones(1))
        self.accepts_loss_kwargs = True

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.weight * nn.functional.one_hot(input_ids, 64).float()
        return SimpleNamespace(logits=logits, aux_loss=self.weight.sum(), loss=self.weight.sum())


@pytest.mark.parametrize("options", [{"multiple_of_tokens": 32}, {"token_buckets": [32, 96]}])
def test_what_cannot_be_told_refuses_fillers(options: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError, match=r"routers.*leave out multiple_of_tokens and token_buckets") as refused:
        trainer(tmp_path, OwnLoss(), cost_model=COST, **options)
    assert refused.value.argument == next(iter(options))
    model = OwnLoss()
    with pytest.raises(wlb.WlbError, match="makes padding"):
        wt.train_step(model, step_of(rows(128)))
    assert model.weight.grad is None
    assert not routers.has_router_loss(mixtral(output_router_logits=False))


def test_lightning_gives_rows_without_documents_to_no_router(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    from wlb.integrations.lightning import BalancedDataModule

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.aux = mixtral(), []  # type: ignore[var-annotated]

        def training_step(self, row: dict[str, Any], index: int) -> Tensor:
            output = self.model(**row)
            self.aux.append((row["input_ids"].numel(), output.aux_loss is None))
            return output.loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = BalancedDataModule(
        [[1, 2, 3] * 20], max_tokens=64, tokens_per_batch=200, config=mixtral().config, verify=False, shuffle=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
        module = Module()
        lightning.Trainer(max_epochs=1, default_root_dir=tmp_path, **quiet).fit(module, data)
    assert (60, False) in module.aux
    assert {given for given in module.aux if given[0] == 1} == {(1, True)}
