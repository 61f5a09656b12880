"""Does packing change what is learnt? The same model on the same documents, packed in three ways, over several seeds.

    python -m studies.loss_curves --seeds 3 --steps 150
    python -m studies.loss_curves --summarize benches/records/loss_curves.json    # trains nothing

`original` keeps the order of arrival. `fixed, 8 batches` packs 8 global batches together, the strongest of the usual
baselines for balance and the one that stirs the order of documents most. `wlb` delays outliers only. Every run is
evaluated on the same held-out documents, which no run has seen; the picture has mean and standard deviation over seeds.
Global batches of whole documents are not equally full, so runs are compared where they have trained as many tokens.

Runs of one seed start from the same weights and shuffle with the same seed, so methods are compared seed by seed: the
mean of the differences to `original`, and Student's t, which is that mean over its standard error. The spread of each
method over seeds says less: it also holds what the seeds themselves differ by. With five seeds and no true difference,
t is beyond 2.8 either way in one study of 20.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import matplotlib as mpl
import numpy as np
import torch
from cyclopts import Parameter
from cyclopts import run as run_command
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch.utils.data import DataLoader

# The trainer of the examples: its model, documents and baselines.
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import wlb
from baselines import BaselineLoader
from corpus import ByteFiles, read_corpus
from llama import LlamaConfig, LlamaStage
from wlb.torch.data import BalancedBatchSampler, Documents, PackedBatch, StepLoader, collate
from wlb.torch.loss import count_valid_tokens, token_normalized_loss

mpl.use("Agg")
import matplotlib.pyplot as plt

METHODS = {"original": "#8a8f98", "fixed, 8 batches": "#c0452c", "wlb": "#0b5c94"}


@dataclass(frozen=True)
class Study:
    """What all runs have in common."""

    steps: int
    context: int
    micro_batches: int
    every: int  # steps between evaluations
    config: LlamaConfig
    learning_rate: float

    def loader(self, method: str, dataset: ByteFiles, seed: int) -> Any:
        """The global batches of one way of packing."""
        cost = wlb.CostModel.from_flops(**self.config.shape(), attention_efficiency=0.55)
        common: dict[str, Any] = {"dp_rank": 0, "dp_size": 1, "seed": seed}
        if method != "wlb":
            window = 8 if method.startswith("fixed") else 1
            return BaselineLoader(
                dataset,
                collate=collate,
                method="fixed_length" if window > 1 else "original",
                window=window,
                num_micro_batches=self.micro_batches,
                context=self.context,
                cost_model=cost,
                **common,
            )
        # Attention as it weighs in long-context training: in this toy it is a rounding error, and nothing would wait.
        heavy = wlb.CostModel(attention=1.0, linear=self.context / 2)
        packer = wlb.Packer(
            num_micro_batches=self.micro_batches,
            max_tokens=self.context * 3 // 2,
            cost_model=heavy,
            outlier_thresholds=(self.context // 4, self.context * 5 // 8),
            max_document_tokens=self.context,
            oversize="split",
        )
        sampler = BalancedBatchSampler(dataset.lengths, packer=packer, num_epochs=1_000_000, **common)
        return StepLoader(DataLoader(Documents(dataset), batch_sampler=sampler, collate_fn=collate))


def run(
    study: Study, method: str, seed: int, dataset: ByteFiles, held_out: list[PackedBatch], tick: Any
) -> list[tuple[int, float]]:
    """Trains one model; every `study.every` steps, the tokens so far and the loss on the held-out documents."""
    model = LlamaStage(study.config)
    model.initialize(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=study.learning_rate)
    warm_up = partial(lambda step: min(1.0, (step + 1) / 20))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    loader = study.loader(method, dataset, seed)
    losses: list[tuple[int, float]] = []
    done = tokens = 0
    while done < study.steps:
        for step in loader:
            valid = count_valid_tokens(batch.num_valid_tokens for batch in step.micro_batches)
            if valid == 0:
                continue  # nothing to predict: no update
            for batch in step.micro_batches:
                loss_of(model, batch, valid).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            done, tokens = done + 1, tokens + valid
            tick()
            if done % study.every == 0:
                with torch.no_grad():
                    total = sum(batch.num_valid_tokens for batch in held_out)
                    losses.append((tokens, sum(loss_of(model, batch, total).item() for batch in held_out)))
            if done == study.steps:
                break
    return losses


def loss_of(model: LlamaStage, batch: PackedBatch, valid: int) -> torch.Tensor:
    """A micro-batch's share of the mean loss."""
    logits = model(batch.tokens, position_ids=batch.position_ids, shard=batch.shard)
    return token_normalized_loss(logits, batch.labels, num_valid_tokens=valid)


def at_equal_tokens(runs: dict[str, list[list[tuple[int, float]]]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Tokens [points], up to where the slowest run came, and the losses [seeds, points] of each method there."""
    first = max(run[0][0] for of_method in runs.values() for run in of_method)
    last = min(run[-1][0] for of_method in runs.values() for run in of_method)
    tokens = np.linspace(first, last, 20)
    return tokens, {
        method: np.array([np.interp(tokens, *zip(*run, strict=True)) for run in of_method])
        for method, of_method in runs.items()
    }


def paired(losses: np.ndarray, original: np.ndarray) -> tuple[float, float]:
    """The final loss against `original`'s, seed by seed.

    Args:
        losses: float [seeds, points].
        original: of the same shape.

    Returns:
        The mean difference relative to `original`'s mean loss, and t with `seeds - 1` degrees of freedom (NaN for fewer
        than two seeds, or if all differences are equal).
    """
    difference = losses[:, -1] - original[:, -1]
    seeds, mean = len(difference), float(difference.mean())
    error = float(difference.std(ddof=1)) / seeds**0.5 if seeds > 1 else 0.0
    return mean / float(original[:, -1].mean()), mean / error if error > 0 else math.nan


def summary(tokens: np.ndarray, found: dict[str, np.ndarray]) -> Table:
    """Final losses, their spread over seeds, and each method against `original`, seed by seed."""
    table = Table(
        "method",
        "final loss",
        "deviation over seeds",
        "against original, seed by seed",
        "t",
        title=f"Loss on held-out documents after {tokens[-1]:,.0f} tokens",
    )
    for method, losses in found.items():
        final = losses[:, -1]
        relative, t = paired(losses, found["original"])
        compared = ("", "") if method == "original" else (f"{relative:+.2%}", f"{t:.1f}" if math.isfinite(t) else "")
        deviation = f"{final.std(ddof=1):.4f}" if len(final) > 1 else ""
        table.add_row(method, f"{final.mean():.4f}", deviation, *compared)
    return table


def draw(tokens: np.ndarray, found: dict[str, np.ndarray], path: Path) -> None:
    """Mean and standard deviation over seeds."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for method, losses in found.items():
        mean, deviation = losses.mean(0), losses.std(0, ddof=1) if len(losses) > 1 else np.zeros(losses.shape[1])
        axes.plot(tokens, mean, color=METHODS[method], label=f"{method}: {mean[-1]:.3f} ± {deviation[-1]:.3f}")
        axes.fill_between(tokens, mean - deviation, mean + deviation, color=METHODS[method], alpha=0.2, linewidth=0)
    axes.set_xlabel("tokens trained (bytes)")
    axes.set_ylabel("loss on held-out documents (nats per byte)")
    axes.set_title(f"Packing and what is learnt ({len(losses)} seeds)", loc="left", weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(
    seeds: Annotated[int, Parameter(help="Runs of each method.")] = 3,
    steps: Annotated[int, Parameter(help="Global batches of a run.")] = 150,
    every: Annotated[int, Parameter(help="Steps between evaluations.")] = 10,
    context: Annotated[int, Parameter(help="Context window, bytes.")] = 1024,
    micro_batches: Annotated[int, Parameter(help="Of a global batch.")] = 4,
    hidden: Annotated[int, Parameter(help="Hidden size.")] = 96,
    layers: Annotated[int, Parameter(help="Layers.")] = 2,
    longest: Annotated[int, Parameter(help="Files larger than this are left out, bytes.")] = 4096,
    output_dir: Annotated[Path, Parameter(help="Where the picture and the record go.")] = Path("wlb-losses"),
    summarize: Annotated[Path | None, Parameter(help="Only print the summary of this record.")] = None,
) -> None:
    """Trains the same small model on documents packed in three ways; shows the loss on held-out ones."""
    if summarize is not None:
        Console().print(summary(*at_equal_tokens(json.loads(summarize.read_text())["runs"])))
        return
    if not 1 <= every <= steps:
        raise SystemExit(f"--every {every}: must be from 1 to --steps {steps}, or no run is evaluated")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    corpus = read_corpus(None)
    paths = [path for path, length in zip(corpus.paths, corpus.lengths, strict=True) if length <= longest]
    held, dataset = ByteFiles(paths[::20]), ByteFiles([path for i, path in enumerate(paths) if i % 20])
    config = LlamaConfig(
        hidden_size=hidden, ffn_hidden_size=hidden * 8 // 3, num_layers=layers, vocab_size=dataset.vocab_size
    )
    study = Study(steps, context, micro_batches, every, config, learning_rate=3e-3)
    held_out = [collate([held[i][:context]]) for i in range(min(len(held), 40))]

    runs: dict[str, list[list[tuple[int, float]]]] = {}
    started = time.time()
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("training", total=len(METHODS) * seeds * steps)
        for method in METHODS:
            runs[method] = [
                run(study, method, seed, dataset, held_out, lambda: progress.advance(task)) for seed in range(seeds)
            ]
    tokens, found = at_equal_tokens(runs)
    output_dir.mkdir(parents=True, exist_ok=True)
    draw(tokens, found, output_dir / "loss_curves.png")
    record = {
        "study": asdict(study),
        "documents": len(dataset),
        "held_out": len(held_out),
        "seconds": time.time() - started,
        "torch": torch.__version__,
        "runs": runs,
    }
    (output_dir / "loss_curves.json").write_text(json.dumps(record) + "\n")
    Console().print(summary(tokens, found))
    Console().print(f"Wrote {output_dir}/loss_curves.png and .json")


if __name__ == "__main__":
    run_command(main)
