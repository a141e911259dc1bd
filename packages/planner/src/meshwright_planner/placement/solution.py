"""What a search for placements answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright_dtensor.sharding.states import State, States
from meshwright_planner.placement.ilp import Conversion
from meshwright_planner.placement.legal_rows import Option

RESULT = -1
"""Stands for whoever receives the model's results, as the consumer of an edge."""


def along(state: State | States) -> States:
    """The state on each searched axis, outermost first: of a search on one, the state itself."""
    return state if isinstance(state, tuple) else (state,)


@dataclass
class Placement:
    """A solution.

    Args:
        options: representative node -> its option.
        stored: representative parameter value -> its state.
        conversions: the collectives between nodes.
        compute_seconds, communication_seconds: of one step on one rank, over all repetitions.
        forward_seconds: of the compute seconds, those of the forward pass.
        saved_bytes: what autograd keeps on one rank.
        status: "optimal", or the solver's message when it stopped early with a solution.
        variables, binaries, rows: size of the program.
        seconds: time to build and solve.
        times: microbatches that the counts, seconds and bytes are of.
        again: representative node -> the part of its copies that runs twice, where some do.
        bound: an objective that no placement goes below, where this one need not be the best.
    """

    options: dict[int, Option]
    stored: dict[int, State]
    conversions: list[Conversion]
    compute_seconds: float
    forward_seconds: float
    communication_seconds: float
    saved_bytes: float
    status: str
    variables: int
    binaries: int
    rows: int
    seconds: float
    objective: float
    times: int = 1
    again: Mapping[int, float] = field(default_factory=dict)
    bound: float | None = None


def seconds_of(options: Mapping[int, Option], counts: Mapping[int, int]) -> tuple[float, float]:
    """Seconds that these take, so many of each, and those of the forward pass."""
    every = [(option.seconds * counts[k], option.forward) for k, option in options.items()]
    return sum(seconds for seconds, _ in every), sum(seconds * forward for seconds, forward in every)
