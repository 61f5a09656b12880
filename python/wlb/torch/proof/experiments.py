"""The experiments: each changes one thing that must not matter, and compares what a training step then gives."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from wlb._core import WlbError
from wlb.torch.boundaries import unplaced_masks
from wlb.torch.gradients import check_wrappers, exchanges_gradients, unwrapped
from wlb.torch.layers import adds_up_others
from wlb.torch.lazy import local
from wlb.torch.proof.alone import Model, Outcome
from wlb.torch.proof.checks import Check
from wlb.torch.proof.precision import EPS, Precision
from wlb.torch.proof.ranks import Ranks
from wlb.torch.proof.short import Change, Document, Documents, moved_on, teaching_nothing
from wlb.torch.proof.still import Still, look_along_rows

Train = Callable[[Any], Any]

ALLOWED: Final = 1e-4  # of gradients in float32: another order of sums changes less, a fault more
_OF_LOSSES: Final = 0.1  # of what gradients may differ: before training all losses are alike
_ROUNDED: Final = 100 * EPS  # of the largest value, where kernels add up other tokens too

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
    "has gradients that are infinite or no numbers{}: look for weights that are none, a loss divided by 0 labels, "
    "attention over no token, or logarithms of 0; in float16 for a loss that is not scaled"
)
_BY_CHANCE = (
    "has another gradient each time the same step runs ({}): it draws random numbers that verify does not find (it "
    "turns dropout off where a module or its config has it as an attribute), or goes on from the step before"
)
_OTHERS = "lets documents of a row see each other: other tokens in {} change what {} teaches by {:.1e} ({}). {}"
_WITH_HF = (
    "Give it position_ids that begin anew in every document, seq_idx for layers that run along the row, no "
    "attention_mask, and use_cache=False (PackedBatch.as_hf(model) does), or attention that takes cu_seqlens or the "
    "shard, and neither pools nor selects tokens of the whole row. And take the batch's labels, in which prompts are "
    "masked and no document predicts the next one"
)
_MASKS = (
    "{} makes the mask of attention without position ids. Load the model with "
    'attn_implementation="flash_attention_2", which is told cu_seq_lens_q'
)
_HALVES = (
    "teaches other than its halves: the same step, once with the labels of one half of its documents and once with "
    "those of the other, adds up to {:.3g} times its gradient, {:.1e} apart ({}). Something divides by documents, "
    "micro-batches or ranks, or a part of the loss is no sum over labels: divide sums by the labels of the whole "
    "global batch (train_step, token_normalized_loss)"
)
_COMPANY = (
    "trains something else where documents share a row, though none sees another ({}, {:.1e} apart in {}): positions "
    "go on over the row, a scale follows the row's length, or labels are shifted over the borders of documents. Give "
    "it the batch's position_ids, which begin anew in every document, and the batch's labels, which are shifted; do "
    "not make positions from the number of tokens"
)
_UNTOLD = (
    "computes in a precision that the proof cannot leave, in which it could not tell whether positions begin anew in "
    "every document: positions shifted by one document would change gradients by {:.1e}, and {:.1e} is allowed for "
    "rounding. Call wlb.torch.verify once in float32 or with bfloat16 weights (without 8-bit kernels, or FSDP1's "
    "MixedPrecision)"
)
_RANKS = "trains something else than its documents alone on one rank ({:.1e} apart in {}): {}"
_LOOP = (
    "the loss is not that of the batch's labels (shifted twice or not at all, masks left out: take the batch's labels, "
    "which are shifted), micro-batches are left out, or `alone` does not call the model as the loop does{}"
)
_WEIGHED = (
    ", or losses are not multiplied by batch.columns['loss_weights'], which make the mean over {}s that the step means"
)
_DIVIDED = (
    ", or positions are those of a context-parallel rank's part, or attention knows other ranks than those that share "
    "the micro-batch (give it the batch's position_ids and group)"
)
_NOT_EXCHANGED = (
    "has another gradient on each rank: they are not exchanged before the optimizer steps. Use train_step, a wrapper "
    "such as DistributedDataParallel, or all_reduce_gradients(model, step)"
)
_PRECISION = (
    "trains something else in its own precision than in float32 ({:.1e} apart in {}, where rounding explains {:.1e}): "
    "its kernels do not tell documents apart, or gradients are averaged twice. Compare its attention with torch's"
)
_EVALUATED = (
    "gives another mean than that over labels: batches are weighed alike, however many labels they have. Add up losses "
    "times labels, over all ranks, and divide by all labels"
)


@dataclass(frozen=True)
class Apart:
    """The difference of two outcomes, equal on all ranks.

    Attributes:
        gradients: distance of the gradients, relative to the expected ones.
        losses: relative difference of the losses.
        largest: largest difference of an element, relative to the largest element.
        where: the parameter, and the rank if there are several, with the largest distance.
    """

    gradients: float
    losses: float
    largest: float
    where: str

    @property
    def most(self) -> float:
        """The larger of both distances, on the scale of gradients."""
        return max(self.gradients, self.losses / _OF_LOSSES)

    @property
    def is_none(self) -> bool:
        """Whether both outcomes are equal, bit for bit."""
        return self.largest == self.losses == 0


@dataclass
class Experiments:
    """Runs the experiments on a short step.

    Attributes:
        model: the model, or this rank's stages.
        train: the loop: forward and backward of a step.
        short: the step, with short documents.
        ranks: all ranks that take part.
        kept: restores weights and buffers.
        precision: runs the model in float32.
        scaler: the loop's gradient scaler, if it has one.
        by_rows: whether no rank can run a document alone: rows of single documents are then the reference.
        losses_only: whether `train` runs forward only. Gradients that are there stay.
    """

    model: Model
    train: Train
    short: Documents
    ranks: Ranks
    kept: Still
    precision: Precision
    scaler: Any = None
    by_rows: bool = False
    losses_only: bool = False

    def checks(self, evaluate: Callable[[Any], Any] | None) -> Iterator[Check]:
        """The experiments, in the order in which one that fails explains those after it."""
        with self.precision.watched():
            whole = self._run()
        yield self._mode()
        if not self.ranks.largest(self._length(whole.gradients))[0]:
            yield Check("gradient", "none", "one", math.inf, 0.0, _NOWHERE)
        yield from self._finite(whole)
        yield self.others()
        exact = self.precision.is_float32 or not self.precision.has_float32
        with self.precision.finest():
            precise = whole if exact else self._run()
            allowed, moved = (ALLOWED, None) if self.precision.has_float32 else self._coarse(whole)
            yield self._halves(precise, allowed)
            yield self._company(precise, allowed, moved)
            expected = None if self.by_rows else self._singly(whole)
            if expected is not None:
                yield self._one_rank(precise, expected, allowed)
        if not exact:
            yield self._own(whole, precise if expected is None else expected)
        if evaluate is not None:
            yield self._evaluation(evaluate, precise, expected, allowed)

    # --- experiments ---

    def is_exact(self) -> bool:
        """Whether losses stay bit for bit where every second document, then the others, get other tokens."""
        parities = [parity for parity in (0, 1) if self.short.count(_every_second(parity))]
        return all(self._others(parity).is_none for parity in parities)

    def others(self) -> Check:
        """Other tokens in every second document, then in the others: the documents between teach the same."""
        rule, most = "bit for bit", 0.0
        for parity in (0, 1):
            if not self.short.count(_every_second(parity)):
                continue
            apart = self._others(parity)
            if apart.is_none:
                continue
            rule = "in float32"
            with self.precision.finest():
                apart = self._others(parity)
                again = self._apart(self._run(_every_second(parity)), self._run(_every_second(parity)))
                rounds = not again.is_none or any(map(adds_up_others, self.model.whole.modules()))
                (allowed,) = self.ranks.largest(_ROUNDED * rounds)
                if max(apart.largest, apart.losses) > allowed:
                    if max(again.largest, again.losses) > _ROUNDED:
                        return Check("others", "by chance", "the same", again.most, 0.0, _BY_CHANCE.format(again.where))
                    return self._seen(apart, allowed)
            most = max(most, apart.largest)
        return Check("others", f"the same {rule}", "the same", most, _ROUNDED if rule == "in float32" else 0.0)

    def _others(self, parity: int) -> Apart:
        before = self._run(_every_second(parity))
        after = self._run(_every_second(parity), lambda place: place % 2 != parity)
        return self._apart(after, before)

    def _seen(self, apart: Apart, allowed: float) -> Check:
        """Finds the two documents, one of which answers to the other."""
        of, to = "other documents", "a document"
        size = self.short.most_documents
        for kept in range(size):
            of_one = _labels_of(kept.__eq__)
            before = self._run(of_one) if self.short.count(of_one) else None
            for changed in range(size):
                if before is not None and changed != kept:
                    found = self._apart(self._run(of_one, changed.__eq__), before)
                    if max(found.largest, found.losses) > allowed:
                        apart, of, to = found, f"document {changed} of a micro-batch", f"document {kept}"
        names = self._of_parts(look_along_rows(self.model.whole))
        masks = self._of_parts(unplaced_masks(self.model.whole))
        hint = f"It has {', '.join(names)}, which look along the row" if names else _WITH_HF
        if masks:
            hint = _MASKS.format(", ".join(masks))
        fix = _OTHERS.format(of, to, max(apart.most, apart.largest), apart.where, hint)
        return Check("others", "another gradient", "the same", max(apart.largest, apart.losses), 0.0, fix)

    def _of_parts(self, names: list[str]) -> list[str]:
        """Names of all stages."""
        return sorted({each for names in self.ranks.gathered_of_parts(names) for each in names})

    def _halves(self, whole: Outcome, allowed: float) -> Check:
        """The labels of two halves of the documents, one half at a time: the sums add up."""
        total = self._summed([_every_second(0), _every_second(1)], whole)
        apart = self._apart(whole, total)
        fix = _HALVES.format(1 / max(self._factor(whole, total), 1e-30), apart.most, apart.where)
        return self._check("halves", whole, total, apart, allowed, fix)

    def _coarse(self, whole: Outcome) -> tuple[float, float | None]:
        """Allowed distance in a precision that cannot be left, and that of positions shifted by one document.

        The second is None where it exceeds the first, or where documents alone show in float32 that the model knows
        relative positions only.
        """
        alone = self._singly(whole)
        if self.precision.has_float32_alone:
            with self.precision.float32():
                exact = self._singly(whole)
                moved = self._apart(self._singly(whole, moved_on), exact).most
            allowed = max(2 * self._apart(alone, exact).most, ALLOWED)
            if 0 < moved <= ALLOWED:
                return allowed, None
        else:
            moved = self._apart(self._singly(whole, moved_on), alone).most
            allowed = math.sqrt(torch.finfo(torch.bfloat16).eps)  # half of the digits
        return allowed, None if moved > allowed else moved

    def _company(self, whole: Outcome, allowed: float, moved: float | None) -> Check:
        """Another order of the documents; where nothing runs them alone, also a row for each."""
        turned = self._run(_reversed)
        apart = self._apart(turned, whole)
        expected, how = turned, "in another order"
        if self.by_rows and apart.most <= allowed:
            expected, how = self._singly(whole), "each in a row of its own"
            apart = self._apart(whole, expected)
        fix = _COMPANY.format(how, apart.most, apart.where)
        if apart.most <= allowed and moved is not None:
            fix = _UNTOLD.format(moved, allowed)
        if apart.most > allowed and (chance := self._apart(self._run(seed=1), whole)).most > allowed:
            fix = _BY_CHANCE.format(chance.where)
        return replace(self._check("company", whole, expected, apart, allowed, fix), can_tell=moved is None)

    def _one_rank(self, whole: Outcome, expected: Outcome, allowed: float) -> Check:
        """The ranks of the run, with its wrapper and loop, against each document alone on one rank."""
        apart = self._apart(whole, expected)
        fix = ""
        if apart.most > allowed:
            fix = self._of_ranks(whole, expected, apart, allowed)
        return self._check("ranks", whole, expected, apart, allowed, fix)

    def _of_ranks(self, whole: Outcome, expected: Outcome, apart: Apart, allowed: float) -> str:
        if not math.isfinite(apart.gradients):
            return _NO_NUMBERS.format("")
        if fix := self._not_exchanged(whole, expected, allowed):
            return fix
        factor = self._factor(whole, expected)
        scaled = Outcome(whole.loss, [each / factor for each in whole.gradients]) if factor > 0 else whole
        if factor > 0 and self._apart(scaled, expected).gradients <= allowed < apart.gradients:
            text = _divisor(factor, self.ranks.size)
            return text + (". Or give round_step `averaged_over`, by what the loop divides" if self.short.mean else "")
        if apart.gradients <= allowed:
            return (
                f"has a loss of {whole.loss:.6g} where its documents alone have {expected.loss:.6g}, "
                f"{whole.loss / expected.loss if expected.loss and whole.loss else math.inf:.4g} times as much: is it "
                "the mean over the labels of all ranks?"
            )
        rows = self._rows_of_their_own(whole)
        if self._apart(rows, expected).gradients <= allowed:
            return _COMPANY.format("each in a row of its own", apart.most, apart.where)
        weighed = _WEIGHED.format(self.short.mean) if self.short.mean else ""
        text = _LOOP.format(weighed + (_DIVIDED if self.short.divided else ""))
        return _RANKS.format(apart.most, apart.where, text)

    def _own(self, whole: Outcome, expected: Outcome) -> Check:
        """The step in its own precision, against float32: as near as the documents alone are, twice over."""
        rounding = self._apart(self._singly(whole), expected).most
        apart = self._apart(whole, expected)
        fix = _PRECISION.format(apart.most, apart.where, rounding)
        return self._check("precision", whole, expected, apart, max(2 * rounding, ALLOWED), fix)

    def _evaluation(
        self, evaluate: Callable[[Any], Any], whole: Outcome, expected: Outcome | None, allowed: float
    ) -> Check:
        with self.precision.finest(), torch.no_grad():
            found = float(evaluate(self.short.step()))
        self.kept.restored()
        mean = whole.loss if expected is None else expected.loss
        (apart,) = self.ranks.largest(_relative(found, math.nan if mean is None else mean))
        return Check("evaluation", f"{found:.6g}", f"{mean:.6g}", apart, allowed * _OF_LOSSES, _EVALUATED)

    # --- what else a run tells ---

    def _mode(self) -> Check:
        evaluated, stepped = self.ranks.largest(float(not self._trains), float(self._stepped))
        modes = "evaluation" if evaluated else "an optimizer step" if stepped else "training"
        return Check("mode", modes, "training", max(stepped, evaluated), 0.0, _STEPPED if stepped else _EVALUATION_MODE)

    def _finite(self, whole: Outcome) -> Iterator[Check]:
        broken = float(sum(not each.isfinite().all() for each in whole.gradients))
        if self.ranks.largest(broken)[0]:
            yield Check("gradient", "no numbers", "numbers", math.inf, 0.0, _NO_NUMBERS.format(", in training"))

    def _not_exchanged(self, whole: Outcome, expected: Outcome, allowed: float) -> str:
        """The reason why ranks have different gradients, whose sum is the expected one; empty if they have not."""
        if self.ranks.size == 1 or self.model.sharded:
            return ""
        summed = Outcome(whole.loss, [each.clone() for each in whole.gradients])
        self.ranks.add_up(summed.gradients)
        mean = Outcome(whole.loss, [each / self.ranks.size for each in summed.gradients])
        if self._apart(whole, mean).gradients <= allowed:
            return ""
        text = _NOT_EXCHANGED
        try:
            if exchanges_gradients(self.model.whole):
                check_wrappers(self.model.whole, self.ranks.share)
        except WlbError as wrong:
            text = str(wrong).partition(" ")[2]
        texts: list[str] = self.ranks.gathered(text)
        return min(texts, key=lambda each: each == _NOT_EXCHANGED)  # the same on every rank

    # --- runs ---

    def _run(self, change: Change = list, other: Callable[[int], bool] | None = None, seed: int = 0) -> Outcome:
        """Trains a step, from the same random state unless `seed` is another. No gradient is left behind."""
        step = self.short.step(change, other)
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002  # what users draw from
        if self.losses_only:
            loss = self.train(step)
            self.kept.restored()
            return Outcome(float(loss), [])
        self.model.whole.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self.train(step)
        found = self.model.taken()
        self.precision.exchange(found)
        if self.scaler is not None:
            found = [None if gradient is None else gradient / self.scaler.get_scale() for gradient in found]
        if not hasattr(self, "_trains"):
            self._trains = all(unwrapped(part).training for part in self.model.parts)
            self._stepped = False
        self._stepped |= not self.kept.restored()
        filled = [
            torch.zeros_like(local(parameter)) if gradient is None else gradient
            for gradient, parameter in zip(found, self.model.parameters, strict=True)
        ]
        return Outcome(None if loss is None else float(torch.as_tensor(loss).detach()), filled)

    def _singly(self, like: Outcome, change: Change = list) -> Outcome:
        """Mean loss and gradient of the documents, each alone on one rank; in rows of their own if none can run it."""
        if self.by_rows:
            return self._rows_of_their_own(like, change)
        rows = [replace(row, documents=tuple(change(row.documents))) for row in self.short.rows]
        with torch.enable_grad():
            found = self.model.alone(rows)
        self.kept.restored()
        return found

    def _rows_of_their_own(self, like: Outcome, change: Change = list) -> Outcome:
        """As many steps as rows have documents, each with one document of every micro-batch, added up."""
        return self._summed([_only(place, change) for place in range(self.short.most_documents)], like)

    def _summed(self, changes: Sequence[Change], like: Outcome) -> Outcome:
        """The mean of several steps, each with its share of the labels."""
        total = Outcome(None if like.loss is None else 0.0, [torch.zeros_like(each) for each in like.gradients])
        for change in changes:
            share = self.short.count(change) / self.short.count(list)
            if share:
                found = self._run(change)
                if total.loss is not None:
                    total.loss += share * (math.nan if found.loss is None else found.loss)
                for sum_, gradient in zip(total.gradients, found.gradients, strict=True):
                    sum_.add_(gradient, alpha=share)
        return total

    # --- comparisons ---

    def _check(self, name: str, found: Outcome, expected: Outcome, apart: Apart, allowed: float, fix: str) -> Check:
        lengths = self._length(found.gradients), self._length(expected.gradients)
        return Check(name, f"{lengths[0]:.6g}", f"{lengths[1]:.6g}", apart.most, allowed, fix)

    def _apart(self, found: Outcome, expected: Outcome) -> Apart:
        pairs = list(zip(found.gradients, expected.gradients, strict=True))
        squares = [(_square(mine - true), _square(true)) for mine, true in pairs]
        away, length = self._totals(squares)
        elements = [(_largest(mine - true), _largest(true)) for mine, true in pairs]
        losses = [0.0 if found.loss is None or expected.loss is None else _relative(found.loss, expected.loss)]
        elements = elements or [(0.0, 0.0)]
        different, largest, losses[0] = self.ranks.largest(*map(max, zip(*elements, strict=True)), *losses)
        worst = max(range(len(squares)), key=lambda place: squares[place][0], default=0)
        mine = (squares[worst][0] if squares else 0.0, self.model.names[worst] if squares else "")
        every = [place for of_part in self.ranks.gathered_of_parts(self.ranks.gathered(mine)) for place in of_part]
        rank = max(range(len(every)), key=lambda place: every[place][0])
        where = every[rank][1] + (f" on rank {rank}" if len({each[0] for each in every}) > 1 else "")
        distance = math.sqrt(away / length) if length else math.sqrt(away)
        (distance,) = self.ranks.largest(distance)
        return Apart(distance, losses[0], different / largest if largest else different, where)

    def _totals(self, rows: Iterable[tuple[float, float]]) -> tuple[float, float]:
        """Sums over all parameters, including those of other shards and stages. Ranks that agree get the same sums."""
        sums = [math.fsum(column) for column in zip(*rows, (0.0, 0.0), strict=True)]
        if self.model.sharded:
            sums = self.ranks.sums(*sums)
        first, second = self.ranks.sums_of_parts(*sums)
        return first, second

    def _length(self, gradients: Sequence[Tensor]) -> float:
        return math.sqrt(self._totals((_square(each), 0.0) for each in gradients)[0])

    def _factor(self, found: Outcome, expected: Outcome) -> float:
        """The factor that brings the expected gradient nearest to the one found; the same on all ranks."""
        product, length = self._totals(
            (float((mine.double() * true.double()).sum()), _square(true))
            for mine, true in zip(found.gradients, expected.gradients, strict=True)
        )
        return self.ranks.largest(product / length if length else 0.0)[0]


def _divisor(factor: float, size: int) -> str:
    reason = ""
    if size > 1 and abs(factor * size - 1) < 0.05:
        reason = f": it is averaged over {size} ranks"
    elif size > 1 and abs(factor / size - 1) < 0.05:
        reason = f": it is added up {size} times over"
    return (
        f"has {factor:.3g} times the gradient of the mean over all labels{reason}. DistributedDataParallel and FSDP "
        "average unless told otherwise, trainers divide by accumulated micro-batches, and labels may be counted before "
        "they are shifted: use train_step, or call sum_gradients(model) once and divide only by the labels of the "
        "global batch"
    )


def _labels_of(keeps: Callable[[int], bool]) -> Change:
    """Takes the labels of all documents away but of those whose places in their micro-batch are kept."""

    def change(documents: Sequence[Document]) -> list[Document]:
        return [each if keeps(place) else teaching_nothing(each) for place, each in enumerate(documents)]

    return change


def _every_second(parity: int) -> Change:
    return _labels_of(lambda place: place % 2 == parity)


def _only(place: int, before: Change) -> Change:
    """Keeps one document of each micro-batch, after another change; no micro-batch is empty."""

    def change(documents: Sequence[Document]) -> list[Document]:
        changed = before(documents)
        if place < len(changed):
            return [changed[place]]
        return [teaching_nothing(each) for each in changed[:1]]

    return change


def _reversed(documents: Sequence[Document]) -> list[Document]:
    return list(documents)[::-1]


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-30)


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
