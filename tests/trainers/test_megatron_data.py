"""What Megatron-Core reads and plans by: its indexed files, our scheduler in its place, and what is refused by name."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.torch.processes import run as run_processes
from tests.trainers.page import block

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

import wlb
import wlb.torch as wt
from tests.trainers.megatron_run import CONTEXT, Run, alone, build, configuration, documents, initialize, on_cpu
from wlb.integrations import megatron
from wlb.integrations.megatron import refusals
from wlb.integrations.megatron.costs import cost_of
from wlb.integrations.megatron.documents import PaddedDocuments

COST = wlb.CostModel(attention=1.0, linear=64.0)


def files(folder: Path, rows: list[list[np.ndarray]]) -> str:
    """Documents, each of some sequences, as Megatron writes them."""
    prefix = str(folder / "corpus")
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for sequences in rows:
        for sequence in sequences:
            builder.add_item(torch.from_numpy(sequence))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.mark.parametrize("sequences", [1, 3])
def test_indexed_documents_are_read_by_pieces(tmp_path: Path, sequences: int) -> None:
    rng = np.random.default_rng(1)
    rows = [[rng.integers(0, 9, rng.integers(1, 20)) for _ in range(sequences)] for _ in range(8)]
    source = megatron.IndexedDocuments(files(tmp_path, rows))
    whole = [np.concatenate(row) for row in rows]
    assert source.lengths.tolist() == [len(row) for row in whole] == [len(source[at].tokens) for at in range(8)]
    for number, row in enumerate(whole):
        found = source[number]
        assert (found.id, found.start, found.next_token) == (number, 0, None)
        for start in range(0, len(row), 4):
            end = min(start + 7, len(row))
            piece = source[wt.data.Piece(number, start, end - start)]
            np.testing.assert_array_equal(piece.tokens, row[start:end])
            assert piece.next_token == (row[end] if end < len(row) else None)
            assert (piece.id, piece.start) == (number, start)
    with pytest.raises(wlb.WlbError, match="the plan wants") as refused:
        source[wt.data.Piece(2, 1, len(whole[2]))]
    assert refused.value.index == 2


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    dataset = IndexedDataset(files(tmp_path, [[np.arange(1000)], [np.arange(50)]]))
    with mock.patch.object(dataset, "get", wraps=dataset.get) as get:
        source = megatron.IndexedDocuments(dataset)
        assert not get.called  # lengths come from the index
        assert source[wt.data.Piece(0, 300, 100)].tokens.tolist() == list(range(300, 400))
    assert [call.kwargs["length"] for call in get.call_args_list] == [101]  # and the token that follows


def test_documents_without_tokens_are_left_out(tmp_path: Path) -> None:
    source = megatron.IndexedDocuments(files(tmp_path, [[np.arange(5)], [], [np.arange(7)]]))
    assert (source.skipped, source.lengths.tolist(), source[1].tokens.tolist()) == (1, [5, 7], list(range(7)))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9), st.data())
def test_padding_is_never_learnt(lengths: list[int], multiple: int, data: st.DataObject) -> None:
    rows = [np.arange(1, length + 1) for length in lengths]
    source = PaddedDocuments(wt.Documents(rows), np.array(lengths), multiple=multiple, token=77)
    number = data.draw(st.integers(0, len(rows) - 1))
    padded = int(source.lengths[number])
    assert padded % multiple == 0
    assert padded - lengths[number] in range(multiple)
    start = data.draw(st.integers(0, padded // multiple - 1)) * multiple
    size = data.draw(st.integers(1, (padded - start) // multiple)) * multiple
    index = number if size == padded else wt.data.Piece(number, start, size)
    [found], [single] = source.__getitems__([index]), [source[index]]
    np.testing.assert_array_equal(found.tokens, single.tokens)
    batch = wt.collate([found])
    assert batch.tokens.numel() == size
    own = rows[number][start : start + size]
    assert batch.tokens.tolist() == [*own, *[77] * (size - len(own))]
    learnt = [*rows[number][start + 1 : start + size + 1]]
    assert batch.labels.tolist() == [*learnt, *[wt.IGNORE] * (size - len(learnt))]
    padding = source.padding(np.array([number]), np.array([start]), np.array([size]))
    assert padding == size - len(own)


def test_padding_hides_no_other_length(tmp_path: Path) -> None:
    source = PaddedDocuments(wt.Documents([np.arange(5), np.arange(9)]), np.array([7, 7]), multiple=8, token=0)
    for number, tokens in ((0, 5), (1, 9)):
        for read in (lambda index: source[index], lambda index: source.__getitems__([index])):
            with pytest.raises(wlb.WlbError, match=f"has {tokens} tokens, but lengths says 7") as refused:
                read(number)
            assert refused.value.index == number
    files_of = files(tmp_path, [[np.arange(5)]])
    with pytest.raises(wlb.WlbError, match=r"lengths are in the \.idx file"):
        megatron.documents.source(files_of, [5])  # type: ignore[attr-defined]


class World:
    """What a scheduler asks of the data x context ranks."""

    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=40), st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.data())
def test_a_schedule_is_one_that_megatron_can_run(lengths: list[int], world: int, data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from([25, 60, 200]))
    scheduler = megatron.DynamicCpScheduler(limit, World(world), cost_model=COST)
    largest = next(size for size in (16, 8, 4, 2, 1) if size == world or 2 * size < world or size == 1)
    numbers = [7 * at + 3 for at in range(len(lengths))]
    samples = list(zip(numbers, lengths, strict=True))
    try:
        of_lengths, of_numbers = scheduler.get_groups_and_subsamples(samples, None)
    except wlb.WlbError as refused:
        few = len(lengths) < world and "too few" in str(refused)
        assert few or max(lengths) > limit * largest, refused  # noqa: PT017
        return
    known = dict(samples)
    trained: list[int] = []
    for part_lengths, part in zip(of_lengths, of_numbers, strict=True):
        assert len(part) == world
        assert part_lengths == [[known[number] for number in rank] for rank in part]
        for number in {number for rank in part for number in rank}:
            ranks = [at for at, rank in enumerate(part) if number in rank]
            size = len(ranks)
            assert size & (size - 1) == 0
            assert size <= largest
            assert ranks == list(range(ranks[0], ranks[0] + size))
            assert ranks[0] % size == 0  # one of the groups that Megatron-Core has made
            assert all(part[at] == part[ranks[0]] for at in ranks)  # in one order, or they would wait for each other
            assert scheduler.gpus_needed(known[number]) <= size
            trained.append(number)
        shares = [sum(known[number] / sum(number in other for other in part) for number in rank) for rank in part]
        assert max(shares) <= limit
    assert sorted(trained) == numbers
    assert all(of_numbers[-1])  # gradients are exchanged with the last sample of each rank


def test_a_last_part_takes_samples_of_others() -> None:
    """Two parts of two samples, each on a rank of its own, leave the third rank idle in both."""
    samples = list(enumerate([100, 101, 101, 161]))
    parts = megatron.DynamicCpScheduler(200, World(3), cost_model=COST).get_groups_and_subsamples(samples, None)[1]
    assert all(parts[-1])
    assert sorted(number for part in parts for rank in part for number in rank) == [0, 1, 2, 3]


QUANTIZED = [
    ({"fp8": "hybrid", "fp8_recipe": "delayed"}, 16),
    ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
    ({"fp4": "e2m1", "fp4_recipe": "nvfp4"}, None),  # what Megatron-Core says
    ({}, 1),
]


def rows(rank: int, cp: int, changes: dict[str, Any], multiple: int, dynamic: bool = False) -> Any:
    """Of an epoch: tokens of each row, labels that count, padding by steps and by the packer, and the multiple."""
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Run(cp=cp, dynamic_cp=dynamic)
        initialize(run)
        config = configuration(run, finalize_model_grads_func=print)
        model = build(run, config) if dynamic else config
        for name, value in changes.items():
            setattr(config, name, value)
        sizes = {"max_tokens_per_rank": 384, "max_document_tokens": 192, "tokens_per_batch": 1500, "pad_token": 9}
        data = megatron.data_iterator(
            documents(), model=model, cost_model=COST, dynamic_cp=dynamic, multiple_of_tokens=multiple, **sizes
        )
        found, labels, padding = [], 0, 0
        for step in data:
            padding += step.padding_tokens
            for batch in step.batches:
                found.append(batch.tokens.shape[1])
                labels += int(batch.loss_mask.sum())
                assert batch.packed_seq_params.cu_seqlens_q[-1] == found[-1] * batch.packed_seq_params.shard.cp_size
        planned = data.metrics().padding_tokens
        data.close()
        return found, labels, padding, planned, megatron.row_multiple(config, cp_size=cp, multiple_of_tokens=multiple)


@pytest.mark.a_few(10)
@pytest.mark.parametrize("layout", ["one", "cp", "dynamic"])
@pytest.mark.parametrize(("changes", "demanded"), QUANTIZED)
@pytest.mark.parametrize("more", [1, 48])
def test_rows_are_what_quantized_kernels_take(
    layout: str, changes: dict[str, Any], demanded: int | None, more: int
) -> None:
    ranks, cp = {"one": (1, 1), "cp": (2, 2), "dynamic": (2, 1)}[layout]
    found = run_processes(ranks, rows, cp, changes, more, layout == "dynamic")
    multiple = found[0][-1]
    assert demanded is None or multiple == np.lcm.reduce([demanded, more, cp])
    assert multiple % 16 == 0 or not changes
    for sizes, *_ in found:
        assert sizes
        assert not any(size % multiple for size in sizes)
        assert max(sizes) <= 384
    learnt = sum(int((labels != wt.IGNORE).sum()) for _, labels in alone_rows())
    assert sum(labels for _, labels, *_ in found) == learnt
    counted, held = sum(padding for _, _, padding, *_ in found), sum(sum(sizes) for sizes, *_ in found)
    assert held - counted == sum(len(tokens) for tokens, _ in alone_rows())  # every token once, all else is counted
    if layout != "dynamic":
        inside = sum(-len(tokens) % (2 * cp if cp > 1 else 1) for tokens, _ in alone_rows())
        empty = counted - inside - found[0][3]  # rows without documents, of which a plan has none
        assert empty % multiple == 0
        assert empty >= 0
        assert found[0][3] > 0 or multiple == cp


def alone_rows() -> list[tuple[Any, Any]]:
    return alone(np.array([(at, 0, 192) for at in range(len(documents()))]))


def test_a_scheduler_refuses_rows_that_quantized_kernels_do_not_take() -> None:
    config = configuration(Run())
    for name, value in (("fp8", "hybrid"), ("fp8_recipe", "mxfp8")):
        setattr(config, name, value)
    scheduler = megatron.DynamicCpScheduler(64, World(2), cost_model=COST)
    with pytest.raises(wlb.WlbError, match=r"sample_id_seqlens\[1\] has 96 tokens.* pad samples to multiples of 64"):
        scheduler.get_groups_and_subsamples([(0, 64), (1, 96)], config)
    assert scheduler.get_groups_and_subsamples([(0, 64), (1, 128)], config)


def test_multiples_below_one_are_named() -> None:
    assert megatron.required_multiple(cp_size=4, tp_size=2) == 16
    assert megatron.padded_lengths([1, 16, 17], pad_multiple=16).tolist() == [16, 16, 32]
    with pytest.raises(wlb.WlbError, match="cp_size"):
        megatron.required_multiple(cp_size=0)
    with pytest.raises(wlb.WlbError, match="pad_multiple"):
        megatron.padded_lengths([1], pad_multiple=0)


@pytest.mark.parametrize("option", [{"token_buckets": [64]}, {"multiple_of_tokens": 8}, {"max_documents": 4}])
def test_sizes_that_nothing_fills_up_to_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(wlb.WlbError, match=f"{next(iter(option))} is no option here"):
        megatron.DynamicCpScheduler(64, World(4), cost_model=COST, **option)


def test_a_scheduler_takes_costs_from_the_model() -> None:
    scheduler = megatron.DynamicCpScheduler(64, World(4))
    with pytest.raises(wlb.WlbError, match="cost_model is missing"):
        scheduler.get_groups_and_subsamples([(0, 8)], None)
    samples = [(at, length) for at, length in enumerate([60, 9, 9, 30, 4, 4, 12, 12])]
    assert scheduler.get_groups_and_subsamples(samples, configuration(Run()))[1]
    assert scheduler.get_groups_and_subsamples([], None) == ([], [])
    with pytest.raises(wlb.WlbError, match="too few for 4 ranks"):
        megatron.DynamicCpScheduler(64, World(4), cost_model=COST, max_cp_size=2).get_groups_and_subsamples(
            [(0, 8)], None
        )


@pytest.mark.parametrize("sizes", [(2**31 - 2, 0), (2**40, 0), (-1, 0)])
def test_a_window_that_no_document_fills_costs_what_none_does(sizes: tuple[int, int]) -> None:
    config = configuration(Run())
    plain = cost_of(config, vocab_size=8)
    config.window_size = sizes
    assert cost_of(config, vocab_size=8) == plain
    config.window_size = (2**31 - 3, 0)
    with pytest.raises(wlb.WlbError, match="windows"):
        cost_of(config, vocab_size=8)


def refused(changes: dict[str, Any], options: dict[str, Any]) -> str | None:
    """The argument that `data_iterator` refuses, before anything is read."""
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = configuration(Run())
        for name, value in changes.items():
            setattr(config, name, value)
        given = {"model": config, "cost_model": COST, "max_tokens_per_rank": 64, "tokens_per_batch": 256, **options}
        try:
            megatron.data_iterator(given.pop("dataset", documents()), **given).close()
        except wlb.WlbError as found:
            return str(found.argument)
        return None


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str | None]] = [
    ({}, {}, None),
    ({"hybrid_context_parallel": True}, {}, "hybrid_context_parallel"),
    ({"sequence_packing_scheduler": "dp_balanced"}, {}, "sequence_packing_scheduler"),
    ({"tp_comm_overlap": True}, {}, "tp_comm_overlap"),
    ({"calculate_per_token_loss": False}, {}, "calculate_per_token_loss"),
    ({"pipeline_model_parallel_size": 2}, {}, "variable_seq_lengths"),
    (
        {
            "pipeline_model_parallel_size": 2,
            "variable_seq_lengths": True,
            "virtual_pipeline_model_parallel_size": 2,
        },
        {},
        "overlap_p2p_comm",
    ),
    ({"cuda_graph_impl": "local"}, {}, "cuda_graph_impl"),
    ({"context_parallel_size": 2}, {"dynamic_cp": True}, "context_parallel_size"),
    ({"multi_latent_attention": True}, {"dynamic_cp": True}, "multi_latent_attention"),
    ({"mtp_num_layers": 1}, {"dynamic_cp": True}, "mtp_num_layers"),
    ({}, {"dynamic_cp": True}, "model"),
    ({"multi_latent_attention": True}, {"cost_model": None}, "cost_model"),
    ({}, {"cost_model": None}, "cost_model"),
    ({}, {"max_cp_size": 2}, "max_cp_size"),
    ({}, {"max_tokens_per_rank": 0}, "max_tokens_per_rank"),
    ({}, {"max_document_tokens": 65}, "max_document_tokens"),
    ({"fp8": "hybrid", "fp8_recipe": "mxfp8"}, {"max_tokens_per_rank": 48}, "max_tokens_per_rank"),
    ({}, {"model": 3}, "model"),
    ({}, {"dataset": "no/such_files"}, "dataset"),
    ({}, {"lengths": [3, 4]}, "lengths"),
    ({}, {"lengths": np.full(len(documents()), 3.5)}, "lengths"),
]


def all_refused(rank: int) -> list[str | None]:
    with on_cpu():
        initialize(Run())
    return [refused(changes, options) for changes, options, _ in REFUSED]


def test_what_goes_against_packed_rows_is_refused_by_name() -> None:
    [found] = run_processes(1, all_refused)
    assert found == [argument for _, _, argument in REFUSED]


def of_files(rank: int, prefix: str) -> tuple[int, list[tuple[int, int, int]]]:
    """Of two stages: labels that count, and what was read of indexed files, by a worker."""
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize(Run(pp=2))
        config = configuration(Run(pp=2), finalize_model_grads_func=print)
        sizes: dict[str, Any] = {"max_tokens_per_rank": CONTEXT, "tokens_per_batch": 300, "num_workers": 1}
        data = megatron.data_iterator(prefix, model=build(Run(pp=2), config), **sizes)
        labels, pieces = 0, []
        for step in data:
            labels += sum(int(batch.loss_mask.sum()) for batch in step.batches if batch.loss_mask is not None)
            if step.source is not None:
                found = step.source.pieces
                pieces += zip(found.ids.tolist(), found.starts.tolist(), found.lengths.tolist(), strict=True)
        data.close()
        return labels, sorted(pieces)


def test_every_token_of_indexed_files_is_trained_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 3 * CONTEXT, 30)
    prefix = files(tmp_path, [[rng.integers(0, 9, length)] for length in lengths])
    (_, pieces), (labels, none) = run_processes(2, of_files, prefix)
    assert none == []
    assert labels == (lengths - 1).sum()  # cuts drop no prediction
    expected = [
        (at, start, min(CONTEXT, length - start))
        for at, length in enumerate(lengths.tolist())
        for start in range(0, length, CONTEXT)
    ]
    assert pieces == expected


def of_page(rank: int) -> list[int]:
    """Labels of each step that the page's line gives, in a folder that has its files."""
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize(Run())
        config = configuration(Run(), finalize_model_grads_func=print)
        names: dict[str, Any] = {"megatron": megatron, "model": build(Run(), config)}
        exec(block("data = megatron.data_iterator"), names)
        labels = [sum(int(batch.loss_mask.sum()) for batch in step.batches) for step in names["data"]]
        names["data"].close()
        return labels


def test_the_page_says_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 400, 30)
    prefix = files(tmp_path, [[rng.integers(0, 9, length)] for length in lengths])
    for ending in (".bin", ".idx"):
        Path(prefix + ending).rename(tmp_path / f"corpus_text_document{ending}")
    [labels] = run_processes(1, of_page)
    assert sum(labels) == (lengths - 1).sum()


def unfit(rank: int) -> dict[str, Any]:
    """Of two stages: one that cannot read, groups that nobody made, gradients that nobody divides."""
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize(Run(pp=2))
        config = configuration(Run(pp=2))
        model = build(Run(pp=2), config)
        options: dict[str, Any] = {"model": model, "max_tokens_per_rank": CONTEXT, "tokens_per_batch": 300}
        found: dict[str, Any] = {}
        with pytest.raises(wlb.WlbError) as raised:
            megatron.data_iterator(documents(), dynamic_cp=True, max_cp_size=2, **options)
        found["groups"] = raised.value.argument
        plain = build(Run(pp=2), config, packed=False)
        with pytest.raises(wlb.WlbError, match="whose SelfAttention takes positions by the model's ranks") as raised:
            megatron.data_iterator(documents(), dynamic_cp=True, **{**options, "model": plain})
        found["layers"] = raised.value.argument
        model[0].mixer = type("MambaMixer", (torch.nn.Module,), {})()
        with pytest.raises(wlb.WlbError, match="of the kind MambaMixer, which go by the model's ranks"):
            megatron.data_iterator(documents(), dynamic_cp=True, **options)
        del model[0].mixer
        data = megatron.data_iterator(documents(), max_document_tokens=CONTEXT, **options)
        with pytest.raises(wlb.WlbError) as raised:
            next(data)
        found["unfinished"] = raised.value.argument
        config.finalize_model_grads_func = object()
        data.close()

        short = [row[:-1] if at == 5 else row for at, row in enumerate([np.arange(20)] * 40)]
        data = megatron.data_iterator(short, lengths=np.full(40, 20), shuffle=False, **options)
        with pytest.raises(wlb.WlbError) as raised:
            for _ in data:
                pass
        found["short"] = str(raised.value)
        data.close()
        data = megatron.data_iterator(documents()[:20], **options)
        found["steps"] = sum(1 for _ in data)
        found["state"] = data.state_dict() is not None
        data.close()
        return found


def test_all_stages_are_told_what_failed() -> None:
    first, second = run_processes(2, unfit)
    assert first["groups"] == second["groups"] == "max_cp_size"
    assert first["layers"] == second["layers"] == "model"
    assert first["unfinished"] == second["unfinished"] == "finalize_model_grads_func"
    assert "document 5" in first["short"] or "[5]" in first["short"]
    assert first["short"] in second["short"]
    assert first["steps"] == second["steps"] > 0
    assert (first["state"], second["state"]) == (True, False)


def again(rank: int) -> dict[str, Any]:
    """One that asks for a step once more: after an error, and after the state of an earlier step."""
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize(Run())
        config = configuration(Run(), finalize_model_grads_func=print)
        options: dict[str, Any] = {"model": config, "cost_model": COST, "shuffle": False, "max_delay": 0}
        options |= {"max_tokens_per_rank": 64, "tokens_per_batch": 128}
        rows = [np.arange(20)] * 30
        data = megatron.data_iterator([*rows[:12], np.arange(19), *rows[13:]], lengths=np.full(30, 20), **options)
        failures: list[str] = []
        for _ in range(2):
            with pytest.raises(wlb.WlbError) as raised:
                list(data)
            failures.append(str(raised.value))
        data.close()
        data = megatron.data_iterator(rows, **options)
        steps = [next(data) for _ in range(3)]
        data.load_state_dict(steps[0].state)
        resumed = next(data).number
        data.close()
        return {"failures": failures, "numbers": [step.number for step in steps], "resumed": resumed}


def test_an_error_is_no_end_and_a_state_holds_at_any_time() -> None:
    [found] = run_processes(1, again)
    assert found["failures"][0] == found["failures"][1]
    assert "document 12" in found["failures"][0]
    assert found["numbers"] == [0, 1, 2]
    assert found["resumed"] == 1


def unlabelled(rank: int) -> tuple[list[int], list[str]]:
    """Of two replicas: numbers of the steps that are given of documents of which the middle ones have no label."""
    with on_cpu(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        initialize(Run())
        config = configuration(Run(), finalize_model_grads_func=print)
        rows = [{"input_ids": np.arange(20), "labels": np.full(20, -100 if 8 <= at < 20 else 1)} for at in range(32)]
        options: dict[str, Any] = {"model": config, "cost_model": COST, "shuffle": False, "max_delay": 0}
        data = megatron.data_iterator(rows, max_tokens_per_rank=40, tokens_per_batch=80, **options)
        numbers = [step.number for step in data]
        data.close()
        return numbers, [str(each.message) for each in warned if "no label" in str(each.message)]


def test_steps_without_a_label_are_passed_over() -> None:
    """On all ranks alike: Megatron-Core would decay weights and move by momentum with gradients of zero."""
    first, second = run_processes(2, unlabelled)
    assert first == second
    numbers, warned = first
    assert numbers == [0, 1, 5, 6, 7]
    assert warned == [f"step {number} has no label that counts on any rank: it is skipped" for number in (2, 3, 4)]


def scores(rank: int, options: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the third layer's attention, ours and Megatron-Core's own, and the gradients of its offsets."""
    with on_cpu(), mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        initialize(Run())
        config = configuration(Run(config=options))
        make = {"layer_number": 3, "attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
        shape = (12, 1, config.num_attention_heads, config.kv_channels)
        q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
        hidden = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
        theirs, mine = (kind(config, **make) for kind in (DotProductAttention, megatron.PackedCoreAttention))
        assert theirs.state_dict().keys() == mine.state_dict().keys()
        mine.load_state_dict(theirs.state_dict())
        own = theirs(q, k[:, :, :2], v[:, :, :2], hidden)
        ends = torch.tensor([0, 12], dtype=torch.int32)
        packed = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=12, max_seqlen_kv=12)
        rows = q.squeeze(1), k[:, 0, :2], v[:, 0, :2]
        ours = mine(*rows, packed_seq_params=packed)
        found = []
        for made, result in ((mine, ours.reshape(12, -1)), (theirs, own[:, 0])):
            gradients = (
                torch.autograd.grad(result.sin().sum(), parameters) if (parameters := [*made.parameters()]) else ()
            )
            found.append(np.concatenate([result.detach().numpy().ravel(), *(x.numpy() for x in gradients)]))
        assert mine.sharded_state_dict("at.", metadata={"dp_cp_group": None}).keys() == {
            f"at.{name}" for name in mine.state_dict()
        }
        return found[0], found[1]


@pytest.mark.parametrize(
    "options", [{"apply_query_key_layer_scaling": True}, {"softmax_type": "off-by-one"}, {"softmax_type": "learnable"}]
)
def test_scores_are_megatrons(options: dict[str, Any]) -> None:
    """With scaling by layers, and with logits that take a share of the softmax."""
    [(ours, own)] = run_processes(1, scores, options)
    assert ours.size == 12 * 32 + (options.get("softmax_type") == "learnable") * 4
    np.testing.assert_allclose(ours, own, atol=1e-6)


def test_an_old_version_is_refused_and_a_new_one_warned_of() -> None:
    too_old = pytest.raises(wlb.WlbError, match=r"megatron-core = 0.15.3: megatron-core >= 0.16 is needed")
    with mock.patch.object(refusals, "version", return_value="0.15.3"), too_old:
        refusals.check_version()
    with mock.patch.object(refusals, "version", return_value="1.2.0"), pytest.warns(UserWarning, match="is newer"):
        refusals.check_version()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refusals.check_version()


def test_other_layers_and_data_sets_are_refused() -> None:
    with pytest.raises(wlb.WlbError, match="attention of the kind MLASelfAttention"):
        megatron.packed_layers(mla())
    packs = type("GPTDataset", (), {"__module__": "megatron.core.datasets.gpt_dataset"})
    with pytest.raises(wlb.WlbError, match="is a GPTDataset, which cuts and joins"):
        megatron.documents.source(packs(), None)  # type: ignore[attr-defined]
    with pytest.raises(wlb.WlbError, match="attention_dropout"):
        megatron.PackedCoreAttention(configuration(Run(config={"attention_dropout": 0.1})), 1, None, "self")


def mla() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(multi_latent_attention=True)


def of_rows(rank: int) -> list[str]:
    """Megatron-Core's own rows of nine tokens, by their `cu_seqlens`: "as" two documents, or the error."""
    with on_cpu(), mock.patch.object(torch.cuda, "current_device", return_value="cpu"):
        initialize(Run())
        config = configuration(Run())
        attention = megatron.PackedCoreAttention(
            config, layer_number=1, attn_mask_type=AttnMaskType.causal, attention_type="self"
        )
        shape = (9, config.num_attention_heads, config.kv_channels)
        q, k, v = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))

        def made(ends: list[int], keys: list[int] | None = None, padded: bool = False) -> Any:
            of = {"cu_seqlens_q": torch.tensor(ends, dtype=torch.int32)}
            of["cu_seqlens_kv"] = of["cu_seqlens_q"] if keys is None else torch.tensor(keys, dtype=torch.int32)
            if padded:
                of = {f"{name}_padded": values for name, values in of.items()} | of
                of["cu_seqlens_q"] = torch.tensor([0, 4, 8], dtype=torch.int32)
            return attention(q, k[:, :2], v[:, :2], packed_seq_params=PackedSeqParams("thd", **of))

        def ran(*arguments: Any) -> str:
            try:
                return "as" if torch.equal(made(*arguments), expected) else "other"
            except wlb.WlbError as raised:
                return str(raised)

        expected = made([0, 5, 9])
        of_keys, padded = ran([0, 5, 9], [0, 4, 9]), ran([0, 5, 9], None, True)
        rows = [0, 5, 9, 9, 9], [0, 5, 8], [0, 5, 5, 9], [1, 5, 9], [0, 6, 5, 9], [0, 5, 10], [0, 9, 5, 9]
        return [padded, of_keys, *map(ran, rows)]


def test_cu_seqlens_are_named_and_their_padding_is_taken() -> None:
    [found] = run_processes(1, of_rows)
    assert found == [
        "as",
        "cu_seqlens_kv differs from cu_seqlens_q: wlb's attention is for keys of the same documents as queries",
        "as",
        "cu_seqlens_q[2] = 8: must be the end of the row, which has 9 tokens on all ranks together",
        "cu_seqlens_q[2] = 5 after 5: must ascend; only the last entry may be repeated",
        "cu_seqlens_q of shape [3] begins with [1]: must be [documents + 1], from 0 on",
        "cu_seqlens_q[2] = 5 after 6: must ascend; only the last entry may be repeated",
        "cu_seqlens_q[2] = 10: must be the end of the row, which has 9 tokens on all ranks together",
        "cu_seqlens_q[2] = 5 after 9: must ascend; only the last entry may be repeated",
    ]
