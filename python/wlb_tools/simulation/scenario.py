"""Input of a simulation: a model on a cluster, and how its documents are packed."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import Generation, Passes, Schedule, Sync
from wlb._core import MAX_MEAN_DELAY, CostModel, KernelModel, Shard, WlbError, pass_weights, simulate_pipeline
from wlb._errors import check_integer, check_positive, check_share, error
from wlb._results import PipelineTimeline
from wlb._shown import explained
from wlb.models import Mask, ModelConfig
from wlb.profiles import read as read_profile
from wlb_tools.cluster.attention_seconds import attention_of_kinds, rank_seconds, segment_seconds
from wlb_tools.cluster.capacity import max_tokens
from wlb_tools.cluster.data_parallel import check_sync, data_parallel_seconds, exposed, micro_batch_seconds
from wlb_tools.cluster.hardware import GENERATIONS, Hardware
from wlb_tools.cluster.memory import RESERVED_BYTES, RankMemory, in_flight, kv_width, memory_per_rank
from wlb_tools.cluster.offload import offload_seconds
from wlb_tools.cluster.overhead import NO_OVERHEAD, Overhead
from wlb_tools.cluster.parallel import V_SHAPED, ParallelLayout, default_schedule
from wlb_tools.cluster.step_time import StageSeconds, check_imbalance, fp8_gain, stage_seconds
from wlb_tools.simulation.data import arguments, read_toml
from wlb_tools.simulation.methods import Setup, meeting_ranks

Floats = NDArray[np.float64]

Keys = Literal["all", "needed"]

_PASSES: tuple[Passes, ...] = ("forward", "backward")

_INTEGERS = {
    "context": 1,
    "max_tokens": 1,
    "num_micro_batches": 1,
    "num_queues": 0,
    "max_delay": 0,
    "reserved_bytes": 0,
    "noise_seed": 0,
}
"""Fields that are integers, and the least value of each."""

_OPTIONAL = ("max_tokens", "num_micro_batches", "max_delay")


@explained
@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model on a cluster, its global batches, and the settings of its packer.

    Args:
        model: its sizes.
        layout: the layout on GPUs.
        hardware: the GPUs and links.
        context: tokens; no document is longer, and the fixed-length methods cut every `context`.
        kernel_model: latency of attention with a tensor-parallel rank's heads, `num_heads / tp`: a kernel model, or the
            name or path of what `wlb profile` measured. Its linear part is used, too, if it is that of this model's
            layer on a tensor-parallel rank. Default: the analytic one of the hardware, an assumption.
        selector: the kernel model by which a sharding strategy is chosen, if it is not the one that predicts the times;
            wrong choices then cost time.
        max_tokens: `S_max`, the most tokens of a micro-batch of variable length; default: what fits into the GPUs'
            memory, see `wlb_tools.max_tokens`, or less for methods with more micro-batches under way. A given value is
            not checked against memory; outcomes say how much they need.
        num_micro_batches: of a global batch, a multiple of `dp`; default: `pp * dp`, as in the paper.
        schedule: of the pipeline; default: 1F1B, interleaved if the layout has virtual stages.
        sync: where data-parallel ranks wait for each other, and communicate (`wlb_tools.cluster.data_parallel`): once a
            "step", or in every "micro_batch", for which packers of whole documents then plan, as `wlb.Packer` with
            `dp_size` does; default: in every one with `fsdp="zero3"`, else once a step.
        cost_model: costs of documents for the packer; default: the model's FLOPs, attention's at the hardware's
            `attention_efficiency`. They are not used for the predicted times.
        outlier_thresholds: of the queues; default: tuned on the first quarter of the global batches.
        num_queues: how many thresholds are tuned.
        max_mean_delay: iterations that a token may wait on average, for tuning.
        max_delay: iterations after which a document leaves its queue; default: no limit.
        max_step_cost: most work of a step under adaptive release, in mean global batches (`wlb.Packer`); default: no
            bound.
        cp_overlap: share of context-parallel communication that computation hides.
        cp_keys: which keys context-parallel ranks gather: "all" (Transformer Engine, and most), or only the "needed",
            as `wlb.torch.context_parallel_attention` does (`Shard.keys_gathered`; layers with windows count as if they
            had none). Memory is that for all of them.
        tp_overlap: share of tensor-parallel communication that computation hides.
        ep_overlap: share of expert-parallel communication that computation hides.
        expert_imbalance: visits to the experts of the busiest of `ep` ranks over those to the mean one's, at least 1.
        p2p_overlap: share of a transfer between pipeline stages that travels as soon as it is sent, beside what the
            receiving stage computes; that stage waits for the rest. 1 for schedules that receive ahead; 0 for 1F1B of
            torch and Megatron-Core, which sends and receives at once and waits for both; always 1 for schedules in
            which a rank also sends to itself ("zbv", "dualpipev").
        dp_overlap: share of the gradient reduction and parameter gathering that computation hides; in a micro-batch at
            most as much as the pass computes.
        overhead: measured time of stages and steps besides the predicted one; default: none.
        reserved_bytes: memory of a GPU that is not available.
        noise: standard deviation of every pass of a micro-batch through a stage, relative to its time.
        noise_seed: of the noise.

    Raises:
        WlbError: naming the first invalid value; the model does not fit into memory, with changes that would make it
            fit; the schedule does not support the layout.
    """

    model: ModelConfig
    layout: ParallelLayout
    hardware: Hardware
    context: int = 131072
    kernel_model: KernelModel | str | os.PathLike[str] | None = None
    selector: KernelModel | None = None
    max_tokens: int | None = None
    num_micro_batches: int | None = None
    schedule: Schedule | None = None
    sync: Sync | None = None
    cost_model: CostModel | None = None
    outlier_thresholds: tuple[int, ...] | None = None
    num_queues: int = 2
    max_mean_delay: float = MAX_MEAN_DELAY
    max_delay: int | None = None
    max_step_cost: float | None = None
    cp_overlap: float = 0.0
    cp_keys: Keys = "all"
    tp_overlap: float = 0.0
    ep_overlap: float = 0.0
    expert_imbalance: float = 1.0
    p2p_overlap: float = 1.0
    dp_overlap: float = 0.0
    overhead: Overhead = NO_OVERHEAD
    reserved_bytes: int = RESERVED_BYTES
    noise: float = 0.0
    noise_seed: int = 0

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Scenario:
        """A scenario from a TOML file, see `from_dict`. Relative paths begin at its folder, or where Python runs.

        Raises:
            WlbError: the file cannot be read, or as `from_dict`.

        Examples:
            >>> import pathlib, tempfile
            >>> import wlb_tools
            >>> path = pathlib.Path(tempfile.mkdtemp(), "scenario.toml")
            >>> _ = path.write_text('''
            ... model = "llama2-7b"
            ... gpu = "h100"
            ... context = 65536
            ... [layout]
            ... tp = 8
            ... pp = 4
            ... ''')
            >>> wlb_tools.Scenario.from_toml(path).layout.world_size
            32
        """
        return cls.from_dict(read_toml(path), folder=os.path.dirname(os.fspath(path)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, folder: str | os.PathLike[str] = "") -> Scenario:
        """A scenario from plain values.

        Args:
            data: fields of a scenario by name. `model` is a preset, the path of a config.json or a table of sizes;
                `gpu` is a preset of `Hardware`, whose fields the table `hardware` changes; `layout` is a table of
                fields of `ParallelLayout`; `kernel_model` is the name or path of a profile; `cost_model` the path of
                what `wlb fit` wrote. Objects may stand in the place of tables.
            folder: where relative paths begin, if the file is there.

        Raises:
            WlbError: a setting is unknown (the error names the nearest), or as `Scenario`.
        """
        return cls(**arguments(data, cls, folder=folder))

    def __post_init__(self) -> None:
        self.layout.check(model=self.model)
        check_sync(self.sync, self.layout)
        self.overhead.check(num_stages=self.layout.num_stages)
        for name in ("cp_overlap", "tp_overlap", "ep_overlap", "p2p_overlap", "dp_overlap", "noise"):
            check_share(name, getattr(self, name))
        if self.cp_keys not in get_args(Keys):
            message = f"= {self.cp_keys!r}: must be one of {', '.join(map(repr, get_args(Keys)))}"
            raise error("cp_keys", message, value=self.cp_keys)
        if self.p2p_overlap < 1 and self.pipeline_schedule in V_SHAPED:
            message = f"= {self.p2p_overlap}: of {self.pipeline_schedule!r} is 1, its transfers are received ahead"
            raise error("p2p_overlap", message, value=self.p2p_overlap)
        check_imbalance(self.expert_imbalance)
        fp8_gain(self.layout, self.hardware)
        if self.max_step_cost is not None:
            check_positive("max_step_cost", self.max_step_cost)
        if self.noise == 1:
            raise error("noise", "= 1: must be from 0 to below 1", value=self.noise)
        for name, minimum in _INTEGERS.items():
            value = getattr(self, name)
            if value is not None or name not in _OPTIONAL:
                check_integer(name, value, minimum=minimum)
        if self.micro_batches % self.layout.dp:
            message = f"= {self.micro_batches}: must be a positive multiple of dp = {self.layout.dp}"
            raise error("num_micro_batches", message, value=self.micro_batches)
        self._check_kernel_model()
        if self.max_tokens is not None and self.max_tokens < self.context:
            message = f"= {self.max_tokens}: must be at least the context, {self.context}"
            raise error("max_tokens", message, value=self.max_tokens)
        _ = self.limit, self._equal, self.attention  # refuse wrong ones here

    def _check_kernel_model(self) -> None:
        if self.kernel_model is None:
            return
        kernel = self.attention
        heads, _, head_dim = self.model.kernel_heads
        heads //= self.layout.tp
        if kernel.num_heads != heads:
            message = f"is for {kernel.num_heads} heads: a GPU has num_heads / tp = {heads}"
            raise error("kernel_model", message, value=kernel.num_heads)
        if kernel.head_dim != head_dim:
            message = f"is for heads of dimension {kernel.head_dim}: the model's have {head_dim}"
            raise error("kernel_model", message, value=kernel.head_dim)
        if not kernel.causal:
            raise error("kernel_model", "is for attention without a causal mask: training is causal", value=False)

    @property
    def profile(self) -> str | os.PathLike[str] | None:
        """The measured profile that `kernel_model` names."""
        return None if isinstance(self.kernel_model, KernelModel) else self.kernel_model

    @property
    def measured_elsewhere(self) -> bool:
        """Whether the kernel model's GPU differs from the hardware's, as far as their names tell."""
        generation = GENERATIONS.get(self.hardware.name, self.hardware.name)
        return generation not in self.attention.source.lower()

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch."""
        return self.layout.pp * self.layout.dp if self.num_micro_batches is None else self.num_micro_batches

    @property
    def tokens_per_batch(self) -> int:
        """Most tokens of a global batch."""
        return self.micro_batches * self.context

    @property
    def pipeline_schedule(self) -> Schedule:
        """The schedule by name."""
        return self.schedule or default_schedule(self.layout)

    @property
    def waiting(self) -> Sync:
        """The given `sync`, or the default."""
        return check_sync(self.sync, self.layout)

    @property
    def meeting_ranks(self) -> dict[str, Any]:
        """Arguments of a packer for ranks that meet in every micro-batch; empty if they do not."""
        return meeting_ranks(self.waiting, self.layout.dp)

    @cached_property
    def dp_end(self) -> float:
        """Seconds of data-parallel communication at the end of a step that nothing hides."""
        gradients = data_parallel_seconds(
            self.model, self.layout, self.hardware, schedule=self.pipeline_schedule, sync=self.sync
        )
        return (1 - self.dp_overlap) * float(gradients.max())

    @cached_property
    def step_end(self) -> float:
        """Seconds of a step besides its micro-batches: `dp_end`, an optimizer on the CPU, and measured overhead."""
        offloaded = offload_seconds(self.model, self.layout, self.hardware, schedule=self.pipeline_schedule)
        return self.dp_end + float(offloaded.max()) + self.overhead.step

    def exposed_dp(self, computing: Floats) -> Floats:
        """Seconds of data-parallel communication in every pass that nothing hides; zeros if ranks meet once a step.

        Args:
            computing: float64[..., stages, 3] seconds that the slowest of the ranks that meet computes in each pass.
        """
        return exposed(self._each_micro_batch, computing, overlap=self.dp_overlap)

    @cached_property
    def _each_micro_batch(self) -> Floats:
        return micro_batch_seconds(
            self.model, self.layout, self.hardware, schedule=self.pipeline_schedule, sync=self.sync
        )

    @cached_property
    def attention(self) -> KernelModel:
        """The kernel model; its `source` says whether it was measured."""
        if isinstance(self.kernel_model, KernelModel):
            return self.kernel_model
        if self.profile is not None:
            return KernelModel.from_profile(self.profile, num_heads=self.model.kernel_heads[0] // self.layout.tp)
        (heads, kv_heads, head_dim), tp = self.model.kernel_heads, self.layout.tp
        return KernelModel.analytic(
            self.generation, num_heads=heads // tp, num_kv_heads=max(1, kv_heads // tp), head_dim=head_dim
        )

    @property
    def generation(self) -> Generation:
        """The generation of the GPU, whose attention is assumed if no kernel model is given."""
        if self.hardware.name not in GENERATIONS:
            message = f"is needed: {self.hardware.name!r} has no default, only {', '.join(GENERATIONS)} have"
            raise error("kernel_model", message)
        return GENERATIONS[self.hardware.name]

    @cached_property
    def linear(self) -> tuple[CostModel, CostModel] | None:
        """Measured forward and backward of everything but attention in a layer; None: computed by FLOPs."""
        if self.profile is None:
            return None
        linear = json.loads(read_profile(self.profile)).get("linear")
        measured = linear.get("layer") if isinstance(linear, dict) else None
        model, tp = self.model, self.layout.tp
        try:
            attention, feed_forward = model.attention, model.feed_forward
        except WlbError:  # layers differ in more than masks, so no measurement fits all
            return None
        mine = {
            "hidden_size": model.hidden_size,
            "ffn_hidden_size": feed_forward.inner // tp,
            "num_heads": attention.num_heads // tp,
            "num_kv_heads": kv_width(attention, self.layout) // attention.head_dim,
            "head_dim": attention.head_dim,
            "gated_ffn": feed_forward.gated,
            "tp": tp,
        }
        if not isinstance(measured, dict) or any(measured.get(key) != value for key, value in mine.items()):
            return None
        forward, backward = (CostModel.from_profile(self.profile, passes=passes) for passes in ("forward", "backward"))
        return forward, backward

    @cached_property
    def packer_cost(self) -> CostModel:
        """The cost model of the packer."""
        if self.cost_model is not None:
            return self.cost_model
        return self.flops(attention_efficiency=self.hardware.attention_efficiency)

    def flops(self, *, attention_efficiency: float) -> CostModel:
        """The model's FLOPs, with those that recomputation repeats."""
        with warnings.catch_warnings():  # on a slow network the fitted efficiency is above 10: nobody gave it
            warnings.filterwarnings("ignore", message="attention_efficiency")
            return self.model.cost_model(**self.cost_arguments(attention_efficiency=attention_efficiency))

    def cost_arguments(self, *, attention_efficiency: float) -> dict[str, Any]:
        """Arguments of `wlb.ModelConfig.cost_model` for the model's FLOPs, with those that recomputation repeats.

        If only attention is recomputed, it counts as slower attention.
        """
        share = float(self.layout.recomputed_of_stages(self.model).sum()) / self.model.num_layers
        if self.layout.recompute == "full":
            return {"attention_efficiency": attention_efficiency, "recompute": True if share == 1 else share}
        if self.layout.recompute == "attention":
            (once, _), (again, _) = (pass_weights("forward_backward", recompute=each) for each in (False, True))
            return {"attention_efficiency": attention_efficiency * once / (once + share * (again - once))}
        return {"attention_efficiency": attention_efficiency}

    def model_flops(self, lengths: ArrayLike) -> Floats:
        """FLOPs of training each document, as MFU counts them, without gradients of weights that LoRA freezes.

        Args:
            lengths: int[n] tokens of the documents.

        Returns:
            float64[n].
        """
        flops = self.model.flops(lengths)
        if not self.layout.lora_rank:
            return flops
        return np.asarray(flops - self.model.token_flops * np.asarray(lengths, dtype=np.float64))

    @cached_property
    def limit(self) -> int:
        """`S_max`: the most tokens of a micro-batch."""
        return self._limit(split=1)

    def _limit(self, *, split: int | Fraction) -> int:
        per_rank = int(self._per_rank * split)
        if self.max_tokens is not None:
            in_flight(self.layout, schedule=self.pipeline_schedule, num_micro_batches=per_rank)  # refuses the number
            return self.max_tokens
        default = self.num_micro_batches is None
        return max_tokens(
            self.model,
            self.layout,
            self.hardware,
            schedule=self.pipeline_schedule,
            num_micro_batches=lambda layout: int(layout.pp * split) if default else per_rank,
            reserved_bytes=self.reserved_bytes,
            at_least=self.context,
        )

    def stage_seconds(
        self,
        tokens: ArrayLike,
        *,
        attention_forward: ArrayLike,
        attention_backward: ArrayLike,
        layout: ParallelLayout | None = None,
        visiting_tokens: ArrayLike | None = None,
        fullest_tokens: ArrayLike | None = None,
        keys_gathered: ArrayLike | None = None,
        keys_moved: ArrayLike | None = None,
    ) -> StageSeconds:
        """`wlb_tools.stage_seconds` on this cluster; give another layout for groups of another size."""
        forward = backward = None
        if self.linear is not None:
            count = np.asarray(tokens)
            forward, backward = (np.where(count, of.linear_cost(np.maximum(count, 1)), 0.0) for of in self.linear)
        made = stage_seconds(
            tokens,
            linear_forward=forward,
            linear_backward=backward,
            attention_forward=attention_forward,
            attention_backward=attention_backward,
            model=self.model,
            layout=layout or self.layout,
            hardware=self.hardware,
            visiting_tokens=visiting_tokens,
            fullest_tokens=fullest_tokens,
            keys_gathered=keys_gathered,
            keys_moved=keys_moved,
            expert_imbalance=self.expert_imbalance,
            cp_overlap=self.cp_overlap,
            tp_overlap=self.tp_overlap,
            ep_overlap=self.ep_overlap,
            p2p_overlap=self.p2p_overlap,
        )
        if not self.overhead.forward:
            return made
        gathers = np.asarray(tokens if keys_gathered is None else keys_gathered) * ((layout or self.layout).cp > 1) > 0
        more = self.overhead.passes(tokens, gathers=gathers)
        return dataclasses.replace(made, seconds=np.maximum(made.seconds + more, 0.0))

    def attention_seconds(self, lengths: ArrayLike) -> float:
        """Seconds of attention of whole documents on one context-parallel rank, over all layers and passes.

        Args:
            lengths: int[n] tokens of the documents.
        """
        return sum(self.attention_by_mask(lengths).values())

    @cached_property
    def masks(self) -> tuple[tuple[Mask, ...], Floats]:
        """The model's masks, and float64[masks, kinds]: attention under each mask in a layer of each kind."""
        return attention_of_kinds(self.model)

    def attention_by_mask(self, lengths: ArrayLike) -> dict[Mask, float]:
        """Seconds of attention over all layers and passes, for the pairs under each of the model's masks."""
        masks, weights = self.masks
        layers = np.array(list(self.model.kinds.values()), dtype=np.float64)
        again = self.layout.recomputed_of_stages(self.model).sum(axis=0)
        repeated = again if self.layout.recompute in ("full", "attention") else 0 * again
        times = {"forward": weights @ (layers + repeated), "backward": weights @ layers}
        return {
            mask: sum(
                float(times[passes][row])
                * float(segment_seconds(self.attention, lengths, lengths, mask, passes=passes).sum())
                for passes in _PASSES
            )
            for row, mask in enumerate(masks)
        }

    def rank_seconds(self, shard: Shard, *, passes: Passes, kernel: KernelModel | None = None) -> Floats:
        """float64[cp, kinds]: seconds of attention of every rank, in a layer of each of `model.kinds`."""
        masks, weights = self.masks
        of_masks = [rank_seconds(kernel or self.attention, shard, mask, passes=passes) for mask in masks]
        return np.asarray(np.stack(of_masks, axis=1) @ weights)

    def keys_exchanged(self, shard: Shard) -> tuple[int, int]:
        """Keys that every rank sends to the others, and that the rank with most of them gets, by `cp_keys`.

        Gradients are sent in the opposite direction.
        """
        if self.cp_keys == "all":
            most = int(shard.tokens_per_rank.max())
            return most, most * (shard.cp_size - 1)
        return int(shard.keys_gathered.max()), int(shard.keys_moved.max())

    @property
    def layer_shares(self) -> Floats:
        """float64[kinds]: share of each of `model.kinds` among the layers."""
        return np.array(list(self.model.kinds.values())) / self.model.num_layers

    def fitted_efficiency(self, lengths: ArrayLike, *, attention_seconds: float | None = None) -> float:
        """The `attention_efficiency` with which FLOPs have this cluster's ratio of attention to everything else.

        Everything else has the communication that nothing hides, so this is above the kernel's own relative rate. It is
        computed from whole documents, with attention even on context-parallel ranks.

        Args:
            lengths: int[n] tokens of the documents.
            attention_seconds: result of the method `attention_seconds` for them, if it is known.

        Raises:
            WlbError: there is no document.
        """
        if np.size(lengths) == 0:
            raise error("lengths", "must not be empty", value=lengths)
        if attention_seconds is None:
            attention_seconds = self.attention_seconds(lengths)
        attention = attention_seconds / self.layout.cp
        per_rank = [-(-self.context // self.layout.cp)]
        without = self.stage_seconds(per_rank, attention_forward=[0.0], attention_backward=[0.0])
        rest = float(without.seconds.sum()) / self.context * float(np.sum(lengths))
        flops = self.flops(attention_efficiency=1.0)
        ratio = float(flops.attention_cost(lengths).sum() / flops.linear_cost(lengths).sum())
        return ratio * rest / attention

    def setup(self, *, fitted_to: ArrayLike | None = None, split: int | Fraction = 1) -> Setup:
        """Settings that the packing methods share, with costs fitted to given documents (`fitted_efficiency`).

        Raises:
            WlbError: the schedule does not support `split` times the micro-batches, or one context of each does not
                fit.
        """
        cost_model = self.packer_cost
        if fitted_to is not None:
            cost_model = self.flops(attention_efficiency=self.fitted_efficiency(fitted_to))
        return Setup(
            num_micro_batches=self.micro_batches,
            context=self.context,
            max_tokens=min(self.limit, self._limit(split=split)),
            cost_model=cost_model,
            dp_size=self.layout.dp,
            sync=self.waiting,
            split=split,
            max_delay=self.max_delay,
            max_step_cost=self.max_step_cost,
        )

    def memory(self, tokens: int, held: NDArray[np.float64]) -> RankMemory:
        """Bytes on the GPUs of every pipeline rank.

        Args:
            tokens: of the largest micro-batch.
            held: float64[pp], tokens of micro-batches under way, as `PipelineSteps.peak_activation` counts them.
        """
        return memory_per_rank(
            self.model,
            self.layout,
            tokens,
            schedule=self.pipeline_schedule,
            held_tokens=held,
            reserved_bytes=self.reserved_bytes,
        )

    @property
    def _per_rank(self) -> int:
        """Micro-batches of a step and data-parallel rank."""
        return self.micro_batches // self.layout.dp

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule runs gradients of inputs and of weights separately."""
        return bool((self._equal.kinds > 1).any())

    @property
    def equal_bubble(self) -> float:
        """Share of its time in which the pipeline is idle even if all micro-batches take equally long."""
        ratio = self._equal.bubble_ratio
        return ratio / (1 + ratio)

    @cached_property
    def _equal(self) -> PipelineTimeline:
        """The pipeline with micro-batches of equal time."""
        return simulate_pipeline(
            np.ones(self._per_rank),
            schedule=self.pipeline_schedule,
            num_stages=self.layout.pp,
            num_virtual_stages=self.layout.virtual_stages,
        )
