"""The search context: the search problem as the user gave it, and what strategies find in the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.model.blocks import parameter_units
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.plan import CompileRule
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import Link, ModelSizes, SearchRequest, Strategy, Survey
from meshwright_planner.cost.cost_models import CheckedModel, priced
from meshwright_planner.cost.optimizers import states_per_byte
from meshwright_planner.memory.parts import Sizes
from meshwright_planner.trace.batch import Batch

Degrees: TypeAlias = Mapping[str, int]
"""Mesh axis -> degree, of every axis."""

SHARED = "zero"
"""The axis along which ranks share training state."""

MARGIN = 0.03
"""Part by which predicted memory may be too low (docs/planner.md). This part of a memory limit is kept back."""


def kept_back(allowed: int, margin: float = MARGIN) -> int:
    """Bytes that may be predicted for a rank with this memory limit."""
    return int(allowed / (1 + margin))


def allowing(predicted: int) -> int:
    """The smallest memory limit for which a plan with this prediction is feasible."""
    return math.ceil(predicted * (1 + MARGIN)) + 1


def ended_by(budget: float | None) -> str:
    """The end of a note about a search that the time budget ended; empty where none did."""
    return "" if budget is None else f"; the time budget of {budget:g} s ended the search"


@dataclass(frozen=True)
class Setting:
    """The search problem: the model, its batch, the cluster, and what the user pinned.

    Args:
        batch: an example, of the global size.
        strategies: axis -> strategy, outermost axis first.
        optimizer: a name of cost.optimizers.
        pins: degrees fixed by the user.
        limit: bytes that may be predicted for one rank.
        allowed: bytes that one rank has. The difference to `limit` covers errors of predictions.
        stored: searched axis -> parameter name -> state, pinned by the user.
        options: keywords that strategies know by name.
        data: data ranks (the product of the axes dp and zero), pinned by the user.
        stage: ZeRO stage, pinned by the user; 0 where it is searched.
        unit: what shards along zero do not cut, as in the plan; costs are those of equal chunks.
        precision: a name of plan.PrecisionRule in which the model is computed; None is its own.
        recompute: a policy or a pattern (see plan), pinned by the user; None is searched.
        compiled: modules whose calls run compiled, None: those that a plan chooses; costs are those of calls that do not.
        rng: as in the plan.
        sequence_parallel: whether a searched axis splits the sequence between blocks; None is searched.
        time_budget: seconds that the search may take; None is no limit.
        cost_model: predicts the seconds of operations and collectives; None uses the cluster's own figures.
        request: the keywords of the request, which the plan keeps.
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
    unit: int | str | None = None
    precision: str | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    compiled: tuple[CompileRule, ...] | None = ()
    rng: Literal["exact", "fast"] = "exact"
    time_budget: float | None = None
    cost_model: CheckedModel | None = None
    request: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def states(self) -> float:
        """Bytes of optimizer states by those of trained parameters."""
        return states_per_byte(self.optimizer, self.model)

    @property
    def training_bytes(self) -> float:
        """Bytes of parameter, gradient and optimizer states by those of trained parameters."""
        return 2.0 + self.states

    @property
    def figures(self) -> Cluster | None:
        """The cluster whose figures the costs use; None where a cost model does not say."""
        return self.cluster if self.cost_model is None else self.cost_model.figures

    def zero_stages(self, degrees: Degrees) -> tuple[int, ...]:
        """The ZeRO stages to try with these degrees, the fastest first."""
        if degrees.get(SHARED, 1) <= 1:
            return (0,)
        return (self.stage,) if self.stage else (2, 3)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of compute copies; None is the dtype of the parameters."""
        return None if self.precision in (None, "fp32") else DTYPES[str(self.precision)]


class Basis:
    """A setting, the surveys of its strategies, and the facts of model and batch that all configurations share."""

    def __init__(self, setting: Setting, surveys: Surveys) -> None:
        self.setting, self._surveys = setting, surveys
        axes = [a for a in setting.strategies if setting.world_size > 1 and setting.pins.get(a) != 1]
        self.surveys = surveys.of({axis: setting.strategies[axis] for axis in axes})

    @cached_property
    def bytes(self) -> tuple[int, int]:
        """Bytes of all parameters, and of the trained ones."""
        sizes = self.sizes.parameters
        return sum(size for _, size, _ in sizes), sum(size for _, size, trained in sizes if trained)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of the model's parameters."""
        return Sizes.of(self.setting.model)

    @cached_property
    def units(self) -> tuple[tuple[tuple[str, nn.Parameter], ...], ...]:
        """The named parameters of each unit of the model (see blocks.parameter_units)."""
        return tuple(tuple(named) for _, _, named in parameter_units(self.setting.model))

    def floor_bytes(self, degrees: Degrees | None = None) -> float:
        """The least bytes of a rank while the optimizer steps: its part of parameters, gradients and states.

        `degrees`: replicas along axes that only sum gradients hold the same; without degrees the model is divided over all
        ranks.
        """
        parts = self.setting.world_size
        if degrees is not None:
            strategies = self.setting.strategies.items()
            sums = {axis for axis, s in strategies if s.gradient == "deferred" and not s.gathers}
            sums -= {axis for axis, survey in self.surveys.items() if survey.parameters}
            parts = math.prod(d for axis, d in degrees.items() if axis not in sums)
        parameters, trained = self.bytes
        return (parameters + trained * (1 + self.setting.states)) / parts

    def request(self, axis: str | None = None) -> SearchRequest:
        """The request to strategies before anything is decided; `axis`: of the strategy that is asked."""
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

    def link(self, degrees: Degrees, axis: str) -> Link:
        """The link of a collective along `axis`, or along several axes at once ("dp+cp")."""
        spans, stride, axes = [], 1, axis.split("+")
        for name in reversed(list(degrees)):
            if name in axes:
                spans.append((stride, degrees[name]))
            stride *= degrees[name]
        return priced(self.setting.cluster.link_over(spans[::-1]), axis, self.setting.cost_model)

    def batch_factor(self, degrees: Degrees) -> int:
        """The number of parts into which the axes divide the rows of the batch."""
        return math.prod(s.batch_factor(degrees.get(a, 1)) for a, s in self.setting.strategies.items())

    def batch_states(self, name: str, shape: tuple[int, ...], degrees: Degrees) -> dict[str, State]:
        """Axis of several ranks -> state of a batch tensor on it."""
        left, sizes = list(shape), self.setting.batch.sizes
        states: dict[str, State] = {}
        for axis, strategy in self.setting.strategies.items():
            if degrees[axis] == 1:
                continue
            # an inner axis divides the rows that the outer axes leave to a rank
            local = (left[0], *shape[1:]) if left else ()
            state = states[axis] = strategy.batch_state(name, local, sizes, degrees[axis])
            if isinstance(state, int):
                left[state] = -(-left[state] // degrees[axis])
            if sizes.rows is not None:
                sizes = BatchSize(max(1, sizes.rows // strategy.batch_factor(degrees[axis])), sizes.tokens)
        return states

    def rows_axes(self, degrees: Degrees) -> tuple[str, ...]:
        """The axes of several ranks that divide the rows of the batch, outermost first."""
        strategies = [(a, s) for a, s in self.setting.strategies.items() if degrees[a] > 1 and not s.divides]
        return tuple(axis for axis, strategy in strategies if strategy.batch_factor(degrees[axis]) > 1)

    def strategy_modules(self) -> tuple[str, ...]:
        """Names of the modules that strategies run themselves, on the rows of each rank."""
        surveys = self._surveys.of(self.setting.strategies)
        return tuple(module for survey in surveys.values() for module in survey.modules)

    def local_shape(
        self, name: str, shape: tuple[int, ...], degrees: Degrees, microbatches: int = 1
    ) -> tuple[int, ...]:
        """The shape of a batch tensor on one rank, in one microbatch."""
        local = list(shape)
        for axis, state in self.batch_states(name, shape, degrees).items():
            if isinstance(state, int):
                local[state] = -(-local[state] // degrees[axis])
        if microbatches > 1 and local and shape[0] == self.setting.batch.size:
            local[0] = -(-local[0] // microbatches)
        return tuple(local)


class Surveys:
    """The surveys of one model. Each strategy is asked once for all variants of a search."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_axis: dict[str, Survey | None] = {}

    def of(self, strategies: Mapping[str, Strategy]) -> dict[str, Survey]:
        """axis -> what its strategy found in the model, where it found something."""
        for axis, strategy in strategies.items():
            if axis not in self._by_axis:
                self._by_axis[axis] = strategy.survey(self._model)
        surveys = {axis: self._by_axis[axis] for axis in strategies}
        return {axis: survey for axis, survey in surveys.items() if survey is not None}


def placements(
    strategies: Mapping[str, Strategy], surveys: Mapping[str, Survey], degrees: Degrees
) -> dict[str, dict[str, str]]:
    """Parameter name -> mesh axis -> state as text, of the parameters that strategies place themselves."""
    placed: dict[str, dict[str, str]] = {}
    for axis, survey in surveys.items():
        if degrees[axis] > 1:
            for name, states in strategies[axis].placements(survey, degrees).items():
                placed.setdefault(name, {}).update(states)
    return placed
