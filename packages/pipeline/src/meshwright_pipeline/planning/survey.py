"""The planning survey of a model: its units, and which unit holds which parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from meshwright_dtensor.model.tied_parameters import all_names
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec, discover
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Schedule
from meshwright_dtensor.strategy import ModuleWork, SearchRequest, Survey
from meshwright_dtensor.utils.memo import Memo
from meshwright_dtensor.utils.names import listing
from meshwright_pipeline.analysis.loss_preview import LossChecker, LossForecast
from meshwright_pipeline.analysis.row_mixing import CannotSplit, find_row_mixing
from meshwright_pipeline.module_state import holders
from meshwright_pipeline.partition.boundaries import divided_state
from meshwright_pipeline.partition.units import (
    called_by_units,
    called_in_parts,
    find_units,
    whole_batch_module,
)
from meshwright_pipeline.planning.unit_costs import ModelCosts, model_costs
from meshwright_pipeline.trace.side_outputs import CannotBeCut

MOST_PARAMETERS = 1 << 30
"""Models with more parameters are not tested for row mixing when planning: it would take as long as the search. The first
step tests them."""


@dataclass(frozen=True)
class ModelSurvey:
    """The survey of a model. Results that take time are cached in it.

    Attributes:
        units: names of its units, in the order of registration.
        names, sizes: first name of a parameter -> all its names; -> its bytes.
        opened: modules whose children are units instead (see units.find_units).
        nested: units that other units call (see units.called_by_units).
    """

    units: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    opened: frozenset[str] = frozenset()
    nested: frozenset[str] = frozenset()
    _unit: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)
    _forecasts: dict[bool, LossForecast] = field(default_factory=dict, init=False, repr=False, compare=False)
    _cannot: list[str] = field(default_factory=list, init=False, repr=False, compare=False)

    def at(self, calls: frozenset[tuple[str, str]] | None) -> ModelSurvey:
        """The same with the units for these module calls; see PipelineQuery.calls."""
        if calls is None or self.model is None:
            return self
        entry = self._at.get(id(calls))
        if entry is None or entry[0] is not calls:
            survey = self
            while more := called_in_parts(self.model, survey.units, calls):
                opened = survey.opened | more
                survey = replace(survey, units=find_units(self.model, opened).names, opened=opened)
            survey = _with_several(survey, self.model, frozenset(called for _, called in calls))
            nested = called_by_units(self.model, survey.units, calls)
            survey = replace(survey, nested=nested) if nested else survey
            survey = next((cached for _, cached in self._at.values() if cached == survey), survey)
            entry = self._at[id(calls)] = calls, survey
        return entry[1]

    @cached_property
    def _at(self) -> dict[int, tuple[frozenset[tuple[str, str]], ModelSurvey]]:
        return {}

    @cached_property
    def module_names(self) -> Mapping[str, tuple[str, ...]]:
        """First name of a module that has several -> all its names."""
        names: dict[nn.Module, list[str]] = {}
        for name, module in () if self.model is None else self.model.named_modules(remove_duplicate=False):
            names.setdefault(module, []).append(name)
        return {aliases[0]: tuple(aliases) for aliases in names.values() if len(aliases) > 1}

    @cached_property
    def holding(self) -> frozenset[str]:
        """The units with parameters. Each stage needs at least one."""
        return frozenset(self.unit(alias) for aliases in self.names.values() for alias in aliases) - {""}

    @cached_property
    def most(self) -> int:
        """The most stages that units can fill. Which parts of an only unit are called, and may be units instead, is seen later."""
        if len(self.holding) != 1 or self.model is None:
            return len(self.holding)
        direct = (next(part.parameters(recurse=False), None) for part in self.model.modules())
        return sum(parameter is not None for parameter in direct)

    def too_few(self, units: Collection[str]) -> str:
        """Why stages cannot be filled with these units."""
        names = [unit for unit in self.units if unit in units]
        return (
            f"each stage needs a module with parameters, and this model has {len(names)} that can be placed on a stage "
            f"({listing(names, 4)}): the members of a ModuleList or Sequential of modules of one class, and every other module "
            "with parameters that contains no such list. Keep layers in such lists, or use a smaller degree"
        )

    def unnamed(self, named: Iterable[Sequence[str]]) -> list[str]:
        """Opened modules without a `named` child. In a plan they are shared: every stage holds their direct parameters."""
        names = [unit for units in named for unit in units]
        return [at for at in sorted(self.opened) if not any(unit.startswith(f"{at}.") for unit in names)]

    def unit(self, module: str) -> str:
        """The unit that contains a module or parameter; "" if none does."""
        if module not in self._unit:
            parts, units = module.split("."), self._unit_names
            names = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
            self._unit[module] = next((name for name in names if name in units), "")
        return self._unit[module]

    @cached_property
    def _unit_names(self) -> frozenset[str]:
        return frozenset(self.units)

    @cached_property
    def inside(self) -> Mapping[str, frozenset[str]]:
        """Unit -> first names of its parameters; "" -> those outside of units."""
        inside: dict[str, set[str]] = {}
        for name, aliases in self.names.items():
            for alias in aliases:
                inside.setdefault(self.unit(alias), set()).add(name)
        return {unit: frozenset(names) for unit, names in inside.items()}

    @cached_property
    def trained(self) -> frozenset[str]:
        """First names of the parameters that require a gradient."""
        if self.model is None:
            return frozenset(self.names)
        return frozenset(names[0] for names, parameter in all_names(self.model) if parameter.requires_grad)

    def share(self, names: frozenset[str]) -> float:
        """The share of these parameters (first names) in all parameter bytes."""
        total = self._memo.once("bytes", lambda: sum(self.sizes.values()) or 1)
        return self._memo.once(names, lambda: sum(map(self.sizes.__getitem__, names)) / total)

    def stages_each(self, schedule: Schedule, ranks: int) -> int:
        """Stages per rank: the smallest number that divides the layers equally, if the schedule allows several numbers."""
        each = range(schedule.stages_each, schedule.most_each + 1)
        equal = (number for number in each if self.layers % (ranks * number) == 0)
        return next(equal, schedule.stages_each) if self.layers else schedule.stages_each

    @cached_property
    def layers(self) -> int:
        """Length of the longest list whose members are units or contain units; 0 if there is none."""
        lists: dict[str, set[str]] = {}
        for unit in self.units:
            parts = unit.split(".")
            at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
            if at is not None:
                lists.setdefault(".".join(parts[:at]), set()).add(parts[at])
        return max(map(len, lists.values()), default=0)

    def schedule(self, name: str) -> Schedule:
        """The installed schedule of this name, cached."""
        return self._memo.once(("schedule", name), lambda: schedule_named(name, self._host))

    @cached_property
    def installed(self) -> tuple[str, ...]:
        """Names of the installed schedules."""
        return tuple(self._host.all(ScheduleSpec))

    @cached_property
    def _host(self) -> PluginHost:
        """The plugin host, discovered once for a search."""
        return discover()

    def loss_forecast(
        self, example: tuple[tuple[Any, ...], Mapping[str, Any]] | None, single: bool, estimate: bool = False
    ) -> LossForecast | None:
        """The forecast for the loss, cached; None without an example batch.

        `single`: see LossChecker. `estimate`: a forecast for the other value of `single` will do.

        Raises CannotBeCut: the model cannot run as a pipeline.
        """
        if example is None or self.model is None:
            return None
        if estimate and self._forecasts:
            return self._forecasts.get(single, next(iter(self._forecasts.values())))
        if self._cannot:
            raise CannotBeCut(self._cannot[0])
        if single not in self._forecasts:
            try:
                self._forecasts[single] = self._loss_checker.check(example, single)
            except CannotBeCut as error:
                self._cannot.append(str(error))
                raise
        return self._forecasts[single]

    def divided(self, stages: Iterable[Sequence[str]], everywhere: Collection[str]) -> str | None:
        """Why units cannot be on these stages, or on all; None if they can, as far as `loss_forecast` has seen the model."""
        keeping = self._loss_checker.keeping if self.loss_checked else {}
        return divided_state(keeping, list(stages), everywhere, self._holders) if keeping else None

    @cached_property
    def _holders(self) -> dict[str, frozenset[str]]:
        return {} if self.model is None else holders(self.model, self.units)

    @property
    def loss_checked(self) -> bool:
        """Whether there is a cached forecast for the loss."""
        return bool(self._forecasts or self._cannot)

    @cached_property
    def whole_batch(self) -> str | None:
        """Why a module needs the whole batch at once; None if none does."""
        return None if self.model is None else whole_batch_module(self.model)

    def row_mixing(self, example: tuple[tuple[Any, ...], Mapping[str, Any]] | None) -> CannotSplit | None:
        """Why the batch cannot be split, cached; None without an example batch, and for large models."""
        if example is None or self.model is None:
            return None
        model, units = self.model, self.units
        numel = self._memo.once("numel", lambda: sum(parameter.numel() for parameter in model.parameters()))
        if numel > MOST_PARAMETERS:
            return None
        return self._memo.once("row mixing", lambda: find_row_mixing(model, units, example))

    @cached_property
    def _loss_checker(self) -> LossChecker:
        assert self.model is not None
        return LossChecker(self.model, self.units)

    def costs(self, work: tuple[ModuleWork, ...]) -> ModelCosts:
        """The costs of the model by unit, cached for the same work."""
        return self._memo.once(("costs", id(work)), lambda: model_costs(work, self))


def _with_several(survey: ModelSurvey, model: nn.Module, called: frozenset[str]) -> ModelSurvey:
    """With the children of the only unit with parameters as units instead, and so on, where all of them are called."""
    while len(survey.holding) == 1:
        opened = survey.opened | survey.holding
        finer = replace(survey, units=find_units(model, opened).names, opened=opened)
        if not finer.holding or not finer.holding <= called:
            break
        survey = finer
    return survey


def survey_of(request: SearchRequest) -> ModelSurvey | None:
    """The survey of the model of a request; None if the request has none."""
    if request.survey is None:
        return None
    details: ModelSurvey = request.survey.details
    return details.at(request.pipeline.calls)


def survey(model: nn.Module) -> Survey:
    """Survey the units and parameters of a model."""
    parameters = all_names(model)
    names = {aliases[0]: aliases for aliases, _ in parameters}
    sizes = {aliases[0]: p.numel() * p.element_size() for aliases, p in parameters}
    return Survey(details=ModelSurvey(find_units(model).names, names, sizes, model))
