"""What adds up over ranks adds up over those that share the batch, or is refused by name before the first backward."""

from __future__ import annotations

import contextlib
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.test_training import LENGTHS, Network, documents, flat, reference
from tests.torch.test_verify import llama
from wlb.torch.data import PackedBatch
from wlb.torch.gradients import _settings


def first_step(mesh: Any) -> wt.Step[PackedBatch]:
    """Of a loader that takes its ranks from the mesh."""
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=64,
        max_document_tokens=40,
        oversize="split",
        cost_model=wlb.CostModel(attention=1.0, linear=50.0),
        release="fifo",
    )
    dp, cp = mesh["dp"], mesh["cp"]
    sampler = wt.BalancedBatchSampler(
        LENGTHS, packer=packer, dp_rank=dp.get_local_rank(), dp_size=dp.size(), tokens_per_batch=130
    )

    def collate(rows: Any) -> PackedBatch:
        return wt.collate(rows, cp_rank=cp.get_local_rank(), cp_size=cp.size())

    return next(iter(wt.StepLoader(DataLoader(wt.Documents(documents()), batch_sampler=sampler, collate_fn=collate))))


def refused(call: Callable[..., object], *args: Any, **options: Any) -> str:
    with pytest.raises(wlb.WlbError) as raised:
        call(*args, **options)
    return f"{raised.value.argument} {raised.value}"


def untouched(model: nn.Module) -> bool:
    return all(parameter.grad is None for parameter in model.parameters())


def ddp(mesh: Any) -> nn.Module:
    return DistributedDataParallel(Network(), process_group=mesh.get_group())


def sharded(mesh: Any) -> nn.Module:
    model = Network()
    fully_shard(model.hidden, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp1(mesh: Any) -> nn.Module:
    return FullyShardedDataParallel(Network(), process_group=mesh.get_group(), device_id=torch.device("cpu"))


WRAPPERS: dict[str, Callable[[Any], nn.Module]] = {"ddp": ddp, "fully_shard": sharded, "fsdp1": fsdp1}


def data_and_context_parallel(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(dp=2, cp=2, device_type="cpu")
    both, step = wt.data_and_context(mesh), first_step(mesh)
    texts: dict[str, str] = {}
    right: dict[str, Any] = {}
    for name, wrapped in WRAPPERS.items():
        for dim in ("dp", "cp"):
            model = wrapped(mesh[dim])
            texts[f"{name} over {dim}"] = refused(wt.train_step, model, step)
            assert untouched(model)
            texts[f"{name} over {dim}, told"] = refused(wt.sum_gradients, model)
        if name != "fsdp1":
            model = wrapped(both)
            right[name] = (wt.train_step(model, step).item(), flat(model))
    right["plain"] = (wt.train_step(model := Network(), step).item(), flat(model))
    half = nn.Sequential(Network(), nn.Linear(2, 2))
    half[0] = ddp(both)
    texts["outside"] = refused(wt.sum_gradients, half)
    for dim in ("dp", "cp"):
        group = mesh[dim].get_group()
        texts[f"step over {dim}"] = refused(wt.train_step, Network(), step, group=group)
        texts[f"labels over {dim}"] = refused(wt.count_valid_tokens, step, group=group)
        texts[f"gradients over {dim}"] = refused(wt.all_reduce_gradients, Network(), step, group=group)
    # As a loader that was told ranks of another mesh: every rank has the same part.
    dealt = first_step({"dp": mesh["dp"], "cp": mesh["dp"]})
    texts["same parts"] = refused(wt.count_valid_tokens, dealt)
    right["labels"] = wt.count_valid_tokens(step, group=both.get_group())
    return {"refused": texts, "right": right}


def test_wrappers_and_groups_are_those_that_share_the_batch() -> None:
    loss, gradient = reference()[0]
    labels = sum(batch.num_valid_tokens for batch in whole_step().micro_batches)
    for found in processes.run(4, data_and_context_parallel):
        for name, text in found["refused"].items():
            if "parts" in name:
                assert re.search("group .*2 of its 4 ranks have part", text) or "0 of its 4" in text, text
            elif name == "outside":
                assert "1.weight is one" in text, text
            elif "over" in name and name.split()[0] in WRAPPERS:
                assert re.search(r"model .*over ranks \[\d, \d\], but ranks \[0, 1, 2, 3\] share", text), (name, text)
            else:
                assert "group has 2 ranks, but 4 data- and context-parallel ranks share step 0" in text, (name, text)
            assert "wt.data_and_context(mesh)" in text or name == "outside", (name, text)
        assert found["right"].pop("labels") == labels
        for name, (found_loss, found_gradient) in found["right"].items():
            assert found_loss == pytest.approx(loss, rel=1e-6), name
            assert abs(found_gradient - gradient).max() < 1e-6 * abs(gradient).max(), name


def whole_step() -> wt.Step[PackedBatch]:
    one = type("One", (), {"get_local_rank": lambda _: 0, "size": lambda _: 1})()
    return first_step({"dp": one, "cp": one})


# Of documents of one step: the longest is on two ranks, and each rank reads some of them.
DYNAMIC = [100, 7, 30, 12, 1, 25]


def dynamic_documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(13, (length,), generator=generator) for length in DYNAMIC]


def dynamically_context_parallel(rank: int) -> tuple[bool, dict[str, tuple[float, np.ndarray]], list[str]]:
    mesh = wt.build_mesh(dp=2, cp=1, device_type="cpu")
    both = wt.data_and_context(mesh)
    plan = partial(
        wlb.plan_dynamic_cp,
        world_size=2,
        num_stages=1,
        max_tokens_per_rank=64,
        cost_model=wlb.CostModel(attention=1.0, linear=50.0),
    )
    loader: wt.DynamicCpLoader[PackedBatch] = wt.DynamicCpLoader(
        [dynamic_documents()[rank::2]], plan=plan, group=both.get_group()
    )
    (step,) = loader
    loader.close()
    found = {}
    for name, model in {"plain": Network(), "ddp": ddp(both), "fully_shard": sharded(both)}.items():
        found[name] = (wt.train_step(model, step).item(), flat(model))
    assert wt.count_valid_tokens(step) == step.num_valid_tokens
    alone = dist.new_group([rank], use_local_synchronization=True)
    texts = [refused(wt.count_valid_tokens, step, group=alone), refused(wt.train_step, Network(), step, group=alone)]
    return max(batch.cp_size for batch in step.micro_batches) == 2, found, texts


def test_steps_of_dynamic_context_parallelism_know_their_ranks() -> None:
    model = Network()
    tokens = dynamic_documents()
    logits = torch.cat([model(SimpleNamespace(tokens=each[:-1])) for each in tokens])
    loss = nn.functional.cross_entropy(logits, torch.cat([each[1:] for each in tokens]))
    loss.backward()  # type: ignore[no-untyped-call]
    gradient = flat(model)
    for shared, found, texts in processes.run(2, dynamically_context_parallel):
        assert shared
        assert all("group has 1 ranks, but 2 data- and context-parallel ranks share step 0" in text for text in texts)
        for name, (found_loss, found_gradient) in found.items():
            assert found_loss == pytest.approx(loss.item(), rel=1e-6), name
            assert abs(found_gradient - gradient).max() < 1e-6 * abs(gradient).max(), name


def pipelined(rank: int) -> list[str]:
    mesh = wt.build_mesh(pp=2, device_type="cpu")
    model, step, alone = Network(), first_step(mesh), wt.data_and_context(mesh).get_group()
    texts = [
        refused(lambda: wt.train_step(model, step)),
        refused(lambda: wt.count_valid_tokens(step)),
        refused(lambda: wt.all_reduce_gradients(model, step)),
    ]
    assert untouched(model)
    wrapped = DistributedDataParallel(Network(), process_group=alone)
    texts.append(refused(lambda: wt.sum_gradients(wrapped)))
    wt.sum_gradients(wrapped, group=alone)
    loss = nn.functional.mse_loss(model(step.micro_batches[0]), torch.zeros(()))
    loss.backward()  # type: ignore[no-untyped-call]
    before = flat(model).copy()
    wt.all_reduce_gradients(model, step, group=alone)
    assert (flat(model) == before).all(), "the other stage's gradients are none of this one"
    assert wt.count_valid_tokens(step, group=alone) == sum(batch.num_valid_tokens for batch in step.micro_batches)
    return texts


def test_stages_of_a_pipeline_do_not_share_a_batch() -> None:
    for texts in processes.run(2, pipelined):
        for text in texts[:3]:
            assert "group has 2 ranks, but 1 data- and context-parallel ranks share step 0" in text
        assert re.search(r"over ranks \[\d\], but ranks \[0, 1\] share", texts[3])


# --- a check leaves no trace ------------------------------------------------------------------------------------------


class Traced(Network):
    """Counts what it sees, draws random numbers while it trains, and has a frozen layer."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.hidden.bias.requires_grad_(False)
        self.head.eval()

    def forward(self, batch: PackedBatch) -> Tensor:
        self.seen = self.seen + 1
        random.random(), np.random.random(), torch.rand(())  # noqa: NPY002
        return super().forward(batch)


def traces(model: nn.Module) -> dict[str, Any]:
    """What a check may not change."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return {
        "modes": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "buffers": [(id(buffer), buffer.clone().tolist()) for buffer in model.buffers()],
        "hooks": [
            hook
            for parameter in model.parameters()
            for hook in (getattr(parameter, "_backward_hooks", None) or {}).items()
        ],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "grad": [parameter.grad is None for parameter in model.parameters()],
        "reductions": [(name, getattr(owner, name)) for owner, name in _settings(model)],
        "python": random.getstate(),
        "numpy": (state[0], state[1].tolist(), state[2:]),
        "torch": torch.get_rng_state().tolist(),
    }


def own_loop(model: nn.Module, step: wt.Step[PackedBatch]) -> np.ndarray:
    """A loop of one's own, right without us: wrappers average, so it multiplies by the ranks."""
    valid, ranks = wt.count_valid_tokens(step), dist.get_world_size()
    for batch in step.micro_batches:
        loss = wt.token_normalized_loss(model(batch), batch.labels, num_valid_tokens=valid)
        (loss * ranks).backward()  # type: ignore[no-untyped-call]
    gradient = flat(model)
    model.zero_grad()
    return gradient


CHECKED: dict[str, Callable[[], nn.Module]] = {
    "ddp": lambda: DistributedDataParallel(Network()),
    "fully_shard": lambda: sharded(None),
    "fsdp1": lambda: FullyShardedDataParallel(Network(), device_id=torch.device("cpu"), use_orig_params=True),
    "fsdp1, not sharded": lambda: FullyShardedDataParallel(
        Network(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True
    ),
}


def checked(rank: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    mesh = wt.build_mesh(dp=2, device_type="cpu")
    step = first_step(mesh)
    found: dict[str, Any] = {}
    for name, make in CHECKED.items():
        model = make()
        before = own_loop(model, step) if name != "fsdp1" else summed(model, step)
        traced = traces(model)
        wt.verify(model, step, report=None)
        assert traces(model) == traced, name
        after = own_loop(model, step) if name != "fsdp1" else summed(model, step)
        found[name] = float(abs(after - before).max() / abs(before).max())
    return found


def summed(model: nn.Module, step: wt.Step[PackedBatch]) -> np.ndarray:
    """As `own_loop`, where each rank has its own part of the gradients."""
    for batch in step.micro_batches:
        wt.token_normalized_loss(model(batch), batch.labels, num_valid_tokens=100).backward()  # type: ignore[no-untyped-call]
    found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return torch.cat([gradient.flatten() for gradient in found]).numpy()


def test_the_gradients_of_a_loop_are_those_of_before_a_check() -> None:
    for found in processes.run(2, checked):
        assert found.keys() == CHECKED.keys()
        assert max(found.values()) < 1e-6, found


def test_a_check_leaves_no_trace() -> None:
    """Whether it passes or not, whatever the training step does."""
    model = Traced()
    model.embedding.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    step = whole_step()
    before = traces(model)

    def train(of: wt.Step[PackedBatch]) -> Tensor:
        """Changes all there is to change; its frozen layer learns."""
        random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
        model.train()
        model.hidden.bias.requires_grad_(True)
        model.head.weight.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
        model.register_buffer("another", torch.zeros(()))
        return wt.train_step(model, of)

    wt.verify(model, step, report=None)
    after = traces(model)
    assert after == before, [name for name in before if before[name] != after[name]]
    for failing in (False, True):

        def changes(of: wt.Step[PackedBatch], failing: bool = failing) -> Tensor:
            return train(of) * (2 if failing else 1)

        with pytest.raises(wlb.WlbError) if failing else contextlib.nullcontext():
            wt.verify(model, step, train=changes, report=None)
        after = traces(model)
        assert after == before, [name for name in before if before[name] != after[name]]


# --- weights that stages share ----------------------------------------------------------------------------------------

WORDS, WIDTH = 17, 6
ROWS = [[5, 3], [1, 7, 2], [4], [9]]


class TiedStage(nn.Module):
    """Layers of a model whose head is its embedding."""

    def __init__(self, index: int, num_stages: int, *, tie_word_embeddings: bool = True) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tie_word_embeddings)
        torch.manual_seed(index)  # stages that were made alike would not show that weights are copied
        self.embedding: Any = nn.Embedding(WORDS, WIDTH).double() if index in (0, num_stages - 1) else None
        self.layer = nn.Linear(WIDTH, WIDTH).double()
        self.is_first, self.is_last = index == 0, index == num_stages - 1

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x) if self.is_first else x
        x = torch.tanh(self.layer(x))
        return x @ self.embedding.weight.T if self.is_last else x


def tied_batches() -> list[wt.PipelineMicroBatch]:
    generator = torch.Generator().manual_seed(3)
    values = [torch.randint(WORDS, (2, sum(lengths)), generator=generator) for lengths in ROWS]
    return [wt.PipelineMicroBatch(tokens=v.shape[1], args=(v[0],), target=v[1]) for v in values]


def tied_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, labels, reduction="sum") / 34


def one_tied_process(num_stages: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Gradient of the first step's weight, and the weight after all of them, of one process with one parameter."""
    parts = [TiedStage(index, num_stages) for index in range(num_stages)]
    parts[-1].embedding = parts[0].embedding
    weight = parts[0].embedding.weight
    optimizer = torch.optim.AdamW(nn.ModuleList(parts).parameters())
    gradients = []
    for _ in range(steps):
        for batch in tied_batches():
            (x,) = batch.args
            for part in parts:
                x = part(x)
            tied_loss(x, batch.target).backward()  # type: ignore[no-untyped-call]
        gradients.append(weight.grad.numpy().copy())
        optimizer.step()
        optimizer.zero_grad()
    return gradients[0], weight.detach().numpy()


def tied(rank: int, num_stages: int, sharding: bool) -> tuple[np.ndarray, np.ndarray] | None:
    mesh = wt.build_mesh(pp=num_stages, dp=2 if sharding else 1, device_type="cpu")
    pipeline, index = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    part = TiedStage(index, num_stages)
    stage = wt.VarlenPipelineStage(
        part, index, num_stages, "cpu", group=pipeline, hidden_size=WIDTH, dtype=torch.float64
    )
    if sharding:
        fully_shard(part, mesh=wt.data_and_context(mesh), reshard_after_forward=False)
        wt.sum_gradients(part, group=wt.data_and_context(mesh).get_group())
    batches = tied_batches()
    if sharding:  # half of the micro-batches on each replica
        batches = batches[mesh["dp"].get_local_rank() :: 2]
    text = refused(lambda: wt.pipeline_step([stage], batches, loss_fn=tied_loss))
    assert "wt.TiedWeights" in text, text
    weights = wt.TiedWeights(None if part.embedding is None else part.embedding.weight, group=pipeline)
    optimizer = torch.optim.AdamW(part.parameters())
    gradients = []
    for _ in range(3):
        wt.pipeline_step([stage], batches, loss_fn=tied_loss)
        weights.all_reduce_gradients()
        if part.embedding is not None:
            gradients.append(whole(part.embedding.weight.grad))
        optimizer.step()
        optimizer.zero_grad()
    assert weights.is_first == (index == 0)
    return None if part.embedding is None else (gradients[0], whole(part.embedding.weight.detach()))


def whole(tensor: Any) -> np.ndarray:
    return np.array(tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor)


@pytest.mark.parametrize(("num_stages", "sharding"), [(2, False), (3, False), (2, True)])
def test_weights_that_stages_share_are_those_of_one_process(num_stages: int, sharding: bool) -> None:
    gradient, weight = one_tied_process(num_stages, 3)
    copies = [found for found in processes.run(num_stages * (1 + sharding), tied, num_stages, sharding) if found]
    assert len(copies) == 2 * (1 + sharding)
    for found_gradient, found_weight in copies:
        assert abs(found_gradient - gradient).max() < 1e-12 * abs(gradient).max()
        assert abs(found_weight - weight).max() < 1e-12


def unlike(rank: int) -> list[str]:
    return [
        refused(lambda: wt.TiedWeights(None)),
        refused(lambda: wt.TiedWeights(nn.Parameter(torch.zeros(3 + rank, 2)))),
    ]


def test_what_is_no_copy_is_refused() -> None:
    results = processes.run(2, unlike)
    assert results[0] == results[1]
    assert "is None on every rank" in results[0][0]
    assert re.search(r"\[3, 2\].* rank 0 .*\[4, 2\].* rank 1", results[0][1])


def seeded_apart(rank: int) -> list[str]:
    mesh = wt.build_mesh(dp=2, device_type="cpu")
    model, step = Network(), first_step(mesh)
    with torch.no_grad():
        model.head.weight[0, 0] += 1e-3 * rank
    return [
        refused(lambda: wt.verify(model, step, report=None)),
        refused(lambda: wt.verify(model, step, alone="rows", report=None)),
    ]


def test_replicas_whose_weights_differ_are_named() -> None:
    for texts in processes.run(2, seeded_apart):
        for text in texts:
            assert re.search(
                r"model has weights that differ between ranks \(head\.weight is .*seed all ranks alike", text
            ), text


def test_weights_that_are_said_to_be_tied_are_one() -> None:
    model, step = llama(tie_word_embeddings=True), whole_step()
    assert "tied       one weight" in str(wt.verify(model, step, report=None))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    assert "model says tie_word_embeddings = True" in refused(wt.verify, model, step, report=None)
