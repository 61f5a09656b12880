"""What training takes on a cluster, under each method: `wlb.simulate`, `wlb.simulation.tune`."""

from wlb.simulation.run import Simulation, simulate
from wlb.simulation.scenario import Scenario, Schedule
from wlb.simulation.score import ATTRIBUTION, Outcome
from wlb.simulation.tuning import Choice, Tuning, tune
from wlb.simulation.variants import VARIANTS, Variant

__all__ = [
    "ATTRIBUTION",
    "VARIANTS",
    "Choice",
    "Outcome",
    "Scenario",
    "Schedule",
    "Simulation",
    "Tuning",
    "Variant",
    "simulate",
    "tune",
]
