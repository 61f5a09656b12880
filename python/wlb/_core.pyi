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
    """What one rank of a context-parallel group holds and computes, ready for a varlen attention kernel.

    Tokens stand in packed order. A segment is a contiguous run of one document; segment ``i``'s queries are
    ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of the rank's tokens, and its keys are
    ``packed[k_starts[i] : k_starts[i] + cu_seqlens_k[i + 1] - cu_seqlens_k[i]]``. Under a causal mask these are its
    document up to the segment's end, so that a kernel's bottom-right causal alignment is right.

    Example:
        >>> import wlb
        >>> r = wlb.shard([8, 4], cp_size=2, strategy="per_document").rank(0)
        >>> r.position_ids
        array([0, 1, 6, 7, 0, 3], dtype=int32)
        >>> r.cu_seqlens_q
        array([0, 2, 4, 5, 6], dtype=int32)
        >>> r.k_starts
        array([0, 0, 8, 8], dtype=int32)
    """
    @property
    def rank(self) -> int:
        """The rank, from 0."""
    @property
    def cp_size(self) -> int:
        """Ranks of the group."""
    @property
    def causal(self) -> bool:
        """Whether queries attend only to keys before them."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the rank, ``T_r``."""
    @property
    def num_segments(self) -> int:
        """Segments of the rank, ``s``."""
    @property
    def token_indices(self) -> NDArray[np.int32]:
        """int32[T_r]: where each token stands in the packed sequence; ascending."""
    @property
    def position_ids(self) -> NDArray[np.int32]:
        """int32[T_r]: where each token stands in its document; the positions that RoPE needs."""
    @property
    def cu_seqlens_q(self) -> NDArray[np.int32]:
        """int32[s + 1]: where the queries of each segment begin among the rank's tokens."""
    @property
    def cu_seqlens_k(self) -> NDArray[np.int32]:
        """int32[s + 1]: where the keys of each segment begin, when the keys of all segments are copied one after the
        other.
        """
    @property
    def max_seqlen_q(self) -> int:
        """Tokens of the longest segment; 0 without segments."""
    @property
    def max_seqlen_k(self) -> int:
        """Most keys of a segment; 0 without segments."""
    @property
    def k_starts(self) -> NDArray[np.int32]:
        """int32[s]: where the keys of each segment begin in the packed sequence."""
    @property
    def documents(self) -> NDArray[np.int32]:
        """int32[s]: the document that each segment is part of."""
    @property
    def pairs(self) -> int:
        """Exact (query, key) pairs of the rank."""

@final
class Shard:
    """A micro-batch cut for the ranks of a context-parallel group.

    Every array is a fresh copy that the caller may keep or change.

    Example:
        >>> import wlb
        >>> s = wlb.shard([8, 4], cp_size=2, strategy="per_document")
        >>> s
        Shard(strategy="per_document", cp_size=2, documents=2, tokens=12)
        >>> s.tokens_per_rank
        array([6, 6])
        >>> s.keys_moved
        array([6, 3])
    """
    @property
    def strategy(self) -> str:
        """How it was cut: "auto", "per_sequence", "per_document", "hybrid" or "contiguous"."""
    @property
    def hybrid_threshold(self) -> int | None:
        """With "hybrid", the tokens from which on documents were cut, given or chosen; else None."""
    @property
    def cp_size(self) -> int:
        """Ranks of the group; also ``len()``."""
    @property
    def causal(self) -> bool:
        """Whether queries attend only to keys before them."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[n]: tokens of each document."""
    @property
    def tokens_per_rank(self) -> NDArray[np.int64]:
        """int64[cp_size]: tokens of each rank."""
    @property
    def pairs_per_rank(self) -> NDArray[np.int64]:
        """int64[cp_size]: exact (query, key) pairs of each rank."""
    @property
    def keys_moved(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys that each rank has to fetch, because its queries see them and other ranks hold them. A
        rank fetches as many values. Without a window; O(segments).
        """
    @property
    def keys_gathered(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys of each rank that an all-gather has to bring, because a segment on another rank sees
        them. As many values come with them. Ranks send as many as the rank with most keys. Without a window;
        O(segments).
        """
    @property
    def tokens_split(self) -> NDArray[np.int64]:
        """int64[cp_size]: all tokens of a rank that needs two calls of attention, because some of its segments find all
        of their keys on the rank and others see gathered keys; else 0. Without a window; O(segments).
        """
    @property
    def keys_picked(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys that each rank picks from the gathered keys: for every segment that sees a gathered key,
        all keys that it sees. Without a window; O(segments).
        """
    @property
    def restore_indices(self) -> NDArray[np.int32]:
        """int32[num_tokens]: with ``rank_major`` the ranks' tokens concatenated, ``rank_major[restore_indices]`` is the
        packed sequence. O(tokens).
        """
    def rank(self, rank: int) -> RankShard:
        """What one rank holds and computes.

        Raises:
            WlbError: no such rank; or its segments' keys are more than int32 ``cu_seqlens_k`` can count.
        """
    def digest(self) -> str:
        """Hex hash of which token lies where: equal on two ranks iff their shards are equal."""
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
) -> Shard:
    """Shards one micro-batch over the ranks of a context-parallel group, without padding.

    Any lengths, any total, any ``cp_size``: ranks differ by at most one token, and a document of 1 token is as
    legal as a rank without any.

    Args:
        lengths: int[n], tokens of the documents, in packed order.
        cp_size: ranks of the group.
        strategy: "auto" lays every document on as few ranks as leave none with more than ``max_imbalance`` times
            the mean pairs (where nothing does, as evenly as it can): few keys to fetch, long segments.
            "per_document" cuts every document into ``2 * cp_size`` chunks and gives rank ``i`` chunks ``i`` and ``2
            * cp_size - 1 - i``: equal work. "per_sequence" does that with the packed sequence: fewer, longer
            segments, unequal work. "hybrid" cuts documents of ``hybrid_threshold`` tokens or more per document and
            keeps shorter ones whole on one rank. "adaptive" is whichever of these ``kernel_model`` predicts to be
            fastest: the least latency of the slowest rank, forward and backward; of equals "per_sequence" before
            "per_document", "auto" and "hybrid". The result's ``strategy`` and ``hybrid_threshold`` tell which.
            "contiguous" gives rank ``i`` the ``i``-th of ``cp_size`` runs of the packed sequence, for layers that
            mix neighbouring tokens: attention is uneven under it, see :func:`wlb.torch.recut`.
        causal: mask; decides pairs and key ranges, not who gets which token.
        hybrid_threshold: tokens; with "hybrid" only.
        max_imbalance: with "auto", and with "adaptive" where it tries that: pairs of the rank with the most over
            the mean, at least 1; default 1.01.
        kernel_model: for "adaptive", and for "hybrid" without a threshold, which then gets the best one. It
            searches all distinct lengths (of more than 64, only some: see docs/semantics.md) and decides from
            lengths only.
        cp_seconds_per_key: beside a ``kernel_model``: time that a rank takes for each key that it fetches
            (``Shard.keys_moved``), in one layer, as the model's latencies are: with its value, forward and
            backward, all that is sent for it either way, less what computation hides; at most 1e-3. The slowest
            rank is then that with the most attention and fetching together. 0: free. Give a price where ranks
            fetch just what they need, as ``wlb.torch``'s transport "fetch" does; others send more than that.

    Returns:
        Shard. The same input gives the same shards on every rank.

    Raises:
        WlbError: a length or size out of range, more than 2**31 - 1 tokens in all, an option that does not go with
            the strategy or is missing, a kernel model of another mask, a price that is no time.

    O(n (log n + cp_size)); with a kernel model, O(n cp_size) for each threshold tried. WLB-LLM, section 5.

    Example:
        >>> import wlb
        >>> s = wlb.shard([8, 4], cp_size=2, strategy="per_document")
        >>> s.pairs_per_rank
        array([23, 23])
        >>> s.rank(0).token_indices
        array([ 0,  1,  6,  7,  8, 11], dtype=int32)
    """

@final
class KernelModel:
    """Latency of an attention kernel for the segments of a context-parallel rank, in seconds per transformer layer.

    A kernel computes whole tiles of queries; their FLOPs are divided by the rate at that (query length, key length),
    from a table that was measured (:meth:`from_profile`) or is assumed (:meth:`analytic`); docs/semantics.md
    has the formulas. Immutable; picklable; equal models compare equal. WLB-LLM, section 5.2.

    Example:
        >>> import wlb
        >>> kernel = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
        >>> kernel.source
        'analytic: h100'
        >>> s = wlb.shard([100, 20_000], cp_size=4, strategy="adaptive", kernel_model=kernel)
        >>> s.strategy
        'per_sequence'
    """
    @staticmethod
    def from_profile(path_or_name: str | os.PathLike[str], *, num_heads: int | None = None) -> KernelModel:
        """The model of a measured profile; exact at every point of its grid.

        Args:
            path_or_name: path of a ``.json`` file, or a name in ``wlb.profiles.names()``.
            num_heads: query heads of one GPU where they are others than the profile's: times are in proportion.

        Raises:
            WlbError: no such profile, or a malformed one; says where in the file.
        """
    @staticmethod
    def analytic(
        generation: Generation,
        *,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int,
        causal: bool = True,
    ) -> KernelModel:
        """A documented default where nothing was measured: an assumption, and ``source`` says so.

        Args:
            generation: "a100", "h100", "h200" or "b200".
            num_heads: query heads of one GPU.
            num_kv_heads: key/value heads of one GPU, which divide them; default ``num_heads``. Not used.
            head_dim: width of a head.
            causal: mask.

        Raises:
            WlbError: an unknown generation, or a size out of range.
        """
    def segment_seconds(
        self, query_lengths: ArrayLike, key_lengths: ArrayLike, *, passes: Passes = "forward_backward"
    ) -> NDArray[np.float64]:
        """Latency of segments, one by one, in a call that fills the GPU.

        Args:
            query_lengths: int[n], tokens of each segment.
            key_lengths: int[n], keys that its last token sees; no fewer.
            passes: "forward", "backward" or "forward_backward" (their sum).

        Returns:
            float64[n], seconds.

        Raises:
            WlbError: a length out of range, or more queries than keys.
        """
    def rank_seconds(self, shard: Shard, *, passes: Passes = "forward_backward") -> NDArray[np.float64]:
        """Latency of each rank's attention call: the sum of its segments, and a constant for the launch.

        Args:
            shard: of the same mask.
            passes: "forward", "backward" or "forward_backward" (their sum).

        Returns:
            float64[cp_size], seconds; 0 for a rank without tokens.

        Raises:
            WlbError: a shard of another mask.
        """
    @property
    def source(self) -> str:
        """Where the numbers come from: "measured: (GPU) (kernel)" or "analytic: (generation)"."""
    @property
    def causal(self) -> bool:
        """Whether queries attend only to keys before them."""
    @property
    def num_heads(self) -> int:
        """Query heads of one GPU."""
    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of one GPU, as measured."""
    @property
    def head_dim(self) -> int:
        """Width of a head."""
    @property
    def tiles(self) -> tuple[int, int]:
        """Queries that a thread block computes at a time, forward and backward; a segment takes whole tiles."""
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
) -> PipelineTimeline:
    """Simulates one step of one pipeline.

    Every rank runs its ops in the schedule's order, each as soon as the rank is free and its input is there.

    Args:
        costs: seconds; float64[m], micro-batches through the whole model, forward and backward
            (:attr:`Packing.costs`): every stage takes an equal part, and of that a third each the forward and the
            gradients of input and weights. Or float64[m, stages], with ``stages = num_stages *
            num_virtual_stages``; or float64[m, stages, 3], with forward, input gradient and weight gradient apart.
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zbv" or
            "dualpipev".
        num_stages: pipeline ranks, p.
        num_virtual_stages: stages on each rank, v; rank r has stages r, r + p, ... With "zbv" and "dualpipev" 2: r
            and 2p - 1 - r; with "gpipe", "1f1b", "zb_h1" and "zb_h2" 1. The interleaved schedules take the
            micro-batches in ``max(1, m // p)`` rounds, which must divide m.
        p2p_seconds: latency from the end of an op to when a stage on another rank can start on what it sends; it
            occupies neither. One number, or float64[m].
        activation: float64[m], what a rank holds of a micro-batch from its forward to its weight gradient, over all
            its stages; in any unit, such as tokens. 1 each without it.
        exposed: like ``costs``: which part of them is communication that nothing hides. Changes no time.

    Returns:
        PipelineTimeline.

    Raises:
        WlbError: a shape that does not fit, a number that is negative or not finite, sizes that the schedule does
            not take.

    O(ops), that is O(m p v).

    Example:
        >>> import wlb
        >>> timeline = wlb.simulate_pipeline([3.0, 3.0], num_stages=2)
        >>> timeline.seconds, timeline.bubble_ratio
        (4.5, 0.5)
    """

def simulate_steps(
    costs: ArrayLike,
    *,
    schedule: Schedule = "1f1b",
    num_stages: int,
    num_virtual_stages: int = 1,
    p2p_seconds: ArrayLike = 0.0,
    activation: ArrayLike | None = None,
    exposed: ArrayLike | None = None,
) -> PipelineSteps:
    """Simulates many steps of data-parallel replicas of a pipeline, which wait for each other at the end of each step.

    As :func:`simulate_pipeline`, with two dimensions before that of the micro-batches, and without single ops: a
    few numbers a step, tens of millions of ops a second.

    Args:
        costs: seconds; float64[steps, dp, m], or that with [..., stages] or [..., stages, 3].
        schedule: see :func:`simulate_pipeline`.
        num_stages: see there.
        num_virtual_stages: see there.
        p2p_seconds: one number, or float64[steps, dp, m].
        activation: float64[steps, dp, m].
        exposed: like ``costs``.

    Returns:
        PipelineSteps.

    Raises:
        WlbError: no replicas; and see :func:`simulate_pipeline`.

    O(ops), that is O(steps dp m p v).

    Example:
        >>> import numpy as np
        >>> import wlb
        >>> costs = np.ones((1, 2, 4))  # one step, two replicas, four micro-batches
        >>> costs[0, 1] = 2.0
        >>> wlb.simulate_steps(costs, num_stages=2).seconds
        array([5.])
    """

def order_micro_batches(
    costs: ArrayLike,
    *,
    dp_size: int = 1,
    schedule: Schedule = "1f1b",
    num_stages: int,
    num_virtual_stages: int = 1,
    p2p_seconds: ArrayLike = 0.0,
) -> NDArray[np.int64]:
    """Deals the micro-batches of a step to data-parallel ranks in equal counts, in an order that suits the schedule,
    so that the slowest rank is done early.

    Deals by cost, then tries sorted orders, swaps and moves in the simulator: never slower than
    :meth:`Packing.deal`, which knows no schedule.

    Args:
        costs: seconds of all micro-batches of a step; float64[M], [M, stages] or [M, stages, 3] as for
            :func:`simulate_pipeline`.
        dp_size: data-parallel ranks; divides M.
        schedule: see :func:`simulate_pipeline`.
        num_stages: see there.
        num_virtual_stages: see there.
        p2p_seconds: one number, or float64[M].

    Returns:
        int64[dp_size, M / dp_size]: indices of each rank's micro-batches, the first of each row to go first. So
        ``costs[order]`` is what the ranks run. The same on every rank that has the same costs.

    Raises:
        WlbError: ``dp_size`` does not divide M; and see :func:`simulate_pipeline`.

    Simulates about a million ops (milliseconds), or four orders of each rank if those are more: at most 2^24 ops
    and one order. Ranks beyond that keep the order of :meth:`Packing.deal`.

    Example:
        >>> import wlb
        >>> wlb.order_micro_batches([4.0, 1.0, 2.0, 3.0], dp_size=2, num_stages=2)
        array([[1, 0],
               [3, 2]])
    """

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
) -> DynamicCpPlan:
    """Plans one step with dynamic context parallelism: every micro-batch divides the ranks into groups as its
    documents need.

    A long document gets as many ranks as it takes to finish with the others, short ones share few. Groups are
    aligned powers of two inside any ``world_size``, so that all of them can be built once; or of any size. All
    ranks have the same number of micro-batches.

    A micro-batch of documents with ``T`` tokens in all takes a group of ``c`` ranks ``micro_batch_seconds + cost /
    c + max(0, exchange - cp_overlap * attention_cost / c)`` through the whole model, forward and backward, with
    ``exchange = (c - 1) * cp_seconds_per_exchange + T * (c - 1) / c * cp_seconds_per_token``. Each rank holds at
    most ``ceil(T / c)`` tokens of it (documents are sharded "per_document").

    Args:
        lengths: int[n], tokens of the documents of the step.
        world_size: ranks of one pipeline stage, DP times CP: those that groups are made of. Any number.
        num_stages: pipeline stages, PP.
        max_tokens_per_rank: most tokens of a rank in a micro-batch; a memory bound. An interleaved pipeline also
            has no more under way than in rounds of ``num_stages`` such micro-batches, unless ``num_micro_batches``
            is given.
        cost_model: what documents cost on one rank, in seconds for the whole model. Or ``costs``.
        costs: float64[n], what each document costs on one rank, in seconds for the whole model, in the place of
            ``cost_model``: for documents whose length does not tell their work. The ranks of a group share all of
            it; memory goes by tokens.
        attention_costs: float64[n], the part of each of ``costs`` that is attention, behind which the exchange
            hides: wanted beside ``costs`` where exchange has a price and ``cp_overlap`` is above 0.
        num_virtual_stages: parts of the model on each stage.
        schedule: "1f1b" or "interleaved_1f1b"; "zbv" or "dualpipev", with ``num_virtual_stages=2``. None: 1F1B,
            interleaved with several virtual stages. "dualpipev" has at least two micro-batches for each stage.
        sync: where the ranks of a stage wait for each other: "step", once a step; or "micro_batch", in each (FSDP,
            ZeRO-3, experts over all of them), so that a micro-batch takes all of them as long as its slowest group.
        max_cp_size: largest group, ``world_size`` if None; rounded down to a power of two where groups are.
        group_sizes: "powers_of_two", each from a multiple of its size on; or "any": any number of neighbours, which
            worlds of 24 or 48 ranks want, and memory that the longest documents fill.
        ranks_per_node: ranks of a stage on each node, if exchange is cheaper inside one: rank ``r`` is in node ``r
            // ranks_per_node``.
        max_documents: most documents of a group in a micro-batch, so that its ``cu_seqlens`` have a fixed number of
            entries (CUDA graphs); the padding is one more, as in ``pack``.
        multiple_of_tokens: each rank's tokens of a micro-batch run padded up to a multiple of this (MXFP8 32,
            HybridEP 128), by a document of the whole group, and ``max_tokens_per_rank`` counts the padding: the
            plan's is the largest multiple within it. Padding takes no time in a plan.
        token_buckets: int[b], ascending, multiples of ``multiple_of_tokens``: the only sizes that a rank's tokens
            have; a group without documents has the first.
        num_micro_batches: micro-batches of the step; None sweeps them.
        min_micro_batches: the sweep tries no fewer. For schedules that need so many: torch's 1F1B one for each
            stage, its DualPipeV two.
        max_micro_batches: where the sweep ends. It begins with ``num_stages``, or as many as memory forces or are
            wanted, and ends by default at 4 times that; if the documents do not fit by then, later. With
            ``micro_batch_seconds``, it begins with what memory forces.
        cp_seconds_per_token: time to exchange the keys and values of a token, and their gradients, over all layers.
        cp_seconds_per_exchange: latency of handing keys and values on to the next rank, over all layers and passes.
        cp_seconds_per_token_in_node, cp_seconds_per_exchange_in_node: the same of groups inside a node, with
            ``ranks_per_node``; each 0 if None, and at most what it costs across nodes.
        cp_overlap: part of the attention, from 0 to 1, that can hide the exchange.
        p2p_seconds: latency between pipeline stages.
        micro_batch_seconds: what every micro-batch takes through the whole model, whatever is in it.
        ids: int64[n], names of the documents in the plan; their indices if None.

    Returns:
        DynamicCpPlan. The same input gives the same plan, byte for byte, on every rank and machine.

    Raises:
        WlbError: an argument out of range; a document that does not fit on the largest group; too few micro-batches
            for the documents.

    O(n log world_size) for each number of micro-batches tried, about ten (several times as many attempts where
    exchange costs), and O(num_stages * micro-batches * world_size) for the simulation of the best; in a world that
    is no power of two, up to O(n * micro-batches * log world_size) for each number, and O(n * micro-batches *
    world_size) where memory binds. Releases the GIL from 1,024 documents on.

    Example:
        >>> import wlb
        >>> cost = wlb.CostModel(attention=0.0, linear=1.0)
        >>> plan = wlb.plan_dynamic_cp([2000, 1000, 1000], world_size=4, num_stages=1, max_tokens_per_rank=1000,
        ...                            cost_model=cost, num_micro_batches=1)
        >>> plan.cp_sizes
        array([[2, 2, 1, 1]], dtype=int32)
        >>> plan.seconds
        1000.0
    """
