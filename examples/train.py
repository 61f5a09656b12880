"""Trains a small Llama on real files, on any number of data-, pipeline- and context-parallel ranks.

    pip install ".[torch]"    # in a checkout
    python examples/train.py                                                  # one process, on a CPU or a GPU
    torchrun --nproc-per-node 4 examples/train.py --pp 2 --cp 2               # four, and the same losses
    torchrun --nproc-per-node 4 examples/train.py --pp 2 --checkpoint-dir run # killed? the same command goes on

What the options `--pp` and `--cp` leave of the world is data parallel. A run may go on from its checkpoint on another
layout: the documents of each step stay the same.

Read it from top to bottom. wlb stands in six places, each with a comment that begins with "wlb": the packer plans each
global batch, the sampler gives each data-parallel rank its micro-batches, `collate` keeps the tokens of this
context-parallel rank, the pipeline takes micro-batches of unequal length, copies of a weight on two stages stay equal,
and the loss counts every token once. In llama.py attention takes the shard.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sysconfig
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from numpy.typing import NDArray
from torch.distributed.checkpoint import state_dict as of_torch
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import wlb
import wlb.torch as wt
from llama import LlamaConfig, LlamaStage

# --- options ---------------------------------------------------------------------------------------------------------

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--pp", type=int, default=1, help="pipeline ranks")
parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks")
parser.add_argument("--tied", action="store_true", help="embedding and head are one weight")
parser.add_argument("--corpus", type=Path, default=sysconfig.get_path("stdlib"), help="a folder of text files")
parser.add_argument("--pattern", default="*.py", help="names of the files that are documents")
parser.add_argument("--context", type=int, default=2048, help="context window in tokens; longer documents are split")
parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a global batch, over all ranks")
parser.add_argument("--steps", type=int, default=20, help="global batches to train")
parser.add_argument("--learning-rate", type=float, default=3e-3, help="highest learning rate")
parser.add_argument("--warmup", type=int, default=4, help="steps until the highest learning rate")
parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of documents")
parser.add_argument("--checkpoint-dir", type=Path, help="where checkpoints go, and where a run resumes from")
parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints")
parser.add_argument("--metrics-file", type=Path, help="a .jsonl file that gets one line a step")


# --- documents -------------------------------------------------------------------------------------------------------


class Files:
    """A map-style dataset: each file of at most `max_tokens` is a document of byte tokens, closed by an end mark."""

    END, VOCABULARY = 256, 257

    def __init__(self, folder: Path, pattern: str, max_tokens: int) -> None:
        files = sorted(path for path in Path(folder).rglob(pattern) if "site-packages" not in path.parts)
        self.paths = [path for path in files if path.is_file() and path.stat().st_size < max_tokens]
        # wlb plans by lengths alone. Here a stat of each file gives them; `wlb lengths` measures other data sets once.
        self.lengths = np.array([path.stat().st_size + 1 for path in self.paths], np.int64)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> NDArray[np.int16]:
        return np.append(np.fromfile(self.paths[index], np.uint8).astype(np.int16), np.int16(self.END))


# --- checkpoints -----------------------------------------------------------------------------------------------------

FLAT = of_torch.StateDictOptions(flatten_optimizer_state_dict=True)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: str = "") -> dict[str, Any]:
    """What a checkpoint holds. Names of parameters do not depend on the layout, so another layout can load them."""
    return {
        "model": of_torch.get_model_state_dict(model),
        "optimizer": of_torch.get_optimizer_state_dict(model, optimizer, options=FLAT),
        "data": data,
    }


def save(folder: Path, done: int, state: dict[str, Any]) -> None:
    """Writes a checkpoint that gets its name once it is whole."""
    unfinished = folder / f"unfinished-{done:08d}"
    dcp.save(state, checkpoint_id=unfinished)
    if dist.get_rank() == 0:
        unfinished.rename(folder / f"step-{done:08d}")
    dist.barrier()


def resume(folder: Path | None, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loader: Any) -> int:
    """Loads the newest checkpoint, if there is one, and returns the number of steps that are done."""
    checkpoints = sorted(folder.glob("step-*")) if folder else []
    if not checkpoints:
        return 0
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoints[-1])
    of_torch.set_model_state_dict(model, state["model"])
    of_torch.set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)
    loader.load_state_dict(json.loads(state["data"]))
    return int(checkpoints[-1].name.removeprefix("step-"))


# --- optimization ----------------------------------------------------------------------------------------------------


def learning_rate(options: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then a cosine down to a tenth."""
    if step < options.warmup:
        return options.learning_rate * (step + 1) / options.warmup
    progress = (step - options.warmup) / max(options.steps - options.warmup, 1)
    return options.learning_rate * (0.55 + 0.45 * math.cos(math.pi * progress))


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    pipeline: dist.ProcessGroup,
    copy: torch.nn.Parameter | None,
    limit: float = 1.0,
) -> None:
    """Scales gradients so that their norm over all stages is at most `limit`; a `copy` counts on another stage."""
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None and p is not copy])
    squared = norm.full_tensor() ** 2  # over the shards of this stage
    dist.all_reduce(squared, group=pipeline)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, squared.sqrt())


# --- training --------------------------------------------------------------------------------------------------------


def main() -> None:
    """One rank's whole run."""
    options = parser.parse_args()
    for name, alone in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, alone)  # torchrun sets them where it started this process
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    dist.init_process_group("cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo")
    mesh = wt.build_mesh(pp=options.pp, cp=options.cp, dp=dist.get_world_size() // (options.pp * options.cp))
    pipeline, context_ranks = mesh["pp"].get_group(), mesh["cp"].get_group() if options.cp > 1 else None

    tokens_per_batch = options.micro_batches * options.context
    dataset = Files(options.corpus, options.pattern, max_tokens=tokens_per_batch)
    config = LlamaConfig(
        hidden_size=64, ffn_hidden_size=176, vocab_size=Files.VOCABULARY, tie_word_embeddings=options.tied
    )

    # wlb 1: the packer gives micro-batches equal work. Documents that would make a step uneven wait for a later step,
    # at most 16 steps. Micro-batches get half as many tokens again as the context: room for short documents.
    packer = wlb.Packer(
        num_micro_batches=options.micro_batches,
        max_tokens=options.context * 3 // 2,
        max_document_tokens=options.context,
        oversize="split",
        cost_model=wlb.CostModel.from_flops(**config.shape(), attention_efficiency=0.55),
        release="adaptive",
        max_delay=16,
    )
    # wlb 2: the sampler fills global batches in a random order and gives each data-parallel rank its micro-batches.
    sampler = wt.BalancedBatchSampler(
        dataset.lengths,
        packer=packer,
        tokens_per_batch=tokens_per_batch,
        dp_rank=mesh["dp"].get_local_rank(),
        dp_size=mesh["dp"].size(),
        seed=options.seed,
        num_epochs=1_000_000,  # `--steps` ends the run
    )
    # wlb 3: a micro-batch's documents become one run of tokens, of which this context-parallel rank keeps its share.
    keep = partial(wt.collate, cp_rank=mesh["cp"].get_local_rank(), cp_size=mesh["cp"].size())
    documents = DataLoader(wt.Documents(dataset), batch_sampler=sampler, collate_fn=keep, num_workers=1)
    loader = wt.StepLoader(documents)

    # The layers of this pipeline rank; FSDP shards them over the ranks that hold the same ones, and adds gradients up.
    stage_index = mesh["pp"].get_local_rank()
    model = LlamaStage(config, stage=stage_index, num_stages=options.pp)
    model.initialize(options.seed)
    model.to(device)
    for block in model.layers.values():
        fully_shard(block, mesh=wt.data_and_context(mesh), reshard_after_forward=False)
    fully_shard(model, mesh=wt.data_and_context(mesh), reshard_after_forward=False)
    wt.sum_gradients(model, group=wt.data_and_context(mesh).get_group())
    # wlb 4: a pipeline stage for micro-batches of unequal length. It also runs a pipeline of one rank.
    stage = wt.VarlenPipelineStage(
        model, stage_index, options.pp, device, group=pipeline, hidden_size=config.hidden_size
    )
    # wlb 5: a weight that stages share stays one weight.
    tied = wt.TiedWeights(model.tied_weight, group=pipeline) if options.tied else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)

    done = resume(options.checkpoint_dir, model, optimizer, loader)
    started = time.perf_counter()
    for step in loader if done < options.steps else ():
        batches = [batch.to(device, non_blocking=True) for batch in step.micro_batches]
        # wlb 6: the loss is a mean over the labels of the whole global batch, however they are packed.
        valid = wt.count_valid_tokens(step, group=wt.data_and_context(mesh).get_group())
        losses = wt.pipeline_step(
            [stage],
            [
                wt.PipelineMicroBatch(
                    tokens=batch.tokens.numel(),
                    args=(batch.tokens,),
                    kwargs={"position_ids": batch.position_ids, "shard": batch.shard, "group": context_ranks},
                    target=batch.labels,
                )
                for batch in batches
            ],
            schedule="1f1b",
            loss_fn=partial(wt.token_normalized_loss, num_valid_tokens=valid),
        )
        if tied is not None:
            tied.all_reduce_gradients()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, done)
        clip_gradients(model.parameters(), pipeline, None if tied is None or tied.is_first else model.tied_weight)
        if valid:  # otherwise no token has a label, on all ranks alike, and momentum would still move weights
            optimizer.step()
        optimizer.zero_grad()
        done += 1

        # The ranks of the last stage have a share of the loss each; all of them together have the mean.
        loss = torch.stack(losses).sum() if losses else torch.zeros((), device=device)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            lengths = np.concatenate([micro_batch.lengths for micro_batch in step.plan.micro_batches])
            row = {"step": done, "loss": loss.item(), "imbalance": step.plan.imbalance}
            row |= {"documents": lengths.size, "lengths": np.unique(lengths).size, "tokens": step.plan.tokens.tolist()}
            speed = lengths.sum() / (time.perf_counter() - started)
            print(
                f"step {done:>4}/{options.steps}  loss {row['loss']:.4f}  imbalance {row['imbalance']:.3f}  "
                f"{lengths.size} documents, {lengths.sum():,} tokens, {speed:,.0f} tokens/s",
                flush=True,
            )
            if options.metrics_file:
                with options.metrics_file.open("a") as log:
                    log.write(json.dumps(row) + "\n")
        if options.checkpoint_dir and (done % options.checkpoint_every == 0 or done == options.steps):
            # `step.state` is where this step ends, whatever the loader has fetched since.
            save(options.checkpoint_dir, done, state_of(model, optimizer, json.dumps(step.state)))
        if done == options.steps:
            break
        started = time.perf_counter()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
