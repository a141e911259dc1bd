"""The records that plugins yield: small frozen dataclasses that name a thing and say where its code is.

A record is cheap: nothing is imported until `load()` is called. `target` is "package.module:attribute". A host holds
`Registered` records, with the distribution of each, and a `Problem` for each plugin that it left out.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Generic, TypeVar

from meshwright_dtensor.errors import PluginError
from meshwright_dtensor.utils.names import did_you_mean

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The fields of every record.

    name: the name by which users choose it, unique among records of its kind.
    target: where the code is, as "package.module:attribute".
    summary: one line for the list of installed plugins.

    Raises PluginError if a field is no text, the name is empty, or the target is not of that form.
    """

    kind: ClassVar[str] = "record"
    # the first-party distribution to suggest if none is installed
    provided_by: ClassVar[str] = ""

    name: str
    target: str
    summary: str = ""

    def __init_subclass__(cls, kind: str = "", provided_by: str = "") -> None:
        cls.kind, cls.provided_by = kind or cls.kind, provided_by or cls.provided_by

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str):
                raise PluginError(f"{type(self).__name__}.{field.name} is {value!r}: it must be text")
        if not self.name or self.name != self.name.strip() or "," in self.name:
            raise PluginError(
                f"{type(self).__name__}.name is {self.name!r}: it must be a word without spaces or commas"
            )
        if not _TARGET.fullmatch(self.target):
            raise PluginError(
                f"{type(self).__name__} {self.name!r} has target {self.target!r}: write 'package.module:attribute'"
            )

    def load(self, distribution: str | None = None) -> Any:
        """Import and return the target.

        distribution: the distribution of the record, for the error message (`Registered.load` passes it).
        Raises PluginError, naming distribution, target and fix, if the module or the attribute is missing or the
        module fails to import.
        """
        return self._imported(self.target, "target", distribution)

    def _imported(self, target: str, field: str, distribution: str | None) -> Any:
        where = (
            f"{self.kind} {self.name!r} of {distribution or 'an unnamed distribution'} has {field} {target!r}"
        )
        fix = f"upgrade {distribution or 'its distribution'}, or set MESHWRIGHT_DISABLE_PLUGINS={distribution or '<its name>'}"
        module_name, _, path = target.partition(":")
        try:
            value: Any = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
                raise PluginError(f"{where}, but there is no module {error.name!r}; {fix}") from error
            raise PluginError(
                f"{where}, which needs the missing module {error.name!r}; install it, or {fix}"
            ) from error
        except (Exception, SystemExit) as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise PluginError(f"{where}, which fails to import ({reason}); {fix}") from error
        for part in path.split("."):
            try:
                value = getattr(value, part)
            except AttributeError as error:
                close = did_you_mean(part, dir(value))
                hint = f" (did you mean {close!r}?)" if close else ""
                raise PluginError(f"{where}, but {part!r} is not there{hint}; {fix}") from error
        return value


@dataclass(frozen=True, kw_only=True)
class StrategySpec(Record, kind="strategy", provided_by="meshwright-parallel"):
    """A way to parallelise along one mesh axis. The target is a `meshwright_dtensor.strategy.Strategy` class.

    axis: the mesh axis it works on, such as "dp" or "tp".
    """

    axis: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.axis.isidentifier():
            raise PluginError(
                f"StrategySpec {self.name!r} has axis {self.axis!r}: name a mesh axis, such as 'tp'"
            )


@dataclass(frozen=True, kw_only=True)
class PlannerSpec(Record, kind="planner", provided_by="meshwright-planner"):
    """A planner. The target is a `meshwright_dtensor.strategy.Planner` class."""


@dataclass(frozen=True, kw_only=True)
class CostModelSpec(Record, kind="cost model", provided_by="meshwright-planner"):
    """A cost model: how long an operation or a collective takes on a cluster.

    The target takes a `meshwright_dtensor.cluster.Cluster` and returns a `meshwright_dtensor.cluster.CostModel`.
    """


@dataclass(frozen=True, kw_only=True)
class ClusterSpec(Record, kind="cluster", provided_by="meshwright-planner"):
    """A cluster that plans can be made for. The target is a `meshwright_dtensor.cluster.Cluster`."""


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec(Record, kind="schedule", provided_by="meshwright-pipeline"):
    """A pipeline schedule."""


@dataclass(frozen=True, kw_only=True)
class BackendSpec(Record, kind="checkpoint backend", provided_by="meshwright-checkpoint"):
    """A checkpoint backend: where and how a checkpoint's bytes are kept."""


@dataclass(frozen=True, kw_only=True)
class OpRuleSpec(Record, kind="op rule", provided_by="meshwright-dtensor"):
    """Sharding rules for operators. The target is what `meshwright_dtensor.rules` documents.

    examples: "package.module:function" of a function without arguments that yields calls of these operators, (function,
        arguments), for the conformance suite, which tries every row on them.
    """

    examples: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.examples and not _TARGET.fullmatch(self.examples):
            raise PluginError(
                f"OpRuleSpec {self.name!r} has examples {self.examples!r}: write 'package.module:function'"
            )

    def load_examples(self, distribution: str | None = None) -> Any:
        """Import and return the function; PluginError as for `load`."""
        return self._imported(self.examples, "examples", distribution)


@dataclass(frozen=True, kw_only=True)
class PlacementSpec(Record, kind="placement", provided_by="meshwright-dtensor"):
    """A placement: how one mesh axis splits a tensor."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec(Record, kind="device", provided_by="meshwright-dtensor"):
    """A type of device, by the name that torch has for it, such as "xpu". The target is a `meshwright_dtensor.devices.Device`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.name.isidentifier() or self.name != self.name.lower():
            raise PluginError(
                f"DeviceSpec.name is {self.name!r}: give the type as torch.device has it, such as 'xpu', without an index"
            )


@dataclass(frozen=True, kw_only=True)
class CommandSpec(Record, kind="command", provided_by="meshwright"):
    """A subcommand of `meshwright`. The target is a callable, as the command line documents."""


R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Registered(Generic[R]):
    """A record and the distribution that registered it."""

    record: R
    distribution: str
    version: str
    entry_point: str

    @property
    def name(self) -> str:
        """The record's name."""
        return self.record.name

    def load(self) -> Any:
        """Import and return the record's target. PluginError names distribution, target and fix."""
        return self.record.load(self.distribution)


@dataclass(frozen=True)
class Problem:
    """A plugin, or a part of one, that was left out, and why."""

    distribution: str
    version: str
    entry_point: str
    reason: str

    def __str__(self) -> str:
        who = f"{self.distribution} {self.version}".strip()
        point = f" (entry point {self.entry_point!r})" if self.entry_point else ""
        return f"{who}{point}: {self.reason}"
