"""Proves from a run's ledger that every document was trained once an epoch, or names the first difference.

It checks that the chain of lines and states is unbroken, that all ranks trained the same plan, and that every token of
every document was trained once. docs/semantics.md says exactly what is proved.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wlb._errors import error
from wlb._seal import check_seal
from wlb.ledger import FORMAT, VERSION, Pieces, Share, plan_hash, read_line, waiting_pieces

_NAMED: Final = 5  # most documents that a finding names
_ENDLESS: Final = 1 << 62  # documents of a stream's only epoch


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        text: what is wrong.
        step: the first step that shows it; None: only all steps together show it.
        rank: the data-parallel rank, if it concerns one rank.
        documents: the first few documents that it concerns: (epoch, document).
    """

    text: str
    step: int | None = None
    rank: int | None = None
    documents: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """One line: where, and what."""
        where = [f"{name} {value}" for name, value in (("step", self.step), ("rank", self.rank)) if value is not None]
        return f"{', '.join(where)}: {self.text}" if where else self.text


@dataclass(frozen=True)
class EpochAudit:
    """The trained part of one epoch.

    Attributes:
        epoch: its number; 0 for a stream.
        read: number of its documents that were read; None if the ledger does not know.
        trained: number of documents all of whose known pieces were trained once. While pieces wait, some of these
            documents may still lack their end, unless a state or lengths are given; `Audit.proof` says how many.
        waiting: number of documents that were read and not yet trained completely.
        tokens: tokens trained.
    """

    epoch: int
    read: int | None
    trained: int
    waiting: int
    tokens: int


@dataclass(frozen=True)
class Audit:
    """The result of `audit`.

    Attributes:
        findings: what is wrong, in the order of steps; empty: the run is sound.
        unproved: what can be neither proved nor disproved: a last step of which not all ranks have a line (a rank was
            killed, or a file lost its end), a run that begins again at step 0 after others, plans whose hash cannot be
            computed from the ledger.
        first_step: number of the first step in the ledger.
        num_steps: number of proved steps from there: all before the first finding, or none if the step of a finding is
            not known.
        state: digest of the state after the last proved step. The run may resume from it, or from an earlier one.
        epochs: what was trained of each epoch up to there.
        superseded: lines of steps that were trained again after a resume.
        proof: why documents are known to be complete, in words.
    """

    findings: tuple[Finding, ...]
    unproved: tuple[Finding, ...]
    first_step: int
    num_steps: int
    state: str | None
    epochs: tuple[EpochAudit, ...]
    superseded: int
    proof: str

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def sentences(self) -> list[str]:
        """The audit in sentences: each finding with its documents, then how many steps are proved."""
        found = []
        for finding in self.findings:
            found.append(f"✗ {finding}")
            found += (f"    document {document} of epoch {epoch}" for epoch, document in finding.documents)
        if self.sound:
            found.append(f"✓ Sound: {self.proof}.")
        found += (f"? Not proved: {finding}" for finding in self.unproved)
        if self.superseded:
            steps = "step" if self.superseded == 1 else "steps"
            found.append(f"{self.superseded:,} {steps} trained anew after going back to a checkpoint.")
        if not self.num_steps:
            return [*found, "No step holds: go on from nothing that this run has saved."]
        last = self.first_step + self.num_steps - 1
        return [
            *found,
            f"Steps {self.first_step} to {last} hold, {self.num_steps} in all. A run may go on from the checkpoint "
            f"after them, whose state is {self.state}, or from one before it.",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "sound": self.sound,
            "findings": [{**vars(finding), "documents": list(finding.documents)} for finding in self.findings],
            "unproved": [{**vars(finding), "documents": list(finding.documents)} for finding in self.unproved],
            "first_step": self.first_step,
            "num_steps": self.num_steps,
            "state": self.state,
            "epochs": [vars(epoch) for epoch in self.epochs],
            "superseded": self.superseded,
            "proof": self.proof,
        }


def audit(folder: str | Path, *, state: Mapping[str, Any] | None = None, lengths: NDArray[Any] | None = None) -> Audit:
    """Reads a ledger and proves what was trained, up to its end or to the first step with a finding.

    It proves step by step: every rank has an unchanged line, after that of the step before, of the same plan and
    states; the ranks trained this plan; each step begins at the state that the step before left; no token of a document
    was trained twice; and no more documents are missing than wait in the packer, none if nothing waits. What cannot be
    proved is in `Audit.unproved`.

    Args:
        folder: has the files of all ranks.
        state: a state that this run saved, as the loader returned it. It has the documents that wait, so everything up
            to it is proved to the last token. Later steps are ignored.
        lengths: int [documents], tokens of each: also proves the ends of documents while others wait, and of documents
            that the packer truncates.

    Raises:
        wlb.WlbError: there is no ledger in the folder; the state was changed after it was saved; or the number of
            lengths is not that of documents.

    Complexity:
        O(pieces log pieces) time; 40 bytes of memory a piece.
    """
    ranks = _read_folder(Path(folder))
    if state is not None:
        check_seal(state)
    about = ranks[0].about[-1]
    if lengths is not None and about["documents"] not in (None, lengths.size):
        message = f"has {lengths.size} documents; the ledger is of {about['documents']}"
        raise error("lengths", message, value=lengths.size)
    findings = [finding for rank in ranks.values() for finding in rank.findings]
    steps, diverged, unproved = _walk(ranks, None if state is None else int(state["step"]))
    diverged += _other_plans(steps)
    findings += diverged
    waiting = None
    if state is not None:
        findings += _belongs(state, steps)
        waiting = _waiting_in(state)
    coverage = _Coverage.of(steps, about, waiting, lengths)
    findings += coverage.findings
    findings.sort(
        key=lambda finding: (finding.step is None, finding.step or 0, finding.rank is None, finding.rank or 0)
    )
    unproved += _begun_anew(ranks[0]) + _unhashed(steps)
    until = min((0 if finding.step is None else finding.step for finding in findings), default=len(steps))
    sound = [line for line in steps if line["step"] < until]
    return Audit(
        findings=tuple(findings),
        unproved=tuple(unproved),
        first_step=steps[0]["step"] if steps else 0,
        num_steps=len(sound),
        state=sound[-1]["state"] if sound else None,
        epochs=coverage.epochs,
        superseded=ranks[0].superseded,
        proof=coverage.proof,
    )


@dataclass
class _RankLedger:
    """The file of one rank.

    Attributes:
        lines: the valid line of each step, with the `dp_size` of its run; later lines supersede earlier ones.
        about: the first line of every run.
        superseded: number of lines of steps that later runs trained again.
        findings: damaged lines.
        torn: whether the file ends inside a line.
    """

    lines: dict[int, dict[str, Any]]
    about: list[dict[str, Any]]
    superseded: int
    findings: list[Finding]
    torn: bool


def _read_folder(folder: Path) -> dict[int, _RankLedger]:
    ranks = {}
    for path in sorted(folder.glob("ledger-*.jsonl")):
        number = path.stem.removeprefix("ledger-")
        if number.isdigit():
            ranks[int(number)] = _read_file(path, int(number))
    if 0 not in ranks or not ranks[0].about:
        raise error("folder", f"= {str(folder)!r} has no ledger of rank 0 (ledger-00000.jsonl)", value=str(folder))
    return ranks


def _read_file(path: Path, rank: int) -> _RankLedger:
    texts = path.read_bytes().split(b"\n")
    result = _RankLedger({}, [], 0, [], bool(texts[-1]))
    cut_off: int | None = None  # number of a broken line, perhaps of a run that died while it wrote
    after: str | None = None
    next_step = 0
    for number, text in enumerate([*texts[:-1], None], start=1):
        line, check = (None if not text else read_line(text)) or (None, None)
        begins = line is not None and "format" in line
        if cut_off is not None and not begins:
            at = max(result.lines, default=-1) + 1
            result.findings.append(Finding(f"line {cut_off} of {path.name} was changed or is damaged", at, rank))
        cut_off = number if text and line is None else None
        if line is None:
            continue
        moved = line.get("after") != after or (not begins and line["step"] < next_step)
        after, next_step = check, line["step"] + (not begins)
        if begins:
            if (line["format"], line["version"]) != (FORMAT, VERSION):
                message = f"has {path.name} of {line['format']} {line['version']}; this wlb reads {FORMAT} {VERSION}"
                raise error("folder", message, value=line["version"])
            anew = [step for step in result.lines if step >= line["step"]]
            for step in anew:
                del result.lines[step]
            result.superseded += len(anew)
            result.findings = [found for found in result.findings if (found.step or 0) < line["step"]]
            result.about.append(line)
        elif result.about:
            result.lines[line["step"]] = {**line, "dp_size": result.about[-1]["dp_size"]}
        else:
            result.findings.append(Finding(f"{path.name} has no beginning", line["step"], rank))
        if moved and cut_off is None:
            note = f"line {number} of {path.name} was not written after the one above it: lines are swapped, doubled "
            result.findings.append(Finding(f"{note}or left out", min(line["step"], next_step), rank))
    return result


_AGREED: Final = {
    "dp_size": "number of ranks",
    "plan": "plan",
    "previous": "state before the step",
    "state": "state",
    "epoch": "epoch",
    "read": "number of documents read",
    "waiting": "number of documents waiting",
}


def _walk(
    ranks: Mapping[int, _RankLedger], until: int | None
) -> tuple[list[dict[str, Any]], list[Finding], list[Finding]]:
    """The proved steps, each as rank 0's line with the "parts" of all ranks; and why they end."""
    main = ranks[0]
    corpora = [(rank, about) for rank, of in ranks.items() for about in of.about]
    for rank, about in corpora:
        for name in ("documents", "tokens", "fingerprint"):
            if about[name] != main.about[0][name]:
                text = f"trains other documents: {name} = {about[name]}, rank 0 began with {main.about[0][name]}"
                return [], [Finding(text, about["step"], rank)], []
    steps: list[dict[str, Any]] = []
    numbers = sorted(step for step in main.lines if until is None or step < until)
    if not numbers and until is None and _further(ranks) > 0:
        return [], [Finding("is not in the ledger of rank 0, but others have later ones", 0, 0)], []
    if not numbers:
        return [], [], []
    if numbers[0]:
        return [], [Finding(f"the ledger begins here: {numbers[0]} steps before are not in it", numbers[0])], []
    for expected, number in enumerate(numbers):
        line = main.lines[number]
        if number != expected:
            return steps, [Finding("is not in the ledger of rank 0", expected, 0)], []
        if steps and line["previous"] != steps[-1]["state"]:
            text = f"begins at state {line['previous']}; the step before left {steps[-1]['state']}"
            return steps, [Finding(text, number)], []
        parts = []
        for rank in range(line["dp_size"]):
            theirs = ranks[rank].lines.get(number) if rank in ranks else None
            if theirs is None:
                if number == max(main.lines):  # killed before this rank wrote its last line
                    return steps, [], [Finding(_KILLED, number, rank)]
                return steps, [Finding("is not in the ledger of this rank", number, rank)], []
            for name, what in _AGREED.items():
                if theirs[name] != line[name]:
                    text = f"has another {what} than rank 0: {theirs[name]} instead of {line[name]}"
                    return steps, [Finding(text, number, rank)], []
            share = None
            if theirs["pieces"] is not None:
                try:
                    share = _share(theirs)
                except (ValueError, TypeError, zlib.error) as cause:
                    return steps, [Finding(f"has pieces that cannot be read: {cause}", number, rank)], []
            parts.append(share)
        pieces = [None if share is None else share.pieces for share in parts]
        steps.append({**line, "parts": pieces, "shares": parts})
    if until is None and _further(ranks) > len(steps):
        return steps, [Finding("is not in the ledger of rank 0, but others have later ones", len(steps), 0)], []
    if until is None and _further(ranks) == len(steps) > 0:
        return steps, [], [Finding(_KILLED, len(steps), 0)]
    torn = [rank for rank, of in ranks.items() if of.torn and until is None]
    return steps, [], [Finding("the ledger of this rank ends inside a line", len(steps), rank) for rank in torn]


_KILLED: Final = "is not in the ledger of this rank: it was killed before its line, or the line was cut off"


def _share(line: Mapping[str, Any]) -> Share:
    """The share of the step that the rank of this line trained; without micro-batches under Dynamic-CP."""
    if line["micro_batches"] is None:
        return Share((), Pieces.decode(line["pieces"]))
    return Share.decode(line)


def _has_hash(line: Mapping[str, Any]) -> bool:
    """Whether the hash of this step's plan can be computed from the ledger."""
    return all(share is not None and (share.micro_batches or not share.pieces.ids.size) for share in line["shares"])


def _other_plans(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Finds steps whose ranks did not train their plan."""
    others = (line["step"] for line in steps if _has_hash(line) and plan_hash(line["shares"]) != line["plan"])
    text = "its ranks' pieces are not those of its plan: one of them, or the plan's hash, was changed"
    return [Finding(text, step) for step in others]


def _unhashed(steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Reports steps whose plans are known only by their digests."""
    unknown = [line["step"] for line in steps if not _has_hash(line)]
    if not unknown:
        return []
    text = "the plan has a digest, the same on all ranks, that is not computed again from what they trained: which "
    text += f"rank trained which pieces is what each says of itself ({len(unknown)} such steps)"
    return [Finding(text, unknown[0])]


def _begun_anew(main: _RankLedger) -> list[Finding]:
    """Reports that a run began at step 0 after other runs."""
    anew = sum(about["step"] == 0 for about in main.about) - 1
    if anew < 1:
        return []
    text = "a run begins anew here, in the folder of an earlier one, whose steps no longer count: if its model did not "
    text += "begin anew, too, it was trained on them as well. Give every run a folder of its own"
    return [Finding(text, 0)]


def _further(ranks: Mapping[int, _RankLedger]) -> int:
    """The last step of rank 0's latest run for which any rank has a line; -1 for none."""

    def runs(rank: int) -> list[tuple[Any, ...]]:
        return [(about["step"], about["previous"], about["dp_size"]) for about in ranks[rank].about]

    # Runs with the same beginning on all ranks: a rank killed before its first line has only lines of an earlier run.
    latest = runs(0)[-1]
    alike = [
        rank for rank in ranks if runs(rank)[-1:] == [latest] and runs(rank).count(latest) == runs(0).count(latest)
    ]
    return max((step for rank in alike for step in ranks[rank].lines), default=-1)


def _belongs(state: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> list[Finding]:
    """Checks that the chain of steps leads to a state."""
    number = int(state["step"])
    head = state["previous"] if state["moved"] else state["digest"]
    if number > len(steps):
        return [Finding(f"the state is of step {number}; the ledger holds up to step {len(steps)}", len(steps))]
    if number and steps[number - 1]["state"] != head:
        text = f"leaves state {steps[number - 1]['state']}, but the state given is {head}: it is of another run"
        return [Finding(text, number - 1)]
    return []


def _waiting_in(state: Mapping[str, Any]) -> Pieces | None:
    """The pieces that wait in a state; None if it has no packer."""
    inner = state.get("batches", state)
    return waiting_pieces(inner) if isinstance(inner, Mapping) and "packer" in inner else None


@dataclass(frozen=True)
class _Coverage:
    """Which documents the trained pieces cover.

    Attributes:
        findings: what is wrong.
        epochs: the epochs, one by one.
        proof: why documents are known to be complete, in words.
    """

    findings: list[Finding]
    epochs: tuple[EpochAudit, ...]
    proof: str

    @classmethod
    def of(
        cls,
        steps: Sequence[Mapping[str, Any]],
        about: Mapping[str, Any],
        waiting: Pieces | None,
        lengths: NDArray[Any] | None,
    ) -> _Coverage:
        """Coverage of documents by these steps, on which all ranks agree."""
        if not steps:
            return cls([], (), "no step was recorded by all ranks")
        if any(part is None for line in steps for part in line["parts"]):
            return cls([], (), "plans and states agree; which documents they are of is not known")
        if steps[-1]["read"] is None:
            return cls([], (), "plans and states agree; how many documents were read is not known")
        documents = about["documents"]
        per_epoch = documents or _ENDLESS
        trained = Pieces.of(*([getattr(part, name) for line in steps for part in line["parts"]] for name in _NAMES))
        sizes = [(line["step"], rank, part.ids.size) for line in steps for rank, part in enumerate(line["parts"])]
        step_of = np.repeat([step for step, _, _ in sizes], [size for *_, size in sizes])
        rank_of = np.repeat([rank for _, rank, _ in sizes], [size for *_, size in sizes])
        findings = _skipped(steps, documents) + _twice(trained, step_of, rank_of, per_epoch)

        last = steps[-1]
        read = np.array([line["epoch"] * (documents or 0) + line["read"] for line in steps])
        pieces_waiting = np.array([line["waiting"][0] for line in steps])
        seen, first = np.unique(trained.ids, return_index=True)
        limit = int(read[-1]) if documents is None else (last["epoch"] + 1) * documents
        if seen.size and seen[-1] >= limit:
            at = int(step_of[trained.ids >= limit].min())
            strange = tuple(_names(seen[seen >= limit], per_epoch))
            findings.append(Finding("trains documents that were not read", at, documents=strange))
        # Documents that are untrained after each step: they wait, or are lost.
        by_step = np.bincount(step_of[first], minlength=len(steps))[: len(steps)].cumsum()
        untrained = read - by_step
        if (lost := np.flatnonzero(untrained > pieces_waiting)).size:
            at = int(lost[0])
            count = int(untrained[at] - pieces_waiting[at])
            text = f"{_counted(count)} neither trained nor waiting"
            of_all = _untrained(seen, waiting, int(read[-1]), per_epoch) if waiting or not last["waiting"][0] else []
            findings.append(Finding(text, steps[at]["step"], documents=tuple(of_all[:_NAMED])))
        if (more := np.flatnonzero(untrained < 0)).size:
            findings.append(Finding("trains documents that were not read", steps[int(more[0])]["step"]))
        if findings:
            return cls(findings, (), "broken off at what does not hold")

        whole = _CompleteDocuments(trained, per_epoch, about["longest"], lengths)
        rest = last["waiting"]
        if waiting is not None:
            findings += whole.with_waiting(waiting, int(read[-1]))
            proof = "every token of every document read was trained once or waits in the state given"
        elif rest[0]:
            missing = int(read[-1]) - int(whole.complete.sum())
            if missing > rest[0]:
                findings.append(Finding(f"{_counted(missing)} incomplete, but only {rest[0]} pieces wait"))
            # A document whose last piece waits has no gap before it. Every incomplete document has a waiting piece.
            open_ended = 0 if lengths is not None else min(rest[0] - missing, int(whole.complete.sum()))
            pieces = "1 piece of a document waits" if rest[0] == 1 else f"{rest[0]} pieces of documents wait"
            proof = f"no token was trained twice; {_counted(missing)} incomplete, and {pieces}"
            if open_ended > 0:
                some, their = ("1 document", "its") if open_ended == 1 else (f"up to {open_ended} documents", "their")
                proof += f", so that {some} counted as trained may lack {their} end"
            proof += ": give a state to prove that they are the same"
        else:
            findings += whole.without_waiting(int(read[-1]))
            proof = "every document read was trained once; nothing waits"
        if not findings and documents and about["longest"] is None and lengths is None:
            findings += _all_tokens(trained, waiting, last, documents, about["tokens"])
        return cls(findings, whole.epochs(last, documents), proof)


_NAMES: Final = ("ids", "starts", "lengths")


def _all_tokens(
    trained: Pieces, waiting: Pieces | None, last: Mapping[str, Any], documents: int, tokens: int
) -> list[Finding]:
    """Checks that epochs that were read to their end have all their tokens, if the tokens that wait are known."""
    epochs = last["epoch"] + (last["read"] == documents)
    if waiting is None and last["waiting"][0] and last["read"] not in (0, documents):
        return []
    found = int(trained.lengths[trained.ids < epochs * documents].sum())
    found += last["waiting"][1] if waiting is None else int(waiting.lengths[waiting.ids < epochs * documents].sum())
    if found == epochs * tokens:
        return []
    return [Finding(f"{found} tokens were trained or wait, but the documents read have {epochs * tokens}")]


def _skipped(steps: Sequence[Mapping[str, Any]], documents: int | None) -> list[Finding]:
    """Finds epochs that were left before all of them was read."""
    for before, line in itertools.pairwise(steps):
        if documents and line["epoch"] != before["epoch"]:
            unread = documents - before["read"] + (line["epoch"] - before["epoch"] - 1) * documents
            if unread:
                return [
                    Finding(f"epoch {line['epoch']} begins; {_counted(unread)} of those before not read", line["step"])
                ]
    if documents and steps[0]["epoch"]:
        return [Finding(f"the run begins with epoch {steps[0]['epoch']}", steps[0]["step"])]
    return []


def _twice(trained: Pieces, step_of: NDArray[Any], rank_of: NDArray[Any], per_epoch: int) -> list[Finding]:
    """Finds the first step that trains tokens again, or tokens that another rank trains."""
    order = np.lexsort((trained.starts, trained.ids))
    ids, starts, ends = trained.ids[order], trained.starts[order], (trained.starts + trained.lengths)[order]
    again = np.flatnonzero((ids[1:] == ids[:-1]) & (starts[1:] < ends[:-1]))
    if not again.size:
        return []
    earlier, later = order[again], order[again + 1]
    second = np.where(step_of[earlier] > step_of[later], earlier, later)
    worst = int(second[step_of[second].argmin()])
    in_step = np.unique(trained.ids[second[step_of[second] == step_of[worst]]])
    text = f"{_counted(np.unique(ids[again]).size)} trained twice, the first of them here"
    names = tuple(_names(in_step, per_epoch))
    return [Finding(text, int(step_of[worst]), int(rank_of[worst]), names)]


class _CompleteDocuments:
    """Checks that documents are complete: pieces do not overlap and reach from the first token to the last."""

    def __init__(self, trained: Pieces, per_epoch: int, longest: int | None, lengths: NDArray[Any] | None) -> None:
        self.trained, self.per_epoch, self.longest, self.lengths = trained, per_epoch, longest, lengths
        self.ids, self.complete, self.tokens = self._complete(trained)

    def _complete(self, pieces: Pieces) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]]:
        """The ids of documents that have pieces, whether each is complete, and its tokens in these pieces."""
        ids, row = np.unique(pieces.ids, return_inverse=True)
        tokens, ends = np.zeros(ids.size, np.int64), np.zeros(ids.size, np.int64)
        np.add.at(tokens, row, pieces.lengths)
        np.maximum.at(ends, row, pieces.starts + pieces.lengths)
        complete = tokens == ends
        if self.lengths is not None:
            whole = np.asarray(self.lengths[ids % self.per_epoch], np.int64)
            complete &= tokens == (whole if self.longest is None else np.minimum(whole, self.longest))
        return ids, complete, tokens

    def with_waiting(self, waiting: Pieces, read: int) -> list[Finding]:
        """Checks that trained and waiting pieces together are everything that was read, once."""
        together = Pieces.of(*([getattr(self.trained, name), getattr(waiting, name)] for name in _NAMES))
        nowhere = np.zeros(together.ids.size, np.int64)
        if again := _twice(together, nowhere, nowhere, self.per_epoch):
            return [Finding("documents wait in the state that were trained", documents=again[0].documents)]
        ids, complete, _ = self._complete(together)
        self.complete &= ~np.isin(self.ids, waiting.ids)
        return self._missing(ids, complete, read)

    def without_waiting(self, read: int) -> list[Finding]:
        """Checks that everything that was read was trained."""
        return self._missing(self.ids, self.complete, read)

    def _missing(self, ids: NDArray[np.int64], complete: NDArray[np.bool_], read: int) -> list[Finding]:
        partly = ids[~complete]
        unseen = read - ids.size
        if not partly.size and not unseen:
            return []
        names = [*_names(partly, self.per_epoch), *_untrained(ids, None, read, self.per_epoch)]
        count = partly.size + unseen
        return [Finding(f"{_counted(count)} not trained, or not whole", documents=tuple(names[:_NAMED]))]

    def epochs(self, last: Mapping[str, Any], documents: int | None) -> tuple[EpochAudit, ...]:
        """One by one."""
        epoch_of = self.ids // self.per_epoch
        result = []
        for epoch in range(last["epoch"] + 1):
            here = epoch_of == epoch
            read = last["read"] if documents is None or epoch == last["epoch"] else documents
            trained = int(self.complete[here].sum())
            result.append(EpochAudit(epoch, read, trained, read - trained, int(self.tokens[here].sum())))
        return tuple(result)


def _untrained(seen: NDArray[np.int64], waiting: Pieces | None, read: int, per_epoch: int) -> list[tuple[int, int]]:
    """Documents that were read, were not seen and do not wait; none if the documents that were read are not known."""
    if read % per_epoch and per_epoch != _ENDLESS:
        return []
    known = seen if waiting is None else np.concatenate([seen, waiting.ids])
    return list(_names(np.setdiff1d(np.arange(read), known), per_epoch))


def _names(ids: NDArray[np.int64], per_epoch: int) -> Iterable[tuple[int, int]]:
    """The first few, as epoch and document."""
    return [(int(id) // per_epoch, int(id) % per_epoch) for id in ids[:_NAMED]]


def _counted(count: int) -> str:
    return "1 document is" if count == 1 else f"{count} documents are"
