"""Columns of rows lie on ranks, in pieces and in states as on one process; labels ahead are right at all borders."""

from __future__ import annotations

import functools
import json
import pickle
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import wlb
import wlb.torch as wt
from tests.torch import processes

AHEAD = 4
COST = wlb.CostModel(attention=1.0, linear=30.0)


def rows(count: int = 40, longest: int = 60) -> list[dict[str, Any]]:
    rng = np.random.default_rng(3)
    found = []
    for number in range(count):
        size = int(rng.integers(1, longest))
        tokens = rng.integers(0, 1000, size)
        row = {"input_ids": tokens, "completion_mask": rng.integers(0, 2, size), "loss_weights": rng.random(size) + 0.5}
        row |= {"position_ids": rng.integers(0, 90, (3, size)), "reward": rng.random(size).astype(np.float32)}
        row |= {"name": number * 1000 + np.arange(size)}
        found.append(row)
    return found


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """What each token of a row is given, in the plainest words."""
    tokens, size = row["input_ids"].tolist(), len(row["input_ids"])
    learnt = [token if keep else wt.IGNORE for token, keep in zip(tokens, row["completion_mask"], strict=True)]

    def ahead(at: int, steps: int) -> int:
        return learnt[at + steps] if at + steps < size else wt.IGNORE

    weights = row["loss_weights"].astype(np.float32).tolist()
    return {
        "tokens": tokens,
        "labels": [ahead(at, 1) for at in range(size)],
        "labels_ahead": [[ahead(at, steps) for at in range(size)] for steps in range(2, AHEAD + 1)],
        "loss_weights": [*weights[1:], 1.0],
        "position_ids": row["position_ids"].tolist(),
        "reward": row["reward"].tolist(),
        "name": row["name"].tolist(),
    }


NAMES = ("tokens", "labels", "labels_ahead", "loss_weights", "position_ids", "reward", "name")


def by_name(batches: list[wt.PackedBatch]) -> dict[int, dict[str, Any]]:
    """By the name of each token, all that it is given."""
    found = {}
    for batch in batches:
        values: dict[str, Any] = {name: getattr(batch, name, None) for name in NAMES} | dict(batch.columns)
        real = batch.real.tolist()
        for at, name in enumerate(values["name"].tolist()):
            if real[at]:
                assert name not in found
                found[name] = {column: np.asarray(value)[..., at].tolist() for column, value in values.items()}
            else:
                assert values["labels"][at] == wt.IGNORE
                assert (values["labels_ahead"][:, at] == wt.IGNORE).all()
                assert values["loss_weights"][at] == 0
    return found


def expected(given: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    found = {}
    for row in given:
        values = plain(row)
        for at, name in enumerate(values["name"]):
            found[name] = {column: np.asarray(value)[..., at].tolist() for column, value in values.items()}
    return found


OPTIONS: dict[str, Any] = {"columns": ["reward", "name"], "labels_ahead": AHEAD}


@pytest.mark.parametrize("strategy", ["per_document", "per_sequence"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_token_is_given_the_same_on_any_ranks(cp_size: int, strategy: str) -> None:
    """Labels ahead as well: what they predict may lie on another rank."""
    given = rows()
    batches = [
        wt.collate(given, cp_rank=rank, cp_size=cp_size, strategy=strategy, multiple_of_tokens=64, **OPTIONS)
        for rank in range(cp_size)
    ]
    assert by_name(batches) == expected(given)
    there = pickle.loads(pickle.dumps(batches[-1])).to("cpu")
    assert by_name([there]) == by_name([batches[-1]])
    assert there.own_positions


def test_pieces_of_documents_predict_what_follows_the_cut() -> None:
    """Also further ahead than one token."""
    given = rows()
    dataset = wt.Documents(given, **OPTIONS)
    lengths = dataset.lengths()
    numbers, starts, sizes = wlb.split_documents(lengths, max_document_tokens=7)
    pieces = [wt.Piece(int(n), int(s), int(z)) for n, s, z in zip(numbers, starts, sizes, strict=True)]
    batches = [wt.collate([dataset[piece] for piece in pieces[at : at + 9]]) for at in range(0, len(pieces), 9)]
    assert by_name(batches) == expected(given)


def test_a_roll_of_the_labels_of_a_rank_is_something_else() -> None:
    """What users had before: the reason for `labels_ahead`."""
    batch = wt.collate(rows(), cp_rank=0, cp_size=2, labels_ahead=2, columns=["reward", "name"])
    rolled = batch.labels.roll(-1)
    assert (rolled != batch.columns["labels_ahead"][0]).any()


def packer(**options: Any) -> wlb.Packer:
    usual: dict[str, Any] = {"release": "adaptive", "max_delay": 3, "oversize": "split", "max_document_tokens": 24}
    return wlb.Packer(num_micro_batches=4, max_tokens=48, cost_model=COST, **usual | options)


def stream(streams: list[Any], **options: Any) -> wt.BalancedStream[wt.PackedBatch]:
    group = dist.group.WORLD if dist.is_initialized() else None
    made = options.pop("of", None) or packer()
    return wt.BalancedStream(
        streams,
        packer=made,
        collate_fn=functools.partial(wt.collate, **OPTIONS),
        group=group,
        tokens_per_batch=130,
        **OPTIONS | options,
    )


def read_stream(_rank: int) -> tuple[list[Any], list[Any], list[dict[str, Any]]]:
    """All tokens of this rank, those after a resume in the middle, and the states."""
    given = rows()
    whole = stream([given[::2], given[1::2]])
    found, states = [], []
    for step in whole:
        found.append(by_name(step.micro_batches))
        states.append(json.loads(json.dumps(step.state)))
    whole.close()
    middle = next(at for at, state in enumerate(states) if len(state["waiting"]) > 1)
    again = stream([given[::2], given[1::2]])
    again.load_state_dict(states[middle])
    resumed = [by_name(step.micro_batches) for step in again]
    again.close()
    assert resumed == found[middle + 1 :]
    return found, resumed, states


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stream_carries_columns_over_ranks_and_through_states(ranks: int) -> None:
    results = processes.run(ranks, read_stream)
    found: dict[int, Any] = {}
    for steps, _, _ in results:
        for step in steps:
            assert not found.keys() & step.keys()
            found |= step
    assert found == expected(rows())


def test_a_state_with_another_column_is_refused() -> None:
    _, _, states = read_stream(0)
    state = next(state for state in states if state["waiting"])
    for change in ("column reward f4", "column reward i8 5", "column reward f4 x"):
        broken = json.loads(json.dumps(state))
        record = broken["waiting"][0]
        record[change] = record.pop("column reward f4 ")
        with pytest.raises(wlb.WlbError, match="state"):
            stream([rows()[::2], rows()[1::2]]).load_state_dict(broken)


def read_dynamic(rank: int, ranks: int) -> list[Any]:
    """What this rank trains of the documents that ranks read in turn."""
    given = rows()
    group = dist.group.WORLD if ranks > 1 else None
    plan = functools.partial(
        wlb.plan_dynamic_cp,
        world_size=ranks,
        num_stages=1,
        max_tokens_per_rank=64,
        cost_model=COST,
        multiple_of_tokens=8,
    )
    shares = [given[at : at + 10][rank::ranks] for at in range(0, len(given), 10)]
    loader: wt.DynamicCpLoader[wt.PackedBatch] = wt.DynamicCpLoader(shares, plan=plan, group=group, **OPTIONS)
    found = [by_name(step.micro_batches) for step in loader]
    loader.close()
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dynamic_cp_carries_columns_to_the_ranks_that_train_them(ranks: int) -> None:
    results = [read_dynamic(0, 1)] if ranks == 1 else processes.run(ranks, read_dynamic, ranks)
    found: dict[int, Any] = {}
    for steps in results:
        for step in steps:
            assert not found.keys() & step.keys()
            found |= step
    assert found == expected(rows())


def unlike(rank: int) -> str:
    """Ranks whose documents have columns of other shapes."""
    share = [{"input_ids": [1, 2], "position_ids": [[5, 5]] * (2 + rank)}]
    plan = functools.partial(wlb.plan_dynamic_cp, world_size=2, num_stages=1, max_tokens_per_rank=64, cost_model=COST)
    loader = wt.DynamicCpLoader([share], plan=plan, group=dist.group.WORLD)
    with pytest.raises(wlb.WlbError) as refused:
        next(loader)
    loader.close()
    return str(refused.value)


def test_ranks_whose_columns_differ_all_say_so() -> None:
    for message in processes.run(2, unlike):
        assert "has position_ids of shape [3, 'tokens'], and documents before it of [2, 'tokens']" in message


def joined(given: list[dict[str, Any]], each: int) -> list[dict[str, Any]]:
    """Rows that hold several documents."""
    found = []
    for at in range(0, len(given), each):
        parts = given[at : at + each]
        row = {name: np.concatenate([part[name] for part in parts], axis=-1) for name in parts[0]}
        found.append(row | {"seq_lengths": [len(part["input_ids"]) for part in parts]})
    return found


def test_rows_of_several_documents_are_split_everywhere() -> None:
    given, wanted = joined(rows(), 3), expected(rows())
    assert by_name([wt.collate(given, **OPTIONS)]) == wanted
    documents = wt.Documents(given, **OPTIONS)
    assert documents.lengths().tolist() == [len(row["input_ids"]) for row in rows()]
    assert len(documents) == len(rows())
    loader = wt.balanced_loader(
        given, max_tokens=48, max_document_tokens=24, tokens_per_batch=130, cost_model=COST, **OPTIONS
    )
    found = [by_name([batch]) for step in loader for batch in step.micro_batches]
    assert functools.reduce(lambda one, other: one | other, found) == wanted
    whole = stream([given])
    steps = [(by_name(step.micro_batches), step.state) for step in whole]
    whole.close()
    assert functools.reduce(lambda one, other: one | other, (found for found, _ in steps)) == wanted
    for at in (0, len(steps) // 2):
        again = stream([given])
        again.load_state_dict(json.loads(json.dumps(steps[at][1])))
        assert [by_name(step.micro_batches) for step in again] == [found for found, _ in steps[at + 1 :]]
        again.close()


def test_documents_without_a_column_get_what_it_means_to_have_none() -> None:
    first = {"input_ids": [1, 2, 3], "position_ids": [[4, 4, 4], [5, 6, 7]], "loss_weights": [1, 0.5, 1]}
    batch = wt.collate([first, [7, 8]], multiple_of_tokens=8)
    assert batch.position_ids.tolist() == [[4, 4, 4, 0, 1, 0, 1, 2], [5, 6, 7, 0, 1, 0, 1, 2]]
    assert batch.columns["loss_weights"].tolist() == [0.5, 1, 1, 1, 1, 0, 0, 0]
    assert batch.real.tolist() == [True] * 5 + [False] * 3


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ({"input_ids": [1], "reward": [1.0]}, {}, r"documents\[0\] has the column 'reward'.*columns=\['reward'\]"),
        ({"input_ids": [1]}, {"columns": ["reward"]}, "columns.* has 'reward', which documents has not"),
        ([1, 2], {"columns": ["reward"]}, "bare tokens"),
        ({"input_ids": [1]}, {"columns": "reward"}, "must be a sequence of names"),
        ([1, 2], {"labels_ahead": 0}, "labels_ahead = 0"),
        ({"input_ids": [1, 2], "position_ids": [1]}, {}, r"position_ids of shape \(1,\) for 2 tokens"),
        ({"input_ids": [1, 2], "position_ids": [0.5, 1]}, {}, "position_ids of float64, not integers"),
        ({"input_ids": [1, 2], "completion_mask": [2, 1]}, {}, "completion_mask with other values than 0 and 1"),
        ({"input_ids": [1, 2], "loss_weights": [1, np.nan]}, {}, "must be finite numbers"),
        ({"input_ids": [1, 2], "loss_weights": [1, 2], "weights": [1, 2]}, {}, "has both"),
        ({"input_ids": [1, 2], "shift_labels": [2, 5]}, {}, "last token predicts 5"),
        ({"input_ids": [1, 2], "shift_labels": [3, -100], "labels": [1, 2]}, {}, "contradict"),
        ({"input_ids": [1, 2], "seq_lengths": [1, 2]}, {}, "seq_lengths of 3 tokens for 2"),
        ({"input_ids": [1, 2], "seq_lengths": [0, 2]}, {}, "must be from 1 on"),
        ({"input_ids": [1, 2], "attention_mask": [0, 0]}, {}, "hides all"),
        ({"input_ids": [1, 2], "attention_mask": [[1, 1]]}, {}, "one document in a row"),
        ({"input_ids": [1, 2], "cu_seq_lens_q": [0, 1, 2]}, {}, "cu_seq_lens_q of several"),
        ({"input_ids": [1, 2], "seq_idx": [0, 1]}, {}, "seq_idx of several"),
        ({"input_ids": [1, 2], "reward": ["a", "b"]}, {"columns": ["reward"]}, "not numbers"),
    ],
)
def test_what_a_row_cannot_mean_is_named(given: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(wlb.WlbError, match=message):
        wt.collate([given], **options)


def test_labels_ahead_of_a_piece_that_somebody_made_are_not_guessed() -> None:
    piece = wt.Document(np.arange(4), 3, start=8, next_token=5)
    with pytest.raises(wlb.WlbError, match=r"give labels_ahead to wt\.Documents"):
        wt.collate([piece], labels_ahead=2)
    whole = wt.collate([wt.Document(np.arange(4), 3)], labels_ahead=2)
    assert whole.columns["labels_ahead"].tolist() == [[2, 3, wt.IGNORE, wt.IGNORE]]


class Network(nn.Module):
    """Logits of a token by itself, so that documents cannot see each other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(1000, 8), nn.Linear(8, 1000)

    def forward(self, batch: wt.PackedBatch) -> Tensor:
        logits: Tensor = self.head(self.embedding(batch.tokens))
        return logits


def test_weights_multiply_losses_and_the_mean_stays_that_over_labels() -> None:
    given = [{name: row[name] for name in ("input_ids", "completion_mask", "loss_weights")} for row in rows()]
    loader = wt.balanced_loader(
        given, max_tokens=64, tokens_per_batch=10**6, cost_model=COST, max_document_tokens=16, max_delay=0
    )
    model = Network()
    [step] = loader
    loss = wt.train_step(model, step)
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for row in given:
        learnt = row["completion_mask"][1:] == 1
        losses = nn.functional.cross_entropy(
            model.head(model.embedding(torch.from_numpy(row["input_ids"][:-1]))),
            torch.from_numpy(row["input_ids"][1:]),
            reduction="none",
        )
        total = total + (losses * torch.from_numpy(row["loss_weights"][1:] * learnt).float()).sum()
        count += int(learnt.sum())
    (total / count).backward()  # type: ignore[no-untyped-call]
    assert float(loss) == pytest.approx(float(total.detach()) / count, rel=1e-5)
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-6, rtol=1e-4)
