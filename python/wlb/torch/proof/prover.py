"""Compares a training step with its documents alone, and names what is wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wlb._core import WlbError
from wlb.torch.gradients import check_wrappers, exchanges_gradients, unwrapped
from wlb.torch.lazy import local
from wlb.torch.proof.alone import Gradients, Model
from wlb.torch.proof.checks import Check
from wlb.torch.proof.expectations import EXPECTATIONS, RIGHT, SEE_EACH_OTHER, Expectation
from wlb.torch.proof.forest_expectations import FOREST_EXPECTATIONS
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short import Document, Short, teaching_nothing
from wlb.torch.proof.short_forest import ShortForest
from wlb.torch.proof.still import Still, batch_norms, mixing_layers
from wlb.torch.training import AnyStep

Train = Callable[[Any], Any]

_EVALUATION_MODE = (
    "is trained in evaluation mode, without dropout and with the statistics that layers keep: call model.train() "
    "before the step (models of from_pretrained are in evaluation mode)"
)
_STEPPED = (
    "has other weights after `train`: it holds an optimizer step. Give verify forward and backward alone (weights are "
    "as they were; the optimizer's state is not)"
)
_NOWHERE = (
    "leaves no gradient after a step with labels: it is frozen, or what trains it keeps gradients of its own, which "
    "neither this proof nor the model's zero_grad reaches"
)
_NO_NUMBERS = (
    "has gradients that are infinite or no numbers, in {}: look for weights that are none, a loss divided by 0 labels, "
    "attention over no token, or logarithms of 0; in float16 for a loss that is not scaled"
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
    "has another gradient each time: it draws random numbers that verify does not find (it turns dropout off where a "
    "module or its config has it as an attribute), or goes on from what it kept of the step before"
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
_COUNTED = (
    "is divided by {:g} labels where {:g} are learnt: they are counted before they are shifted, with first tokens of "
    "documents, or without what the last token of a piece predicts. Count those of a batch's num_valid_tokens, or of "
    "as_hf()'s shift_labels"
)
_EDGES = "is divided by {} edges where samples learn {} predictions: divide by those of count_valid_tokens(step)"
_EVALUATED = (
    "gives another mean than that over labels: batches are weighed alike, however many labels they have. Add up losses "
    "times labels, over all ranks, and divide by all labels"
)


@dataclass(frozen=True)
class _Explanation:
    """A fault, and the distance of the gradient from a multiple of the one that the fault would give."""

    name: str
    apart: float
    factor: float
    text: str


@dataclass
class Prover:
    """Compares a training step with documents alone.

    Attributes:
        model: The model, or this rank's stages.
        train: The loop: forward and backward of a step.
        short: The step, with short documents.
        ranks: All ranks that take part.
        kept: Restores weights and buffers.
        scaler: The loop's gradient scaler, if it has one.
        by_rows: Whether the reference is `train` on documents in rows of their own.
        eps: Rounding of the coarsest type that the model computes in.
    """

    model: Model
    train: Train
    short: Short | ShortForest
    ranks: Ranks
    kept: Still
    scaler: Any
    by_rows: bool
    eps: float

    def __post_init__(self) -> None:
        #         # Half of the digits: another order of sums changes fewer digits, a fault changes more.
        self._allowed = math.sqrt(self.eps)
        #         # Sums of losses are rounded even less. Before training all losses are alike, so a fault changes them
        #         little.
        self._allowed_of_losses = self._allowed / 10

    def checks(self, evaluate: Callable[[Any], Any] | None) -> list[Check]:
        """Trains the step once, runs its documents alone once, and compares."""
        loss, found, same = self._trained(self.short.step())
        trains = all(unwrapped(part).training for part in self.model.parts)
        evaluated, stepped = self.ranks.largest(float(not trains), float(not same))
        modes = "evaluation" if evaluated else "an optimizer step" if stepped else "training"
        fix = _STEPPED if stepped else _EVALUATION_MODE
        checks = [Check("mode", modes, "training", max(stepped, evaluated), 0.0, fix)]
        mean, expected = self._reference()
        gradient = self._gradient(found, expected)
        if loss is not None:
            check = self._loss("loss", loss, mean)
            # A gradient says more about a fault than a loss, so it is reported first.
            explained = check.passed or not gradient.passed
            checks.append(check if explained else replace(check, fix=self._loss_explained(loss, mean)))
        checks.append(gradient)
        if evaluate is not None:
            with torch.no_grad():
                found_mean = float(evaluate(self.short.step()))
            self.kept.restored()
            checks.append(replace(self._loss("evaluation", found_mean, mean), fix=_EVALUATED))
        return checks

    # --- runs ---

    def _trained(self, step: AnyStep) -> tuple[float | None, list[Tensor | None], bool]:
        """Loss and gradients of training a step, and whether weights stayed the same. No gradient is left behind."""
        self.model.whole.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self.train(step)
        found = self.model.taken()
        if self.scaler is not None:
            found = [None if gradient is None else gradient / self.scaler.get_scale() for gradient in found]
        return None if loss is None else float(torch.as_tensor(loss).detach()), found, self.kept.restored()

    def _reference(self) -> tuple[float, Gradients]:
        """Mean loss and gradient of the documents alone."""
        return self._rows_of_their_own() if self.by_rows else self._alone(RIGHT)

    def _alone(self, expectation: Expectation) -> tuple[float, Gradients]:
        """Loss and gradients of an expectation's runs, each row on one rank."""
        with torch.enable_grad():
            result = self.model.alone(expectation.runs(self.short.rows), copies=expectation.copies)
        self.kept.restored()
        return result

    def _rows_of_their_own(self) -> tuple[float, Gradients]:
        """The mean of as many steps by `train` as rows have documents, each with one document of every micro-batch."""
        mean = 0.0
        total = [torch.zeros_like(local(parameter)) for parameter in self.model.parameters]
        for place in range(max(len(row.documents) for row in self.short.rows)):

            def only(documents: Sequence[Document], place: int = place) -> list[Document]:
                if place < len(documents):
                    return [documents[place]]
                return [teaching_nothing(each) for each in documents[:1]]  # no micro-batch is empty

            chosen = [document for row in self.short.rows for document in only(row.documents)]
            share = sum(document.num_labels for document in chosen) / self.short.num_valid_tokens
            if share:
                loss, found, _ = self._trained(self.short.step(only))
                mean += math.nan if loss is None else loss * share
                for sum_, gradient in zip(total, _filled(found, total), strict=True):
                    sum_ += gradient * share
        return mean, total

    # --- comparisons ---

    def _loss(self, name: str, found: float, mean: float) -> Check:
        (apart,) = self.ranks.largest(_relative(found, mean))
        return Check(name, f"{found:.6g}", f"{mean:.6g}", apart, self._allowed_of_losses)

    def _gradient(self, found: list[Tensor | None], expected: Gradients) -> Check:
        mine = _filled(found, expected)
        apart, fix = self._apart(mine, expected), ""
        length, true = self._length(mine), self._length(expected)
        if not self.ranks.largest(length)[0]:  # no rank has a gradient, so nothing was compared
            apart, fix = math.inf, _NOWHERE
        elif math.isinf(apart):
            fix = _NO_NUMBERS.format("training" if math.isfinite(true) else "documents alone")
        elif apart > self._allowed:
            fix = self._explained(mine, expected, apart)
        return Check("gradient", f"{length:.6g}", f"{true:.6g}", apart, self._allowed, fix)

    def _totals(self, rows: Iterable[tuple[float, float]]) -> tuple[float, float]:
        """Sums over all parameters, including those of other shards and stages. Ranks that agree get the same sums."""
        sums = [math.fsum(column) for column in zip(*rows, strict=True)]
        if self.model.sharded:
            sums = self.ranks.sums(*sums)
        first, second = self.ranks.sums_of_parts(*sums)
        return first, second

    def _length(self, gradients: Gradients) -> float:
        return math.sqrt(self._totals((_square(each), 0.0) for each in gradients)[0])

    def _apart(self, found: Gradients, expected: Gradients, factor: float = 1.0) -> float:
        """Distance of a gradient from `factor` times the expected one, relative to that; of the rank with the most."""
        away, length = self._totals(
            (_square(mine - factor * true), factor**2 * _square(true))
            for mine, true in zip(found, expected, strict=True)
        )
        return self.ranks.largest(math.sqrt(away / length) if length else math.sqrt(away))[0]

    def _factor(self, found: Gradients, expected: Gradients) -> float:
        """The factor that brings the expected gradient nearest to the one found; the same on all ranks."""
        sums = self._totals(
            (float((mine.double() * true.double()).sum()), _square(true))
            for mine, true in zip(found, expected, strict=True)
        )
        both, length = self.ranks.sums(*sums)
        return both / length if length else 0.0

    # --- explanations ---

    def _explained(self, found: Gradients, expected: Gradients, apart: float) -> str:
        """Explains a wrong gradient by the nearest known fault, if that explains it up to rounding."""
        seen = [*self._exchange(found, expected), *self._statistics()]
        if self.by_rows:
            seen.append(self._fitted("divisor", found, expected, "{}"))
        else:
            fitted = (self._fitted(of.name, found, self._alone(of)[1], of.remedy) for of in self._expectations())
            seen.extend(fitted)
        #         # Distances below rounding count as equal; the first such fault in the table wins.
        best = min(seen, key=lambda one: max(one.apart, self._allowed / 10))
        if best.apart <= self._allowed:
            if best.name == "divisor":
                #                 # If parts have equally many labels, means weigh them alike, and both faults give this
                #                 gradient.
                alike = (f". Or it {one.text}" for one in seen if one.name == "means" and one.apart <= self._allowed)
                return self._divided(best.factor) + next(alike, "")
            text = best.text.format(self._mixing())
            return text if not self._of_ranks(best.factor) else f"{text}. Beside that it {self._divided(best.factor)}"
        return self._tried(found) or (
            f"has a gradient that is {apart:.1%} off, and no known fault explains it (the nearest is {best.name}, "
            f"which leaves {best.apart:.1%}): is there a loss beside that of labels (a router's, distillation), "
            "clipping or scaling in `train`, and does `alone` call the model as the loop does?"
        )

    def _expectations(self) -> list[Expectation]:
        """The expectations of the table that apply to this layout."""
        return [
            each
            for each in (FOREST_EXPECTATIONS if isinstance(self.short, ShortForest) else EXPECTATIONS)
            if (self.short.divided or not each.divided) and (self.model.is_pipeline or each.copies)
        ]

    def _fitted(self, name: str, found: Gradients, predicted: Gradients, text: str) -> _Explanation:
        factor = self._factor(found, predicted)
        return _Explanation(name, self._apart(found, predicted, factor) if factor > 0 else math.inf, factor, text)

    def _exchange(self, found: Gradients, expected: Gradients) -> list[_Explanation]:
        """Explanation: ranks have different gradients, whose sum is the expected one."""
        if self.ranks.size == 1 or self.model.sharded:
            return []
        summed = [gradient.clone() for gradient in found]
        self.ranks.add_up(summed)
        if self._apart(found, [gradient / self.ranks.size for gradient in summed]) <= self._allowed:
            return []
        text = _NOT_EXCHANGED
        try:
            if exchanges_gradients(self.model.whole):
                check_wrappers(self.model.whole, self.ranks.share)
        except WlbError as wrong:
            text = str(wrong).partition(" ")[2]
        text = min(self.ranks.gathered(text), key=lambda each: each == _NOT_EXCHANGED)  # the same on every rank
        return [replace(self._fitted("exchange", summed, expected, text), factor=1.0)]

    def _statistics(self) -> list[_Explanation]:
        """Explanation: the gradient is right once layers with statistics of batches use their stored statistics."""
        layers = batch_norms(self.model.whole)
        (some,) = self.ranks.largest(len(layers))
        if not some:
            return []
        train = self.train

        def without_statistics(step: AnyStep) -> Any:
            for layer in layers:
                layer.eval()
            return train(step)

        self.train = without_statistics
        try:
            _, found, _ = self._trained(self.short.step())
            _, expected = self._reference()
        finally:
            self.train = train
            for layer in layers:
                layer.train()
        names = ", ".join(sorted({name for names in self.ranks.gathered_of_parts(_names(layers)) for name in names}))
        return [self._fitted("batch statistics", _filled(found, expected), expected, _STATISTICS.format(names))]

    def _tried(self, found: Gradients) -> str:
        """Findings from modified steps, if no known fault explains the gradient; empty if there are none."""
        if self._apart(_filled(self._trained(self.short.step())[1], found), found) > self._allowed:
            return _BY_CHANCE
        # The last document of each row teaches; the tokens before it differ.
        first, second = (
            _filled(self._trained(self.short.step(partial(_last_alone, others=others)))[1], found)
            for others in (lambda tokens: tokens, lambda tokens: torch.full_like(tokens, int(tokens.max())))
        )
        if self._apart(second, first) > self._allowed:
            return SEE_EACH_OTHER.format(self._mixing())
        if self.by_rows:
            return ""
        _, rows = self._rows_of_their_own()
        _, expected = self._alone(RIGHT)
        if self._apart(rows, expected, self._factor(rows, expected)) <= self._allowed:
            return _PLACE
        return _DIVIDED if self.short.divided else ""

    def _mixing(self) -> str:
        """Parts of this model that may mix documents."""
        layers = mixing_layers(self.model.whole)
        return f"It has {layers}: such layers mix documents unless told where one begins" if layers else _MIXING

    def _of_ranks(self, factor: float) -> str:
        """Explanation of a wrong factor by the number of ranks; empty if there is none."""
        size = self.ranks.size
        if size > 1 and abs(factor * size - 1) < 0.05:
            return f"it is averaged over {size} ranks"
        return f"it is added up {size} times over" if size > 1 and abs(factor / size - 1) < 0.05 else ""

    def _divided(self, factor: float) -> str:
        reason = self._of_ranks(factor)
        if not reason and (counted := self._counted(factor)):
            return counted
        return (
            f"has {factor:.3g} times the gradient of the mean over all labels{': ' if reason else ''}{reason}. "
            "DistributedDataParallel and FSDP average unless told otherwise, and trainers divide by accumulated "
            "micro-batches: use train_step, or call sum_gradients(model) once and divide only by the labels of the "
            "global batch"
        )

    def _counted(self, factor: float) -> str:
        """Explanation of a wrong factor by another count of labels; empty if there is none."""
        count = self.short.num_valid_tokens
        documents = [document for row in self.short.rows for document in row.documents]
        ends, begun = sum(document.goes_on for document in documents), len(documents)
        for counted in (count - ends, count + begun, count - ends + begun):
            if counted not in (0, count) and abs(factor * counted / count - 1) < self._allowed:
                return _COUNTED.format(counted, count)
        edges = self.short.num_edges
        if edges != count and abs(factor * edges / count - 1) < self._allowed:
            return _EDGES.format(edges, count)
        return ""

    def _loss_explained(self, loss: float, mean: float) -> str:
        """Explanation of a wrong loss whose gradient is right."""
        for each in [] if self.by_rows else self._expectations():
            if each.name == "means" and _relative(loss, self._alone(each)[0]) <= self._allowed_of_losses:
                return each.remedy
        factor = loss / mean if mean else math.inf
        return self._counted(factor) or (
            f"has a loss of {loss:.6g} where its documents alone have {mean:.6g}, {factor:.4g} times as much: is it "
            "the mean over the labels of all ranks?"
        )


def _last_alone(documents: Sequence[Document], others: Callable[[Tensor], Tensor]) -> list[Document]:
    """Documents of which only the last has labels; `others` changes the tokens of those before it."""
    before = [replace(teaching_nothing(each), tokens=others(each.tokens)) for each in documents[:-1]]
    return [*before, *documents[-1:]]


def _names(modules: Sequence[torch.nn.Module]) -> set[str]:
    return {type(module).__name__ for module in modules}


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-30)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _filled(found: Sequence[Tensor | None], like: Gradients) -> Gradients:
    """Gradients, with 0 for missing ones."""
    return [torch.zeros_like(true) if one is None else one for one, true in zip(found, like, strict=True)]
