"""The report as one HTML file that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import wlb
from wlb.cli.output.tables import METHOD_NOTES, Table, cp_table, method_table

if TYPE_CHECKING:
    from wlb.cli.output.packing import Report

_FIGURES = (
    ("mean imbalance", "imbalance_mean", ".2f"),
    ("imbalance of the worst step", "imbalance_worst", ".2f"),
    ("iterations that a token waits, mean", "delay_mean", ".2f"),
    ("µs to plan a step, median", "planning_microseconds", ",.0f"),
)
_CSS = """
:root { color-scheme: light; --ink: #24292f; --soft: #57606a; --line: #d8dee4; --blue: #0a5c91;
  --rust: #c2482e; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 2.5rem 1.5rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
p { margin: .25rem 0; max-width: 80ch; }
.soft, .notes { color: var(--soft); font-size: .9rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(190px, 1fr)); gap: 1rem;
  margin: 1.75rem 0; }
.figures div { border-top: 3px solid var(--blue); padding-top: .5rem; }
.figures b { display: block; font-size: 1.7rem; line-height: 1.2; font-variant-numeric: tabular-nums; }
.figures s { color: var(--rust); text-decoration: none; font-weight: 600; }
.scroll { overflow-x: auto; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; color: var(--soft); font-size: .85rem; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead tr:last-child th, tbody td { border-bottom: 1px solid var(--line); }
thead tr:first-child th { text-align: center; }
tr.strong td { color: var(--blue); font-weight: 600; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 0 2rem; }
h3 { font-size: 1rem; margin: 1rem 0 .25rem; }
.facts { width: 100%; }
.facts td { text-align: left; white-space: normal; overflow-wrap: break-word; }
.facts td:first-child { color: var(--soft); }
pre { background: #f6f8fa; padding: .8rem 1rem; overflow-x: auto; border-radius: 6px; font-size: .9rem; }
"""


def page(report: Report, svg: str, command_line: str) -> str:
    """The page of packings side by side; `svg` is the picture."""
    before, after = report.plans[0].summary(), report.shown.summary()
    title = f"Work imbalance {before['imbalance_mean']:.2f} → {after['imbalance_mean']:.2f}"
    results = report.as_json()
    figures = [figure(label, f"{before[key]:{form}}", f"{after[key]:{form}}", "→") for label, key, form in _FIGURES]
    return document(
        name=report.name,
        subject=report.shown.name,
        title=title,
        sentences=report.sentences(),
        figures=figures,
        body=(
            svg,
            table(method_table(report.plans)),
            notes(METHOD_NOTES),
            table(cp_table(report.balances, report.shown)),
        ),
        command_line=command_line,
        facts={
            "Settings": {**report.settings, **_thresholds(report)},
            "Documents": results["documents"],
            "Machine": {"wlb": wlb.__version__, **results["machine"]},
        },
    )


def document(
    *,
    name: str,
    subject: str,
    title: str,
    sentences: Sequence[str],
    figures: Sequence[str],
    body: Sequence[str],
    command_line: str,
    facts: Mapping[str, Mapping[str, Any]],
) -> str:
    """A page: `figures` and `body` are HTML, `facts` tables of names and values at the end."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>wlb {name}: {escape(title)}</title>
<style>{_CSS}</style>
</head>
<body><main>
<p class="soft">wlb {name} · {escape(subject)}</p>
<h1>{escape(title)}</h1>
{"".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)}
<div class="figures">
{"".join(figures)}
</div>
{"".join(body)}
<h2>How this was made</h2>
<pre>{escape(command_line)}</pre>
<div class="columns">
{"".join(_facts(heading, values) for heading, values in facts.items())}
</div>
</main></body>
</html>
"""


def figure(label: str, before: str, after: str, between: str) -> str:
    """A number that stands out, and what it was before."""
    return f"<div><b><s>{escape(before)}</s> {between} {escape(after)}</b>{escape(label)}</div>"


def notes(sentences: Sequence[str]) -> str:
    """Small print."""
    return f'<div class="notes">{"".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)}</div>'


def table(table: Table) -> str:
    """A table, its title above it."""
    groups = "".join(f'<th colspan="{width}">{escape(text)}</th>' for text, width in table.groups)
    columns = "".join(f"<th>{escape(text)}</th>" for text in table.columns)
    rows = []
    for i, row in enumerate(table.rows):
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        rows.append(f'<tr class="strong">{cells}</tr>' if i in table.strong else f"<tr>{cells}</tr>")
    return f"""<h2>{escape(table.title)}</h2>
<div class="scroll"><table>
<thead><tr>{groups}</tr><tr>{columns}</tr></thead>
<tbody>{"".join(rows)}</tbody>
</table></div>"""


def _thresholds(report: Report) -> dict[str, str]:
    return {
        f"thresholds: {plan.name}": ", ".join(f"{t:,}" for t in plan.thresholds)
        for plan in report.plans
        if plan.thresholds
    }


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    rows = (
        f"<tr><td>{escape(name.replace('_', ' '))}</td><td>{escape(_value(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f'<div><h3>{title}</h3><table class="facts"><tbody>{"".join(rows)}</tbody></table></div>'


def _value(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:,.6g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
