"""Models with convolutions and recurrent states: packed documents are kept apart, or the model is refused by name.

Their kernels are stood in for (`tests/oracles/row_kernels.py`), in a process of its own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers import Trainer, TrainingArguments

import wlb
import wlb.torch as wt
from tests.oracles import row_kernels
from tests.oracles.hybrid_models import FAMILIES, tiny
from tests.torch.hybrid_rows import logits
from tests.trainers.small_corpus import documents
from wlb.integrations.huggingface import balance
from wlb.torch.boundaries import against_rows, unplaced_masks
from wlb.torch.proof.precision import Precision

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "models.md"
# What the proof alone finds: the layers are told where documents begin, but something else is not.
BY_THE_PROOF = {
    "glm5_next": "attention selects pools of tokens of the whole row",
    "granitemoehybrid": 'masks know no documents; kept apart with `attn_implementation="flash_attention_2"`',
    "recurrent_gemma": "`Conv1d` knows no documents",
    "rwkv": "`RwkvSelfAttention` knows no documents",
    "xlstm": "`xLSTMLayer` knows no documents",
}
SLOW = ["glm5_next", "inkling2_loop_text", "recurrent_gemma", "rwkv", "xlstm"]
QUICK = [family for family in FAMILIES if family not in SLOW]
COMPUTED = ["bamba", "kimi_linear", "qwen3_next"]
TRAINED = ["bamba", "nemotron_h", "qwen3_next", "kimi_linear", "lfm2"]


def run(calls: dict[str, list[str]], **options: Any) -> dict[str, Any]:
    """What `tests/torch/hybrid_rows.py` gives for each call and family."""
    order = json.dumps({"calls": calls, "options": options})
    command = [sys.executable, "-m", "tests.torch.hybrid_rows", order]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """One process for all that is quick."""
    return run(
        {
            "known": list(FAMILIES),
            "measure": QUICK,
            "trained": TRAINED,
            "trained_by_lightning": ["kimi_linear"],
            "logits": COMPUTED,
            "untold": ["bamba", "lfm2"],
            "measured_by_lengths": ["granitemoehybrid"],
        }
    )


def test_every_family_with_a_convolution_or_a_state_is_tried() -> None:
    folder = Path(transformers.__file__).parent / "models"
    words = re.compile(r"causal_conv1d|get_conv_state|get_recurrent_state|get_linear_cache|rwkv_linear|Rglru|mlstm")
    found = {file.parent.name for file in folder.glob("*/modeling_*.py") if words.search(file.read_text())}
    tried = {re.sub("_text$", "", family) for family in FAMILIES}
    assert found == tried


def check(found: dict[str, Any], known: dict[str, Any]) -> None:
    for family, result in found.items():
        if why := known[family]["wrong"]:
            assert why in result["refused"], family
        elif family in BY_THE_PROOF:
            assert "see each other" in result["refused"], family
        else:
            assert not result["refused"], family
            assert result["apart"] <= 1e-5, family
        if result["refused"] and family != "zamba":  # at its first weights Zamba's states are below rounding
            assert result["apart"] > 1e-4, family


def test_documents_are_kept_apart_or_the_model_is_refused(found: dict[str, Any]) -> None:
    check(found["measure"], found["known"])


def test_rows_that_tell_nothing_are_refused(found: dict[str, Any]) -> None:
    for family, refused in found["untold"].items():
        assert len(refused) == 2, family
        assert all(re.search(r"see each other.*seq_idx for layers that run along the row", each) for each in refused)


@pytest.mark.long
def test_slow_families_are_kept_apart_or_refused(found: dict[str, Any]) -> None:
    check(run({"measure": SLOW})["measure"], found["known"])


@pytest.mark.long
def test_both_precisions_are_proved(found: dict[str, Any]) -> None:
    kept = [name for name, each in found["known"].items() if not each["wrong"] and name not in BY_THE_PROOF]
    proved = run({"verified": kept})["verified"]
    assert len(proved) == 16
    for family, results in proved.items():
        assert not any(results.values()), (family, results)


def test_the_trainer_takes_the_steps_of_documents_alone(found: dict[str, Any]) -> None:
    assert len(found["trained"]) >= 4
    for family, apart in found["trained"].items():
        assert len(apart["gradients"]) == len(apart["losses"]) == 2
        assert max(apart["losses"] + apart["gradients"]) <= 1e-5, family


def test_lightning_takes_the_steps_of_documents_alone(found: dict[str, Any]) -> None:
    (apart,) = found["trained_by_lightning"].values()
    assert len(apart["gradients"]) == 2
    assert max(apart["gradients"]) <= 1e-5


def test_stand_ins_compute_what_transformers_does(found: dict[str, Any]) -> None:
    for family in COMPUTED:
        np.testing.assert_allclose(found["logits"][family], logits(family), rtol=0, atol=1e-6)


def test_masks_without_positions_need_attention_that_is_told_lengths(found: dict[str, Any]) -> None:
    assert "makes the mask of attention without position ids" in found["measure"]["granitemoehybrid"]["refused"]
    told = found["measured_by_lengths"]["granitemoehybrid"]
    assert not told["refused"]
    assert told["apart"] <= 1e-5
    model = tiny("granitemoehybrid")
    assert unplaced_masks(model) == ["GraniteMoeHybridModel"]
    assert Precision(model, (), None).has_float32
    model.config._attn_implementation_internal = "flash_attention_2"  # here nothing runs it
    assert not unplaced_masks(model)
    assert not Precision(model, (), None).has_float32


def test_missing_packages_are_named_before_training(tmp_path: Path) -> None:
    for family, line in {
        "bamba": r"BambaMixer.*pip install causal-conv1d mamba-ssm --no-build-isolation",
        "qwen3_next": r"GatedDeltaNet.*pip install causal-conv1d flash-linear-attention --no-build-isolation",
        "lfm2": r"Lfm2ShortConv.*pip install causal-conv1d --no-build-isolation",
    }.items():
        arguments = TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[])
        data: Any = documents()
        trainer = Trainer(tiny(family), arguments, train_dataset=data)
        with pytest.raises(wlb.WlbError, match=line):
            balance(trainer, max_tokens=64)
        assert arguments.gradient_accumulation_steps == 1
        row = wt.collate([[1, 2, 3], [4, 5]])
        with pytest.raises(ValueError, match="can't keep packed sequences apart without"):  # transformers' own words
            trainer.model(**row.as_hf())  # type: ignore[misc]


def test_layers_that_run_along_a_row_refuse_forests(found: dict[str, Any]) -> None:
    for family, each in found["known"].items():
        assert each["forest"], family
        assert all(re.search("a recurrent layer|a convolution", why) for why in each["forest"]), family


def test_the_page_has_the_table(found: dict[str, Any]) -> None:
    """`WLB_HYBRIDS=write` writes it there."""
    text = PAGE.read_text()
    head, _, rest = text.partition("| family | layers are told")
    end = "\n\nTested with transformers"
    tail = rest.partition(end)[2]
    assert head
    assert tail
    written = head + table(found["known"]) + end + tail
    if os.environ.get("WLB_HYBRIDS") == "write":
        PAGE.write_text(written)
    assert PAGE.read_text() == written, "WLB_HYBRIDS=write pytest tests/torch/test_hybrids.py writes the table"


def table(known: dict[str, Any]) -> str:
    rows = ["| family | layers are told | kernels of | documents of a row |", "| --- | --- | --- | --- |"]
    for family, found in known.items():
        name = re.sub("_text$", "", family)
        needs, packages = ", ".join(f"`{need}`" for need in found["needs"]), ", ".join(found["packages"])
        layer, _, reason = found["wrong"].partition(":")[0].removeprefix("has ").partition(", ")
        why = f"`{layer}`, {reason.removeprefix('but ')}" if layer else BY_THE_PROOF.get(family)
        rows.append(f"| {name} | {needs} | {packages} | {f'refused: {why}' if why else 'kept apart'} |")
    return "\n".join(rows)


# --- reading the source of layers -------------------------------------------------------------------------------------


class Inner(nn.Module):
    """Keeps a state, and finds documents by itself."""

    def forward(self, x: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache")
        return cache.get_recurrent_state(x, kwargs.get("cu_seqlens"))


class Forgets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Any, **kwargs: Any) -> Any:
        return self.inner(x, cache=None)


class HandsOn(Forgets):
    def forward(self, x: Any, **kwargs: Any) -> Any:
        return self.inner(x, cache=None, **kwargs)


def test_what_is_not_handed_on_is_found() -> None:
    assert "Forgets does not hand on what tells it" in against_rows(Forgets())
    assert not against_rows(HandsOn())
    row = wt.collate([[1, 2, 3], [4, 5]])
    assert row.as_hf(HandsOn())["cu_seqlens"].tolist() == [0, 3, 5]
    assert "cu_seqlens" not in row.as_hf()
    assert "cu_seqlens" not in row.as_hf(nn.Linear(1, 1))


@pytest.mark.parametrize("name", ["gated_delta_rule", "kda"])
def test_rules_are_those_of_flash_linear_attentions_own_loops(name: str) -> None:
    """Where that package imports: its slow functions, one document after the other, beside the stand-in."""
    naive = pytest.importorskip(f"fla.ops.{name}.naive", exc_type=ImportError)
    generator = torch.Generator().manual_seed(0)
    sizes, heads, width = [5, 1, 20, 6], 2, 8

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, sum(sizes), heads, *shape, generator=generator)

    gate = -drawn(*([width] if name == "kda" else [])).exp()
    query, key, value, beta = drawn(width), drawn(width), drawn(width), drawn().sigmoid()
    cu_seqlens = torch.tensor([0, *np.cumsum(sizes).tolist()])
    rule = {"gated_delta_rule": row_kernels.chunk_gated_delta_rule, "kda": row_kernels.chunk_kda}[name]
    key = torch.nn.functional.normalize(key, dim=-1)
    found, _ = rule(query, key, value, gate, beta, cu_seqlens=cu_seqlens)
    parts = [{"q": query, "k": key, "v": value, "g": gate, "beta": beta} for _ in sizes]
    ends = np.cumsum(sizes).tolist()
    expected = [
        getattr(naive, f"naive_recurrent_{name}")(**{n: each[:, end - size : end] for n, each in part.items()})[0]
        for part, size, end in zip(parts, sizes, ends, strict=True)
    ]
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=1e-4, atol=1e-5)
