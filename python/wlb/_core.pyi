import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, final, overload

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
    RoundOrder,
    RoundOversize,
    RoundTogether,
    Schedule,
    StepSamples,
    Strategy,
    StreamMethod,
    Sync,
    Together,
    Unit,
)
from wlb._results import (
    Bounds,
    CostFit,
    PackerMetrics,
    PipelineSteps,
    PipelineTimeline,
    RoundPlan,
    TuneResult,
)

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
    "ROUND_ORDERS",
    "ROUND_OVERSIZE",
    "ROUND_TOGETHER",
    "SCHEDULES",
    "STEP_SAMPLES",
    "STRATEGIES",
    "STREAM_METHODS",
    "SYNCS",
    "TOGETHER",
    "UNITS",
    "BacklogWarning",
    "CostModel",
    "CpGroup",
    "DynamicCpPlan",
    "DynamicMicroBatch",
    "Exchange",
    "KernelModel",
    "MicroBatch",
    "Packer",
    "Packing",
    "PrefixForest",
    "RankShard",
    "Shard",
    "StateError",
    "WlbError",
    "__version__",
    "batch_offsets",
    "forest_edges",
    "hand_down",
    "keys_plan",
    "most_tokens",
    "moves_plan",
    "order_micro_batches",
    "pack",
    "padded_tokens",
    "pairs",
    "pass_weights",
    "plan_dynamic_cp",
    "plan_round",
    "result",
    "ring_plan",
    "shard",
    "simulate_pipeline",
    "simulate_steps",
    "split_documents",
    "tune",
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
ROUND_ORDERS: tuple[RoundOrder, ...]
ROUND_OVERSIZE: tuple[RoundOversize, ...]
ROUND_TOGETHER: tuple[RoundTogether, ...]
SCHEDULES: tuple[Schedule, ...]
STEP_SAMPLES: tuple[StepSamples, ...]
STRATEGIES: tuple[Strategy, ...]
STREAM_METHODS: tuple[StreamMethod, ...]
SYNCS: tuple[Sync, ...]
TOGETHER: tuple[Together, ...]
UNITS: tuple[Unit, ...]

def result(cls: type[_Result]) -> type[_Result]: ...

class BacklogWarning(UserWarning):
    """More documents wait in a packer than its bounds allow: they arrive faster than they can be trained."""

class WlbError(ValueError):
    """Wrong input. Nothing was changed.

    Attributes:
        argument: name of the argument that is wrong.
        index: where in it, if it is a sequence.
        value: the value that is wrong, if there is a single one.
    """

    argument: str | None
    index: int | tuple[int, ...] | None
    value: Any

class StateError(WlbError):
    """A saved state that cannot be loaded: corrupt, foreign, or of another configuration."""

def hand_down(*functions: Callable[..., Any]) -> None: ...

@final
class CostModel:
    """Cost of documents: ``cost(d) = attention * pairs(d) + linear * d`` and a few further terms, all in one unit.

    Attention is quadratic in a document's length, everything else (GEMMs, collectives, element-wise work) is linear.
    Layers of windowed or chunked attention have pairs of their own, which are exact functions of the length. Take the
    cost from your model and GPU: a wrong cost model can lose a hundred times more balance than greedy packing does.
    Make one from rates, ``from_flops``, ``from_tables``, ``from_profile`` or ``fit``. Immutable and picklable; equal
    models compare equal.

    Args:
        attention: cost of one (query, key) pair; 0 or above.
        linear: cost of one token; 0 or above, and not 0 together with ``attention``.
        causal: True: a document has ``d(d+1)/2`` pairs. False, for bidirectional masks: ``d*d``.
        windows: ``{w: rate}``, cost of a pair under a sliding window of ``w`` keys: a query sees itself and the ``w -
            1`` tokens before it. Causal only. A window of at least 2^31 - 1 is no window: its rate is added to
            ``attention``.
        chunks: ``{c: rate}``, cost of a pair in chunks of ``c`` tokens: a query sees itself and all tokens before it in
            its chunk. Causal only.
        document: cost of every document besides the cost of its length.
        micro_batch: cost of every micro-batch besides its documents; an empty micro-batch is run and costs this, too.
        unit: unit of the costs, "seconds" or "flops"; None if unknown. Functions that add seconds to costs
            (``plan_dynamic_cp``) refuse "flops".

    Raises:
        WlbError: a rate is negative or not finite; documents cost nothing; a window or chunk is below 1, or used
            without a causal mask.

    Examples:
        >>> import wlb
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> cost.cost([10, 20])
        array([10055., 20210.])
    """
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
    ) -> CostModel:
        """Cost from the FLOPs of a decoder-only transformer.

        Forward: ``4 * num_heads * head_dim`` FLOPs per (query, key) pair and layer, and 2 per parameter and token.
        Backward: 2.5 times as many per pair (flash attention recomputes the scores), and 2 times as many per token.

        Args:
            hidden_size, ffn_hidden_size, num_layers, num_heads, vocab_size: as in the model's configuration.
            num_kv_heads: key/value heads, for GQA and MQA; default ``num_heads``.
            head_dim: default ``hidden_size / num_heads``.
            gated_ffn: three feed-forward matrices (SwiGLU) instead of two.
            experts_per_token: experts that one token visits; 1 for a dense model.
            attention_efficiency: FLOP rate of attention relative to the GEMMs' rate, for example 0.55.
            flops_per_second: FLOP rate of the GEMMs, for costs in seconds; by default the unit is one GEMM FLOP.
            passes: "forward", "backward" or "forward_backward".
            recompute: whether activations are recomputed: the backward pass then runs the forward pass once more.
            causal: whether queries see only keys before them.

        Raises:
            WlbError: a size below 1, a rate that is not positive, a hidden size that the heads do not divide.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel.from_flops(hidden_size=4096, ffn_hidden_size=11008, num_layers=32, num_heads=32,
            ...                                 vocab_size=32000, attention_efficiency=0.55)
            >>> cost.cost([131072]) / cost.cost([1024]) > 128 * 6
            array([ True])
        """
    @staticmethod
    def from_tables(
        lengths: ArrayLike,
        *,
        attention_seconds: ArrayLike,
        linear_seconds: ArrayLike,
        causal: bool = True,
    ) -> CostModel:
        """Cost from times measured at some document lengths.

        Between two of the lengths, attention is linear in the pairs, so it is exact wherever it is quadratic in the
        length; the rest is linear in the tokens. Both are 0 at length 0, and proportional to pairs (tokens) beyond the
        last length.

        Args:
            lengths: int[k], tokens, strictly ascending.
            attention_seconds, linear_seconds: float[k], cost of one document of each length; above 0, never decreasing.
            causal: mask under which they were measured.

        Raises:
            WlbError: naming the entry that does not fit.

        Examples:
            >>> import wlb
            >>> attention, linear = [1e-3, 15e-3], [2e-3, 8e-3]
            >>> cost = wlb.CostModel.from_tables([1024, 4096], attention_seconds=attention, linear_seconds=linear)
            >>> cost.cost([1024, 4096])
            array([0.003, 0.023])
        """
    @staticmethod
    def from_profile(path_or_name: str | os.PathLike[str], *, passes: Passes = "forward_backward") -> CostModel:
        """Cost from a measured profile: a JSON file, or the name of a profile that comes with wlb.

        Args:
            path_or_name: path of a ``.json`` file, or a name in ``wlb.profiles.names()``.
            passes: "forward", "backward" or "forward_backward" (their sum).

        Raises:
            WlbError: no such profile, or a malformed one; the message says where in the file.

        Examples:
            >>> import wlb
            >>> name = "nvidia-h200-varlenkernel-torch-2-11-0-h32-kv8-d128"
            >>> wlb.CostModel.from_profile(name).unit
            'seconds'
        """
    def cost(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """Cost of each document.

        Args:
            lengths: int[n], tokens.

        Returns:
            float64[n].

        Examples:
            >>> import wlb
            >>> wlb.CostModel(attention=1.0, linear=1000.0).cost([10, 20])
            array([10055., 20210.])
        """
    def attention_cost(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """The part of ``cost`` that depends on pairs of all kinds; float64[n]."""
    def linear_cost(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """The part of ``cost`` that depends on tokens; float64[n]."""
    @property
    def causal(self) -> bool:
        """Whether pairs are counted under a causal mask."""
    @property
    def unit(self) -> Unit | None:
        """Unit of the costs, "seconds" or "flops"; None if it was not given. Measured tables are in seconds."""
    @property
    def terms(self) -> dict[str, float]:
        """Rates that are not 0, by term, in this order: "pairs", "window_pairs[w]" and "chunk_pairs[c]" by ascending size,
        "tokens", "documents", "micro_batches".

        Raises:
            WlbError: the model was made from measured tables, whose rates change with the length.
        """
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
    ) -> CostFit:
        """The cost model, in seconds, that explains measured times of micro-batches.

        The fit minimises the sum of ``rho((seconds - predicted) / predicted)`` over rates that are never negative.
        Errors are relative, and ``rho`` (Huber's, then Tukey's bisquare) ignores rows that the other rows contradict. A
        term that the times do not need gets no rate. Of terms that the times cannot tell apart, the last in this order
        gets no rate: tokens, pairs, windows, chunks, documents, micro-batches. The result names such terms; time is
        never split between them. Deterministic.

        Args:
            micro_batches: list of int[documents], tokens of the documents in each; at least eight, and two for each
                term.
            seconds: float[micro-batches], time of each, forward and backward.
            windows: sizes of the sliding windows of the model's layers.
            chunks: sizes of the chunks of the model's layers.
            terms: which of "pairs", "tokens", "documents", "micro_batches" to try, besides windows and chunks; default
                all.
            causal: whether queries see only keys before them.
            ranks: int[micro-batches], number of context-parallel ranks that shared each micro-batch, if it differs
                (Dynamic-CP). Pairs and tokens are divided by it, as in ``plan_dynamic_cp``. Default 1: the rates are
                then those of a whole group of ranks.

        Returns:
            CostFit

        Raises:
            WlbError: a time that is not above 0; too few micro-batches; documents of a single length; times that do not
                grow with the documents; numbers of micro-batches and times that differ. The message names the entry.

        O(n k^2) for n micro-batches and k terms, some hundred times. Lawson and Hanson, Solving Least Squares Problems
        (1974); Holland and Welsch, Robust regression using iteratively reweighted least-squares (1977).

        Examples:
            >>> import wlb
            >>> true = wlb.CostModel(attention=1e-9, linear=1e-6)
            >>> micro_batches = [[100 * i, 50 * i * i] for i in range(1, 13)]
            >>> fit = wlb.CostModel.fit(micro_batches, [true.cost(lengths).sum() for lengths in micro_batches])
            >>> round(fit.rates["pairs"] * 1e9, 3), round(fit.rates["tokens"] * 1e6, 3)
            (1.0, 1.0)
        """
    def to_json(self) -> str:
        """The model as JSON text. ``from_json`` reads it, and so does the option ``--cost-model`` of the ``wlb`` command.

        Examples:
            >>> import wlb
            >>> wlb.CostModel(attention=1.0, linear=2.0).to_json()
            '{"attention":{"rate":1.0},"linear":{"rate":2.0},"mask":"causal"}'
        """
    @staticmethod
    def from_json(text: str) -> CostModel:
        """The model that ``to_json`` wrote.

        Raises:
            WlbError: the text is not such a model; the message says where.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class MicroBatch:
    """The documents of one micro-batch, in arrival order; of a forest its samples, with their nodes."""
    @property
    def document_ids(self) -> NDArray[np.int64]:
        """int64[k]: ids of the documents; of a document that was cut there may be only a part. Of a forest: numbers of the
        samples.
        """
    @property
    def starts(self) -> NDArray[np.int32]:
        """int32[k]: position in its document of each piece's first token; 0 for whole documents."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[k]: tokens of each piece; of a forest, of each sample with the tokens that it shares."""
    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """int32[k + 1]: index of each piece's first token in the packed sequence, and at the end the number of tokens.

        Raises:
            WlbError: of a forest: samples that share tokens do not lie one after the other; take ``wlb.shard``.
        """
    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest piece, 0 without one: what varlen attention takes beside ``cu_seqlens``."""
    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch; of a forest those of its nodes, each shared token once."""
    @property
    def nodes(self) -> NDArray[np.int64] | None:
        """int64[m]: nodes of the samples in the plan's forest, in memory order: depth-first, the longest of siblings
        first, so that it follows its parent. None without a forest.
        """
    @property
    def forest(self) -> PrefixForest | None:
        """The forest of these samples alone; its nodes are in the order of ``nodes``, its samples in that of
        ``document_ids``. None without a forest.
        """
    @property
    def raw_tokens(self) -> int | None:
        """Tokens of the samples, as many as without sharing. None without a forest."""
    @property
    def cost(self) -> float:
        """Cost of the micro-batch, in the cost model's unit."""
    def __len__(self) -> int: ...

@final
class PrefixForest:
    """The tokens that samples share: plain data that can be printed, compared, pickled and sent.

    A node is a run of tokens. A sample is the path from a root to the end of its node; the node may have children.
    Samples share tokens only from their beginning on, so a shared token has the same position and the same earlier
    tokens in all of them. Every array is a fresh copy.

    Examples:
        >>> import wlb
        >>> forest = wlb.PrefixForest.from_prompts([100], 3, [30, 20, 10])
        >>> forest
        PrefixForest(samples=3, nodes=4, unique_tokens=160, raw_tokens=360)
    """
    @staticmethod
    def from_tokens(
        tokens: ArrayLike, offsets: ArrayLike, groups: ArrayLike | None = None, key: ArrayLike | None = None
    ) -> PrefixForest:
        """The forest of samples with these tokens.

        Args:
            tokens: int[R], tokens of all samples, one sample after the other; int32 and int64 arrays are read in place.
                For an Arrow list array: its ``values``.
            offsets: int[n + 1], index of each sample's first token, and at the end ``R``. For an Arrow list array: its
                ``offsets``.
            groups: int[n]: only samples with the same number can share (the completions of one prompt).
            key: int[n]: another number with the same effect, for other inputs of the model: an image's hash, an
                adapter.

        Returns:
            PrefixForest: nodes depth-first, siblings by their first sample.

        Raises:
            WlbError: offsets that do not fit the tokens, a sample without tokens, ``groups`` or ``key`` of another
                length.

        O(R + n log n) in the worst case: shared tokens are compared once or twice, and the rest of a sample is not
        read. No copy.

        Examples:
            >>> import wlb
            >>> forest = wlb.PrefixForest.from_tokens([7, 8, 1, 7, 8, 2, 2, 7, 8], [0, 3, 7, 9])
            >>> forest.parents, forest.lengths, forest.ends
            (array([-1,  0,  0], dtype=int32), array([2, 1, 2], dtype=int32), array([1, 2, 0], dtype=int32))
        """
    @staticmethod
    def from_prompts(
        prompt_lengths: ArrayLike, samples_per_prompt: int | ArrayLike, completion_lengths: ArrayLike
    ) -> PrefixForest:
        """The forest of prompts and the completions that were sampled for each; tokens are not needed.

        Args:
            prompt_lengths: int[p], tokens of each prompt.
            samples_per_prompt: completions of each prompt, one number or int[p]; at least 1.
            completion_lengths: int[n], tokens of each completion, those of the first prompt first. A completion may
                have 0
                tokens: the sample is then its prompt.

        Raises:
            WlbError: a length out of range, or numbers that do not fit together.

        O(n log n).

        Examples:
            >>> import wlb
            >>> forest = wlb.PrefixForest.from_prompts([100, 50], [2, 1], [30, 20, 10])
            >>> forest.parents, forest.lengths
            (array([-1,  0,  0, -1], dtype=int32), array([100,  30,  20,  60], dtype=int32))
        """
    @staticmethod
    def from_parents(parents: ArrayLike, lengths: ArrayLike, ends: ArrayLike) -> PrefixForest:
        """A forest from its nodes.

        Args:
            parents: int[m], the node that each node continues, in any order; -1 for a root.
            lengths: int[m], tokens of each node.
            ends: int[n], for each sample the node of its last token.

        Raises:
            WlbError: a parent or end that is no node, parents in a circle, or a node under which no sample ends.

        O(m log m).

        Examples:
            >>> import wlb
            >>> wlb.PrefixForest.from_parents([-1, 0, 0], [100, 30, 20], [1, 2]).sample_lengths
            array([130, 120], dtype=int32)
        """
    def check_tokens(self, tokens: ArrayLike, offsets: ArrayLike) -> None:
        """Checks that tokens fit the forest: samples have its lengths, and agree where they share a node.

        Args:
            tokens, offsets: as for ``from_tokens``.

        Raises:
            WlbError: another number of samples, a sample of another length, or the first token in which two samples
                differ that should share it; the message names both samples and the token.

        O(R).

        Examples:
            >>> import wlb
            >>> forest = wlb.PrefixForest.from_prompts([2], 2, [1, 1])
            >>> forest.check_tokens([7, 8, 1, 7, 8, 2], [0, 3, 6])  # or an error that names the token
        """
    @property
    def num_samples(self) -> int:
        """Number of samples, ``n``."""
    @property
    def num_nodes(self) -> int:
        """Number of nodes, ``m``."""
    @property
    def unique_tokens(self) -> int:
        """Tokens of all nodes: what is computed if one micro-batch holds all samples."""
    @property
    def raw_tokens(self) -> int:
        """Tokens of all samples: what is computed without sharing."""
    @property
    def parents(self) -> NDArray[np.int32]:
        """int32[m]: the node that each node continues; -1 for a root."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[m]: tokens of each node."""
    @property
    def starts(self) -> NDArray[np.int32]:
        """int32[m]: tokens before each node on its path, which is the position of its first token."""
    @property
    def ends(self) -> NDArray[np.int32]:
        """int32[n]: for each sample the node of its last token."""
    @property
    def sample_lengths(self) -> NDArray[np.int32]:
        """int32[n]: tokens of each sample."""
    @property
    def token_indices(self) -> NDArray[np.int64]:
        """int64[raw_tokens]: place of each sample's tokens, sample by sample, in the sequence in which ``shard`` packs the
        nodes: depth-first, the longest of siblings first. O(raw_tokens).

        Examples:
            >>> import wlb
            >>> forest = wlb.PrefixForest.from_prompts([2], 2, [1, 2])
            >>> forest.token_indices
            array([0, 1, 4, 0, 1, 2, 3])
        """
    def digest(self) -> str:
        """Hex hash of the forest: equal on two ranks if and only if their forests are. O(m + n)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class Packing:
    """The micro-batches of one global batch: plain data that can be printed, compared, pickled and sent.

    Every array is a fresh copy that the caller may keep or change.
    """
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
    ) -> Packing:
        """A packing from an assignment that was made elsewhere (by a solver, by another packer), with our costs and
        imbalance.

        Args:
            lengths: int[n], tokens.
            assignment: int[n], micro-batch of each document; -1 leaves it over.
            num_micro_batches, max_tokens, cost_model, costs, limits: as for ``pack``.

        Raises:
            WlbError: a wrong argument, a micro-batch that does not exist, or one that gets more than ``max_tokens``
                tokens.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=0.0)
            >>> p = wlb.Packing.from_assignment([4, 2, 2], [0, 1, 1], num_micro_batches=2, max_tokens=8,
            ...                                 cost_model=cost)
            >>> p.costs, p.imbalance
            (array([10.,  6.]), 1.25)
        """
    @property
    def method(self) -> str:
        """Method that made the packing: a method of ``pack``, "forest", or "assignment"."""
    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, ``M``; also ``len()``."""
    @property
    def max_tokens(self) -> int:
        """Most tokens that a micro-batch was allowed."""
    @property
    def num_tokens(self) -> int:
        """Tokens of all micro-batches. Tokens that samples of a forest share count once for each micro-batch that computes
        them.
        """
    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches, a tuple of ``MicroBatch``. An empty one is legal."""
    @property
    def assignment(self) -> NDArray[np.int32]:
        """int32[n]: micro-batch of each document that was passed in; -1 if it is not whole in one (left over, waiting, or
        split). Empty for plans of ``Packer.drain`` and ``Packer.flush``.
        """
    @property
    def tokens(self) -> NDArray[np.int64]:
        """int64[M]: tokens of each micro-batch."""
    @property
    def costs(self) -> NDArray[np.float64]:
        """float64[M]: cost of each micro-batch, in the cost model's unit; with several columns, the sum of all columns
        that take time.
        """
    @property
    def padded_tokens(self) -> NDArray[np.int64]:
        """int64[M]: tokens of each micro-batch including the padding of ``multiple_of_tokens`` and ``token_buckets``."""
    @property
    def column_costs(self) -> NDArray[np.float64]:
        """float64[M, r]: cost of each micro-batch in each column of the documents' costs; with a cost model there is one."""
    @property
    def forest(self) -> PrefixForest | None:
        """The forest whose samples were packed; None if documents were."""
    @property
    def raw_tokens(self) -> int | None:
        """Tokens of all samples of the forest: what is computed without sharing. None without a forest."""
    @property
    def step_cost(self) -> float:
        """Time of the step: the heaviest rank under "step"; the sum of the heaviest micro-batch of each round under
        "micro_batch"; without ranks the heaviest micro-batch; with several columns, the sum over columns of the
        heaviest in each.
        """
    @property
    def leftover(self) -> NDArray[np.int64]:
        """int64[l]: ids of the documents that did not fit, in the order in which they were tried. Empty for ``pack``,
        unless ``leftover="return"``. A ``Packer`` carries them over to the next step.
        """
    @property
    def leftover_starts(self) -> NDArray[np.int32]:
        """int32[l]: position in its document of each left-over piece's first token; 0 unless the document was cut."""
    @property
    def leftover_lengths(self) -> NDArray[np.int32]:
        """int32[l]: tokens of each left-over piece."""
    @property
    def imbalance(self) -> float:
        """``max cost * M / total cost``: the heaviest micro-batch over the mean, whatever ranks they are on (see
        ``rank_imbalance``); with several columns, the sum over columns of the heaviest in each. 1.0 when nothing is
        placed.
        """
    @property
    def dp_size(self) -> int | None:
        """Data-parallel ranks that the plan was made for; None if it can be dealt to any number."""
    @property
    def sync(self) -> Sync | None:
        """Where these ranks wait for each other, "step" or "micro_batch"; None without ranks."""
    @property
    def rank_imbalance(self) -> float:
        """How much longer a step takes than with equal ranks. Under "step" a step takes as long as the heaviest rank,
        under "micro_batch" the sum of the heaviest micro-batch of each round. Without ranks it is the ``imbalance``.
        """
    @property
    def lower_bound(self) -> float:
        """Lower bound on ``step_cost`` for any packing of the placed documents into as many micro-batches of
        ``max_tokens`` on as many ranks: the largest of an equal share of all cost, the largest document, and the
        optimum of a linear program if tokens are scarce; summed over columns. O(n log n), once. Of a forest:
        the largest of an equal share of all nodes (with what ``max_tokens`` and ``max_documents`` force to be computed
        twice), the heaviest sample, and the heaviest group.
        """
    @property
    def length_fallbacks(self) -> int:
        """Documents that Algorithm 1 placed by token count instead of by cost. If it is 0 with "var_length", ``max cost <=
        total / M + (1 - 1/M) * w``, where ``w`` is the cost of the last document put into the heaviest micro-batch.
        """
    @property
    def global_batches(self) -> int:
        """Global batches that were packed together: step ``i`` trains the ``i``-th ``M / global_batches`` micro-batches."""
    def summary(self) -> dict[str, Any]:
        """Figures of the plan, for a log or a notebook.

        Returns:
            dict: method, micro_batches, documents, tokens, leftover, imbalance, largest_micro_batch (tokens), heaviest
                (cost); of a forest also raw_tokens.

        Complexity:
            O(documents).

        Examples:
            >>> import wlb
            >>> wlb.pack([5, 3, 2], num_micro_batches=2, max_tokens=8, costs=[5, 3, 2]).summary()["imbalance"]
            1.0
        """

    def to_pandas(self) -> Any:
        """Pieces of documents as a table: a row for each, in the order of the micro-batches.

        Returns:
            pandas.DataFrame: micro_batch, document_id, start, length (tokens).

        Raises:
            WlbError: pandas is not installed.

        Complexity:
            O(documents).

        Examples:
            >>> import wlb
            >>> p = wlb.pack([5, 3, 2], num_micro_batches=2, max_tokens=8, costs=[5, 3, 2])
            >>> p.to_pandas().groupby("micro_batch")["length"].sum().tolist()  # doctest: +SKIP
            [5, 5]
        """

    def _repr_html_(self) -> str: ...
    def digest(self) -> str:
        """Hex hash of the place of every token: equal on two ranks if and only if their plans are. O(documents), and of a
        forest O(nodes).
        """
    def deal(self, dp_size: int) -> NDArray[np.int64]:
        """Deals the micro-batches of each step to data-parallel ranks: equal counts, balanced costs, in schedule order.

        Inside a rank the lightest micro-batches are at both ends, where a pipeline fills and drains. A packing that was
        made for ranks (``pack(dp_size=...)``) keeps its order.

        Returns:
            int64[dp_size, M / dp_size]: micro-batch indices of each rank; with several global batches
            int64[global_batches, dp_size, M / global_batches / dp_size].

        Raises:
            WlbError: ``dp_size`` does not divide the number of micro-batches of a step, or is not the ``dp_size`` that
                the packing was made for.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=0.0, linear=1.0)
            >>> p = wlb.pack([8, 6, 3, 1], num_micro_batches=4, max_tokens=8, cost_model=cost)
            >>> p.deal(2)
            array([[3, 0],
                   [2, 1]])
        """
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> MicroBatch: ...
    def __iter__(self) -> Iterator[MicroBatch]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def pack(
    lengths: ArrayLike | PrefixForest,
    *,
    num_micro_batches: int | Literal["fewest"] | None,
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
    together: Together = "rank",
    equal_documents: bool = False,
    max_documents: int | None = None,
    multiple_of_tokens: int = 1,
    cp_size: int = 1,
    token_buckets: ArrayLike | None = None,
    leftover: Leftover = "error",
) -> Packing:
    """Packs one global batch of documents, or the samples of a forest, into micro-batches.

    Args:
        lengths: int[n], tokens of each document, in arrival order; document ids are indices into it. Or a
            ``PrefixForest``: its samples are the documents, and a micro-batch computes tokens that its samples share
            once. A node of ``n`` tokens at depth ``p`` costs ``c(p + n) - c(p)``, where ``c`` is the cost model without
            constants: exact for causal pairs, windows and chunks; for measured tables it is the definition. A tree is
            cut between micro-batches, which then compute the shared tokens again, where that costs less than the
            imbalance that it removes, or where ``max_tokens`` requires it.
        num_micro_batches: micro-batches of a global batch, ``N``. "fewest": the smallest number (a multiple of
            ``multiple_of`` or ``dp_size``) that leaves no document over, for a batch that is trained whole in one step
            (fine-tuning, reinforcement learning). None: the same, or with ``dp_size`` up to two more on each rank, if
            each makes the step 1 % shorter. If the cost model says what a micro-batch costs besides its documents
            (``micro_batch``), that cost decides instead of the 1 %.
        max_tokens: most tokens of a micro-batch, as memory allows (``S_max``). A token that samples share counts once.
        cost_model: cost of a document, from its length. Give it, or ``costs``. For a forest it must be of causal
            attention.
        costs: float64[n], cost of each document in any one unit; or float64[n, r], one column for every resource
            with a barrier of its own (vision encoder, language model). A step takes the sum over columns of the
            heaviest micro-batch in each column, and ``imbalance`` and ``lower_bound`` are of this sum. For
            "var_length", "refined" and "original"; pieces of a document share its cost by their tokens.
        limits: float64[r], most that a micro-batch may have in each column, infinite for no limit. A column with a
            limit is memory and takes no time.
        method: "var_length" (WLB-LLM's Algorithm 1): longest document first, each to the micro-batch with the least
            cost. "refined": no worse than "var_length", and nearly optimal if ``max_tokens`` leaves little room; it
            takes twice as long in the median, up to eight times as long if few pieces fill each of thousands of
            micro-batches to the brim. "fixed_length": longest first, each to the micro-batch with room and the least
            attention work; a document that fits nowhere is cut. "original": arrival order, cut every ``max_tokens``
            tokens.
        global_batches: with "fixed_length", the number of global batches in ``lengths``. They are packed together into
            ``global_batches * N`` micro-batches; step ``i`` trains micro-batches ``i * N`` to ``(i + 1) * N - 1``.
        multiple_of: with ``num_micro_batches=None``: the number of micro-batches is a multiple of this, usually the
            number of data-parallel ranks, so that ``Packing.deal`` can give each of them equally many.
        dp_size: data-parallel ranks to make the plan for. Documents are then exchanged between ranks, too, and
            ``packing.deal(dp_size)`` gives each rank its micro-batches. All ranks have the same number; the packing
            lists them rank by rank. For "var_length" and "refined", with ``costs`` of at most one column.
        sync: where these ranks wait for each other. "step" (default): once a step, as under DDP, ZeRO-1 and 2,
            Megatron. Then the sums of ranks are made equal first, the micro-batches of each rank second. "micro_batch":
            in every micro-batch, as under FSDP, ZeRO-3. Then the micro-batches of each round are made equal first, the
            sums of ranks second.
        groups: int[n]: documents with the same number stay together, as ``together`` says.
        together: "rank": a group stays on one of ``dp_size`` ranks (the rollouts of one prompt, whose rewards are
            compared). "micro_batch": a group stays in one micro-batch, with or without ``dp_size``, and is never cut:
            examples whose loss needs several documents at once (the pairs of DPO and of reward models). A group over
            ``max_tokens`` or ``max_documents`` is then refused.
        equal_documents: with ``dp_size``, all ranks get equally many documents (they differ by at most one). Groups
            whose sizes do not allow that are refused.
        max_documents: most documents of a micro-batch.
        multiple_of_tokens: each of the ``cp_size`` ranks that share a micro-batch gets a multiple of this number of
            tokens (MXFP8 needs 32, HybridEP 128): micro-batches are padded to a multiple of ``multiple_of_tokens *
            cp_size``, which ``shard`` divides equally. ``max_tokens`` counts the padding: the plan's
            ``max_tokens`` is the largest such multiple within it. ``padded_tokens`` has the padded sizes; whoever makes
            the tensors adds the padding (``wlb.torch.collate``).
        cp_size: context-parallel ranks that share a micro-batch; it matters to ``multiple_of_tokens`` alone.
        token_buckets: int[b], ascending: the only sizes of padded micro-batches (of all their ranks together), for
            steps that are compiled or captured once for each size. ``max_tokens`` counts the padding, as above. Each is
            a multiple of ``multiple_of_tokens * cp_size``, unless ``multiple_of_tokens`` is 1.
        leftover: what happens if documents do not fit: "error"; or "return": ``Packing.leftover`` lists them. They are
            then in no micro-batch and are not trained unless you pass them again.

    A forest does not take ``costs``, ``limits``, ``method``, ``global_batches``, ``multiple_of``, ``together``,
    ``token_buckets`` and ``leftover``.

    Returns:
        Packing. The same input gives the same plan, byte for byte, on every rank and machine. The plan of a forest that
        shares nothing is that of its samples' lengths, with the same digest.

    Raises:
        WlbError: a length or size out of range; a document over ``max_tokens`` (for methods that keep documents
            whole); an unknown method; a cost that is negative or not finite; a column of zeros, or limits on all
            columns; both or none of ``cost_model`` and ``costs``; several ``global_batches`` without "fixed_length";
            ``multiple_of`` beside ``num_micro_batches``; an option that needs ``dp_size`` without it; a group that
            stays in one micro-batch and is larger than it may be (the message names the group). If documents do not
            fit, the message says how many, and names a ``max_tokens`` that holds all of them (the least one for
            methods that cut documents).

    O(n) for a radix sort and, on average, a few steps for each document; O(n N) in the worst case, and always for
    "fixed_length". ``num_micro_batches=None`` takes O(log n) times that, or once if a number derived from the tokens is
    enough. WLB-LLM, sections 3.2 and 4. Releases the GIL from 1,024 documents and micro-batches on.

    Examples:
        >>> import wlb
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> plan = wlb.pack([900, 100, 500, 400, 100], num_micro_batches=2, max_tokens=1500, cost_model=cost)
        >>> plan.assignment
        array([0, 1, 1, 1, 1], dtype=int32)
        >>> round(plan.imbalance, 3)
        1.004
        >>> forest = wlb.PrefixForest.from_prompts([100, 100], 2, [30, 20, 40, 10])
        >>> plan = wlb.pack(forest, num_micro_batches=2, max_tokens=200, cost_model=cost)
        >>> [batch.document_ids.tolist() for batch in plan]
        [[2, 3], [0, 1]]
        >>> plan.num_tokens, plan.raw_tokens
        (300, 500)
    """

@final
class Packer:
    """Packs one training step after the other from a stream of documents, and lets some documents wait.

    A document that costs more than a step's mean micro-batch makes its own micro-batch heavy. The packer holds such
    documents back for a few steps, until a step has enough work to go with them. All other documents are trained in the
    step in which they are pushed, if they fit. Those that do not fit are *carried over*, and come first in the next
    step. Both kinds wait.

    Every rank makes an equal packer and gives it the lengths of the *global* batch. All ranks then compute the same
    plan, and each loads the documents of its own micro-batches::

        for lengths, ids in global_batches:
            packing = packer.push(lengths, ids)
            for index in packing.deal(dp_size)[dp_rank]:
                micro_batch = packing.micro_batches[index]  # document_ids, starts, lengths, cu_seqlens
        for packing in packer.flush():
            ...  # the documents that still wait

    A document that waits is not read again by the packer, which knows its id and its length alone: read its tokens when
    a step names its id. ``wlb.torch.balanced_loader`` does all of this.

    Two rules choose what waits. The adaptive rule (the default) holds documents as long as the step becomes more
    even by more than their waiting costs. With ``outlier_thresholds`` documents wait in queues by length, as in
    WLB-LLM, until one queue holds a document for every micro-batch.

    The same pushes give the same plans on every rank, and after a resume under the same configuration. A packer can be
    pickled, and threads can share it; plans then depend on the order in which the threads push.

    Args:
        num_micro_batches: micro-batches of a step, ``N``: the sum over all data-parallel ranks. Context-, tensor- and
            pipeline-parallel ranks do not multiply it.
        max_tokens: most tokens of a micro-batch: what the memory of its ranks holds, all context-parallel ranks
            together. Micro-batches become more even if it is 1.25 to 1.5 times ``max_document_tokens``.
        cost_model: cost of a document, from its length. Give it, or ``cost_columns``.
        cost_columns: number of costs that you give for each document in ``push(costs=)``, in the place of
            ``cost_model``. For example 2: time of the vision encoder, and time of the language model, which run one
            after the other. Then a step lasts as long as the heaviest micro-batch of the first column and the heaviest
            of the second together, and the packer makes that sum small. More than one column needs queues
            (``outlier_thresholds``).
        limits: float64[cost_columns], most that a micro-batch may have in each column, infinite for no limit. A
            column with a limit counts as memory: it is kept below its limit and is not balanced.
        outlier_thresholds: int[q], tokens, ascending: shortest length of each queue. ``wlb.tune`` finds them. ``None``,
            the default, is the adaptive rule; ``()`` holds nothing back: a document waits only if it does not fit.
        release: "adaptive" or "fifo" (queues). It follows from ``outlier_thresholds``, so you need not give it;
            ``release="fifo"`` alone means ``outlier_thresholds=()``.
        delay_price: price of waiting, for the adaptive rule. With the default, 0.03, a full step of tokens
            (``num_micro_batches * max_document_tokens``) waits a step if the heaviest micro-batch thereby falls by at
            least 3 % of the mean one; for a tenth of these tokens 0.3 % is enough. A wait of ``d`` steps costs
            ``d * (d + 1) / 2`` times as much as a wait of one. A higher price means shorter waits.
            ``wlb.tune`` finds the price for a mean wait that you accept.
        max_delay: most steps that a document waits; with queues most steps in its queue, after which it may be carried
            over a few steps (``bounds().delay`` is the most steps together). ``None`` is 16 with the adaptive rule, and
            no limit with queues. If pushes bring more than the packer ``admits``, documents may wait longer.
        max_document_tokens: longest document: the context window of the model. At most ``max_tokens``, which is the
            default: if ``max_tokens`` is larger than the context window, give both.
        oversize: what happens to longer documents: "error", "split" into several documents, or "truncate".
        method: "var_length"; or "refined", which packs the same documents and then exchanges them between
            micro-batches. The heaviest micro-batch becomes no heavier, and planning takes about twice as long. It helps
            where ``max_tokens`` leaves little room.
        dp_size: number of data-parallel ranks. With it the packer balances what each rank has to do; without it, all
            micro-batches alike. It divides ``num_micro_batches``; ``packing.deal(dp_size)`` gives each rank its
            micro-batches.
        sync: where these ranks wait for each other: "step" (default; once a step, as DDP does) or "micro_batch"
            (in every micro-batch, as FSDP does). With "step" fewer documents wait than with "micro_batch", because the
            other micro-batches of a rank make up for a heavy one. Needs ``dp_size``.
        max_documents: most documents of a micro-batch. ``room``, ``admits`` and ``bounds`` then count each document as
            at least ``max_tokens / max_documents`` tokens, since it takes that share of a micro-batch.
        multiple_of_tokens: each of the ``cp_size`` ranks that share a micro-batch gets a multiple of this number of
            tokens (MXFP8 needs 32, HybridEP 128): micro-batches are padded to a multiple of ``multiple_of_tokens *
            cp_size``, which ``shard`` divides equally. ``max_tokens`` counts the padding.
            ``packing.padded_tokens`` has the sizes; ``wlb.torch.collate(multiple_of_tokens=, cp_size=)`` adds the
            padding.
        cp_size: context-parallel ranks that share a micro-batch; it matters to ``multiple_of_tokens`` alone.
        token_buckets: int[b], ascending: the only sizes of padded micro-batches.
        max_step_cost: for the adaptive rule: most work of a step, as a multiple of an average step's. Documents that
            wait together are trained together, so without a bound the largest step can have several times the average
            work. Documents beyond the bound wait, so micro-batches are less even. An average step has
            ``tokens_per_batch`` tokens, each of the mean cost of a token in the documents of the last 128 to 256 steps.
            Documents that waited ``max_delay`` steps leave all the same; ``metrics().steps_over_max_cost`` counts the
            steps that exceed the bound for them. ``None``: no bound.
        tokens_per_batch: tokens of a global batch on average; give yours if you use ``max_step_cost``. The data loaders
            of ``wlb.torch`` push so many for a step. Default: ``num_micro_batches * max_document_tokens``.
        on_backlog: what happens when more tokens wait after a push than ``bounds`` of an empty packer allows, because
            pushes brought more than the packer ``admits``: "warn" once with a ``BacklogWarning``; or "error": ``push``
            raises ``WlbError`` and the packer stays as it was.

    Raises:
        WlbError: naming the argument that makes no sense.

    Source: WLB-LLM, section 4 and Algorithm 1; the adaptive rule is ours (docs/semantics.md).

    Examples:
        >>> import wlb
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=1500, cost_model=cost)
        >>> packing = packer.push([900, 100, 500, 400, 100], ids=[10, 11, 12, 13, 14])
        >>> packing
        Packing(method="var_length", num_micro_batches=2, documents=5, tokens=2000, imbalance=1.0039, leftover=0)
        >>> [micro_batch.document_ids.tolist() for micro_batch in packing.micro_batches]
        [[10], [11, 12, 13, 14]]
        >>> packer.pending
        0
    """
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
        cp_size: int = 1,
        token_buckets: Sequence[int] = (),
        max_step_cost: float | None = None,
        tokens_per_batch: int | None = None,
        on_backlog: OnBacklog = "warn",
    ) -> Packer: ...
    @staticmethod
    def from_state_dict(state: dict[str, Any], on_backlog: OnBacklog = "warn") -> Packer:
        """Makes the packer that ``state_dict`` saved, with its configuration.

        Args:
            state: what ``state_dict`` returned, also after a round trip through JSON.
            on_backlog: as for ``Packer``; a state does not hold it.

        Raises:
            StateError: the state is corrupt, truncated, of another version, or not a packer's.
        """
    def copy(self) -> Packer:
        """An independent copy with the same configuration and the same waiting documents. O(pending), much cheaper than
        a state.
        """
    def empty_copy(self) -> Packer:
        """A packer with the same configuration in which nothing waits."""
    def push(
        self,
        lengths: ArrayLike,
        ids: ArrayLike | None = None,
        *,
        starts: ArrayLike | None = None,
        costs: ArrayLike | None = None,
        min_step_tokens: int = 0,
        early: ArrayLike | None = None,
    ) -> Packing:
        """Packs one step from new documents, documents that were carried over, and waiting documents that are released.

        Args:
            lengths: int[n], tokens of the new documents; may be empty.
            ids: int64[n], names of the documents: none twice among those that are new or wait. With ``starts``, pieces
                of one document have its id. Default: a running number.
            starts: int[n], first token of each piece inside the document that ``ids`` names, for a reader that cuts
                documents itself. Default: 0, whole documents.
            costs: float64[n] or float64[n, cost_columns], cost of each document, exactly if the packer was made with
                ``cost_columns``. Pieces of a split document share its cost by their tokens.
            min_step_tokens: least tokens of the step, if new and waiting documents together have so many. The packer
                releases more documents to reach it, and the step is less even. Up to ``num_micro_batches // 2 *
                max_tokens`` tokens are always reached (``limits`` may leave less room). Above that, documents may not
                fit together, and the step has fewer tokens, without an error.
            early: int[n], from 0 to 1024, for the adaptive rule: steps by which each document is pushed before the step
                in which the stream would bring it, its turn (see ``leads``). The packer may train it from now on;
                waiting costs nothing before the turn, and delays count from the turn on.

        Returns:
            Packing of ``num_micro_batches`` micro-batches. ``assignment`` follows ``lengths`` (-1: the document waits,
            or was split); ``leftover`` has the documents that are carried over to the next step.

        Raises:
            WlbError: wrong lengths, ids, starts or costs, a document over ``max_document_tokens`` under
                oversize="error", more than 2^23 cuts under oversize="split", or, under on_backlog="error", more tokens
                would wait afterwards than ``bounds`` of an empty packer allows. The packer is unchanged. An empty push
                is never refused: it plans a step from documents that wait.

        Warns:
            BacklogWarning: documents were pushed, and more tokens wait afterwards than these bounds allow; once.

        Takes as long as ``pack`` does for the new, carried and released documents. Releases the GIL from 1,024
        pieces on, waiting ones included.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
            >>> packer.push([60, 10, 10]).tokens  # the document of 60 tokens waits for a second one of its kind
            array([10, 10])
            >>> packer.push([60, 10, 10]).tokens
            array([70, 70])
        """
    def leads(self, lengths: ArrayLike, *, tokens_per_batch: int, most: int) -> NDArray[np.int64]:
        """Number of steps by which each upcoming document should be pushed before its turn (``push(early=)``).

        A document that costs as much as ``c`` mean micro-batches waits until documents of ``c`` steps have gathered, so
        that the other micro-batches of its step are as heavy as its own. Pushed ``2 * (c - 1)`` steps before its turn
        (the step in which the stream would bring it), it is trained at about its turn.

        Args:
            lengths: int[n], tokens of the documents that come next, in order: as many global batches as are known.
            tokens_per_batch: tokens of a global batch.
            most: most steps before the turn, at most 1024.

        Returns:
            int64[n], from 0 to ``most``.

        Raises:
            WlbError: wrong lengths or numbers; the packer was made with ``cost_columns``.

        O(n).

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=4, max_tokens=200, cost_model=cost)
            >>> packer.leads([200, 10, 10, 10, 10, 20, 30], tokens_per_batch=290, most=8)
            array([5, 0, 0, 0, 0, 0, 0])
        """
    def offered(
        self,
        lengths: ArrayLike,
        *,
        most_early: ArrayLike,
        tokens_per_batch: int,
        min_step_tokens: int,
        to_the_end: bool,
        wanted: int | None = None,
        steps: ArrayLike | None = None,
    ) -> tuple[int, NDArray[np.int64], int, NDArray[np.int64] | None]:
        """Chooses the pieces that a reader offers in a step: pieces whose turn is now, and pieces of later steps that come
        early (``leads``). The last offer takes a rest with it that is too small for a step.

        Args:
            lengths: int[n], tokens of the pieces that come next, in the order of their turns; enough of them to know
                whether a whole step remains.
            most_early: int[n], most steps by which each piece may come early: 0 for a part of a document, -1 for a
                piece that has entered already.
            tokens_per_batch: tokens of a global batch.
            min_step_tokens: least tokens of a step.
            to_the_end: whether there are no pieces after these.
            wanted: tokens whose turn is now; at least one new piece. Give this, or ``steps``.
            steps: int[n], ascending, steps until the turn of each piece; 0 is now.

        Returns:
            ``(end int, offered int64[k], due int, early int64[k] or None)``: pieces whose turn is now, with those that
            have entered; indices of the offered pieces; how many of those are due; by how many steps each comes early
            (None: all are due).

        Raises:
            WlbError: arrays of other lengths, or numbers out of range; pieces may come early, and the packer has no
                cost model.

        O(n).

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=4, max_tokens=200, cost_model=cost)
            >>> packer.offered([50, 50, 200, 10, 10], most_early=[4] * 5, wanted=100, tokens_per_batch=100,
            ...                min_step_tokens=10, to_the_end=False)
            (2, array([0, 1, 2]), 2, array([0, 0, 1]))
        """
    def fill(
        self,
        lengths: ArrayLike,
        ids: ArrayLike | None,
        *,
        starts: ArrayLike | None = None,
        costs: ArrayLike | None = None,
        early: ArrayLike | None = None,
        min_step_tokens: int,
        more: bool,
        rest_waits: bool,
    ) -> tuple[int, Packing]:
        """Packs one step of as many of these pieces as are admitted (``admits``), from the first on.

        Args:
            lengths, ids, starts, costs, early: as for ``push``.
            min_step_tokens: as for ``push``, unless the caller may offer more.
            more: whether there are further pieces: if all of these enter, the step may be small, and the caller adds
                more before it takes the step.
            rest_waits: whether pieces that do not enter make a step of their own, which needs ``min_step_tokens``:
                fewer enter if too little would be left.

        Returns:
            ``(entered int, Packing)``: the number of pieces that entered, and the plan of the step.

        Raises:
            WlbError: as ``admits`` and ``push``. The packer is unchanged.

        Takes as long as ``admits`` and ``push``.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost, max_delay=0)
            >>> entered, step = packer.fill([80, 80, 80], [0, 1, 2], min_step_tokens=10, more=True, rest_waits=False)
            >>> entered, step.tokens
            (2, array([80, 80]))
        """
    def admits(self, lengths: ArrayLike, *, costs: ArrayLike | None = None) -> int:
        """Number of these documents, from the first on, that the next push may bring so that ``bounds`` hold.

        Their tokens are at most ``room``. Their costs in a column with a limit are at most the limit of a step less
        what is carried over. With the adaptive rule they also fit into the micro-batches of one empty step: placed
        longest first, each into the micro-batch that has the fewest tokens. If nothing waits and there is a document,
        the answer is at least 1.

        Args:
            lengths: int[n], tokens of the documents that come next.
            costs: float64[n] or float64[n, cost_columns], cost of each document; needed only if a column has a limit.

        Returns:
            0 to n. With 0, push no documents until there is room: ``push([])`` trains documents that wait.

        Raises:
            WlbError: wrong lengths or costs; or, under oversize="split", the first document has more pieces than a step
                holds, so that it would never be admitted: cut it with ``split_documents``, and push its pieces step
                by step with ``starts``.

        O(n + pending); if not all documents fit, also a sort and log(n) placements.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost)
            >>> packer.admits([80, 80, 80, 80])
            2
        """
    def bounds(self) -> Bounds:
        """Most tokens that wait and longest wait from now on, if no push brings more than the packer ``admits``.

        Returns:
            Bounds: ``tokens``, most tokens that wait after a push; ``delay``, most steps that a document waits;
            ``drain``, most steps that ``flush`` takes; ``settles``, steps until all are those of an empty packer, 0 if
            they are. Of an empty packer with "adaptive", ``tokens`` is ``2 * num_micro_batches * max_tokens`` and
            ``delay`` is ``max_delay``. With "fifo", ``tokens`` is ``num_micro_batches * max_tokens``, plus for each
            queue ``num_micro_batches - 1`` times the longest length that it takes, and ``delay`` is above ``max_delay``
            by ``2 * (tokens // (num_micro_batches * max_tokens)) + 1``. They are higher after a state of another
            configuration was loaded, or a push brought more than was admitted, and never rise while pushes bring what
            is admitted. docs/semantics.md has the proof. O(pending).

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost).bounds()
            Bounds(tokens=400, delay=16, drain=6, settles=0)
        """
    @property
    def room(self) -> int:
        """Tokens that the next push may bring so that ``bounds`` hold: with "adaptive" twice what a step holds, less
        ``pending_tokens``; with "fifo" what a step holds, less ``carried_tokens``. ``admits`` answers for documents,
        which must also fit. With ``max_documents`` a document counts as at least its share of a full micro-batch.
        O(pending).
        """
    def drain(self) -> Packing:
        """Packs one step at the end of a stream: of the documents that wait, as many as fit, as even as they can be.

        Returns:
            Packing of ``num_micro_batches`` micro-batches, which are all empty if nothing waits. Its ``assignment`` is
            empty, because no document is new.
        """
    def flush(self) -> list[Packing]:
        """Packs everything that waits at the end of a stream: calls ``drain`` until nothing waits.

        Returns:
            list[Packing], one for each step; empty if nothing waited.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
            >>> _ = packer.push([60, 10, 10])
            >>> [packing.tokens.tolist() for packing in packer.flush()]
            [[60, 0]]
        """
    @property
    def pending(self) -> int:
        """Number of documents (or pieces of split ones) that wait, those that are carried over among them."""
    @property
    def pending_tokens(self) -> int:
        """Tokens of the documents that wait, those that are carried over among them. O(pending)."""
    @property
    def carried_tokens(self) -> int:
        """Tokens of the documents that are carried over. O(carried)."""
    @property
    def oldest_wait(self) -> int:
        """Steps that the oldest waiting document has waited; 0 if none waits. O(pending)."""
    @property
    def queued(self) -> tuple[int, ...]:
        """Number of documents that wait in each queue, without those that are carried over; the adaptive rule has one
        queue.
        """
    @property
    def carried(self) -> int:
        """Number of documents that are carried over: they found no room in the last step and come first in the next one."""
    @property
    def iteration(self) -> int:
        """Steps packed so far, by ``push``, ``drain`` and ``flush``."""
    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a step."""
    @property
    def max_tokens(self) -> int:
        """Most tokens of a micro-batch, padding included."""
    @property
    def max_document_tokens(self) -> int:
        """Longest document."""
    @property
    def outlier_thresholds(self) -> tuple[int, ...]:
        """Shortest length of each queue: tokens, ascending; empty without queues."""
    @property
    def release(self) -> Release:
        """The rule that releases waiting documents: "fifo" (queues) or "adaptive"."""
    @property
    def delay_price(self) -> float | None:
        """Price of waiting of the adaptive rule; ``None`` with "fifo"."""
    @property
    def oversize(self) -> Oversize:
        """Treatment of documents over ``max_document_tokens``: "error", "split" or "truncate"."""
    @property
    def on_backlog(self) -> OnBacklog:
        """Reaction to a push after which too much waits: "warn" or "error"."""
    @property
    def max_delay(self) -> int | None:
        """Most steps that a document waits; ``None``: no limit."""
    @property
    def method(self) -> StreamMethod:
        """Packing method of a step: "var_length" or "refined"."""
    @property
    def dp_size(self) -> int | None:
        """Data-parallel ranks that steps are planned for; ``None``: any number."""
    @property
    def sync(self) -> Sync | None:
        """Where the ranks wait for each other, "step" or "micro_batch"; ``None`` without ranks."""
    @property
    def max_documents(self) -> int | None:
        """Most documents of a micro-batch; ``None``: any number."""
    @property
    def multiple_of_tokens(self) -> int:
        """The part of each of ``cp_size`` ranks in a micro-batch is padded to a multiple of this number of tokens."""
    @property
    def cp_size(self) -> int:
        """Context-parallel ranks that share a micro-batch, as given; 1 if nothing is padded."""
    @property
    def token_buckets(self) -> tuple[int, ...]:
        """The only sizes of padded micro-batches, ascending; empty: any multiple."""
    @property
    def max_step_cost(self) -> float | None:
        """Most work of a step, as a multiple of an average step's; ``None``: no bound."""
    @property
    def tokens_per_batch(self) -> int:
        """Tokens of a global batch on average."""
    @property
    def cost_model(self) -> CostModel | None:
        """The cost model in use; ``None`` if documents bring their costs."""
    @property
    def cost_columns(self) -> int | None:
        """Cost columns that documents bring; ``None`` with a cost model."""
    @property
    def limits(self) -> tuple[float, ...] | None:
        """Most that a micro-batch may have in each cost column, infinite for no limit; ``None`` without columns."""
    def set_cost_model(self, cost_model: CostModel) -> None:
        """Uses another cost model from the next push on.

        Waiting documents are priced anew from their lengths. ``outlier_thresholds`` are lengths and ``delay_price`` is
        relative, so both keep their meaning. If they were tuned for a mean wait, they were tuned under the old costs.

        A state holds both cost models. To resume, make a packer with the cost model that the saved run began with;
        ``load_state_dict`` then sets the one that was in use when the state was saved. ``from_state_dict`` needs
        neither. Setting costs that are equal to the present ones does nothing.

        Args:
            cost_model: the new cost model, the same on every rank at the same step.

        Raises:
            WlbError: sums of such costs could overflow, or documents bring their costs. The packer is unchanged.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost)
            >>> packer.set_cost_model(wlb.CostModel(attention=2.0, linear=1.0))
            >>> packer.cost_model.terms
            {'pairs': 2.0, 'tokens': 1.0}
        """
    @property
    def fingerprint(self) -> str:
        """Hex hash of the configuration under the present cost model, without ``num_micro_batches``, ``dp_size`` and
        ``tokens_per_batch``. If it and these three are equal on two packers, they have the same configuration. They
        then give the same plans from here on if the same documents wait in both: if their ``state_dict`` are equal.
        """
    def metrics(self) -> PackerMetrics:
        """Figures since the stream began: imbalance, waits, tokens and work of steps (``PackerMetrics``)."""
    def state_dict(self) -> dict[str, Any]:
        """The packer as plain JSON values, for a checkpoint.

        It has the configuration, and the ids and lengths of the documents that wait. It is the same on every rank, and
        ``num_micro_batches`` and every parallel size may change on resume. Take it after each push, together with the
        number of the first document that was not pushed yet, and save both as they were after the push of the last step
        that was *trained*. A loader that works ahead has pushed more since.

        Examples:
            >>> import json, wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
            >>> _ = packer.push([60, 10, 10])
            >>> again = wlb.Packer.from_state_dict(json.loads(json.dumps(packer.state_dict())))
            >>> again.pending_tokens
            60
        """
    def load_state_dict(self, state: dict[str, Any], *, allow_config_change: bool = False) -> None:
        """Resumes from a saved packer, under this packer's configuration.

        Args:
            state: what ``state_dict`` returned, also after a round trip through JSON.
            allow_config_change: go on although another argument of the saved packer differs, such as the cost model,
                thresholds or ``max_tokens``. Waiting documents are sorted into the new queues; those that belong to
                none are carried over. ``bounds`` says how long they wait. Another ``num_micro_batches``, ``dp_size``,
                ``sync``, ``multiple_of_tokens``, ``cp_size`` or ``tokens_per_batch`` needs no permission.

        Raises:
            StateError: the state is corrupt, truncated, of another version, or not a packer's; or the configuration
                differs (says in which fields); or a waiting document is longer than this packer allows. The packer is
                unchanged.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> small = wlb.Packer(num_micro_batches=2, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
            >>> _ = small.push([60, 10, 10])
            >>> large = wlb.Packer(num_micro_batches=4, max_tokens=100, outlier_thresholds=[50], cost_model=cost)
            >>> large.load_state_dict(small.state_dict())
            >>> large.pending_tokens, large.iteration
            (60, 1)
        """
    def __copy__(self) -> Packer: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def tune(
    lengths: ArrayLike,
    *,
    num_micro_batches: int,
    max_tokens: int,
    cost_model: CostModel | None = None,
    num_queues: int | None = None,
    costs: ArrayLike | None = None,
    limits: ArrayLike | None = None,
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
) -> TuneResult:
    """Finds on a sample of lengths what a ``Packer`` should hold back: a delay price, or thresholds of outlier queues.

    Without ``num_queues`` it finds the price of delay for ``release="adaptive"``. It runs the packer over the sample at
    geometrically spaced prices and at the default, then at prices near the one where the mean delay passes the limit.
    The best of many prices on the same steps is merely the luckiest, so each half of the documents judges the prices
    found on the other. The prices that lose the least time on both halves and the default are then judged on three
    other orders of all documents. If a half has less than twelve global batches, the prices that lose the least time on
    all documents are judged on the other orders alone; such a price may suit only these documents.

    With ``num_queues`` it finds ``outlier_thresholds``. It runs the packer with every combination of up to
    ``num_queues`` geometrically spaced thresholds, then with thresholds near the best (WLB-LLM, section 4.3).

    Deterministic. Documents over ``max_document_tokens`` are split. Releases the GIL.

    Args:
        lengths: int[n], tokens, in arrival order; some tens of global batches or more.
        num_micro_batches, max_tokens, cost_model, max_delay, max_document_tokens, method, dp_size, sync, max_documents:
            as for ``Packer``. With ``dp_size``, imbalance and lost time are those of ranks that wait for each other.
        num_queues: most thresholds, 0 to 4; None for a delay price.
        costs: float64[n] or float64[n, r], cost of each document, instead of ``cost_model``, for a packer with
            ``cost_columns=r``; imbalance is then that of a step over all columns that take time. A delay price needs
            one column.
        limits: float64[r], with ``costs``, as for ``Packer``.
        max_mean_delay: most mean delay of a token, in steps.
        tokens_per_batch: tokens of a global batch; default ``num_micro_batches * max_document_tokens``. Do not set it
            to ``num_micro_batches * max_tokens``: full micro-batches leave no room for balance.
        max_step_cost: as for ``Packer``; for a delay price.
        max_early: int from 0 to 1024, most steps by which a document may come before its turn, as for
            ``BalancedBatchSampler``; delays then count steps before the turn, too. For a delay price; needs
            ``cost_model``.

    Returns:
        TuneResult: the choice, and the Pareto front of balance and delay on the sample. Thresholds: those with the
        least mean imbalance within the delay limit. A price: the one that loses the least time on the other orders,
        within the delay limit there and on the sample. It is the default (0.03) unless another price saves 0.01 of lost
        time in every order, is no worse on a half, and has no worse a worst step there and on the sample. If the
        default exceeds the delay limit, the bound on the worst step holds if any price keeps it. ``judged`` has all
        judged prices, the default among them. If nothing keeps the limit, it is the choice with the least delay.

    Raises:
        WlbError: wrong lengths, costs or options, or no documents; ``max_step_cost`` or ``max_early`` with
            ``num_queues``; several columns of costs for a price.

    A price takes one run of the packer for each of about 32 prices, another for each price within the limit, and three
    for each judged price (nine or more). Thresholds take one run for each of about 110 choices (two queues) or 380
    (three).

    Examples:
        >>> import numpy as np
        >>> import wlb
        >>> lengths = np.random.default_rng(0).lognormal(6, 1.2, 4000).astype(int).clip(1, 8192)
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> wlb.tune(lengths, num_micro_batches=8, max_tokens=12288, cost_model=cost).best
        TunedPoint(delay_price=0.46822, imbalance_mean=1.0277, delay_mean=0.528, delay_max=10)
        >>> wlb.tune(lengths, num_micro_batches=8, max_tokens=12288, cost_model=cost, num_queues=1).best
        TunedPoint(thresholds=[4539], imbalance_mean=1.0667, delay_mean=0.341, delay_max=4)
    """

def padded_tokens(
    tokens: int, *, multiple_of_tokens: int = 1, cp_size: int = 1, token_buckets: ArrayLike | None = None
) -> int: ...
def most_tokens(
    max_tokens: int, *, multiple_of_tokens: int = 1, cp_size: int = 1, token_buckets: ArrayLike | None = None
) -> int: ...
def batch_offsets(lengths: ArrayLike, *, tokens_per_batch: int) -> NDArray[np.int64]:
    """Cuts a stream of documents into global batches: each takes as many whole documents as fit, at least one.

    Args:
        lengths: int[n], tokens.
        tokens_per_batch: most tokens of a global batch.

    Returns:
        int64[b + 1]: batch ``i`` is ``lengths[offsets[i]:offsets[i + 1]]``.

    Raises:
        WlbError: a length or ``tokens_per_batch`` out of range.

    Examples:
        >>> import wlb
        >>> wlb.batch_offsets([5, 9, 2, 4], tokens_per_batch=8)
        array([0, 1, 2, 4])
    """

def split_documents(
    lengths: ArrayLike, *, max_document_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]:
    """Cuts documents into pieces of at most ``max_document_tokens``, such as a context window.

    Args:
        lengths: int[n], tokens.
        max_document_tokens: longest piece.

    Returns:
        ``(documents int64[p], starts int32[p], lengths int64[p])``: for each piece, the index of its document, the
        position of its first token there, and its tokens.

    Raises:
        WlbError: a length or ``max_document_tokens`` out of range, or more than 2^23 cuts.

    Examples:
        >>> import wlb
        >>> wlb.split_documents([5, 2], max_document_tokens=4)
        (array([0, 0, 1]), array([0, 4, 0], dtype=int32), array([4, 1, 2]))
    """

@final
class RankShard:
    """The tokens of one rank of a context-parallel group, and the arrays for its varlen attention kernel.

    Rows have an order of their own: first the documents of which the rank has all keys that it sees, then the others
    (``docs/semantics.md``). A segment is a contiguous run of one document. The queries of segment ``i`` are
    ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of the rank's tokens, and its keys are ``packed[k_starts[i] : k_starts[i] +
    cu_seqlens_k[i + 1] - cu_seqlens_k[i]]``. Under a causal mask these are its document up to the segment's end, which
    is what a kernel with bottom-right causal alignment expects.

    In a forest a segment is a run of one node, and rows are in packed order. The keys of segment ``i`` are those of the
    nodes above, then its own, in the intervals ``j`` with ``cu_intervals[i] <= j < cu_intervals[i + 1]``; interval
    ``j`` is ``packed[key_starts[j]:key_ends[j]]``. (Segments of documents have one interval each.) The last query sees
    all of these keys, and each query before it one less.

    Examples:
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
    def forest(self) -> PrefixForest | None:
        """The forest, with its nodes in memory order; None if documents were cut."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the rank, ``T_r``."""
    @property
    def num_segments(self) -> int:
        """Number of segments of the rank, ``s``."""
    @property
    def token_indices(self) -> NDArray[np.int32]:
        """int32[T_r]: index of each token in the packed sequence, in the order of rows."""
    @property
    def position_ids(self) -> NDArray[np.int32]:
        """int32[T_r]: position of each token in its document, as RoPE needs it; in a forest, on its path."""
    @property
    def cu_seqlens_q(self) -> NDArray[np.int32]:
        """int32[s + 1]: index of each segment's first query among the rank's tokens, and at the end their number."""
    @property
    def cu_seqlens_k(self) -> NDArray[np.int32]:
        """int32[s + 1]: index of each segment's first key if the keys of all segments are copied one after the other, and
        at the end their number.

        Raises:
            WlbError: the keys of a forest are more than int32 can count.
        """
    @property
    def max_seqlen_q(self) -> int:
        """Tokens of the longest segment; 0 without segments."""
    @property
    def max_seqlen_k(self) -> int:
        """Most keys of a segment; 0 without segments."""
    @property
    def k_starts(self) -> NDArray[np.int32]:
        """int32[s]: index of each segment's first key in the packed sequence.

        Raises:
            WlbError: the shard is of a forest, whose segments have several intervals of keys: take ``key_starts``.
        """
    @property
    def cu_intervals(self) -> NDArray[np.int32]:
        """int32[s + 1]: index of each segment's first interval of keys, and at the end the number of intervals ``k``."""
    @property
    def key_starts(self) -> NDArray[np.int32]:
        """int32[k]: packed index of the first key of each interval."""
    @property
    def key_ends(self) -> NDArray[np.int32]:
        """int32[k]: packed index after the last key of each interval."""
    @property
    def documents(self) -> NDArray[np.int32]:
        """int32[s]: index of each segment's document in the micro-batch; in a forest, of its node."""
    @property
    def pairs(self) -> int:
        """Exact (query, key) pairs of the rank."""

@final
class Shard:
    """A micro-batch cut for the ranks of a context-parallel group.

    In the shard of a forest, nodes stand in the place of documents: ``lengths`` are theirs. A token's place in the
    packed sequence is its packed index.

    Every array is a fresh copy that the caller may keep or change.

    Examples:
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
        """Strategy of the shard: "auto", "per_sequence", "per_document", "hybrid" or "contiguous"."""
    @property
    def hybrid_threshold(self) -> int | None:
        """With "hybrid", the least tokens of a document that is cut, given or chosen; else None."""
    @property
    def cp_size(self) -> int:
        """Ranks of the group; also ``len()``."""
    @property
    def causal(self) -> bool:
        """Whether queries attend only to keys before them."""
    @property
    def forest(self) -> PrefixForest | None:
        """The forest, with its nodes in memory order; None if documents were cut."""
    @property
    def num_tokens(self) -> int:
        """Tokens of the micro-batch; of a forest each shared token once."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[n]: tokens of each document; of a forest, of each node."""
    @property
    def tokens_per_rank(self) -> NDArray[np.int64]:
        """int64[cp_size]: tokens of each rank."""
    @property
    def pairs_per_rank(self) -> NDArray[np.int64]:
        """int64[cp_size]: exact (query, key) pairs of each rank."""
    @property
    def keys_moved(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys that each rank has to fetch, because its queries see them and other ranks hold them. A rank
        fetches equally many values. Counted without a window; O(segments).
        """
    @property
    def keys_gathered(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys of each rank that an all-gather has to send, because a query on another rank sees them.
        Equally many values go with them. Every rank sends as many keys as the rank with the most. Counted without a
        window; O(segments).
        """
    @property
    def tokens_split(self) -> NDArray[np.int64]:
        """int64[cp_size]: tokens of each rank that attends in two calls, else 0. A rank attends in two calls if it lacks
        keys for some of its documents, and the documents for which it has all keys are at least an eighth of its
        tokens: these attend while keys arrive. Counted without a window; O(segments).

        Raises:
            WlbError: the shard is of a forest.
        """
    @property
    def keys_picked(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys (own and fetched ones) that each rank copies for the call that needs keys of other ranks:
        for every segment of a document of which the rank lacks keys, all keys that the segment sees. Counted without a
        window; O(segments).

        Raises:
            WlbError: the shard is of a forest.
        """
    @property
    def restore_indices(self) -> NDArray[np.int32]:
        """int32[num_tokens]: ``rank_major[restore_indices]`` is the packed sequence, where ``rank_major`` has the ranks'
        tokens one rank after the other. O(tokens).
        """
    def rank(self, rank: int) -> RankShard:
        """The tokens of one rank and the arrays for its attention kernel.

        Raises:
            WlbError: no such rank, or more keys of its segments than int32 ``cu_seqlens_k`` can count.

        Examples:
            >>> import wlb
            >>> r = wlb.shard([8, 4], cp_size=2, strategy="per_document").rank(0)
            >>> r.token_indices
            array([ 0,  1,  6,  7,  8, 11], dtype=int32)
            >>> r.position_ids
            array([0, 1, 6, 7, 0, 3], dtype=int32)
            >>> r.cu_seqlens_q
            array([0, 2, 4, 5, 6], dtype=int32)
            >>> r.cu_seqlens_k
            array([ 0,  2, 10, 11, 15], dtype=int32)
            >>> r.k_starts
            array([0, 0, 8, 8], dtype=int32)
        """
    def summary(self) -> dict[str, Any]:
        """Figures of the shard, for a log or a notebook.

        Returns:
            dict: strategy, cp_size, documents (of a forest: nodes), tokens, imbalance (pairs of the rank with the most
                over the mean), keys_moved (of the rank with the most).

        Complexity:
            O(documents * cp_size).

        Examples:
            >>> import wlb
            >>> wlb.shard([64, 64], cp_size=2).summary()["tokens"]
            128
        """

    def to_pandas(self) -> Any:
        """Ranks as a table, one row for each.

        Returns:
            pandas.DataFrame: rank, tokens, pairs, keys_moved.

        Raises:
            WlbError: pandas is not installed.

        Complexity:
            O(documents * cp_size).

        Examples:
            >>> import wlb
            >>> wlb.shard([64, 64], cp_size=2).to_pandas()["tokens"].tolist()  # doctest: +SKIP
            [64, 64]
        """

    def _repr_html_(self) -> str: ...
    def digest(self) -> str:
        """Hex hash of the place of every token: equal on two ranks if and only if their shards are."""
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def shard(
    lengths: ArrayLike | MicroBatch | PrefixForest,
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

    Any lengths and any ``cp_size`` are allowed, also a document of 1 token and a rank without tokens. Ranks differ by
    at most one token.

    Args:
        lengths: int[n], tokens of the documents, in packed order; or a ``MicroBatch`` of a plan; or a ``PrefixForest``,
            with all its samples. The nodes of a forest lie depth-first, the longest of siblings first, and are cut as
            documents are.
        cp_size: number of ranks of the group.
        strategy: "auto": every document on as few ranks as possible, while no rank has more than ``max_imbalance``
            times the mean pairs (if that is impossible, as evenly as possible): few keys to fetch, long segments.
            "per_document": every document in ``2 * cp_size`` chunks; rank ``i`` gets chunks ``i`` and ``2 * cp_size - 1
            - i``: equal work. "per_sequence": the packed sequence in such chunks: fewer and longer segments, unequal
            work. "hybrid": documents of at least ``hybrid_threshold`` tokens per document, shorter ones whole on one
            rank. "adaptive": the one of these four that ``kernel_model`` predicts to be fastest, by the latency of the
            slowest rank, forward and backward; equally fast ones in the order "per_sequence", "per_document", "auto",
            "hybrid". The result's ``strategy`` and ``hybrid_threshold`` say which it is. "contiguous": rank ``i`` gets
            the ``i``-th of ``cp_size`` runs of the packed sequence, for layers that mix neighbouring tokens; attention
            is uneven under it, see ``wlb.torch.recut``.
        causal: whether queries see only keys before them; it decides pairs and key ranges, not the rank of a token.
        hybrid_threshold: tokens; with "hybrid" only.
        max_imbalance: with "auto", and with "adaptive" when it tries "auto": most pairs of a rank over the mean, at
            least 1; default 1.01.
        kernel_model: for "adaptive", and for "hybrid" without a threshold, which then gets the best threshold. All
            distinct lengths are tried as thresholds (of more than 64 only some, see docs/semantics.md).
        cp_seconds_per_key: with a ``kernel_model``: seconds that a rank takes for each key that it fetches
            (``Shard.keys_moved``), in one layer, forward and backward: for the key, its value and their gradients, less
            what computation hides; at most 1e-3. The slowest rank is then the one with the longest attention and
            fetching together. 0: free. Give it only if ranks fetch just the keys that they need, as with
            ``wlb.torch``'s transport "fetch"; other transports send more.

    A forest takes ``strategy="auto"`` and ``max_imbalance`` only. Several least lengths of cut nodes are tried; shorter
    nodes stay whole on one rank.

    Returns:
        Shard. The same input gives the same shards on every rank.

    Raises:
        WlbError: a length or size out of range; more than 2**31 - 1 tokens in all; an option that the strategy does not
            take, or one that it lacks; a kernel model of another mask; a ``cp_seconds_per_key`` out of range.

    O(n (log n + cp_size)); with a kernel model, O(n cp_size) for each threshold tried. WLB-LLM, section 5.

    Examples:
        >>> import wlb
        >>> s = wlb.shard([8, 4], cp_size=2, strategy="per_document")
        >>> s.pairs_per_rank
        array([23, 23])
        >>> s.rank(0).token_indices
        array([ 0,  1,  6,  7,  8, 11], dtype=int32)
        >>> s = wlb.shard(wlb.PrefixForest.from_prompts([8], 2, [4, 4]), cp_size=2)
        >>> s.tokens_per_rank, s.pairs_per_rank
        (array([8, 8]), array([60, 60]))
    """

@final
class KernelModel:
    """Latency of an attention kernel for the segments of a context-parallel rank, in seconds per transformer layer.

    A kernel computes whole tiles of queries. Their FLOPs are divided by the rate at this query length and key length,
    from a table that was measured (``from_profile``) or assumed (``analytic``); docs/semantics.md has the formulas.
    Immutable and picklable; equal models compare equal. WLB-LLM, section 5.2.

    Examples:
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
            num_heads: query heads on one GPU if not the profile's: times are proportional to it.

        Raises:
            WlbError: no such profile, or a malformed one; the message says where in the file.
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
        """The documented assumptions for a GPU that was not measured; ``source`` says that it is an assumption.

        Args:
            generation: "a100", "h100", "h200", "b200", "h20", "l40s" or "mi300x", in lower or upper case.
            num_heads: query heads on one GPU.
            num_kv_heads: key/value heads on one GPU; must divide ``num_heads``, which is the default. Does not change
                times.
            head_dim: width of a head.
            causal: whether queries see only keys before them.

        Raises:
            WlbError: an unknown generation, or a size out of range.

        Examples:
            >>> import wlb
            >>> wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128).source
            'analytic: h100'
        """
    def segment_seconds(
        self, query_lengths: ArrayLike, key_lengths: ArrayLike, *, passes: Passes = "forward_backward"
    ) -> NDArray[np.float64]:
        """Latency of segments, one by one, in a call that fills the GPU.

        Args:
            query_lengths: int[n], tokens of each segment.
            key_lengths: int[n], keys that the last token of each segment sees; at least its tokens.
            passes: "forward", "backward" or "forward_backward" (their sum).

        Returns:
            float64[n], seconds.

        Raises:
            WlbError: a length out of range, or more queries than keys.

        Examples:
            >>> import wlb
            >>> kernel = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
            >>> one, both = kernel.segment_seconds([1024, 2048], [1024, 2048])
            >>> bool(2 * one < both)
            True
        """
    def rank_seconds(self, shard: Shard, *, passes: Passes = "forward_backward") -> NDArray[np.float64]:
        """Latency of each rank's attention call: the sum of its segments plus a constant for the launch.

        Args:
            shard: a shard with the model's mask.
            passes: "forward", "backward" or "forward_backward" (their sum).

        Returns:
            float64[cp_size], seconds; 0 for a rank without tokens.

        Raises:
            WlbError: a shard with another mask.

        Examples:
            >>> import wlb
            >>> kernel = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
            >>> kernel.rank_seconds(wlb.shard([4096], cp_size=2, strategy="per_document")).shape
            (2,)
        """
    @property
    def source(self) -> str:
        """Source of the numbers: "measured: (GPU) (kernel)" or "analytic: (generation)"."""
    @property
    def causal(self) -> bool:
        """Whether queries attend only to keys before them."""
    @property
    def num_heads(self) -> int:
        """Query heads on one GPU."""
    @property
    def num_kv_heads(self) -> int:
        """Key and value heads on one GPU, as measured."""
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
def pairs(lengths: int, *, causal: bool = True) -> int:
    """Exact (query, key) pairs of documents: ``d(d+1)/2`` under a causal mask, ``d*d`` under a full one.

    Args:
        lengths: int, or int[n]; tokens.
        causal: whether queries see only keys before them.

    Returns:
        int, or int64[n].

    Raises:
        WlbError: a length below 1 or above 2**31 - 1.

    Examples:
        >>> import wlb
        >>> wlb.pairs([3, 1, 2])
        array([6, 1, 3])
    """

@overload
def pairs(lengths: ArrayLike, *, causal: bool = True) -> NDArray[np.int64]:
    """Exact (query, key) pairs of documents: ``d(d+1)/2`` under a causal mask, ``d*d`` under a full one.

    Args:
        lengths: int, or int[n]; tokens.
        causal: whether queries see only keys before them.

    Returns:
        int, or int64[n].

    Raises:
        WlbError: a length below 1 or above 2**31 - 1.

    Examples:
        >>> import wlb
        >>> wlb.pairs([3, 1, 2])
        array([6, 1, 3])
    """

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

    Every rank runs its ops in the schedule's order, each as soon as the rank is free and the op's input has arrived.

    Args:
        costs: seconds; float64[m], micro-batches through the whole model, forward and backward (``Packing.costs``):
            every stage takes an equal part, and in each stage forward, input gradient and weight gradient take a third
            each. Or float64[m, stages], with ``stages = num_stages * num_virtual_stages``. Or float64[m, stages, 3],
            with forward, input gradient and weight gradient given separately.
        schedule: "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zbv" or
            "dualpipev".
        num_stages: pipeline ranks, p.
        num_virtual_stages: stages on each rank, v; rank r has stages r, r + p, ... "zbv" and "dualpipev" need 2: rank r
            has stages r and 2p - 1 - r. "gpipe", "1f1b", "zb_h1" and "zb_h2" need 1. The interleaved schedules take the
            micro-batches in ``max(1, m // p)`` rounds, which must divide m.
        p2p_seconds: latency from the end of an op until a stage on another rank can use its result; both ranks may
            compute meanwhile. One number, or float64[m].
        activation: float64[m], memory that a rank holds for a micro-batch from its forward to its weight gradient, over
            all its stages; in any unit, such as tokens. Default 1 each.
        exposed: shape of ``costs``: the part of each cost that is communication that nothing hides. Changes no time.

    Returns:
        PipelineTimeline.

    Raises:
        WlbError: a shape that does not fit, a number that is negative or not finite, or sizes that the schedule does
            not allow.

    O(ops), that is O(m p v).

    Examples:
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

    Like ``simulate_pipeline`` with two more dimensions before that of the micro-batches. It returns a few numbers for
    each step instead of single ops, and simulates tens of millions of ops a second.

    Args:
        costs: seconds; float64[steps, dp, m], [steps, dp, m, stages] or [steps, dp, m, stages, 3].
        schedule: see ``simulate_pipeline``.
        num_stages: see ``simulate_pipeline``.
        num_virtual_stages: see ``simulate_pipeline``.
        p2p_seconds: one number, or float64[steps, dp, m].
        activation: float64[steps, dp, m].
        exposed: shape of ``costs``; see ``simulate_pipeline``.

    Returns:
        PipelineSteps.

    Raises:
        WlbError: no replicas; otherwise as for ``simulate_pipeline``.

    O(ops), that is O(steps dp m p v).

    Examples:
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
    """Deals the micro-batches of a step to data-parallel ranks in equal counts, ordered for the schedule, so that the
    slowest rank finishes early.

    It deals by cost, then tries sorted orders, swaps and moves in the simulator. The result is never slower than
    ``Packing.deal``, which ignores the schedule.

    Args:
        costs: seconds of all micro-batches of a step; float64[M], [M, stages] or [M, stages, 3] as for
            ``simulate_pipeline``.
        dp_size: data-parallel ranks; divides M.
        schedule: see ``simulate_pipeline``.
        num_stages: see ``simulate_pipeline``.
        num_virtual_stages: see ``simulate_pipeline``.
        p2p_seconds: one number, or float64[M].

    Returns:
        int64[dp_size, M / dp_size]: indices of each rank's micro-batches in the order of running. ``costs[order]`` are
        the costs in this order. Ranks that pass the same costs get the same result.

    Raises:
        WlbError: ``dp_size`` does not divide M; otherwise as for ``simulate_pipeline``.

    Simulates about a million ops (milliseconds), or four orders of each rank if that is more: at most 2^24 ops and one
    order. Ranks beyond that keep the order of ``Packing.deal``.

    Examples:
        >>> import wlb
        >>> wlb.order_micro_batches([4.0, 1.0, 2.0, 3.0], dp_size=2, num_stages=2)
        array([[1, 0],
               [3, 2]])
    """

_Rows: TypeAlias = tuple[int, int, bool]
_Sum: TypeAlias = tuple[_Rows, _Rows, int]
_Call: TypeAlias = tuple[_Rows, _Rows, int, int, int, int, tuple[int, int], bool]
_Indices: TypeAlias = tuple[NDArray[np.int32], int]

def forest_edges(
    shard: Shard, rank: int, *, tokens: ArrayLike, counts: NDArray[np.bool_]
) -> dict[str, NDArray[np.int64]]: ...
def keys_plan(
    shard: Shard, rank: int, *, fetch: bool, window: int | None, biased: bool, buckets: bool = False
) -> tuple[
    _Indices,
    list[_Call],
    list[_Call],
    tuple[int, int],
    _Rows,
    tuple[list[int], list[int]],
    tuple[bool, int],
    tuple[_Sum, list[int], list[int]],
    _Sum,
]: ...
def ring_plan(
    shard: Shard, rank: int, degree: int, *, window: int | None, biased: bool, buckets: bool = False
) -> tuple[_Indices, list[list[_Call]], list[int], list[int], tuple[list[int], int, NDArray[np.int32]] | None]: ...
def moves_plan(
    before: Shard, after: Shard, rank: int
) -> tuple[NDArray[np.int32], _Rows, list[int], _Rows, list[int]]: ...

@final
class Exchange:
    """Prices of exchanging keys and values inside a context-parallel group, forward and backward, over all layers.

    A group of ``c`` ranks with ``T`` tokens exchanges for ``(c - 1) * seconds_per_exchange + T * (c - 1) / c *
    seconds_per_token`` seconds, of which attention hides up to ``overlap`` times its own time.
    ``wlb_tools.profiling.probe_link`` measures a network. Immutable and picklable; equal prices compare equal.

    Args:
        seconds_per_token: seconds to exchange the keys and values of a token, and their gradients.
        seconds_per_exchange: latency of sending keys and values to the next rank.
        seconds_per_token_in_node, seconds_per_exchange_in_node: the same for a group inside a node, with
            ``ranks_per_node`` of ``wlb.plan_dynamic_cp``; neither may exceed the price across nodes.
        overlap: part of the attention, from 0 to 1, that can hide the exchange.

    Raises:
        WlbError: a price below 0 or above 1e200; an ``overlap`` outside 0 to 1.

    Examples:
        >>> import wlb
        >>> wlb.Exchange(seconds_per_token=7e-6, overlap=0.5).overlap
        0.5
    """
    def __new__(
        cls,
        *,
        seconds_per_token: float = 0.0,
        seconds_per_exchange: float = 0.0,
        seconds_per_token_in_node: float = 0.0,
        seconds_per_exchange_in_node: float = 0.0,
        overlap: float = 1.0,
    ) -> Exchange: ...
    @property
    def seconds_per_token(self) -> float:
        """Seconds to exchange the keys and values of a token, and their gradients."""
    @property
    def seconds_per_exchange(self) -> float:
        """Latency of sending keys and values to the next rank, in seconds."""
    @property
    def seconds_per_token_in_node(self) -> float:
        """``seconds_per_token`` of a group inside a node."""
    @property
    def seconds_per_exchange_in_node(self) -> float:
        """``seconds_per_exchange`` of a group inside a node."""
    @property
    def overlap(self) -> float:
        """Part of the attention, from 0 to 1, that can hide the exchange."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, float]]: ...

@final
class DynamicCpPlan:
    """The plan of one step: which documents run when, and on which ranks of a pipeline stage.

    Plain data that can be printed, compared, pickled and sent. Every array is a fresh copy that the caller may keep or
    change. The micro-batches are its items, in the order in which they run.
    """
    @property
    def world_size(self) -> int:
        """Ranks of a pipeline stage, DP times CP."""
    @property
    def num_stages(self) -> int:
        """Pipeline stages."""
    @property
    def num_virtual_stages(self) -> int:
        """Parts of the model on each stage."""
    @property
    def schedule(self) -> str:
        """Order in which a stage runs its micro-batches."""
    @property
    def sync(self) -> str:
        """Where the ranks of a stage wait for each other, once a "step" or in every "micro_batch"."""
    @property
    def max_tokens_per_rank(self) -> int:
        """Most tokens that a rank was allowed in a micro-batch; with padding, the largest padded size within that."""
    @property
    def max_documents(self) -> int | None:
        """Most documents that a group was allowed; None: any number."""
    @property
    def multiple_of_tokens(self) -> int:
        """Each rank's tokens in a micro-batch are padded to a multiple of this."""
    @property
    def token_buckets(self) -> tuple[int, ...]:
        """The only padded sizes, ascending; empty for any."""
    @property
    def seconds(self) -> float:
        """Predicted time of the step, by simulating the pipeline with every rank's micro-batches; the ranks of a group
        wait for one another, and all ranks of a stage where ``sync`` says so.
        """
    @property
    def p2p_seconds(self) -> float:
        """Latency between pipeline stages, included in ``seconds``."""
    @property
    def lower_bound(self) -> float:
        """Lower bound on ``seconds`` (up to rounding) for any plan with at most as many micro-batches as were tried and at
        least ``min_micro_batches``; if ``num_micro_batches`` was given, with exactly as many. Proved from the work, the
        filling and draining of the pipeline, and the paths around the longest documents.
        """
    @property
    def balanced_seconds(self) -> float:
        """Time if all work were spread evenly over all ranks of all stages and no rank ever waited; no pipeline reaches
        it.
        """
    @property
    def sweep(self) -> tuple[tuple[int, float], ...]:
        """The numbers of micro-batches that were tried, ascending, each with an estimate of its step in which every rank
        is as slow as the slowest of the micro-batch. For numbers given up early it is a lower time (with short
        documents divided at will, or with a part of the documents) that already exceeds the best. With exchange at a
        price and very many documents, most are judged by a sample of these: as much slower as they are there.
        """
    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of the step, ``m``, the same on every rank; also ``len()``."""
    @property
    def micro_batches(self) -> tuple[DynamicMicroBatch, ...]:
        """The micro-batches in the order in which they run."""
    @property
    def cp_sizes(self) -> NDArray[np.int32]:
        """int32[m, world_size]: for each rank, the number of ranks in its group."""
    @property
    def tokens_per_rank(self) -> NDArray[np.int64]:
        """int64[m, world_size]: most tokens of each rank; the ranks of a group differ by at most one."""
    @property
    def padded_tokens_per_rank(self) -> NDArray[np.int64]:
        """int64[m, world_size]: tokens of each rank including padding."""
    @property
    def rank_seconds(self) -> NDArray[np.float64]:
        """float64[m, world_size]: seconds of each rank through the whole model, forward and backward."""
    @property
    def padding_tokens(self) -> int:
        """Tokens of padding in all micro-batches."""
    def step_seconds(self, group_seconds: ArrayLike) -> float:
        """The step's time if its groups took ``group_seconds`` instead of the predicted times, in any unit.

        Args:
            group_seconds: float [groups], time of each group through the whole model, forward and backward: micro-batch
                by micro-batch, and inside each in the order of ranks.

        Raises:
            WlbError: their number is not that of the groups, or one is negative or not finite.

        O(num_stages * m * world_size): the pipeline is simulated.

        Examples:
            >>> import wlb
            >>> shape = {"world_size": 4, "num_stages": 1, "max_tokens_per_rank": 1000, "num_micro_batches": 1}
            >>> plan = wlb.plan_dynamic_cp([2000, 1000, 1000], costs=[2.0, 1.0, 1.0], **shape)
            >>> plan.seconds, plan.step_seconds([3.0, 1.0, 1.0])
            (1.0, 3.0)
        """
    def digest(self) -> str:
        """Hex hash of which documents run when and where: equal if and only if two plans are, apart from seconds.

        Examples:
            >>> import wlb
            >>> shape = {"world_size": 2, "num_stages": 1, "max_tokens_per_rank": 1000}
            >>> plans = [wlb.plan_dynamic_cp([500, 100], costs=[5.0, last], **shape) for last in (1.0, 1.1)]
            >>> plans[0] == plans[1], plans[0].digest() == plans[1].digest()
            (False, True)
        """
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> DynamicMicroBatch: ...
    def __iter__(self) -> Iterator[DynamicMicroBatch]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...
    @staticmethod
    def _from_json(json: str) -> DynamicCpPlan: ...

@final
class DynamicMicroBatch:
    """One micro-batch of a ``DynamicCpPlan``: groups that together have all ranks of a stage, in the order of their ranks.
    The groups are its items; a group may be empty.

    A pickle holds the whole plan. To send several micro-batches of one plan, send the plan.
    """
    @property
    def groups(self) -> tuple[CpGroup, ...]:
        """The groups in the order of their ranks; together they have all ranks. A group may be empty."""
    @property
    def seconds(self) -> float:
        """Seconds of its slowest group through the whole model, forward and backward."""
    @property
    def tokens(self) -> int:
        """Tokens of all its groups."""
    def group_of(self, rank: int) -> CpGroup:
        """The group that a rank of the stage belongs to.

        Raises:
            WlbError: no such rank.

        Examples:
            >>> import wlb
            >>> shape = {"world_size": 4, "num_stages": 1, "max_tokens_per_rank": 1000, "num_micro_batches": 1}
            >>> plan = wlb.plan_dynamic_cp([2000, 1000, 1000], costs=[2.0, 1.0, 1.0], **shape)
            >>> plan[0].group_of(1).ranks
            range(0, 2)
        """
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> CpGroup: ...
    def __iter__(self) -> Iterator[CpGroup]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class CpGroup:
    """Ranks that share the documents of one micro-batch; ``len()`` is their number.

    Every array is a fresh copy that the caller may keep or change. Groups are equal if they run the same documents on
    the same ranks in the same time, in whatever plan. A pickle holds the whole plan.
    """
    @property
    def first_rank(self) -> int:
        """First of its ranks; a multiple of ``cp_size``, unless ``group_sizes="any"``."""
    @property
    def cp_size(self) -> int:
        """Number of ranks, a power of two, unless ``group_sizes="any"``; also ``len()``."""
    @property
    def ranks(self) -> range:
        """The ranks of the stage that belong to it."""
    @property
    def document_ids(self) -> NDArray[np.int64]:
        """int64[k]: the documents, in order of arrival."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[k]: tokens of each document."""
    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """int32[k + 1]: index of each document's first token in the packed sequence, and at the end its length."""
    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document; 0 without documents."""
    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
    @property
    def tokens_per_rank(self) -> int:
        """Most tokens of a rank, sharded "per_document": the ranks differ by at most one."""
    @property
    def padded_tokens_per_rank(self) -> int:
        """Most tokens of a rank including padding; with padding all of its ranks have equally many."""
    @property
    def padding_tokens(self) -> int:
        """Tokens of one more document after the others, which fills all ranks to the same padded size
        (``multiple_of_tokens``, ``token_buckets``); 0 without padding.
        """
    @property
    def seconds(self) -> float:
        """Predicted time through the whole model, forward and backward, on each of its ranks."""
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

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
    exchange: Exchange | None = None,
    p2p_seconds: float = 0.0,
    micro_batch_seconds: float = 0.0,
    ids: ArrayLike | None = None,
) -> DynamicCpPlan:
    """Plans one step with dynamic context parallelism: every micro-batch divides the ranks into groups as its
    documents need.

    A long document gets as many ranks as it needs to finish with the others; short documents share few ranks. Groups
    are aligned powers of two inside any ``world_size``, so that all of them can be built once; or groups of any size.
    All ranks have the same number of micro-batches.

    On a group of ``c`` ranks, documents with ``T`` tokens together take ``micro_batch_seconds + cost / c + max(0,
    exchange - overlap * attention_cost / c)`` seconds through the whole model, forward and backward, with ``exchange =
    (c - 1) * seconds_per_exchange + T * (c - 1) / c * seconds_per_token`` (``wlb.Exchange``). Each rank holds at most
    ``ceil(T / c)`` of the tokens (documents are sharded "per_document").

    Args:
        lengths: int[n], tokens of the documents of the step.
        world_size: ranks of one pipeline stage (DP times CP), which are divided into groups. Any number.
        num_stages: pipeline stages, PP.
        max_tokens_per_rank: most tokens of a rank in a micro-batch, as memory allows. An interleaved pipeline also
            has no more tokens under way than rounds of ``num_stages`` such micro-batches have, unless
            ``num_micro_batches`` is given.
        cost_model: cost of a document on one rank, in seconds for the whole model. Give it, or ``costs``.
        costs: float64[n], cost of each document on one rank, in seconds for the whole model, if the length does not
            tell the work. The ranks of a group share the cost; memory is counted in tokens.
        attention_costs: float64[n], the part of each of ``costs`` that is attention, which hides exchange. Required
            with ``costs`` if ``exchange`` has a price and an ``overlap`` above 0.
        num_virtual_stages: parts of the model on each stage.
        schedule: "1f1b" or "interleaved_1f1b"; or "zbv" or "dualpipev", with ``num_virtual_stages=2``. None: "1f1b", or
            "interleaved_1f1b" with several virtual stages. "dualpipev" needs at least two micro-batches for each stage.
        sync: where the ranks of a stage wait for each other: "step", once a step; or "micro_batch", in each micro-batch
            (FSDP, ZeRO-3, experts over all of them), so that a micro-batch takes as long as its slowest group.
        max_cp_size: largest group; default ``world_size``. Rounded down to a power of two if all groups are.
        group_sizes: "powers_of_two": each group begins at a multiple of its size. "any": any number of neighbouring
            ranks; useful for 24 or 48 ranks, and if the longest documents fill the memory. int[s]: the only allowed
            sizes, ascending from 1, such as the sizes that attention can run (``wlb.torch.cp_sizes``).
        ranks_per_node: ranks of a stage on each node, if exchange is cheaper inside a node: rank ``r`` is on node ``r
            // ranks_per_node``.
        max_documents: most documents of a group in a micro-batch, so that its ``cu_seqlens`` have a fixed number of
            entries (CUDA graphs); padding counts as one more.
        multiple_of_tokens: each rank's tokens in a micro-batch are padded to a multiple of this (MXFP8 needs 32,
            HybridEP 128), by one more document of the whole group. ``max_tokens_per_rank`` counts the padding: the
            plan's is the largest multiple within it. Padding takes no time in a plan.
        token_buckets: int[b], ascending, multiples of ``multiple_of_tokens``: the only padded sizes of a rank's tokens;
            a group without documents has the smallest.
        num_micro_batches: micro-batches of the step; None tries several numbers and takes the fastest.
        min_micro_batches: least number that is tried, for schedules that need more: torch's 1F1B one for each stage,
            its DualPipeV two.
        max_micro_batches: largest number that is tried; default 4 times the first, or more if the documents do not fit.
            The first is ``num_stages``, or more if memory or ``min_micro_batches`` needs more; with
            ``micro_batch_seconds``, as few as memory allows.
        exchange: prices of exchange inside a group; None: it is free.
        p2p_seconds: latency between pipeline stages.
        micro_batch_seconds: time of every micro-batch through the whole model, besides its documents.
        ids: int64[n], ids of the documents in the plan; default their indices.

    Returns:
        DynamicCpPlan. The same input gives the same plan, byte for byte, on every rank and machine.

    Raises:
        WlbError: an argument out of range; a document that does not fit on the largest group; too few micro-batches
            for the documents.

    O(n log world_size) for each of about ten numbers of micro-batches (several times as many attempts if exchange
    costs, all but four of them for a sample of 8,192 documents or more if there are twice as many, on 512 ranks), and
    O(num_stages * micro-batches * world_size) to simulate the best. In a world that is no power of two, up
    to O(n * micro-batches * log world_size) for each number, and O(n * micro-batches * world_size) if memory binds.
    Releases the GIL from 1,024 documents on.

    Examples:
        >>> import wlb
        >>> cost = wlb.CostModel(attention=0.0, linear=1.0)
        >>> plan = wlb.plan_dynamic_cp([2000, 1000, 1000], world_size=4, num_stages=1, max_tokens_per_rank=1000,
        ...                            cost_model=cost, num_micro_batches=1)
        >>> plan.cp_sizes
        array([[2, 2, 1, 1]], dtype=int32)
        >>> plan.seconds
        1000.0
    """

def plan_round(
    lengths: ArrayLike,
    *,
    dp_size: int,
    max_tokens: int,
    cost_model: CostModel | None,
    costs: ArrayLike | None,
    num_steps: int | None,
    prompts_per_step: int | None,
    samples_per_step: int | None,
    step_samples: StepSamples,
    groups: ArrayLike | None,
    together: RoundTogether,
    classes: ArrayLike | None,
    class_rounds: bool,
    sync: Sync,
    order: RoundOrder,
    oversize: RoundOversize,
    equal_samples: bool,
    max_samples: int | None,
    num_micro_batches: int | Literal["fewest"] | None,
    multiple_of: int,
) -> RoundPlan: ...
