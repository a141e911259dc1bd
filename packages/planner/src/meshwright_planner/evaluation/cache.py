"""Recorded runs and solved placements that all variants of a search share."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright_dtensor.plan import RecomputeRule
from meshwright_planner.evaluation.context import Surveys
from meshwright_planner.evaluation.tapes import Tapes
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.trace.tape import Tape


@dataclass
class SearchCache:
    """Recorded and solved once for every variant of a search: more ranks, fewer rows, another optimizer.

    Args:
        surveys: what strategies find in the model.
        tapes: by the shapes of a batch.
        problems: by links, tape, searched axes with their degrees, whether a mesh adds dispatch time, and the axes whose
            strategies place parameters themselves. The first problem is also stored without the links and those axes.
        placements: by problem and optimizer.
        models: by everything except sizes: a problem and its placement, from which others are scaled.
        rules: value of `recompute` -> its rules.
        patterns: patterns of the repeated blocks; None before they are computed.
        blocks: names of the repeated blocks; None before they are computed.
        tape: any tape, for facts that are equal in all of them; None before one is recorded.
        end: time.monotonic() at which the time budget is spent; None before the search has begun.
    """

    surveys: Surveys
    tapes: Tapes = field(default_factory=Tapes)
    problems: dict[tuple[object, ...], PlacementProblem] = field(default_factory=dict)
    placements: dict[tuple[object, ...], Placement] = field(default_factory=dict)
    models: dict[tuple[object, ...], tuple[PlacementProblem, Placement]] = field(default_factory=dict)
    rules: dict[str, tuple[RecomputeRule, ...]] = field(default_factory=dict)
    patterns: tuple[str, ...] | None = None
    blocks: tuple[str, ...] | None = None
    tape: Tape | None = None
    end: float | None = None
