"""Proof, before the first step, that what is trained is what its documents teach: on your own model and loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from wlb._core import WlbError
from wlb._errors import error
from wlb.torch.data.batch import IGNORE, PackedBatch
from wlb.torch.data.dynamic_cp import DynamicCpStep
from wlb.torch.data.step import Step
from wlb.torch.gradients import check_wrappers, exchanges_gradients, unwrapped
from wlb.torch.groups import ranks_of_step
from wlb.torch.proof import checks as data
from wlb.torch.proof.alone import Alone, Gradients, Model, local, logits_alone
from wlb.torch.proof.checks import Check
from wlb.torch.proof.expectations import EXPECTATIONS, SEE_EACH_OTHER, Run, right
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short import AnyStep, Document, Short
from wlb.torch.proof.still import Still, batch_norms, mixing_layers, still
from wlb.torch.training import train_step

Train = Callable[[Any], Any]

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
    if dtype is None and accelerator is not None:
        dtype = _MIXED.get(accelerator.mixed_precision)
    with still(of_model.whole) as kept:
        prover = _Prover(of_model, train, short, ranks, kept, accelerator, dtype, by_rows=alone == "rows")
        checks += prover.checks(evaluate)
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
_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_ARGUMENTS = {"documents": "step", "evaluation": "evaluate", "resume": "loader"}

_EVALUATION_MODE = (
    "is trained in evaluation mode, without dropout and with the statistics that layers keep: call model.train() "
    "before the step (models of from_pretrained are in evaluation mode)"
)
_STEPPED = (
    "has other weights after `train`: it holds an optimizer step. Give verify forward and backward alone (weights are "
    "as they were; what the optimizer keeps is not)"
)
_NOWHERE = (
    "leaves no gradient after a step with labels: it is frozen, or what trains it keeps gradients of its own, which "
    "neither this proof nor the model's zero_grad reaches"
)
_NOT_EXCHANGED = (
    "has another gradient on each rank: they are not exchanged before the optimizer steps. Use train_step, a wrapper "
    "such as DistributedDataParallel, or all_reduce_gradients(model, step)"
)
_STATISTICS = (
    "has the statistics of whole rows in {}: what a document teaches changes with those beside it, and with the number "
    "of ranks. Use a normalization of single tokens (LayerNorm, RMSNorm), or keep these layers in eval()"
)
_BY_CHANCE = (
    "has another gradient each time: it draws random numbers that verify does not find (dropout as an attribute of a "
    "module, or of its config, is off meanwhile), or goes on from what it kept of the step before"
)
_PLACE = (
    "trains something else where documents share a row, though none sees another: positions go on over the row, or the "
    "loss of a document changes with its place in it. Give the model the batch's position_ids"
)
_DIVIDED = (
    "trains something else where documents are divided over context-parallel ranks, though each in a row of its own: "
    "positions are those of this rank's part (give the model the batch's position_ids, and do not make them from the "
    "number of tokens), or attention knows other ranks than those that share the micro-batch"
)
_MIXING = (
    "Give it position_ids that begin anew in every document, no attention_mask, and use_cache=False "
    "(PackedBatch.as_hf() does), or attention that takes cu_seqlens or the shard"
)


@dataclass
class _Explanation:
    name: str
    apart: float
    factor: float
    text: str


class _Prover:
    """Compares a training step with documents alone."""

    def __init__(
        self,
        model: Model,
        train: Train,
        short: Short,
        ranks: Ranks,
        kept: Still,
        accelerator: Any,
        dtype: torch.dtype | None,
        *,
        by_rows: bool,
    ) -> None:
        self._model, self._train, self._short, self._ranks, self._kept = model, train, short, ranks, kept
        self._accelerator, self._by_rows = accelerator, by_rows
        floating = [parameter.dtype for parameter in model.parameters if parameter.is_floating_point()]
        coarsest = max(torch.finfo(kind).eps for kind in [dtype or torch.float32, *floating])
        # Half of the digits: rounding in another order costs fewer, what is wrong costs more.
        self._allowed = math.sqrt(coarsest)
        # Losses of documents are alike where nothing has been learnt, and rounding costs a sum of them even less.
        self._allowed_of_losses = self._allowed / 10

    def checks(self, evaluate: Callable[[Any], Any] | None) -> list[Check]:
        loss, found = self._trained(self._short.step())
        stepped, evaluated = self._ranks.largest(not self._same, not all(map(_trains, self._model.parts)))
        modes = "evaluation" if evaluated else "an optimizer step" if stepped else "training"
        fix = _STEPPED if stepped else _EVALUATION_MODE
        checks = [Check("mode", modes, "training", max(stepped, evaluated), 0.0, fix)]
        mean, expected = self._alone_or_by_rows(right(self._short.rows))
        gradient = self._gradient(found, expected)
        if loss is not None:
            (apart,) = self._ranks.largest(_relative(loss, mean))
            explained = apart <= self._allowed_of_losses or not gradient.passed  # that tells more than a loss
            fix = "" if explained else self._loss_explained(loss, mean)
            checks.append(Check("loss", f"{loss:.6g}", f"{mean:.6g}", apart, self._allowed_of_losses, fix))
        checks.append(gradient)
        if evaluate is not None:
            checks.append(self._evaluation(evaluate, mean))
        return checks

    # --- what is compared ---

    def _trained(self, step: AnyStep) -> tuple[float | None, list[Tensor | None]]:
        """Loss and gradients of training a step; the gradients are taken from the model."""
        self._model.whole.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self._train(step)
        found = self._model.taken()
        scaler = getattr(self._accelerator, "scaler", None)
        if scaler is not None:
            found = [None if gradient is None else gradient / scaler.get_scale() for gradient in found]
        self._same = self._kept.restored()
        return None if loss is None else float(loss), found

    def _alone_or_by_rows(self, runs: list[Run]) -> tuple[float, Gradients]:
        if self._by_rows:
            return self._rows_of_their_own()
        return self._alone(runs)

    def _alone(self, runs: list[Run], *, copies: bool = True) -> tuple[float, Gradients]:
        with torch.enable_grad():
            result = self._model.alone(runs, copies=copies)
        self._kept.restored()
        return result

    def _rows_of_their_own(self) -> tuple[float, Gradients]:
        """The step by `train`, a document of each micro-batch at a time: micro-batches stay as many."""
        count = self._short.num_valid_tokens
        mean = 0.0
        total = [torch.zeros_like(local(parameter)) for parameter in self._model.parameters]
        for place in range(max(len(row.documents) for row in self._short.rows)):

            def only(documents: Sequence[Document], place: int = place) -> list[Document]:
                """That document, or another one that teaches nothing."""
                if place < len(documents):
                    return [documents[place]]
                return [Document(each.tokens, torch.full_like(each.labels, IGNORE)) for each in documents[:1]]

            documents = [only(row.documents)[0] for row in self._short.rows if row.documents]
            labels = sum(int((document.labels != IGNORE).sum()) for document in documents)
            if not labels:
                continue
            loss, found = self._trained(self._short.step(only))
            mean = math.nan if loss is None else mean + loss * labels / count
            for sum_, gradient in zip(total, found, strict=True):
                if gradient is not None:
                    sum_ += gradient * (labels / count)
        return mean, total

    def _gradient(self, found: list[Tensor | None], expected: Gradients) -> Check:
        mine = _filled(found, expected)
        apart = self._apart(mine, expected)
        (length,) = self._sizes(mine)
        fix = ""
        if not self._ranks.largest(length)[0]:  # nothing was compared: that proves nothing
            apart, fix = math.inf, _NOWHERE
        elif apart > self._allowed:
            fix = self._explained(mine, expected, apart)
        (true,) = self._sizes(expected)
        return Check("gradient", f"{length:.6g}", f"{true:.6g}", apart, self._allowed, fix)

    def _evaluation(self, evaluate: Callable[[Any], Any], mean: float) -> Check:
        """The mean loss of an evaluation, against documents alone."""
        with torch.no_grad():
            found = float(evaluate(self._short.step()))
        self._kept.restored()
        (apart,) = self._ranks.largest(_relative(found, mean))
        return Check(
            "evaluation",
            f"{found:.6g}",
            f"{mean:.6g}",
            apart,
            self._allowed_of_losses,
            "gives another mean than that over labels: batches are weighed alike, however many labels they have. Add "
            "up losses times labels, over all ranks, and divide by all labels",
        )

    # --- distances ---

    def _totals(self, pairs: Iterator[tuple[float, ...]]) -> tuple[float, ...]:
        """Sums over all parameters, those that are sharded or on other stages too; the same where ranks agree."""
        mine = list(zip(*pairs, strict=True))
        sums = [math.fsum(column) for column in mine]
        if self._model.sharded:
            sums = self._ranks.sums(*sums)
        return tuple(self._ranks.sums_of_parts(*sums))

    def _sizes(self, *gradients: Gradients) -> tuple[float, ...]:
        """How long each gradient is."""
        totals = self._totals((*(_square(each) for each in of_all),) for of_all in zip(*gradients, strict=True))
        return tuple(map(math.sqrt, totals))

    def _apart(self, found: Gradients, expected: Gradients, factor: float = 1.0) -> float:
        """How far a gradient is from another one times the factor, relative to that; of the rank with the most."""
        away, length = self._totals(
            (_square(mine - factor * true), factor**2 * _square(true))
            for mine, true in zip(found, expected, strict=True)
        )
        return self._ranks.largest(math.sqrt(away / length) if length else math.sqrt(away))[0]

    def _factor(self, found: Gradients, expected: Gradients) -> float:
        """The number that brings the expected gradient nearest to the one found; the same on all ranks."""
        both, length = self._totals(
            (float((mine.double() * true.double()).sum()), _square(true))
            for mine, true in zip(found, expected, strict=True)
        )
        both, length = self._ranks.sums(both, length)
        return both / length if length else 0.0

    # --- what explains it ---

    def _explained(self, found: Gradients, expected: Gradients, apart: float) -> str:
        """The best explanation of all, if it explains what was seen to the last digits."""
        seen = [*self._exchange(found, expected), *self._statistics()]
        if self._by_rows:
            seen += [self._fitted("divisor", found, expected, "{}")]
        else:
            for each in EXPECTATIONS:
                runs = each.runs(self._short.rows)
                if runs:
                    predicted = self._alone(runs, copies=each.copies)[1]
                    seen.append(self._fitted(each.name, found, predicted, each.remedy))
        # What is as near as rounding allows is equally near; of these the first of the table.
        best = min(seen, key=lambda one: max(one.apart, self._allowed / 10))
        if best.apart <= self._allowed:
            divisor = self._divided(best.factor) if best.name == "divisor" or self._known(best.factor) else ""
            text = best.text.format(divisor if best.name == "divisor" else self._mixing())
            return text if best.name == "divisor" or not divisor else f"{text}. Beside that it {divisor}"
        return self._tried(found) or (
            f"has a gradient that is {apart:.1%} off, and no known fault explains it (the nearest is {best.name}, "
            f"which leaves {best.apart:.1%}): is there a loss beside that of labels (a router's, distillation), "
            "clipping or scaling in `train`, and does `alone` call the model as the loop does?"
        )

    def _fitted(self, name: str, found: Gradients, predicted: Gradients, text: str) -> _Explanation:
        factor = self._factor(found, predicted)
        apart = self._apart(found, predicted, factor) if factor > 0 else math.inf
        return _Explanation(name, apart, factor, text)

    def _exchange(self, found: Gradients, expected: Gradients) -> list[_Explanation]:
        """Do ranks have other gradients, whose sum is the right one?"""
        if self._ranks.size == 1 or self._model.sharded:
            return []
        summed = [gradient.clone() for gradient in found]
        self._ranks.add_up(summed)
        if self._apart(found, [gradient / self._ranks.size for gradient in summed]) <= self._allowed:
            return []
        text = _NOT_EXCHANGED
        try:
            if exchanges_gradients(self._model.whole):
                check_wrappers(self._model.whole, self._ranks.share)
        except WlbError as wrong:
            text = str(wrong).partition(" ")[2]
        text = min(self._ranks.gathered(text), key=lambda each: each == _NOT_EXCHANGED)  # the same on every rank
        return [replace(self._fitted("exchange", summed, expected, text), factor=1.0)]

    def _statistics(self) -> list[_Explanation]:
        """Is all well once layers with statistics of batches do not take them?"""
        layers = batch_norms(self._model.whole)
        (some,) = self._ranks.largest(len(layers))
        if not some:
            return []
        train = self._train

        def kept(step: AnyStep) -> Any:
            for layer in layers:
                layer.eval()
            return train(step)

        self._train = kept
        try:
            _, found = self._trained(self._short.step())
            _, expected = self._alone_or_by_rows(right(self._short.rows))
        finally:
            self._train = train
            for layer in layers:
                layer.train()
        names = ", ".join(sorted({type(layer).__name__ for layer in layers}))
        return [self._fitted("batch statistics", _filled(found, expected), expected, _STATISTICS.format(names))]

    def _tried(self, found: Gradients) -> str:
        """What is found out by training changed steps, where nothing that is known explains what was seen."""
        again = _filled(self._trained(self._short.step())[1], found)
        if self._apart(again, found) > self._allowed:
            return _BY_CHANCE
        before = [self._trained(self._short.step(change))[1] for change in (_behind_reversed, _behind_one_token)]
        first = _filled(before[0], found)
        if self._apart(_filled(before[1], found), first) > self._allowed:
            return SEE_EACH_OTHER.format(self._mixing())
        if self._by_rows:
            return ""
        _, rows = self._rows_of_their_own()
        _, expected = self._alone(right(self._short.rows))
        if self._apart(rows, expected, self._factor(rows, expected)) <= self._allowed:
            return _PLACE
        return _DIVIDED if any(row.shard.cp_size > 1 for row in self._short.rows) else ""

    def _mixing(self) -> str:
        """What may mix documents in this model."""
        layers = mixing_layers(self._model.whole)
        return f"It has {layers}: such layers mix documents unless told where one begins" if layers else _MIXING

    def _known(self, factor: float) -> bool:
        """Whether ranks explain the factor."""
        size = self._ranks.size
        return size > 1 and any(abs(factor / value - 1) < 0.05 for value in (1 / size, float(size)))

    def _divided(self, factor: float) -> str:
        size, reason = self._ranks.size, ""
        if self._known(factor):
            reason = f": it is averaged over {size} ranks" if factor < 1 else f": it is added up {size} times over"
        counted = self._counted(factor)
        if counted and not reason:
            return counted
        return (
            f"has {factor:.3g} times the gradient of the mean over all labels{reason}. DistributedDataParallel and "
            "FSDP average unless told otherwise, and trainers divide by accumulated micro-batches: use train_step, or "
            "call sum_gradients(model) once and divide only by the labels of the global batch"
        )

    def _counted(self, factor: float) -> str:
        """Whether labels are counted otherwise: before the shift, or without those that ends of pieces predict."""
        count = self._short.num_valid_tokens
        documents = [document for row in self._short.rows for document in row.documents]
        ends, begun = sum(document.goes_on for document in documents), len(documents)
        for counted in (count - ends, count + begun, count - ends + begun):
            if counted not in (0, count) and abs(factor * counted / count - 1) < self._allowed:
                return (
                    f"is divided by {counted:g} labels where {count:g} are learnt: they are counted before they are "
                    "shifted, with first tokens of documents, or without what the last token of a piece predicts. "
                    "Count those of a batch's num_valid_tokens, or of as_hf()'s shift_labels"
                )
        return ""

    def _loss_explained(self, loss: float, mean: float) -> str:
        """What is said of the loss alone, where the gradient is right."""
        if not self._by_rows:
            for each in EXPECTATIONS:
                runs = each.runs(self._short.rows) if each.name == "means" else []
                if runs and _relative(loss, self._alone(runs)[0]) <= self._allowed_of_losses:
                    return each.remedy
        return self._counted(loss / mean if mean else math.inf) or (
            f"has a loss of {loss:.6g} where its documents alone have {mean:.6g}, "
            f"{loss / mean if mean else math.inf:.4g} times as much: is it the mean over the labels of all ranks?"
        )


def _behind(documents: Sequence[Document], make: Callable[[Tensor], Tensor]) -> list[Document]:
    """The last document, behind others of the same lengths from which nothing is learnt."""
    others = [Document(make(each.tokens), torch.full_like(each.labels, IGNORE)) for each in documents[:-1]]
    return [*others, *documents[-1:]]


def _behind_reversed(documents: Sequence[Document]) -> list[Document]:
    return _behind(documents, lambda tokens: tokens.flip(0))


def _behind_one_token(documents: Sequence[Document]) -> list[Document]:
    return _behind(documents, lambda tokens: torch.full_like(tokens, int(tokens.max())))


def _trains(part: nn.Module) -> bool:
    return unwrapped(part).training


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-30)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _filled(found: Sequence[Tensor | None], like: Gradients) -> Gradients:
    """Gradients, 0 where there are none."""
    return [torch.zeros_like(true) if one is None else one for one, true in zip(found, like, strict=True)]
