"""What strategies find in a model before the search, and where they place parameters themselves."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from meshwright_dtensor.strategy.strategy import Strategy, Survey


class Surveys:
    """What strategies find in one model, each asked once; a variant of a search shares them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._found: dict[str, Survey | None] = {}

    def of(self, strategies: Mapping[str, Strategy]) -> dict[str, Survey]:
        """axis -> what its strategy found in the model, where it found something."""
        for axis, strategy in strategies.items():
            if axis not in self._found:
                self._found[axis] = strategy.survey(self._model)
        found = {axis: self._found[axis] for axis in strategies}
        return {axis: survey for axis, survey in found.items() if survey is not None}


def placements(
    strategies: Mapping[str, Strategy], surveyed: Mapping[str, Survey], degrees: Mapping[str, int]
) -> dict[str, dict[str, str]]:
    """Parameter name -> mesh axis -> state as text, of what strategies place themselves with these degrees."""
    found: dict[str, dict[str, str]] = {}
    for axis, survey in surveyed.items():
        if degrees[axis] > 1:
            for name, states in strategies[axis].placements(survey, degrees).items():
                found.setdefault(name, {}).update(states)
    return found
