"""What searches of one model have in common, whatever else they are asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright_dtensor.plan.plan import RecomputeRule
from meshwright_planner.placing.placement import Placement, PlacementProblem
from meshwright_planner.profile.tape import Tape
from meshwright_planner.profile.tapes import Tapes
from meshwright_planner.search.surveys import Surveys


@dataclass
class Shared:
    """What was recorded and solved once serves every variant of a search: more ranks, fewer rows, another optimizer.

    Args:
        surveys: what strategies find in the model.
        tapes: by the shapes of a batch.
        problems: by links, tape, searched axes with their degrees, whether there is a mesh to pay for, and the axes that place
            parameters themselves; without the links and those axes, the first of them.
        placements: by problem and optimizer.
        models: by all but the sizes: a problem, and a placement that others start from.
        rules: request for recomputation -> its rules.
        blocks: patterns of the blocks that repeat, None before they are asked for.
        named: names of those blocks, None before they are asked for.
        tape: one of the tapes, for what is the same in all of them; None before it is asked for.
        end: when the time of the search is over (time.monotonic), None before it has begun.
    """

    surveys: Surveys
    tapes: Tapes = field(default_factory=Tapes)
    problems: dict[tuple[object, ...], PlacementProblem] = field(default_factory=dict)
    placements: dict[tuple[object, ...], Placement] = field(default_factory=dict)
    models: dict[tuple[object, ...], tuple[PlacementProblem, Placement]] = field(default_factory=dict)
    rules: dict[str, tuple[RecomputeRule, ...]] = field(default_factory=dict)
    blocks: tuple[str, ...] | None = None
    named: tuple[str, ...] | None = None
    tape: Tape | None = None
    end: float | None = None
