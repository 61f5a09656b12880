"""A packer that also empties step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import ArrayLike

import wlb
from wlb.torch.data.state import field


class StepPacker:
    """`wlb.Packer`, but for the end of the documents: `drain` plans one more step instead of all of them.

    `Packer.flush` plans the whole rest at once. A state saved between two of these steps could not go on with another
    number of micro-batches; here it is a packer's state at any time.

    Args:
        packer: Gives the configuration, and is left alone.
    """

    def __init__(self, packer: wlb.Packer) -> None:
        self._config = packer
        self._draining = False
        self._packer = self._empty(False)

    @property
    def pending(self) -> int:
        """Pieces that wait."""
        return self._packer.pending

    @property
    def carried_tokens(self) -> int:
        """Tokens that found no place in the last step; O(pieces that wait) if there are any."""
        return sum(self._packer.state_dict()["carried"]["lengths"]) if self._packer.carried else 0

    def metrics(self) -> wlb.PackerMetrics:
        """Balance and delay so far."""
        return self._packer.metrics()

    def push(self, lengths: ArrayLike, ids: ArrayLike) -> wlb.Packing:
        """As `wlb.Packer.push`."""
        self._drain(False)
        return self._packer.push(lengths, ids)

    def drain(self) -> wlb.Packing:
        """One step of what waits, outliers too; as much of it as fits, something at least."""
        self._drain(True)
        return self._packer.push([])

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON values; O(pieces that wait)."""
        return {"draining": self._draining, "packer": self._packer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], *, allow_config_change: bool = False) -> None:
        """As `wlb.Packer.load_state_dict`."""
        draining = field(state, "draining", bool)
        packer = self._empty(draining)
        packer.load_state_dict(field(state, "packer", dict), allow_config_change=allow_config_change)
        self._packer, self._draining = packer, draining

    def _drain(self, draining: bool) -> None:
        if draining != self._draining:
            packer = self._empty(draining)
            packer.load_state_dict(self._packer.state_dict(), allow_config_change=True)
            self._packer, self._draining = packer, draining

    def _empty(self, draining: bool) -> wlb.Packer:
        """A new packer, which lets everything go at once if it is for draining."""
        config = self._config
        rest = config.state_dict()["config"]
        return wlb.Packer(
            num_micro_batches=config.num_micro_batches,
            max_tokens=config.max_tokens,
            cost_model=config.cost_model,
            outlier_thresholds=config.outlier_thresholds,
            release=config.release,
            delay_price=config.delay_price,
            max_delay=0 if draining else config.max_delay,
            max_document_tokens=config.max_document_tokens,
            oversize=rest["oversize"],
            method=config.method,
        )
