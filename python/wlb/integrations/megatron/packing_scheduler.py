"""wlb's plans for `sequence_packing_scheduler`, instead of the schedulers that Megatron-Core has after 0.19."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from megatron.core.datasets import data_schedule

import wlb
from wlb._core import most_tokens
from wlb._errors import check_options, error
from wlb.integrations.megatron.costs import cost_of
from wlb.integrations.megatron.groups import NOT_HERE, SET_HERE, filled, largest_group, of_ranks, planned, too_few
from wlb.integrations.megatron.refusals import alignment_of
from wlb.integrations.megatron.scheduler import DynamicCpScheduler


def install_schedulers(*, cost_model: wlb.CostModel | None = None, **options: Any) -> list[str]:
    """Replaces those of Megatron-Core's schedulers that the installed version has by wlb's plans.

    - `BalancedCPScheduler`, of `hybrid_context_parallel`, by `DynamicCpScheduler`.
    - `DpBalancedScheduler`, of `sequence_packing_scheduler="dp_balanced"`, by one that makes as few micro-batches as
      hold the samples of a step, with nearly equal work; Megatron-Core reads, moves and packs samples as before.
    - `DefaultDynamicCPScheduler`, of `"default_dynamic_cp"` in development versions, by one that chooses groups of
      ranks for every micro-batch with `wlb.plan_dynamic_cp`.

    Args:
        cost_model: what samples cost; by default from the model's configuration, without the output layer.
        **options: of `wlb.plan_dynamic_cp`, for the first and the last scheduler.

    Returns:
        The names of the replaced schedulers.

    Raises:
        wlb.WlbError: the installed version has none of them, or an option is unknown.
    """
    check_options(options, wlb.plan_dynamic_cp, but=(*SET_HERE, *NOT_HERE))
    replaced = []
    if hasattr(data_schedule, "BalancedCPScheduler"):
        data_schedule.BalancedCPScheduler = partial(DynamicCpScheduler, cost_model=cost_model, **options)
        replaced.append("BalancedCPScheduler")
    for name, ours in (("DpBalancedScheduler", _Packing), ("DefaultDynamicCPScheduler", _Dynamic)):
        if not hasattr(data_schedule, name):
            continue
        theirs = getattr(data_schedule, name)
        bases = (theirs,) if issubclass(theirs, ours) else (ours, theirs)
        scheduler = type(name, bases, {"_cost": cost_model, "_options": options})
        setattr(data_schedule, name, scheduler)
        for word, known in data_schedule.scheduler_map.items():
            if known is theirs:
                data_schedule.scheduler_map[word] = scheduler
        replaced.append(name)
    if not replaced:
        raise error("megatron-core", "has no scheduler that is known here: use data_iterator")
    return replaced


class _Planned:
    """Base of classes that stand before Megatron-Core's own schedulers and know the model."""

    _cost: wlb.CostModel | None
    _options: dict[str, Any]
    _alignment, _stages, _virtual_stages = 1, 1, 1
    cp_size: int
    dp_size: int
    microbatch_group_size_per_vp_stage: int | None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Plans the samples as Megatron-Core's scheduler does, but with wlb's costs, stages and padding of rows.

        Raises:
            wlb.WlbError: The model's kernels do not accept such rows.
        """
        run: Any = super().run  # type: ignore[misc]
        given = inspect.signature(run).bind(*args, **kwargs).arguments
        config = given["config"]
        self._alignment, self._stages = alignment_of(config), given["pp_group"].size()
        self._virtual_stages = config.virtual_pipeline_model_parallel_size or 1
        if self._cost is None:
            self._cost = cost_of(config, vocab_size=1)
        return run(*args, **kwargs)


class _Packing(_Planned):
    """Micro-batches of nearly equal work, instead of micro-batches filled in the order of samples."""

    max_seqlen_per_dp_cp_rank: int

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """Sample numbers by micro-batch and by data x context rank.

        Args:
            sample_id_seqlens: number and tokens of every sample of the step, the same on all ranks.

        Raises:
            wlb.WlbError: A sample is longer than the ranks of a micro-batch can hold, or there are fewer samples than
                micro-batches.
        """
        numbers, lengths = _columns(sample_id_seqlens)
        plan = wlb.pack(
            lengths,
            num_micro_batches=None,
            max_tokens=self.max_seqlen_per_dp_cp_rank * self.cp_size,
            cost_model=self._cost,
            multiple_of=self.dp_size * (self.microbatch_group_size_per_vp_stage or 1),
            multiple_of_tokens=self._alignment * self.cp_size,
            dp_size=self.dp_size,
            sync="step",
            max_documents=getattr(self, "max_num_seqs", None),
        )
        if not all(len(micro_batch.document_ids) for micro_batch in plan):
            raise too_few(len(numbers), f"{len(plan)} micro-batches")
        of_ranks = plan.deal(self.dp_size)
        return [
            [numbers[plan[int(index)].document_ids].tolist() for index in column for _ in range(self.cp_size)]
            for column in zip(*of_ranks, strict=True)
        ]


class _Dynamic(_Planned):
    """Groups of ranks of nearly equal work for every micro-batch. Like Megatron-Core's, it leaves no rank idle."""

    max_seq_len_per_rank: int
    min_cp_size: int
    total_hdp_gpus: int

    def get_groups_and_subsamples(self, sample_id_seqlens: Sequence[tuple[int, int]]) -> list[list[list[int]]]:
        """Sample numbers by micro-batch and by data x context rank; ranks of one group have the same samples.

        Args:
            sample_id_seqlens: number and tokens of every sample of the step, the same on all ranks.

        Raises:
            wlb.WlbError: Costs of samples are not known, a sample fits on no group, there are fewer samples than
                micro-batches, or the smallest group is no power of two that divides the number of ranks.
        """
        numbers, lengths = _columns(sample_id_seqlens)
        if not len(numbers):
            return []
        least = self.min_cp_size
        if least & (least - 1) or self.total_hdp_gpus % least:
            message = f"= {least}: must be a power of two that divides the {self.total_hdp_gpus} ranks"
            raise error("min_cp_size", message, value=least)
        units = self.total_hdp_gpus // least  # a unit is `least` ranks that always share samples
        largest = min(largest_group(units), max(self._options.get("max_cp_size", self.total_hdp_gpus) // least, 1))
        plan = partial(
            planned,
            lengths,
            world_size=units,
            num_stages=self._stages,
            num_virtual_stages=self._virtual_stages,
            max_tokens_per_rank=most_tokens(self.max_seq_len_per_rank, multiple_of_tokens=self._alignment) * least,
            cost_model=self._cost_known(),
            **{**self._options, "max_cp_size": largest},
        )
        parts, together = [part for part in plan() if part], self.microbatch_group_size_per_vp_stage or 1
        if len(parts) % together:
            parts = plan(num_micro_batches=-(-len(parts) // together) * together)
        if not all(parts):
            raise too_few(len(numbers), f"{len(parts)} micro-batches")
        everyone = [[(units, [row for _, rows in part for row in rows])] for part in parts]
        busy = [
            filled(part, world_size=units, max_cp_size=largest) or alone
            for part, alone in zip(parts, everyone, strict=True)
        ]
        return [[numbers[rows].tolist() for rows in of_ranks(part, units) for _ in range(least)] for part in busy]

    def _cost_known(self) -> wlb.CostModel:
        return cost_of(None, vocab_size=1) if self._cost is None else self._cost


def _columns(sample_id_seqlens: Sequence[tuple[int, int]]) -> tuple[Any, Any]:
    """Numbers and tokens of samples: int64 [samples] each."""
    table = np.array([(int(number), int(length)) for number, length in sample_id_seqlens], np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
