"""Builds a plugin host: imports each plugin, checks its hooks, calls them, and records what is broken."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from typing import Any, cast

import pluggy

from meshwright_dtensor.errors import PluginError
from meshwright_dtensor.plugins.hook_api import DECLARATION, refusal
from meshwright_dtensor.plugins.hookspec import GROUP, PREFIX, RECORD_TYPES, HookSpecs
from meshwright_dtensor.plugins.records import Problem, Record, Registered
from meshwright_dtensor.utils.names import canonical, did_you_mean, listing, suggestion

DISABLE = "MESHWRIGHT_DISABLE_PLUGINS"
Records = dict[type[Record], dict[str, Registered[Any]]]


@dataclass(frozen=True)
class _Source:
    """Where a plugin comes from."""

    distribution: str
    version: str
    entry_point: str

    @property
    def names(self) -> dict[str, str]:
        """The names that turn it off, by their normalized form."""
        return {canonical(name): name for name in (self.entry_point, self.distribution)}

    def problem(self, reason: str) -> Problem:
        fix = f"; to skip it set {DISABLE}={self.entry_point}"
        return Problem(self.distribution, self.version, self.entry_point, " ".join(reason.split()) + fix)


class Collector:
    """Imports plugins and collects their records and problems."""

    def __init__(self, disabled: Collection[str], problems: Iterable[Problem] = ()) -> None:
        self._disabled = {canonical(name): name for name in disabled}
        self._problems = list(problems)
        self._skipped: list[str] = []
        # raised together once all plugins are checked
        self._errors: list[str] = []
        self._records: Records = {kind: {} for kind in RECORD_TYPES.values()}

    def collect(
        self, entry_points: Iterable[metadata.EntryPoint]
    ) -> tuple[Records, list[Problem], list[str]]:
        """Records by type and name, problems, and the disabled entry points. See `PluginHost.build`."""
        manager = pluggy.PluginManager(GROUP)
        manager.add_hookspecs(HookSpecs)
        sources: dict[str, _Source] = {}
        # a fixed order, so that every rank and every run reports the same thing
        located = sorted(
            ((_source(point), point) for point in entry_points),
            key=lambda pair: (canonical(pair[0].distribution), pair[0].entry_point),
        )
        self._check_disabled([source for source, _ in located])
        for source, point in located:
            plugin_name = f"{source.distribution}:{source.entry_point}={point.value}"
            if not self._disabled.keys().isdisjoint(source.names):
                self._skipped.append(f"{source.distribution}:{source.entry_point}")
            # it may be there: the same distribution seen twice on sys.path
            elif plugin_name not in sources and self._register(manager, plugin_name, source, point):
                sources[plugin_name] = source
        for hook in RECORD_TYPES:
            for implementation in getattr(manager.hook, hook).get_hookimpls():
                self._call(sources[implementation.plugin_name], hook, implementation)
        if self._errors:
            raise PluginError("; ".join(self._errors))
        return self._records, self._problems, self._skipped

    def _check_disabled(self, sources: list[_Source]) -> None:
        installed = {key: name for source in sources for key, name in source.names.items()}
        for key, name in self._disabled.items():
            if key not in installed:
                names = installed.values()
                hint = suggestion(name, names) or f"; installed: {listing(sorted(names))}"
                reason = f"no installed plugin is named {name!r}{hint}"
                self._problems.append(Problem(DISABLE, "", "", reason))

    def _register(
        self, manager: pluggy.PluginManager, name: str, source: _Source, point: metadata.EntryPoint
    ) -> bool:
        """Import one plugin and register it. False if it is broken, which is recorded."""
        try:
            plugin = point.load()
            misspelt = list(filter(None, (_check_name(plugin, attribute) for attribute in dir(plugin))))
        except (Exception, SystemExit) as error:
            self._problems.append(source.problem(f"{point.value!r} fails to import: {_describe(error)}"))
            return False
        if misspelt:
            fix = f"correct it, or set {DISABLE}={source.entry_point}"
            self._errors.append(f"plugin {_who(source)}: {'; '.join(misspelt)}; {fix}")
            return False
        refused = refusal(getattr(plugin, DECLARATION, None))
        if refused is not None:
            self._problems.append(source.problem(refused))
            return False
        try:
            manager.register(plugin, name)
        except Exception as error:
            # a hook that takes arguments, or one object announced twice
            if manager.has_plugin(name):
                manager.unregister(name=name)
            self._problems.append(source.problem(f"cannot be registered: {_describe(error)}"))
            return False
        return True

    def _call(self, source: _Source, hook: str, implementation: pluggy.HookImpl) -> None:
        if implementation.hookwrapper or implementation.wrapper:
            reason = f"{hook} is a hook wrapper; yield records from a plain hook instead"
            self._problems.append(source.problem(reason))
            return
        function = cast("Callable[[], Iterable[object]]", implementation.function)
        try:
            produced = list(function())
        except (Exception, SystemExit) as error:
            # all of a hook's records or none
            self._problems.append(source.problem(f"{hook} raised {_describe(error)}"))
            return
        record_type = RECORD_TYPES[hook]
        for record in produced:
            if not isinstance(record, record_type):
                shown = type(record).__name__
                reason = f"{hook} yielded a {shown}; it must yield {record_type.__name__}"
                self._problems.append(source.problem(reason))
                continue
            new = Registered(record, source.distribution, source.version, source.entry_point)
            old = self._records[record_type].setdefault(record.name, new)
            if old is not new:
                self._errors.append(
                    f"{record.kind} {record.name!r} is registered twice, by {_who(old)} and by {_who(new)}; turn one off: "
                    f"set {DISABLE}={_turn_off(old, new)} or {DISABLE}={_turn_off(new, old)}"
                )


def search_one_by_one() -> tuple[list[metadata.EntryPoint], list[Problem]]:
    """The entry points of every distribution whose metadata can be read, and a problem for every other."""
    points: dict[str, list[metadata.EntryPoint]] = {}
    problems = []
    for distribution in metadata.distributions():
        name, version = _name_and_version(distribution)
        try:
            entry_points = list(distribution.entry_points.select(group=GROUP))
        except Exception as error:
            reason = f"its entry points cannot be read: {_describe(error)}"
            problems.append(Problem(name, version, "", reason))
            continue
        # the first on sys.path is imported
        points.setdefault(canonical(name), entry_points)
    return list(chain.from_iterable(points.values())), problems


def _name_and_version(distribution: metadata.Distribution) -> tuple[str, str]:
    try:
        return str(distribution.metadata["Name"] or "unnamed distribution"), str(distribution.version or "")
    except Exception:
        # no METADATA file
        return "unnamed distribution", ""


def _source(point: metadata.EntryPoint) -> _Source:
    name, version = _name_and_version(point.dist) if point.dist is not None else ("unnamed distribution", "")
    return _Source(name, version, point.name)


def _check_name(plugin: object, attribute: str) -> str | None:
    """What is wrong with one attribute of a plugin as a hook, or None."""
    if attribute.startswith("__"):
        return None
    value = getattr(plugin, attribute, None)
    # what pluggy's marker leaves on a function
    options = getattr(value, f"{GROUP}_impl", None)
    marked = isinstance(options, dict)
    if isinstance(options, dict) and (options.get("optionalhook") or options.get("specname") in RECORD_TYPES):
        # optional for older hosts, or the hook is named
        return None
    if attribute in RECORD_TYPES:
        if callable(value) and not marked:
            return f"{attribute} is not marked as a hook: put @hookimpl above it"
        return None
    if marked or (attribute.startswith(PREFIX) and callable(value)):
        # compared without the common prefix, which would make all names similar
        by_rest = {name.removeprefix(PREFIX): name for name in RECORD_TYPES}
        close = did_you_mean(attribute.partition("_")[2], by_rest)
        hint = f"did you mean {by_rest[close]!r}?" if close else f"the hooks are {', '.join(RECORD_TYPES)}"
        return f"there is no hook {attribute!r}; {hint}"
    return None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _who(source: _Source | Registered[Any]) -> str:
    return f"{source.distribution} {source.version} (entry point {source.entry_point!r})"


def _turn_off(registered: Registered[Any], other: Registered[Any]) -> str:
    """A name that turns off `registered` but not `other`."""
    if canonical(registered.entry_point) != canonical(other.entry_point):
        return registered.entry_point
    return registered.distribution
