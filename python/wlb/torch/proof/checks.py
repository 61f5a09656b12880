"""Checks that need no training step: documents, weights, tied weights, states of loaders."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch.distributed as dist
from torch import Tensor, nn

from wlb._errors import error
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.forest import ForestBatch
from wlb.torch.data.step import Step
from wlb.torch.gradients import unwrapped
from wlb.torch.layers import against_forests, against_packing
from wlb.torch.lazy import dtensor, fsdp1, local
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short import longest_of
from wlb.torch.tied import is_tied
from wlb.torch.training import AnyStep


@dataclass(frozen=True)
class Check:
    """One row of a proof.

    Attributes:
        name: what was compared.
        found: value in training.
        expected: correct value.
        error: relative difference of both.
        allowed: largest allowed difference.
        fix: what is wrong and what to do; empty if nothing is.
        can_tell: whether a fault would differ by more than is allowed.
    """

    name: str
    found: str
    expected: str
    error: float
    allowed: float
    fix: str = ""
    can_tell: bool = True

    @property
    def verdict(self) -> Literal["passed", "wrong", "could not tell"]:
        """`wrong` if the difference is not allowed; `could not tell` if a fault would be allowed too."""
        if not self.error <= self.allowed:
            return "wrong"
        return "passed" if self.can_tell else "could not tell"

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed, and a fault would not be."""
        return self.verdict == "passed"


def configuration(parts: Sequence[nn.Module], step: AnyStep, ranks: Ranks) -> None:
    """Refuses a model whose configuration cannot keep the documents of this step apart.

    Raises:
        wlb.WlbError: it names the layer or the setting, and the way out; the same on all ranks.
    """
    of_forest = any(isinstance(batch, ForestBatch) for batch in step.micro_batches)
    (longest,) = map(int, ranks.largest(longest_of(step)))
    wrong = [(against_forests(part) if of_forest else "") or against_packing(part, longest) for part in parts]
    for found in ranks.gathered_of_parts("".join(wrong)):
        if found:
            raise error("model", found)


def documents(step: AnyStep, ranks: Ranks) -> Check:
    """Compares the documents of all ranks with the plan. Each part of the step must be on one rank."""
    if isinstance(step, DynamicCpStep):
        planned: list[Any] = list(step.groups)
    else:
        planned = [step.packing[index] for index in step.indices.tolist()]
    batches: list[Any] = list(step.micro_batches)
    wrong = abs(len(batches) - len(planned))
    for part, batch in zip(planned, batches, strict=False):
        if isinstance(batch, ForestBatch):
            same = np.array_equal(batch.document_ids.cpu().numpy(), part.document_ids)
            wrong += not same or batch.shard.num_tokens < part.tokens
        else:
            wrong += not np.array_equal(batch.shard.lengths[: batch.document_ids.numel()], part.lengths)
    every = ranks.gathered(
        ((step.number, step.plan.digest(), getattr(step, "content", None)), step.parts.tolist(), wrong)
    )
    plans, parts, wrongs = zip(*every, strict=True)
    held = sorted(part for of_rank in parts for part in of_rank)
    others = len(set(plans)) > 1 or held != list(range(len(held)))
    return Check(
        "documents",
        "other plans" if others else f"{len(held) - sum(wrongs)} of {len(held)}",
        f"{len(held)} of {len(held)} parts",
        float(others) + sum(wrongs),
        0.0,
        "holds other documents than its plan: a sampler or a loader is wrapped twice, and shares out again what is "
        "this rank's part already. Keep BalancedBatchSampler and StepLoader out of accelerator.prepare, "
        "use_distributed_sampler=True and DistributedSampler",
    )


def check_numbers(model: nn.Module, ranks: Ranks) -> None:
    """Refuses a model whose weights are not finite: such weights could not be compared.

    Raises:
        wlb.WlbError: a weight that learns is infinite or NaN on any rank.
    """
    learning = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    broken = [name for name, weight in learning if not local(weight).detach().isfinite().all()]
    (several,) = ranks.largest(float(len(broken)))
    if several:
        found = broken[0] if broken else "of another rank"
        raise error("model", f"has a weight that is infinite or no number ({found}): look at how it is made or loaded")


def weights(model: nn.Module, ranks: Ranks) -> list[Check]:
    """Compares the replicas of the model. Equal gradients would keep unequal replicas apart for ever."""
    apart: list[float] = []
    names: list[str] = []
    for name, mine, group in _replicated(model, ranks.share):
        theirs = mine.detach().clone()
        dist.broadcast(theirs, group=group, group_src=0)
        distance = float((mine.detach() - theirs).double().norm())
        apart.append(distance / max(float(theirs.double().norm()), 1e-30))
        names.append(name)
    (several,) = ranks.largest(float(len(apart)))
    if not several:
        return []
    worst = max(zip(apart, names, strict=True), default=(0.0, ""))
    most, where = max(ranks.gathered_of_parts(max(ranks.gathered(worst))))
    return [
        Check(
            "weights",
            f"{sum(found == 0 for found in apart)} alike",
            f"{len(apart)} parameters",
            most,
            0.0,
            f"has weights that differ between ranks ({where} is {most:.1e} apart): seed all ranks alike before the "
            "model is made, load one checkpoint on all, or broadcast its parameters from one rank",
        )
    ]


def _replicated(model: nn.Module, share: Any) -> Iterator[tuple[str, Tensor, Any]]:
    """Parameters, or shards of them, that must be equal on all ranks of a group."""
    flat = [module for module in model.modules() if isinstance(module, fsdp1())]
    for module in flat:
        handle = module._handle
        if handle is not None:
            whole = not handle.uses_sharded_strategy
            group = module.process_group if whole else getattr(module, "_inter_node_pg", None)
            if group is not None and dist.get_world_size(group) > 1:
                yield "a flat parameter", handle.flat_param, group
    inside = {id(parameter) for module in flat for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in inside:
            continue
        if isinstance(parameter, dtensor()):
            mesh = parameter.device_mesh
            for dim, placement in enumerate(parameter.placements):
                if placement.is_replicate() and mesh.size(dim) > 1:
                    yield name, parameter.to_local(), mesh.get_group(dim)
        elif share is not None and dist.get_world_size(share) > 1:
            yield name, parameter, share


def tied(parts: Sequence[nn.Module], stages: Sequence[Any]) -> list[Check]:
    """Compares a model with `tie_word_embeddings` in its configuration: embedding and head must be one weight.

    A checkpoint of such a model holds one weight, and loads it as both.
    """
    bare: list[Any] = [unwrapped(part) for part in parts]
    if not any(getattr(getattr(part, "config", None), "tie_word_embeddings", False) for part in bare):
        return []
    if stages:
        apart = stages[0].group_size > 1 and not is_tied(stages[0].group, parts)
        fix = "make wt.TiedWeights on every rank of the pipeline, and call its all_reduce_gradients() in each step"
    else:
        ends = [getattr(bare[0], f"get_{name}_embeddings", lambda: None)() for name in ("input", "output")]
        weights = [getattr(end, "weight", None) for end in ends]
        if any(weight is None or not weight.requires_grad for weight in weights):
            return []
        apart = weights[0] is not weights[1]
        fix = "call model.tie_weights() before wrapping, or make it False"
    fix = (
        "says tie_word_embeddings = True, but its embedding and its head are two weights, of which a checkpoint would "
        f"keep one: {fix}"
    )
    return [Check("tied", "two weights" if apart else "one weight", "one weight", float(apart), 0.0, fix)]


def resume(make: Callable[[], Any], save: Callable[[Any, Step[Any]], Mapping[str, Any]], ranks: Ranks) -> Check:
    """Saves a state after the first step, and compares what a new loader gives next with the second step."""
    loader = make()
    steps = iter(loader)
    first = next(steps, None)
    (ended,) = ranks.sums(float(first is None))
    if first is None or ended:
        raise error("loader", "gives no step: verify with more documents")
    state = copy.deepcopy(save(loader, first))
    expected = next(steps, None)  # None after a single step: then no step may follow its state
    again = make()
    again.load_state_dict(state)
    found = next(iter(again), None)
    (wrong,) = ranks.sums(float(_named(found) != _named(expected)))
    return Check(
        "resume",
        _named(found)[0],
        _named(expected)[0],
        wrong,
        0.0,
        f"goes on with {_named(found)[0]} where {_named(expected)[0]} was next: what fetched ahead had its state "
        "saved. Save the state of the step that was trained, step.state",
    )


def _named(step: Step[Any] | None) -> tuple[str, str]:
    return ("none", "") if step is None else (f"step {step.number}", step.plan.digest())
