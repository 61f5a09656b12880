"""Resumes of Megatron-Core's steps: every document once an epoch, wherever a run was saved."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest

from tests.torch.processes import RankFailed
from tests.torch.processes import run as run_processes

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core import parallel_state

import wlb
from tests.trainers.megatron_run import Run, build, configuration, initialize, on_cpu
from wlb.integrations import megatron

EPOCHS = 2
LENGTHS = np.random.default_rng(1).integers(4, 60, 26)
# A token of its own for each document; 0 is padding.
DOCUMENTS = [np.full(length, number + 1) for number, length in enumerate(LENGTHS.tolist())]
EACH = Counter({number + 1: EPOCHS * length for number, length in enumerate(LENGTHS.tolist())})
KINDS = ["inside an epoch", "end of an epoch", "twice without reading", "other ranks", "another batch"]
LAYOUTS: dict[str, tuple[int, Run]] = {
    "plain": (1, Run()),
    "context-parallel": (2, Run(cp=2)),
    "stages": (2, Run(pp=2)),
    "dynamic": (2, Run(dynamic_cp=True, options={"max_cp_size": 2})),
}
# To which layout each goes on that has twice as many data-parallel ranks, or another number of stages.
OTHERS: dict[str, tuple[int, Run]] = {
    "plain": (2, Run()),
    "context-parallel": (4, Run(cp=2)),
    "stages": (2, Run()),
    "dynamic": (4, Run(dynamic_cp=True, options={"max_cp_size": 2})),
}


def read(rank: int, run: Run, tokens_per_batch: int, state: Any, steps: int | None, again: int = 0) -> Any:
    """Tokens that this rank trains, and of each step its epoch and its state.

    Args:
        rank: this one.
        run: a layout.
        tokens_per_batch: of a step.
        state: to go on from; None: the beginning.
        steps: how many at most; None: all; 0: those of the first epoch.
        again: how often the state is saved and loaded before anything is read.
    """
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize(run)
        config = configuration(run, finalize_model_grads_func=print)
        model = build(run, config) if run.dynamic_cp else config

        def made() -> megatron.DataIterator:
            sizes: dict[str, Any] = {"max_tokens_per_rank": 64, "max_document_tokens": 48, "num_epochs": EPOCHS}
            data = megatron.data_iterator(
                DOCUMENTS,
                model=model,
                cost_model=wlb.CostModel(attention=1.0, linear=50.0),
                tokens_per_batch=tokens_per_batch,
                dynamic_cp=run.dynamic_cp,
                **sizes | run.options,
            )
            if state is not None:
                data.load_state_dict(state)
            return data

        data = made()
        for _ in range(again):
            state = data.state_dict()
            data.close()
            data = made()
        found: Counter[int] = Counter()
        states: list[tuple[int, Any]] = []
        for step in data:
            if steps == 0 and step.epoch:
                break
            if parallel_state.is_pipeline_first_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
                found.update(token for batch in step.batches for token in batch.tokens.flatten().tolist())
            states.append((step.number, step.state))
            if len(states) == steps:
                break
        data.close()
        del found[0]
        return found, states


def everything(parts: list[Any]) -> Counter[int]:
    return sum((part[0] for part in parts), Counter[int]())


@pytest.mark.a_few(12)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_document_comes_once_an_epoch(layout: str, kind: str) -> None:
    ranks, run = LAYOUTS[layout]
    first = run_processes(ranks, read, run, 160, None, 0 if kind == "end of an epoch" else 2)
    state = first[0][1][-1][1]
    assert state is not None
    tokens, again = 160, 2 if kind == "twice without reading" else 0
    if kind == "other ranks":
        ranks, run = OTHERS[layout]
    if kind == "another batch":
        tokens = 90
    rest = run_processes(ranks, read, run, tokens, state, None, again)
    assert everything(first) + everything(rest) == EACH
    assert rest[0][1][0][0] == len(first[0][1]), "steps are counted on"
    if kind in KINDS[:3]:
        whole = run_processes(ranks, read, run, 160, None, None)
        assert [part[1][len(first[0][1]) :] for part in whole] == [part[1] for part in rest]


@pytest.mark.parametrize(
    ("ranks", "saved", "run", "message"),
    [
        (1, Run(), Run(cp=2), "state was saved with tokens = 859; this corpus has 904"),
        (2, Run(dynamic_cp=True), Run(dynamic_cp=True), "state was saved with tokens = 904; this corpus has"),
        (2, Run(dynamic_cp=True), Run(dynamic_cp=True, options={"max_delay": 3}), "max_delay: saved 16, now 3"),
    ],
)
def test_what_would_train_other_documents_is_refused(ranks: int, saved: Run, run: Run, message: str) -> None:
    """Context-parallel ranks pad documents, which have other lengths then."""
    state = run_processes(ranks, read, saved, 160, None, 2)[0][1][-1][1]
    with pytest.raises(RankFailed, match=message):
        run_processes(2 if ranks == 1 or run.options else 4, read, run, 160, state, None)
