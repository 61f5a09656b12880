"""What training takes on a cluster, under each method: `wlb.simulate`, `wlb.simulation.tune`."""

from wlb._choices import Schedule
from wlb.simulation.balance import ATTENTION_RATES
from wlb.simulation.layouts import LayoutSearch, search_layouts
from wlb.simulation.outcome import ATTRIBUTION, Outcome
from wlb.simulation.planner import planner_options
from wlb.simulation.run import Simulation, simulate
from wlb.simulation.scenario import Scenario
from wlb.simulation.tuning import KINDS, Choice, Objective, Tuning, tune
from wlb.simulation.variants import DEFAULT, VARIANTS, Variant, defaults
from wlb.simulation.words import assumptions, explanation, premises

__all__ = [
    "ATTENTION_RATES",
    "ATTRIBUTION",
    "DEFAULT",
    "KINDS",
    "VARIANTS",
    "Choice",
    "LayoutSearch",
    "Objective",
    "Outcome",
    "Scenario",
    "Schedule",
    "Simulation",
    "Tuning",
    "Variant",
    "assumptions",
    "defaults",
    "explanation",
    "planner_options",
    "premises",
    "search_layouts",
    "simulate",
    "tune",
]
