"""wlb's Dynamic-CP plans instead of Megatron-Core's own scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import wlb
from wlb._errors import check_integer, check_options, error
from wlb.integrations.megatron.costs import cost_of
from wlb.integrations.megatron.groups import (
    NOT_HERE,
    SET_HERE,
    Group,
    filled,
    largest_group,
    of_ranks,
    planned,
    too_few,
)
from wlb.integrations.megatron.multiples import quantized_multiple


class DynamicCpScheduler:
    """A scheduler with the interface of Megatron-Core's `BalancedCPScheduler` and the plans of `wlb.plan_dynamic_cp`.

    Megatron-Core reads, moves and trains samples as before, one at a time, each on the ranks of the plan::

        from megatron.core.datasets import data_schedule
        data_schedule.BalancedCPScheduler = wlb.integrations.megatron.DynamicCpScheduler

    Between two of its barriers no rank gets more than `max_seq_len_per_rank` tokens, and ranks have nearly equal work.
    Megatron-Core exchanges gradients during the last sample of a step, so every rank gets a sample there.

    Args:
        max_seq_len_per_rank: most tokens of a rank between two barriers.
        dp_cp_group: the data x context ranks.
        cost_model: what samples cost; by default from the model's configuration that `get_groups_and_subsamples` gets,
            without the output layer, whose size it does not have.
        **options: of `wlb.plan_dynamic_cp`: `max_cp_size`, `exchange`, ...

    Raises:
        wlb.WlbError: a size is below 1.
    """

    def __init__(
        self, max_seq_len_per_rank: int, dp_cp_group: Any, *, cost_model: wlb.CostModel | None = None, **options: Any
    ) -> None:
        check_options(options, wlb.plan_dynamic_cp, but=(*SET_HERE, *NOT_HERE))
        check_integer("max_seq_len_per_rank", max_seq_len_per_rank, minimum=1)
        self.max_seq_len_per_rank = max_seq_len_per_rank
        self.total_hdp_gpus: int = dp_cp_group.size()
        self._cost_model, self._options = cost_model, options
        self._known: tuple[Any, wlb.CostModel] | None = None
        self._options.setdefault("max_cp_size", largest_group(self.total_hdp_gpus))

    def get_total_workload(self, seq_length: int, cp_size: int | None = None, config: Any = None) -> float:
        """Work of a sample on each of `cp_size` ranks; by default on as many ranks as it needs."""
        cost = self._cost_of(config)
        return float(cost.cost([seq_length])[0]) / (cp_size or self.gpus_needed(seq_length))

    def gpus_needed(self, seq_len: int) -> int:
        """The fewest ranks that hold a sample: a power of two."""
        check_integer("seq_len", seq_len, minimum=1)
        return 1 << (-(-seq_len // self.max_seq_len_per_rank) - 1).bit_length()

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: Any = None
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Assigns samples to ranks, group by group; groups end in a barrier.

        Args:
            sample_id_seqlens: number and tokens of every sample of the step.
            config: the model's `TransformerConfig`, for what samples cost.

        Returns:
            For every part between two barriers and every rank: the lengths of its samples, and their numbers. Several
            ranks that have the same sample share it; they are 1, 2, 4, ... neighbours, beginning at a multiple of their
            number.

        Raises:
            wlb.WlbError: a sample fits on no group, is cut into rows that the kernels of FP8 or FP4 do not accept, or
                there are fewer samples than ranks.
        """
        numbers = [int(number) for number, _ in sample_id_seqlens]
        lengths = np.array([int(length) for _, length in sample_id_seqlens], np.int64)
        if not numbers:
            return [], []
        multiple = quantized_multiple(config) * self._options["max_cp_size"]
        if quantized_multiple(config) > 1 and (lengths % multiple).any():
            at = int(np.flatnonzero(lengths % multiple)[0])
            message = (
                f"has {lengths[at]} tokens: in FP8 and FP4 a rank takes multiples of {quantized_multiple(config)}; "
            )
            message += f"pad samples to multiples of {multiple}, or lower max_cp_size"
            raise error("sample_id_seqlens", message, index=at, value=int(lengths[at]))
        parts = planned(
            lengths,
            world_size=self.total_hdp_gpus,
            num_stages=1,
            max_tokens_per_rank=self.max_seq_len_per_rank,
            cost_model=self._cost_of(config),
            **self._options,
        )
        if sum(size for size, _ in parts[-1]) < self.total_hdp_gpus:
            parts = self._filled(parts)
        per_rank = [of_ranks(part, self.total_hdp_gpus) for part in parts]
        of_lengths = [[[int(lengths[row]) for row in rows] for rows in ranks] for ranks in per_rank]
        of_numbers = [[[numbers[row] for row in rows] for rows in ranks] for ranks in per_rank]
        return of_lengths, of_numbers

    def _filled(self, parts: list[list[Group]]) -> list[list[Group]]:
        """Leaves no rank idle in the last part: one part is put last, with larger groups or samples of other parts."""
        sizes = {"world_size": self.total_hdp_gpus, "max_cp_size": self._options["max_cp_size"]}
        idle = [self.total_hdp_gpus - sum(size for size, _ in part) for part in parts]
        order = sorted(range(len(parts)), key=lambda index: (idle[index], -index))
        for index in order:
            if (groups := filled(parts[index], **sizes)) is not None:
                return [*parts[:index], *parts[index + 1 :], groups]
        for index in order:
            last, left = list(parts[index]), idle[index]
            others = [list(part) for at, part in enumerate(parts) if at != index]
            for part in others:
                for size, rows in list(part):
                    if size > left:
                        continue
                    part.remove((size, rows))
                    if len(rows) > 1:
                        part.append((size, rows[:-1]))
                    last.append((size, rows[-1:]))
                    left -= size
                    if (groups := filled(last, **sizes)) is not None:
                        return [*filter(None, others), groups]
        samples = sum(len(rows) for part in parts for _, rows in part)
        raise too_few(samples, f"{self.total_hdp_gpus} ranks: every rank has to train one at the end of a step")

    def _cost_of(self, config: Any) -> wlb.CostModel:
        if self._cost_model is not None:
            return self._cost_model
        if self._known is None or self._known[0] is not config:
            self._known = (config, cost_of(config, vocab_size=1))
        return self._known[1]
