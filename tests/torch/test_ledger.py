"""The ledger: what was trained can be proved, and what was not is named."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

import wlb
from tests.torch import processes
from wlb.ledger import Pieces, Share, as_line
from wlb.torch.data import (
    BalancedBatchSampler,
    BalancedStream,
    Documents,
    DynamicCpLoader,
    Ledger,
    StepLoader,
    collate,
)
from wlb_tools.audit import audit

RNG = np.random.default_rng(5)
LENGTHS = np.where(RNG.random(90) < 0.85, RNG.integers(1, 20, 90), RNG.integers(30, 90, 90))
DATA = [RNG.integers(0, 1000, length) for length in LENGTHS]
COST = wlb.CostModel(attention=1e-3, linear=1e-2)
EPOCHS = 2
State = dict[str, Any]


def packer(oversize: Any = "split") -> wlb.Packer:
    return wlb.Packer(
        num_micro_batches=4,
        max_tokens=96,
        max_document_tokens=64,
        outlier_thresholds=(24, 48),
        oversize=oversize,
        cost_model=COST,
    )


def step_loader(rank: int = 0, size: int = 1, *, oversize: Any = "split", work: Any = collate) -> StepLoader[Any]:
    sampler = BalancedBatchSampler(LENGTHS, packer=packer(oversize), dp_rank=rank, dp_size=size, num_epochs=EPOCHS)
    return StepLoader(DataLoader(Documents(DATA), batch_sampler=sampler, collate_fn=work))  # type: ignore[arg-type]


def train(
    folder: Path, size: int = 1, *, state: State | None = None, stop: int | None = None, **options: Any
) -> list[State]:
    """All ranks, one after the other; the states after the steps trained, up to number `stop`."""
    states: list[State] = []
    for rank in range(size):
        loader = step_loader(rank, size, **options)
        if state is not None:
            loader.load_state_dict(state)
        ledger, states = Ledger(folder, dp_rank=rank, dp_size=size, source=loader), []
        steps = (step for _ in range(EPOCHS) for step in loader)
        for step in steps:
            if step.number == stop:
                break
            ledger.record(step)
            states.append(step.state)
    return states


def test_a_whole_run_is_proved(tmp_path: Path) -> None:
    states = train(tmp_path, 2)
    found = audit(tmp_path)
    assert found.sound
    assert [(epoch.read, epoch.trained, epoch.waiting, epoch.tokens) for epoch in found.epochs] == [
        (90, 90, 0, LENGTHS.sum())
    ] * 2
    assert (found.first_step, found.num_steps, found.state) == (0, len(states), states[-1]["digest"])
    assert json.loads(json.dumps(found.as_dict()))["sound"]
    assert audit(tmp_path, lengths=LENGTHS).sound


def test_a_crash_on_other_ranks_is_no_harm(tmp_path: Path) -> None:
    """Killed on 2 ranks, resumed on 4 and on 1, from states before the last step; each state proves all up to it."""
    first = train(tmp_path, 2, stop=9)
    with (tmp_path / "ledger-00001.jsonl").open("ab") as file:
        file.write(b'{"step":9,"epoch":0,"pl')  # killed while it wrote
    assert audit(tmp_path).sound
    second = train(tmp_path, 4, state=first[6], stop=13)
    third = train(tmp_path, 1, state=second[-3])
    found = audit(tmp_path)
    assert found.sound, found.findings
    assert found.superseded == 2 + 2
    assert all(epoch.waiting == 0 for epoch in found.epochs)
    for state in (first[0], first[6], second[-3], *third):
        of_state = audit(tmp_path, state=state, lengths=LENGTHS)
        assert of_state.sound, of_state.findings
        assert of_state.state == state["digest"]
    gone = audit(tmp_path, state=first[-1])  # superseded: the same documents, so it is still true
    assert gone.sound


def test_states_between_steps_belong_to_the_chain(tmp_path: Path) -> None:
    loader = step_loader()
    ledger = Ledger(tmp_path, dp_rank=0, dp_size=1, source=loader)
    for step in loader:
        ledger.record(step)
    between = loader.state_dict()  # the next epoch has begun
    assert audit(tmp_path, state=between).sound
    train(tmp_path, state=between)
    assert audit(tmp_path).sound
    assert audit(tmp_path).num_steps > step.number


def test_a_document_whose_end_waits_is_not_called_trained(tmp_path: Path) -> None:
    """Its pieces so far reach from its first token on without a gap: only what waits, or its length, shows the rest."""
    lengths, documents = np.array([640]), [np.zeros(640, np.int64)]
    with pytest.warns(UserWarning, match="it enters over several steps"):
        sampler = BalancedBatchSampler(lengths, packer=packer(), dp_rank=0, dp_size=1, tokens_per_batch=256)
    loader: StepLoader[Any] = StepLoader(
        DataLoader(Documents(documents), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    )
    ledger = Ledger(tmp_path, dp_rank=0, dp_size=1, source=loader)
    for step in loader:
        ledger.record(step)
        if step.number == 1:
            break
    assert step.snapshot is not None
    waiting: Any = step.snapshot.progress.tokens
    assert 0 < waiting < 640
    (epoch,) = audit(tmp_path).epochs
    assert (epoch.trained, epoch.waiting, epoch.tokens) == (1, 0, 640 - waiting), "as far as the ledger knows"
    assert "1 document counted as trained may lack its end" in audit(tmp_path).proof
    for found in (audit(tmp_path, state=step.state), audit(tmp_path, lengths=lengths)):
        assert found.sound
        assert "may lack" not in found.proof
        assert [(epoch.trained, epoch.waiting) for epoch in found.epochs] == [(0, 1)]


def stepping(rank: int, folder: Path, kind: str) -> list[str]:
    size = dist.get_world_size()
    if kind == "stream":
        texts = [DATA[number::3] for number in range(3)]
        loader: Any = BalancedStream(texts, packer=packer(), collate_fn=collate, group=dist.group.WORLD)
    else:
        plan = functools.partial(
            wlb.plan_dynamic_cp, world_size=size, num_stages=1, max_tokens_per_rank=200, cost_model=COST
        )
        loader = DynamicCpLoader(step_loader(rank, size, work=list), plan=plan, group=dist.group.WORLD)
    ledger = Ledger(folder, dp_rank=rank, dp_size=size, source=loader)
    states = []
    for _ in range(1 if kind == "stream" else EPOCHS):
        for step in loader:
            ledger.record(step)
            states.append(json.dumps(step.state))
    loader.close()
    return states


@pytest.mark.parametrize("kind", ["stream", "dynamic"])
def test_other_loaders_are_proved(kind: str, tmp_path: Path) -> None:
    states, same = processes.run(2, stepping, tmp_path, kind)
    assert states == same
    found = audit(tmp_path)
    assert found.sound, found.findings
    assert [(epoch.trained, epoch.tokens) for epoch in found.epochs] == [(90, LENGTHS.sum())] * len(found.epochs)
    assert found.num_steps == len(states)
    for state in map(json.loads, states):
        of_state = audit(tmp_path, state=state)
        assert of_state.sound, of_state.findings


def test_truncated_documents_need_their_lengths(tmp_path: Path) -> None:
    train(tmp_path, oversize="truncate")
    assert audit(tmp_path).sound
    assert audit(tmp_path, lengths=LENGTHS).sound
    assert not audit(tmp_path, lengths=LENGTHS + (np.arange(90) == np.flatnonzero(LENGTHS < 20)[0])).sound


# --- what does not hold ----------------------------------------------------------------------------------------------


def edit(folder: Path, rank: int, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """Changes a rank's lines, and makes all their hashes fit."""
    path = folder / f"ledger-{rank:05d}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["check"], line["after"]
    change(lines)
    text, after = "", None
    for line in lines:
        written, after = as_line(line, after)
        text += written
    path.write_text(text)


def edit_text(folder: Path, rank: int, change: Callable[[list[str]], Any]) -> None:
    """Changes a rank's lines as they stand."""
    path = folder / f"ledger-{rank:05d}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    change(lines)
    path.write_text("".join(lines))


def moved_pieces(lines: list[dict[str, Any]]) -> None:
    """Step 4 trains what step 2 did, instead of its own."""
    names = ("pieces", "places", "micro_batches")
    lines[5].update({name: lines[3][name] for name in names})


def lost_pieces(lines: list[dict[str, Any]]) -> None:
    share = Share.decode(lines[5])
    (number, count), *others = share.micro_batches
    pieces = Pieces(share.pieces.ids[1:], share.pieces.starts[1:], share.pieces.lengths[1:])
    lines[5].update(Share(((number, count - 1), *others), pieces).encode())


def cut_short(lines: list[dict[str, Any]]) -> None:
    share = Share.decode(lines[5])
    pieces = share.pieces
    shorter = Pieces(pieces.ids, pieces.starts, pieces.lengths - (pieces.ids == pieces.ids.max()))
    lines[5].update(Share(share.micro_batches, shorter).encode())


@pytest.mark.parametrize(
    ("change", "text", "step", "rank"),
    [
        (lambda lines: lines[5].update(plan="x"), "has another plan than rank 0", 4, 1),
        (lambda lines: lines[5].update(state="x"), "has another state than rank 0", 4, 1),
        (lambda lines: lines.pop(5), "is not in the ledger of this rank", 4, 1),
        (lambda lines: lines[0].update(dp_size=3), "has another number of ranks", 0, 1),
        (lambda lines: lines[0].update(fingerprint="x"), "trains other documents", 0, 1),
        (lambda lines: lines[5].update(pieces="1:u1:u1:u1:AAAA"), "has pieces that cannot be read", 4, 1),
        (moved_pieces, "trained twice, the first of them here", 4, 1),
        (lost_pieces, "1 document is neither trained nor waiting", 5, None),
        (cut_short, "tokens were trained or wait, but the documents read have", None, None),
    ],
)
def test_what_diverges_is_named(change: Any, text: str, step: int | None, rank: int | None, tmp_path: Path) -> None:
    states = train(tmp_path, 2)
    edit(tmp_path, 1, change)
    found = audit(tmp_path)
    assert not found.sound
    named = next(finding for finding in found.findings if text in finding.text)
    assert (named.step, named.rank) == (step, rank)
    if change in (moved_pieces, lost_pieces, cut_short):
        assert any(finding.step == 4 and "not those of its plan" in finding.text for finding in found.findings)
        assert all(finding.step is None or finding.step >= 4 for finding in found.findings)
    else:
        assert named is found.findings[0]
    if step is not None:
        holds = min(step, 4)
        assert found.num_steps == holds
        assert found.state == (states[holds - 1]["digest"] if holds else None)
        assert str(step) in str(named)
    else:
        assert (found.num_steps, found.state) == (0, None)
        assert not audit(tmp_path, state=states[-4]).sound, "with a state, though documents wait"
    if change in (moved_pieces, lost_pieces):
        assert named.documents


SHARE = ("pieces", "places", "micro_batches")


def on_all(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    for rank in range(2):
        edit(folder, rank, change)


def exchanged(folder: Path, names: tuple[str, ...], step: int = 4) -> None:
    """Two ranks' lines of a step have each other's values."""
    taken = {}

    def take(rank: int) -> Callable[[list[dict[str, Any]]], None]:
        return lambda lines: taken.update({rank: {name: lines[step + 1][name] for name in names}})

    def give(rank: int) -> Callable[[list[dict[str, Any]]], None]:
        return lambda lines: lines[step + 1].update(taken[rank])

    for rank in range(2):
        edit(folder, rank, take(rank))
    for rank in range(2):
        edit(folder, rank, give(1 - rank))


def swapped(lines: list[Any]) -> None:
    lines[4], lines[5] = lines[5], lines[4]


def in_another_order(lines: list[dict[str, Any]]) -> None:
    share = Share.decode(lines[5])
    pieces = Pieces(share.pieces.ids[::-1], share.pieces.starts[::-1], share.pieces.lengths[::-1])
    lines[5].update(Share(share.micro_batches[::-1], pieces).encode())


def other_ids(lines: list[dict[str, Any]]) -> None:
    share = Share.decode(lines[5])
    pieces = Pieces(share.pieces.ids + 1, share.pieces.starts, share.pieces.lengths)
    lines[5].update(Share(share.micro_batches, pieces).encode())


def flipped(lines: list[str]) -> None:
    lines[5] = lines[5].replace('"epoch":0', '"epoch":1')


def files_exchanged(folder: Path) -> None:
    first, second = (folder / f"ledger-0000{rank}.jsonl" for rank in range(2))
    one, other = first.read_text(), second.read_text()
    first.write_text(other)
    second.write_text(one)


TAMPERINGS: dict[str, Callable[[Path], Any]] = {
    "lines swapped": lambda folder: edit_text(folder, 1, swapped),
    "lines swapped, hashes fitted": lambda folder: edit(folder, 1, swapped),
    "lines swapped on all ranks, hashes fitted": lambda folder: on_all(folder, swapped),
    "a line doubled": lambda folder: edit_text(folder, 0, lambda lines: lines.insert(6, lines[5])),
    "a line doubled, hashes fitted": lambda folder: edit(folder, 0, lambda lines: lines.insert(6, lines[5])),
    "the last line doubled": lambda folder: edit_text(folder, 1, lambda lines: lines.append(lines[-1])),
    "the last line torn": lambda folder: edit_text(folder, 1, lambda lines: lines.append(lines.pop()[:40])),
    "the last line torn on rank 0": lambda folder: edit_text(folder, 0, lambda lines: lines.append(lines.pop()[:40])),
    "the last line torn on all ranks": lambda folder: [
        edit_text(folder, rank, lambda lines: lines.append(lines.pop()[:40])) for rank in range(2)
    ],
    "the last line left out": lambda folder: edit_text(folder, 1, lambda lines: lines.pop()),
    "a line left out": lambda folder: edit_text(folder, 1, lambda lines: lines.pop(5)),
    "a line left out, hashes fitted": lambda folder: edit(folder, 1, lambda lines: lines.pop(5)),
    "a line changed": lambda folder: edit_text(folder, 1, flipped),
    "the beginning left out": lambda folder: edit(folder, 1, lambda lines: lines.pop(0)),
    "the plan forged on one rank": lambda folder: edit(folder, 1, lambda lines: lines[5].update(plan="0" * 32)),
    "the plan forged on all ranks": lambda folder: on_all(folder, lambda lines: lines[5].update(plan="0" * 32)),
    "the state forged on all ranks": lambda folder: on_all(folder, lambda lines: lines[5].update(state="0" * 32)),
    "what waits forged on all ranks": lambda folder: on_all(folder, lambda lines: lines[-1].update(waiting=[9, 99])),
    "what was read forged on all ranks": lambda folder: on_all(folder, lambda lines: lines[-1].update(read=89)),
    "pieces exchanged": lambda folder: exchanged(folder, ("pieces",)),
    "shares exchanged": lambda folder: exchanged(folder, SHARE),
    "the files exchanged": files_exchanged,
    "pieces in another order": lambda folder: edit(folder, 1, in_another_order),
    "pieces of other documents": lambda folder: edit(folder, 1, other_ids),
    "pieces of another step": lambda folder: edit(folder, 1, moved_pieces),
    "a piece left out": lambda folder: edit(folder, 1, lost_pieces),
    "a piece cut short": lambda folder: edit(folder, 1, cut_short),
    "fewer ranks": lambda folder: on_all(folder, lambda lines: lines[0].update(dp_size=1)),
    "begun anew": lambda folder: train(folder, 2),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_what_was_tampered_with_is_seen(tampering: str, tmp_path: Path) -> None:
    train(tmp_path, 2)
    whole = audit(tmp_path)
    assert whole.sound
    assert not whole.unproved
    TAMPERINGS[tampering](tmp_path)
    found = audit(tmp_path)
    assert found.findings or found.unproved
    # What may be honest, and cannot be told from it: a rank was killed, or all of them before a checkpoint.
    may_be_honest = {
        "the last line torn",
        "the last line torn on rank 0",
        "the last line torn on all ranks",
        "the last line left out",
        "begun anew",
    }
    assert found.sound == (tampering in may_be_honest)
    if found.sound:
        assert any(sentence.startswith("? Not proved: ") for sentence in found.sentences())
        assert json.loads(json.dumps(found.as_dict()))["unproved"]


def test_a_rank_records_its_own_steps(tmp_path: Path) -> None:
    loader = step_loader(1, 2)
    with pytest.raises(wlb.WlbError, match=r"dp_rank.*= 0 of 2: the step has micro-batches"):
        Ledger(tmp_path, dp_rank=0, dp_size=2, source=loader).record(next(iter(loader)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_that_was_cut_off_is_seen(rank: int, tmp_path: Path) -> None:
    """Wherever it ends, but for the last step, before which a rank may have been killed."""
    steps = len(train(tmp_path, 2))
    path = tmp_path / f"ledger-{rank:05d}.jsonl"
    whole = path.read_bytes()
    ends = np.cumsum([len(line) for line in whole.splitlines(keepends=True)]).tolist()
    for end in sorted({*range(ends[0], len(whole), 97), *ends}):
        path.write_bytes(whole[:end])
        found, kept = audit(tmp_path), sum(end >= behind for behind in ends[1:])
        assert found.num_steps == kept
        assert found.sound == (kept >= steps - 1)
        if not found.sound:
            assert (found.findings[0].step, found.findings[0].rank) == (kept, rank)


def test_a_state_a_step_too_far_loses_a_step(tmp_path: Path) -> None:
    """What a loader that something reads ahead says of itself: the ledger shows what was lost."""
    loader = step_loader()
    ledger, ahead = Ledger(tmp_path, dp_rank=0, dp_size=1, source=loader), iter(loader)
    next_step = next(ahead)
    for _ in range(5):
        step, next_step = next_step, next(ahead)
        ledger.record(step)
    train(tmp_path, state=loader.state_dict())
    found = audit(tmp_path)
    assert [(finding.step, finding.rank, finding.text) for finding in found.findings] == [
        (5, 0, "is not in the ledger of rank 0")
    ]
    assert (found.num_steps, found.state) == (5, step.state["digest"])
    assert next_step.number == 5


def test_a_run_of_other_documents_is_no_continuation(tmp_path: Path) -> None:
    train(tmp_path, stop=4)
    other = BalancedBatchSampler(LENGTHS, packer=packer(), dp_rank=0, dp_size=1, num_epochs=EPOCHS, seed=1)
    loader: StepLoader[Any] = StepLoader(
        DataLoader(Documents(DATA), batch_sampler=other, collate_fn=collate)  # type: ignore[arg-type]
    )
    ledger = Ledger(tmp_path, dp_rank=0, dp_size=1, source=loader)
    steps = list(loader)
    for step in steps[4:6]:
        ledger.record(step)
    found = audit(tmp_path)
    assert found.findings[0].step == 4
    assert "begins at state" in found.findings[0].text
    assert found.num_steps == 4
    of_other = audit(tmp_path, state=steps[3].state)
    assert "of another run" in of_other.findings[0].text


def test_a_skipped_epoch_is_named(tmp_path: Path) -> None:
    sampler = BalancedBatchSampler(LENGTHS, packer=packer(), dp_rank=0, dp_size=1, num_epochs=3)
    loader: StepLoader[Any] = StepLoader(
        DataLoader(Documents(DATA), batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    )
    ledger = Ledger(tmp_path, dp_rank=0, dp_size=1, source=loader)
    for step in loader:
        ledger.record(step)
    sampler.set_epoch(2)
    for step in loader:
        ledger.record(step)
    (found, *_) = audit(tmp_path).findings
    assert "epoch 2 begins; 90 documents are of those before not read" in found.text


def test_every_step_is_recorded(tmp_path: Path) -> None:
    loader = step_loader()
    ledger = Ledger(tmp_path, dp_rank=0, dp_size=1, source=loader)
    first, _, third = [step for step, _ in zip(loader, range(3), strict=False)]
    ledger.record(first)
    with pytest.raises(wlb.WlbError, match="2 comes after 0: record every step"):
        ledger.record(third)
    for dp_rank, dp_size in ((1, 1), (-1, 1), (0, 0)):
        with pytest.raises(wlb.WlbError, match="dp_"):
            Ledger(tmp_path, dp_rank=dp_rank, dp_size=dp_size, source=loader)


def test_what_is_no_ledger_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wlb.WlbError, match="no ledger of rank 0"):
        audit(tmp_path)
    states = train(tmp_path, stop=3)
    with pytest.raises(wlb.WlbError, match="has 3 documents; the ledger is of 90"):
        audit(tmp_path, lengths=LENGTHS[:3])
    with pytest.raises(wlb.WlbError, match="changed after it was saved"):
        audit(tmp_path, state=states[0] | {"step": 2})
    edit(tmp_path, 0, lambda lines: lines[0].update(version=99))
    with pytest.raises(wlb.WlbError, match="99"):
        audit(tmp_path)


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    """Anywhere in any file: named, or the line did not count, which only the last one may."""
    states = train(tmp_path, 2, stop=9)
    chance = random.Random(0)
    for _ in range(150):
        path = tmp_path / f"ledger-0000{chance.randrange(2)}.jsonl"
        raw = path.read_bytes()
        damaged = bytearray(raw)
        damaged[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            found = audit(tmp_path)
            assert not found.sound or found.num_steps == len(states) - 1, damaged
        except wlb.WlbError:
            pass
        path.write_bytes(raw)
    assert audit(tmp_path).num_steps == len(states)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    pytest.importorskip("cyclopts")
    pytest.importorskip("rich")
    from wlb_tools.command import main

    def run(*argv: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in argv])
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run


def test_the_command_proves(command: Any, tmp_path: Path) -> None:
    states = train(tmp_path / "ledger", 2)
    np.save(tmp_path / "lengths.npy", LENGTHS)
    (tmp_path / "state.json").write_text(json.dumps(states[4]))
    code, out, _ = command("audit", tmp_path)
    assert code == 0
    assert "Sound: every document read was trained once" in out
    assert states[-1]["digest"] in out
    assert f"hold, {len(states)} in all" in out, "as the trainer counts checkpoints"
    options = ("--state", tmp_path / "state.json", "--lengths", tmp_path / "lengths.npy", "--json")
    code, out, _ = command("audit", tmp_path, *options)
    assert code == 0
    assert json.loads(out)["num_steps"] == 5


def test_the_command_names_what_does_not_hold(command: Any, tmp_path: Path) -> None:
    states = train(tmp_path, 2)
    edit(tmp_path, 1, moved_pieces)
    code, out, _ = command("audit", tmp_path)
    assert code == 1
    assert "step 4, rank 1: " in out
    assert "of epoch 0" in out
    assert states[3]["digest"] in out
    assert command("audit", tmp_path, "--json")[0] == 1
    edit(tmp_path, 0, lambda lines: lines.pop(1))
    assert "No step holds" in command("audit", tmp_path)[1]
    for argv in (("audit", tmp_path / "nothing"), ("audit", tmp_path, "--state", __file__)):
        code, out, err = command(*argv)
        assert (code, out, err.count("\n")) == (2, "", 1)


def test_pieces_survive_as_text() -> None:
    pieces = Pieces(np.array([2**62, 5, 5, 0]), np.array([0, 64, 0, 7]), np.array([2**31, 3, 64, 1]))
    again = Pieces.decode(pieces.encode())
    assert again.ids.tolist() == [0, 5, 5, 2**62]
    assert again.starts.tolist() == [7, 0, 64, 0]
    assert again.lengths.tolist() == [1, 64, 3, 2**31]
    assert Pieces.decode(Pieces.of([], [], []).encode()).ids.size == 0
    many = Pieces(RNG.integers(0, 10**8, 4000), np.zeros(4000, int), RNG.integers(1, 9000, 4000))
    assert len(many.encode()) / 4000 < 8, "bytes a piece"
