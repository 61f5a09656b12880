"""Costs of documents in a model of torchtitan, computed from torchtitan's own count of FLOPs."""

from __future__ import annotations

from typing import Any, Final

import torch

import wlb

_EFFICIENCY: Final = 0.55  # FLOP rate of attention relative to matrix products, as in `ModelConfig.cost_model`
_RECOMPUTED: Final = 7 / 6  # flash attention computes its scores again in the backward pass, which an MFU leaves out
_FAR: Final = 2**20


def cost_of_model(model_config: Any) -> wlb.CostModel:
    """Costs from the FLOPs of a token, forward and backward, that torchtitan counts for its MFU.

    These FLOPs grow linearly with the document's length: the constant part is the work of a token, the growing part
    that of its pairs. So this holds for all of torchtitan's models, with experts or latent attention. As in torchtitan,
    windows count as full attention; give your own cost model for a model with many of them.

    Complexity:
        O(layers): the model is built on the meta device, without memory.
    """
    with torch.device("meta"):
        model = model_config.build()
    linear, far = (model_config.get_nparams_and_flops(model, length)[1] for length in (0, _FAR))
    return wlb.CostModel(attention=_RECOMPUTED * (far - linear) / _FAR / _EFFICIENCY, linear=linear, unit="flops")
