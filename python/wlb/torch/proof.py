"""Proof, before the first step, that packing changes nothing that is learnt: on your own model and training step."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import wlb
from wlb._errors import error
from wlb.torch.data.batch import IGNORE, PackedBatch
from wlb.torch.data.step import Step
from wlb.torch.gradients import unwrapped
from wlb.torch.groups import ranks_of_step
from wlb.torch.timing import untimed
from wlb.torch.training import hf_logits, logits_of, meeting_place, takes_input_ids, train_step, untrained

Train = Callable[[Step[PackedBatch]], Any]
Alone = Callable[[nn.Module, Tensor], Tensor]

_DOCUMENTS = 3  # of a micro-batch, in the proof
_TOKENS = 64  # of a document, in the proof


@dataclass(frozen=True)
class Check:
    """One row of a proof.

    Attributes:
        name: What was compared.
        found: What training gives.
        expected: What it has to be.
        error: How far they are apart, relative.
        allowed: How far they may be.
        fix: What is wrong, and what to do; empty if nothing is.
    """

    name: str
    found: str
    expected: str
    error: float
    allowed: float
    fix: str = ""

    @property
    def passed(self) -> bool:
        """Whether that holds."""
        return self.error <= self.allowed


@dataclass(frozen=True)
class Proof:
    """Result of :func:`verify`; printing it shows a table."""

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
    model: nn.Module,
    step: Step[PackedBatch],
    *,
    train: Train | None = None,
    evaluate: Callable[[Step[PackedBatch]], Any] | None = None,
    alone: Alone | Literal["rows"] | None = None,
    loader: Callable[[], Any] | None = None,
    save: Callable[[Any, Step[Any]], Mapping[str, Any]] | None = None,
    group: dist.ProcessGroup | None = None,
    accelerator: Any = None,
    dtype: torch.dtype | None = None,
    report: Callable[[Proof], None] | None = print,
) -> Proof:
    """Proves on your own model that a step trains what its documents, one at a time, would.

    A few documents of the step, 64 tokens of each around its first label, are trained as `train` does, without the
    optimizer, and each is run alone through the model with nothing packed. Compared are

    - **documents**: the step's are those of its plan, each on one rank. (A sampler that was wrapped twice gives every
      rank a part of its part.)
    - **weights**: those of all ranks are equal, unless they are sharded. (Ranks that were seeded apart.)
    - **tied**, where the configuration says that embedding and head are one weight: they are.
    - **apart**: what a document teaches does not change with the tokens of those before it in its row.
      (`use_cache=True`, a mask over the row, convolutions, recurrent states.)
    - **loss**: the mean over all labels of all ranks. (Labels shifted twice; a mean of means.)
    - **gradient**: that of this mean, however many ranks there are. (DDP's and FSDP's division, accumulation that is
      divided by.) Of sharded models, which no rank can run alone, its length against the slope of the loss.
    - **evaluation**, with `evaluate`: the mean over labels.
    - **resume**, with `loader`: a state saved after a step goes on with the next, whatever was fetched meanwhile.

    Collective: every rank of `group` calls it. Before the first step: gradients must not be there, and are not there
    after it. It leaves no trace: parameters, buffers, hooks, divisors of wrappers, modes, `requires_grad` and random
    states of Python, numpy and torch are as they were; dropout is off meanwhile.

    Args:
        model: the outermost wrapper, as it is trained.
        step: what the loader gave, of one context-parallel rank.
        train: forward and backward of a step, as you train it, without the optimizer; gives the mean loss of the step,
            or None. By default `train_step(model, step, group=group, accelerator=accelerator)`.
        evaluate: the mean loss of a step, as you evaluate.
        alone: logits, float[tokens, vocabulary], of the model for the tokens, int64[tokens], of one document. By
            default those of `model(input_ids=..., use_cache=False)`, or of `model(batch)`. "rows", where no rank has
            all of the model or of a document (pipeline, tensor and context parallelism): the same documents in rows of
            their own, trained by `train` too, which does not find what is wrong with both, such as a divisor. All ranks
            there are take part then, and `train` may get more micro-batches than the plan has.
        loader: makes the loader of steps anew, with all that stands between it and the training loop.
        save: what a checkpoint of loader and last trained step holds of the data; by default `step.state`. It is given
            to the new loader's `load_state_dict`.
        group: the ranks that share the global batch; None for all.
        accelerator: as in :func:`train_step`.
        dtype: what the model computes in, where that is coarser than its parameters (mixed precision); by default as
            the accelerator says.
        report: gets the proof before anything is raised; on every rank.

    Returns:
        The proof; all of it passed.

    Raises:
        WlbError: what is wrong, the same on every rank, and what to do about it; or the step has no labels.

    Complexity:
        About four such small steps, and a forward and backward for each of their documents.
    """
    group = ranks_of_step(step, group)
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise error("model", "has gradients: verify before the first step, or after zero_grad()")
    if any(batch.cp_size > 1 for batch in step.micro_batches):
        raise error("step", "is of several context-parallel ranks: make one with cp_size=1 to verify the model with")
    together = _Together(group, next(model.parameters()).device)
    if dtype is None and accelerator is not None:
        dtype = _MIXED.get(accelerator.mixed_precision)
    small = _shortened(step)
    if not any(together.sums(sum(batch.num_valid_tokens for batch in small.micro_batches))):
        raise error("step", "has no label that counts, so that nothing could be proved: verify with another one")
    train = train or (lambda of: train_step(model, of, group=group, accelerator=accelerator))
    if alone == "rows":
        everyone = _Together(dist.group.WORLD if dist.is_initialized() else None, together.device)
        proof = _Prover(model, train, _alone, everyone, dtype)
    else:
        everyone = together
        proof = _Prover(model, train, alone or _alone, together, dtype)
    checks = [_documents(step, together)]
    if together.size > 1 and not proof.sharded:
        checks.append(_weights(model, together))
    checks += _tied(model)
    checks = [replace(check, error=everyone.largest(check.error)[0]) for check in checks]
    with _still(model), untimed():
        checks.append(proof.apart(small))
        checks += proof.against_rows(small) if alone == "rows" else proof.loss_and_gradient(small)
        if evaluate is not None:
            checks.append(proof.evaluation(small, evaluate))
        if loader is not None:
            checks.append(_resume(loader, save or (lambda _, last: last.state), together))
    result = Proof(tuple(checks))
    if report is not None:
        report(result)
    failed = [check for check in result.checks if not check.passed]
    # Labels shifted twice also look across documents: what is known for certain is said first.
    for check in sorted(failed, key=lambda check: "shifted twice" not in check.fix):
        raise error(_ARGUMENTS.get(check.name, "model"), check.fix, value=check.error)
    return result


_NOT_EXCHANGED = (
    "has another gradient on each rank: they are not exchanged before the optimizer steps. Use train_step, a wrapper "
    "such as DistributedDataParallel, or all_reduce_gradients(model)"
)
_SHIFTED_TWICE = (
    "is trained with labels shifted twice: each token learns the one after the next. Those of a PackedBatch are "
    "shifted; models that shift by themselves take batch.as_hf()"
)
_MEAN_OF_MEANS = (
    "has the mean of the means of micro-batches, in which tokens of short ones weigh more: divide sums by the labels "
    "of the whole global batch (train_step, token_normalized_loss)"
)
_WEIGHED = (
    "has a gradient as long as that of the mean over all labels, which points elsewhere: tokens of short micro-batches "
    "weigh more (divide sums by the labels of the whole global batch: train_step, token_normalized_loss), or documents "
    "see each other"
)
_COUNTED_BEFORE = (
    "they are counted before they are shifted, with first tokens of documents, or without what the last token of a "
    "piece predicts. Count those of a batch's num_valid_tokens, or of as_hf()'s shift_labels"
)
# As accelerate calls them.
_MIXED = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
_ARGUMENTS = {"documents": "step", "evaluation": "evaluate", "resume": "loader"}


class _Together:
    """Exchange of values between the ranks of a check."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size = 1 if group is None else dist.get_world_size(group)

    def sums(self, *values: float) -> list[float]:
        return self._reduced(values, dist.ReduceOp.SUM)

    def largest(self, *values: float) -> list[float]:
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: Sequence[float], how: Any) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=meeting_place(self.group, self.device))
        dist.all_reduce(tensor, how, group=self.group)
        return tensor.tolist()

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        if self.size > 1:
            for tensor in tensors:
                dist.all_reduce(tensor, group=self.group)

    def texts(self, text: str) -> list[str]:
        if self.size == 1:
            return [text]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, text, group=self.group)
        return found


# --- the step ---------------------------------------------------------------------------------------------------------


def _shortened(step: Step[PackedBatch]) -> Step[PackedBatch]:
    """A few short documents of every micro-batch: of unequal lengths, and where there are tokens at least two.

    Those with labels are taken first, around their first label, which may stand behind a long prompt; the last one has
    labels if any has. Of a micro-batch with pieces, whose last tokens predict what follows in no row, the first with
    labels is a piece.
    """
    batches = []
    for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=True):
        parts = [(*part, _goes_on(part[1])) for part in _parts(batch)]
        parts.sort(key=lambda part: (not _learns(part[1]), not part[2]))
        documents = [part for part in parts if part[0].numel() > 1 or len(parts) == 1][:_DOCUMENTS]
        documents.sort(key=lambda part: _learns(part[1]))
        if len(documents) == 1 and (half := documents[0][0].numel() // 3) > 1:
            tokens, labels, goes_on = documents[0]
            documents = [(tokens[:half], labels[:half], goes_on), (tokens[half:], labels[half:], goes_on)]
        cut = []
        for place, (tokens, labels, goes_on) in enumerate(documents):
            # Unequal, so that a mean of means is another one.
            length = min(tokens.numel(), _TOKENS // 4 + (29 * (_DOCUMENTS * index + place)) % (_TOKENS * 3 // 4))
            start = _start(labels, length)
            tokens, labels = tokens[start : start + length], labels[start : start + length].clone()
            if not goes_on:
                labels[-1:] = IGNORE
            cut.append((tokens, labels))
        batches.append(_batch(cut, batch))
    return replace(step, micro_batches=batches)


def _learns(labels: Tensor) -> bool:
    return bool((labels != IGNORE).any())


def _start(labels: Tensor, length: int) -> int:
    """Start of a cut of `length` tokens: 0, or such that the document's first label is in its middle."""
    learnt = (labels != IGNORE).nonzero()[:1].flatten().tolist()
    first = learnt[0] if learnt else 0
    return 0 if first < length - 1 else min(first - (length - 1) // 2, labels.numel() - length)


def _goes_on(labels: Tensor) -> bool:
    """Whether it is a piece, whose last token predicts what follows; that of a whole document predicts nothing."""
    return bool((labels[-1:] != IGNORE).any())


def _batch(documents: Sequence[tuple[Tensor, Tensor]], like: PackedBatch) -> PackedBatch:
    empty = like.tokens[:0]
    tokens = torch.cat([empty, *(tokens for tokens, _ in documents)])
    labels = torch.cat([empty, *(labels for _, labels in documents)])
    return PackedBatch.of(
        tokens,
        labels,
        document_ids=list(range(len(documents))),
        shard=wlb.shard(np.array([tokens.numel() for tokens, _ in documents], np.int64), cp_size=1),
        cp_rank=0,
        num_valid_tokens=int((labels != IGNORE).sum()),
    )


def _parts(batch: PackedBatch) -> list[tuple[Tensor, Tensor]]:
    """Tokens of every document, and what each predicts; not of what fills the row up."""
    ends = batch.cu_seqlens[: batch.document_ids.numel() + 1].tolist()
    return [(batch.tokens[start:end], batch.labels[start:end]) for start, end in pairwise(ends)]


def _documents(step: Step[PackedBatch], together: _Together) -> Check:
    """Are the documents of the micro-batches those of the plan, and does every rank have its own?"""
    wrong = 0
    for index, batch in zip(step.indices.tolist(), step.micro_batches, strict=False):
        planned = step.packing[index].lengths
        wrong += not np.array_equal(batch.shard.lengths[: batch.document_ids.numel()], planned)
    wrong += abs(len(step.micro_batches) - len(step.indices))
    mine = f"{step.number}:{step.packing.digest()}:{sorted(step.indices.tolist())}"
    every = together.texts(mine)
    plans = {text.rpartition(":")[0] for text in every}
    dealt = sorted(int(number) for text in every for number in text.rpartition(":")[2][1:-1].split(",") if number)
    others = len(plans) > 1 or dealt != list(range(len(step.packing)))
    (wrong_anywhere,) = together.sums(float(wrong))
    total = len(step.packing)
    return Check(
        "documents",
        "other plans" if others else f"{total - round(wrong_anywhere)} of {total}",
        f"{total} of {total} micro-batches",
        float(others) + wrong_anywhere,
        0.0,
        "holds other documents than its plan: a sampler or a loader is wrapped twice, and shares out again what is "
        "this rank's part already. Keep BalancedBatchSampler and StepLoader out of accelerator.prepare, "
        "use_distributed_sampler=True and DistributedSampler",
    )


def _weights(model: nn.Module, together: _Together) -> Check:
    """Are the replicas of the model equal? Gradients that are the same would keep them as far apart as they are."""
    named = list(model.named_parameters())
    assert together.group is not None
    first = dist.get_global_rank(together.group, 0)
    apart = []
    for _, parameter in named:
        theirs = parameter.detach().clone()
        dist.broadcast(theirs, src=first, group=together.group)
        distance = float((parameter.detach() - theirs).double().norm())
        apart.append(distance / max(float(theirs.double().norm()), 1e-30))
    apart = together.largest(*apart)
    worst = max(range(len(apart)), key=apart.__getitem__)
    return Check(
        "weights",
        f"{sum(found == 0 for found in apart)} alike",
        f"{len(apart)} parameters",
        apart[worst],
        0.0,
        f"has weights that differ between ranks ({named[worst][0]} is {apart[worst]:.1e} apart): seed all ranks alike "
        "before the model is made, load one checkpoint on all, or broadcast its parameters from one rank",
    )


def _tied(model: nn.Module) -> list[Check]:
    """Are embedding and head one weight, where the configuration of a Hugging Face model says so?

    A checkpoint of such a model has one of them, and loads it as both.
    """
    bare: Any = unwrapped(model)
    if not getattr(getattr(bare, "config", None), "tie_word_embeddings", False):
        return []
    ends = [getattr(bare, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")]
    weights = [getattr(end, "weight", None) for end in ends]
    if any(weight is None or not weight.requires_grad for weight in weights):
        return []
    apart = weights[0] is not weights[1]
    fix = (
        "says tie_word_embeddings = True, but its embedding and its head are two weights, of which a checkpoint would "
        "keep one: call model.tie_weights() before wrapping, or make it False"
    )
    return [Check("tied", "two weights" if apart else "one weight", "one weight", float(apart), 0.0, fix)]


# --- the model --------------------------------------------------------------------------------------------------------


@contextmanager
def _still(model: nn.Module) -> Iterator[None]:
    """Without dropout, also where the training step turns it on. A check leaves no trace.

    Modes, gradients, what needs them, buffers (what experts count, say), hooks, divisors of wrappers and random states
    are left as found.
    """
    modules = [
        (module, module.training, module.__dict__.get("train"), {**module._buffers}) for module in model.modules()
    ]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    learning = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    for module, *_ in modules:
        object.__setattr__(module, "train", lambda mode=True, module=module: module)
    try:
        with untrained(model), _random_states():
            yield
    finally:
        for module, mode, train, own in modules:
            module.__dict__.pop("train", None)
            if train is not None:
                object.__setattr__(module, "train", train)
            module.training = mode
            module._buffers.clear()
            module._buffers.update(own)
        model.zero_grad(set_to_none=True)
        for parameter, learns in learning:
            if parameter.requires_grad != learns:
                parameter.requires_grad_(learns)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


@contextmanager
def _random_states() -> Iterator[None]:
    """Puts back those of Python, numpy and torch."""
    python, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  # what users draw from
    kind = torch.accelerator.current_accelerator()
    try:
        with torch.random.fork_rng() if kind is None else torch.random.fork_rng(device_type=kind.type):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)  # noqa: NPY002


def _alone(model: nn.Module, tokens: Tensor) -> Tensor:
    """Logits of one document through the model, with nothing of ours where the model takes plain tokens."""
    if takes_input_ids(model):
        logits = hf_logits(model(input_ids=tokens[None], use_cache=False))
        return logits[0]  # type: ignore[no-any-return]
    batch = _batch([(tokens, torch.full_like(tokens, IGNORE))], _like(tokens))
    return logits_of(model, batch)[0]


def _like(tokens: Tensor) -> PackedBatch:
    shard = wlb.shard(np.empty(0, np.int64), cp_size=1)
    return PackedBatch.of(tokens[:0], tokens[:0], document_ids=[], shard=shard, cp_rank=0, num_valid_tokens=0)


class _Prover:
    """Compares a training step with documents alone."""

    def __init__(
        self, model: nn.Module, train: Train, alone: Alone, together: _Together, dtype: torch.dtype | None
    ) -> None:
        self.model, self.train, self.alone, self.together = model, train, alone, together
        self.device = together.device
        floating = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        coarsest = max(torch.finfo(kind).eps for kind in [dtype or torch.float32, *(each.dtype for each in floating)])
        # Half of the digits: rounding in another order costs fewer, what is wrong costs more.
        self.allowed = math.sqrt(coarsest)
        wrappers = (FSDPModule, FullyShardedDataParallel)
        self.sharded = any(isinstance(module, wrappers) for module in model.modules()) or any(
            isinstance(parameter, DTensor) for parameter in floating
        )

    def apart(self, step: Step[PackedBatch]) -> Check:
        """The gradient of what the last document of every row costs, with other tokens before it.

        The gradient rather than the loss: a model that has learnt nothing yet hardly looks at other tokens.
        """
        runs: list[list[Tensor | None]] = []
        rows = 0
        for tokens_of in (_reversed, _constant):
            batches = []
            for batch in step.micro_batches:
                documents = _parts(batch)
                rows += len(documents) > 1
                before = [(tokens_of(tokens), torch.full_like(labels, IGNORE)) for tokens, labels in documents[:-1]]
                batches.append(_batch([*before, *documents[-1:]], batch))
            runs.append(self._trained(replace(step, micro_batches=batches))[1])
        apart, _ = self._moved(*runs)
        (several,) = self.together.sums(rows / 2)
        return Check(
            "apart",
            f"moved by {apart:.1e}",
            f"0 in {round(several)} rows",
            apart,
            self.allowed,
            "lets documents of a row see each other: what one teaches changes with the tokens of those before it. "
            + self._suspects(),
        )

    def against_rows(self, step: Step[PackedBatch]) -> list[Check]:
        """Loss and gradients of a whole step, against those of a step with a row for each document."""
        found, gradients = self._trained(step)
        rows = [_batch([part], batch) for batch in step.micro_batches for part in _parts(batch)]
        (most,) = self.together.largest(len(rows))
        rows += [_batch([], step.micro_batches[0])] * (round(most) - len(rows))  # wrappers meet in every micro-batch
        expected, of_rows = self._trained(replace(step, micro_batches=rows))
        fix = "than its documents in rows of their own: do they see each other, and do positions begin anew in each?"
        checks = []
        if found is not None and expected is not None:
            (apart,) = self.together.largest(abs(found - expected) / max(abs(expected), 1e-30))
            fixed = f"has a loss of {found:.6g}, another one {fix} Those have {expected:.6g}"
            checks.append(Check("loss", f"{found:.6g}", f"{expected:.6g}", apart, self.allowed, fixed))
        apart, length = self._moved(of_rows, gradients)
        if not length:  # nothing was compared: that proves nothing
            nowhere = (
                "leaves no gradient after a step with labels: it is frozen, or what trains it keeps gradients of its "
                "own, which neither this proof nor the model's zero_grad reaches"
            )
            return [*checks, Check("gradient", "none", "one", math.inf, self.allowed, nowhere)]
        moved = f"moved by {apart:.1e}"
        return [*checks, Check("gradient", moved, f"{length:.6g}", apart, self.allowed, f"has another gradient {fix}")]

    def _moved(self, these: list[Tensor | None], others: list[Tensor | None]) -> tuple[float, float]:
        """Distance of two gradients over all ranks, relative to their length, and that length."""
        moved = length = 0.0
        for one, other in zip(these, others, strict=True):
            if one is None and other is None:
                continue
            present: Any = other if one is None else one
            zero = torch.zeros_like(_local(present)).double()
            mine = zero if one is None else _local(one).double()
            moved += float((mine - (zero if other is None else _local(other).double())).square().sum())
            length += float(mine.square().sum())
        moved, length = self.together.sums(moved, length)
        return math.sqrt(moved / length) if length else math.sqrt(moved), math.sqrt(length)

    def _suspects(self) -> str:
        """Names of modules that may mix documents."""
        found = sorted(
            {
                type(module).__name__
                for module in unwrapped(self.model).modules()
                if isinstance(module, nn.Conv1d | nn.RNNBase | nn.modules.batchnorm._BatchNorm)
                or any(word in type(module).__name__.lower() for word in ("mamba", "deltanet", "rwkv", "lstm", "ssm"))
            }
        )
        if found:
            return f"It has {', '.join(found)}: such layers mix documents unless told where one begins"
        return (
            "Give it position_ids that begin anew in every document, no attention_mask, and use_cache=False "
            "(PackedBatch.as_hf() does), or attention that takes cu_seqlens or the shard"
        )

    def loss_and_gradient(self, step: Step[PackedBatch]) -> list[Check]:
        """Loss and gradients of a whole step, against those of its documents one by one."""
        found, gradients = self._trained(step)
        expected, suspects = self._loss_alone(step)
        checks = []
        if found is not None:
            apart = abs(found - expected) / max(abs(expected), 1e-30)
            fix = self._explained(found, expected, suspects)
            checks.append(Check("loss", f"{found:.6g}", f"{expected:.6g}", apart, self.allowed, fix))
        checks.append(self._slope(step, gradients) if self.sharded else self._gradient(step, gradients))
        return checks

    def evaluation(self, step: Step[PackedBatch], evaluate: Callable[[Step[PackedBatch]], Any]) -> Check:
        """The mean loss of an evaluation, against documents alone."""
        with torch.no_grad():
            found = float(evaluate(step))
        expected = self._loss_alone(step)[0]
        return Check(
            "evaluation",
            f"{found:.6g}",
            f"{expected:.6g}",
            abs(found - expected) / max(abs(expected), 1e-30),
            self.allowed,
            "gives another mean than that over labels: batches are weighed alike, however many labels they have. Add "
            "up losses times labels, over all ranks, and divide by all labels",
        )

    def _trained(self, step: Step[PackedBatch]) -> tuple[float | None, list[Tensor | None]]:
        """Loss and gradients of training a step; the gradients are taken from the model."""
        self.model.zero_grad(set_to_none=True)
        loss = self.train(step)
        gradients = [parameter.grad for parameter in self.model.parameters()]
        self.model.zero_grad(set_to_none=True)
        return None if loss is None else float(loss), gradients

    def _sums_alone(self, step: Step[PackedBatch]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Logits, labels and summed loss of each document alone; equally many on all ranks, because wrappers meet."""
        documents = [part for batch in step.micro_batches for part in _parts(batch)]
        (most,) = self.together.largest(len(documents))
        filler = torch.zeros(1, dtype=torch.int64)
        documents += [(filler, torch.full_like(filler, IGNORE))] * (round(most) - len(documents))
        for tokens, labels in documents:
            tokens, labels = tokens.to(self.device), labels.to(self.device)
            if not self.sharded:
                yield self._of_one(tokens, labels)
                continue
            with torch.enable_grad():
                row = self._of_one(tokens, labels)
                row[2].backward()  # type: ignore[no-untyped-call]  # after which alone all parameters are shards again
            self.model.zero_grad(set_to_none=True)
            logits, labels, total = row
            yield logits.detach(), labels, total.detach()

    def _of_one(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.alone(self.model, tokens).float()
        return logits, labels, nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")

    def _loss_alone(self, step: Step[PackedBatch]) -> tuple[float, list[tuple[float, str]]]:
        """The mean over all labels; and what it would be by each known mistake, with the fix."""
        with torch.no_grad():
            rows = list(self._sums_alone(step))
        total = sum(float(row[2]) for row in rows)
        count = float(sum(int((row[1] != IGNORE).sum()) for row in rows))
        ends = float(sum(_goes_on(row[1]) for row in rows))
        begun = float(sum(len(batch.shard.lengths) for batch in step.micro_batches))
        twice = twice_count = means = 0.0
        at = 0
        for batch in step.micro_batches:
            of_batch = rows[at : at + len(batch.shard.lengths)]
            at += len(of_batch)
            if not of_batch:
                continue
            logits, labels = (
                torch.cat(column) for column in list(zip(*((row[0], row[1]) for row in of_batch), strict=True))
            )
            labels_again = labels.roll(-1)
            labels_again[-1] = IGNORE
            twice += float(nn.functional.cross_entropy(logits, labels_again, ignore_index=IGNORE, reduction="sum"))
            twice_count += int((labels_again != IGNORE).sum())
            own = int((labels != IGNORE).sum())
            means += sum(float(row[2]) for row in of_batch) / own if own else 0.0
        total, count, ends, begun, twice, twice_count, means = self.together.sums(
            total, count, ends, begun, twice, twice_count, means
        )
        suspects = [
            (twice / max(twice_count, 1), _SHIFTED_TWICE),
            (twice / max(count, 1), _SHIFTED_TWICE),
            (means / len(step.packing), _MEAN_OF_MEANS),
        ]
        for counted in (count - ends, count + begun, count - ends + begun):
            if counted not in (0, count):
                fix = f"is divided by {counted:g} labels where {count:g} are learnt: {_COUNTED_BEFORE}"
                suspects.append((total / counted, fix))
        return total / max(count, 1), suspects

    def _explained(self, found: float, expected: float, suspects: list[tuple[float, str]]) -> str:
        for value, fix in suspects:
            if abs(found - value) <= self.allowed * abs(value):
                return fix
        return (
            f"has a loss of {found:.6g} where its documents alone have {expected:.6g}, "
            f"{found / expected if expected else math.inf:.4g} times as much: is it the mean over the labels of all "
            "ranks, do positions begin anew in every document, and are they what the model was built for?"
        )

    def _gradient(self, step: Step[PackedBatch], found: list[Tensor | None]) -> Check:
        """The step's gradients against those of its documents one by one.

        The latter are computed on the model without its wrapper and summed over the ranks here, so that neither the
        wrapper's averages nor its communication are trusted.
        """
        bare = unwrapped(self.model)
        parameters = list(self.model.parameters())
        hooks = [parameter._backward_hooks for parameter in parameters]
        wrapped, self.model = self.model, bare
        try:
            for parameter in parameters:
                parameter._backward_hooks = None  # those of sum_gradients, which are a part of what is tested
            (count,) = self.together.sums(sum(batch.num_valid_tokens for batch in step.micro_batches))
            for _, _, total in self._sums_alone(step):
                (total / max(count, 1)).backward()  # type: ignore[no-untyped-call]
            expected = [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters
            ]
        finally:
            self.model = wrapped
            for parameter, hook in zip(parameters, hooks, strict=True):
                parameter._backward_hooks = hook
                parameter.grad = None
        self.together.add_up(expected)
        difference = norm = product = squares = 0.0
        for gradient, true in zip(found, expected, strict=True):
            mine = torch.zeros_like(true) if gradient is None else gradient
            difference += float((mine - true).double().square().sum())
            norm += float(true.double().square().sum())
            squares += float(mine.double().square().sum())
            product += float((mine.double() * true.double()).sum())
        factor = product / max(norm, 1e-300)
        apart, most, least = self.together.largest(math.sqrt(difference / max(norm, 1e-300)), factor, -factor)
        unlike = most + least > self.allowed
        return Check(
            "gradient",
            f"{math.sqrt(squares):.6g}",
            f"{math.sqrt(norm):.6g}",
            apart,
            self.allowed,
            _NOT_EXCHANGED if unlike else self._divided(factor) if abs(factor - 1) > 0.05 else _WEIGHED,
        )

    def _slope(self, step: Step[PackedBatch], found: list[Tensor | None]) -> Check:
        """Compares the loss's growth along the gradient with the gradient's length, for sharded parameters."""
        parameters = list(self.model.parameters())
        squares = _squares(self.model, found)
        kept = [parameter.detach().clone() for parameter in parameters]

        def loss_at(distance: float) -> float:
            with torch.no_grad():
                for parameter, here, gradient in zip(parameters, kept, found, strict=True):
                    parameter.copy_(here if gradient is None else here + distance * gradient)
            return self._loss_alone(step)[0]

        def slope(distance: float) -> float:
            return (loss_at(distance) - loss_at(-distance)) / (2 * distance)

        try:
            far = 0.02 / max(squares, 1e-30)  # the loss changes by about as much
            measured = (4 * slope(far / 2) - slope(far)) / 3
        finally:
            with torch.no_grad():
                for parameter, here in zip(parameters, kept, strict=True):
                    parameter.copy_(here)
        # Along d = c g, where g is the gradient, the loss grows by c |g|^2, while |d|^2 = c^2 |g|^2.
        factor = squares / measured if measured else math.inf
        return Check(
            "gradient",
            f"{factor:.3g} times",
            "the slope of the loss",
            abs(factor - 1),
            0.1,  # measured by differences; a wrong divisor is two or more
            self._divided(factor),
        )

    def _divided(self, factor: float) -> str:
        size = self.together.size
        reasons = {1 / size: f"it is averaged over {size} ranks", float(size): f"it is added up {size} times over"}
        why = next((reason for value, reason in reasons.items() if size > 1 and abs(factor / value - 1) < 0.05), "")
        return (
            f"has {factor:.3g} times the gradient of the mean over all labels{': ' + why if why else ''}. "
            "DistributedDataParallel and FSDP average unless told otherwise, and trainers divide by accumulated "
            "micro-batches: use train_step, or call sum_gradients(model) once and divide only by the labels of the "
            "global batch"
        )


def _reversed(tokens: Tensor) -> Tensor:
    return tokens.flip(0)


def _constant(tokens: Tensor) -> Tensor:
    """Other tokens of the same vocabulary."""
    return tokens.new_full(tokens.shape, int(tokens.max()))


def _local(tensor: Any) -> Tensor:
    result: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return result


def _squares(model: nn.Module, gradients: list[Tensor | None]) -> float:
    """Sum of all squares over all shards, each once."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        root: Any = model
        norm = root.clip_grad_norm_(math.inf)
        model.zero_grad(set_to_none=True)
    else:
        norm = torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
    return float(norm) ** 2


# --- the data ---------------------------------------------------------------------------------------------------------


def _resume(make: Callable[[], Any], save: Callable[[Any, Step[Any]], Mapping[str, Any]], together: _Together) -> Check:
    """Saves after the first step, when others may have been fetched, and goes on in a new loader."""
    loader = make()
    steps = iter(loader)
    first = next(steps, None)
    (ended,) = together.sums(float(first is None))
    if first is None or ended:
        raise error("loader", "gives no step: verify with more documents")
    state = copy.deepcopy(save(loader, first))
    expected = next(steps, None)  # none after a single one: then none may follow its state either
    again = make()
    again.load_state_dict(state)
    found = next(iter(again), None)
    same = _named(found) == _named(expected)
    (wrong,) = together.sums(float(not same))
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
