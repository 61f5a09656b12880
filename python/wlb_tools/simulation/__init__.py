"""Predicts training time on a cluster, for each method: `wlb_tools.simulate`, `wlb_tools.simulation.tune`."""

from wlb._choices import Schedule
from wlb_tools.simulation.balance import ATTENTION_RATES
from wlb_tools.simulation.layouts import LayoutSearch, search_layouts
from wlb_tools.simulation.loader_plans import LoaderTuning, tune_loader
from wlb_tools.simulation.outcome import ATTRIBUTION, Outcome
from wlb_tools.simulation.planner import planner_options
from wlb_tools.simulation.run import Simulation, simulate
from wlb_tools.simulation.scenario import Scenario
from wlb_tools.simulation.tuning import KINDS, Choice, Objective, Tuning, tune
from wlb_tools.simulation.variants import DEFAULT, VARIANTS, Variant, defaults
from wlb_tools.simulation.words import assumptions, explanation, premises

__all__ = [
    "ATTENTION_RATES",
    "ATTRIBUTION",
    "DEFAULT",
    "KINDS",
    "VARIANTS",
    "Choice",
    "LayoutSearch",
    "LoaderTuning",
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
    "tune_loader",
]
