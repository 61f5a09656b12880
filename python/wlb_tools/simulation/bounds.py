"""What a plan takes at least: the mean work of its documents, evenly over ranks and micro-batches, in the pipeline."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wlb._choices import Passes
from wlb._core import simulate_steps
from wlb_tools.cluster.attention_seconds import segment_seconds
from wlb_tools.simulation.balance import Floats
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.tuning import Settings

_PASSES: tuple[Passes, ...] = ("forward", "backward")


class Bounds:
    """Of any plan for these documents, on any layout.

    Args:
        whole: int64[n] tokens of the documents.
        cut: int64[n] tokens of the same, cut where a context ends.
    """

    def __init__(self, whole: NDArray[np.int64], cut: NDArray[np.int64]) -> None:
        self._lengths = {False: whole, True: cut}
        self._attention: dict[tuple[int, bool], list[Floats]] = {}  # by tp
        self._masks: dict[int, float] = {}

    def fitted_efficiency(self, scenario: Scenario) -> float:
        """:meth:`Scenario.fitted_efficiency`; attention is timed once for each tp."""
        layout = scenario.layout
        if layout.tp not in self._masks:
            self._masks[layout.tp] = scenario.attention_seconds(self._lengths[False])
        return scenario.fitted_efficiency(self._lengths[False], attention_seconds=self._masks[layout.tp])

    def seconds(self, scenario: Scenario, settings: Settings) -> float:
        """Seconds of the whole stream that a plan takes at least.

        Attention of whole documents, evenly on context-parallel ranks; full global batches; every micro-batch the mean
        one; no keys, where ranks gather only those that are needed. Of Dynamic-CP the work alone, without bubble and
        exchange: its groups are any, and light micro-batches fill and drain the pipeline.
        """
        layout, tokens = scenario.layout, int(self._lengths[False].sum())
        count = scenario.micro_batches * (1 if settings.dynamic else settings.split)
        steps = tokens / scenario.tokens_per_batch
        forward, backward = (of / (steps * count * layout.cp) for of in self._of_passes(scenario, cut=settings.cuts))
        made = scenario.stage_seconds(
            [scenario.tokens_per_batch / count / layout.cp],
            attention_forward=forward[None],
            attention_backward=backward[None],
            keys_gathered=None if scenario.cp_keys == "all" else [0.0],
        )
        apart, per_rank = scenario.step_end, count // layout.dp
        if settings.dynamic:
            busy = (made.seconds - made.exposed_cp - made.exposed_pp)[0].sum()  # over stages and passes
            return steps * (float(busy) * per_rank / layout.pp + apart)
        seconds = made.seconds + scenario.exposed_dp(made.computing)
        simulated = simulate_steps(
            np.broadcast_to(seconds[0], (1, 1, per_rank, *made.seconds.shape[1:])),
            schedule=scenario.pipeline_schedule,
            num_stages=layout.pp,
            num_virtual_stages=layout.virtual_stages,
            p2p_seconds=np.broadcast_to(made.p2p[0], (1, 1, per_rank)),
        )
        return steps * (float(simulated.seconds[0]) + apart)

    def _of_passes(self, scenario: Scenario, *, cut: bool) -> list[Floats]:
        """Float64[kinds] each: seconds of all documents' attention in a layer of each kind, forward and backward."""
        key = (scenario.layout.tp, cut)
        if key not in self._attention:
            masks, weights = scenario.masks
            lengths = self._lengths[cut]
            self._attention[key] = [
                np.array(
                    [
                        float(segment_seconds(scenario.attention, lengths, lengths, mask, passes=passes).sum())
                        for mask in masks
                    ]
                )
                @ weights
                for passes in _PASSES
            ]
        return self._attention[key]
