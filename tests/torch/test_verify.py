"""`verify` passes what is right, and finds each trap of joining a loader, a model and a trainer."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.test_training import LENGTHS, Network, documents, loader
from wlb.torch.data import IGNORE, PackedBatch, Step


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": 13,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.3,
    }
    return LlamaForCausalLM(LlamaConfig(**shape | changes))


def first_step(data: Any = None) -> Step[PackedBatch]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return next(iter(loader(rank, size, data)))


def ddp() -> nn.Module:
    return DistributedDataParallel(llama(), find_unused_parameters=True)


def fsdp2() -> nn.Module:
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(llama(), device_id=torch.device("cpu"), use_orig_params=True)


def by_hand(model: nn.Module, rows: Callable[[PackedBatch], dict[str, Any]], scale: float = 1.0) -> Any:
    """A training step as people write it, on the model's own loss."""

    def train(step: Step[PackedBatch]) -> Tensor:
        valid = wt.count_valid_tokens(step)
        total = torch.zeros(())
        for batch in step.micro_batches:
            loss = model(**rows(batch), num_items_in_batch=max(valid, 1)).loss
            (loss * scale).backward()
            total += loss.detach()
        if dist.is_initialized():
            dist.all_reduce(total)
        return total

    return train


def as_hf(batch: PackedBatch) -> dict[str, Any]:
    return batch.as_hf()


def cached(batch: PackedBatch) -> dict[str, Any]:
    row = batch.as_hf()
    del row["use_cache"]  # True by default
    return row


def masked(batch: PackedBatch) -> dict[str, Any]:
    row = batch.as_hf()
    return row | {"attention_mask": torch.ones_like(row["input_ids"])}


def unpositioned(batch: PackedBatch) -> dict[str, Any]:
    row = batch.as_hf()
    return row | {"position_ids": torch.arange(row["input_ids"].shape[1])[None]}


def shifted_twice(batch: PackedBatch) -> dict[str, Any]:
    row = batch.as_hf()
    return row | {"labels": row.pop("shift_labels")}


# --- what is right ----------------------------------------------------------------------------------------------------

RIGHT: dict[str, Callable[[], nn.Module]] = {
    "plain": llama,
    "takes the batch": Network,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp1": fsdp1,
    "float64": lambda: llama().double(),
    "bfloat16": lambda: llama().bfloat16(),
}


def proved(rank: int, names: list[str]) -> dict[str, tuple[str, bool]]:
    quiet()
    return {name: proved_one(name) for name in names}


def proved_one(name: str) -> tuple[str, bool]:
    model, step = RIGHT[name]().train(), first_step()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    random = torch.get_rng_state()
    proof = wt.verify(model, step, evaluate=evaluation(model), loader=new_loader, report=None)
    same = all(torch.equal(*pair) for pair in zip(map(local, before), map(local, model.parameters()), strict=True))
    clean = all(parameter.grad is None for parameter in model.parameters())
    modes = all(module.training and "train" not in vars(module) for module in model.modules())
    return str(proof), same and clean and modes and torch.equal(random, torch.get_rng_state())


def local(parameter: Any) -> Tensor:
    result: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return result


def evaluation(model: nn.Module) -> Callable[[Step[PackedBatch]], float]:
    """Sums over sums, as it has to be."""

    def evaluate(step: Step[PackedBatch]) -> float:
        total = torch.zeros(2)
        for batch in step.micro_batches:
            logits = wt.training.logits_of(model, batch)[0].float()
            total[0] += nn.functional.cross_entropy(logits, batch.labels, ignore_index=IGNORE, reduction="sum")
            total[1] += batch.num_valid_tokens
        if dist.is_initialized():
            dist.all_reduce(total)
        return float(total[0] / total[1])

    return evaluate


def new_loader() -> Any:
    return loader(dist.get_rank(), dist.get_world_size())


@pytest.mark.parametrize(("names", "ranks"), [(["plain"], 1), ([*RIGHT], 2)])
def test_what_is_right_is_proved_and_left_as_it_was(names: list[str], ranks: int) -> None:
    lines = ["documents", "mode", "others", "halves", "company", "ranks", "evaluation", "resume"]
    for found in processes.run(ranks, proved, names):
        for name, (table, untouched) in found.items():
            assert untouched, name
            replicas = ranks > 1 and "fsdp" not in name
            expected = [*lines[:1], "weights", *lines[1:]] if replicas else [*lines]
            if name == "bfloat16":
                expected.insert(-2, "precision")
            assert [line.split()[0] for line in table.splitlines()[1:]] == expected, name
            assert "wrong" not in table, name


# --- each trap --------------------------------------------------------------------------------------------------------


def quiet() -> None:
    warnings.simplefilter("ignore")


def stepped(make: Callable[[], nn.Module], rows: Any = as_hf, scale: float = 1.0) -> None:
    """Losses divided by the labels of all ranks, times `scale`, whatever becomes of gradients after that."""
    model = make()
    wt.verify(model, first_step(), train=by_hand(model, rows, scale=scale))


class Convolved(Network):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(6, 6, 4)

    def forward(self, batch: PackedBatch) -> Tensor:
        embedded = nn.functional.pad(self.embedding(batch.tokens).T, (3, 0))
        return self.head(torch.tanh(self.hidden(self.convolution(embedded).T)))  # type: ignore[no-any-return]


class Positioned(Network):
    """Learned positions, which go on over the row: no document sees another, and each is at another place."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Embedding(4096, 6)

    def forward(self, batch: PackedBatch) -> Tensor:
        embedded = self.embedding(batch.tokens) + self.positions(torch.arange(batch.tokens.numel()))
        return self.head(torch.tanh(self.hidden(embedded)))  # type: ignore[no-any-return]


def counted_as(count: Callable[[PackedBatch], Any]) -> None:
    """As trainers that count what their models shift afterwards, or that do not look at `shift_labels`."""
    model = llama()

    def train(step: Step[PackedBatch]) -> Tensor:
        counted = torch.tensor(float(sum(int(count(batch)) for batch in step.micro_batches)))
        dist.all_reduce(counted)
        total = torch.zeros(())
        for batch in step.micro_batches:
            loss = model(**batch.as_hf(), num_items_in_batch=float(counted)).loss
            loss.backward()
            total += loss.detach()
        wt.all_reduce_gradients(model, step)
        dist.all_reduce(total)
        return total

    steps = loader(dist.get_rank(), dist.get_world_size())
    wt.verify(model, next(step for step in steps if holds_a_beginning(step.packing)), train=train)


def holds_a_beginning(packing: wlb.Packing) -> bool:
    """Whether there is a piece that is not the last of its document."""
    ends = [np.array(LENGTHS)[part.document_ids] > part.starts + part.lengths for part in packing]
    return bool(np.concatenate(ends).any())


def labels_of_a_row(batch: PackedBatch) -> Any:
    """As transformers 5.6: those that the model shifts, without what the last token of a piece predicts."""
    return (batch.as_hf()["labels"] != IGNORE).sum()


def labels_before_the_shift(batch: PackedBatch) -> Any:
    """First tokens of documents too, which nothing predicts."""
    return batch.num_valid_tokens + len(batch.document_ids)


def mean_of_means() -> None:
    model = llama()

    def train(step: Step[PackedBatch]) -> Tensor:
        counted = [batch for batch in step.micro_batches if batch.num_valid_tokens]
        total = torch.zeros(())
        for batch in counted:
            loss = model(**batch.as_hf()).loss / len(step.packing)
            loss.backward()
            total += loss.detach()
        wt.all_reduce_gradients(model, step)
        dist.all_reduce(total)
        return total

    wt.verify(model, first_step(), train=train)


def evaluated_by_batches() -> None:
    model = llama()

    def evaluate(step: Step[PackedBatch]) -> float:
        losses = [model(**batch.as_hf()).loss for batch in step.micro_batches if batch.num_valid_tokens]
        mean = torch.stack(losses).mean()
        dist.all_reduce(mean)
        return float(mean / dist.get_world_size())

    wt.verify(model, first_step(), evaluate=evaluate)


def wrapped_twice() -> None:
    """As a trainer that prepares what it is given: every rank gets every other micro-batch of its own."""
    accelerator = accelerate.Accelerator(cpu=True)
    inner: Any = loader(dist.get_rank(), dist.get_world_size())._loader
    prepared = accelerator.prepare(inner)
    right = first_step()
    batches: Any = [batch for batch, _ in zip(iter(prepared), right.micro_batches, strict=False)]
    wt.verify(llama(), replace(right, micro_batches=batches))


class Prefetching:
    """Fetches a step ahead, as accelerate, Lightning and loaders' workers do, and saves where its loader stands."""

    def __init__(self) -> None:
        self.loader: Any = new_loader()

    def __iter__(self) -> Any:
        steps = iter(self.loader)
        ahead = next(steps, None)
        while ahead is not None:
            step, ahead = ahead, next(steps, None)
            yield step

    def load_state_dict(self, state: Any) -> None:
        self.loader.load_state_dict(state)


def fetched_ahead() -> None:
    save: Any = lambda prefetching, step: prefetching.loader.state_dict()  # noqa: E731
    wt.verify(llama(), first_step(), loader=Prefetching, save=save)


SEE = "see each other"
TRAPS: dict[str, tuple[Callable[[], None], str, str]] = {
    "DDP's division": (lambda: stepped(ddp), "model", "has 0.5 times the gradient .* averaged over 2 ranks"),
    "fully_shard's mean": (lambda: stepped(fsdp2), "model", "has 0.5 times the gradient .* averaged over 2 ranks"),
    "FSDP's mean": (lambda: stepped(fsdp1), "model", "has 0.5 times the gradient .* averaged over 2 ranks"),
    "not exchanged": (lambda: stepped(llama), "model", "another gradient on each rank"),
    "accumulation": (lambda: stepped(ddp, scale=2 / 4), "model", "has 0.25 times the gradient"),
    "use_cache": (lambda: stepped(ddp, cached, scale=2), "model", f"{SEE}.*use_cache=False"),
    "attention_mask": (lambda: stepped(ddp, masked, scale=2), "model", f"{SEE}.*no attention_mask"),
    "positions": (lambda: stepped(ddp, unpositioned, scale=2), "model", f"{SEE}.*position_ids that begin anew"),
    "learned positions": (
        lambda: wt.verify(Positioned(), first_step()),  # type: ignore[dict-item]
        "model",
        "trains something else where documents share a row",
    ),
    "convolution": (lambda: wt.verify(Convolved(), first_step()), "model", "It has Conv1d"),  # type: ignore[dict-item]
    "labels shifted twice": (lambda: stepped(ddp, shifted_twice, scale=2), "model", "take the batch's labels"),
    "labels of rows": (lambda: counted_as(labels_of_a_row), "model", "its halves|times the gradient of the mean"),
    "labels before the shift": (lambda: counted_as(labels_before_the_shift), "model", "its halves|times the gradient"),
    "mean of means": (mean_of_means, "model", "teaches other than its halves"),
    "evaluation": (evaluated_by_batches, "evaluate", "batches are weighed alike"),
    "wrapped twice": (wrapped_twice, "step", "wrapped twice"),
    "prefetching": (fetched_ahead, "loader", "goes on with (step 2|none) where step 1 was next"),
}


def trapped(rank: int) -> dict[str, tuple[str, str]]:
    quiet()
    found = {}
    for name, (trap, _, _) in TRAPS.items():
        with pytest.raises(wlb.WlbError) as raised:
            trap()
        found[name] = (str(raised.value.argument), str(raised.value))
    return found


def test_each_trap_is_found_on_all_ranks() -> None:
    results = processes.run(2, trapped)
    assert results[0] == results[1]
    for name, (argument, message) in results[0].items():
        _, expected, pattern = TRAPS[name]
        assert argument == expected, name
        assert re.search(pattern, message), (name, message)


def prompted(labels: bool = True) -> Step[PackedBatch]:
    """A step of one micro-batch, in which prompts are longer than what is cut out of documents."""
    rows = []
    for number in range(4):
        tokens = torch.arange(90 + 7 * number) * (3 + number) % 13
        rows.append({"input_ids": tokens, "labels": torch.where(torch.arange(tokens.numel()) < 80, IGNORE, tokens)})
        if number == 1 or not labels:
            rows[-1]["labels"] = torch.full_like(tokens, IGNORE)
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    packer = wlb.Packer(num_micro_batches=1, max_tokens=512, max_document_tokens=128, cost_model=cost, release="fifo")
    lengths = [row["input_ids"].numel() for row in rows]
    sampler = wt.BalancedBatchSampler(lengths, packer=packer, dp_rank=0, dp_size=1)
    return next(iter(wt.StepLoader(DataLoader(wt.Documents(rows), batch_sampler=sampler, collate_fn=wt.collate))))


def test_what_follows_long_prompts_is_proved() -> None:
    model = llama()
    proof = wt.verify(model, prompted(), evaluate=evaluation(model), report=None)
    assert float(proof.checks[3].expected) > 0, "a gradient"
    with pytest.raises(wlb.WlbError, match="lets documents of a row see each other"):
        wt.verify(model, prompted(), train=by_hand(model, cached), report=None)


def test_a_step_without_labels_proves_nothing() -> None:
    with pytest.raises(wlb.WlbError, match="step has no label that counts"):
        wt.verify(llama(), prompted(labels=False), report=None)


def test_gradients_that_are_there_are_not_lost() -> None:
    model = Network()
    wt.train_step(model, first_step())
    with pytest.raises(wlb.WlbError, match="has gradients"):
        wt.verify(model, first_step())


def test_the_table_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    wt.verify(Network(), first_step())
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["found", "expected", "apart", "allowed"]
    assert len(table) == 7


@pytest.mark.parametrize("setting", ["matmul_precision", "backends", "backends.cuda.matmul"])
def test_products_coarser_than_float32_are_compared_with_float32(setting: str) -> None:
    """TF32 rounds to 10 bits: too much for what is allowed in float32. torch has two sets of names to ask for it."""
    backends: Any = torch.backends

    def settings() -> list[str]:
        levels = (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn, backends.mkldnn.matmul)
        return [level.fp32_precision for level in levels]

    level = backends if setting == "backends" else backends.cuda.matmul
    if setting == "matmul_precision":
        torch.set_float32_matmul_precision("high")
    else:
        level.fp32_precision = "tf32"
    before = settings()
    try:
        proof = wt.verify(llama(), first_step(), report=None)
        assert settings() == before
    finally:
        if setting == "matmul_precision":
            torch.set_float32_matmul_precision("highest")
        else:
            level.fp32_precision = "none"
    assert proof.checks[-1].name == "precision"


def test_a_timer_counts_no_micro_batch_of_it() -> None:
    """What is run to verify belongs to no step, whose times it would otherwise spoil."""
    model, step, timer = llama(), first_step(), wt.StepTimer("cpu")
    timer.attach(model)
    wt.verify(model, step)
    timer.end_step(step)
    assert np.isnan(timer.read()[0].seconds).all()


# --- rows of their own, and rows that are filled up -------------------------------------------------------------------


def by_rows(rank: int, names: list[str]) -> dict[str, str]:
    """What is said of documents in rows of their own: nothing, or what is wrong; with the fix in words."""
    quiet()
    found = {}
    for name in names:
        model = fsdp2() if dist.is_initialized() and dist.get_world_size() > 1 else llama()
        rows = {"right": as_hf, "cached": cached, "masked": masked}[name]
        group = dist.group.WORLD
        train = None if name == "right" else by_hand(model, rows, scale=1.0)
        try:
            proof = wt.verify(model, first_step(), train=train, alone="rows", group=group, report=None)
            assert [check.name for check in proof.checks] == ["documents", "mode", "others", "halves", "company"]
            found[name] = ""
        except wlb.WlbError as wrong:
            found[name] = str(wrong)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_documents_in_rows_of_their_own_teach_the_same(ranks: int) -> None:
    for found in processes.run(ranks, by_rows, ["right", "cached", "masked"]):
        assert found["right"] == ""
        for name in ("cached", "masked"):
            assert "lets documents of a row see each other" in found[name]


def test_a_mean_of_means_is_named_where_only_gradients_show_it() -> None:
    model = llama()

    def mean_of_means(step: Step[PackedBatch]) -> Tensor:
        total = torch.zeros(())
        for batch in step.micro_batches:
            loss = model(**as_hf(batch), num_items_in_batch=max(batch.num_valid_tokens * len(step.packing), 1)).loss
            loss.backward()
            total += loss.detach()
        return total

    # As coarse as bfloat16 the losses of an untrained model are alike.
    with pytest.raises(wlb.WlbError, match="teaches other than its halves"):
        wt.verify(model, first_step(), train=mean_of_means, dtype=torch.bfloat16, report=None)


def of_no_numbers(rank: int) -> str:
    """On one rank alone, and not exchanged: a maximum over ranks may lose it."""
    quiet()
    model = llama()

    def train(step: Step[PackedBatch]) -> Tensor:
        total = by_hand(model, as_hf)(step)
        if rank == 0:
            model.lm_head.weight.grad[0, 0] = float("nan")
        return total

    with pytest.raises(wlb.WlbError) as wrong:
        wt.verify(model, first_step(), train=train, report=None)
    return str(wrong.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_are_no_numbers_are_named(ranks: int) -> None:
    for text in processes.run(ranks, of_no_numbers):
        assert "has gradients that are infinite or no numbers, in training" in text


def test_weights_that_are_no_numbers_are_named() -> None:
    model = llama()
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(wlb.WlbError, match=r"a weight that is infinite or no number \(lm_head.weight\)"):
        wt.verify(model, first_step(), report=None)


def test_a_model_without_weights_is_named() -> None:
    with pytest.raises(wlb.WlbError, match="model has no weights"):
        wt.verify(nn.Identity(), first_step(), report=None)


def test_what_a_model_counts_is_put_back() -> None:
    model: Any = llama()
    model.register_buffer("seen", torch.zeros(()))

    def count(*_: Any) -> None:
        model.seen.add_(1)

    model.register_forward_hook(count)
    wt.verify(model, first_step(), report=None)
    assert model.seen == 0


def test_gradients_that_nobody_sees_prove_nothing() -> None:
    model = llama()
    train = by_hand(model, as_hf, scale=1.0)

    def engine(step: Step[PackedBatch]) -> Any:
        """Keeps gradients where `zero_grad` does not reach."""
        loss = train(step)
        model.zero_grad(set_to_none=True)
        return loss

    with pytest.raises(wlb.WlbError, match="leaves no gradient after a step with labels"):
        wt.verify(model, first_step(), train=engine, alone="rows", report=None)


def test_rows_that_are_filled_up_are_proved_and_padding_is_no_document() -> None:
    sizes: dict[str, Any] = {"multiple_of_tokens": 16, "max_documents": 9}
    cost = wlb.CostModel(attention=1.0, linear=50.0)
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=64,
        max_document_tokens=40,
        oversize="split",
        cost_model=cost,
        release="fifo",
        **sizes,
    )
    sampler = wt.BalancedBatchSampler(LENGTHS, packer=packer, dp_rank=0, dp_size=1)
    padded = DataLoader(wt.Documents(documents()), batch_sampler=sampler, collate_fn=partial(wt.collate, **sizes))
    step: Step[PackedBatch] = next(iter(wt.StepLoader(padded)))
    assert sum(batch.num_padding for batch in step.micro_batches)
    proof = wt.verify(llama(), step, report=None)
    assert "4 of 4" in str(proof)


# --- what is not known ------------------------------------------------------------------------------------------------


def test_what_no_fault_explains_is_said_so() -> None:
    model = Network()

    def decayed(step: Step[PackedBatch]) -> Tensor:
        """Weight decay in the gradient."""
        loss = wt.train_step(model, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad += 0.1 * parameter.detach()
        return loss

    with pytest.raises(wlb.WlbError, match="model trains something else than its documents alone on one rank"):
        wt.verify(model, first_step(), train=decayed, report=None)


class Noisy(Network):
    """Draws random numbers that no attribute tells of."""

    def forward(self, batch: PackedBatch) -> Tensor:
        return nn.functional.dropout(super().forward(batch), 0.3, self.training)


def test_random_numbers_that_cannot_be_turned_off_are_named() -> None:
    with pytest.raises(wlb.WlbError, match=r"has another gradient each time.*draws random numbers"):
        wt.verify(Noisy(), first_step(), report=None)


def test_a_loss_alone_that_is_a_mean_of_means_is_named() -> None:
    model = Network()

    def reported(step: Step[PackedBatch]) -> Tensor:
        """The right gradient; for the log, a mean of micro-batches."""
        wt.train_step(model, step)
        batches = [batch for batch in step.micro_batches if batch.num_valid_tokens]
        losses = [nn.functional.cross_entropy(model(batch), batch.labels) for batch in batches]
        return torch.stack(losses).mean()

    with pytest.raises(wlb.WlbError, match="teaches other than its halves"):
        wt.verify(model, first_step(), train=reported, report=None)


def test_a_model_that_runs_no_document_alone_says_so() -> None:
    def alone(model: nn.Module, batch: PackedBatch) -> Tensor:
        raise ValueError("needs a group")

    with pytest.raises(wlb.WlbError, match=r"runs no document of \d+ tokens alone.*needs a group.*give verify `alone`"):
        wt.verify(Network(), first_step(), alone=alone, report=None)
    with pytest.raises(wlb.WlbError, match=r"alone gives \[\d+, 13, 1\]"):
        wt.verify(Network(), first_step(), alone=lambda model, batch: model(batch)[..., None], report=None)


def test_the_sum_of_losses_is_enough_of_a_reference() -> None:
    def sum_of_losses(model: nn.Module, batch: PackedBatch) -> Tensor:
        return nn.functional.cross_entropy(model(batch), batch.labels, reduction="sum")

    model = Network()
    wt.verify(model, first_step(), alone=sum_of_losses, report=None)

    def halved(step: Step[PackedBatch]) -> None:
        wt.train_step(model, step)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= 2

    with pytest.raises(wlb.WlbError, match=r"has 0\.5 times the gradient"):
        wt.verify(model, first_step(), alone=sum_of_losses, train=halved, report=None)


def test_stages_need_a_loop_and_a_call() -> None:
    for options, missing in (({}, "train"), ({"train": lambda step: None}, "alone")):
        with pytest.raises(wlb.WlbError, match=f"{missing} is needed for stages of a pipeline"):
            wt.verify([object()], first_step(), **options)  # type: ignore[arg-type]
