"""A loop of one's own under accelerate, DDP and `fully_shard`, against a plain loop, one document at a time."""

from __future__ import annotations

import json
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.trainers.small_corpus import CONTEXT, LENGTHS, documents, llama, rows_of_steps, train_alone

STEPS = 20
EPOCHS = 2


def reference() -> list[float]:
    cost = wlb.ModelConfig.from_hugging_face(llama().config.to_dict()).cost_model()
    packer = wlb.Packer(
        num_micro_batches=4,
        max_tokens=64,
        max_document_tokens=CONTEXT,
        oversize="split",
        cost_model=cost,
        release="adaptive",
        max_delay=16,
    )
    batches = wt.BalancedBatchSampler(
        LENGTHS, packer=packer, dp_rank=0, dp_size=1, tokens_per_batch=160, num_epochs=EPOCHS
    )
    model = llama()
    micro_batches = [batch for _ in range(EPOCHS) for batch in batches]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return train_alone(model, optimizer, rows_of_steps(micro_batches, 4, STEPS))[0]


def train(rank: int, wrapper: str, folder: Path | None = None, die: bool = False) -> list[float]:
    """Three lines are wlb's: the import, the loader, the step. Saves after 7 steps, goes on from there if it can."""
    warnings.simplefilter("ignore")
    accelerator = None
    model: Any = llama()
    if wrapper == "accelerate":
        accelerator = accelerate.Accelerator(cpu=True)
        assert accelerator.num_processes == dist.get_world_size()
        model = accelerator.prepare(model)
    elif wrapper == "ddp":
        model = DistributedDataParallel(model)
    elif wrapper == "fully_shard":
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif wrapper == "fsdp":
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sizes: dict[str, Any] = {"max_tokens": 64, "max_document_tokens": CONTEXT, "tokens_per_batch": 160}
    loader = wt.balanced_loader(documents(), config=llama().config, num_epochs=EPOCHS, **sizes)
    losses: list[float] = []
    if folder is not None and (folder / "model").exists():
        model.load_state_dict(torch.load(folder / "model"))
        optimizer.load_state_dict(torch.load(folder / "optimizer"))
        saved = json.loads((folder / "data").read_text())
        loader.load_state_dict(saved["data"])
        losses = saved["losses"]
    while not loader.ended:
        for step in loader:
            losses.append(wt.train_step(model, step, accelerator=accelerator).item())
            optimizer.step()
            optimizer.zero_grad()
            if folder is not None and len(losses) == 7 and rank == 0 and not (folder / "data").exists():
                torch.save(model.state_dict(), folder / "model")
                torch.save(optimizer.state_dict(), folder / "optimizer")
                (folder / "data").write_text(json.dumps({"data": step.state, "losses": losses}))
            if die and len(losses) == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            if len(losses) == STEPS:
                return losses
    return losses


CASES: list[Any] = [
    (wrapper, ranks) for wrapper in ("accelerate", "ddp", "fully_shard", "fsdp", "plain") for ranks in (1, 2)
]


@pytest.mark.parametrize(
    ("wrapper", "ranks"),
    [pytest.param(*case, marks=[] if case == ("accelerate", 2) else pytest.mark.long) for case in CASES],
)
def test_losses_are_those_of_one_document_at_a_time(wrapper: str, ranks: int) -> None:
    expected = reference()
    for losses in processes.run(ranks, train, wrapper):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["accelerate", "ddp"])
def test_a_killed_loop_goes_on_bit_for_bit(wrapper: str, tmp_path: Path) -> None:
    with pytest.raises(processes.RankFailed, match="died"):
        processes.run(2, train, wrapper, tmp_path, True)
    assert (tmp_path / "data").exists()
    assert processes.run(2, train, wrapper, tmp_path) == processes.run(2, train, wrapper)


def test_what_makes_no_sense_is_named() -> None:
    sizes: dict[str, Any] = {"max_tokens": 64, "tokens_per_batch": 160, "config": llama().config}
    for changes, message in (
        ({"config": None}, "cost_model or config: give one of them"),
        ({"cost_model": wlb.CostModel(attention=1.0, linear=1.0)}, "cost_model or config: give one of them"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"tokens_per_batch": 0}, "tokens_per_batch = 0"),
        ({"max_delay": -1}, "max_delay = -1"),
        ({"max_delais": 1}, "max_delais is no option here"),
        ({"num_micro_batches": 4}, "num_micro_batches is no option here"),
        ({"lengths": [3]}, "there are 90 documents"),
        ({"oversize": "error"}, r"lengths\[\d+\] = "),
    ):
        with pytest.raises(wlb.WlbError, match=message):
            wt.balanced_loader(documents(), **sizes | changes)
    for dataset, message in ((iter(documents()), "without a length"), ([], "is empty"), ([{"text": "a"}], "input_ids")):
        with pytest.raises(wlb.WlbError, match=message) as refused:
            wt.balanced_loader(dataset, **sizes)
        assert refused.value.argument == "dataset"
