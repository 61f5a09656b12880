"""Keeps padding out of the counts of torchtitan's mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchtitan.models.common.moe import MoE

from wlb._errors import error


class RealTokens:
    """Takes padding out of the counts by which torchtitan moves the biases of experts.

    Args:
        parts: of the model, on this rank.

    Attributes:
        padding: bool [tokens of this rank], True for tokens of padding in the row that runs next; None: no padding.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self.padding: Tensor | None = None
        for mixture in (module for part in parts for module in part.modules() if isinstance(module, MoE)):
            counts = _Counts(self)
            mixture.router.register_forward_hook(counts.note)
            mixture.register_forward_hook(counts.leave_out)


class _Counts:
    """Counts of the visits of one mixture of experts."""

    def __init__(self, real: RealTokens) -> None:
        self._real = real
        self._chosen: Tensor | None = None  # int64 [1, tokens, experts per token]

    def note(self, router: Any, args: Any, output: Any) -> None:
        """Hook of the router: remembers the experts of each token."""
        self._chosen = output[1]

    def leave_out(self, mixture: Any, args: Any, output: Any) -> None:
        """Hook of the mixture: subtracts the visits of padding after the mixture has counted all tokens."""
        padding, chosen, self._chosen = self._real.padding, self._chosen, None
        if padding is None or chosen is None or not mixture.training:
            return
        with torch.no_grad():
            count = mixture.tokens_per_expert_E
            each = padding.to(count.dtype).repeat_interleave(chosen.shape[-1])
            count.sub_(torch.zeros_like(count).scatter_add_(0, chosen.reshape(-1).long(), each))


def check_experts(config: Any) -> None:
    """Refuses experts whose counts would include padding.

    Raises:
        wlb.WlbError: their biases depend on counts of tokens that are on tensor-parallel ranks, or in pipeline stages,
            where the running micro-batch is not known.
    """
    parallelism = config.parallelism
    for index, layer in enumerate(config.model_spec.model.layers):
        coefficient = getattr(getattr(layer, "moe", None), "load_balance_coeff", None)
        if coefficient is None:
            continue
        for name, size in (
            ("tensor_parallel_degree", parallelism.tensor_parallel_degree),
            ("pipeline_parallel_degree", parallelism.pipeline_parallel_degree),
        ):
            if size > 1:
                message = (
                    f"has experts with load_balance_coeff = {coefficient}, and {name} = {size}: what fills rows up "
                    "would be counted as visits of experts; make load_balance_coeff None, or the degree 1"
                )
                raise error("model_spec", message, index=index, value=coefficient)
