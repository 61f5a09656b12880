"""A simulation as tables."""

import itertools

import wlb
from wlb.cli.output.tables import Table
from wlb.hardware import GIB

NOTES = (
    "All times are predictions; the kernel model that they rest on is named above. per-document CP, adaptive CP,"
    " packing, placement: that optimisation alone, on Plain-4D.",
    "tokens/s: all tokens of the stream over the time of all its steps, of the whole cluster, on the same documents;"
    " the steps at the end that empty the queues count in full. MFU: FLOPs of the documents as they are trained over"
    " what the GPUs could do in that time. Methods that cut documents do less attention for the same tokens.",
    "step: seconds of one, and micro-batches of a rank in it, both in the mean. WLB, finer: twice the micro-batches of"
    " the same documents, each half as long. fitted, and all below: costs are fitted to the cluster.",
    "imbalance: MB: predicted time of the heaviest micro-batch over the mean of its step, mean over steps; CP:"
    " attention of the slowest context-parallel rank over the mean rank. Dynamic-CP makes the first and last"
    " micro-batch light, which shortens the pipeline's bubble.",
    "delay: iterations from the arrival of a token's global batch to its training. GiB: the fullest GPU, in its fullest"
    " step.",
)


def variant_table(simulation: wlb.Simulation, strong: str) -> Table:
    """Speed, balance, delay and memory."""
    rows = []
    for name, outcome in simulation.outcomes.items():
        s = outcome.summary()
        rows.append(
            (
                outcome.title,
                _speed(s["tokens_per_second"]),
                f"{simulation.speedup(name):.3f}",
                f"{s['model_flops_utilization']:.1%}",
                f"{s['step_seconds_mean']:.3g}",
                f"{s['micro_batches_mean']:.3g}",
                f"{s['micro_batch_imbalance_mean']:.3f}",
                f"{s['cp_imbalance']:.3f}",
                f"{s['delay_mean']:.2f}",
                f"{s['delay_max']:,}",
                f"{s['peak_bytes'] / GIB:.1f}",
            )
        )
    return Table(
        title="Predicted speed, balance and delay",
        groups=(("", 1), ("throughput", 3), ("step", 2), ("imbalance", 2), ("delay", 2), ("memory", 1)),
        columns=("method", "tokens/s", "x", "MFU", "s", "n", "MB", "CP", "mean", "max", "GiB"),
        rows=tuple(rows),
        strong=frozenset(i for i, name in enumerate(simulation.outcomes) if name == strong),
    )


_PARTS = {
    "compute": ("", "compute"),
    "cp_communication": ("communication", "CP"),
    "tp_communication": ("communication", "TP"),
    "dp_communication": ("communication", "DP"),
    "cp_wait": ("waiting", "slowest CP"),
    "bubble": ("waiting", "bubble"),
    "dp_wait": ("waiting", "slowest DP"),
}
"""A group and a column for each part of the time."""


def time_table(simulation: wlb.Simulation, strong: str) -> Table:
    """Shares of a GPU's time, in per cent; what nobody spends time on is left out."""
    shares = {name: outcome.summary()["attribution"] for name, outcome in simulation.outcomes.items()}
    shown = [part for part in _PARTS if any(of[part] >= 0.0005 for of in shares.values())]
    groups = itertools.groupby(_PARTS[part][0] for part in shown)
    return Table(
        title="What a GPU's time goes to (%)",
        groups=(("", 1), *((group, len(list(members))) for group, members in groups)),
        columns=("method", *(_PARTS[part][1] for part in shown)),
        rows=tuple(
            (simulation.outcomes[name].title, *(f"{100 * of[part]:.1f}" for part in shown))
            for name, of in shares.items()
        ),
        strong=frozenset(i for i, name in enumerate(shares) if name == strong),
    )


def _speed(tokens_per_second: float) -> str:
    return f"{tokens_per_second:,.0f}"
