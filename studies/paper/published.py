"""What was published: WLB-LLM (Wang et al., OSDI'25) and NVIDIA's report on Dynamic-CP, as plain tables.

Figures were read only where the text gives their numbers; a bar that no sentence names is not here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Configuration:
    """A row of table 1."""

    model: str  # a name of wlb.ModelConfig.preset
    context: int  # tokens
    tp: int
    cp: int
    pp: int
    dp: int


def _configuration(model: str, thousands: int, *sizes: int) -> Configuration:
    return Configuration(f"wlb-llm-{model}", thousands * 1024, *sizes)


CONFIGURATIONS = {
    "550M-64K": _configuration("550m", 64, 2, 2, 4, 2),
    "550M-128K": _configuration("550m", 128, 2, 4, 4, 1),
    "7B-64K": _configuration("7b", 64, 4, 2, 4, 1),
    "7B-128K": _configuration("7b", 128, 8, 2, 4, 1),
    "30B-64K": _configuration("30b", 64, 8, 2, 4, 1),
    "30B-128K": _configuration("30b", 128, 8, 4, 4, 1),
    "70B-64K": _configuration("70b", 64, 16, 4, 4, 1),
    "70B-128K": _configuration("70b", 128, 16, 4, 4, 1),
}
"""Table 1: TP, CP, PP, DP. A global batch is PP x DP micro-batches of a context window (section 7.1)."""


@dataclass(frozen=True)
class Packing:
    """A row of table 2 (7B-128K)."""

    imbalance: float  # forward latency of the slowest micro-batch x PP / that of all
    milliseconds: float  # of packing, for each global batch


TABLE_2 = {
    "original": Packing(1.44, 0.0),
    "fixed-length greedy, 1 batch": Packing(1.41, 4.0),
    "fixed-length greedy, 2 batches": Packing(1.22, 5.0),
    "fixed-length greedy, 4 batches": Packing(1.11, 5.0),
    "fixed-length greedy, 8 batches": Packing(1.08, 5.0),
    "solver, 1 batch": Packing(1.40, 467.0),
    "solver, 2 batches": Packing(1.18, 1488.0),
    "solver, 4 batches": Packing(1.09, 25313.0),
    "WLB-LLM, 1 queue": Packing(1.24, 8.0),
    "WLB-LLM, 2 queues": Packing(1.05, 20.0),
    "WLB-LLM, 3 queues": Packing(1.05, 23.0),
}
"""Section 7.4. The greedy's times are published as 4 to 5 ms."""

MEAN_DELAY = 0.5
"""Iterations that WLB-LLM delays a token on average (section 7.4)."""

FIGURE_6 = {8: 1.016}
"""Training loss of packing so many global batches at once, over one, sections 3 and 7.5: on average 1.6 % higher."""

FIGURE_12 = {
    "Fixed-4D": {"mean of Fixed-4D": 1.03},
    "WLB-LLM": {"7B-128K": 1.33, "mean of WLB-LLM": 1.23, "mean of 64K": 1.15, "mean of 128K": 1.30},
    "WLB-LLM over Fixed-4D": {"mean of WLB-LLM over Fixed-4D": 1.19},
}
"""Speed-ups over Plain-4D, section 7.2. 7B-128K is figure 13's last bar, the same experiment."""

FIGURE_13 = {"per-document CP": 1.02, "adaptive CP": 1.05, "packing and delay": 1.28, "all": 1.33}
"""Speed-ups over Plain-4D for 7B-128K, each optimisation alone and all, section 7.3."""

FIGURE_14 = {32: None, 64: None, 96: None, 128: 1.33, 160: 1.40}
"""Speed-ups over Plain-4D for the 7B model by context window in thousands of tokens, section 7.3: said to grow."""

FIGURE_15 = {
    "per-document over per-sequence, 64K": 1.01,
    "per-document over per-sequence, 128K": 1.07,
    "adaptive over per-sequence": 1.075,
    "adaptive over per-document": 1.034,
}
"""One layer of the 7B model at CP 4, forward and backward, section 7.4. Adaptive is over both windows: the mean of the
first two, 1.04, times 1.034 is 1.075."""


@dataclass(frozen=True)
class Throughput:
    """A dataset of table 1 of the Dynamic-CP report: Llama-13B, 2048 sequences a step, PP 8, CP 8, recomputation."""

    packing_only: float  # TFLOP/s a GPU
    dynamic_cp: float

    @property
    def speedup(self) -> float:
        """Of Dynamic-CP over packing only, as the report has it."""
        return round(self.dynamic_cp / self.packing_only, 2)


DYNAMIC_CP = {"GitHub": Throughput(195.88, 289.32), "CommonCrawl": Throughput(139.17, 174.39)}
