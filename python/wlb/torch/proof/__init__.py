"""Proof, before the first step, that what is trained is what its documents teach: on your own model and loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import nn

from wlb._errors import error
from wlb.torch.data.batch import PackedBatch
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.step import Step
from wlb.torch.groups import ranks_of_step
from wlb.torch.proof import checks as data
from wlb.torch.proof.alone import Alone, Model, logits_alone
from wlb.torch.proof.checks import Check
from wlb.torch.proof.prover import Prover, Train
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short import Short
from wlb.torch.proof.still import still
from wlb.torch.training import train_step

__all__ = ["Check", "Proof", "verify"]


@dataclass(frozen=True)
class Proof:
    """What :func:`verify` compared; printed it is a table."""

    checks: tuple[Check, ...]

    def __str__(self) -> str:
        head = ("", "found", "expected", "apart", "allowed")
        rows = [
            (check.name, check.found, check.expected, f"{check.error:.1e}", f"{check.allowed:.0e}")
            for check in self.checks
        ]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        marks = ["", *("" if check.passed else "  <- wrong" for check in self.checks)]
        return "\n".join((line + mark).rstrip() for line, mark in zip(lines, marks, strict=True))


def verify(
    model: nn.Module | Sequence[Any],
    step: Step[PackedBatch] | DynamicCpStep[PackedBatch],
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
    """Proves on your own model and loop that a step trains what its documents, one at a time, would.

    A few documents of the step, shortened, are trained by `train` on the ranks, in the layout and in the mode of the
    training, without dropout and without the optimizer: over data- and context-parallel ranks, groups of a dynamic plan
    and stages of a pipeline. Each is run through the model alone, too, whole, on one rank. Compared are

    - **documents**: the step's are those of its plan, each part on one rank. (A sampler that was wrapped twice gives
      every rank a part of its part.)
    - **weights**: those of all replicas are equal. (Ranks that were seeded apart.)
    - **tied**, where the configuration says that embedding and head are one weight: they are.
    - **mode**: the model trains in training mode, and its loop leaves weights to the optimizer.
    - **loss**: the mean over all labels of all ranks.
    - **gradient**: that of this mean, however many ranks there are.
    - **evaluation**, with `evaluate`: the mean over labels.
    - **resume**, with `loader`: a state saved after a step goes on with the next, whatever was fetched meanwhile.

    What is wrong is named by what explains it best. The gradient and loss that each known fault would give are computed
    on your model: wrong divisors, means of means, labels that are shifted twice or not at all, masks of labels that are
    left out, positions that go on or are local to a rank, attention that sees other documents or one rank alone,
    gradients that are not exchanged, copies of a weight, statistics of batches. The nearest is named if it is as near
    as rounding allows; otherwise the error says that none explains it.

    Collective: every rank of `group`, and of the pipeline, calls it. Before the first step: gradients must not be
    there, and are not there after it. It leaves no trace: parameters, buffers, hooks, divisors of wrappers, modes,
    `requires_grad` and random states of Python, numpy and torch are as they were. Dropout and routers' losses, which
    depend on what shares a row, are off meanwhile: attributes of modules and their `config` that hold a float and are
    named so (`p` of Dropout, `*drop*`, `*aux_loss*`, `*z_loss*`), and `output_router_logits`.

    Args:
        model: the outermost wrapper, as it is trained; or the pipeline stages that this rank holds
            (:class:`VarlenPipelineStage`), which need `train` and `alone`.
        step: what the loader gave.
        train: forward and backward of a step, as you train it, without the optimizer; gives the mean loss of the step,
            or None. By default `train_step(model, step, group=group, accelerator=accelerator)`.
        evaluate: the mean loss of a step, as you evaluate.
        alone: from the model (a stage's module) and a :class:`PackedBatch` of one row with `cp_size = 1` logits,
            float[tokens, vocabulary], or the sum of the losses of its labels, a scalar. It calls the model as the loop
            does, but without a context-parallel group. Of stages after the first, `batch.tokens` is what the stage
            before gave, and only the last one gives logits. By default those of
            `model(input_ids=..., use_cache=False)`, or of `model(batch)`. "rows", where no rank has all of the model or
            of a document and none can be run alone: the same documents in rows of their own, trained by `train` too,
            which does not find what is wrong with both, such as a divisor. All ranks there are take part then.
        loader: makes the loader of steps anew, with all that stands between it and the training loop.
        save: what a checkpoint of loader and last trained step holds of the data; by default `step.state`. It is given
            to the new loader's `load_state_dict`.
        group: the ranks that share the global batch, data- and context-parallel; None for all.
        accelerator: as in :func:`train_step`.
        dtype: what the model computes in, where that is coarser than its parameters (mixed precision); by default as
            the accelerator says.
        report: gets the proof before anything is raised; on every rank.

    Returns:
        The proof; all of it passed.

    Raises:
        WlbError: what is wrong, the same on every rank, and what to do about it; the step has no labels; or the model
            cannot run a document alone.

    Complexity:
        One such small step, and a forward and backward for each of its documents, shared out over the ranks. Where
        something is wrong, as many again for each known fault. Memory of the weights and of two gradients.

    Example:
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
        ['documents', 'mode', 'loss', 'gradient']
    """
    group = ranks_of_step(step, group)
    stages: Sequence[Any] = () if isinstance(model, nn.Module) else list(model)
    if stages and (train is None or alone is None):
        name = "train" if train is None else "alone"
        raise error(name, "is needed for stages of a pipeline: they are called in no one way")
    whole = stages[0].group if stages else None
    if alone == "rows" and dist.is_initialized():
        whole = dist.group.WORLD
    parts: list[nn.Module] = [stage.submod for stage in stages] if stages else [model]  # type: ignore[list-item]
    ranks = Ranks(group, whole, next(parts[0].parameters()).device)
    run_alone = logits_alone if alone is None or isinstance(alone, str) else alone
    of_model = Model(model, ranks, run_alone)
    if any(parameter.grad is not None for parameter in of_model.parameters):
        raise error("model", "has gradients: verify before the first step, or after zero_grad()")
    checks = [data.documents(step, ranks), *data.weights(of_model.whole, ranks), *data.tied(parts, stages)]
    checks = [replace(check, error=ranks.largest(check.error)[0]) for check in checks]
    if not all(check.passed for check in checks):  # what follows would hang, or compare other models
        return _reported(checks, report)
    short = Short(step, ranks)
    if not short.num_valid_tokens:
        raise error("step", "has no label that counts, so that nothing could be proved: verify with another one")
    train = train or (lambda of: train_step(of_model.whole, of, group=group, accelerator=accelerator))
    if dtype is None:
        dtype = _MIXED.get(getattr(accelerator, "mixed_precision", "no"))
    kinds = [dtype or torch.float32, *(p.dtype for p in of_model.parameters if p.is_floating_point())]
    eps = max(torch.finfo(kind).eps for kind in kinds)
    scaler = getattr(accelerator, "scaler", None)
    with still(of_model.whole) as kept:
        checks += Prover(of_model, train, short, ranks, kept, scaler, alone == "rows", eps).checks(evaluate)
        if loader is not None:
            checks.append(data.resume(loader, save or (lambda _, last: last.state), ranks))
    return _reported(checks, report)


def _reported(checks: Sequence[Check], report: Callable[[Proof], None] | None) -> Proof:
    result = Proof(tuple(checks))
    if report is not None:
        report(result)
    for check in sorted(result.checks, key=lambda check: check.name == "loss"):
        if not check.passed:
            raise error(_ARGUMENTS.get(check.name, "model"), check.fix, value=check.error)
    return result


# As accelerate calls them.
_MIXED: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_ARGUMENTS: Final = {"documents": "step", "evaluation": "evaluate", "resume": "loader"}
