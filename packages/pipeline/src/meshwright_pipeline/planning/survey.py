"""What planning a pipeline needs to know of a model: its units, and who holds which parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import nn

from meshwright_dtensor.model.tied_parameters import all_names
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec, discover
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Schedule
from meshwright_dtensor.strategy import ModuleWork, SearchRequest, Survey
from meshwright_pipeline.analysis.loss_preview import LossChecker, LossForecast
from meshwright_pipeline.analysis.row_mixing import CannotSplit, find_row_mixing
from meshwright_pipeline.partition.units import batch_norm_module, called_in_parts, find_units
from meshwright_pipeline.planning.unit_costs import ModelCosts, model_costs
from meshwright_pipeline.trace.side_outputs import CannotBeCut

MOST_PARAMETERS = 1 << 30
"""Parameters up to which rows are looked at when planning: of larger models that takes as long as the search, and waits for a
first step."""


@dataclass(frozen=True)
class ModelSurvey:
    """What planning needs to know of a model.

    Attributes:
        units: names of its units, in the order of registration.
        names: first name of a parameter -> all its names.
        sizes: first name of a parameter -> its bytes.
        model: whose they are.
        opened: modules of which others call parts: they are no units (see units.find_units).
    """

    units: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    model: nn.Module | None = field(default=None, repr=False, compare=False)
    opened: frozenset[str] = frozenset()

    def at(self, calls: frozenset[tuple[str, str]] | None) -> ModelSurvey:
        """The same with the units of a model that calls its modules like this; see PipelineQuery.calls."""
        if calls is None or self.model is None:
            return self
        found = self._at.get(id(calls))
        if found is None or found[0] is not calls:
            found = self._at[id(calls)] = calls, self._opened(calls)
        return found[1]

    def _opened(self, calls: frozenset[tuple[str, str]]) -> ModelSurvey:
        assert self.model is not None
        known = self
        while more := called_in_parts(known.units, calls):
            opened = known.opened | more
            known = replace(known, units=find_units(self.model, opened).names, opened=opened)
        return next((one for _, one in self._at.values() if one == known), known)

    @cached_property
    def _at(self) -> dict[int, tuple[frozenset[tuple[str, str]], ModelSurvey]]:
        return {}

    @cached_property
    def holding(self) -> frozenset[str]:
        """The units with parameters: a stage needs one of them."""
        return frozenset(self.unit(alias) for aliases in self.names.values() for alias in aliases) - {""}

    def unnamed(self, named: Iterable[Sequence[str]]) -> list[str]:
        """Opened modules of which no part is `named`: a plan says of them that every stage holds what they hold themselves."""
        names = [unit for own in named for unit in own]
        return [at for at in sorted(self.opened) if not any(unit.startswith(f"{at}.") for unit in names)]

    def unit(self, module: str) -> str:
        """The unit that a module, or a parameter, lies in; "" where there is none."""
        if module not in self._unit:
            parts, own = module.split("."), self._own
            names = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
            self._unit[module] = next((name for name in names if name in own), "")
        return self._unit[module]

    @cached_property
    def _own(self) -> frozenset[str]:
        return frozenset(self.units)

    @cached_property
    def _unit(self) -> dict[str, str]:
        return {}

    @cached_property
    def inside(self) -> Mapping[str, frozenset[str]]:
        """Unit -> first names of the parameters in it, "" for those in none."""
        found: dict[str, set[str]] = {}
        for name, aliases in self.names.items():
            for alias in aliases:
                found.setdefault(self.unit(alias), set()).add(name)
        return {unit: frozenset(names) for unit, names in found.items()}

    @cached_property
    def trained(self) -> frozenset[str]:
        """First names of the parameters that require a gradient."""
        if self.model is None:
            return frozenset(self.names)
        return frozenset(own[0] for own, parameter in all_names(self.model) if parameter.requires_grad)

    def share(self, names: frozenset[str]) -> float:
        """The part of all bytes of parameters that these are, by their first names."""
        if names not in self._shares:
            self._shares[names] = sum(map(self.sizes.__getitem__, names)) / self._bytes
        return self._shares[names]

    @cached_property
    def _shares(self) -> dict[frozenset[str], float]:
        return {}

    @cached_property
    def _bytes(self) -> int:
        return sum(self.sizes.values()) or 1

    def stages_each(self, schedule: Schedule, ranks: int) -> int:
        """How many stages each rank gets: as few as cut the layers equally, where the schedule takes any number."""
        each = range(schedule.stages_each, schedule.most_each + 1)
        equal = (number for number in each if self.layers % (ranks * number) == 0)
        return next(equal, schedule.stages_each) if self.layers else schedule.stages_each

    @cached_property
    def layers(self) -> int:
        """How many members the longest list of units has, or of what holds some; 0 where there is none."""
        lists: dict[str, set[str]] = {}
        for unit in self.units:
            parts = unit.split(".")
            at = next((place for place, part in enumerate(parts) if part.isdigit()), None)
            if at is not None:
                lists.setdefault(".".join(parts[:at]), set()).add(parts[at])
        return max(map(len, lists.values()), default=0)

    def schedule(self, name: str) -> Schedule:
        """The installed schedule of this name, looked for once."""
        if name not in self._schedules:
            self._schedules[name] = schedule_named(name, self._host)
        return self._schedules[name]

    @cached_property
    def _schedules(self) -> dict[str, Schedule]:
        return {}

    @cached_property
    def installed(self) -> tuple[str, ...]:
        """Names of the schedules that are installed."""
        return tuple(self._host.all(ScheduleSpec))

    @cached_property
    def _host(self) -> PluginHost:
        """What is installed, looked for once for a search."""
        return discover()

    def foreseen(
        self, example: tuple[tuple[Any, ...], Mapping[str, Any]] | None, single: bool, rough: bool = False
    ) -> LossForecast | None:
        """What there is to know of the loss, found once; None without an example batch.

        `single`: see LossChecker; `rough`: what is known of microbatches of one row will do for those of more, or the other way.

        Raises:
            CannotBeCut: no first step could run the model as a pipeline.
        """
        if example is None or self.model is None:
            return None
        if rough and self._foreseen:
            return self._foreseen.get(single, next(iter(self._foreseen.values())))
        if self._cannot:
            raise CannotBeCut(self._cannot[0])
        if single not in self._foreseen:
            try:
                self._foreseen[single] = self._lookout.check(example, single)
            except CannotBeCut as error:
                self._cannot.append(str(error))
                raise
        return self._foreseen[single]

    @property
    def looked(self) -> bool:
        """Whether the model has been looked at: asking what is foreseen of its loss costs nothing then."""
        return bool(self._foreseen or self._cannot)

    @cached_property
    def _cannot(self) -> list[str]:
        return []

    @cached_property
    def normalising(self) -> str | None:
        """A module that normalises by the statistics of the batch that it is given; None where there is none."""
        return None if self.model is None else batch_norm_module(self.model)

    def rowless(self, example: tuple[tuple[Any, ...], Mapping[str, Any]] | None) -> CannotSplit | None:
        """What mixes rows, or is written for each microbatch, found once; None without an example batch, and of large models."""
        if example is None or self.model is None:
            return None
        if not self._rowless:
            large = sum(parameter.numel() for parameter in self.model.parameters()) > MOST_PARAMETERS
            self._rowless.append(None if large else find_row_mixing(self.model, self.units, example))
        return self._rowless[0]

    @cached_property
    def _rowless(self) -> list[CannotSplit | None]:
        return []

    @cached_property
    def _lookout(self) -> LossChecker:
        assert self.model is not None
        return LossChecker(self.model, self.units)

    @cached_property
    def _foreseen(self) -> dict[bool, LossForecast]:
        return {}

    def read(self, work: tuple[ModuleWork, ...]) -> ModelCosts:
        """What there is to divide, found once for the same work."""
        found = self._read.get(id(work))
        if found is None or found.work is not work:
            found = self._read[id(work)] = model_costs(work, self, self.holding)
        return found

    @cached_property
    def _read(self) -> dict[int, ModelCosts]:
        return {}


def survey_of(request: SearchRequest) -> ModelSurvey | None:
    """What is known of the model that a request is about; None where it holds no survey."""
    if request.survey is None:
        return None
    found: ModelSurvey = request.survey.details
    return found.at(request.pipeline.calls)


def survey(model: nn.Module) -> Survey:
    """Look at the units of a model."""
    every = all_names(model)
    names = {own[0]: own for own, _ in every}
    sizes = {own[0]: parameter.numel() * parameter.element_size() for own, parameter in every}
    return Survey(details=ModelSurvey(find_units(model).names, names, sizes, model))
