"""The loss study: its statistics against known values, its arms against what they promise, and all of it, small."""

import dataclasses
import inspect
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from studies.loss_curves import __main__ as command
from studies.loss_curves import arms, corpus, page, statistics, training

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benches" / "records" / "loss_curves.jsonl"


torch.set_num_threads(1)

PACKS = arms.Packs(micro_batches=4, context=64)


@pytest.fixture(scope="module")
def lengths() -> Any:
    drawn = np.random.default_rng(0).lognormal(2, 1, 800).astype(np.int64).clip(2, 64)
    return drawn[: int(np.searchsorted(drawn.cumsum(), 16 * PACKS.tokens_per_batch))]


@pytest.mark.parametrize(
    ("probability", "degrees", "t"),
    [  # tables of Student's t; with 1 and 2 degrees of freedom it is written out below
        (0.975, 4, 2.776445),
        (0.95, 19, 1.729133),
        (0.975, 19, 2.093024),
        (0.995, 30, 2.749996),
        (0.975, 200, 1.971896),
    ],
)
def test_quantiles_of_students_t(probability: float, degrees: int, t: float) -> None:
    assert statistics.student_quantile(probability, degrees) == pytest.approx(t, abs=1e-6)
    assert statistics.student_quantile(1 - probability, degrees) == pytest.approx(-t, abs=1e-6)


@pytest.mark.parametrize("t", [-7.0, -0.3, 0.0, 0.5, 3.0, 40.0])
def test_students_t_where_it_has_a_formula(t: float) -> None:
    assert statistics.student_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)
    assert statistics.student_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_paired_differences_by_hand() -> None:
    reference = np.array([2.0, 4.0, 8.0, 5.0])  # seeds differ by more than the methods do
    found = statistics.Paired.of(reference * [1.01, 1.02, 1.03, 1.02], reference)
    assert found.mean == pytest.approx(0.02)
    assert found.deviation == pytest.approx(math.sqrt(2e-4 / 3))
    assert found.error == pytest.approx(math.sqrt(2e-4 / 12))
    assert found.half_width() == pytest.approx(3.182446 * found.error)  # t of 0.975, 3 degrees of freedom
    one = statistics.Paired.of([1.0], [2.0])
    assert one.mean == -0.5
    assert math.isnan(one.half_width())
    assert math.isnan(one.equivalence(0.005))


def test_equivalence_is_the_90_percent_interval_within_the_margin() -> None:
    found = statistics.Paired(mean=0.001, deviation=0.004, seeds=20)
    edge = 0.001 + found.half_width(0.9)
    assert found.equivalence(edge) == pytest.approx(0.05)
    assert found.equivalence(edge + 1e-4) < 0.05 < found.equivalence(edge - 1e-4)
    assert found.equivalence(0.001) == pytest.approx(0.5)  # the mean is at the margin
    mirrored = dataclasses.replace(found, mean=-0.001)
    assert mirrored.equivalence(edge) == pytest.approx(found.equivalence(edge))
    # One number from a table: t = (0.005 - 0.001) / (0.004 / sqrt(20)) = 4.4721, and P(T > 3.883406) = 0.0005.
    assert found.equivalence(0.001 + 3.883406 * found.error) == pytest.approx(0.0005, rel=1e-4)


def test_what_a_difference_is_called() -> None:
    def called(mean: float, deviation: float) -> str:
        return str(page.verdict(statistics.Paired(mean, deviation, 20)))

    assert called(0.0005, 0.004) == "equivalent"
    assert called(0.002, 0.002) == "equivalent, higher"
    assert called(-0.008, 0.004) == "lower"
    assert called(0.004, 0.02) == "open"


@pytest.mark.parametrize("arm", arms.ARMS | arms.REMEDIES)
def test_every_arm_trains_every_token_once(arm: str, lengths: Any) -> None:
    steps = (arms.ARMS | arms.REMEDIES)[arm](lengths, PACKS)
    seen = [np.zeros(length, int) for length in lengths]
    for piece in (piece for step in steps for batch in step for piece in batch):
        seen[piece.document][piece.start : piece.start + piece.length] += 1
    assert all((tokens == 1).all() for tokens in seen)
    cuts = sum(len(batch) for step in steps for batch in step) - len(lengths)
    assert (cuts > 0) == (arm == "original") or arm.startswith("fixed")


@pytest.mark.parametrize("like", ["queues 2", "adaptive"])
def test_order_of_arrival_with_the_sizes_of_another(like: str, lengths: Any) -> None:
    def tokens(arm: str) -> list[int]:
        made = arms.ARMS[arm](lengths, PACKS)
        return [sum(piece.length for batch in step for piece in batch) for step in made]

    made = arms.ARMS[f"sizes of {like}"](lengths, PACKS)
    assert [piece.document for step in made for batch in step for piece in batch] == list(range(len(lengths)))
    # Ends of steps are those of the other, to half a document.
    assert np.abs(np.cumsum(tokens(f"sizes of {like}")) - np.cumsum(tokens(like))).max() <= lengths.max() / 2
    assert np.std(tokens(like)) > 4 * np.std(tokens("original")[:-1])


def test_the_fused_attention_is_that_of_the_library() -> None:
    model = training.Training(hidden=64, layers=1, vocab_size=32, learning_rate=0.1, warmup=0.1).model(seed=0)
    plain = training.LlamaStage(model.config)
    plain.initialize(0)
    batch = training.collate([np.arange(9), np.arange(2), np.arange(20, 31)])
    losses = [training.loss_of(one, batch, batch.num_valid_tokens) for one in (model, plain)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    gradients = [dict(one.named_parameters())["layers.0.attention.wq.weight"].grad for one in (model, plain)]
    torch.testing.assert_close(*gradients)


def test_a_learning_rate_by_tokens_is_that_of_equal_steps() -> None:
    trained = training.Training(hidden=32, layers=1, vocab_size=32, learning_rate=0.02, warmup=0.25)
    documents = [np.random.default_rng(number).integers(0, 32, 20) for number in range(12)]
    held_out = training.HeldOut.of(documents[:2], [30], 64)
    assert [trained.rate(share) for share in (0.0, 0.125, 0.25, 1.0)] == pytest.approx([0.0, 0.01, 0.02, 0.0])

    def final(sizes: list[int], by_tokens: bool) -> float:
        ends = np.cumsum([0, *sizes]).tolist()
        steps = [[[arms.Piece(i, 0, 20) for i in range(first, end)]] for first, end in itertools.pairwise(ends)]
        options = {"seed": 0, "equal_steps": 4, "rate_by_tokens": by_tokens, "tick": lambda: None}
        return float(training.run(trained, documents, steps, held_out, **options)["curve"][-1][1][0])

    assert final([3, 3, 3, 3], True) == final([3, 3, 3, 3], False)
    assert final([1, 5, 1, 5], True) != final([1, 5, 1, 5], False)


def test_functions_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "def f():\n    def g():\n        pass\n\nclass A:\n    def h(self):\n        return 1\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    assert list(corpus.functions(tmp_path / "a.py")) == [
        "def f():\n    def g():\n        pass\n",
        "def h(self):\n    return 1\n",
    ]
    assert list(corpus.functions(tmp_path / "broken.py")) == []


def test_a_small_study_goes_on_where_it_was_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = command.Options(
        seeds=2,
        arms=("original", "queues 1", "Dynamic-CP"),
        corpus=Path(inspect.__file__).parent / "asyncio",
        batches=4,
        hidden=32,
        layers=1,
        vocab_size=512,
        held_out=1000,
        output_dir=tmp_path,
    )
    command.main(options=dataclasses.replace(options, seeds=1))
    record = tmp_path / "loss_curves.jsonl"
    first = record.read_text()
    record.write_text(first + '{"seed": 1, "arm": "orig')  # stopped while it wrote
    command.main(options=options)
    assert record.read_text().startswith(first)
    head, rows = command.read_record(record)
    assert [(row["seed"], row["arm"]) for row in rows] == [(s, arm) for s in (0, 1) for arm in options.arms]
    assert all(row["curve"][-1][0] == rows[3 * row["seed"]]["curve"][-1][0] for row in rows)  # equal tokens
    assert all(0 < row["curve"][-1][1][0] < row["curve"][0][1][0] for row in rows)  # it learns
    assert (tmp_path / "loss_curves.png").stat().st_size > 10_000
    capsys.readouterr()
    command.main(options=command.Options(summarize=record))
    printed = capsys.readouterr().out
    assert printed == (tmp_path / "loss_curves.md").read_text()
    assert f"| original | {page.Results(head, rows).mean('original'):.3f} |" in printed
    with pytest.raises(SystemExit, match="was made with another --hidden"):
        command.main(options=dataclasses.replace(options, hidden=64))
    with pytest.raises(SystemExit, match="there are original"):
        command.main(options=dataclasses.replace(options, arms=("nothing",)))


def test_what_the_documentation_says_of_the_record() -> None:
    head, rows = command.read_record(RECORD)
    assert page.text(head, rows) == (ROOT / "docs" / "results" / "loss_curves.md").read_text()
    assert 0.01 <= head["filled"] <= 0.02
    results = page.Results(head, rows)
    assert len(results.seeds("original")) >= 20
    assert results.mean("original") < 0.9 * head["unigram"]  # it has learnt something
    for arm in ("queues 1", "queues 2", "queues 3", "adaptive", "Dynamic-CP"):
        assert results.paired(arm).equivalence(page.MARGIN) < 0.05, arm
    training_page = (ROOT / "docs" / "training.md").read_text()
    for arm, other in (
        ("fixed 8", "original"),
        ("queues 2", "original"),
        ("adaptive", "original"),
        ("Dynamic-CP", "original"),
        ("adaptive, rate by tokens", "original"),
    ):
        assert page.interval(results.paired(arm, other)).lstrip("+-") in training_page, (arm, other)
