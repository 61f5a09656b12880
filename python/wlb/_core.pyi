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
    "ForestMicroBatch",
    "ForestPlan",
    "ForestRankShard",
    "ForestShard",
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
    "dynamic_cp_seconds",
    "hand_down",
    "keys_plan",
    "most_tokens",
    "moves_plan",
    "order_micro_batches",
    "pack",
    "pack_forest",
    "padded_tokens",
    "pairs",
    "pass_weights",
    "plan_dynamic_cp",
    "result",
    "ring_plan",
    "shard",
    "shard_forest",
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
    """Cost of documents: ``cost(d) = attention * pairs(d) + linear * d``, and some terms more, in any one unit.

    Attention is quadratic in a document's length, everything else (GEMMs, collectives, element-wise work) linear.
    Layers of windowed or chunked attention have pairs of their own, closed forms of the length and exact. Costs must
    come from the user's model and GPU: a wrong cost model costs a hundred times more balance than a greedy packing
    does. Build one from rates, ``from_flops``, ``from_tables`` or ``from_profile``. Immutable; picklable;
    equal models compare equal.

    Args:
        attention: cost of one (query, key) pair; 0 or above.
        linear: cost of one token; 0 or above, and not both 0.
        causal: count ``d(d+1)/2`` pairs (default) or, for bidirectional masks, ``d*d``.
        windows: ``{w: rate}``, cost of a pair under a sliding window of ``w`` keys: a query sees itself and the ``w -
            1`` before it. Causal only. From 2^31 - 1 on there is no window: the rate is added to ``attention``.
        chunks: ``{c: rate}``, cost of a pair in chunks of ``c`` tokens: a query sees itself and all before it in its
            chunk. Causal only.
        document: cost of every document, whatever its length.
        micro_batch: cost of every micro-batch, whatever is in it: also of an empty one, since it is run.
        unit: what one unit of these is, "seconds" or "flops"; None where nobody says. What adds seconds to costs
            (``plan_dynamic_cp``) refuses "flops".

    Raises:
        WlbError: a rate is negative or not finite, or no document costs anything; a window or chunk below 1, or without
            a causal mask.

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

        Forward: ``4 * num_heads * head_dim`` FLOPs per (query, key) pair and layer, 2 per parameter and token.
        Backward: 2.5 times (flash attention recomputes the scores) and 2 times as much.

        Args:
            hidden_size, ffn_hidden_size, num_layers, num_heads, vocab_size: as in the model's configuration.
            num_kv_heads: key/value heads, for GQA and MQA; default ``num_heads``.
            head_dim: default ``hidden_size / num_heads``.
            gated_ffn: three feed-forward matrices (SwiGLU) instead of two.
            experts_per_token: experts that one token visits; 1 for a dense model.
            attention_efficiency: FLOP rate of attention relative to the GEMMs'; 0.55 means just over half.
            flops_per_second: FLOP rate of the GEMMs, for costs in seconds; by default the unit is one GEMM FLOP.
            passes: "forward", "backward" or "forward_backward".
            recompute: activations are recomputed: the backward pass runs one more forward.
            causal: mask.

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

        Attention is linear in pairs between knots, hence exact wherever it is quadratic in the length; the rest is
        linear in tokens. Both start at 0 and are proportional to pairs (tokens) beyond the last knot.

        Args:
            lengths: int[k], tokens, strictly ascending.
            attention_seconds, linear_seconds: float[k], cost of one document of that length; above 0, never decreasing.
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
        """Cost from a measured profile: a JSON file, or the name of one that came with wlb.

        Args:
            path_or_name: path of a ``.json`` file, or a name in ``wlb.profiles.names()``.
            passes: "forward", "backward" or "forward_backward" (their sum).

        Raises:
            WlbError: no such profile, or a malformed one; says where in the file.

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
        """The part of ``cost`` that grows with the pairs, of all kinds. float64[n]."""
    def linear_cost(self, lengths: ArrayLike) -> NDArray[np.float64]:
        """The part of ``cost`` that grows with the tokens. float64[n]."""
    @property
    def causal(self) -> bool:
        """Whether pairs are counted under a causal mask."""
    @property
    def unit(self) -> Unit | None:
        """What one unit of cost is, "seconds" or "flops"; None where nobody said. Measured tables are in seconds."""
    @property
    def terms(self) -> dict[str, float]:
        """Rates by term, those that are not 0, in this order: "pairs", "window_pairs[w]" and "chunk_pairs[c]" by
        ascending size, "tokens", "documents", "micro_batches".

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
        """The costs that measured times of micro-batches show, in seconds.

        Minimised is the sum of ``rho((seconds - predicted) / predicted)`` over rates that are never negative: errors
        count relative to the time, and ``rho`` (Huber's, and from there Tukey's bisquare) leaves out rows that the
        others contradict. A term that the times do not need is given up. Of terms that they cannot tell apart the later
        goes, in the order tokens, pairs, windows, chunks, documents, micro-batches, and the result says so: its time is
        never split between them. Deterministic.

        Args:
            micro_batches: list of int[documents], tokens of the documents in each; at least two for each term, and
                eight.
            seconds: float[micro-batches], forward and backward of each.
            windows: sizes of the sliding windows that the model's layers have.
            chunks: sizes of their chunks.
            terms: of "pairs", "tokens", "documents", "micro_batches" those to try, besides windows and chunks; default
                all.
            causal: mask.
            ranks: int[micro-batches], how many context-parallel ranks shared each, where that differs (Dynamic-CP):
                pairs and tokens are divided by it, as in ``plan_dynamic_cp``. Default 1: rates are then those of
                the ranks that share one together.

        Returns:
            CostFit

        Raises:
            WlbError: a time that is not above 0, too few micro-batches, documents of a single length, times that do not
                grow with the documents, or numbers of micro-batches and times that differ; names the entry.

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
        """The model as a JSON text, for a file: ``from_json`` reads it, and so does ``--cost-model`` of the ``wlb``
        command.

        Examples:
            >>> import wlb
            >>> wlb.CostModel(attention=1.0, linear=2.0).to_json()
            '{"attention":{"rate":1.0},"linear":{"rate":2.0},"mask":"causal"}'
        """
    @staticmethod
    def from_json(text: str) -> CostModel:
        """The model that ``to_json`` wrote.

        Raises:
            WlbError: the text is none; says where.
        """
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class MicroBatch:
    """The documents of one micro-batch, in arrival order."""
    @property
    def document_ids(self) -> NDArray[np.int64]:
        """int64[k]: the documents; one that was cut may stand here with only a part."""
    @property
    def starts(self) -> NDArray[np.int32]:
        """int32[k]: where in its document each piece begins; 0 for whole documents."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[k]: tokens of each piece."""
    @property
    def cu_seqlens(self) -> NDArray[np.int32]:
        """int32[k + 1]: where each piece begins in the packed sequence, then its length."""
    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
    @property
    def cost(self) -> float:
        """Cost of the micro-batch, in the cost model's unit."""
    def __len__(self) -> int: ...

@final
class PrefixForest:
    """Which tokens samples share: plain data that can be printed, compared, pickled and sent.

    Nodes are runs of tokens; a sample is the path from a root to the end of its node, and the node may have children.
    Samples share tokens only from their beginning on, so that a shared token has the same position and sees the same
    tokens before it in all of them. Every array is a fresh copy.

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
        """The forest of samples whose tokens are here.

        Args:
            tokens: int[R], of all samples, one behind the other; int32 and int64 arrays are read where they lie. Of an
                Arrow list array: its ``values``.
            offsets: int[n + 1], where each sample begins, then ``R``. Of an Arrow list array: its ``offsets``.
            groups: int[n]: only samples with the same number can share (one prompt's rollouts).
            key: int[n], likewise, for what else a model reads beside tokens and positions: an image's hash, an adapter.

        Returns:
            PrefixForest: nodes depth-first, siblings by their first sample.

        Raises:
            WlbError: offsets that do not fit the tokens, a sample without tokens, another number of groups or keys.

        O(R + n log n) at worst: shared tokens are compared once, or twice, and the rest of a sample is not read. No
        copy.

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
        """A forest whose structure is known: each prompt, and the completions that were sampled for it. No tokens are
        read.

        Args:
            prompt_lengths: int[p], tokens of each prompt.
            samples_per_prompt: completions of each prompt, one number or int[p]; at least 1.
            completion_lengths: int[n], tokens of each completion, those of the first prompt first. 0 is legal: such a
                sample is its prompt.

        Raises:
            WlbError: a length out of range, numbers that do not fit.

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
            parents: int[m], node that each node continues, in any order; -1 for a root.
            lengths: int[m], tokens of each node.
            ends: int[n], node of each sample's last token.

        Raises:
            WlbError: a parent or end that is no node, parents in a circle, a node under which no sample ends.

        O(m log m).

        Examples:
            >>> import wlb
            >>> wlb.PrefixForest.from_parents([-1, 0, 0], [100, 30, 20], [1, 2]).sample_lengths
            array([130, 120], dtype=int32)
        """
    def check_tokens(self, tokens: ArrayLike, offsets: ArrayLike) -> None:
        """Checks that tokens are what the forest says: samples of its lengths, equal where they share a node.

        Args:
            tokens, offsets: as for ``from_tokens``.

        Raises:
            WlbError: another number of samples, a sample of another length, or the first token in which a sample
                differs from the one that it shares it with: which samples, and at which token.

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
        """Tokens of all nodes: what is computed, where one micro-batch holds all."""
    @property
    def raw_tokens(self) -> int:
        """Tokens of all samples: what is computed without sharing."""
    @property
    def parents(self) -> NDArray[np.int32]:
        """int32[m]: node that each node continues, -1 for a root."""
    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32[m]: tokens of each node."""
    @property
    def starts(self) -> NDArray[np.int32]:
        """int32[m]: tokens before each node on its path; the position of its first token."""
    @property
    def ends(self) -> NDArray[np.int32]:
        """int32[n]: node of each sample's last token."""
    @property
    def sample_lengths(self) -> NDArray[np.int32]:
        """int32[n]: tokens of each sample."""
    def digest(self) -> str:
        """Hex hash of the forest: equal on two ranks iff their forests are. O(m + n)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class ForestPlan:
    """The micro-batches of a forest: plain data that can be printed, compared, pickled and sent.

    Every array is a fresh copy that the caller may keep or change.
    """
    @property
    def forest(self) -> PrefixForest:
        """The forest whose samples these are."""
    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, ``M``; also ``len()``."""
    @property
    def max_tokens(self) -> int:
        """Most unique tokens that a micro-batch was allowed."""
    @property
    def micro_batches(self) -> tuple[ForestMicroBatch, ...]:
        """The micro-batches, a tuple of ``ForestMicroBatch``."""
    @property
    def unique_tokens(self) -> int:
        """Unique tokens of all micro-batches: those of the forest, and those that are computed in several."""
    @property
    def raw_tokens(self) -> int:
        """Tokens of all samples: what is computed without sharing."""
    @property
    def costs(self) -> NDArray[np.float64]:
        """float64[M]: cost of each micro-batch, in the cost model's unit."""
    @property
    def step_cost(self) -> float:
        """Time of the step where ranks meet: the heaviest rank under "step", the heaviest micro-batch of each round, in
        all, under "micro_batch", the heaviest micro-batch without ranks.
        """
    @property
    def imbalance(self) -> float:
        """``step_cost`` over what it is if all that is computed were equal on those that wait for one another."""
    @property
    def lower_bound(self) -> float:
        """No plan of these samples into as many micro-batches has a smaller ``step_cost``: an equal share of all nodes,
        and of what ``max_tokens`` and ``max_documents`` force to be computed twice; the heaviest sample; the heaviest
        group.
        """
    @property
    def dp_size(self) -> int | None:
        """Data-parallel ranks that it was made for; None where it may be dealt to any."""
    @property
    def sync(self) -> Sync | None:
        """Where these ranks wait for each other, "step" or "micro_batch"; None without ranks."""
    def digest(self) -> str:
        """Hex hash of where every token goes: equal on two ranks iff their plans are. Where nothing is shared it is that
        of ``pack``'s plan. O(samples and nodes).
        """
    def deal(self, dp_size: int) -> NDArray[np.int64]:
        """Deals the micro-batches to data-parallel ranks: equal counts, balanced costs, in schedule order.

        Returns:
            int64[dp_size, M / dp_size]: micro-batch indices of each rank. A plan that was made for ranks is dealt as it
            was made.

        Raises:
            WlbError: ``dp_size`` does not divide the number of micro-batches, or is not what the plan was made for.

        Examples:
            >>> import wlb
            >>> forest = wlb.PrefixForest.from_prompts([100, 100], 2, [30, 20, 40, 10])
            >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
            >>> wlb.pack_forest(forest, num_micro_batches=2, max_tokens=200, cost_model=cost).deal(2)
            array([[0],
                   [1]])
        """
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> ForestMicroBatch: ...
    def __iter__(self) -> Iterator[ForestMicroBatch]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class ForestMicroBatch:
    """The samples of one micro-batch of a forest."""
    @property
    def sample_ids(self) -> NDArray[np.int64]:
        """int64[k]: the samples, ascending."""
    @property
    def nodes(self) -> NDArray[np.int64]:
        """int64[m]: nodes of the plan's forest that these samples have, in the order in which they lie in memory:
        depth-first, of siblings the longest first, so that it continues its parent.
        """
    @property
    def forest(self) -> PrefixForest:
        """The forest of these samples alone: its nodes are ``nodes``, its samples ``sample_ids``, in their orders."""
    @property
    def unique_tokens(self) -> int:
        """Tokens of the nodes: what the micro-batch computes."""
    @property
    def raw_tokens(self) -> int:
        """Tokens of the samples."""
    @property
    def padded_tokens(self) -> int:
        """Unique tokens when it runs, padded as ``multiple_of_tokens`` asks."""
    @property
    def cost(self) -> float:
        """Cost of the micro-batch, in the cost model's unit."""
    def __len__(self) -> int: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

def pack_forest(
    forest: PrefixForest,
    *,
    num_micro_batches: int | None,
    max_tokens: int,
    cost_model: CostModel,
    dp_size: int | None = None,
    sync: Sync | None = None,
    groups: ArrayLike | None = None,
    equal_documents: bool = False,
    max_documents: int | None = None,
    multiple_of_tokens: int = 1,
) -> ForestPlan:
    """Packs the samples of a forest into micro-batches, in each of which a shared token is computed once.

    A node of ``n`` tokens at depth ``p`` costs ``c(p + n) - c(p)``, where ``c`` is the cost model without its
    constants: exact for causal pairs, windows and chunks, and for measured tables the definition. The constant of a
    document counts once a sample, that of a micro-batch once. Where a tree is cut between micro-batches, its trunk is
    computed in both: it is cut where that costs less than the imbalance that it saves, or where ``max_tokens`` asks for
    it.

    Args:
        forest: the samples.
        num_micro_batches: micro-batches of all ranks. None: as few as were found to hold the samples, and with
            ``dp_size`` up to two more of each rank where each makes the step 1 % shorter.
        max_tokens: most unique tokens of a micro-batch; a memory bound.
        cost_model: what tokens cost; one of causal attention.
        dp_size: data-parallel ranks that the plan is made for; ``plan.deal(dp_size)`` gives every rank's micro-batches,
            which stand rank by rank in the plan. None: micro-batches are made equal.
        sync: where these ranks wait for each other, "step" (the default) or "micro_batch", as for ``pack``.
        groups: int[n], with ``dp_size``: samples with the same number stay on one rank.
        equal_documents: with ``dp_size``, every rank has as many samples; they differ by one where ``dp_size`` does not
            divide them. Groups whose sizes cannot be dealt so are refused.
        max_documents: most samples of a micro-batch.
        multiple_of_tokens: micro-batches run padded up to a multiple of so many tokens, and ``max_tokens`` counts the
            padding.

    Returns:
        ForestPlan. The same input gives the same plan, byte for byte, on every rank and machine. Where nothing is
        shared it is the plan of ``pack``, with the same digest.

    Raises:
        WlbError: a sample over ``max_tokens``, a cost model with ``causal=False``, groups of another number, what needs
            ``dp_size`` without it, samples that do not fit into the micro-batches.

    O(n log n), O(micro-batches) for each tree or part of one, and a bounded number of exchanges. Releases the GIL from
    1,024 samples on.

    Examples:
        >>> import wlb
        >>> forest = wlb.PrefixForest.from_prompts([100, 100], 2, [30, 20, 40, 10])
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> plan = wlb.pack_forest(forest, num_micro_batches=2, max_tokens=200, cost_model=cost)
        >>> [batch.sample_ids.tolist() for batch in plan.micro_batches]
        [[2, 3], [0, 1]]
        >>> plan.unique_tokens, forest.raw_tokens
        (300, 500)
    """

def shard_forest(micro_batch: ForestMicroBatch | PrefixForest, *, cp_size: int) -> ForestShard:
    """Cuts a micro-batch of a forest for the ranks of a context-parallel group, without padding.

    Long nodes are cut as documents are, into ``2 * cp_size`` chunks of which each rank has two whose pairs are level;
    what is left over goes to ranks in turn. Short ones lie whole on one rank. Of all lengths from which on nodes are
    cut it takes the one that moves fewest keys with ranks within 1 % of their mean pairs; if none is, the most level.

    Args:
        micro_batch: of a ``ForestPlan``; or a ``PrefixForest``, all of its samples.
        cp_size: ranks of the group.

    Returns:
        ForestShard. Ranks differ by at most one token. The same input gives the same shard on every rank.

    Raises:
        WlbError: ``cp_size`` out of range, or more than 2^31 - 1 unique tokens.

    O(m (log m + cp_size)) for ``m`` nodes, for each of at most 66 attempts.

    Examples:
        >>> import wlb
        >>> shard = wlb.shard_forest(wlb.PrefixForest.from_prompts([8], 2, [4, 4]), cp_size=2)
        >>> shard.tokens_per_rank, shard.pairs_per_rank
        (array([8, 8]), array([60, 60]))
    """

@final
class ForestShard:
    """Which tokens of a forest lie on which rank: plain data.

    Nodes lie in memory depth-first, of siblings the longest first; a token's place there is its packed place.
    """
    @property
    def forest(self) -> PrefixForest:
        """The forest, its nodes in the order in which they lie in memory."""
    @property
    def cp_size(self) -> int:
        """Ranks of the group."""
    @property
    def num_tokens(self) -> int:
        """Unique tokens of all ranks."""
    @property
    def tokens_per_rank(self) -> NDArray[np.int64]:
        """int64[cp_size]: tokens of each rank."""
    @property
    def pairs_per_rank(self) -> NDArray[np.int64]:
        """int64[cp_size]: (query, key) pairs of each rank."""
    @property
    def keys_moved(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys that each rank's queries see and other ranks hold, each once."""
    @property
    def restore_indices(self) -> NDArray[np.int32]:
        """int32[num_tokens]: ``rank_major[restore_indices] == packed``, where ``rank_major`` has the ranks' tokens one
        behind the other.
        """
    def rank(self, rank: int) -> ForestRankShard:
        """The arrays of one rank.

        Raises:
            WlbError: a rank that does not exist.

        Examples:
            >>> import wlb
            >>> forest = wlb.PrefixForest.from_prompts([8], 2, [4, 4])
            >>> wlb.shard_forest(forest, cp_size=2).rank(0).token_indices
            array([ 0,  1,  6,  7,  8,  9, 10, 11], dtype=int32)
        """
    def digest(self) -> str:
        """Hex hash of which token lies where: equal on two ranks iff their shards are. O(segments)."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __reduce__(self) -> tuple[Any, ...]: ...

@final
class ForestRankShard:
    """What one rank has of a forest: runs of tokens (segments), each in one node, and the keys that each sees.

    Segment ``i`` has the queries ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1] - 1`` of the rank. Its keys are those
    packed places ``key_starts[j]`` to ``key_ends[j] - 1`` with ``cu_intervals[i] <= j < cu_intervals[i + 1]``, one
    interval behind the other: the last query sees all of them, each query before it one less (a causal mask, aligned at
    the end).
    """
    @property
    def token_indices(self) -> NDArray[np.int32]:
        """int32[t]: packed place of each of the rank's tokens, ascending."""
    @property
    def position_ids(self) -> NDArray[np.int32]:
        """int32[t]: position of each token: how many are before it on its path."""
    @property
    def nodes(self) -> NDArray[np.int32]:
        """int32[s]: node of each segment, as the shard's forest has them."""
    @property
    def starts(self) -> NDArray[np.int32]:
        """int32[s]: where in its node each segment begins."""
    @property
    def cu_seqlens_q(self) -> NDArray[np.int32]:
        """int32[s + 1]: where each segment begins among the rank's tokens, then their number."""
    @property
    def cu_seqlens_k(self) -> NDArray[np.int64]:
        """int64[s + 1]: the same for keys, where those of all segments are copied one behind the other."""
    @property
    def cu_intervals(self) -> NDArray[np.int32]:
        """int32[s + 1]: where the intervals of each segment begin, then their number ``k``."""
    @property
    def key_starts(self) -> NDArray[np.int32]:
        """int32[k]: packed place of the first key of each interval."""
    @property
    def key_ends(self) -> NDArray[np.int32]:
        """int32[k]: packed place behind the last key of each interval."""

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
        """A packing from an assignment made elsewhere (a solver, another packer), scored like ours.

        Args:
            lengths: int[n], tokens.
            assignment: int[n], micro-batch of each document; -1 leaves it over.
            num_micro_batches, max_tokens, cost_model, costs, limits: as in ``pack``.

        Raises:
            WlbError: also when a micro-batch does not exist or gets more than ``max_tokens`` tokens.

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
        """How it was made: a method of ``pack``, or "assignment"."""
    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches, ``M``; also ``len()``."""
    @property
    def max_tokens(self) -> int:
        """Most tokens that a micro-batch was allowed."""
    @property
    def num_tokens(self) -> int:
        """Tokens of all micro-batches."""
    @property
    def micro_batches(self) -> tuple[MicroBatch, ...]:
        """The micro-batches, a tuple of ``MicroBatch``. An empty one is legal."""
    @property
    def assignment(self) -> NDArray[np.int32]:
        """int32[n]: micro-batch of each document passed in, -1 if it does not lie whole in one (left over, waiting, or
        split). Empty for what ``Packer.flush`` returns.
        """
    @property
    def tokens(self) -> NDArray[np.int64]:
        """int64[M]: tokens of each micro-batch."""
    @property
    def costs(self) -> NDArray[np.float64]:
        """float64[M]: cost of each micro-batch, in the cost model's unit; with several columns of costs, of all that
        take time.
        """
    @property
    def padded_tokens(self) -> NDArray[np.int64]:
        """int64[M]: tokens of each micro-batch when it runs, padded as ``multiple_of_tokens`` and ``token_buckets`` ask."""
    @property
    def column_costs(self) -> NDArray[np.float64]:
        """float64[M, r]: cost of each micro-batch in each column of the documents' costs; with a cost model there is one."""
    @property
    def step_cost(self) -> float:
        """Time of the step: cost of the heaviest micro-batch; with several columns, the sum over them of the heaviest in
        each.
        """
    @property
    def leftover(self) -> NDArray[np.int64]:
        """int64[l]: ids of the documents that did not fit, in the order they were tried; empty for ``pack`` unless its
        ``leftover`` is "return". A ``Packer`` carries them over to the next iteration.
        """
    @property
    def leftover_starts(self) -> NDArray[np.int32]:
        """int32[l]: where in its document each left-over piece begins; 0 but for documents that were cut."""
    @property
    def leftover_lengths(self) -> NDArray[np.int32]:
        """int32[l]: tokens of each left-over piece."""
    @property
    def imbalance(self) -> float:
        """``step_cost * M / total cost``: how much longer a step takes than with perfect balance. 1.0 when nothing is
        placed.
        """
    @property
    def dp_size(self) -> int | None:
        """Data-parallel ranks that it was made for; None where it may be dealt to any."""
    @property
    def sync(self) -> Sync | None:
        """Where these ranks wait for each other, "step" or "micro_batch"; None without ranks."""
    @property
    def rank_imbalance(self) -> float:
        """How much longer a step takes than on equal ranks. Under "step" it takes the sum of the heaviest rank, under
        "micro_batch" that of the heaviest micro-batch of each round. Without ranks it is the ``imbalance``.
        """
    @property
    def lower_bound(self) -> float:
        """No packing of the placed documents into as many micro-batches of ``max_tokens`` has a smaller ``step_cost``:
        ``max(total cost / M, largest document)``, or what a linear program says where tokens are scarce; summed over
        columns. O(n log n) when it is first asked for.
        """
    @property
    def length_fallbacks(self) -> int:
        """Documents that Algorithm 1 places by token count instead of by cost. At 0 with "var_length", ``max cost <= total
        / M + (1 - 1/M) * w``, where ``w`` is the cost of the last document put into the heaviest micro-batch.
        """
    @property
    def global_batches(self) -> int:
        """Global batches that were packed together: step ``i`` trains the ``i``-th ``M / global_batches`` micro-batches."""
    def summary(self) -> dict[str, Any]:
        """Figures of the plan, for a log or a notebook.

        Returns:
            dict: method, micro_batches, documents, tokens, leftover, imbalance, largest_micro_batch (tokens), heaviest
                (cost).

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
        """Hex hash of where every token goes: equal on two ranks iff every token goes to the same place. O(documents)."""
    def deal(self, dp_size: int) -> NDArray[np.int64]:
        """Deals the micro-batches of each step to data-parallel ranks: equal counts, balanced costs, in schedule order.

        Inside a rank the lightest micro-batches stand at both ends, where a pipeline fills and drains. A packing that
        was made for ranks (``pack(dp_size=...)``) is dealt as it was made.

        Returns:
            int64[dp_size, M / dp_size]: micro-batch indices of each rank; with several global batches
            int64[global_batches, dp_size, M / global_batches / dp_size].

        Raises:
            WlbError: ``dp_size`` does not divide the number of micro-batches of a step, or is not what the packing was
                made for.

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
) -> Packing:
    """Packs one global batch of documents into micro-batches.

    Args:
        lengths: int[n], tokens of each document, in arrival order; document ids are indices into it.
        num_micro_batches: micro-batches of a global batch, ``N``. None: as few as leave nothing over, for a batch
            that is trained whole in one step (fine-tuning, reinforcement learning): one multiple less would leave
            documents over. With ``dp_size`` and ``sync="step"``, one more of each rank where that makes the step
            5 % shorter.
        max_tokens: most tokens of a micro-batch; a memory bound (``S_max``).
        cost_model: what documents cost, by their lengths. Or ``costs``.
        costs: float64[n], what each document costs, in any one unit; or float64[n, r], a column for every resource
            with a barrier of its own (vision encoder, language model). A step takes the sum over columns of the
            heaviest micro-batch in that column; ``imbalance`` and ``lower_bound`` follow. With "var_length",
            "refined" and "original", which shares a cost among pieces by their tokens.
        limits: float64[r], the most that a micro-batch may have in each column, infinite for none. What has a limit
            is memory, and takes no time.
        method: "var_length" (WLB-LLM's Algorithm 1: longest first, each to the micro-batch with the least cost),
            "refined" (no worse than var_length, and next to
            optimal where ``max_tokens`` binds; 1.3 times its time at the median, about three times where a few
            pieces fill a micro-batch that has next to no room to spare), "fixed_length" (longest first, to the
            least attention work that has room; cuts what fits nowhere), "original" (arrival order, cut every
            ``max_tokens``).
        global_batches: with "fixed_length", the number of global batches in ``lengths``. They are packed together into
            ``global_batches * N`` micro-batches; step ``i`` trains micro-batches ``i * N`` to ``(i + 1) * N - 1``.
        multiple_of: with ``num_micro_batches=None``, what their number is a multiple of: the data-parallel ranks,
            so that ``Packing.deal`` gives all of them as many.
        dp_size: data-parallel ranks that the plan is made for: documents are exchanged between ranks, not only
            micro-batches dealt, and ``packing.deal(dp_size)`` gives every rank's. All ranks have as many
            micro-batches; they stand rank by rank in the packing. With "var_length" or "refined"; ``costs`` of one
            column.
        sync: where these ranks wait for each other. "step", the default: once a step (DDP, ZeRO-1 and 2, Megatron),
            so that the sums of ranks are made equal, then the micro-batches of each rank. "micro_batch": in every
            micro-batch (FSDP, ZeRO-3), so that those of a round are made equal, then the sums.
        groups: int[n], with ``dp_size``: documents with the same number stay on one rank (one prompt's rollouts).
        equal_documents: with ``dp_size``, every rank has as many documents; they differ by one where ``dp_size``
            does not divide them. Groups whose sizes cannot be dealt so are refused.
        max_documents: most documents of a micro-batch.
        multiple_of_tokens: micro-batches run padded up to a multiple of so many tokens (MXFP8 32, HybridEP 128),
            and ``max_tokens`` counts the padding: the plan's is the largest multiple within it. ``padded_tokens``
            has the sizes; who makes the batches pads them.
        token_buckets: int[b], ascending: the only sizes that micro-batches run with, for steps compiled or captured
            once for each; padded up to the next, ``max_tokens`` as above.
        leftover: what happens if documents do not fit: "error", or "return", and ``Packing.leftover`` lists
            them: they are in no micro-batch, and will not be trained unless the caller sees to it.

    Returns:
        Packing. The same input gives the same plan, byte for byte, on every rank and machine.

    Raises:
        WlbError: a length or size out of range, a document over ``max_tokens`` (the methods that keep documents
            whole), an unknown method, a cost that is negative or not finite, a column of zeros or none without a
            limit, both or none of ``cost_model`` and ``costs``, several ``global_batches`` without "fixed_length",
            ``multiple_of`` beside ``num_micro_batches``, what needs ``dp_size`` without it. Documents do not fit: the
            message says how many, and a ``max_tokens`` that surely holds them all (with the methods that cut documents
            the least one).

    O(n) for a radix sort and, on average, a few steps for each document; O(n N) at worst, and always for
    "fixed_length". ``num_micro_batches=None`` takes O(log n) times that, and once where as many as the tokens need
    do. WLB-LLM, sections 3.2 and 4. Releases the GIL from 1,024 documents and micro-batches on.

    Examples:
        >>> import wlb
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> plan = wlb.pack([900, 100, 500, 400, 100], num_micro_batches=2, max_tokens=1500, cost_model=cost)
        >>> plan.assignment
        array([0, 1, 1, 1, 1], dtype=int32)
        >>> round(plan.imbalance, 3)
        1.004
    """

@final
class Packer:
    """Packs one training step after the other from a stream of documents, and lets some documents wait.

    A document that costs more than a fair share of a step makes its micro-batch heavy. The packer holds such
    documents back for a few steps, until a step has enough work to go with them. Everything else is trained in the
    step in which it is pushed, if it fits; documents that do not fit are *carried over*, and come first in the next
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
    WLB-LLM, until there is one for every micro-batch.

    The same pushes give the same plans on every rank, and after a resume under the same configuration. A packer can be
    pickled, and threads can share it; plans then depend on the order in which the threads push.

    Args:
        num_micro_batches: micro-batches of a step, ``N``: the sum over all data-parallel ranks. Context-, tensor- and
            pipeline-parallel ranks do not multiply it.
        max_tokens: most tokens of a micro-batch: what the memory of its ranks holds, all context-parallel ranks
            together. Micro-batches become more even if it is 1.25 to 1.5 times ``max_document_tokens``.
        cost_model: cost of a document, from its length. Give it, or ``cost_columns``.
        cost_columns: number of costs that you give for each document in ``push(costs=)``, in the place of
            ``cost_model``. For example 2: time of the vision encoder, and time of the language model. One after the
            other lasts as long as the heaviest micro-batch of the first column and the heaviest of the second together;
            the packer makes that sum small. The adaptive rule takes one column.
        limits: float64[cost_columns], most that a micro-batch may have in each column, infinite for no limit. A
            column with a limit counts as memory: it is kept below its limit and is not balanced.
        outlier_thresholds: int[q], tokens, ascending: shortest length of each queue. ``tune_outlier_thresholds`` finds
            them. ``None``, the default, is the adaptive rule; ``()`` holds nothing back.
        release: "adaptive" or "fifo" (queues). It follows from ``outlier_thresholds``, so you need not give it;
            ``release="fifo"`` alone means ``outlier_thresholds=()``.
        delay_price: price of waiting, for the adaptive rule. With the default, 0.03, a full step of tokens
            (``num_micro_batches * max_document_tokens``) is held for one step only if the heaviest micro-batch thereby
            falls by at least 3 % of the mean one; a tenth of these tokens needs 0.3 %. The second step of a wait costs
            twice as much as the first. A higher price means shorter waits. ``tune_delay_price`` finds the price for a
            mean wait that you accept.
        max_delay: most steps that a document waits. ``None`` is 16 with the adaptive rule, and no limit with
            queues. It holds as long as no push brings more than the packer ``admits``.
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
        multiple_of_tokens: micro-batches are padded to a multiple of this number, and ``max_tokens`` counts the
            padding. ``packing.padded_tokens`` has the sizes; ``wlb.torch.collate(multiple_of_tokens=)`` adds
            the padding.
        token_buckets: int[b], ascending: the only sizes of padded micro-batches.
        max_step_cost: for the adaptive rule: most work of a step, as a multiple of an average step's. Documents that
            wait together are trained together, so without a bound the largest step can have several times the average
            work. Documents beyond the bound wait, so micro-batches are less even. An average step has
            ``tokens_per_batch`` tokens, each of the mean cost of the last 128 to 256 steps' tokens. Documents that
            waited ``max_delay`` steps leave all the same; ``metrics().steps_over_max_cost`` counts the steps that
            exceed the bound for them. ``None``: no bound.
        tokens_per_batch: tokens of a global batch on average; ``max_step_cost`` needs it, and the data loaders of
            ``wlb.torch`` push so many for a step. Default: ``num_micro_batches * max_document_tokens``.
        on_backlog: what happens when more tokens wait after a push than ``bounds`` of an empty packer allows, because
            pushes brought more than the packer ``admits``: "warn" once with a ``BacklogWarning``, or "error", which
            changes nothing.

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
            on_backlog: as for ``Packer``; it is in no state.

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
            ids: int64[n], names of the documents, unique among new and waiting ones; default a running number.
            starts: int[n], first token of each piece inside the document that ``ids`` names, for a reader that cuts
                documents itself. Default: 0, whole documents.
            costs: float64[n] or float64[n, cost_columns], cost of each document, exactly if the packer was made with
                ``cost_columns``. Pieces of a split document share its cost by their tokens.
            min_step_tokens: least tokens of the step. The packer releases more documents to reach it, and the step is
                less even. If new and waiting documents together have so many tokens, the step has at least the lesser
                of ``min_step_tokens`` and ``num_micro_batches // 2 * max_tokens`` tokens (``limits`` may leave less
                room). More may not fit, and the step then has fewer, without an error.
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
    def admits(self, lengths: ArrayLike, *, costs: ArrayLike | None = None) -> int:
        """Number of these documents, from the first on, that the next push may bring so that ``bounds`` hold.

        Their tokens are at most ``room``. Their costs in a column with a limit are at most the limit of a step less
        what is carried over. With the adaptive rule they also fit into the micro-batches of one empty step: placed
        longest first, each into the micro-batch that has the fewest tokens. If nothing waits and there is a document,
        the answer is at least 1.

        Args:
            lengths: int[n], tokens of the documents that come next.
            costs: float64[n] or float64[n, cost_columns], what they cost; needed only where a column has a limit.

        Returns:
            0 to n. With 0, push no documents until there is room: ``push([])`` trains documents that wait.

        Raises:
            WlbError: wrong lengths or costs; or, under oversize="split", the first document has more pieces than a step
                holds, so that it would never be admitted: cut it with ``split_documents``, and push its pieces step
                by step with ``starts``.

        O(n + pending); a sort, and log(n) placements where they do not all fit.

        Examples:
            >>> import wlb
            >>> cost = wlb.CostModel(attention=1.0, linear=1.0)
            >>> packer = wlb.Packer(num_micro_batches=2, max_tokens=100, cost_model=cost)
            >>> packer.admits([80, 80, 80, 80])
            2
        """
    def bounds(self) -> Bounds:
        """Most tokens that wait, and longest wait, from now on, as long as no push brings more than the packer ``admits``.

        Returns:
            Bounds, of an empty packer: with "adaptive" ``tokens`` is ``2 * num_micro_batches * max_tokens``, and
            ``delay`` is ``max_delay`` steps. With "fifo" ``tokens`` is ``num_micro_batches * max_tokens`` and, for each
            queue, ``num_micro_batches - 1`` of its longest documents; ``delay`` is a few steps more than ``max_delay``,
            if that is given. ``drain`` is the most steps that ``flush`` takes. After a state of another configuration
            was loaded, or a push brought more than was admitted, all three begin higher. They do not rise while pushes
            bring what is admitted, and are those of an empty packer again after ``settles`` steps. docs/semantics.md
            has the formulas and the proof. O(pending).

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
        """Micro-batches are padded to a multiple of this number of tokens."""
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

        A state holds both cost models. To resume, make the packer with the *first* one, as the saved run did;
        ``load_state_dict`` then sets the present one. Setting costs that are equal to the present ones does nothing.

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
        ``tokens_per_batch``. Packers give the same plans if their fingerprints, these three, and the documents that
        wait in them are equal.
        """
    def metrics(self) -> PackerMetrics:
        """Figures since the stream began: imbalance, waits, tokens and work of steps (``PackerMetrics``)."""
    def state_dict(self) -> dict[str, Any]:
        """The packer as plain JSON values, for a checkpoint.

        It has the ids and lengths of the documents that wait, and nothing of any rank: ``num_micro_batches`` and every
        parallel size may change on resume. Save the state that the packer had after the last step that was *trained*,
        with the position of the reader at that push; a packer in a loader that works ahead has gone on since.

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
                ``multiple_of_tokens`` or ``tokens_per_batch`` needs no permission.

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
) -> TuneResult:
    """Finds thresholds for a ``Packer`` on a sample of lengths.

    Runs the packer over the sample under every combination of up to ``num_queues`` geometrically spaced thresholds,
    then around the best. Deterministic. Documents over ``max_document_tokens`` are split.

    Args:
        lengths: int[n], tokens, in arrival order; some tens of global batches or more.
        num_micro_batches, max_tokens, cost_model, max_delay, max_document_tokens, method, max_documents: as for
            ``Packer``.
        costs: float64[n] or float64[n, r], what each document costs, in place of ``cost_model``, for a packer with
            ``cost_columns=r``; imbalance is then that of a step over all columns that take time.
        limits: float64[r], with ``costs``, as for ``Packer``.
        num_queues: most levels, 0 to 4.
        max_mean_delay: most mean token delay, in iterations.
        tokens_per_batch: tokens of a global batch; default ``num_micro_batches * max_document_tokens``. Give one of
            the two: global batches that fill every micro-batch to ``max_tokens`` leave no room for balance.
        dp_size, sync: as for ``Packer``; imbalance and lost time are then those of the ranks, where they wait
            for each other.

    Returns:
        TuneResult: the thresholds with the least mean imbalance within the delay limit (no queues, or the least
        delay, if none keeps it), and the Pareto front of balance and delay.

    Raises:
        WlbError: wrong lengths, costs or options, or no documents.

    One run of the packer for each of about 110 choices (two queues) or 380 (three). Releases the GIL. WLB-LLM,
    section 4.3.

    Examples:
        >>> import numpy as np
        >>> import wlb
        >>> lengths = np.random.default_rng(0).lognormal(6, 1.2, 4000).astype(int).clip(1, 8192)
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> tuned = wlb.tune_outlier_thresholds(
        ...     lengths, num_micro_batches=8, max_tokens=12288, cost_model=cost, num_queues=1
        ... )
        >>> tuned.best
        TunedPoint(thresholds=[4539], imbalance_mean=1.0667, delay_mean=0.341, delay_max=4)
    """

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
) -> TuneResult:
    """Finds the price of delay for a ``Packer`` with ``release="adaptive"`` on a sample of lengths.

    Runs the packer over the sample at geometrically spaced prices and at the default, then at some where the mean
    delay passes the limit. The best of many on the same steps is the luckiest, so each half of the documents judges
    what the other finds: those that lose the least time on both are judged on both, and on three other orders of
    all documents. Where a half has less than twelve global batches, those that lose the least on all documents are
    judged on the other orders alone: a price may then suit these documents and no others. Deterministic. Documents
    over ``max_document_tokens`` are split.

    Args:
        lengths: int[n], tokens, in arrival order; some tens of global batches or more.
        num_micro_batches, max_tokens, cost_model, max_delay, max_document_tokens, method, max_step_cost,
            max_documents: as for ``Packer``.
        costs: float64[n], what each document costs, in place of ``cost_model``, for a packer with
            ``cost_columns=1``.
        max_mean_delay: most mean token delay, in iterations.
        tokens_per_batch, dp_size, sync: as for ``tune_outlier_thresholds``.
        max_early: int from 0 to 1024, iterations that a document comes before its turn, as for
            ``BalancedBatchSampler``; delays are then of both, before the turn and after it. Needs ``cost_model``.

    Returns:
        TuneResult: the price that loses the least time on the other orders, within the delay limit there and on the
        sample: the default (0.03) unless another is better by 0.01 of lost time in every order, no worse on a half,
        with a worst step that is no worse there and on the sample. Where the default waits too long, that bound
        holds if any price keeps it. The price with the least delay if none keeps the limit. ``judged`` has them
        all, and the default beside them; and the Pareto front of balance and delay on the sample.

    Raises:
        WlbError: wrong lengths, costs or options, or no documents; several columns of costs.

    One run of the packer for each of about 32 prices, another for those within the limit, and three for each that
    is judged: nine, or more. Releases the GIL.

    Examples:
        >>> import numpy as np
        >>> import wlb
        >>> lengths = np.random.default_rng(0).lognormal(6, 1.2, 4000).astype(int).clip(1, 8192)
        >>> cost = wlb.CostModel(attention=1.0, linear=1000.0)
        >>> tuned = wlb.tune_delay_price(lengths, num_micro_batches=8, max_tokens=12288, cost_model=cost)
        >>> tuned.best
        TunedPoint(delay_price=0.46822, imbalance_mean=1.0277, delay_mean=0.528, delay_max=10)
    """

def padded_tokens(tokens: int, *, multiple_of_tokens: int = 1, token_buckets: ArrayLike | None = None) -> int: ...
def most_tokens(max_tokens: int, *, multiple_of_tokens: int = 1, token_buckets: ArrayLike | None = None) -> int: ...
def batch_offsets(lengths: ArrayLike, *, tokens_per_batch: int) -> NDArray[np.int64]:
    """Cuts a stream of documents into global batches: as many whole documents as fit, at least one each.

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
    """Cuts documents into pieces of at most ``max_document_tokens``: those that a context window has.

    Args:
        lengths: int[n], tokens.
        max_document_tokens: longest piece.

    Returns:
        ``(documents int64[p], starts int32[p], lengths int64[p])``: index of the document, where in it the piece
        begins, tokens.

    Raises:
        WlbError: a length or ``max_document_tokens`` out of range, or one so low that it takes more than 2^23 cuts.

    Examples:
        >>> import wlb
        >>> wlb.split_documents([5, 2], max_document_tokens=4)
        (array([0, 0, 1]), array([0, 4, 0], dtype=int32), array([4, 1, 2]))
    """

@final
class RankShard:
    """What one rank of a context-parallel group holds and computes, ready for a varlen attention kernel.

    Rows have an order of their own: first come the documents of which the rank has all keys that it sees, then the
    others (``docs/semantics.md``). A segment is a contiguous run of one document; segment ``i``'s queries are
    ``cu_seqlens_q[i]:cu_seqlens_q[i + 1]`` of the rank's tokens, and its keys are
    ``packed[k_starts[i] : k_starts[i] + cu_seqlens_k[i + 1] - cu_seqlens_k[i]]``. Under a causal mask these are its
    document up to the segment's end, so that a kernel's bottom-right causal alignment is right.

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
    def num_tokens(self) -> int:
        """Tokens of the rank, ``T_r``."""
    @property
    def num_segments(self) -> int:
        """Segments of the rank, ``s``."""
    @property
    def token_indices(self) -> NDArray[np.int32]:
        """int32[T_r]: where each token stands in the packed sequence, row by row."""
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
        """int64[cp_size]: keys of each rank that an all-gather has to bring, because a query on another rank sees
        them. As many values come with them. Ranks send as many as the rank with most keys. Without a window;
        O(segments).
        """
    @property
    def tokens_split(self) -> NDArray[np.int64]:
        """int64[cp_size]: all tokens of a rank that needs two calls of attention, because of some of its documents, an
        eighth of its tokens or more, it has all keys that it sees, and of others not; else 0. Without a window;
        O(segments).
        """
    @property
    def keys_picked(self) -> NDArray[np.int64]:
        """int64[cp_size]: keys that each rank picks, of its own and of those that arrive: for every segment of a document
        of which the rank has not all keys, all keys that the segment sees. Without a window; O(segments).
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
            dict: strategy, cp_size, documents, tokens, imbalance (pairs of the busiest rank over the mean), keys_moved
                (most of a rank).

        Complexity:
            O(documents * cp_size).

        Examples:
            >>> import wlb
            >>> wlb.shard([64, 64], cp_size=2).summary()["tokens"]
            128
        """

    def to_pandas(self) -> Any:
        """Ranks as a table: a row for each.

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
            mix neighbouring tokens: attention is uneven under it, see ``wlb.torch.recut``.
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

    Examples:
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
    from a table that was measured (``from_profile``) or is assumed (``analytic``); docs/semantics.md
    has the formulas. Immutable; picklable; equal models compare equal. WLB-LLM, section 5.2.

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
            generation: "a100", "h100", "h200", "b200", "h20", "l40s" or "mi300x", in any case.
            num_heads: query heads of one GPU.
            num_kv_heads: key/value heads of one GPU, which divide them; default ``num_heads``. Not used.
            head_dim: width of a head.
            causal: mask.

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
            key_lengths: int[n], keys that its last token sees; no fewer.
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
        """Latency of each rank's attention call: the sum of its segments, and a constant for the launch.

        Args:
            shard: of the same mask.
            passes: "forward", "backward" or "forward_backward" (their sum).

        Returns:
            float64[cp_size], seconds; 0 for a rank without tokens.

        Raises:
            WlbError: a shard of another mask.

        Examples:
            >>> import wlb
            >>> kernel = wlb.KernelModel.analytic("h100", num_heads=32, head_dim=128)
            >>> kernel.rank_seconds(wlb.shard([4096], cp_size=2, strategy="per_document")).shape
            (2,)
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
def pairs(lengths: int, *, causal: bool = True) -> int:
    """Exact (query, key) pairs of documents: ``d(d+1)/2`` under a causal mask, ``d*d`` under a full one.

    Args:
        lengths: int, or int[n]; tokens.
        causal: mask.

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
        causal: mask.

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

    Every rank runs its ops in the schedule's order, each as soon as the rank is free and its input is there.

    Args:
        costs: seconds; float64[m], micro-batches through the whole model, forward and backward
            (``Packing.costs``): every stage takes an equal part, and of that a third each the forward and the
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

    As ``simulate_pipeline``, with two dimensions before that of the micro-batches, and without single ops: a
    few numbers a step, tens of millions of ops a second.

    Args:
        costs: seconds; float64[steps, dp, m], or that with [..., stages] or [..., stages, 3].
        schedule: see ``simulate_pipeline``.
        num_stages: see there.
        num_virtual_stages: see there.
        p2p_seconds: one number, or float64[steps, dp, m].
        activation: float64[steps, dp, m].
        exposed: like ``costs``.

    Returns:
        PipelineSteps.

    Raises:
        WlbError: no replicas; and see ``simulate_pipeline``.

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
    """Deals the micro-batches of a step to data-parallel ranks in equal counts, in an order that suits the schedule,
    so that the slowest rank is done early.

    Deals by cost, then tries sorted orders, swaps and moves in the simulator: never slower than
    ``Packing.deal``, which knows no schedule.

    Args:
        costs: seconds of all micro-batches of a step; float64[M], [M, stages] or [M, stages, 3] as for
            ``simulate_pipeline``.
        dp_size: data-parallel ranks; divides M.
        schedule: see ``simulate_pipeline``.
        num_stages: see there.
        num_virtual_stages: see there.
        p2p_seconds: one number, or float64[M].

    Returns:
        int64[dp_size, M / dp_size]: indices of each rank's micro-batches, the first of each row to go first. So
        ``costs[order]`` is what the ranks run. The same on every rank that has the same costs.

    Raises:
        WlbError: ``dp_size`` does not divide M; and see ``simulate_pipeline``.

    Simulates about a million ops (milliseconds), or four orders of each rank if those are more: at most 2^24 ops
    and one order. Ranks beyond that keep the order of ``Packing.deal``.

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

def keys_plan(
    shard: Shard | ForestShard, rank: int, *, fetch: bool, window: int | None, biased: bool
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
    shard: Shard | ForestShard, rank: int, degree: int, *, window: int | None, biased: bool
) -> tuple[_Indices, list[list[_Call]], list[int], list[int], tuple[list[int], int, NDArray[np.int32]] | None]: ...
def moves_plan(
    before: Shard, after: Shard, rank: int
) -> tuple[NDArray[np.int32], _Rows, list[int], _Rows, list[int]]: ...
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
        group_sizes: "powers_of_two", each from a multiple of its size on; "any": any number of neighbours, which
            worlds of 24 or 48 ranks want, and memory that the longest documents fill; or int[s], the only sizes there
            are, ascending from 1: those that attention runs, from ``wlb.torch.cp_sizes``.
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
