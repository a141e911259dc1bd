"""The records of the plugins that are checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import PluginHost, Registered
from meshwright_dtensor.plugins.records import Problem
from meshwright_dtensor.utils.names import canonical, did_you_mean, listing


def chosen(
    host: PluginHost, names: Sequence[str]
) -> tuple[dict[str, list[Registered[Any]]], dict[str, list[Problem]]]:
    """Distribution -> its records, and its problems, of the plugins that have one of `names`; all if there are none.

    A name is that of a distribution, an entry point or a record. Raises UsageError for a name that nothing has.
    """
    records = host.everything()
    wanted = {canonical(name): name for name in names}
    matched: set[str] = set()

    def is_wanted(*plugin_names: str) -> bool:
        matching = wanted.keys() & {canonical(name) for name in plugin_names if name}
        matched.update(matching)
        return bool(matching) or not wanted

    by_distribution: dict[str, list[Registered[Any]]] = {}
    for record in records:
        if is_wanted(record.distribution, record.entry_point, record.name):
            by_distribution.setdefault(record.distribution, []).append(record)
    problems: dict[str, list[Problem]] = {}
    for problem in host.problems:
        if is_wanted(problem.distribution, problem.entry_point):
            problems.setdefault(problem.distribution, []).append(problem)
    if missing := [wanted[key] for key in wanted.keys() - matched]:
        names_there = sorted({*(r.distribution for r in records), *(r.name for r in records)})
        close = did_you_mean(missing[0], names_there)
        hint = f"did you mean {close!r}?" if close else f"installed: {listing(names_there)}"
        raise UsageError(
            f"--plugin {missing[0]}: no installed plugin has that name; {hint} "
            "(pip install -e its folder first, and give its entry point the group 'meshwright')"
        )
    return by_distribution, problems
