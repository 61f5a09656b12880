"""A step of a forest trains what its samples, one at a time, would: in every wrapper, pipeline and layout of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.test_forest import CASES, GROUPS, VOCABULARY, Case, Model, dense, documents
from wlb.torch.data import ForestBatch, PackedBatch

CASE = Case((*GROUPS, *CASES["one root for all"].samples, *CASES["depth 50"].samples[-3:]))
COST = wlb.CostModel(attention=1.0, linear=10.0)


class Trained(Model):
    """The model of the parity tests, called with a batch."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(CASE)
        self.group = group

    def forward(self, batch: ForestBatch | PackedBatch) -> Tensor:  # type: ignore[override]
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = self.group if batch.cp_size > 1 else None
            return wt.context_parallel_attention(q, k, v, batch.shard, group=group)

        logits: Tensor = self.head(super().forward(batch.tokens, batch.position_ids, attend))
        return logits


def step_of(rank: int, size: int, cp_size: int = 1, samples: Any = None) -> wt.Step[ForestBatch]:
    lengths = np.cumsum([0, *map(len, CASE.samples)])
    forest = wlb.PrefixForest.from_tokens(np.concatenate(CASE.samples), lengths)
    dp_size = size // cp_size
    plan = wlb.pack(forest, num_micro_batches=4, max_tokens=60, cost_model=COST, dp_size=dp_size)
    named = documents(CASE) if samples is None else samples
    return wt.Step.of(plan, named, dp_rank=rank // cp_size, cp_rank=rank % cp_size, cp_size=cp_size)


def flat(model: nn.Module) -> Tensor:
    gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
    return torch.cat([getattr(g, "full_tensor", lambda g=g: g)().flatten() for g in gradients])


@functools.cache
def one_by_one() -> tuple[float, Tensor, int]:
    """Mean loss over all predictions of samples, its gradient, and their number."""
    model = Trained()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in documents(CASE):
        tokens, labels = torch.tensor(sample.tokens), torch.tensor(sample.labels)
        attend = functools.partial(dense, window=None)
        logits = model.head(Model.forward(model, tokens, torch.arange(len(tokens)), attend))
        total = total + nn.functional.cross_entropy(logits[:-1], labels[1:], ignore_index=wt.IGNORE, reduction="sum")
        count += int((labels[1:] != wt.IGNORE).sum())
    (total / count).backward()  # type: ignore[no-untyped-call]
    return total.item() / count, flat(model), count


def assert_right(loss: float, gradient: Any) -> None:
    mean, expected, _ = one_by_one()
    assert loss == pytest.approx(mean, rel=1e-6)  # the loss of a step is float32
    torch.testing.assert_close(torch.as_tensor(gradient), expected, rtol=0, atol=1e-12 * expected.abs().max().item())


def sharded(model: Trained) -> nn.Module:
    for layer in [*model.layers, *model.out]:
        fully_shard(layer)
    fully_shard(model)
    return model


WRAPPERS: dict[str, Callable[[Trained], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "fully_shard": sharded,
}


def test_train_step_on_one_process() -> None:
    model, step = Trained(), step_of(0, 1)
    assert wt.count_valid_tokens(step) == one_by_one()[2]
    assert_right(wt.train_step(model, step).item(), flat(model))
    assert sorted(step.pieces.ids.tolist()) == list(range(len(CASE.samples)))


def _train(rank: int, cp_size: int) -> list[tuple[float, Any]]:
    size = dist.get_world_size()
    groups: list[Any] = [dist.new_group(list(range(first, first + cp_size))) for first in range(0, size, cp_size)]
    found = []
    for wrap in WRAPPERS.values():
        model = wrap(Trained(groups[rank // cp_size]))
        loss = wt.train_step(model, step_of(rank, size, cp_size))
        found.append((loss.item(), flat(model).numpy()))
    return found


@pytest.mark.parametrize(("size", "cp_size"), [(2, 1), (2, 2), (4, 2)])
def test_train_step_under_wrappers_and_ranks(size: int, cp_size: int) -> None:
    for found in processes.run(size, _train, cp_size):
        for loss, gradient in found:
            assert_right(loss, gradient)


def _other_cut(rank: int) -> str:
    step = step_of(rank, 2, cp_size=2)
    if rank:
        batch = step.micro_batches[0]
        other = wlb.shard(wlb.PrefixForest.from_prompts([batch.shard.num_tokens], 1, [0]), cp_size=2)
        object.__setattr__(batch, "shard", other)
    try:
        wt.check_agreement(step)
    except wlb.WlbError as refused:
        return str(refused)
    return ""


def test_ranks_that_cut_a_forest_otherwise_are_told() -> None:
    first, second = processes.run(2, _other_cut)
    assert first == second
    assert "differs between the ranks" in first


def test_padding_of_a_forest_is_told_and_sharing_counts_as_utilization() -> None:
    forest = wlb.PrefixForest.from_tokens([5, 6, 7, 1, 5, 6, 7, 3], [0, 4, 8])
    batch = wt.collate([[5, 6, 7, 1], [5, 6, 7, 3]], forest, multiple_of_tokens=8)
    assert (batch.num_padding, batch.real.tolist()) == (3, [True] * 5 + [False] * 3)
    assert wt.collate([[5, 6, 7, 1], [5, 6, 7, 3]], forest).num_padding == 0
    shape: dict[str, Any] = {"hidden_size": 8, "ffn_hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 11}
    assert wt.model_flops(batch, **shape) == wt.model_flops([4, 4], **shape)
    with wt.real_tokens(nn.Linear(2, 2), batch):
        pass


# --- verify ---


def verified(model: nn.Module, step: wt.Step[ForestBatch], **changes: Any) -> str:
    """What verify says is wrong; empty if all is right."""
    try:
        proof = wt.verify(model, step, report=None, **changes)
    except wlb.WlbError as wrong:
        return str(wrong)
    assert {check.name for check in proof.checks} >= {"documents", "others", "halves", "company", "ranks"}
    assert max(check.error for check in proof.checks) < 1e-5  # a loss is float32, and counts ten times
    return ""


def test_verify_proves_a_right_step_of_a_forest_and_leaves_no_trace() -> None:
    model, step = Trained(), step_of(0, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    assert verified(model, step) == ""
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())


class Faulty(Trained):
    """Trained with a fault in training alone: `verify` calls it with a `PackedBatch` for the reference."""

    def __init__(self, fault: str, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(group)
        self.fault = fault

    def forward(self, batch: ForestBatch | PackedBatch) -> Tensor:  # type: ignore[override]
        if isinstance(batch, PackedBatch):
            return super().forward(batch)
        tokens, positions, shard = batch.tokens.numel(), batch.position_ids, batch.shard
        seen: wlb.Shard = shard
        if self.fault == "positions":
            positions = torch.arange(tokens)
        elif self.fault == "siblings":
            seen = wlb.shard([tokens], cp_size=1)
        elif self.fault == "nodes":
            seen = wlb.shard(shard.forest.lengths, cp_size=1)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            group = self.group if seen.cp_size > 1 else None
            return wt.context_parallel_attention(q, k, v, seen, group=group)

        logits: Tensor = self.head(Model.forward(self, batch.tokens, positions, attend))
        return logits


def _loss_of(kind: str) -> Callable[[nn.Module, Any, int], Tensor]:
    def loss(model: nn.Module, batch: ForestBatch, valid: int) -> Tensor:
        logits = model(batch)[batch.edge_rows]
        if kind == "edges":
            total: Tensor = nn.functional.cross_entropy(logits, batch.edge_targets, reduction="sum") / valid
            return total
        each = nn.functional.cross_entropy(logits, batch.edge_targets, reduction="none")
        if kind == "counted":
            valid = sum(batch.edge_targets.numel() for batch in _short_of[0].micro_batches)
        if kind == "mean":
            valid = len(_short_of[0].micro_batches) * batch.num_valid_tokens
        return (each * batch.edge_weights).sum() / valid

    return loss


_short_of: list[Any] = []


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("positions", "where documents share a row"),
        ("siblings", "lets documents of a row see each other"),
        ("nodes", "where documents share a row"),
        ("edges", "teaches other than its halves"),
        ("counted", "teaches other than its halves"),
        ("mean", "teaches other than its halves"),
    ],
)
def test_verify_names_what_is_wrong(fault: str, message: str) -> None:
    kind = fault if fault in ("edges", "counted", "mean") else ""

    def train(step: wt.Step[ForestBatch]) -> Tensor:
        _short_of[:] = [step]
        return wt.train_step(model, step, loss=_loss_of(kind) if kind else None)

    model = Faulty(fault)
    assert message in verified(model, step_of(0, 1), train=train)


def _verify(rank: int, cp_size: int) -> list[str]:
    size = dist.get_world_size()
    groups: list[Any] = [dist.new_group(list(range(first, first + cp_size))) for first in range(0, size, cp_size)]
    group = groups[rank // cp_size]
    step = step_of(rank, size, cp_size)
    found = [verified(wrap(Trained(group)), step) for wrap in WRAPPERS.values()]
    model = Trained(group)

    def train(step: wt.Step[ForestBatch]) -> Tensor:  # gradients stay on their rank
        valid = wt.count_valid_tokens(step)
        for batch in step.micro_batches:
            wt.token_normalized_loss(model(batch), batch, num_valid_tokens=valid).backward()  # type: ignore[no-untyped-call]
        return None  # type: ignore[return-value]

    return [*found, verified(model, step, train=train)]


@pytest.mark.parametrize(("size", "cp_size"), [(2, 1), (2, 2)])
def test_verify_on_ranks(size: int, cp_size: int) -> None:
    for *right, wrong in processes.run(size, _verify, cp_size):
        assert right == ["", "", ""]
        assert "they are not exchanged" in wrong


def test_verify_compares_samples_with_the_plan() -> None:
    step = step_of(0, 1)
    first, second, *others = step.micro_batches
    object.__setattr__(step, "micro_batches", [second, first, *others])
    assert "holds other documents than its plan" in verified(Trained(), step)


# --- pipelines ---


class First(nn.Module):
    """Embeddings and the first layer."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.inner = model
        for name in ("layers", "out"):
            setattr(model, name, getattr(model, name)[:1])
        del model.head

    def forward(self, tokens: Tensor, *, batch: ForestBatch) -> Tensor:
        hidden: Tensor = Model.forward(self.inner, tokens, batch.position_ids, _attend(batch))
        return hidden


class Last(nn.Module):
    """The second layer and the head."""

    def __init__(self, model: Trained) -> None:
        super().__init__()
        self.layer, self.out, self.head, self.heads = model.layers[1], model.out[1], model.head, model.heads

    def forward(self, x: Tensor, *, batch: ForestBatch) -> Tensor:
        q, k, v = self.layer(nn.functional.layer_norm(x, x.shape[-1:])).unflatten(-1, (-1, 4)).split(self.heads, 1)
        logits: Tensor = self.head(x + self.out(_attend(batch)(q, k, v).flatten(1)).tanh())
        return logits


def _attend(batch: ForestBatch) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: wt.context_parallel_attention(q, k, v, batch.shard)


def _pipeline(rank: int, schedule: str) -> tuple[float, Any]:
    model = Trained()
    names = [name for name, _ in model.named_parameters()]
    width = model.tokens.weight.shape[1]
    if rank == 0:
        submodule: nn.Module = First(model)
        names = ["tokens.weight", "positions.weight", *(n for n in names if ".0." in n)]
    else:
        submodule = Last(model)
    stage = wt.VarlenPipelineStage(submodule, rank, 2, "cpu", hidden_size=width, dtype=torch.float64)
    step = step_of(0, 1)
    alone: Any = dist.new_group([rank], use_local_synchronization=True)
    valid = wt.count_valid_tokens(step, group=alone)
    micro_batches = [
        wt.PipelineMicroBatch(tokens=batch.tokens.numel(), args=(batch.tokens,), kwargs={"batch": batch}, target=batch)
        for batch in step.micro_batches
    ]
    loss_fn = functools.partial(_loss, valid=valid)
    losses = wt.pipeline_step([stage], micro_batches, schedule=schedule, loss_fn=loss_fn)
    gradients: dict[str, Any] = {}
    for name, parameter in submodule.named_parameters():
        gradients[name.removeprefix("inner.")] = parameter.grad.numpy()  # type: ignore[union-attr]
    return float(sum(map(float, losses))), gradients


def _loss(logits: Tensor, batch: ForestBatch, *, valid: int) -> Tensor:
    return wt.token_normalized_loss(logits, batch, num_valid_tokens=valid)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_pipeline_takes_forests(schedule: str) -> None:
    (_, first), (loss, last) = processes.run(2, _pipeline, schedule)
    renamed = {"layer": "layers.1", "out": "out.1", "head": "head"}
    mine = dict(first) | {".".join([renamed[n.split(".")[0]], n.split(".")[1]]): g for n, g in last.items()}
    gradients = [torch.from_numpy(mine[name]).flatten() for name, _ in Trained().named_parameters()]
    assert_right(loss, torch.cat(gradients))


def test_a_pipeline_refuses_what_contradicts_a_forest() -> None:
    (batch, *_) = step_of(0, 1).micro_batches
    tokens = batch.tokens.numel()
    one_more = torch.zeros(tokens + 1)
    for given in ({"kwargs": {"shard": batch.shard}}, {"kwargs": {"batch": batch}}, {"target": batch}):
        micro_batch = wt.PipelineMicroBatch(tokens=tokens + 1, args=(one_more,), **given)
        with pytest.raises(wlb.WlbError, match=f"has {tokens + 1} tokens, but its"):
            wt.pipeline_step([_stage(nn.Linear(2, 2))], [micro_batch])
    micro_batch = wt.PipelineMicroBatch(tokens=tokens, args=(batch.tokens,), kwargs={"batch": batch})
    with pytest.raises(wlb.WlbError, match=r"cannot run a forest: it has GRU, a recurrent layer") as caught:
        wt.pipeline_step([_stage(nn.GRU(2, 2))], [micro_batch])
    assert caught.value.argument == "stages"


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest) -> Any:
    """A process group of this process alone, for tests whose stages ask for one."""
    if "contradicts" not in request.node.name:
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _stage(module: nn.Module) -> wt.VarlenPipelineStage:
    return wt.VarlenPipelineStage(module, 0, 1, "cpu", hidden_size=2)


# --- losses ---


def test_the_loss_of_logits_and_a_forest_is_that_of_its_samples() -> None:
    (batch,) = wt.Step.of(_plan([(1, 2, 3), (1, 2, 4), (1, 2)]), [(1, 2, 3), (1, 2, 4), (1, 2)]).micro_batches
    logits = torch.randn(batch.tokens.numel(), VOCABULARY, dtype=torch.float64)
    loss = wt.token_normalized_loss(logits, batch, num_valid_tokens=batch.num_valid_tokens)
    of_samples = batch.to_samples(-logits.log_softmax(-1)[batch.edge_rows, batch.edge_targets])
    assert batch.num_valid_tokens == of_samples.numel() == 5
    torch.testing.assert_close(loss, of_samples.mean(), rtol=1e-14, atol=0)
    with pytest.raises(wlb.WlbError, match="weights of its own"):
        wt.token_normalized_loss(logits, batch, num_valid_tokens=1, weights=torch.ones(4))
    with pytest.raises(wlb.WlbError, match="tokens of labels"):
        wt.token_normalized_loss(logits[1:], batch, num_valid_tokens=1)


def _plan(samples: list[tuple[int, ...]]) -> wlb.Packing:
    forest = wlb.PrefixForest.from_tokens(np.concatenate(samples), np.cumsum([0, *map(len, samples)]))
    return wlb.pack(forest, num_micro_batches=1, max_tokens=100, cost_model=COST)


def test_what_no_sample_learns_is_no_edge() -> None:
    """Prompts are seldom learnt: their rows need no head."""
    samples = [wt.Document((5, 6, 7, end), 0, labels=(-100, -100, -100, end)) for end in (1, 2)]
    batch = wt.collate(samples, wlb.PrefixForest.from_prompts([3], 2, [1, 1]))
    assert batch.edge_rows.tolist() == [2, 2]
    assert batch.edge_targets.tolist() == [1, 2]
    assert batch.edge_weights.tolist() == [1, 1]
    assert batch.num_valid_tokens == 2


# --- refusals ---


class _Configured(nn.Module):
    def __init__(self, **numbers: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.config = type("Config", (), {})()
        vars(self.config).update(numbers)


class MTPLayer(nn.Linear):
    """A layer by a name that predicts several ahead."""


class HuggingFace(nn.Linear):
    """Called as models of Hugging Face are."""

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.GRU(2, 2), "GRU, a recurrent layer"),
        (nn.LSTMCell(2, 2), "LSTMCell, a recurrent layer"),
        (type("Mamba2Mixer", (nn.Linear,), {})(2, 2), "Mamba2Mixer, a recurrent layer"),
        (nn.Sequential(nn.Conv1d(2, 2, 3)), r"0 \(Conv1d\), a convolution"),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), r"1 \(Dropout\), with p = 0.1: .* share its dropout"),
        (_Configured(attention_dropout=0.1), "with attention_dropout = 0.1"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "BatchNorm1d.*statistics"),
        (_Configured(moe_expert_capacity_factor=1.25), "with moe_expert_capacity_factor = 1.25: which tokens experts"),
        (_Configured(num_nextn_predict_layers=1), "several tokens to predict"),
        (nn.Sequential(MTPLayer(2, 2)), r"0 \(MTPLayer\), which predicts several tokens ahead"),
    ],
)
def test_models_that_cannot_run_a_forest_are_refused(model: nn.Module, message: str) -> None:
    step = wt.Step.of(_plan([(1, 2, 3), (1, 2)]), [(1, 2, 3), (1, 2)])
    for call in (wt.train_step, functools.partial(wt.verify, report=None)):
        with pytest.raises(wlb.WlbError, match=message) as caught:
            call(model, step)
        assert caught.value.argument == "model"
        assert "wt.collate" in str(caught.value)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    "model",
    [
        nn.Conv1d(2, 2, 1),
        nn.Dropout(0.0),
        nn.Sequential(nn.Dropout(0.3), nn.BatchNorm1d(2)).eval(),
        _Configured(attention_dropout=0.0, capacity_factor=None, num_nextn_predict_layers=0, classifier_dropout=0.1),
    ],
)
def test_models_that_can_run_a_forest_are_not(model: nn.Module) -> None:
    from wlb.torch.layers import check_forest

    check_forest(model)


def test_models_that_find_documents_by_positions_are_refused() -> None:
    step = wt.Step.of(_plan([(1, 2, 3), (1, 2)]), [(1, 2, 3), (1, 2)])
    with pytest.raises(wlb.WlbError, match="know no shared prefix"):
        wt.train_step(HuggingFace(2, 2), step)


@pytest.mark.parametrize(
    ("change", "argument", "message"),
    [
        ({"plan": 3}, "plan", "is a int, not a wlb.Packing"),
        ({"documents": [(1, 2)]}, "documents", "are 1, but the plan has 2"),
        ({"dp_rank": 1}, "dp_rank", "at most 0"),
        ({"dp_size": 2}, "dp_size", "dp_size"),
        ({"documents": [(1, 2, 3), (1, 9)]}, "tokens", "token 1 of sample 1"),
        (
            {"documents": [wt.Document((1, 2, 3), 0, columns={"labels_ahead": np.zeros((1, 3))}), (1, 2)]},
            "documents",
            "labels_ahead",
        ),
    ],
)
def test_steps_that_do_not_fit_are_refused(change: dict[str, Any], argument: str, message: str) -> None:
    samples = [(1, 2, 3), (1, 2)]
    arguments: dict[str, Any] = {"documents": samples, "plan": _plan(samples), **change}
    with pytest.raises(wlb.WlbError, match=message) as caught:
        wt.Step.of(arguments.pop("plan"), arguments.pop("documents"), **arguments)
    assert caught.value.argument == argument


def test_a_plan_of_documents_makes_a_step_as_a_plan_of_a_forest_does() -> None:
    """Documents whole and in pieces, each on its rank, with the labels of one document at a time."""
    random = np.random.default_rng(0)
    documents = [random.integers(1, 9, size).tolist() for size in (9, 4, 7, 3, 5, 2)]
    lengths = [len(document) for document in documents]
    for method in ("var_length", "original"):
        plan = wlb.pack(lengths, num_micro_batches=4, max_tokens=10, cost_model=COST, method=method)
        steps = [wt.Step.of(plan, documents, number=3, dp_rank=rank, dp_size=2) for rank in range(2)]
        assert [step.number for step in steps] == [3, 3]
        assert sorted(np.concatenate([step.indices for step in steps])) == [0, 1, 2, 3]
        counts = [batch.num_valid_tokens for step in steps for batch in step.micro_batches]
        assert sum(counts) == sum(lengths) - len(lengths)
        for step in steps:
            for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=True):
                part = plan[index]
                held = [
                    token
                    for document, start, length in zip(part.document_ids, part.starts, part.lengths, strict=True)
                    for token in documents[document][start : start + length]
                ]
                assert batch.tokens.tolist() == held
                assert batch.document_ids.tolist() == part.document_ids.tolist()
    with pytest.raises(wlb.WlbError, match="9 tokens where the plan has 8") as caught:
        wt.Step.of(wlb.pack([8], num_micro_batches=1, max_tokens=9, cost_model=COST), documents[:1])
    assert (caught.value.argument, caught.value.index) == ("documents", 0)
    plan = wlb.pack([3, 3], num_micro_batches=1, max_tokens=9, cost_model=COST, method="fixed_length", global_batches=2)
    with pytest.raises(wlb.WlbError, match="2 global batches"):
        wt.Step.of(plan, [[1, 2, 3], [1, 2, 3]])


def test_layers_between_attention_refuse_forests() -> None:
    shard: Any = wlb.shard(wlb.PrefixForest.from_prompts([4], 2, [2, 2]), cp_size=1)
    x = torch.zeros(8, 2)
    with pytest.raises(wlb.WlbError, match="forest"):
        wt.recut(x, shard, shard)
    with pytest.raises(wlb.WlbError, match="forest"):
        wt.halo(x, shard, tokens=1)


def test_what_knows_no_shared_prefix_refuses_the_shard() -> None:
    shard: Any = wlb.shard(wlb.PrefixForest.from_prompts([4], 2, [2, 2]), cp_size=1)
    from wlb.integrations.torch_cp import ShardLoadBalancer, document_mask

    mesh: Any = None
    for call in (lambda: ShardLoadBalancer(shard, mesh), lambda: document_mask(shard, device="cpu")):
        with pytest.raises(wlb.WlbError, match="torch's context parallelism is for documents") as caught:
            call()
        assert caught.value.argument == "shard"
    pytest.importorskip("megatron.core")
    from wlb.integrations.megatron.attention import ShardedSeqParams

    assert ShardedSeqParams(shard=wlb.shard([8], cp_size=1)).shard is not None
    with pytest.raises(wlb.WlbError, match="Megatron-Core finds documents by cu_seqlens") as caught:
        ShardedSeqParams(shard=shard)
    assert caught.value.argument == "shard"


def test_figures_of_a_step_are_those_of_what_it_computes() -> None:
    step = step_of(0, 1)
    (line,) = [wt.StepMetrics().end_step(step)]
    assert isinstance(step.packing, wlb.Packing)
    assert line["wlb/tokens"] == step.packing.num_tokens
    assert line["wlb/imbalance"] == pytest.approx(step.packing.rank_imbalance)
    timer = wt.StepTimer("cpu")
    with timer.micro_batch(0):
        pass
    with pytest.raises(wlb.WlbError, match="is of a forest"):
        timer.end_step(step)
    timer.end_step()
    (timed,) = timer.read()
    assert timed.seconds.shape == (1,)
