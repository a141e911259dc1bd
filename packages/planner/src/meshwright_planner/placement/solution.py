"""The solution of a placement problem."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright_dtensor.sharding.states import State, States
from meshwright_planner.placement.ilp import Conversion
from meshwright_planner.placement.legal_rows import Option

RESULT = -1
"""The consumer of the model's results, as the node of an edge."""


def along(state: State | States) -> States:
    """The state on each searched axis, outermost first; on one axis, a tuple of the state itself."""
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
        saved_bytes: bytes that autograd saves on one rank.
        status: "optimal", or the solver's message when it stopped early with a solution.
        variables, binaries, rows: size of the program.
        seconds: time to build and solve.
        times: number of microbatches in the counts, seconds and bytes.
        again: representative node -> the fraction of its copies that is recomputed.
        bound: lower bound of the objective, if this placement may not be optimal.
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
    """Seconds of these options with these counts, in all and of the forward pass."""
    parts = [(option.seconds * counts[k], option.forward) for k, option in options.items()]
    return sum(seconds for seconds, _ in parts), sum(seconds * forward for seconds, forward in parts)
