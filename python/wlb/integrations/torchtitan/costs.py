"""Costs of documents in a model of torchtitan: the terms of its own count of FLOPs."""

from __future__ import annotations

from typing import Any, Final

import torch

import wlb

_EFFICIENCY: Final = 0.55  # FLOP rate of attention relative to matrix products, as in `ModelConfig.cost_model`
_RECOMPUTED: Final = 7 / 6  # flash attention makes its scores again in the backward, which an MFU does not count
_FAR: Final = 2**20


def cost_of_model(model_config: Any) -> wlb.CostModel:
    """From the FLOPs of a token, forward and backward, that torchtitan counts for its MFU.

    They grow linearly with the length: what does not grow is the work of a token, what does is that of a pair. So this
    holds for every model that it has: its experts, its latent attention. Windows are counted as full attention, as
    torchtitan does; give a cost model of your own for a model that lives by them.

    Complexity:
        O(layers): the model is made without memory, on the meta device.
    """
    with torch.device("meta"):
        model = model_config.build()
    linear, far = (model_config.get_nparams_and_flops(model, length)[1] for length in (0, _FAR))
    return wlb.CostModel(attention=_RECOMPUTED * (far - linear) / _FAR / _EFFICIENCY, linear=linear, unit="flops")
