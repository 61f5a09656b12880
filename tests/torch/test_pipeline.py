"""Pipelines over micro-batches of unequal length, against one process."""

from __future__ import annotations

import faulthandler
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import wlb
from tests.torch import processes
from wlb.torch.pipeline import (
    PipelineMicroBatch,
    VarlenPipelineStage,
    pipeline_step,
    stages_of_rank,
)

HIDDEN = 8
WAITS = timedelta(seconds=4)  # for a rank that has failed; one that has not is no later on any machine
VOCABULARY = 11

# The documents of each micro-batch; a micro-batch may have one token, or none.
DOCUMENTS = [[5, 3], [1], [], [2, 9, 1], [4], [12], [1, 1], [7, 2], [3]]


class Layer(nn.Module):
    """A causal mean inside each document, a position, a scale, and weights before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, shard: wlb.RankShard, position_ids: Tensor, scale: float) -> Tensor:
        lengths = (shard.cu_seqlens_q[1:] - shard.cu_seqlens_q[:-1]).tolist()
        sums = torch.cat([document.cumsum(0) for document in self.mix(x).split(lengths)]) if lengths else self.mix(x)
        return x + scale * torch.tanh(self.out(sums / (position_ids + 1)[:, None]))


class Part(nn.Module):
    """What one stage computes: some layers, with the embedding before the first and the head after the last."""

    def __init__(self, index: int, num_stages: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if index == 0 else nn.Identity()
        self.layer = Layer()
        self.head = nn.Linear(HIDDEN, VOCABULARY) if index == num_stages - 1 else nn.Identity()

    def forward(self, x: Tensor, **plan: Any) -> Tensor:
        result: Tensor = self.head(self.layer(self.embedding(x), **plan))
        return result


def model(num_stages: int) -> list[Part]:
    torch.manual_seed(0)
    return [Part(index, num_stages) for index in range(num_stages)]


def micro_batches(documents: Sequence[Sequence[int]], seed: int = 0) -> list[PipelineMicroBatch]:
    random = torch.Generator().manual_seed(seed)
    result = []
    for index, lengths in enumerate(documents):
        shard = wlb.shard(lengths, cp_size=1).rank(0)
        tokens = shard.num_tokens
        plan = {"shard": shard, "position_ids": torch.from_numpy(shard.position_ids), "scale": 0.5 + 0.25 * index}
        values = torch.randint(VOCABULARY, (2, tokens), generator=random)
        result.append(PipelineMicroBatch(tokens=tokens, args=(values[0],), kwargs=plan, target=values[1]))
    return result


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target, reduction="sum") / 100


def one_process(parts: Sequence[nn.Module], step: Sequence[PipelineMicroBatch]) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and losses; gradients add up in the parameters."""
    outputs, losses = [], []
    for micro_batch in step:
        (x,) = micro_batch.args
        for part in parts:
            x = part(x, **micro_batch.kwargs)
        outputs.append(x.detach())
        losses.append(loss_fn(x, micro_batch.target))
        losses[-1].backward()
    return outputs, losses


def own_stages(
    parts: Sequence[nn.Module], schedule: str, group: dist.ProcessGroup | None = None, **shape: Any
) -> list[VarlenPipelineStage]:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    indices = stages_of_rank(rank, pp_size=size, num_stages=len(parts), schedule=schedule)
    shape = shape or {"hidden_size": HIDDEN}
    return [VarlenPipelineStage(parts[i], i, len(parts), "cpu", group=group, **shape) for i in indices]


def error_of(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    assert [a.shape for a in found] == [b.shape for b in expected]
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if b.numel()]
    return max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-8)) for a, b in pairs), default=0.0)


def gradients(parts: Sequence[nn.Module]) -> list[Tensor]:
    found = [parameter.grad for part in parts for parameter in part.parameters()]
    assert all(grad is not None for grad in found)
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad for grad in found if grad is not None]


def compare(rank: int, schedule: str, num_stages: int, steps: Sequence[Sequence[Sequence[int]]]) -> float:
    """The largest relative error of losses, outputs and gradients over some steps."""
    parts, reference = model(num_stages), model(num_stages)
    stages = own_stages(parts, schedule)
    worst = 0.0
    for number, documents in enumerate(steps):
        step = micro_batches(documents, seed=number)
        outputs: list[Tensor] = []

        def loss_and_output(output: Tensor, target: Tensor, outputs: list[Tensor] = outputs) -> Tensor:
            outputs.append(output.detach().clone())
            return loss_fn(output, target)

        for part in (*parts, *reference):
            part.zero_grad()
        losses = pipeline_step(stages, step, schedule=schedule, loss_fn=loss_and_output)
        expected_outputs, expected_losses = one_process(reference, step)
        if stages[-1].is_last:
            worst = max(worst, error_of(losses, expected_losses), error_of(outputs, expected_outputs))
        else:
            assert losses == []
            assert outputs == []
        own = [stage.stage_index for stage in stages]
        worst = max(worst, error_of(gradients([parts[i] for i in own]), gradients([reference[i] for i in own])))
    return worst


def numbers_of_micro_batches(schedule: str, pp_size: int) -> list[int]:
    if schedule.startswith("interleaved"):
        return [2 * pp_size, pp_size - 1, 2 * pp_size]
    if schedule == "dualpipev":
        return [2 * pp_size, 2 * pp_size + 1, 2 * pp_size]
    return [pp_size, pp_size + 3, pp_size]


MULTI = ["interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
SCHEDULES = [("gpipe", 1), ("1f1b", 1), *((schedule, 2) for schedule in MULTI)]


@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize(("schedule", "stages_per_rank"), SCHEDULES)
def test_equals_one_process(schedule: str, stages_per_rank: int, pp_size: int) -> None:
    numbers = numbers_of_micro_batches(schedule, pp_size)
    steps = [(DOCUMENTS[start:] + DOCUMENTS[:start])[:number] for start, number in enumerate(numbers)]
    errors = processes.run(pp_size, compare, schedule, pp_size * stages_per_rank, steps)
    assert max(errors) < 1e-5


def test_one_rank_and_three_stages_a_rank() -> None:
    assert processes.run(1, compare, "1f1b", 1, [DOCUMENTS[:3]])[0] < 1e-5
    assert processes.run(1, compare, "zbv", 2, [DOCUMENTS[:3]])[0] < 1e-5
    assert max(processes.run(2, compare, "interleaved_1f1b", 6, [DOCUMENTS[:4]])) < 1e-5


def test_only_empty_micro_batches() -> None:
    assert max(processes.run(2, compare, "1f1b", 2, [[[], []]])) < 1e-5


def forward_only(rank: int, schedule: str, num_stages: int) -> None:
    parts, reference = model(num_stages), model(num_stages)
    stages = own_stages(parts, schedule)
    step = micro_batches(DOCUMENTS[:6])
    expected_outputs, expected_losses = one_process(reference, step)
    outputs = pipeline_step(stages, step, schedule=schedule)
    made: list[weakref.ref[Tensor]] = []

    def alive() -> int:
        return sum(output() is not None for output in made)

    def watched(output: Tensor, target: Tensor) -> Tensor:
        made.append(weakref.ref(output))
        assert alive() == 1, "evaluation holds one micro-batch at a time"
        return loss_fn(output, target)

    def watch(stage: VarlenPipelineStage) -> Any:
        return stage.submod.register_forward_hook(lambda *_: kept.append(len(stage._forwarded)))

    kept: list[int] = []
    hooks = [watch(stage) for stage in stages]
    with torch.no_grad():
        losses = pipeline_step(stages, step, schedule=schedule, loss_fn=watched)
    assert alive() == 0
    assert max(kept) <= 1  # one that is yet to be sent
    assert not any(stage._forwarded or stage._activations for stage in stages)
    for hook in hooks:
        hook.remove()
    assert all(parameter.grad is None for part in parts for parameter in part.parameters())
    trained = pipeline_step(stages, step, schedule=schedule, loss_fn=loss_fn)
    if stages[-1].is_last:
        assert error_of(outputs, expected_outputs) < 1e-5
        assert error_of(losses, expected_losses) < 1e-5
        assert error_of(trained, expected_losses) < 1e-5
        assert not any(loss.requires_grad for loss in losses)


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("interleaved_1f1b", 4), ("zbv", 4)])
def test_without_backward(schedule: str, num_stages: int) -> None:
    processes.run(2, forward_only, schedule, num_stages)


class Scale(nn.Module):
    """A module that only torch's own stage needs: no keyword arguments, no embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scale_with_stock_torch(rank: int, lengths: Sequence[int]) -> list[int]:
    stage = PipelineStage(Scale(), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, len(lengths))
    stage.has_backward = False
    inputs = [(torch.ones(length, HIDDEN),) for length in lengths] if rank == 0 else None
    with torch.no_grad():
        schedule._step_microbatches(inputs)
    return [len(output) for output in stage.output_chunks]


def abort_stock_torch(rank: int) -> None:
    faulthandler.disable()  # the abort is planned: no "Fatal Python error" among the output of tests
    try:
        scale_with_stock_torch(rank, [3, 5])
    except RuntimeError as reason:
        if "shape mismatch" in str(reason):
            raise
    if rank == 0:
        time.sleep(600)  # whether it noticed that it lost its peer or not: let the peer's death be what is reported


def scale(rank: int, lengths: Sequence[int]) -> list[int]:
    stage = VarlenPipelineStage(Scale(), rank, 2, "cpu", hidden_size=HIDDEN)
    step = [PipelineMicroBatch(tokens=length, args=(torch.ones(length, HIDDEN),)) for length in lengths]
    outputs = pipeline_step([stage], step)
    assert all((output == 4).all() for output in outputs)
    return [len(output) for output in outputs]


def test_torch_keeps_a_stale_tail_and_we_do_not() -> None:
    if torch.__version__.startswith("2.11."):
        with pytest.raises(processes.RankFailed, match="shape mismatch"):
            processes.run(2, scale_with_stock_torch, [5, 3])
    else:
        assert processes.run(2, scale_with_stock_torch, [5, 3])[1] == [5, 5]
    assert processes.run(2, scale, [5, 3])[1] == [5, 3]


def test_torch_aborts_on_a_longer_micro_batch_and_we_do_not() -> None:
    with pytest.raises(processes.RankFailed, match=r"^rank 1: died|shape mismatch"):
        processes.run(2, abort_stock_torch)
    assert processes.run(2, scale, [3, 5])[1] == [3, 5]


class Awkward(nn.Module):
    """Ignores its input in some micro-batches, and returns a tensor whose memory is not in order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(1, 2, HIDDEN))

    def forward(self, x: Tensor, ignore: bool) -> Tensor:
        hidden = x.reshape(len(x), HIDDEN)
        if ignore:
            hidden = hidden.detach()
        heads = (self.weight.diag() @ hidden.T).T.unflatten(1, (2, HIDDEN // 2))  # so is the gradient of x
        return heads if len(x) < 5 else 1 * heads  # a view, or none


def awkward(rank: int, schedule: str, ignore: bool) -> float:
    parts, reference = [Awkward() for _ in range(4)], [Awkward() for _ in range(4)]
    stages = own_stages(parts, schedule, activation_shape=lambda tokens: (tokens, 2, HIDDEN // 2))
    step = [
        PipelineMicroBatch(tokens=n, args=(torch.full((n, HIDDEN), 0.5),), kwargs={"ignore": ignore and n == 3})
        for n in (2, 3, 0, 5)
    ]
    pipeline_step(stages, step, schedule=schedule, loss_fn=lambda output, _: output.square().sum())
    for micro_batch in step:
        (x,) = micro_batch.args
        for part in reference:
            x = part(x, **micro_batch.kwargs)
        x.square().sum().backward()
    own = [stage.stage_index for stage in stages]
    return error_of(gradients([parts[i] for i in own]), gradients([reference[i] for i in own]))


def test_unused_inputs_other_shapes_and_strides() -> None:
    assert max(processes.run(2, awkward, "interleaved_1f1b", True)) < 1e-5
    assert max(processes.run(2, awkward, "interleaved_zero_bubble", False)) < 1e-5
    assert max(processes.run(2, awkward, "zbv", False)) < 1e-5
    with pytest.raises(processes.RankFailed, match=r"ignores its input|not have been used in the graph"):
        processes.run(2, awkward, "zbv", True)


def with_fsdp(rank: int, schedule: str, num_stages: int) -> float:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    reference = model(num_stages)
    parts: list[nn.Module] = []
    for part in model(num_stages):
        for module in (part.layer, part):
            fully_shard(module, mesh=mesh["dp"])
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        parts.append(part)
    stages = own_stages(parts, schedule, group=mesh["pp"].get_group())
    worst = 0.0
    for number in (4, 6):  # gradients of both add up, with micro-batches in a number not seen before
        both = [micro_batches((DOCUMENTS[shift:] + DOCUMENTS[:shift])[:number]) for shift in (0, 2)]
        step = both[mesh["dp"].get_local_rank()]
        losses = pipeline_step(stages, step, schedule=schedule, loss_fn=loss_fn)
        expected = [one_process(reference, replica)[1] for replica in both][mesh["dp"].get_local_rank()]
        if stages[-1].is_last:
            worst = max(worst, error_of(losses, expected))
    own = [stage.stage_index for stage in stages]
    with torch.no_grad():
        evaluated = pipeline_step(stages, step, schedule=schedule, loss_fn=loss_fn)
    if stages[-1].is_last:
        worst = max(worst, error_of(evaluated, losses))
    return max(worst, error_of(gradients([parts[i] for i in own]), gradients([reference[i] for i in own])))


@pytest.mark.parametrize(
    ("schedule", "num_stages"), [("1f1b", 2), ("interleaved_1f1b", 4), ("interleaved_zero_bubble", 4), ("zbv", 4)]
)
def test_with_fsdp(schedule: str, num_stages: int) -> None:
    assert max(processes.run(4, with_fsdp, schedule, num_stages)) < 1e-5


def fail_somewhere(rank: int, schedule: str, num_stages: int, where: str) -> None:
    parts = model(num_stages)
    stages = own_stages(parts, schedule)
    failed = 2 if where == "loss" else 1

    def fail(*_: object) -> None:
        raise ArithmeticError("the reason")

    if rank == 1 and where == "forward":
        parts[stages[0].stage_index].register_forward_pre_hook(fail)
    if rank == 1 and where == "backward":
        parts[stages[0].stage_index].layer.out.weight.register_hook(fail)
    try:
        pipeline_step(
            stages, micro_batches(DOCUMENTS[:4]), schedule=schedule, loss_fn=fail if where == "loss" else loss_fn
        )
    except ArithmeticError:
        if rank == failed:
            raise
    time.sleep(processes.TIMEOUT)  # as a rank that waits


@pytest.mark.parametrize(
    ("schedule", "num_stages", "where"),
    [("1f1b", 3, "forward"), ("interleaved_1f1b", 6, "backward"), ("interleaved_zero_bubble", 6, "loss")],
)
def test_a_stage_that_fails_raises_at_once_and_as_itself(schedule: str, num_stages: int, where: str) -> None:
    with pytest.raises(processes.RankFailed, match="the reason") as caught:
        processes.run(3, fail_somewhere, schedule, num_stages, where)
    assert caught.value.rank == (2 if where == "loss" else 1)


def test_a_failure_ends_a_job(tmp_path: Path) -> None:
    with pytest.raises(processes.RankFailed, match="the reason"):
        processes.run(2, crash)


def crash(rank: int) -> None:
    parts = model(2)
    if rank == 1:
        parts[1].register_forward_pre_hook(lambda *_: {}["the reason"])
    pipeline_step(own_stages(parts, "1f1b"), micro_batches(DOCUMENTS[:3]), loss_fn=loss_fn)


class Unlucky(nn.Module):
    """Does nothing, until it fails in the second of the micro-batches that come."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.where = ""
        self.calls = 0

    def forward(self, *args: Any, **plan: Any) -> Tensor:
        self.fail_in("forward")
        result: Tensor = self.module(*args, **plan)
        if result.requires_grad:
            result.register_hook(lambda _: self.fail_in("backward"))
        return result

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        self.fail_in("loss")
        return loss_fn(output, target)

    def fail_in(self, where: str) -> None:
        if where == self.where:
            self.calls += 1
            if self.calls == 2:
                raise torch.OutOfMemoryError("none left") from LookupError("the reason")


def survive(rank: int, schedule: str, num_stages: int) -> float:
    """The largest error of a step after failed ones."""
    reference = model(num_stages)
    parts = [Unlucky(part) for part in model(num_stages)]
    stages = own_stages(parts, schedule)
    step = micro_batches(DOCUMENTS[:4])
    for part, where in [*((part, where) for part in parts for where in ("forward", "backward")), (parts[-1], "loss")]:
        part.where, part.calls = where, 0
        with pytest.raises(torch.OutOfMemoryError, match="none left") as caught:
            pipeline_step(stages, step, schedule=schedule, loss_fn=parts[-1].loss)
        assert type(caught.value) is torch.OutOfMemoryError
        assert isinstance(caught.value.__cause__, LookupError)
        assert not any(stage.backward_state or stage._activations or stage.output_chunks for stage in stages)
        part.where = ""
    for part in parts:
        part.zero_grad()
    losses = pipeline_step(stages, step, schedule=schedule, loss_fn=loss_fn)
    _, expected = one_process(reference, step)
    return max(error_of(losses, expected), error_of(gradients(parts), gradients(reference)))


@pytest.mark.parametrize(
    ("schedule", "num_stages"), [("gpipe", 1), ("1f1b", 1), ("interleaved_zero_bubble", 2), ("zbv", 2)]
)
def test_a_step_after_a_failed_one(schedule: str, num_stages: int) -> None:
    assert processes.run(1, survive, schedule, num_stages)[0] < 1e-5


def fail_with_fsdp(rank: int) -> None:
    part = Unlucky(model(1)[0])
    fully_shard(part, mesh=init_device_mesh("cpu", (1,)))
    stages = own_stages([part], "1f1b")
    step = micro_batches(DOCUMENTS[:3])
    part.where = "loss"
    for loss, error in ((part.loss, torch.OutOfMemoryError), (loss_fn, wlb.WlbError)):
        with pytest.raises(error, match=r"none left|stages\[0\] has failed .* hold a part of the gradients"):
            pipeline_step(stages, step, loss_fn=loss)


def test_fsdp_keeps_gradients_of_a_failed_step() -> None:
    processes.run(1, fail_with_fsdp)


def fail_and_go_on(rank: int) -> None:
    parts = model(2)
    stages = own_stages(parts, "1f1b", group=dist.new_group(timeout=WAITS))
    reason = ArithmeticError("the reason")

    def fail(*_: object) -> None:
        raise reason

    if rank == 1:
        parts[1].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError if rank == 1 else RuntimeError) as caught:
        pipeline_step(stages, micro_batches(DOCUMENTS[:3]), loss_fn=loss_fn)
    assert rank == 0 or caught.value is reason
    with pytest.raises(wlb.WlbError, match=r"stages\[0\] has failed .* messages are still under way"):
        pipeline_step(stages, micro_batches(DOCUMENTS[:3]), loss_fn=loss_fn)
    dist.barrier()


def test_a_pipeline_with_messages_under_way_refuses_to_go_on() -> None:
    processes.run(2, fail_and_go_on)


def wrong_output(rank: int) -> None:
    parts = [Scale(), Scale()]
    if rank == 0:
        parts[0].register_forward_hook(lambda module, args, output: output[:-1])
    stage = VarlenPipelineStage(parts[rank], rank, 2, "cpu", hidden_size=HIDDEN)
    pipeline_step([stage], 2 * [PipelineMicroBatch(tokens=2, args=(torch.ones(2, HIDDEN),))])


def test_a_stage_that_returns_another_length() -> None:
    with pytest.raises(processes.RankFailed, match=r"submodule\[0\] of stage 0 returned \[1, 8\]"):
        processes.run(2, wrong_output)


def refused(call: Callable[[], object]) -> tuple[str | None, int | None, object, str]:
    with pytest.raises(wlb.WlbError) as caught:
        call()
    return caught.value.argument, caught.value.index, caught.value.value, str(caught.value)


def bad_input(rank: int) -> list[tuple[str | None, int | None, object]]:
    """All refusals; none may leave traces, nor wait for the other rank."""
    parts = model(2)
    stages = own_stages(parts, "1f1b")
    step = micro_batches(DOCUMENTS[:4])
    other = micro_batches(DOCUMENTS[3:7])
    run = partial(pipeline_step, stages, loss_fn=loss_fn)

    def change(index: int, **fields: Any) -> list[PipelineMicroBatch]:
        given = step[index]
        fields = {"tokens": given.tokens, "args": given.args, "kwargs": given.kwargs, "target": given.target} | fields
        return [*step[:index], PipelineMicroBatch(**fields), *step[index + 1 :]]

    whole = wlb.shard([4, 4], cp_size=2)
    cases: list[tuple[str, int | None, Callable[[], object]]] = [
        ("micro_batches", None, lambda: run([])),
        ("micro_batches", None, lambda: run(step[:1])),  # 1F1B takes as many as stages
        ("micro_batches", 2, lambda: run([*step[:2], "a string"])),
        ("micro_batches", 1, lambda: run(change(1, tokens=-1))),
        ("micro_batches", 1, lambda: run(change(1, tokens=True))),
        ("micro_batches", 1, lambda: run(change(1, tokens=2.0))),
        ("micro_batches", 1, lambda: run(change(1, args=()))),
        ("micro_batches", 2, lambda: run(change(2, tokens=1))),
        ("micro_batches", 0, lambda: run(change(0, target=other[0].target))),
        ("micro_batches", 3, lambda: run(change(3, kwargs=other[3].kwargs))),
        ("micro_batches", 3, lambda: run(change(3, kwargs={"shard": whole}))),
        ("schedule", None, lambda: run(step, schedule="1f2b")),
        ("num_stages", None, lambda: run(step, schedule="zbv")),
        ("stages", None, lambda: pipeline_step([], step)),
        ("stages", None, lambda: pipeline_step([*stages, *stages], step)),
        ("stages", 0, lambda: pipeline_step([PipelineStage(parts[rank], rank, 2, torch.device("cpu"))], step)),
        ("micro_batches", 0, lambda: pipeline_step(own_stages(parts[::-1], "1f1b"), change(0, tokens=0))),
        ("stage_index", None, lambda: VarlenPipelineStage(parts[0], 2, 2, "cpu", hidden_size=HIDDEN)),
        ("hidden_size", None, lambda: VarlenPipelineStage(parts[0], 0, 2, "cpu")),
        ("num_stages", None, lambda: stages_of_rank(0, pp_size=2, num_stages=5, schedule="interleaved_1f1b")),
        ("pp_rank", None, lambda: stages_of_rank(2, pp_size=2, num_stages=2)),
    ]
    found = [refused(call) for _, _, call in cases]
    assert [refusal[:2] for refusal in found] == [case[:2] for case in cases]
    losses = run(step)  # still works
    assert len(losses) == (4 if rank == 1 else 0)
    return [refusal[:2] + refusal[3:] for refusal in found]


def test_bad_input_is_refused_alike_before_communication() -> None:
    first, second = processes.run(2, bad_input)
    assert [refusal[:2] for refusal in first] == [refusal[:2] for refusal in second]


class Checkpointed(Part):
    """Computed again in the backward; selectively all but matrix products."""

    selective = False

    def forward(self, x: Tensor, **plan: Any) -> Tensor:
        def policy(context: Any, operator: Any, *args: Any, **options: Any) -> CheckpointPolicy:
            kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if self.selective else {}
        result: Tensor = checkpoint(partial(super().forward, **plan), x, use_reentrant=False, **contexts)
        return result


class Selective(Checkpointed):
    selective = True


def checkpointed(rank: int, kind: type[Checkpointed], schedule: str, num_stages: int, refused: bool) -> float:
    torch.manual_seed(0)
    parts, reference = [kind(index, num_stages) for index in range(num_stages)], model(num_stages)
    stages, step = own_stages(parts, schedule), micro_batches(DOCUMENTS[:4])
    if refused:
        with pytest.raises((wlb.WlbError, RuntimeError)) as raised:
            pipeline_step(stages, step, schedule=schedule, loss_fn=loss_fn)
        if isinstance(raised.value, wlb.WlbError):
            assert "checkpoint without context_fn" in str(raised.value), raised.value
            return 1.0
        return 0.0
    pipeline_step(stages, step, schedule=schedule, loss_fn=loss_fn)
    one_process(reference, step)
    own = [stage.stage_index for stage in stages]
    return error_of(gradients([parts[i] for i in own]), gradients([reference[i] for i in own]))


@pytest.mark.parametrize(("schedule", "num_stages"), [("1f1b", 2), ("zbv", 4), ("interleaved_zero_bubble", 4)])
def test_checkpoints(schedule: str, num_stages: int) -> None:
    """Plain ones run under every schedule; selective ones allow one backward, which a split schedule says by name."""
    assert max(processes.run(2, checkpointed, Checkpointed, schedule, num_stages, False)) == 0.0
    splits = schedule != "1f1b"
    found = processes.run(2, checkpointed, Selective, schedule, num_stages, splits)
    assert max(found) == (1.0 if splits else 0.0)
