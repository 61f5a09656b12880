"""The table of activations against what torch's autograd keeps for one layer, byte by byte.

Float32 on the CPU, where transformers' layers run in plain torch. What they keep beyond the table is what plain torch
does not fuse, and it is counted exactly: a norm keeps its row once more (normalised, before the weights), and the
rotation keeps its cosines and sines, which the layers of a model share. No tolerance.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wlb
import wlb_tools
from wlb_tools.cluster.memory import activation_bytes

transformers = pytest.importorskip("transformers")

TOKENS = 48
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_attention_heads": 8,
    "num_hidden_layers": 1,
    "vocab_size": 10,
    "attn_implementation": "sdpa",
}


def bytes_kept(layer: nn.Module, *args: Any, **kwargs: Any) -> int:
    """Bytes of the distinct tensors, other than weights, that a forward keeps for its backward."""
    weights = {p.untyped_storage().data_ptr() for p in layer.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(x: Tensor) -> Tensor:
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        output = layer(*args, **kwargs)
    total = sum(storage.nbytes() for storage in kept.values())
    del output
    return total


@pytest.mark.parametrize(
    ("model_type", "kv_heads"), [("llama", 8), ("llama", 2), ("qwen3", 2), ("olmo2", 2), ("exaone4", 2), ("smollm3", 2)]
)
def test_a_layer_keeps_what_the_table_says(model_type: str, kv_heads: int) -> None:
    sizes = SHAPE | {"num_key_value_heads": kv_heads, "head_dim": 8, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    built = transformers.AutoModelForCausalLM.from_config(config).model
    x = torch.randn(1, TOKENS, 64, requires_grad=True)
    positions = torch.arange(TOKENS)[None]
    rotation = built.rotary_emb(x, positions)
    measured = bytes_kept(built.layers[0], x, position_embeddings=rotation, position_ids=positions, attention_mask=None)

    model = wlb.ModelConfig.from_hugging_face(config)
    layout = wlb_tools.ParallelLayout(fused_ffn=False, dtype="float32")
    cosines_and_sines = sum(angles.nbytes for angles in rotation)
    # Norms before blocks, or of what blocks give (OLMo 2, EXAONE 4); of each head, or of all together (OLMo 2).
    normalised = 2 * 64 + (64 + kv_heads * 8 if model.attention.qk_norm != "none" else 0)
    assert measured == TOKENS * (activation_bytes(model, layout) + 4 * normalised) + cosines_and_sines
