"""Marks of users (mark_sharding) as pins of the placement search."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.hints import marks_of
from meshwright_dtensor.model.tied_parameters import tied_names, with_ties
from meshwright_dtensor.sharding.states import State, format_state
from meshwright_planner.placement.legal_rows import Legality


def marked(model: nn.Module, searched: Iterable[str]) -> dict[str, dict[str, State]]:
    """Searched axis -> parameter name -> state that it is marked with there. Raises UsageError: a mark on another axis."""
    axes = tuple(searched)
    marks: dict[str, dict[str, State]] = {axis: {} for axis in axes}
    for name, parameter in model.named_parameters():
        for axis, state in marks_of(parameter).items():
            if axis not in axes:
                shown = with_ties(name, tied_names(model))
                raise UsageError(
                    f"parameter {shown} is marked {format_state(state)} on axis {axis!r}, where placements are not searched; "
                    f"mark it on {' or '.join(map(repr, axes)) or 'no axis'}, or write the rule into the plan"
                )
            marks[axis][name] = state
    return marks


def pinned(legality: Legality, marks: dict[str, State]) -> dict[int, State]:
    """Value of the tape -> state, for the representatives of repeated blocks: a mark on one copy speaks for all.

    Raises UsageError: copies of one block are marked differently, or a mark cannot be had at this degree.
    """
    by_value: dict[int, tuple[str, State]] = {}
    tied = legality.tape.tied
    for name, state in marks.items():
        value = legality.tape.parameters.get(name)
        if value is None:
            continue
        value = legality.quotient.value(value)
        first, other = by_value.setdefault(value, (name, state))
        shown = with_ties(name, tied)
        if other != state:
            raise UsageError(
                f"{with_ties(first, tied)} is marked {format_state(other)} and {shown} {format_state(state)}, but they are copies "
                "in repeated blocks, which are planned alike; mark them alike"
            )
        if state not in legality.parameter_states(value):
            shape = legality.tape.values[value].shape
            raise UsageError(
                f"{shown} of shape {list(shape)} is marked {format_state(state)}, which {legality.costs.degree} ranks "
                "cannot share; pin another degree, or change the mark"
            )
    return {value: state for value, (_, state) in by_value.items()}
