"""A sampler for TransferQueue that gives data-parallel ranks even work, by the model's cost.

    import transfer_queue as tq
    from wlb.integrations.transferqueue import BalancedSampler

    cost = wlb.ModelConfig.from_hugging_face("path/of/config.json").cost_model()
    sampler = BalancedSampler(n_samples_per_prompt=8, dp_size=8, cost_model=cost)
    tq.init(conf, sampler=sampler)  # or TransferQueueController.remote(sampler=sampler)

It stands in for TransferQueue's own `SeqlenBalancedSampler` with the same arguments and results: verl, NeMo-RL, ROLL
and others read their batches through it. Its `custom_meta["total_lengths"]` says how many tokens a sample has.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from transfer_queue.sampler.grpo_group_n_sampler import GRPOGroupNSampler
from transfer_queue.sampler.seqlen_balanced_sampler import SeqlenBalancedSampler

import wlb
from wlb._errors import check_integer, error
from wlb._warned import warn
from wlb.integrations import slices
from wlb.integrations.versions import check_signature

__all__ = ["BalancedSampler"]


class BalancedSampler(SeqlenBalancedSampler):  # type: ignore[misc]
    """Gives every data-parallel rank equally many samples of a batch, and even work.

    The first rank that asks for a batch has it planned for all of them. Whole prompts are taken; a prompt with a sample
    that is not ready waits.

    Args:
        n_samples_per_prompt: consecutive samples that are one prompt's.
        dp_size: data-parallel ranks.
        cost_model: what samples cost in the model that is trained.
        num_steps: optimizer steps that the trainer makes of a batch: it cuts the samples of each rank into as many
            equal slices. Each step then has whole prompts and even work.
        together: "rank": the samples of a prompt are on one rank, one after the other, as advantages that are computed
            on the ranks need. "step": they may go to any rank, which is more even with few prompts on a rank.

    Raises:
        WlbError: sizes that make no sense; another TransferQueue, whose `sample` takes other arguments.
    """

    def __init__(
        self,
        n_samples_per_prompt: int = 1,
        dp_size: int = 1,
        *,
        cost_model: wlb.CostModel,
        num_steps: int = 1,
        together: Literal["step", "rank"] = "rank",
    ) -> None:
        check_signature("transferqueue", SeqlenBalancedSampler.sample, BalancedSampler.sample, "as in 0.1.11")
        super().__init__(n_samples_per_prompt=n_samples_per_prompt, dp_size=dp_size)
        check_integer("num_steps", num_steps, minimum=1)
        if together not in ("step", "rank"):
            raise error("together", f'= {together!r}: must be one of "step", "rank"', value=together)
        self._cost_model, self._num_steps, self._together = cost_model, num_steps, together

    def sample(
        self,
        ready_indexes: list[int],
        batch_size: int,
        task_name: str = "",
        partition_id: str = "",
        *args: Any,
        **kwargs: Any,
    ) -> tuple[list[int], list[int]]:
        """The samples of a rank, and those that are consumed.

        Args:
            ready_indexes: samples that are ready and not consumed.
            batch_size: samples of a rank.
            task_name: who reads.
            partition_id: what is read.
            *args: nothing that is used here.
            **kwargs: `dp_rank`, `batch_index`, and the `partition` that knows the lengths.

        Returns:
            Twice the same list; two empty ones if too few whole prompts are ready.

        Raises:
            WlbError: a sample without "total_lengths"; prompts that cannot be dealt to the ranks in equal numbers.
        """
        rank, batch = kwargs.get("dp_rank", 0), kwargs.get("batch_index", 0)
        key = (partition_id, task_name, batch)
        if key not in self._balanced_cache:
            size = batch_size * self.dp_size
            # Not this rank's own cache, which the call would look into if it had the rank's name.
            taken, _ = GRPOGroupNSampler.sample(self, ready_indexes, size, task_name, partition_id)
            if not taken:
                return [], []
            parts = self._planned(taken, kwargs.get("partition"))
            self._balanced_cache[key] = parts
            states = self._states.setdefault(partition_id, {}).setdefault(task_name, {})
            for of_rank, part in enumerate(parts):
                states.setdefault(of_rank, {})[batch] = (part, [*part])
        parts = self._balanced_cache[key]
        part = parts[rank] if rank < len(parts) else []
        return part, [*part]

    def _planned(self, taken: list[int], partition: Any) -> list[list[int]]:
        """The samples of each rank, step after step."""
        if partition is None:
            warn("the controller passes no partition, so lengths are not known: ranks get equal slices")
            return np.array(taken).reshape(self.dp_size, -1).tolist()
        meta = partition.get_custom_meta(taken)
        unknown = next((sample for sample in taken if "total_lengths" not in meta.get(sample, {})), None)
        if unknown is not None:
            message = f'of sample {unknown} has no "total_lengths": put the tokens of each sample there'
            raise error("custom_meta", message, value=unknown)
        lengths = np.array([int(meta[sample]["total_lengths"]) for sample in taken], np.int64)
        costs = np.where(lengths > 0, self._cost_model.cost(np.maximum(lengths, 1)), 0.0)
        prompts = (np.arange(len(taken)) // self.n_samples_per_prompt).tolist()
        size, rest = divmod(len(taken), self._num_steps)
        if rest:
            message = f"= {self._num_steps}: does not divide the {len(taken)} samples of a batch"
            raise error("num_steps", message, value=self._num_steps)
        parts, _ = slices.planned(
            lengths, costs, prompts, dp_size=self.dp_size, samples_per_step=size, together=self._together
        )
        return [[taken[at] for held in of_rank for at in held.tolist()] for of_rank in parts]
