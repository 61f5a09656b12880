"""``make loss-curves``: see `studies.loss_curves`. Trains, writes a record, and prints the page that it makes.

    python -m studies.loss_curves --seeds 20 --batches 64
    python -m studies.loss_curves --summarize benches/records/loss_curves.jsonl    # trains nothing

The record has a line for every finished run. A command that is stopped goes on with the runs that it lacks when it is
started again, also for more seeds; one seed is trained in every way before the next, so that every prefix is a study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from cyclopts import App, Parameter
from cyclopts.types import PositiveFloat, PositiveInt
from rich.console import Console
from rich.progress import Progress

from benches.common import machine, rounded
from studies.loss_curves import page
from studies.loss_curves.arms import ARMS, BY_TOKENS, REMEDIES, Packs, Step
from studies.loss_curves.corpus import Corpus, read
from studies.loss_curves.training import HeldOut, Training, run

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Study:
    """What all runs of a record have in common.

    Args:
        batches: global batches of a run.
        micro_batches: of a global batch.
        filled: share of the documents that are as long as the context, or longer; so the context follows.
        hidden: hidden size.
        layers: layers.
        vocab_size: different tokens.
        learning_rate: the highest.
        warmup: share of the tokens until the learning rate is there.
        held_out: tokens of documents that are evaluated and never trained.
    """

    batches: PositiveInt = 16
    micro_batches: PositiveInt = 4
    filled: PositiveFloat = 0.011
    hidden: PositiveInt = 64
    layers: PositiveInt = 2
    vocab_size: PositiveInt = 1024
    learning_rate: PositiveFloat = 0.02
    warmup: PositiveFloat = 0.1
    held_out: PositiveInt = 30_000


@dataclass(frozen=True, kw_only=True)
class Options(Study):
    """What is run.

    Args:
        seeds: runs of every way of packing.
        arms: ways of packing; default: all but the remedies for steps of unequal size.
        corpus: folder of Python files; default: the library of this interpreter.
        output_dir: where documents are kept as tokens, and what has no place of its own below goes.
        record: a line for every run; what it has is not run again.
        page: where the page goes.
        picture: where the picture goes.
        summarize: only print the page of this record.
    """

    seeds: PositiveInt = 2
    arms: tuple[str, ...] = tuple(ARMS)
    corpus: Path | None = None
    output_dir: Path = Path("wlb-losses")
    record: Path | None = None
    page: Path | None = None
    picture: Path | None = None
    summarize: Path | None = None


app = App(name="python -m studies.loss_curves", version_flags=[])


@app.default
def main(*, options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Trains the same small model on the same documents, packed in many ways, and compares what it learnt."""
    if options.summarize is None:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        path = options.record or options.output_dir / "loss_curves.jsonl"
        train(options, path)
    else:
        path = options.summarize
    head, rows = read_record(path)
    picture = options.picture or (None if options.summarize else options.output_dir / "loss_curves.png")
    if picture is not None:
        page.draw(head, rows, picture)
    text = page.text(head, rows)
    written = options.page or (None if options.summarize else options.output_dir / "loss_curves.md")
    if written is not None:
        written.write_text(text)
    print(text, end="")


def train(options: Options, path: Path) -> None:
    """All runs that the record at `path` does not have yet."""
    unknown = [name for name in options.arms if name not in ARMS | REMEDIES]
    if unknown:
        raise SystemExit(f"--arms {unknown[0]!r}: there are {'; '.join(ARMS | REMEDIES)}")
    torch.set_num_threads(1)
    bench = Bench(options, read(options.corpus, options.vocab_size, options.output_dir))
    if path.exists():
        head, rows = read_record(path)
        check_same(head, bench.head(), path)
        # Written anew: a run that was stopped while it wrote leaves half a line.
        write(path, [head, *rows])
    else:
        rows = []
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [bench.head() | {"machine": machine(["torch"])}])
    done = {(row["seed"], row["arm"]) for row in rows}
    wanted = [(seed, arm) for seed in range(options.seeds) for arm in options.arms if (seed, arm) not in done]
    with Progress(console=Console(stderr=True)) as bars:
        task = bars.add_task("training", total=len(wanted) * options.batches)
        for row in bench.runs(wanted, lambda: bars.advance(task)):
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")


class Bench:
    """Documents, packing and training of one study."""

    def __init__(self, options: Study, corpus: Corpus) -> None:
        self._corpus = corpus
        self._study = Study(**{field.name: getattr(options, field.name) for field in fields(Study)})
        self._packs = Packs(options.micro_batches, corpus.filled_by(options.filled))
        self._training = Training(
            options.hidden, options.layers, options.vocab_size, options.learning_rate, options.warmup
        )
        context = self._packs.context
        self._bounds = [context // 8, context // 4, context // 2, context]
        self._evaluated = corpus.to_evaluate(context, options.held_out)
        self._held_out = HeldOut.of(self._evaluated, self._bounds, self._packs.max_tokens)

    def head(self) -> Row:
        """What two records must share to be continued; and what the page says of the documents."""
        lengths = self._corpus.lengths
        tokens = np.concatenate(self._corpus.trained)
        counts = np.bincount(tokens, minlength=self._study.vocab_size) + 1
        # A model that knew how often each token comes, and nothing else, would have this loss.
        unigram = -np.log(counts / counts.sum())[np.concatenate(self._evaluated)].mean()
        return {
            "study": asdict(self._study),
            "corpus": self._corpus.fingerprint,
            "documents": len(self._corpus.trained),
            "mean_tokens": rounded(float(lengths.mean())),
            "longest": int(lengths.max()),
            "context": self._packs.context,
            "filled": float((lengths >= self._packs.context).mean()),
            "held_out": len(self._evaluated),
            "bounds": self._bounds,
            "bucket_tokens": self._held_out.tokens,
            "unigram": rounded(float(unigram)),
        }

    def runs(self, wanted: list[tuple[int, str]], tick: Any) -> Iterator[Row]:
        """A row for every seed and arm, in this order."""
        known: dict[str, Row] = {}  # of this seed, by what is trained
        of_seed = None
        for seed, arm in wanted:
            if seed != of_seed:
                known, of_seed = {}, seed
                documents = self._corpus.in_order(
                    seed, self._packs.context, self._packs.tokens_per_batch, self._study.batches
                )
                lengths = np.array([document.size for document in documents], np.int64)
            steps = (ARMS | REMEDIES)[arm](lengths, self._packs)
            by_tokens = arm in BY_TOKENS
            digest = hashlib.sha256(repr((steps, by_tokens) if by_tokens else steps).encode()).hexdigest()[:16]
            if digest not in known:  # two ways of packing may have the same plan
                known[digest] = run(
                    self._training,
                    documents,
                    steps,
                    self._held_out,
                    seed=seed,
                    equal_steps=self._study.batches,
                    rate_by_tokens=by_tokens,
                    tick=tick,
                )
            yield rounded({"seed": seed, "arm": arm, **known[digest], **levels(steps, self._packs), "digest": digest})


def levels(steps: list[Step], packs: Packs) -> Row:
    """How unequal steps are, in tokens and in work, and what their micro-batches lose against even ones."""
    tokens = np.array([sum(piece.length for batch in step for piece in batch) for step in steps])
    work = [packs.work(step) for step in steps]
    of_steps = np.array([costs.sum() for costs in work])
    return {
        "steps": len(steps),
        "tokens_cv": float(tokens.std() / tokens.mean()),
        "work_cv": float(of_steps.std() / of_steps.mean()),
        "heaviest": float(of_steps.max() / of_steps.mean()),
        "lost_time": float(sum(costs.max() for costs in work) * packs.micro_batches / of_steps.sum()),
    }


def read_record(path: Path) -> tuple[Row, list[Row]]:
    """What all runs have in common, and a row for every finished run; half a line at the end is left out."""
    lines = path.read_text().split("\n")
    rows = [json.loads(line) for line in lines[:-1]]  # what is after the last end of a line was not finished
    if not rows or "study" not in rows[0]:
        raise SystemExit(f"{path}: is no record of this study")
    return rows[0], rows[1:]


def write(path: Path, rows: list[Row]) -> None:
    """A line each, in the place of what was there."""
    new = path.with_name(path.name + ".new")
    new.write_text("".join(json.dumps(row) + "\n" for row in rows))
    new.replace(path)


def check_same(known: Row, now: Row, path: Path) -> None:
    """Whether a record may be continued."""
    changed = [name for name in now["study"] if known["study"].get(name) != now["study"][name]]
    if not changed and known["corpus"] != now["corpus"]:
        changed = ["corpus"]
    if changed:
        raise SystemExit(f"{path}: was made with another --{changed[0].replace('_', '-')}; give a new --record")


if __name__ == "__main__":
    app()
