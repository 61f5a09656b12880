"""Our plans in the place of the schedulers that Megatron-Core has after 0.19, for `sequence_packing_scheduler`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from megatron.core.datasets import data_schedule

import wlb
from wlb._errors import check_options, error
from wlb.integrations.megatron.costs import cost_of
from wlb.integrations.megatron.refusals import alignment_of
from wlb.integrations.megatron.scheduler import SET_HERE, DynamicCpScheduler


def install_schedulers(*, cost_model: wlb.CostModel | None = None, **options: Any) -> list[str]:
    """Puts wlb's plans in the place of Megatron-Core's schedulers, of which a version has one, or two.

    - `BalancedCPScheduler`, of `hybrid_context_parallel`: :class:`DynamicCpScheduler`.
    - `DpBalancedScheduler`, of `sequence_packing_scheduler="dp_balanced"`: as few micro-batches as hold the samples of
      a step, of nearly equal work; it reads, moves and packs samples as before.

    Args:
        cost_model: what samples cost; by default from the model's configuration, without the output layer.
        **options: of `wlb.plan_dynamic_cp`, for the first.

    Returns:
        The names of those that were replaced.

    Raises:
        wlb.WlbError: the installed version has neither, or an option is unknown.
    """
    check_options(options, wlb.plan_dynamic_cp, but=SET_HERE)
    replaced = []
    if hasattr(data_schedule, "BalancedCPScheduler"):
        data_schedule.BalancedCPScheduler = partial(DynamicCpScheduler, cost_model=cost_model, **options)
        replaced.append("BalancedCPScheduler")
    theirs = getattr(data_schedule, "DpBalancedScheduler", None)
    if theirs is not None:
        data_schedule.DpBalancedScheduler = ours = _packing(theirs, cost_model)
        for name, scheduler in data_schedule.scheduler_map.items():
            if scheduler is theirs:
                data_schedule.scheduler_map[name] = ours
        replaced.append("DpBalancedScheduler")
    if not replaced:
        raise error("megatron-core", "has neither BalancedCPScheduler nor DpBalancedScheduler: use data_iterator")
    return replaced


def _packing(theirs: Any, cost_model: wlb.CostModel | None) -> Any:
    """A class like theirs; it replaces one that is ours already, too."""

    class PackingScheduler(theirs):  # type: ignore[misc]
        """Micro-batches of nearly equal work, in the place of those that are filled in the order of the samples."""

        _alignment = 1

        def run(self, *args: Any, **kwargs: Any) -> Any:
            """As theirs; says what samples cost the model, and what rows are padded to.

            Raises:
                wlb.WlbError: The kernels of the model do not take such rows.
            """
            config = kwargs["config"] if "config" in kwargs else args[-1]
            self._alignment = alignment_of(config)
            self._cost = cost_of(config, vocab_size=1) if cost_model is None else cost_model
            return super().run(*args, **kwargs)

        def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
            """Of every micro-batch and every data x context rank the numbers of its samples.

            Args:
                sample_id_seqlens: number and tokens of every sample of the step, the same on all ranks.

            Raises:
                wlb.WlbError: A sample is longer than what the ranks of a micro-batch hold, or there are fewer samples
                    than micro-batches.
            """
            numbers = np.array([int(number) for number, _ in sample_id_seqlens])
            lengths = np.array([int(length) for _, length in sample_id_seqlens], np.int64)
            together = self.dp_size * (self.microbatch_group_size_per_vp_stage or 1)
            plan = wlb.pack(
                lengths,
                num_micro_batches=None,
                max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
                cost_model=self._cost,
                multiple_of=together,
                multiple_of_tokens=self._alignment * self.cp_size,
                dp_size=self.dp_size,
                sync="step",
                max_documents=getattr(self, "max_num_seqs", None),
            )
            if not all(len(micro_batch.document_ids) for micro_batch in plan):
                message = f"are {len(numbers)}, too few for {len(plan)} micro-batches"
                raise error("sample_id_seqlens", message, value=len(numbers))
            of_ranks = plan.deal(self.dp_size)
            return [
                [numbers[plan[int(index)].document_ids].tolist() for index in column for _ in range(self.cp_size)]
                for column in zip(*of_ranks, strict=True)
            ]

    return PackingScheduler
