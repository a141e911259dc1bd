"""What every part of the search stands on: the setting, what strategies found in the model, and what they are asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

from torch import nn

from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.model.blocks import parameter_units
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy.strategy import Link, SearchRequest
from meshwright_planner.costs.memory import Sizes
from meshwright_planner.costs.models import priced
from meshwright_planner.search.setting import Setting
from meshwright_planner.search.surveys import Surveys


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
            parameter_bytes=parameters,
            gradient_bytes=trainable,
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
