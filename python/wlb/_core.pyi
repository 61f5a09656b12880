import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, final, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from wlb._choices import (
    Generation,
    GroupSizes,
    Leftover,
    Method,
    OnBacklog,
    Oversize,
    Passes,
    Release,
    Schedule,
    Strategy,
    StreamMethod,
    Sync,
    Unit,
)
from wlb._results import Bounds, CostFit, DynamicCpPlan, PackerMetrics, PipelineSteps, PipelineTimeline, TuneResult

_Result = TypeVar("_Result")

__all__ = [
    "BUILD_PROFILE",
    "DELAY_PRICE",
    "GENERATIONS",
    "GROUP_SIZES",
    "IMBALANCE_RESOLUTION",
    "LEFTOVER",
    "MAX_CP_SIZE",
    "MAX_DELAY",
    "MAX_MEAN_DELAY",
    "MAX_MICRO_BATCHES",
    "MAX_STAGES",
    "MAX_TOKENS",
    "MAX_WORLD_SIZE",
    "METHODS",
    "ON_BACKLOG",
    "OVERSIZE",
    "PASSES",
    "PEAK_FLOPS",
    "RELEASES",
    "SCHEDULES",
    "STRATEGIES",
    "STREAM_METHODS",
    "SYNCS",
    "UNITS",
    "BacklogWarning",
    "CostModel",
    "KernelModel",
    "MicroBatch",
    "Packer",
    "Packing",
    "RankShard",
    "Shard",
    "StateError",
    "WlbError",
    "__version__",
    "batch_offsets",
    "dynamic_cp_seconds",
    "hand_down",
    "most_tokens",
    "order_micro_batches",
    "pack",
    "padded_tokens",
    "pairs",
    "pass_weights",
    "plan_dynamic_cp",
    "result",
    "shard",
    "simulate_pipeline",
    "simulate_steps",
    "split_documents",
    "tune_delay_price",
    "tune_outlier_thresholds",
]

__version__: str
BUILD_PROFILE: Literal["release", "debug"]
MAX_TOKENS: int
MAX_MICRO_BATCHES: int
MAX_CP_SIZE: int
MAX_WORLD_SIZE: int
MAX_STAGES: int
MAX_DELAY: int
MAX_MEAN_DELAY: float
DELAY_PRICE: float
IMBALANCE_RESOLUTION: float
GENERATIONS: tuple[Generation, ...]
GROUP_SIZES: tuple[GroupSizes, ...]
LEFTOVER: tuple[Leftover, ...]
METHODS: tuple[Method, ...]
ON_BACKLOG: tuple[OnBacklog, ...]
OVERSIZE: tuple[Oversize, ...]
PASSES: tuple[Passes, ...]
PEAK_FLOPS: dict[Generation, float]
RELEASES: tuple[Release, ...]
SCHEDULES: tuple[Schedule, ...]
STRATEGIES: tuple[Strategy, ...]
STREAM_METHODS: tuple[StreamMethod, ...]
SYNCS: tuple[Sync, ...]
UNITS: tuple[Unit, ...]

def result(cls: type[_Result]) -> type[_Result]: ...

class BacklogWarning(UserWarning): ...

class WlbError(ValueError):
    argument: str | None
    index: int | tuple[int, ...] | None
    value: Any

class StateError(WlbError): ...

def hand_down(*functions: Callable[..., Any]) -> None: ...

@final
class CostModel:
    def __new__(
        cls,
        *,
        attention: float,
        linear: float,
        causal: bool = True,
        windows: Mapping[int, float] | None = None,
        chunks: Mapping[int, float] | None = None,
        document: float = 0.0,
        micro_batch: float = 0.0,
        unit: Unit | None = None,
    ) -> CostModel: ...
    @staticmethod
    def from_flops(
        *,
        hidden_size: int,
        ffn_hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        vocab_size: int,
        head_dim: int | None = None,
        gated_ffn: bool = True,
        experts_per_token: int = 1,
        attention_efficiency: float = 1.0,
        flops_per_second: float = 1.0,
        passes: Passes = "forward_backward",
        recompute: bool = False,
        causal: bool = True,
    ) -> CostModel: ...
    @staticmethod
    def from_tables(
        lengths: ArrayLike,
        *,
        attention_seconds: ArrayLike,
        linear_seconds: ArrayLike,
        causal: bool = True,
    ) -> CostModel: ...
    @staticmethod
    def from_profile(path_or_name: str | os.PathLike[str], *, passes: Passes = "forward_backward") -> CostModel: ...
    def cost(self, lengths: ArrayLike) -> NDArray[np.float64]: ...
    def attention_cost(self, lengths: ArrayLike) -> NDArray[np.float64]: ...
    def linear_cost(self, lengths: ArrayLike) -> NDArray[np.float64]: ...
    @property
    def causal(self) -> bool: ...
    @property
    def unit(self) -> Unit | None: ...
    @property
    def terms(self) -> dict[str, float]: ...
    @staticmethod
    def fit(
        micro_batches: Sequence[ArrayLike],
        seconds: ArrayLike,
        *,
        windows: Sequence[int] = (),
        chunks: Sequence[int] = (),
        terms: Sequence[str] | None = None,
        causal: bool = True,
        ranks: ArrayLike | None = None,
    ) -> CostFit: ...
    def to_json(self) -> str: ...
    @staticmethod
    def from_json(text: str) -> CostModel: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class MicroBatch:
    @property
    def document_ids(self) -> NDArray[np.int64]: ...
    @property
    def starts(self) -> NDArray[np.int32]: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def cu_seqlens(self) -> NDArray[np.int32]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def cost(self) -> float: ...
    def __len__(self) -> int: ...

@final
class Packing:
    @staticmethod
    def from_assignment(
        lengths: ArrayLike,
        assignment: ArrayLike,
        *,
        num_micro_batches: int,
        max_tokens: int,
        cost_model: CostModel | None = None,
        costs: ArrayLike | None = None,
        limits: ArrayLike | None = None,
    ) -> Packing: ...
    @property
    def method(self) -> str: ...
    @property
    def num_micro_batches(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]: ...
    @property
    def assignment(self) -> NDArray[np.int32]: ...
    @property
    def tokens(self) -> NDArray[np.int64]: ...
    @property
    def costs(self) -> NDArray[np.float64]: ...
    @property
    def padded_tokens(self) -> NDArray[np.int64]: ...
    @property
    def column_costs(self) -> NDArray[np.float64]: ...
    @property
    def step_cost(self) -> float: ...
    @property
    def leftover(self) -> NDArray[np.int64]: ...
    @property
    def leftover_starts(self) -> NDArray[np.int32]: ...
    @property
    def leftover_lengths(self) -> NDArray[np.int32]: ...
    @property
    def imbalance(self) -> float: ...
    @property
    def dp_size(self) -> int | None: ...
    @property
    def sync(self) -> Sync | None: ...
    @property
    def rank_imbalance(self) -> float: ...
    @property
    def lower_bound(self) -> float: ...
    @property
    def length_fallbacks(self) -> int: ...
    @property
    def global_batches(self) -> int: ...
    def digest(self) -> str: ...
    def deal(self, dp_size: int) -> NDArray[np.int64]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> MicroBatch: ...
    def __iter__(self) -> Iterator[MicroBatch]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def pack(
    lengths: ArrayLike,
    *,
    num_micro_batches: int | None,
    max_tokens: int,
    cost_model: CostModel | None = None,
    costs: ArrayLike | None = None,
    limits: ArrayLike | None = None,
    method: Method = "var_length",
    global_batches: int = 1,
    multiple_of: int = 1,
    dp_size: int | None = None,
    sync: Sync | None = None,
    groups: ArrayLike | None = None,
    equal_documents: bool = False,
    max_documents: int | None = None,
    multiple_of_tokens: int = 1,
    token_buckets: ArrayLike | None = None,
    leftover: Leftover = "error",
) -> Packing: ...

@final
class Packer:
    def __new__(
        cls,
        *,
        num_micro_batches: int,
        max_tokens: int,
        cost_model: CostModel | None = None,
        cost_columns: int | None = None,
        limits: ArrayLike | None = None,
        outlier_thresholds: Sequence[int] | None = None,
        release: Release | None = None,
        delay_price: float | None = None,
        max_delay: int | None = None,
        max_document_tokens: int | None = None,
        oversize: Oversize = "error",
        method: StreamMethod = "var_length",
        dp_size: int | None = None,
        sync: Sync | None = None,
        max_documents: int | None = None,
        multiple_of_tokens: int = 1,
        token_buckets: Sequence[int] = (),
        max_step_cost: float | None = None,
        tokens_per_batch: int | None = None,
        on_backlog: OnBacklog = "warn",
    ) -> Packer: ...
    @staticmethod
    def from_state_dict(state: dict[str, Any], on_backlog: OnBacklog = "warn") -> Packer: ...
    def copy(self) -> Packer: ...
    def empty_copy(self) -> Packer: ...
    def push(
        self,
        lengths: ArrayLike,
        ids: ArrayLike | None = None,
        *,
        starts: ArrayLike | None = None,
        costs: ArrayLike | None = None,
        min_step_tokens: int = 0,
        early: ArrayLike | None = None,
    ) -> Packing: ...
    def leads(self, lengths: ArrayLike, *, tokens_per_batch: int, most: int) -> NDArray[np.int64]: ...
    def admits(self, lengths: ArrayLike, *, costs: ArrayLike | None = None) -> int: ...
    def bounds(self) -> Bounds: ...
    @property
    def room(self) -> int: ...
    def drain(self) -> Packing: ...
    def flush(self) -> list[Packing]: ...
    @property
    def pending(self) -> int: ...
    @property
    def pending_tokens(self) -> int: ...
    @property
    def carried_tokens(self) -> int: ...
    @property
    def oldest_wait(self) -> int: ...
    @property
    def queued(self) -> tuple[int, ...]: ...
    @property
    def carried(self) -> int: ...
    @property
    def iteration(self) -> int: ...
    @property
    def num_micro_batches(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def max_document_tokens(self) -> int: ...
    @property
    def outlier_thresholds(self) -> tuple[int, ...]: ...
    @property
    def release(self) -> Release: ...
    @property
    def delay_price(self) -> float | None: ...
    @property
    def oversize(self) -> Oversize: ...
    @property
    def on_backlog(self) -> OnBacklog: ...
    @property
    def max_delay(self) -> int | None: ...
    @property
    def method(self) -> StreamMethod: ...
    @property
    def dp_size(self) -> int | None: ...
    @property
    def sync(self) -> Sync | None: ...
    @property
    def max_documents(self) -> int | None: ...
    @property
    def multiple_of_tokens(self) -> int: ...
    @property
    def token_buckets(self) -> tuple[int, ...]: ...
    @property
    def max_step_cost(self) -> float | None: ...
    @property
    def tokens_per_batch(self) -> int: ...
    @property
    def cost_model(self) -> CostModel | None: ...
    @property
    def cost_columns(self) -> int | None: ...
    @property
    def limits(self) -> tuple[float, ...] | None: ...
    def set_cost_model(self, cost_model: CostModel) -> None: ...
    @property
    def fingerprint(self) -> str: ...
    def metrics(self) -> PackerMetrics: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], *, allow_config_change: bool = False) -> None: ...
    def __copy__(self) -> Packer: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def tune_outlier_thresholds(
    lengths: ArrayLike,
    *,
    num_micro_batches: int,
    max_tokens: int,
    cost_model: CostModel | None = None,
    costs: ArrayLike | None = None,
    limits: ArrayLike | None = None,
    num_queues: int = 2,
    max_mean_delay: float = 0.6,
    max_delay: int | None = None,
    max_document_tokens: int | None = None,
    tokens_per_batch: int | None = None,
    method: StreamMethod = "var_length",
    dp_size: int | None = None,
    sync: Sync | None = None,
    max_documents: int | None = None,
) -> TuneResult: ...
def tune_delay_price(
    lengths: ArrayLike,
    *,
    num_micro_batches: int,
    max_tokens: int,
    cost_model: CostModel | None = None,
    costs: ArrayLike | None = None,
    max_mean_delay: float = 0.6,
    max_delay: int | None = None,
    max_document_tokens: int | None = None,
    tokens_per_batch: int | None = None,
    method: StreamMethod = "var_length",
    max_step_cost: float | None = None,
    dp_size: int | None = None,
    sync: Sync | None = None,
    max_documents: int | None = None,
    max_early: int = 0,
) -> TuneResult: ...
def padded_tokens(tokens: int, *, multiple_of_tokens: int = 1, token_buckets: ArrayLike | None = None) -> int: ...
def most_tokens(max_tokens: int, *, multiple_of_tokens: int = 1, token_buckets: ArrayLike | None = None) -> int: ...
def batch_offsets(lengths: ArrayLike, *, tokens_per_batch: int) -> NDArray[np.int64]: ...
def split_documents(
    lengths: ArrayLike, *, max_document_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]: ...

@final
class RankShard:
    @property
    def rank(self) -> int: ...
    @property
    def cp_size(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_segments(self) -> int: ...
    @property
    def token_indices(self) -> NDArray[np.int32]: ...
    @property
    def position_ids(self) -> NDArray[np.int32]: ...
    @property
    def cu_seqlens_q(self) -> NDArray[np.int32]: ...
    @property
    def cu_seqlens_k(self) -> NDArray[np.int32]: ...
    @property
    def max_seqlen_q(self) -> int: ...
    @property
    def max_seqlen_k(self) -> int: ...
    @property
    def k_starts(self) -> NDArray[np.int32]: ...
    @property
    def documents(self) -> NDArray[np.int32]: ...
    @property
    def pairs(self) -> int: ...

@final
class Shard:
    @property
    def strategy(self) -> str: ...
    @property
    def hybrid_threshold(self) -> int | None: ...
    @property
    def cp_size(self) -> int: ...
    @property
    def causal(self) -> bool: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def lengths(self) -> NDArray[np.int32]: ...
    @property
    def tokens_per_rank(self) -> NDArray[np.int64]: ...
    @property
    def pairs_per_rank(self) -> NDArray[np.int64]: ...
    @property
    def keys_moved(self) -> NDArray[np.int64]: ...
    @property
    def keys_gathered(self) -> NDArray[np.int64]: ...
    @property
    def tokens_split(self) -> NDArray[np.int64]: ...
    @property
    def keys_picked(self) -> NDArray[np.int64]: ...
    @property
    def restore_indices(self) -> NDArray[np.int32]: ...
    def rank(self, rank: int) -> RankShard: ...
    def digest(self) -> str: ...
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def shard(
    lengths: ArrayLike,
    *,
    cp_size: int,
    strategy: Strategy = "auto",
    causal: bool = True,
    hybrid_threshold: int | None = None,
    max_imbalance: float | None = None,
    kernel_model: KernelModel | None = None,
    cp_seconds_per_key: float = 0.0,
) -> Shard: ...

@final
class KernelModel:
    @staticmethod
    def from_profile(path_or_name: str | os.PathLike[str], *, num_heads: int | None = None) -> KernelModel: ...
    @staticmethod
    def analytic(
        generation: Generation,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int,
        causal: bool = True,
    ) -> KernelModel: ...
    def segment_seconds(
        self, query_lengths: ArrayLike, key_lengths: ArrayLike, *, passes: Passes = "forward_backward"
    ) -> NDArray[np.float64]: ...
    def rank_seconds(self, shard: Shard, *, passes: Passes = "forward_backward") -> NDArray[np.float64]: ...
    @property
    def source(self) -> str: ...
    @property
    def causal(self) -> bool: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def tiles(self) -> tuple[int, int]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def pass_weights(passes: Passes, *, recompute: bool = False) -> tuple[float, float]: ...
@overload
def pairs(lengths: int, *, causal: bool = True) -> int: ...
@overload
def pairs(lengths: ArrayLike, *, causal: bool = True) -> NDArray[np.int64]: ...
def simulate_pipeline(
    costs: ArrayLike,
    *,
    schedule: Schedule = "1f1b",
    num_stages: int,
    num_virtual_stages: int = 1,
    p2p_seconds: ArrayLike = 0.0,
    activation: ArrayLike | None = None,
    exposed: ArrayLike | None = None,
) -> PipelineTimeline: ...
def simulate_steps(
    costs: ArrayLike,
    *,
    schedule: Schedule = "1f1b",
    num_stages: int,
    num_virtual_stages: int = 1,
    p2p_seconds: ArrayLike = 0.0,
    activation: ArrayLike | None = None,
    exposed: ArrayLike | None = None,
) -> PipelineSteps: ...
def order_micro_batches(
    costs: ArrayLike,
    *,
    dp_size: int = 1,
    schedule: Schedule = "1f1b",
    num_stages: int,
    num_virtual_stages: int = 1,
    p2p_seconds: ArrayLike = 0.0,
) -> NDArray[np.int64]: ...
def dynamic_cp_seconds(
    group_seconds: ArrayLike,
    *,
    cp_sizes: ArrayLike,
    group_offsets: ArrayLike,
    world_size: int,
    num_stages: int,
    num_virtual_stages: int,
    schedule: str,
    sync: str,
    p2p_seconds: float,
) -> float: ...
def plan_dynamic_cp(
    lengths: ArrayLike,
    *,
    world_size: int,
    num_stages: int,
    max_tokens_per_rank: int,
    cost_model: CostModel | None = None,
    costs: ArrayLike | None = None,
    attention_costs: ArrayLike | None = None,
    num_virtual_stages: int = 1,
    schedule: Schedule | None = None,
    sync: Sync = "step",
    max_cp_size: int | None = None,
    group_sizes: GroupSizes = "powers_of_two",
    ranks_per_node: int | None = None,
    max_documents: int | None = None,
    multiple_of_tokens: int = 1,
    token_buckets: ArrayLike | None = None,
    num_micro_batches: int | None = None,
    min_micro_batches: int | None = None,
    max_micro_batches: int | None = None,
    cp_seconds_per_token: float = 0.0,
    cp_seconds_per_exchange: float = 0.0,
    cp_seconds_per_token_in_node: float | None = None,
    cp_seconds_per_exchange_in_node: float | None = None,
    cp_overlap: float = 1.0,
    p2p_seconds: float = 0.0,
    micro_batch_seconds: float = 0.0,
    ids: ArrayLike | None = None,
) -> DynamicCpPlan: ...
