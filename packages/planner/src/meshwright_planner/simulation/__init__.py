"""Event simulation of a plan on a cluster: schedules, collectives, slow ranks, faulty links."""

from __future__ import annotations

from meshwright_planner.simulation.faults import LinkFault, Straggler, parse_link_fault, parse_straggler
from meshwright_planner.simulation.replay import Simulation, simulate

__all__ = ["LinkFault", "Simulation", "Straggler", "parse_link_fault", "parse_straggler", "simulate"]
