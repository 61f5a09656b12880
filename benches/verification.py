"""Seconds and memory of the proof before the first step, beside the first step.

    python -m benches.verification                   # prints a table, writes benches/records/verification.json

A tiny and a 100M-parameter Llama train 2 micro-batches of 512 tokens on one CPU thread, in float32 and with bfloat16
weights. `look` is the search for layers that look along the row, which `train_step` runs once for each model. `verify`
runs all experiments. Seconds are CPU time of the check and the first step together, and the peak is the most memory
that the process held until then. Each run has a process of its own.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

import wlb
import wlb.torch as wt
from benches.common import Row, bars, machine, options, parse, rounded, tables, write_record

TOKENS, MICRO_BATCHES, WORDS = 512, 2, 8192
MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 2},
    "100M": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12},
}
CHECKS = ("none", "look", "verify")


def model(name: str, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **MODELS[name])).to(dtype).train()


def first_step() -> wt.Step[Any]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(32, 512, 64)
    documents = [torch.from_numpy(rng.integers(0, WORDS, length)) for length in lengths]
    sizes: dict[str, Any] = {"max_tokens": TOKENS, "tokens_per_batch": TOKENS * MICRO_BATCHES}
    cost = wlb.CostModel(attention=1.0, linear=6.0 * 768)
    return next(iter(wt.balanced_loader(documents, **sizes, cost_model=cost)))


def peak() -> float:
    """Most memory that this process has held, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return float(line.split()[1]) * 1024


def run(name: str, dtype: torch.dtype, check: str) -> Row:
    """Seconds of a check and the first step, and the peak until both end. Runs in a new process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    of, step = model(name, dtype), first_step()
    before = time.process_time()
    if check == "verify":
        wt.verify(of, step, report=None)
    wt.train_step(of, step, verify=check == "look")
    seconds = time.process_time() - before
    return {"seconds": seconds, "peak": peak(), "parameters": sum(weight.numel() for weight in of.parameters())}


def rows() -> Iterator[Row]:
    cases = [(name, dtype, check) for dtype in (torch.float32, torch.bfloat16) for name in MODELS for check in CHECKS]
    with bars() as progress:
        for name, dtype, check in progress.track(cases, description="first steps"):
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                found = process.submit(run, name, dtype, check).result()
            yield {"model": name, "dtype": str(dtype).removeprefix("torch."), "check": check, **found}


def table(found: list[Row]) -> Table:
    result = Table("model", "precision", "check", "seconds", "first steps", "peak, GB", "beside the step's")
    for row in found:
        names = row["model"], row["dtype"], "none"
        (alone,) = (each for each in found if (each["model"], each["dtype"], each["check"]) == names)
        result.add_row(
            row["model"],
            row["dtype"],
            row["check"],
            f"{row['seconds']:.2f}",
            f"{row['seconds'] / alone['seconds']:.2f}",
            f"{row['peak'] / 1e9:.2f}",
            f"{row['peak'] / alone['peak']:.2f}",
        )
    return result


def main() -> None:
    arguments = parse(options(__doc__, record="verification.json"))
    about, found = machine(["torch", "transformers"]), []
    for row in rows():  # a run that is stopped keeps what it has measured
        found.append(row)
        write_record(arguments.record, rounded({"machine": about, "rows": found}))
    tables(120).print(table(found))


if __name__ == "__main__":
    main()
