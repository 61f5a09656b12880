"""GRPO on rollouts that share their prompt: each shared token is computed once, and the losses stay the same.

    torchrun --nproc-per-node 2 examples/grpo.py                     # a shared prompt is computed once
    torchrun --nproc-per-node 2 examples/grpo.py --no-sharing        # once for each completion: the same losses, slower

Read it from top to bottom. A step has some prompts and a group of completions for each. wlb finds what they share
and gives samples to ranks (`plan`), makes tensors of them (`Step.of`), and sums gradients over all ranks
(`train_step`). The loss is that of every sample: `to_samples` gives each its own tokens, with its own advantage.

Completions are random tokens here, and a reward is the share of even ones; your sampler and your reward stand in their
place.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import wlb
import wlb.torch as wt
from llama import LlamaConfig, LlamaStage

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--no-sharing", action="store_true", help="compute the prompt again for each completion")
parser.add_argument("--groups", type=int, nargs="+", default=[8, 16, 8, 8], help="completions of each prompt")
parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
parser.add_argument("--completion", type=int, default=256, help="tokens of the longest completion")
parser.add_argument("--equal", action="store_true", help="all completions are that long")
parser.add_argument("--steps", type=int, default=3, help="rounds of rollouts")
parser.add_argument("--updates", type=int, default=2, help="optimizer steps on each round")
parser.add_argument("--max-tokens", type=int, default=16384, help="unique tokens of a micro-batch")
parser.add_argument("--clip", type=float, default=0.2, help="how far a ratio of probabilities may go")
parser.add_argument("--hidden-size", type=int, default=64, help="of the model")
parser.add_argument("--learning-rate", type=float, default=3e-3, help="of the optimizer")
parser.add_argument("--metrics-file", type=Path, help="a .jsonl file that gets one line an update")


def rollouts(args: argparse.Namespace, step: int) -> tuple[list[wt.Document], Tensor]:
    """Samples, of which the completions are learnt, and the advantage of each."""
    rng = np.random.default_rng(step)
    samples, advantages = [], []
    for size in args.groups:
        prompt = rng.integers(0, 256, args.prompt)
        shortest = args.completion if args.equal else args.completion // 2
        completions = [rng.integers(0, 256, rng.integers(shortest, args.completion + 1)) for _ in range(size)]
        rewards = np.array([(completion % 2 == 0).mean() for completion in completions])
        advantages += list((rewards - rewards.mean()) / (rewards.std() + 1e-6))
        for completion in completions:
            labels = np.append(np.full(prompt.size, wt.IGNORE), completion)
            samples.append(wt.Document(np.append(prompt, completion), len(samples), labels=labels))
    return samples, torch.tensor(advantages, dtype=torch.float32)


def plan(args: argparse.Namespace, samples: list[wt.Document], cost: wlb.CostModel, ranks: int) -> wlb.Packing:
    """Which samples share tokens, and which micro-batch and rank each goes to; the same on all ranks."""
    tokens = np.concatenate([sample.tokens for sample in samples])
    offsets = np.cumsum([0, *(len(sample.tokens) for sample in samples)])
    apart = np.arange(len(samples)) if args.no_sharing else None  # only samples of one group can share
    forest = wlb.PrefixForest.from_tokens(tokens, offsets, groups=apart)
    return wlb.pack(forest, num_micro_batches=None, max_tokens=args.max_tokens, cost_model=cost, dp_size=ranks)


def log_probabilities(model: torch.nn.Module, batch: wt.ForestBatch) -> Tensor:
    """Log-probability of every learnt token of every sample, float32 [predictions]; shared tokens are computed once."""
    logits = model(batch.tokens, position_ids=batch.position_ids, shard=batch.shard)
    edges = logits[batch.edge_rows].log_softmax(-1).gather(1, batch.edge_targets[:, None])[:, 0]
    return batch.to_samples(edges)


def clipped(
    model: torch.nn.Module,
    batch: wt.ForestBatch,
    valid: int,
    *,
    old: dict[int, Tensor],
    advantages: Tensor,
    clip: float,
) -> Tensor:
    """This micro-batch's part of the mean over the learnt tokens of all samples and ranks."""
    ratio = (log_probabilities(model, batch) - old[int(batch.document_ids[0])]).exp()
    advantage = advantages[batch.document_ids[batch.sample_of]]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).sum() / valid


def main() -> None:
    """Trains on some rounds of rollouts."""
    args = parser.parse_args()
    torch.set_num_threads(1)
    config = LlamaConfig(hidden_size=args.hidden_size, ffn_hidden_size=args.hidden_size * 11 // 4, num_layers=2)
    cost = wlb.CostModel.from_flops(**config.shape(), attention_efficiency=0.55)
    model = LlamaStage(config)
    model.initialize(seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    # After the optimizer, which loads torch._dynamo: loaded later it keeps gloo's threads running behind the end, where
    # they abort the process now and then (torch 2.15).
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    for round_ in range(args.steps):
        samples, advantages = rollouts(args, round_)
        planned = plan(args, samples, cost, ranks)
        step = wt.Step.of(planned, samples, number=round_, dp_rank=rank)
        with torch.no_grad():  # a sampler may bring these
            old = {int(batch.document_ids[0]): log_probabilities(model, batch) for batch in step.micro_batches}

        loss_of = partial(clipped, old=old, advantages=advantages, clip=args.clip)
        for update in range(args.updates):
            began = time.perf_counter()
            loss = wt.train_step(model, step, loss=loss_of)
            seconds = time.perf_counter() - began
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0:
                tokens = {"unique_tokens": planned.num_tokens, "raw_tokens": planned.raw_tokens}
                line = {"round": round_, "update": update, "loss": loss.item(), "seconds": seconds, **tokens}
                print(json.dumps(line), flush=True)
                if args.metrics_file:
                    with args.metrics_file.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    if dist.is_initialized():
        dist.barrier()  # a rank that ends first takes the connections of the others along
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
