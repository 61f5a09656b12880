"""Columns of rows, on every path from a data set to a model: carried, or refused by name. None is dropped."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wlb
import wlb.torch as wt
from tests.torch import processes

IGNORE = wt.IGNORE
COST = wlb.CostModel(attention=1.0, linear=10.0)
LENGTHS = (5, 3, 8, 6, 4, 7)
TOKENS = [8 * number + np.arange(length) for number, length in enumerate(LENGTHS)]  # no token is in two documents

Row = dict[str, Any]
Effect = dict[int, dict[str, Any]]
"""Of each document, by its first token: what a model is given."""


def numbers(row: np.ndarray) -> list[int]:
    found: list[int] = row.tolist()
    return found


def masked(row: np.ndarray) -> list[int]:
    return [int(at >= len(row) // 2) for at in range(len(row))]


def weights(row: np.ndarray) -> list[float]:
    return [0.0 if at == 1 else 0.5 + at / 8 for at in range(len(row))]


def rope(row: np.ndarray) -> list[list[int]]:
    return [list(range(len(row))), [at // 2 for at in range(len(row))], [7 + at % 3 for at in range(len(row))]]


def after(labels: Iterable[int]) -> list[int]:
    return [*list(labels)[1:], IGNORE]


def learnt(row: np.ndarray) -> list[int]:
    """What each token predicts under `masked`."""
    return after(token if keep else IGNORE for token, keep in zip(numbers(row), masked(row), strict=True))


def of_each(**columns: Callable[[np.ndarray], Any]) -> list[Row]:
    return [{"input_ids": numbers(row)} | {name: made(row) for name, made in columns.items()} for row in TOKENS]


def joined() -> list[Row]:
    """Two documents in each row, as TRL packs them."""
    pairs = [(TOKENS[at], TOKENS[at + 1]) for at in range(0, len(TOKENS), 2)]
    return [
        {
            "input_ids": [*first.tolist(), *second.tolist()],
            "completion_mask": [*masked(first), *masked(second)],
            "seq_lengths": [len(first), len(second)],
        }
        for first, second in pairs
    ]


def padded(before: int) -> list[Row]:
    return [
        {
            "input_ids": [63] * before + numbers(row) + [63] * 2,
            "attention_mask": [0] * before + [1] * len(row) + [0] * 2,
            "labels": [IGNORE] * before + numbers(row) + [IGNORE] * 2,
        }
        for row in TOKENS
    ]


# Of each column: rows, what a model is given instead of the plain, what is refused, and what loaders are asked for.
LABELS = {"labels": learnt}
WEIGHTED = {
    "labels": lambda row: [IGNORE if at == 0 else label for at, label in enumerate(after(numbers(row)))],
    "weights": lambda row: [1.0, *weights(row)[2:], 1.0],
}
COLUMNS: dict[str, tuple[list[Row], dict[str, Callable[[np.ndarray], Any]], str, dict[str, Any]]] = {
    "labels": (of_each(labels=lambda row: np.where(masked(row), row, IGNORE).tolist()), LABELS, "", {}),
    "shift_labels": (of_each(shift_labels=learnt), LABELS, "", {}),
    "loss_mask": (of_each(loss_mask=masked), LABELS, "", {}),
    "completion_mask": (of_each(completion_mask=masked), LABELS, "", {}),
    "assistant_masks": (of_each(assistant_masks=masked), LABELS, "", {}),
    "two masks": (of_each(completion_mask=masked, assistant_masks=lambda row: [1] * len(row)), LABELS, "", {}),
    "loss_weights": (of_each(loss_weights=weights), WEIGHTED, "", {}),
    "token_weights": (of_each(token_weights=weights), WEIGHTED, "", {}),
    "weights": (of_each(weights=weights), WEIGHTED, "", {}),
    "loss_mask with fractions": (of_each(loss_mask=weights), WEIGHTED, "", {}),
    "weights of 0 and 1": (of_each(loss_weights=masked), LABELS, "", {}),
    "attention_mask of ones": (of_each(attention_mask=lambda row: [1] * len(row)), {}, "", {}),
    "padding behind": (padded(0), {}, "", {}),
    "padding on both sides": (padded(3), {}, "", {}),
    "attention_mask with holes": (
        of_each(attention_mask=lambda row: [1, 0] + [1] * (len(row) - 2)),
        {},
        r"hides token 1 between others",
        {},
    ),
    "position_ids": (of_each(position_ids=lambda row: list(range(len(row)))), {}, "", {}),
    "position_ids from 9": (
        of_each(position_ids=lambda row: list(range(9, 9 + len(row)))),
        {"positions": lambda row: list(range(9, 9 + len(row)))},
        "",
        {},
    ),
    "position_ids that begin anew": (
        of_each(position_ids=lambda row: [0, *range(len(row) - 1)][::-1]),
        {},
        "position_ids that begin anew",
        {},
    ),
    "position_ids of mRoPE": (of_each(position_ids=rope), {"positions": rope}, "", {}),
    "seq_lengths": (joined(), LABELS, "", {}),
    "token_type_ids of 0": (of_each(token_type_ids=lambda row: [0] * len(row)), {}, "", {}),
    "token_type_ids": (of_each(token_type_ids=masked), {}, "token_type_ids of several", {}),
    "length": (of_each(length=len), {}, "", {}),
    "text": (of_each(text=lambda row: "a text", messages=lambda row: [{"role": "user", "content": "x"}]), {}, "", {}),
    "unknown": (of_each(reward=lambda row: [at / 2 for at in range(len(row))]), {}, "the column 'reward'", {}),
    "asked for": (
        of_each(reward=lambda row: [at / 2 for at in range(len(row))]),
        {"reward": lambda row: [at / 2 for at in range(len(row))]},
        "",
        {"columns": ["reward"]},
    ),
    "asked for, a number a row": (
        of_each(reward=lambda row: float(row[0])),
        {"reward": lambda row: [float(row[0])] * len(row)},
        "",
        {"columns": ["reward"]},
    ),
    "asked for and not there": (of_each(), {}, "'reward'", {"columns": ["reward"]}),
    "labels_ahead": (
        of_each(completion_mask=masked),
        LABELS | {"ahead": lambda row: [after(learnt(row)), after(after(learnt(row)))]},
        "",
        {"labels_ahead": 3},
    ),
}


def expected(effects: dict[str, Callable[[np.ndarray], Any]]) -> Effect:
    found = {}
    for row in TOKENS:
        plain = {"tokens": numbers(row), "labels": after(numbers(row)), "positions": list(range(len(row)))}
        found[int(row[0])] = plain | {name: made(row) for name, made in effects.items()}
    return found


def by_document(values: dict[str, Any], bounds: Iterable[int]) -> Effect:
    """What is given for each document of a row, [..., tokens] each; not for what fills it up."""
    found = {}
    edges = list(bounds)
    for start, end in itertools.pairwise(edges):
        if end > start and not (values["labels"][start:end] == IGNORE).all():
            part = {name: np.asarray(value)[..., start:end].tolist() for name, value in values.items()}
            found[part["tokens"][0]] = part
    return found


def of_batch(batch: wt.PackedBatch) -> Effect:
    values = {"tokens": batch.tokens, "labels": batch.labels, "positions": batch.position_ids}
    names = {"loss_weights": "weights", "labels_ahead": "ahead"}
    values |= {names.get(name, name): column for name, column in batch.columns.items()}
    return by_document(values, batch.cu_seqlens.tolist())


def of_hugging_face(row: Any) -> Effect:
    values = {"tokens": row["input_ids"][0], "labels": row["shift_labels"][0]}
    positions = row["position_ids"]
    values["positions"] = positions[0] if positions.ndim == 2 else positions[1:, 0]
    values |= {name: row[name][0] for name in ("reward",) if name in row}
    values |= {"ahead": row["labels_ahead"][0]} if "labels_ahead" in row else {}
    return by_document(values, row["cu_seq_lens_q"].tolist())


def packer() -> wlb.Packer:
    return wlb.Packer(num_micro_batches=2, max_tokens=24, cost_model=COST, release="fifo")


def merged(found: Iterable[Effect]) -> Effect:
    return functools.reduce(lambda one, other: one | other, found, {})


# --- paths ------------------------------------------------------------------------------------------------------------


def collated(rows: list[Row], options: dict[str, Any]) -> Effect:
    return of_batch(wt.collate(rows, multiple_of_tokens=16, **options))


def balanced_loader(rows: list[Row], options: dict[str, Any]) -> Effect:
    size = {"max_tokens": 24, "tokens_per_batch": 40}
    loader = wt.balanced_loader(rows, cost_model=COST, multiple_of_tokens=4, shuffle=False, **size, **options)
    return merged(of_batch(batch) for step in loader for batch in step.micro_batches)


def balanced_stream(rows: list[Row], options: dict[str, Any]) -> Effect:
    stream = wt.BalancedStream([rows], packer=packer(), collate_fn=wt.collate, **options)
    try:
        return merged(of_batch(batch) for step in stream for batch in step.micro_batches)
    finally:
        stream.close()


def dynamic_cp(rows: list[Row], options: dict[str, Any]) -> Effect:
    plan = functools.partial(
        wlb.plan_dynamic_cp, world_size=1, num_stages=1, max_tokens_per_rank=48, cost_model=COST, multiple_of_tokens=16
    )
    loader = wt.DynamicCpLoader([rows], plan=plan, **options)
    try:
        return merged(of_batch(batch) for step in loader for batch in step.micro_batches)
    finally:
        loader.close()


def trainer(rows: list[Row], options: dict[str, Any]) -> Effect:
    from transformers import Trainer, TrainingArguments

    from tests.trainers.small_corpus import llama
    from wlb.integrations.huggingface import balance

    arguments = TrainingArguments(
        output_dir="unused",
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        remove_unused_columns=False,
        train_sampling_strategy="sequential",
    )

    def alone(features: list[Row]) -> dict[str, Any]:
        """As a trainer's collator: a batch of one."""
        found: dict[str, Any] = {}
        for name, value in features[0].items():
            tensor = None if isinstance(value, str) or name == "messages" else torch.tensor(value)
            if tensor is not None:
                found[name] = tensor[:, None] if name == "position_ids" and tensor.ndim == 2 else tensor[None]
        if "shift_labels" not in found:
            found.setdefault("labels", found["input_ids"])
        return found

    made = Trainer(llama(), arguments, train_dataset=rows, data_collator=alone)  # type: ignore[arg-type]
    balanced = balance(made, max_tokens=24, verify=False, multiple_of_tokens=4, **options)
    return merged(map(of_hugging_face, balanced.get_train_dataloader()))


def lightning(rows: list[Row], options: dict[str, Any]) -> Effect:
    from types import SimpleNamespace

    from wlb.integrations.lightning import BalancedDataModule

    data = BalancedDataModule(rows, max_tokens=24, tokens_per_batch=40, cost_model=COST, verify=False, **options)
    module: Any = torch.nn.Module()
    module.automatic_optimization = False
    fields = {"global_rank": 0, "world_size": 1, "accumulate_grad_batches": 1, "global_step": 0, "callbacks": []}
    data.trainer = SimpleNamespace(**fields, lightning_module=module, strategy=None)
    return merged(map(of_hugging_face, data.train_dataloader()))


def megatron(_rank: int) -> dict[str, Any]:
    """Every column in one process, for it takes seconds to begin."""
    from tests.trainers import megatron_run
    from wlb.integrations import megatron

    def of(batch: Any) -> Effect:
        params = batch.packed_seq_params
        values = {"tokens": batch.tokens[0], "positions": batch.position_ids[0]}
        values["labels"] = batch.labels[0].where(batch.loss_mask[0] > 0, IGNORE)
        if ((batch.loss_mask != 0) & (batch.loss_mask != 1)).any():
            values["weights"] = batch.loss_mask[0].where(batch.loss_mask[0] > 0, 1.0)
        return by_document(values, params.cu_seqlens_q.tolist())

    def read(rows: list[Row], options: dict[str, Any]) -> Effect:
        size = {"max_tokens_per_rank": 24, "tokens_per_batch": 40, "multiple_of_tokens": 4}
        data = megatron.data_iterator(rows, model=model, **size, **options)
        try:
            return merged(of(batch) for step in data for batch in step.batches)
        finally:
            data.close()

    run = megatron_run.Run()
    with megatron_run.on_cpu():
        megatron_run.initialize(run)
        model, _ = megatron_run.prepared(run)
        return {name: outcome(read, rows, options) for name, (rows, _, _, options) in COLUMNS.items()}


def torchtitan(rows: list[Row], options: dict[str, Any]) -> Effect:
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    from tests.trainers import titan  # noqa: F401  # before any other file of torchtitan is read

    # isort: split
    from wlb.integrations.torchtitan import WlbDataLoader

    if options:
        with pytest.raises(TypeError):
            WlbDataLoader.Config(max_tokens=24, documents=rows, **options)
        raise wlb.WlbError("columns and labels_ahead are no options of torchtitan's loader")
    config = WlbDataLoader.Config(
        max_tokens=24, documents=rows, cost_model=COST, micro_batches=2, multiple_of_tokens=4, num_epochs=1
    )
    loader = config.build(dp_world_size=1, dp_rank=0, tokenizer=None, seq_len=24, local_batch_size=1)
    found = []
    for row, labels in loader:
        positions = row["positions"][0]
        bounds = [*(positions == 0).nonzero().flatten().tolist(), positions.numel()]
        found.append(by_document({"tokens": row["input"][0], "labels": labels[0], "positions": positions}, bounds))
    return merged(found)


def outcome(read: Callable[[list[Row], dict[str, Any]], Effect], rows: list[Row], options: dict[str, Any]) -> Any:
    try:
        return read(rows, options)
    except wlb.WlbError as refused:
        return str(refused)


@functools.cache
def of_megatron() -> dict[str, Any]:
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    return processes.run(1, megatron)[0]


HUGGING_FACE = {"weights": "bring 'loss_weights'"}
PLAIN = HUGGING_FACE | {"positions": "bring 'position_ids'", "reward": "columns", "ahead": "labels_ahead"}
PATHS: dict[str, tuple[Any, dict[str, str]]] = {
    "collate": (collated, {}),
    "balanced_loader": (balanced_loader, {}),
    "BalancedStream": (balanced_stream, {}),
    "DynamicCpLoader": (dynamic_cp, {}),
    "Trainer": (trainer, HUGGING_FACE | {"ahead": "labels_ahead"}),
    "Lightning": (lightning, HUGGING_FACE),
    "Megatron": (None, {name: why for name, why in PLAIN.items() if name != "weights"}),
    "torchtitan": (torchtitan, PLAIN),
}
"""How each is read, and which effects it refuses by what words."""


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize("path", PATHS)
def test_a_column_is_carried_or_refused(path: str, column: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (read, refuses), (rows, effects, refused, options) = PATHS[path], COLUMNS[column]
    found = of_megatron()[column] if read is None else outcome(read, rows, options)
    why = refused or next((words for name, words in refuses.items() if name in effects), "")
    if options and path in ("Megatron", "torchtitan"):
        why = next(iter(options))
    if why:
        assert isinstance(found, str), "nothing was refused"
        assert why in found
        return
    assert not isinstance(found, str), found
    wanted = expected(effects)
    assert found.keys() == wanted.keys()
    for document, values in wanted.items():
        for name, value in values.items():
            np.testing.assert_allclose(found[document][name], value, err_msg=name)
