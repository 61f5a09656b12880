"""Megatron-Core's routers and its multi-token prediction learn from documents alone, whatever fills rows up."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from tests.torch.processes import run as run_processes

pytest.importorskip("megatron.core", reason="needs megatron-core")

from megatron.core.pipeline_parallel import get_forward_backward_func

import wlb
from tests.trainers.megatron_run import VOCABULARY, Run, initialize, of_page, on_cpu, prepared
from wlb.integrations import megatron
from wlb.integrations.megatron import refusals

EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 5.0}
EXPERTS |= {"moe_ffn_hidden_size": 32, "num_layers": 2, "add_bias_linear": False}
EXPERTS["moe_token_dispatcher_type"] = "allgather"  # the other kinds want a GPU's streams
EVEN_LOGITS = EXPERTS | {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.5}
FURTHER: dict[str, Any] = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 1.0, "num_layers": 2}
COST = wlb.CostModel(attention=1.0, linear=10.0)


def rows() -> list[dict[str, Any]]:
    """A few documents that fit into one micro-batch, their first halves not learnt."""
    rng = np.random.default_rng(1)
    found = []
    for length in (7, 13, 3, 9):
        tokens = rng.integers(1, VOCABULARY, length)
        found.append({"input_ids": tokens, "completion_mask": (np.arange(length) >= length // 2).astype(int)})
    return found


def gradients(_rank: int, run: Run, told: str) -> dict[str, np.ndarray] | str:
    """Of routers and of multi-token prediction after the page's forward and backward of one step.

    Args:
        run: the layout, and the model's configuration.
        told: "all"; or which of `loss_mask` and `padding_mask` a loop leaves out.
    """
    with on_cpu(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        initialize(run)
        model, _ = prepared(run)
        size = {
            "max_tokens_per_rank": 128,
            "tokens_per_batch": 64,
            "cost_model": COST,
            "shuffle": False,
            "max_delay": 0,
        }
        data = megatron.data_iterator(rows(), model=model, **size, **run.options)
        forward_step = of_page()["forward_step"]

        def forgetful(data_iterator: Any, model: Any) -> Any:
            batch = megatron.get_batch(data_iterator)
            given = {"labels": batch.labels, "packed_seq_params": batch.packed_seq_params}
            given |= {"loss_mask": batch.loss_mask, "padding_mask": batch.padding_mask} | {told: None}
            output = model(batch.tokens, batch.position_ids, None, **given)
            return output, functools.partial(megatron.loss_func, batch.loss_mask)

        step = next(data)
        for chunk in model:
            chunk.zero_grad_buffer()
        try:
            get_forward_backward_func()(
                forward_step_func=forward_step if told == "all" else forgetful,
                model=model,
                forward_only=False,
                **step.arguments,
            )
        except wlb.WlbError as refused:
            return str(refused)
        finally:
            data.close()
        found = {}
        for chunk in model:
            for name, parameter in chunk.named_parameters():
                if "router" in name or "mtp" in name or "embedding" in name:
                    found[name] = parameter.main_grad.numpy().copy()
        assert found
        return found


@functools.cache
def of(layout: str, kind: str) -> dict[str, np.ndarray]:
    """The same on all ranks that have it."""
    ranks, run = LAYOUTS[layout]
    config = KINDS[kind]
    results = run_processes(ranks, gradients, Run(**run, config=config), "all")
    found: dict[str, np.ndarray] = {}
    for result in results:
        found |= result
    return found


KINDS = {"experts": EXPERTS, "z loss": EVEN_LOGITS, "further tokens": FURTHER}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "no filler": (1, {}),
    "filler": (1, {"options": {"multiple_of_tokens": 128}}),
    "cp": (2, {"cp": 2}),
    "cp, filler": (2, {"cp": 2, "options": {"multiple_of_tokens": 64}}),
    "sequence parallel": (2, {"tp": 2, "sequence_parallel": True, "options": {"multiple_of_tokens": 64}}),
}


CASES = [(layout, kind) for layout in LAYOUTS if layout != "no filler" for kind in KINDS]


# Over context- and tensor-parallel ranks Megatron-Core itself divides the z loss by them: no matter of filler.
LEFT_OUT = [("cp", "z loss"), ("cp, filler", "z loss"), ("sequence parallel", "z loss")]
LEFT_OUT += [("sequence parallel", "further tokens")]  # of which each rank has a part


@pytest.mark.parametrize(("layout", "kind"), [case for case in CASES if case not in LEFT_OUT])
def test_filler_teaches_nothing(layout: str, kind: str) -> None:
    expected, found = of("no filler", kind), of(layout, kind)
    assert found.keys() == expected.keys()
    if layout == "sequence parallel":  # of other weights each rank has a part
        expected = {name: gradient for name, gradient in expected.items() if "router" in name}
    assert any(("mtp" if kind == "further tokens" else "router") in name for name in found)
    for name, gradient in expected.items():
        apart = np.linalg.norm(found[name] - gradient) / max(np.linalg.norm(gradient), 1e-12)
        assert apart < 1e-4, (name, apart)


@pytest.mark.parametrize(("kind", "left_out"), [(EXPERTS, "padding_mask"), (FURTHER, "loss_mask")])
def test_a_loop_that_does_not_tell_the_model_is_stopped(kind: dict[str, Any], left_out: str) -> None:
    run = Run(config=kind, options={"multiple_of_tokens": 64})
    [message] = run_processes(1, gradients, run, left_out)
    assert isinstance(message, str), "it was trained"
    assert f"{left_out} is not given to the model" in message


@pytest.mark.parametrize(
    ("changes", "padded", "masks"),
    [
        ({"mtp_num_layers": 1}, False, "loss_mask=batch.loss_mask"),
        ({}, True, "padding_mask=batch.padding_mask"),
        ({"mtp_num_layers": 1}, True, "loss_mask=batch.loss_mask, padding_mask=batch.padding_mask"),
        ({}, False, ""),
    ],
)
def test_a_configuration_cannot_be_watched_and_says_so(changes: dict[str, Any], padded: bool, masks: str) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert refusals.require_masks([], refusal_config(**changes), padded=padded) == []
    assert [str(each.message) for each in found if f"model(..., {masks})" in str(each.message)] == [
        str(each.message) for each in found
    ]
    assert len(found) == bool(masks)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
    ],
)
def test_experts_that_cannot_be_told_refuse_padding(changes: dict[str, Any], argument: str) -> None:
    config = refusal_config(**changes)
    with pytest.raises(wlb.WlbError, match="rows are padded") as refused:
        refusals.check_experts(config)
    assert refused.value.argument == argument
    refusals.check_experts(refusal_config())


def test_biases_of_experts_are_refused_where_padding_would_count() -> None:
    config = refusal_config(moe_router_enable_expert_bias=True)
    if refusals._bias_leaves_out_padding():
        refusals.check_experts(config)
        return
    with pytest.raises(wlb.WlbError, match="cannot leave padding out of its counts"):
        refusals.check_experts(config)


def refusal_config(**changes: Any) -> Any:
    from types import SimpleNamespace

    usual = {"num_moe_experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}
    usual |= {"moe_z_loss_coeff": None, "moe_router_enable_expert_bias": False, "moe_expert_capacity_factor": None}
    return SimpleNamespace(**usual | {"mtp_num_layers": None} | changes)


def test_weights_are_those_of_losses_on_the_last_stage() -> None:
    mask = torch.tensor([[0.0, 0.5, 2.0, 0.0]])
    total, count, _ = megatron.loss_func(mask, torch.tensor([[9.0, 1.0, 1.0, 9.0]]))
    assert (float(total), int(count)) == (2.5, 2)
