"""The plugin host: the records of all installed plugins, by name.

A host is a value: `discover()` builds it and the caller keeps it. Nothing is global, so hosts with different plugins can
exist at the same time. Building one takes milliseconds, since only `Registered.load()` imports the target of a record.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, cast

from meshwright_dtensor.errors import PluginError
from meshwright_dtensor.plugins import records as specs
from meshwright_dtensor.plugins.hookspec import GROUP, RECORD_TYPES
from meshwright_dtensor.plugins.records import Problem, R, Record, Registered
from meshwright_dtensor.plugins.registration import DISABLE, Collector, search_one_by_one
from meshwright_dtensor.utils.names import did_you_mean, listing


def _all_of(record_type: type[R], text: str) -> Callable[[PluginHost], dict[str, Registered[R]]]:
    """A method that returns the records of one type; ``text`` is its documentation."""

    def records(self: PluginHost) -> dict[str, Registered[R]]:
        return self.all(record_type)

    records.__doc__ = text
    return records


class PluginHost:
    """All records of the installed plugins. Build it with `discover()`; it is immutable.

    problems: what is broken, one entry each; a broken plugin never stops the others.
    disabled: the entry points that MESHWRIGHT_DISABLE_PLUGINS turned off, as "distribution:entry point".
    """

    def __init__(
        self,
        records: Mapping[type[Record], Mapping[str, Registered[Any]]],
        problems: Iterable[Problem] = (),
        disabled: Iterable[str] = (),
    ) -> None:
        self._records = MappingProxyType(
            {kind: MappingProxyType(dict(by_name)) for kind, by_name in records.items()}
        )
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.disabled: tuple[str, ...] = tuple(disabled)

    @classmethod
    def build(
        cls,
        entry_points: Iterable[importlib.metadata.EntryPoint],
        disabled: Collection[str] = (),
        problems: Iterable[Problem] = (),
    ) -> PluginHost:
        """Import the plugins of `entry_points`, except those named in `disabled`, and collect their records.

        disabled: entry point or distribution names. They are never imported.
        problems: problems of the search for entry points.
        Raises PluginError for a misspelt hook and for a name that is registered twice.
        """
        return cls(*Collector(disabled, problems).collect(entry_points))

    def all(self, record_type: type[R]) -> dict[str, Registered[R]]:
        """Every record of one type, by name, in alphabetical order."""
        by_name: Mapping[str, Registered[Any]] = self._records.get(record_type, {})
        return {name: cast("Registered[R]", by_name[name]) for name in sorted(by_name)}

    strategies = _all_of(specs.StrategySpec, "Strategies by name.")
    planners = _all_of(specs.PlannerSpec, "Planners by name.")
    cost_models = _all_of(specs.CostModelSpec, "Cost models by name.")
    clusters = _all_of(specs.ClusterSpec, "Clusters by name.")
    schedules = _all_of(specs.ScheduleSpec, "Pipeline schedules by name.")
    checkpoint_backends = _all_of(specs.BackendSpec, "Checkpoint backends by name.")
    op_rules = _all_of(specs.OpRuleSpec, "Operator rules by name.")
    placements = _all_of(specs.PlacementSpec, "Placements by name.")
    devices = _all_of(specs.DeviceSpec, "Types of devices by name.")
    commands = _all_of(specs.CommandSpec, "Subcommands by name.")

    def get(self, record_type: type[R], name: str) -> Registered[R]:
        """The record of that type and name. PluginError says what was meant, or what to install."""
        by_name = self.all(record_type)
        if name in by_name:
            return by_name[name]
        kind = record_type.kind
        if not by_name:
            text = f"{kind} {name!r}: no {kind} is installed; pip install {record_type.provided_by or 'one'}"
        else:
            close = did_you_mean(name, by_name)
            hint = f"; did you mean {close!r}?" if close else ";"
            text = f"there is no {kind} named {name!r}{hint} installed: {listing(by_name)}"
        if self.disabled:
            text += f"; {DISABLE} turned off {listing(self.disabled)}"
        if self.problems:
            broken = (f"{problem.distribution} ({problem.reason})" for problem in self.problems)
            text += f"; left out as broken: {listing(broken, 2)}"
        raise PluginError(text)

    def everything(self) -> list[Registered[Any]]:
        """Every record, ordered by kind and name."""
        types = RECORD_TYPES.values()
        return [registered for record_type in types for registered in self.all(record_type).values()]


def discover(disabled: Collection[str] | None = None) -> PluginHost:
    """A new host of every plugin that is installed now (entry points of the group "meshwright").

    disabled: entry point or distribution names to leave unimported; None reads MESHWRIGHT_DISABLE_PLUGINS, a comma
        separated list.
    Nothing is cached: keep the host for as long as you need it.
    Raises PluginError for a misspelt hook and for a name that is registered twice.
    """
    if disabled is None:
        disabled = [name.strip() for name in os.environ.get(DISABLE, "").split(",") if name.strip()]
    points: Iterable[importlib.metadata.EntryPoint]
    problems: list[Problem] = []
    try:
        points = importlib.metadata.entry_points(group=GROUP)
    # one distribution with unreadable metadata stops the search; it must not hide the others
    except Exception:
        points, problems = search_one_by_one()
    return PluginHost.build(points, disabled, problems)
