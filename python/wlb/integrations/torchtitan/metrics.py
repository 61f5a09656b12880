"""What the plans of the steps say, for torchtitan's own loggers."""

from __future__ import annotations

from wlb.integrations.torchtitan.loader import WlbDataLoader


def plan_metrics(loader: WlbDataLoader) -> dict[str, float]:
    """Of the steps since the last call, by the names that TensorBoard and Weights & Biases show.

    Returns:
        `wlb/imbalance`, mean over the steps; `wlb/lost_time`, of them all together; `wlb/tokens_per_step`;
        `wlb/backlog_tokens` after the last one; of the whole run `wlb/delay_mean` and `wlb/delay_max`, in iterations.
        The first three are missing if there was no step.
    """
    reports = list(loader.reports)
    loader.reports.clear()
    found: dict[str, float] = {}
    if reports:
        found["wlb/imbalance"] = sum(report.heaviest / report.mean for report in reports) / len(reports)
        found["wlb/lost_time"] = sum(report.heaviest for report in reports) / sum(report.mean for report in reports)
        found["wlb/tokens_per_step"] = sum(report.tokens for report in reports) / len(reports)
        found["wlb/backlog_tokens"] = reports[-1].waiting
    run = loader.steps.metrics()
    return found | {"wlb/delay_mean": run.delay_mean, "wlb/delay_max": run.delay_max}
