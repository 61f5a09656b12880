"""In precisions that it cannot leave `verify` passes no fault: it refuses it, or says that it could not tell."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from transformers import OPTConfig, OPTForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import wlb
import wlb.torch as wt
from tests.torch import processes
from tests.torch.small_decoder import Decoder, Loop, alone, step_of
from tests.torch.test_verify import evaluation, first_step, llama

UNTOLD = "could not tell whether positions begin anew"


def verdict(verify: Callable[[], wt.Proof]) -> str:
    """What becomes of the comparison with other company: the verdict, after a warning; or the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            checks = {check.name: check for check in verify().checks}
        except wlb.WlbError as wrong:
            return str(wrong)
    assert all(check.passed for name, check in checks.items() if name != "company")
    found = checks["company"].verdict
    assert any(UNTOLD in str(each.message) for each in caught) == (found == "could not tell")
    return found


def decoder(rank: int, dtype: torch.dtype | None, places: float, how: Any, own: bool) -> str:
    """A decoder whose absolute positions count for little."""
    mesh = wt.build_mesh(dp=1, device_type="cpu")
    model = Decoder(std=0.2, own=own)
    model.places.requires_grad_(False).weight.data *= places
    loop = Loop(model, mesh)
    more: Any = {"alone": how, "group": loop.share, "dtype": dtype, "report": None}
    return verdict(lambda: wt.verify(model, step_of(mesh, 0), train=loop, **more))


@pytest.mark.parametrize(
    ("dtype", "places", "how", "right", "wrong"),
    [
        (torch.float8_e4m3fn, 1.0, alone, "passed", "where documents share a row"),
        (torch.float8_e4m3fn, 1.0, "rows", "passed", "where documents share a row"),
        (torch.float8_e4m3fn, 0.1, alone, "could not tell", "could not tell"),
        (torch.float8_e4m3fn, 0.1, "rows", "could not tell", "could not tell"),
        (None, 0.1, alone, "passed", "where documents share a row"),
    ],
)
def test_positions_that_8_bits_cannot_see_are_not_passed(
    dtype: torch.dtype | None, places: float, how: Any, right: str, wrong: str
) -> None:
    for own, expected in ((False, right), (True, wrong)):
        (found,) = processes.run(1, decoder, dtype, places, how, own)
        assert expected in found


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, cu_seq_lens_q: Any = None, **more: Any
) -> tuple[Tensor, None]:
    """Stands in for flash attention, which has no float32 and takes borders instead of a mask."""
    assert query.dtype == torch.bfloat16
    ends = [0, query.shape[2]] if cu_seq_lens_q is None else cu_seq_lens_q.tolist()
    attend = partial(nn.functional.scaled_dot_product_attention, is_causal=True, scale=more["scaling"])
    sizes = [end - begin for begin, end in pairwise(ends)]
    parts = [attend(*each) for each in zip(*(of.split(sizes, 2) for of in (query, key, value)), strict=True)]
    return torch.cat(parts, 2).transpose(1, 2), None


@pytest.fixture
def flash() -> Iterator[str]:
    ALL_ATTENTION_FUNCTIONS.register("flash_stand_in", varlen)
    yield "flash_stand_in"
    del ALL_ATTENTION_FUNCTIONS._global_mapping["flash_stand_in"]


def opt(attention: str, *, places: float, own: bool) -> Any:
    """Its masks ignore positions, so that it knows documents by flash attention alone."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "vocab_size": 13, "max_position_embeddings": 128, "pad_token_id": 0}
    model: Any = OPTForCausalLM(OPTConfig(**sizes, dropout=0.0)).bfloat16().train()
    model.config._attn_implementation_internal = attention
    embedding = model.model.decoder.embed_positions
    embedding.requires_grad_(False).weight.data *= places
    if own:
        of = embedding.forward
        embedding.forward = lambda mask, past=0, position_ids=None: of(
            mask, past, torch.arange(position_ids.shape[-1])[None]
        )
    return model


@pytest.mark.parametrize(
    ("places", "right", "wrong"),
    [
        (1.0, "passed", "where documents share a row"),
        (0.001, "could not tell", "could not tell"),
        (0.00001, "passed", "could not tell"),
    ],
)
def test_positions_that_flash_attention_cannot_see_are_not_passed(
    flash: str, places: float, right: str, wrong: str
) -> None:
    for own, expected in ((False, right), (True, wrong)):
        assert expected in verdict(
            lambda own=own: wt.verify(opt(flash, places=places, own=own), first_step(), report=None)
        )


def of_fsdp1(rank: int) -> str:
    half = MixedPrecision(param_dtype=torch.bfloat16)
    model = FullyShardedDataParallel(
        llama(initializer_range=0.5).train(), device_id=torch.device("cpu"), use_orig_params=True, mixed_precision=half
    )
    return verdict(lambda: wt.verify(model, first_step(), evaluate=evaluation(model), report=None))


def test_a_right_model_of_fsdp1_in_16_bits_is_not_accused() -> None:
    assert processes.run(2, of_fsdp1) == ["could not tell"] * 2
