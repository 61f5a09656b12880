"""`verify` accuses no model of transformers that keeps documents apart, in either precision, under any wrapper."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import wlb
import wlb.torch as wt
from tests.oracles.transformers_models import CASES, build
from tests.torch import processes
from tests.torch.test_verify import first_step
from wlb.torch.proof.precision import Precision

# Causal models whose documents share a row rightly, by positions alone. Recurrent models, and masks that ignore
# positions (gpt-oss, OPT), are refused.
FAMILIES = [
    "apertus",
    "arcee",
    "bitnet",
    "cohere",
    "cohere2",
    "csm_depth",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm",
    "glm4",
    "gpt2",
    "gpt_neox",
    "granite",
    "granitemoe",
    "helium",
    "hunyuan_v1_dense",
    "llama",
    "minicpm3",
    "ministral",
    "mistral",
    "mixtral",
    "mobilellm",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
]
REFUSED = ["mamba", "gpt_oss", "opt", "lfm2"]
QUICK = ["llama", "gemma3_text", "mixtral"]


def model_of(kind: str) -> Any:
    """A tiny model of this kind; None if transformers has none, or none so small."""
    torch.manual_seed(0)
    known = {case.model_type: case for case in CASES}
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 211}
    more = {"intermediate_size": 48, "num_key_value_heads": 1, "n_embd": 32, "n_layer": 2, "n_head": 2}
    more |= {"ffn_dim": 48, "word_embed_proj_dim": 32, "head_dim": 16, "pad_token_id": 0}
    with contextlib.suppress(Exception):  # this transformers, or so small a model of this kind, is not
        if kind in known:
            model = build(known[kind].tiny_config())
        else:
            default = AutoConfig.for_model(kind).to_dict()
            sizes |= {name: value for name, value in more.items() if name in default}
            sizes |= {"full_attn_idxs": [1]} if kind == "lfm2" else {}  # the first layer is a convolution
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
        model(input_ids=torch.arange(5)[None], use_cache=False).logits.sum().backward()
        model.zero_grad()
        return model.train()
    return None


def wrapped(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "ddp":
        return DistributedDataParallel(model, find_unused_parameters=True)
    if wrapper == "fully_shard":
        fully_shard(model)
    return model


def proved(rank: int, kinds: list[str], wrappers: list[str], dtypes: list[torch.dtype]) -> dict[str, str]:
    warnings.simplefilter("ignore")
    found = {}
    for kind in kinds:
        for wrapper in wrappers:
            for dtype in dtypes:
                model = model_of(kind)
                if model is None:
                    continue
                try:
                    wt.verify(wrapped(model.to(dtype), wrapper), first_step(), report=None)
                    found[f"{kind} {wrapper} {dtype}"] = ""
                except wlb.WlbError as wrong:
                    found[f"{kind} {wrapper} {dtype}"] = str(wrong)
    return found


BOTH = [torch.float32, torch.bfloat16]


def test_right_models_are_proved_and_others_refused() -> None:
    (found,) = processes.run(1, proved, [*QUICK, "gpt_oss"], ["plain"], BOTH)
    refused = {name for name, text in found.items() if text}
    assert refused == {name for name in found if name.startswith("gpt_oss")}, found


def test_16_bit_parameters_are_proved_where_they_are_sharded() -> None:
    for found in processes.run(2, proved, ["llama"], ["fully_shard"], BOTH):
        assert len(found) == 2
        assert not any(found.values()), found


def after_an_error(rank: int) -> list[list[Any]]:
    """Types and addresses of a model's parameters, before and after a float32 run that raised."""
    found = []
    for policy in (MixedPrecisionPolicy(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)):
        model: Any = model_of("llama").to(torch.bfloat16 if policy.param_dtype is None else torch.float32)
        fully_shard(model, mp_policy=policy)
        model(input_ids=torch.arange(5)[None])

        def state(model: Any = model) -> list[Any]:
            logits = model(input_ids=torch.arange(5)[None]).logits
            model.reshard()
            group = model._get_fsdp_state()._fsdp_param_group
            of = [(each.param_dtype, each.orig_dtype, each.reduce_dtype) for each in group.fsdp_params]
            return [logits.dtype, of, [each._local_tensor.data_ptr() for each in model.parameters()]]

        before = state()
        with contextlib.suppress(ZeroDivisionError), Precision(model, [], None).float32():
            assert model(input_ids=torch.arange(5)[None]).logits.dtype == torch.float32
            raise ZeroDivisionError
        found.append([before, state()])
    return found


def test_an_error_in_a_float32_run_leaves_no_trace() -> None:
    for found in processes.run(2, after_an_error):
        for before, after in found:
            assert before[0] == torch.bfloat16
            assert before == after


@pytest.mark.long
@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fully_shard"])
def test_no_family_that_is_right_is_refused(wrapper: str) -> None:
    (found, *_) = processes.run(1 if wrapper == "plain" else 2, proved, FAMILIES, [wrapper], BOTH, timeout=3000.0)
    assert len(found) >= 60
    assert not any(found.values()), {name: text for name, text in found.items() if text}


@pytest.mark.long
def test_families_that_do_not_keep_documents_apart_are_refused() -> None:
    (found,) = processes.run(1, proved, REFUSED, ["plain"], BOTH, timeout=3000.0)
    assert all(found.values()), {name: text for name, text in found.items() if not text}
