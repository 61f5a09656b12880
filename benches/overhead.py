"""What wlb costs inside each trainer, beside a step of 3 s and beside the trainer's own loader on the same documents.

    python -m benches.overhead --lengths wheels_py.npy      # prints the table, writes benches/records/overhead.json

A step is 64 micro-batches of 32K tokens on 8 data-parallel ranks. Measured is the first, which plans all 64, and
reads and collates its own 8 in the training process, without workers. Documents have the given lengths (lognormal ones
without a file), and lie as the trainer keeps them: in Arrow tables, for Megatron-Core in `.bin` and `.idx` files.
Planning and collating stand apart from reading, but for Megatron-Core, where they are measured together. For Hugging
Face reading includes the trainer's own collator, which is asked for one document after the other. The trainer's own
loader gives as many tokens: rows of documents without padding, or rows cut from a stream of them. Packages that are not
installed are left out, by name. No model runs: what it takes is the same for both. Times are those of the CPU, which
other programs on the machine lengthen less than those of a clock.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from torch.utils.data import DataLoader

import wlb
from benches.common import Lengths, Row, bars, machine, options, parse, read_lengths, rounded, tables, write_record
from wlb.torch.data import BalancedBatchSampler, Documents, StepLoader, collate

RANKS, OF_A_RANK, CONTEXT = 8, 8, 32768
MICRO_BATCHES = RANKS * OF_A_RANK
TOKENS = MICRO_BATCHES * CONTEXT
HELD = CONTEXT * 5 // 4  # of a micro-batch at most: a quarter of room
PACKAGES = ["torch", "transformers", "accelerate", "lightning", "torchtitan", "megatron-core", "verl", "datasets"]

Loaders = tuple[Iterable[Any], Iterable[Any]]  # wlb's micro-batches, and the batches of the package's own loader


class Corpus:
    """Documents of given lengths, in the formats of several packages."""

    def __init__(self, lengths: Lengths) -> None:
        self.lengths = lengths
        self.tokens = np.random.default_rng(0).integers(0, 32000, int(lengths.sum())).astype(np.int32)
        self.ends = np.concatenate([[0], np.cumsum(lengths)])
        self.documents_of_a_row = max(1, round(CONTEXT / float(lengths.mean())))

    @property
    @cache  # noqa: B019
    def table(self) -> Any:
        """In Arrow tables."""
        import datasets
        import pyarrow

        column = pyarrow.LargeListArray.from_arrays(pyarrow.array(self.ends), pyarrow.array(self.tokens))
        return datasets.Dataset(pyarrow.table({"input_ids": column}))

    def indexed(self, folder: Path) -> str:
        """As Megatron's files."""
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        builder = IndexedDatasetBuilder(str(folder / "corpus.bin"), dtype=np.uint16)
        for begin, end in zip(self.ends[:-1], self.ends[1:], strict=True):
            builder.add_document(self.tokens[begin:end].tolist(), [int(end - begin)])
        builder.finalize(str(folder / "corpus.idx"))
        return str(folder / "corpus")


@cache
def config() -> Any:
    """A Llama of 7B: what documents cost."""
    from transformers import LlamaConfig

    return LlamaConfig(max_position_embeddings=CONTEXT)


def cost_model() -> wlb.CostModel:
    return wlb.ModelConfig.from_hugging_face(config().to_dict()).cost_model()


# --- the routes -------------------------------------------------------------------------------------------------------


def hugging_face(corpus: Corpus, stack: ExitStack) -> Loaders:
    from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from wlb.integrations.huggingface import balance

    folder = stack.enter_context(tempfile.TemporaryDirectory())
    tiny = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)

    def trainer() -> Any:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=corpus.documents_of_a_row,
            gradient_accumulation_steps=OF_A_RANK,
            use_cpu=True,
            report_to=[],
        )
        model = LlamaForCausalLM(tiny)
        return Trainer(model, arguments, train_dataset=corpus.table, data_collator=DataCollatorWithFlattening())

    stack.enter_context(mock.patch.object(TrainingArguments, "world_size", RANKS))
    limits = {"max_tokens": HELD, "max_document_tokens": CONTEXT, "tokens_per_batch": TOKENS}
    balanced = balance(trainer(), **limits, cost_model=cost_model(), verify=False)
    return balanced.get_train_dataloader(), trainer().get_train_dataloader()


def lightning(corpus: Corpus, stack: ExitStack) -> Loaders:
    from lightning.pytorch import LightningModule, Trainer
    from transformers import DataCollatorWithFlattening

    from wlb.integrations.lightning import BalancedDataModule

    limits = {"max_tokens": HELD, "max_document_tokens": CONTEXT, "tokens_per_batch": TOKENS}
    data = BalancedDataModule(corpus.table, **limits, config=config(), verify=False)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(LightningModule())
    stack.enter_context(mock.patch.object(Trainer, "world_size", RANKS))
    data.trainer = trainer
    data.setup("fit")
    own = DataLoader(corpus.table, corpus.documents_of_a_row, shuffle=True, collate_fn=DataCollatorWithFlattening())
    return data.train_dataloader(), own


def loop(corpus: Corpus, stack: ExitStack) -> Loaders:
    from accelerate import Accelerator
    from transformers import DataCollatorWithFlattening

    packer = wlb.Packer(
        num_micro_batches=MICRO_BATCHES,
        max_tokens=HELD,
        max_document_tokens=CONTEXT,
        oversize="split",
        cost_model=cost_model(),
        release="adaptive",
        max_delay=16,
    )
    sampler = BalancedBatchSampler(corpus.lengths, packer=packer, dp_rank=0, dp_size=RANKS, tokens_per_batch=TOKENS)
    ours = StepLoader(DataLoader(Documents(corpus.table), batch_sampler=sampler, collate_fn=collate))
    own = DataLoader(corpus.table, corpus.documents_of_a_row, shuffle=True, collate_fn=DataCollatorWithFlattening())
    return (batch.as_hf() for step in ours for batch in step.micro_batches), Accelerator(cpu=True).prepare(own)


def torchtitan(corpus: Corpus, stack: ExitStack) -> Loaders:
    from torchtitan.hf_datasets import DatasetConfig, text_datasets

    from wlb.integrations.torchtitan import WlbDataLoader

    ours = WlbDataLoader.Config(
        max_tokens=HELD,
        tokens_per_batch=TOKENS,
        micro_batches=OF_A_RANK,
        documents=corpus.table,
        cost_model=cost_model(),
    )
    read = DatasetConfig(path="", loader=lambda path: corpus.table, sample_processor=lambda row: row["input_ids"])
    stack.enter_context(mock.patch.dict(text_datasets.DATASETS, {"corpus": read}))
    tokenizer = SimpleNamespace(encode=lambda tokens, **_: tokens)  # they are tokens already
    own = text_datasets.HuggingFaceTextDataLoader.Config(dataset="corpus")
    rank: dict[str, Any] = {"dp_world_size": 1, "dp_rank": 0, "seq_len": CONTEXT, "local_batch_size": 1}
    return (
        WlbDataLoader(ours, **rank | {"dp_world_size": RANKS}),
        text_datasets.HuggingFaceTextDataLoader(own, tokenizer=tokenizer, **rank),
    )


def megatron(corpus: Corpus, stack: ExitStack) -> Loaders:
    """On one rank alone, since its ranks tell each other what they plan: a plan of 8 micro-batches, not of 64."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    from tests.trainers import megatron_run  # the CPU where Megatron-Core names the GPU
    from wlb.integrations.megatron import data_iterator

    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    stack.callback(dist.destroy_process_group)
    stack.enter_context(megatron_run.on_cpu())
    run = megatron_run.Run()
    megatron_run.initialize(run)
    model = megatron_run.configuration(run)
    model.finalize_model_grads_func = megatron_run.finalize_model_grads
    prefix = corpus.indexed(folder)
    steps = data_iterator(
        prefix,
        model=model,
        max_tokens_per_rank=HELD,
        max_document_tokens=CONTEXT,
        tokens_per_batch=TOKENS // RANKS,
        cost_model=cost_model(),
    )
    stack.callback(steps.close)
    settings = GPTDatasetConfig(
        random_seed=0,
        sequence_length=CONTEXT,
        blend=([prefix], None),
        split="1,0,0",
        reset_position_ids=True,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        tokenizer=SimpleNamespace(eod=0, vocab_size=32000, unique_identifiers={"class": "none"}),
        path_to_cache=str(folder / "cache"),
    )
    samples = int(corpus.lengths.sum()) // CONTEXT - 1
    own = BlendedMegatronDatasetBuilder(GPTDataset, [samples, 0, 0], lambda: True, settings).build()[0]
    return (batch for step in steps for batch in step.batches), DataLoader(own, batch_size=1)


def verl(corpus: Corpus, stack: ExitStack) -> Loaders:
    """A step's samples are dealt to 64 ranks: plans alone, of which verl's loader knows nothing."""
    from verl.utils import seqlen_balancing

    from wlb.integrations.verl import get_seqlen_balanced_partitions

    begins = np.searchsorted(corpus.ends, np.arange(0, corpus.ends[-1] - TOKENS, TOKENS))
    lists = [(length * (24576.0 + length)).tolist() for length in np.split(corpus.lengths, begins)[1:-1]]

    def plans(partition: Callable[..., Any]) -> Iterator[Any]:
        for lengths in lists:
            yield from partition(lengths, MICRO_BATCHES, False)

    return plans(get_seqlen_balanced_partitions), plans(seqlen_balancing.get_seqlen_balanced_partitions)


ROUTES: dict[str, Callable[[Corpus, ExitStack], Loaders]] = {
    "transformers' Trainer": hugging_face,
    "Lightning": lightning,
    "a loop, with accelerate": loop,
    "torchtitan": torchtitan,
    "Megatron-Core": megatron,
    "verl, its plans": verl,
}


# --- timing -----------------------------------------------------------------------------------------------------------


@contextmanager
def reading_timed() -> Iterator[list[float]]:
    """Seconds of each time that wlb reads documents."""
    found: list[float] = []

    def timed(own: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Documents, which: Any) -> Any:
            started = time.process_time()
            try:
                return own(self, which)
            finally:
                found.append(time.process_time() - started)

        return read

    with mock.patch.object(Documents, "__getitems__", timed(Documents.__getitems__)):
        yield found


def size(batch: Any) -> int:
    """Tokens of a batch, whatever it is."""
    if isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], int):
        batch = batch[0]
    if isinstance(batch, dict):
        batch = next(batch[name] for name in ("input_ids", "input", "tokens") if name in batch)
    return int(getattr(batch, "tokens", batch).numel())


def ours(loader: Iterable[Any], steps: int, each: int) -> tuple[list[float], list[float]]:
    """Seconds of each step without reading, and with it; the first, which reads ahead to fill queues, is left out."""
    batches, without, whole = iter(loader), [], []
    with reading_timed() as reading:
        for _ in range(steps + 1):
            reading.clear()
            started = time.process_time()
            for _ in range(each):
                next(batches)
            whole.append(time.process_time() - started)
            without.append(whole[-1] - sum(reading))
    return without[1:], whole[1:]


def own(loader: Iterable[Any], steps: int, each: int, *, plans: bool) -> list[float]:
    """Seconds for as many tokens of the package's own loader."""
    batches, seconds = iter(loader), []
    for _ in range(steps + 1):
        started, tokens = time.process_time(), 0
        for _ in range(each):
            batch = next(batches)
            tokens += 0 if plans else size(batch)
        taken = time.process_time() - started
        seconds.append(taken if plans else taken * TOKENS / RANKS / tokens)
    return seconds[1:]


def measured(route: Callable[[Corpus, ExitStack], Loaders], corpus: Corpus, steps: int) -> Row | str:
    """Seconds of each step; or what is missing."""
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            balanced, theirs = route(corpus, stack)
        except ImportError as missing:
            return str(missing)
        plans = route is verl
        each = MICRO_BATCHES if plans else OF_A_RANK
        without, whole = ours(balanced, steps, each)
        return {"wlb": without, "wlb_reading": whole, "own": own(theirs, steps, each, plans=plans)}


def main() -> None:
    parser = options(__doc__, lengths=True, record="overhead.json")
    parser.add_argument("--step", type=float, default=3.0, help="seconds of a training step (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="measured (default: %(default)s)")
    parser.add_argument("--routes", nargs="*", default=list(ROUTES), choices=list(ROUTES), help="which (default: all)")
    arguments = parse(parser)
    torch.set_num_threads(1)
    lengths = np.random.default_rng(0).lognormal(7.05, 1.63, 60_000).astype(np.int64).clip(1, 400_000)
    if arguments.lengths:
        lengths = np.concatenate([read_lengths(path) for path in arguments.lengths])
    lengths = np.random.default_rng(1).permutation(lengths[lengths > 0])
    wanted = (arguments.steps + 6) * TOKENS
    corpus = Corpus(np.resize(lengths, int(np.searchsorted(np.cumsum(lengths), wanted)) + 1))

    found: dict[str, Row] = {}
    with bars() as progress:
        for name in progress.track(arguments.routes, description="routes"):
            row = measured(ROUTES[name], corpus, arguments.steps)
            if isinstance(row, str):
                progress.console.print(f"{name}: left out, {row}")
            else:
                found[name] = row
    title = f"{MICRO_BATCHES} micro-batches of {CONTEXT} tokens on {RANKS} ranks: ms of a step on one, least / median"
    table = Table(title=title)
    share = f"% of {arguments.step:g} s"
    for column in (
        "trainer",
        "planning + collate",
        share,
        "with reading",
        "its own loader",
        "with reading, of its own",
    ):
        table.add_column(column, justify="left" if column == "trainer" else "right")
    for name, row in found.items():
        cells = [f"{min(values) * 1e3:.1f} / {median(values) * 1e3:.1f}" for values in row.values()]
        part = f"{min(row['wlb']) / arguments.step:.2%} / {median(row['wlb']) / arguments.step:.2%}"
        table.add_row(name, cells[0], part, *cells[1:], f"{median(row['wlb_reading']) / median(row['own']):.2f}")
    tables(150).print(table)
    record = {
        "machine": machine(PACKAGES),
        "lengths": [path.stem for path in arguments.lengths] or "lognormal",
        "documents": corpus.lengths.size,
        "mean_tokens": float(corpus.lengths.mean()),
        "micro_batches": MICRO_BATCHES,
        "ranks": RANKS,
        "context": CONTEXT,
        "step_seconds": arguments.step,
        "seconds": rounded(found),
    }
    write_record(arguments.record, record)
    tables(150).print(f"wrote {arguments.record}")


if __name__ == "__main__":
    main()
