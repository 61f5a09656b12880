"""Proves before the first step that packing, ranks and loop train the same as the documents alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn

from wlb._errors import error
from wlb._shown import explained
from wlb._warned import warn
from wlb.torch.data.step import Step
from wlb.torch.groups import ranks_of_step
from wlb.torch.proof import checks as data
from wlb.torch.proof.alone import Alone, Model, logits_alone
from wlb.torch.proof.checks import Check
from wlb.torch.proof.experiments import Experiments, Train
from wlb.torch.proof.look import look
from wlb.torch.proof.precision import Precision
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short_forest import shortened
from wlb.torch.proof.still import still
from wlb.torch.training import AnyStep, train_step

__all__ = ["Check", "Proof", "look", "verify"]


@explained
@dataclass(frozen=True)
class Proof:
    """The checks of `verify`. Printed, a proof is a table."""

    checks: tuple[Check, ...]

    def __str__(self) -> str:
        head = ("", "found", "expected", "apart", "allowed")
        rows = [
            (check.name, check.found, check.expected, f"{check.error:.1e}", f"{check.allowed:.0e}")
            for check in self.checks
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        marks = ["", *("" if check.passed else f"  <- {check.verdict}" for check in self.checks)]
        return "\n".join((line + mark).rstrip() for line, mark in zip(lines, marks, strict=True))


def verify(
    model: nn.Module | Sequence[Any],
    step: AnyStep,
    *,
    train: Train | None = None,
    evaluate: Callable[[Any], Any] | None = None,
    alone: Alone | Literal["rows"] | None = None,
    loader: Callable[[], Any] | None = None,
    save: Callable[[Any, Step[Any]], Mapping[str, Any]] | None = None,
    group: dist.ProcessGroup | None = None,
    accelerator: Any = None,
    dtype: torch.dtype | None = None,
    report: Callable[[Proof], None] | None = print,
) -> Proof:
    """Proves on your own model and training loop that a step trains what its documents, one at a time, would train.

    `train` runs a step with a few short documents: on the ranks, in the layout and in the mode of the training, over
    data- and context-parallel ranks, groups of a Dynamic-CP plan and stages of a pipeline. Each experiment changes one
    thing that must not matter. The first that fails is raised:

    - **documents**: The documents are those of the plan, on all ranks, and each part of the step is on one rank.
    - **weights**: All replicas of the model are equal.
    - **tied**: Embedding and head are one weight, if the configuration says so.
    - **mode**: The model trains in training mode, and the loop leaves weights to the optimizer.
    - **others**: Other tokens in every second document, then in the rest: loss and gradient of the documents between
      stay bit for bit. Mixtures of experts, scans of states and atomics round other tokens in, so they are compared in
      float32, within 100 eps of the largest value.
    - **halves**: The labels of half of the documents, then of the rest: the sums add up to the whole step.
    - **company**: Documents in another order give the same, in float32 to 1e-4.
    - **ranks**: The run's ranks, wrapper and loop give what each document gives alone on one rank, in float32 to 1e-4.
    - **precision**, for 16 bits: The step is as near to float32 as its documents alone are, twice over.
    - **evaluation**, with `evaluate`: The result is the mean over labels.
    - **resume**, with `loader`: A state that was saved after a step goes on with the next step.

    For float32, mixed precision is off, weights of 16 bits are copied, and flash attention is exchanged for torch's. A
    document stays longer than each window, chunk or first context of up to 2,048 tokens that the configuration names.

    Collective: every rank of `group`, and of the pipeline, calls it. Call it before the first step, without gradients.
    It leaves no trace: weights, buffers, hooks, divisors of wrappers, modes, `requires_grad`, gradients and random
    states of Python, numpy and torch are afterwards as they were.

    Dropout, noise and routers' losses are off meanwhile: `verify` sets numbers of modules and of their `config` to 0 by
    parts of their names (`drop`, `noise`, `jitter`, `aux_loss`, `z_loss`, and `p` of Dropout modules). Leave other
    losses over whole rows out of `train`.

    Args:
        model: the outermost wrapper, as it is trained. Or the pipeline stages of this rank, ascending
            (`VarlenPipelineStage`); they need `train` and `alone`.
        step: what the loader gave, or `Step.of`. Each sample of a forest is a document. The model is called
            with a `ForestBatch` in training, and with a `PackedBatch` of one sample alone. Or `round_step`: then the
            reference is the mean over samples that the step means, counted from its definition.
        train: runs forward and backward of a step, as you train it, without the optimizer. Returns the mean loss of the
            step, or None. Default: `train_step(model, step, group=group, accelerator=accelerator)`.
        evaluate: returns the mean loss of a step, as you evaluate.
        alone: runs a `PackedBatch` of one row with `cp_size = 1` through the model. Returns logits,
            float[tokens, vocabulary], or the sum of the losses of its labels, a scalar. It calls the model as the loop
            does, but without a context-parallel group. For pipelines it gets a stage's module; after the first stage,
            `batch.tokens` is the output of the stage before. Default: logits of
            `model(input_ids=..., use_cache=False)`, or of `model(batch)`.
            "rows" is for models that no rank can run alone (tensor parallelism), and for losses of your own: the
            reference is then `train` on rows of single documents. It does not find what is wrong in both, such as a
            constant factor, and all ranks of the world take part.
        loader: makes the loader of steps anew, with everything that stands between it and the training loop.
        save: returns what a checkpoint of the loader and the last trained step holds of the data. Default:
            `step.state`. The new loader's `load_state_dict` gets it.
        group: the ranks that share the global batch, data- and context-parallel; None for all.
        accelerator: as in `train_step`.
        dtype: what the model computes in, if that is coarser than its parameters (mixed precision). Default: what the
            accelerator says.
        report: gets the proof before anything is raised, on every rank.

    Returns:
        The proof, in which every check passed or could not tell.

    Warns:
        UserWarning: the proof could not tell whether positions begin anew in every document. This happens in precisions
            that the proof cannot leave: 8 bits, FSDP1's `MixedPrecision`, and models that know documents by flash
            attention alone. There, positions shifted by one document may change less than rounding explains.

    Raises:
        WlbError: what is wrong, the same on every rank, and what to do about it. Also if the step has no labels, or if
            the model cannot run a document alone.

    Complexity:
        Seven short steps of at most two micro-batches a rank, and a forward and backward pass of each of their
        documents, shared out over the ranks; with 16 bits twelve steps and two passes. Memory of the weights that learn
        (and of their float32 copies), and of three gradients.

    Examples:
        >>> import torch, wlb, wlb.torch as wt
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding, self.head = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 9)
        ...     def forward(self, batch):
        ...         return self.head(self.embedding(batch.tokens))
        >>> documents = [torch.arange(n) % 9 for n in (5, 8, 3, 6)]
        >>> sizes = {"max_tokens": 16, "tokens_per_batch": 22, "cost_model": wlb.CostModel(attention=1.0, linear=9.0)}
        >>> step = next(iter(wt.balanced_loader(documents, **sizes)))
        >>> proof = wt.verify(Model(), step, report=None)
        >>> [check.name for check in proof.checks]
        ['documents', 'mode', 'others', 'halves', 'company', 'ranks']
    """
    group = ranks_of_step(step, group)
    stages: Sequence[Any] = () if isinstance(model, nn.Module) else list(model)
    if stages and (train is None or alone is None):
        name = "train" if train is None else "alone"
        raise error(name, "is needed for stages of a pipeline, because schedules call them in different ways")
    whole = stages[0].group if stages else None
    if alone == "rows" and dist.is_initialized():
        whole = dist.group.WORLD
    parts: list[nn.Module] = [stage.submod for stage in stages] if stages else [model]  # type: ignore[list-item]
    weight = next((weight for part in parts for weight in part.parameters()), None)
    if weight is None:
        raise error("model", "has no weights, so that nothing could be proved")
    ranks = Ranks(group, whole, weight.device)
    data.configuration(parts, step, ranks)
    of_model = Model(model, ranks, logits_alone if alone is None or isinstance(alone, str) else alone)
    if any(parameter.grad is not None for parameter in of_model.parameters):
        raise error("model", "has gradients: verify before the first step, or after zero_grad()")
    data.check_numbers(of_model.whole, ranks)
    checks = [data.documents(step, ranks), *data.weights(of_model.whole, ranks), *data.tied(parts, stages)]
    checks = [replace(check, error=ranks.largest(check.error)[0]) for check in checks]
    if not all(check.passed for check in checks):  # further checks would hang, or compare different models
        return _reported(checks, report)
    short = shortened(step, ranks, parts, whole=bool(stages))
    if not short.count():
        raise error("step", "has no label that counts, so that nothing could be proved: verify with another one")
    train = train or (lambda of: train_step(of_model.whole, of, group=group, accelerator=accelerator, verify=False))
    if dtype is None:
        dtype = _MIXED.get(getattr(accelerator, "mixed_precision", "no"))
    scaler = getattr(accelerator, "scaler", None)
    precision = Precision(of_model.whole, stages, dtype)
    with still(of_model.whole) as kept:
        run = Experiments(of_model, train, short, ranks, kept, precision, scaler, alone == "rows")
        for check in run.checks(evaluate):
            checks.append(check)
            if check.verdict == "wrong":
                break
        else:
            if loader is not None:
                checks.append(data.resume(loader, save or (lambda _, last: last.state), ranks))
    return _reported(checks, report)


def _reported(checks: Sequence[Check], report: Callable[[Proof], None] | None) -> Proof:
    result = Proof(tuple(checks))
    if report is not None:
        report(result)
    for check in result.checks:
        if check.verdict == "wrong":
            raise error(_ARGUMENTS.get(check.name, "model"), check.fix, value=check.error)
    for check in result.checks:
        if not check.passed:
            warn(f"the model {check.fix}")
    return result


# As accelerate calls them.
_MIXED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_ARGUMENTS: Final = {"documents": "step", "evaluation": "evaluate", "resume": "loader"}
