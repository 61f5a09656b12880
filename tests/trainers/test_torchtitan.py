"""`balance(config, ...)` in the real torchtitan, against a plain loop, one document at a time."""

from __future__ import annotations

import os
import signal
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainers import titan  # before any other file of torchtitan is read

# isort: split
from datasets import Dataset
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.distributed import compile as titan_compile
from torchtitan.distributed import fsdp as titan_fsdp
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS, ChatDataLoader, HuggingFaceTextDataLoader
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import wlb
from tests.torch import processes
from tests.trainers.advised import Made, advised, of, running
from tests.trainers.advised import predicted as predicted_by
from tests.trainers.page import block
from tests.trainers.small_corpus import CONTEXT, LENGTHS, llama
from wlb.integrations import versions
from wlb.integrations.torchtitan import WlbDataLoader, balance, proof
from wlb.integrations.torchtitan.costs import cost_of_model
from wlb.integrations.torchtitan.trainer import _for_ranks
from wlb.torch.data import BalancedBatchSampler, Piece
from wlb_tools.command.output.trainers import ENTRIES

STEPS = 20
CHUNKED = ChunkedLossWrapper.Config(num_chunks=4, loss_fn=CrossEntropyLoss.Config(global_vocab_size=titan.VOCABULARY))


def run(rank: int, folder: Path, packed: dict[str, Any], options: dict[str, Any], kill: int | None = None) -> Any:
    """Losses, weights if this rank has them all, gradient accumulation and what was logged."""

    def after_step(step: int) -> None:
        if step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    made = titan.config(folder, **options)
    losses, trainer, logged = titan.train(balance(made, **sources() | packed), after_step=after_step)
    trainer.close()
    return losses, titan.weights(trainer.model_parts), trainer.gradient_accumulation_steps, logged


def sources() -> dict[str, Any]:
    return {"documents": titan.documents(), "max_tokens": 64}


@cache
def reference(max_tokens: int = 64, micro_batches: int = 4, layers: int = 2) -> tuple[list[float], np.ndarray]:
    """The steps of the same plan in a plain loop, nothing packed."""
    made = titan.config(Path("unused"), layers=layers)
    shape = made.model_spec.model
    packer = wlb.Packer(
        num_micro_batches=micro_batches,
        max_tokens=max_tokens,
        max_document_tokens=CONTEXT,
        oversize="split",
        cost_model=cost_of_model(shape),
        release="adaptive",
        max_delay=16,
    )
    sampler = BalancedBatchSampler(
        LENGTHS, packer=packer, dp_rank=0, dp_size=1, tokens_per_batch=4 * CONTEXT, num_epochs=100
    )
    shape.update_from_config(config=made)
    model: Any = shape.build()
    model.init_weights(buffer_device=None)
    titan.same_weights(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    plan = (batch for _ in range(100) for batch in sampler)
    losses = []
    for _ in range(STEPS):
        rows = [alone(element) for _ in range(micro_batches) for element in next(plan)]
        labels = sum(label != -100 for _, predicted in rows for label in predicted)
        total = 0.0
        for tokens, predicted in rows:
            positions = torch.arange(len(tokens))[None]
            masks = model.get_attention_masks(positions)
            logits = model(torch.tensor(tokens)[None], positions=positions, attention_masks=masks)[0]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(predicted), reduction="sum") / labels
            if labels and any(label != -100 for label in predicted):
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, titan.weights([model])


def alone(element: int | Piece) -> tuple[list[int], list[int]]:
    """Tokens of a document or a piece, and what each predicts: that of a piece's last one is in the next piece."""
    number, start, length = element if isinstance(element, Piece) else (element, 0, int(LENGTHS[element]))
    row = titan.documents()[number]
    following = [*row["labels"][1:], -100]
    return row["input_ids"][start : start + length], following[start : start + length]


def agrees(found: Any, expected: Any, steps: slice = slice(None)) -> None:
    np.testing.assert_allclose(found[0], expected[0][steps], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=1e-5 * np.abs(expected[1]).max())


@pytest.mark.parametrize("ranks", [1, 2])
def test_data_parallel_ranks_take_the_steps_of_one_document_at_a_time(ranks: int, tmp_path: Path) -> None:
    for found in processes.run(ranks, run, tmp_path, {}, {}):
        agrees(found, reference())
        assert found[2] == 4 // ranks


def test_loggers_get_what_the_plans_say(tmp_path: Path) -> None:
    ((*_, logged),) = processes.run(1, run, tmp_path, {}, {"steps": 3})
    assert logged[0]["wlb/imbalance"] == pytest.approx(logged[0]["wlb/lost_time"])  # of one step
    for metrics in logged:
        assert 1 <= metrics["wlb/imbalance"] < 2
        assert 1 <= metrics["wlb/lost_time"] < 2
        assert metrics["wlb/tokens"] <= 4 * 64
        assert "wlb/padding" not in metrics
        assert metrics["wlb/delay_mean"] <= metrics["wlb/delay_max"] <= 16
    assert logged[-1]["wlb/backlog_tokens"] > 0
    assert {"loss_metrics/global_avg_loss", "grad_norm", "n_tokens_seen"} <= logged[-1].keys()


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with pytest.raises(processes.RankFailed, match="died"):
        processes.run(2, run, tmp_path, {}, {}, 10)
    found = processes.run(2, run, tmp_path, {}, {})[0]
    whole = processes.run(2, run, tmp_path / "whole", {}, {})[0]
    assert found[0] == whole[0][7:]
    np.testing.assert_array_equal(found[1], whole[1])


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_another_number_of_ranks_goes_on(before: int, after: int, tmp_path: Path) -> None:
    processes.run(before, run, tmp_path, {}, {"steps": 7})
    for found in processes.run(after, run, tmp_path, {}, {}):
        agrees(found, reference(), slice(7, None))


def test_context_parallel_ranks_share_varlen_attention(tmp_path: Path) -> None:
    options = {"attention": "varlen", "parallelism": {"context_parallel_degree": 2}}
    for found in processes.run(2, run, tmp_path, {}, options):
        agrees(found, reference())


def test_context_parallel_ranks_share_flex_attention(tmp_path: Path) -> None:
    options = {"parallelism": {"context_parallel_degree": 2}}
    for found in processes.run(2, run, tmp_path, {"max_tokens": 256}, options):
        agrees(found, reference(256, 1))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "InterleavedZeroBubble"])
def test_pipeline_stages_take_unequal_micro_batches(schedule: str, tmp_path: Path) -> None:
    parallelism = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    options = {"layers": 4, "parallelism": parallelism}
    first, last = processes.run(2, run, tmp_path, {}, options)
    losses, weights = reference(layers=4)
    np.testing.assert_allclose(last[0], losses, rtol=1e-5)
    assert first[1].size + last[1].size == weights.size


@pytest.mark.long
@pytest.mark.parametrize("attention", ["flex", "varlen"])
def test_all_kinds_of_ranks_together(attention: str, tmp_path: Path) -> None:
    parallelism = {"pipeline_parallel_degree": 2, "context_parallel_degree": 2, "data_parallel_shard_degree": 2}
    options = {"layers": 4, "parallelism": parallelism, "attention": attention}
    packed = {"max_tokens": 256 if attention == "flex" else 64}
    *_, last = processes.run(8, run, tmp_path, packed, options)
    np.testing.assert_allclose(last[0], reference(packed["max_tokens"], 4, 4)[0], rtol=1e-5)


def test_tensor_parallel_ranks_and_chunks_of_the_loss_divide_rows(tmp_path: Path) -> None:
    options = {"parallelism": {"tensor_parallel_degree": 2}, "loss": CHUNKED}
    for found in processes.run(2, run, tmp_path, {}, options):
        np.testing.assert_allclose(found[0], reference()[0], rtol=1e-5)


def one_mask_for_all() -> None:
    masks = Decoder.get_attention_masks

    def whole(self: Any, positions: torch.Tensor, **others: Any) -> Any:
        return masks(self, positions=torch.arange(positions.shape[1]).expand_as(positions), **others)

    Decoder.get_attention_masks = whole  # type: ignore[method-assign]


def labels_shifted_twice() -> None:
    row = WlbDataLoader.row

    def shifted(self: Any, batch: Any) -> Any:
        given, labels = row(self, batch)
        return given, torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)

    WlbDataLoader.row = shifted  # type: ignore[method-assign]


def gradients_averaged() -> None:
    titan_fsdp.disable_fsdp_gradient_division = lambda model: None


def a_step_read_ahead() -> None:
    generator = Trainer.batch_generator

    def ahead(self: Any, data: Any) -> Any:
        rows = generator(self, data)
        each = self.gradient_accumulation_steps * self.num_pipeline_parallel_microbatches
        held = [next(rows) for _ in range(each)]
        for row in rows:
            held.append(row)
            yield held.pop(0)

    Trainer.batch_generator = ahead  # type: ignore[method-assign]


CONTEXT_PARALLEL = {"parallelism": {"context_parallel_degree": 2}}
TRAPS: list[tuple[Any, int, dict[str, Any], dict[str, Any], str]] = [
    (one_mask_for_all, 1, {}, {}, "lets documents of a row see each other"),
    (one_mask_for_all, 2, {"max_tokens": 256}, CONTEXT_PARALLEL, "lets documents of a row see each other"),
    (labels_shifted_twice, 1, {}, {}, "the batch's labels"),
    (gradients_averaged, 2, {}, {}, "it is averaged over 2 ranks"),
    (a_step_read_ahead, 1, {}, {}, "goes on with step 3 where step 2 was next"),
]


def trapped(rank: int, folder: Path, trap: Any, packed: dict[str, Any], options: dict[str, Any]) -> tuple[str, int]:
    """What the proof says, and how many steps were trained."""
    trap()
    made = balance(titan.config(folder, **options, steps=2), **sources() | packed)
    try:
        return "", len(titan.train(made)[0])
    except wlb.WlbError as found:
        return str(found), 0


@pytest.mark.parametrize(("trap", "ranks", "packed", "options", "message"), TRAPS)
def test_what_goes_wrong_in_training_is_found_before_the_first_step(
    trap: Any, ranks: int, packed: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    for found, trained in processes.run(ranks, trapped, tmp_path, trap, packed, options):
        assert message in found
        assert trained == 0


def test_no_proof_where_none_is_wanted(tmp_path: Path) -> None:
    assert processes.run(1, trapped, tmp_path, one_mask_for_all, {"verify": False}, {}) == [("", 2)]


def proved(rank: int, folder: Path, options: dict[str, Any], packed: dict[str, Any]) -> Any:
    """The names of what was compared, and the losses."""
    proofs: list[Any] = []
    proof._report = proofs.append
    losses = run(rank, folder, packed, options)[0]
    return [[check.name for check in each.checks] for each in proofs], losses


@pytest.mark.parametrize(
    ("options", "packed"),
    [
        ({}, {"token_buckets": [48, 64], "max_documents": 3}),
        ({"loss": CHUNKED}, {}),
        ({"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}}, {}),
        ({"parallelism": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1}}, {}),
    ],
)
def test_a_proof_leaves_all_as_it_was(options: dict[str, Any], packed: dict[str, Any], tmp_path: Path) -> None:
    ranks = 2 if "parallelism" in options else 1
    options = {"steps": 3, "layers": 4} | options
    found = processes.run(ranks, proved, tmp_path / "proved", options, packed)
    plain = processes.run(ranks, proved, tmp_path / "plain", options, packed | {"verify": False})
    replicas = ["weights"] if "data_parallel_replicate_degree" in options.get("parallelism", {}) else []
    one_rank = [] if "pipeline_parallel_degree" in options.get("parallelism", {}) else ["ranks"]
    names = [[name for name in names if name != "precision"] for names in found[0][0]]
    assert names == [["documents", *replicas, "mode", "others", "halves", "company", *one_rank, "resume"]]
    assert [losses for _, losses in found] == [losses for _, losses in plain]
    assert len(found[0][1]) == 3


def rows_of(config: WlbDataLoader.Config, count: int, ranks: int = 1, rank: int = 0) -> list[Any]:
    loader = config.build(dp_world_size=ranks, dp_rank=rank, tokenizer=None, seq_len=CONTEXT, local_batch_size=1)
    rows = iter(loader)
    return [next(rows) for _ in range(count)]


def loader_config(**options: Any) -> WlbDataLoader.Config:
    costs = cost_of_model(model_registry("debugmodel").model)
    return WlbDataLoader.Config(**sources() | {"cost_model": costs, "micro_batches": 4} | options)


def test_compiled_models_see_the_shapes_of_the_buckets_alone() -> None:
    plain = rows_of(loader_config(), 40)
    filled = rows_of(loader_config(token_buckets=[48, 64]), 40)
    assert {row["input"].shape[1] for row, _ in filled} == {48, 64}
    for (row, labels), (long, long_labels) in zip(plain, filled, strict=True):
        tokens = labels.shape[1]
        assert torch.equal(long["input"][:, :tokens], row["input"])
        assert (long_labels[:, tokens:] == -100).all()
        assert (long["positions"] < CONTEXT).all()
        assert tokens == long_labels.shape[1] or long["positions"][0, tokens] == 0  # a document of its own


def compiled(rank: int, folder: Path) -> Any:
    """As `run`, with blocks compiled for every shape anew; and the numbers of tokens that they were compiled for."""
    seen: set[int] = set()

    def backend(graph: Any, inputs: list[Any]) -> Any:
        seen.update(each.shape[1] for each in inputs if isinstance(each, torch.Tensor) and each.ndim == 3)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.config.automatic_dynamic_shapes = False
    titan_compile._maybe_regional_inductor_backend = lambda model, name: backend
    compile_ = CompileConfig(enable=True, components=["model"], backend="aot_eager")
    found = run(rank, folder, {"token_buckets": [48, 64]}, {"compile": compile_})
    return found, seen


def test_compiled_blocks_train_in_buckets(tmp_path: Path) -> None:
    ((found, seen),) = processes.run(1, compiled, tmp_path)
    agrees(found, reference())
    assert seen == {48, 64}


@pytest.mark.parametrize(
    ("shape", "longest"), [({"multiple_of_tokens": 24}, 48), ({"token_buckets": [24, 56, 80]}, 56)]
)
def test_rows_have_the_sizes_of_the_plan(shape: dict[str, Any], longest: int) -> None:
    config = loader_config(**shape, max_documents=3)
    loader: Any = config.build(dp_world_size=1, dp_rank=0, seq_len=CONTEXT)
    assert (config.most_tokens(), loader.steps.packer.max_tokens) == (longest, longest)
    rows = iter(loader)
    padding, documents = 0, []
    for _ in range(10):
        step = [next(rows) for _ in range(4)]
        lengths = [labels.shape[1] for _, labels in step]
        assert max(lengths) <= longest
        assert not any(length % 24 for length in lengths) or shape.get("token_buckets")
        documents += [int((row["positions"] == 0).sum()) for row, _ in step]
        padding += sum(int((row["input"] == 0).sum()) for row, _ in step)
    assert max(documents) == 4  # three, and what fills up
    # No document has token 0. An empty micro-batch of no size in the plan is a row of one multiple here.
    assert 0 <= padding - loader.steps.metrics().padding_tokens < 24 * 4


def test_documents_begin_where_the_masks_of_torchtitan_think() -> None:
    for row, _ in rows_of(loader_config(give_lengths=True, multiple_of_tokens=8), 40):
        starts = np.flatnonzero(row["positions"][0] == 0)
        assert np.diff([*starts, row["positions"].shape[1]]).tolist() == row["lengths"]


def test_ranks_share_the_micro_batches_of_a_step() -> None:
    whole = rows_of(loader_config(), 8)
    shared = [row for rank in range(2) for row in rows_of(loader_config(micro_batches=2), 4, 2, rank)]
    assert sorted(row["input"].tolist() for row, _ in whole) == sorted(row["input"].tolist() for row, _ in shared)


@pytest.mark.parametrize(
    ("sharded", "stages", "given", "expected"),
    [(1, 1, None, "step"), (4, 1, None, "micro_batch"), (4, 2, None, "step"), (4, 1, "step", "step")],
)
def test_plans_follow_fsdp(sharded: int, stages: int, given: Any, expected: str, tmp_path: Path) -> None:
    """FSDP gathers parameters in every micro-batch, except in a pipeline, whose stages keep them for a step."""
    ranks = ParallelDims(1, sharded, 1, 1, stages, 1, world_size=sharded * stages)
    made = balance(titan.config(tmp_path), **sources(), sync=given, group=object())
    assert _for_ranks(made, ranks).sync == expected


def test_a_state_inside_a_step_is_refused() -> None:
    loader: Any = loader_config().build(dp_world_size=1, dp_rank=0, seq_len=CONTEXT)
    rows = iter(loader)
    next(rows)
    with pytest.raises(wlb.WlbError, match="micro_batches = 4: the Trainer saved after 1 of them"):
        loader.state_dict()
    for _ in range(3):
        next(rows)
    state = loader.state_dict()
    for changed in ({"wlb": state["wlb"][:-9]}, {"wlb": state["wlb"].replace('"step": 1', '"step": 2')}, {"other": ""}):
        fresh: Any = loader_config().build(dp_world_size=1, dp_rank=0, seq_len=CONTEXT)
        with pytest.raises(wlb.WlbError, match="state"):
            fresh.load_state_dict(changed)


def test_the_state_of_the_last_step_begins_no_further_epoch() -> None:
    def built() -> Any:
        return loader_config(num_epochs=2).build(dp_world_size=1, dp_rank=0, seq_len=CONTEXT)

    whole = built()
    given, states = 0, []
    for given, _ in enumerate(whole, start=1):
        if given % 4 == 0:
            states.append(whole.state_dict())
    assert given == 4 * len(states)
    for state, left in ((whole.state_dict(), 0), (states[-1], 0), (states[-2], 4)):
        resumed = built()
        resumed.load_state_dict(state)
        assert len(list(resumed)) == left


@pytest.mark.parametrize("kind", ["inside an epoch", "end of an epoch", "twice without reading", "another batch"])
def test_every_document_comes_once_an_epoch_after_a_resume(kind: str) -> None:
    rows = [{"input_ids": [number + 1] * length} for number, length in enumerate(LENGTHS.tolist())]

    def built(tokens_per_batch: int = 192) -> Any:
        changes = {"documents": rows, "num_epochs": 2, "tokens_per_batch": tokens_per_batch}
        return loader_config(**changes).build(dp_world_size=1, dp_rank=0, seq_len=CONTEXT)

    def read(loader: Any, states: list[Any]) -> Counter[int]:
        found: Counter[int] = Counter()
        for done, (row, _) in enumerate(loader, start=1):
            found.update(row["input"].flatten().tolist())
            if done % 4 == 0:
                states.append((loader.step.epoch, loader.state_dict(), Counter(found)))
        return found

    states: list[Any] = []
    read(built(), states)
    at = sum(epoch == 0 for epoch, *_ in states) if kind == "end of an epoch" else 3
    _, state, found = states[at - 1]
    if kind == "twice without reading":
        between = built()
        between.load_state_dict(state)
        state = between.state_dict()
    resumed = built(100 if kind == "another batch" else 192)
    resumed.load_state_dict(state)
    assert resumed.given == at
    found += read(resumed, [])
    del found[0]  # what fills rows up
    assert found == {number + 1: 2 * length for number, length in enumerate(LENGTHS.tolist())}


def test_data_that_stand_at_another_step_are_refused(tmp_path: Path) -> None:
    """A checkpoint that is loaded without the state of the data would train the first epoch's order again."""
    loader: Any = loader_config().build(dp_world_size=1, dp_rank=0, seq_len=CONTEXT)
    rows = iter(loader)
    for _ in range(8):
        next(rows)
    again: Any = loader_config().build(dp_world_size=1, dp_rank=0, seq_len=CONTEXT)
    again.load_state_dict(loader.state_dict())
    again.check_begin(2)
    processes.run(1, run, tmp_path, {}, {"steps": 7})

    def without_data(rank: int, *others: str) -> None:
        made = titan.config(tmp_path, steps=9)
        made.checkpoint.exclude_from_loading = ["dataloader", *others]
        titan.train(balance(made, documents=titan.documents(), max_tokens=64, verify=False))

    with pytest.raises(processes.RankFailed, match="checkpoint goes on after step 7, but the data stand after step 0"):
        processes.run(1, without_data)
    processes.run(1, without_data, "train_state", "lr_scheduler")  # the way on that the error names


def texts(path: str) -> Any:
    random = np.random.default_rng(3)
    lengths = random.lognormal(2.8, 1.0, 120).astype(int).clip(1, 150)
    return Dataset.from_dict({"text": ["".join(map(chr, random.integers(97, 123, length))) for length in lengths]})


@pytest.mark.parametrize("kind", ["known", "streamed", "mapped"])
def test_text_resumes(kind: str, tmp_path: Path) -> None:
    """By the name that torchtitan has for it; or as a stream of Hugging Face's that makes its tokens itself."""

    def opened(path: str) -> Any:
        return texts(path).to_iterable_dataset(num_shards=4) if kind == "streamed" else texts(path)

    DATASETS["texts"] = DatasetConfig(path="", loader=opened, sample_processor=lambda sample: sample["text"])
    packed: dict[str, Any] = {"documents": None, "dataset": "texts"}
    if kind == "mapped":
        mapped = texts("").to_iterable_dataset(num_shards=4).map(lambda row: {"input_ids": list(map(ord, row["text"]))})
        packed = {"documents": None, "streams": mapped}
    try:
        with pytest.raises(processes.RankFailed, match="died"):
            processes.run(2, run, tmp_path, packed, {"steps": 12}, 8)
        found = processes.run(2, run, tmp_path, packed, {"steps": 12})[0]
        whole = processes.run(2, run, tmp_path / "whole", packed, {"steps": 12})[0]
    finally:
        del DATASETS["texts"]
    assert found[0] == whole[0][7:]
    assert len(whole[0]) == 12


def from_lines(rank: int, folder: Path, lines: str, parallelism: dict[str, int]) -> Made:
    made = titan.config(folder, steps=2, parallelism=parallelism)
    made.dataloader = HuggingFaceTextDataLoader.Config(dataset="texts")
    names: dict[str, Any] = {"config": made, "titan": titan}
    return running(f"{lines}losses, trainer, _ = titan.train(config)\ntrainer.close()\n", names)


@pytest.mark.parametrize("axis", ["data_parallel_shard_degree", "pipeline_parallel_degree"])
def test_the_lines_of_advice_make_the_plan_that_they_recommend(axis: str, tmp_path: Path) -> None:
    costs = cost_of_model(titan.config(tmp_path).model_spec.model)
    sharded = axis == "data_parallel_shard_degree"
    layout = {"dp": 2} if sharded else {"dp": 1, "pp": 2}
    given: dict[str, Any] = {"sync": "micro_batch"} if sharded else {}
    tuned = advised("torchtitan", of(llama().config), "wlb", layout=layout, cost_model=costs, **given)
    DATASETS["texts"] = DatasetConfig(path="", loader=texts, sample_processor=lambda sample: sample["text"])
    try:
        lines = ENTRIES["torchtitan"].written(tuned)
        found = processes.run(2, from_lines, tmp_path, lines, {axis: 2})
    finally:
        del DATASETS["texts"]
    for made in found:
        assert predicted_by(tuned).packers[0] in made.packers


def test_data_ends_where_it_is_said(tmp_path: Path) -> None:
    ((losses, *_),) = processes.run(1, run, tmp_path, {"num_epochs": 1}, {"steps": 100})
    assert 8 < len(losses) < 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_spec": model_registry("debugmodel", attn_backend="flex")}, None),
        ({"model_spec": None}, "has no model_spec"),
        ({"validator.enable": True, "parallelism.pipeline_parallel_degree": 2}, "validator = enabled: cannot run"),
        ({"training.disable_cuda_graphs": False}, "disable_cuda_graphs = False: a graph has one shape"),
        ({"parallelism.pipeline_parallel_degree": 2, "parallelism.pipeline_parallel_schedule_csv": "a"}, "csv gives a"),
        ({"parallelism.context_parallel_degree": 2, "parallelism.spmd_backend": "full_dtensor"}, "is here for 'spmd_"),
    ],
)
def test_what_is_against_it_is_refused(change: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    made = titan.config(tmp_path)
    for path, value in change.items():
        *parents, name = path.split(".")
        place: Any = made
        for parent in parents:
            place = getattr(place, parent)
        setattr(place, name, value)
    if message is None:
        balance(made, **sources())
        return
    with pytest.raises(wlb.WlbError, match=message):
        balance(made, **sources())


def test_graphs_take_one_shape(tmp_path: Path) -> None:
    for attention, buckets, message in (
        ("flex", [64, 96], None),  # one that max_tokens holds
        ("flex", [32, 64], "give one token bucket"),
        ("varlen", [64], "varlen attention takes as many offsets as a row has documents"),
    ):
        made = titan.config(tmp_path, attention=attention)
        made.training.disable_cuda_graphs = False
        if message is None:
            balance(made, **sources(), token_buckets=buckets)
            continue
        with pytest.raises(wlb.WlbError, match=message):
            balance(made, **sources(), token_buckets=buckets)


def test_what_was_changed_afterwards_counts(tmp_path: Path) -> None:
    """As torchtitan's command line does it."""
    balanced = balance(titan.config(tmp_path), **sources())
    balanced.training.disable_cuda_graphs = False
    with pytest.raises(wlb.WlbError, match="disable_cuda_graphs = False"):
        balanced.build()


def test_models_in_which_documents_see_each_other_are_refused(tmp_path: Path) -> None:
    from torchtitan.models.common.attention import ScaledDotProductAttention

    made = titan.config(tmp_path)
    made.model_spec.model.layers[1].attention.inner_attention = ScaledDotProductAttention.Config()
    with pytest.raises(wlb.WlbError, match=r"model_spec\[1\] has ScaledDotProductAttention"):
        balance(made, **sources())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"documents": None}, "give one, not none of them"),
        ({"streams": []}, "give one, not documents and streams"),
        ({"documents": None, "dataset": "unheard"}, "torchtitan knows c4"),
        ({"documents": iter(())}, "without a length: give it as streams"),
        ({"documents": []}, "is empty"),
        ({"lengths": [3]}, r"there are 90 documents"),
        ({"max_document_tokens": 60}, "more than training.seq_len = 48"),
        ({"token_buckets": [80]}, r"max_tokens = 64: must be from 80"),
        ({"token_buckets": [64, 32]}, r"token_buckets\[1\] = 32: must be above 0, and above the size before it"),
        ({"token_buckets": [33, 64], "multiple_of_tokens": 2}, "must be a multiple of multiple_of_tokens"),
        ({"multiple_of_tokens": 80}, "max_tokens = 64: must be from 80"),
        ({"cost_model": None}, "balance.config, .... takes it from the model"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_loaders_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(wlb.WlbError, match=message):
        rows_of(loader_config(**options), 1)


def test_other_packings_and_misspelt_options_are_refused(tmp_path: Path) -> None:
    made = titan.config(tmp_path)
    made.dataloader = ChatDataLoader.Config(dataset_path="x", sample_processor=None)
    with pytest.raises(wlb.WlbError, match=r"ChatDataLoader\.Config, which packs in its own way"):
        balance(made, max_tokens=64)
    with pytest.raises(wlb.WlbError, match="max_token is no option"):
        balance(made, **sources(), max_token=3)
    with pytest.raises(wlb.WlbError, match=r"not torchtitan's Trainer\.Config"):
        balance(made.training, max_tokens=64)
    with pytest.raises(wlb.WlbError, match="is balanced already"):
        balance(balance(made, **sources()), **sources())


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "version", lambda name: "0.2.2")
    with pytest.raises(wlb.WlbError, match=r"torchtitan is 0.2.2: 0.3.0 or newer is needed"):
        versions.check_version("torchtitan")


def test_costs_are_those_that_torchtitan_counts() -> None:
    shape = model_registry("8B").model
    ours = wlb.ModelConfig.from_hugging_face(
        {
            "model_type": "llama",
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        }
    ).cost_model()
    lengths = [1, 1000, 131072]
    np.testing.assert_allclose(cost_of_model(shape).cost(lengths), ours.cost(lengths), rtol=1e-2)


def page(rank: int, folder: Path) -> Any:
    names: dict[str, Any] = {"documents": titan.documents()}
    exec(block("def llama3_balanced"), names)
    made = names["llama3_balanced"]()
    small = titan.config(folder, steps=3)
    for name in ("tokenizer", "dump_folder", "debug"):
        setattr(made, name, getattr(small, name))
    made.training.mixed_precision_param, made.training.seq_len, made.training.steps = "float32", CONTEXT, 3
    made.dataloader.max_tokens = 64
    losses, trainer, _ = titan.train(made)
    return losses, trainer.gradient_accumulation_steps


def test_the_page_runs(tmp_path: Path) -> None:
    for losses, accumulated in processes.run(2, page, tmp_path):
        assert np.isfinite(losses).all()
        assert (len(losses), accumulated) == (3, 8)


def counted(rank: int, folder: Path, options: dict[str, Any], packed: dict[str, Any]) -> Any:
    """Of each step the visits that experts of each layer count, before their biases move; and what is logged."""
    from torchtitan.models.common.moe import MoE
    from torchtitan.models.qwen3 import model_registry as qwen3

    made = titan.config(folder, steps=3, **options)
    made.checkpoint.enable = False
    made.model_spec = qwen3("debugmodel_moe", attn_backend="flex")
    made.model_spec.model.layers = made.model_spec.model.layers[:1]
    made.model_spec.model.vocab_size = titan.VOCABULARY
    found: list[list[float]] = []
    zero = torch.Tensor.zero_

    def watched(self: torch.Tensor) -> torch.Tensor:
        if any(self is mixture.tokens_per_expert_E for mixture in mixtures):
            found.append([float(self.sum())])
        return zero(self)

    mixtures: list[Any] = []
    torch.Tensor.zero_ = watched  # type: ignore[method-assign]  # how torchtitan begins to count anew
    configured = balance(made, documents=titan.documents(), max_delay=0, verify=False, **packed)
    build = MoE.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        mixtures.append(self)

    MoE.__init__ = built  # type: ignore[method-assign]
    _, trainer, logged = titan.train(configured)
    trainer.close()
    return found, [(line["n_tokens_seen"], line["wlb/tokens"], line.get("wlb/padding", 0.0)) for line in logged]


@pytest.mark.parametrize(
    ("ranks", "options", "packed"),
    [
        (1, {}, {"max_tokens": 64, "multiple_of_tokens": 32}),
        pytest.param(2, {"parallelism": {"context_parallel_degree": 2}}, {"max_tokens": 512}, marks=pytest.mark.long),
    ],
)
def test_what_fills_rows_up_visits_no_expert(ranks: int, options: Any, packed: Any, tmp_path: Path) -> None:
    results = processes.run(ranks, counted, tmp_path, options, packed)
    logged = results[0][1]
    assert any(padding > 0 for _, _, padding in logged)
    tokens = [int(planned) for _, planned, _ in logged]
    assert [seen for seen, _, _ in logged] == np.cumsum(tokens).tolist()
    steps = np.array([np.ravel(visits) for visits, _ in results]).sum(0)  # of all ranks
    np.testing.assert_array_equal(steps, 8 * np.array(tokens))


def test_experts_whose_counts_are_spread_are_refused(tmp_path: Path) -> None:
    from torchtitan.models.qwen3 import model_registry as qwen3

    for name in ("tensor_parallel_degree", "pipeline_parallel_degree"):
        made = titan.config(tmp_path, parallelism={name: 2})
        made.model_spec = qwen3("debugmodel_moe", attn_backend="flex")
        with pytest.raises(wlb.WlbError, match=f"load_balance_coeff.*{name} = 2") as refused:
            balance(made, documents=titan.documents(), max_tokens=64)
        assert refused.value.argument == "model_spec"
