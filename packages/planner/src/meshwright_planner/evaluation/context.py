"""What a search is about: the model, its batch, the cluster, and what the user fixed.

What every part of the search stands on: the setting, what strategies found in the model, and what they are asked.


What strategies find in a model before the search, and where they place parameters themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.model.blocks import parameter_units
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import Link, ModelSizes, SearchRequest, Strategy, Survey
from meshwright_planner.cost.cost_models import CheckedModel, priced
from meshwright_planner.memory.parts import Sizes
from meshwright_planner.trace.batch import Batch

SHARED = "zero"
"""The axis along which ranks share training state."""

MARGIN = 0.03
"""Part by which a prediction of memory may be too low (docs/planner.md): so much of a limit is kept back."""


def kept_back(allowed: int, margin: float = MARGIN) -> int:
    """Bytes that may be predicted of a rank that is allowed so many."""
    return int(allowed / (1 + margin))


def allowing(predicted: int) -> int:
    """The least limit for which a plan of this prediction is called feasible."""
    return math.ceil(predicted * (1 + MARGIN)) + 1


def ended_by(budget: float | None) -> str:
    """What a note says of the time budget that ended a search; nothing where none did."""
    return "" if budget is None else f"; the time budget of {budget:g} s ended the search"


@dataclass(frozen=True)
class Setting:
    """What the search is about.

    Args:
        model, batch: the model and its example batch, of the global size.
        cluster: what it runs on.
        strategies: axis -> strategy, outermost axis first.
        optimizer: name in OPTIMIZERS.
        pins: degrees fixed by the user.
        world_size: number of ranks.
        limit: bytes that may be predicted of one rank.
        allowed: bytes that one rank has; the difference is what predictions may be wrong by.
        stored: searched axis -> parameter name -> state, fixed by the user.
        options: keywords that strategies know by name.
        data: data ranks (the product of the axes dp and zero), fixed by the user.
        stage: what ranks along zero share, fixed by the user; 0 where it is searched.
        precision: in which the model is computed, a name of plan.PrecisionRule; None is its own.
        recompute: a policy or a pattern (see plan), fixed by the user; None is searched.
        sequence_parallel: whether a searched axis splits the sequence between blocks; None is searched.
        time_budget: seconds that the search may take; None for as long as it takes.
        cost_model: says what operations and collectives take; None for the cluster's own figures.
        request: the keywords that were given, for the plan to keep.
    """

    model: nn.Module
    batch: Batch
    cluster: Cluster
    strategies: Mapping[str, Strategy]
    optimizer: str
    pins: Mapping[str, int]
    world_size: int
    limit: int
    allowed: int
    stored: Mapping[str, Mapping[str, State]]
    options: Mapping[str, Any] = field(default_factory=dict)
    data: int | None = None
    stage: int = 0
    precision: str | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    time_budget: float | None = None
    cost_model: CheckedModel | None = None
    request: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> Cluster | None:
        """The cluster whose figures costs follow from; None where nobody knows."""
        return self.cluster if self.cost_model is None else self.cost_model.figures

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the copies that are computed with; None is the parameters' own."""
        return None if self.precision in (None, "fp32") else DTYPES[str(self.precision)]


class Basis:
    """A setting, and what the strategies that it leaves open find in its model."""

    def __init__(self, setting: Setting, surveyed: Surveys) -> None:
        self.setting, self._surveyed = setting, surveyed
        axes = [a for a in setting.strategies if setting.world_size > 1 and setting.pins.get(a) != 1]
        self.surveys = surveyed.of({axis: setting.strategies[axis] for axis in axes})

    @cached_property
    def bytes(self) -> tuple[int, int]:
        """Of the parameters, of all and of those that are trained."""
        every = self.sizes.parameters
        return sum(size for _, size, _ in every), sum(size for _, size, trained in every if trained)

    @cached_property
    def sizes(self) -> Sizes:
        """Of the model."""
        return Sizes.of(self.setting.model)

    @cached_property
    def units(self) -> tuple[tuple[tuple[str, nn.Parameter], ...], ...]:
        """The named parameters of each unit of the model (see units.parameter_units)."""
        return tuple(tuple(own) for _, _, own in parameter_units(self.setting.model))

    def request(self, axis: str | None = None) -> SearchRequest:
        """What strategies may know of the model before anything is decided; `axis`: that of the one that is asked."""
        parameters, trainable = self.bytes
        return SearchRequest(
            world_size=self.setting.world_size,
            batch_size=self.setting.batch.size,
            sequence_length=self.setting.batch.sequence_length,
            sizes=ModelSizes(parameter_bytes=parameters, gradient_bytes=trainable),
            pins=self.setting.pins,
            options=self.setting.options,
            survey=self.surveys.get(axis) if axis is not None else None,
        )

    def link(self, degrees: Mapping[str, int], axis: str | None) -> Link:
        """What a collective along `axis` crosses, or over the product of several ("dp+cp")."""
        spans, stride, own = [], 1, axis.split("+") if axis else []
        for name in reversed(list(degrees)):
            if name in own:
                spans.append((stride, degrees[name]))
            stride *= degrees[name]
        found = self.setting.cluster.link_over(spans[::-1])
        return priced(found, axis, self.setting.cost_model)

    def batch_factor(self, degrees: Mapping[str, int]) -> int:
        """Into how many parts the rows of the batch are divided."""
        return math.prod(s.batch_factor(degrees.get(a, 1)) for a, s in self.setting.strategies.items())

    def batch_states(self, name: str, shape: tuple[int, ...], degrees: Mapping[str, int]) -> dict[str, State]:
        """How a batch tensor lies on each axis of several ranks."""
        left, sizes = list(shape), self.setting.batch.sizes
        found: dict[str, State] = {}
        for axis, strategy in self.setting.strategies.items():
            if degrees[axis] == 1:
                continue
            # an axis further in sees the rows that those further out have left
            seen = (left[0], *shape[1:]) if left else ()
            state = found[axis] = strategy.batch_state(name, seen, sizes, degrees[axis])
            if isinstance(state, int):
                left[state] = -(-left[state] // degrees[axis])
            if sizes.rows is not None:
                sizes = BatchSize(max(1, sizes.rows // strategy.batch_factor(degrees[axis])), sizes.tokens)
        return found

    def rows_axes(self, degrees: Mapping[str, int]) -> tuple[str, ...]:
        """The axes of several ranks that divide the rows of the batch, outermost first."""
        strategies = self.setting.strategies.items()
        return tuple(
            a for a, s in strategies if degrees[a] > 1 and s.batch_factor(degrees[a]) > 1 and not s.divides
        )

    def run_apart(self) -> tuple[str, ...]:
        """Modules that strategies run on the rows that each rank has, whatever they do with them."""
        found = self._surveyed.of(self.setting.strategies)
        return tuple(module for survey in found.values() for module in survey.modules)

    def local_shape(
        self, name: str, shape: tuple[int, ...], degrees: Mapping[str, int], microbatches: int = 1
    ) -> tuple[int, ...]:
        """The shape of a batch tensor as one rank has it, of one of its microbatches."""
        local = list(shape)
        for axis, state in self.batch_states(name, shape, degrees).items():
            if isinstance(state, int):
                local[state] = -(-local[state] // degrees[axis])
        if microbatches > 1 and local and shape[0] == self.setting.batch.size:
            local[0] = -(-local[0] // microbatches)
        return tuple(local)


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
