"""The differences between two plans, as lines of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from meshwright_dtensor.plan.fields import PlanFields
from meshwright_dtensor.plan.serialization import identity


def diff(old: PlanFields, new: PlanFields) -> list[str]:
    """The changes from `old` to `new`, a line each; empty exactly if the two are equal."""
    lines: list[str] = []
    _compare("", identity(old), identity(new), lines)
    return lines


# lists whose entries are compared by name, so that a change of order does not hide other changes
_KEYS: dict[str, Callable[[dict[str, Any]], str]] = {
    "recompute": lambda rule: json.dumps(rule["pattern"]),
    "parameters": lambda rule: json.dumps(rule["pattern"]),
    "experts": lambda rule: json.dumps(rule["module"]),
    "activations": lambda rule: f"{json.dumps(rule['module'])} {rule['function']} #{rule['occurrence']}",
}


def _compare(path: str, old: Any, new: Any, lines: list[str]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        _compare_dicts(path, old, new, lines)
    elif isinstance(old, list) and isinstance(new, list):
        if path in _KEYS and _compare_named(path, old, new, lines):
            return
        _compare_dicts(path, dict(enumerate(old)), dict(enumerate(new)), lines)
    elif type(old) is not type(new) or old != new:
        lines.append(f"{path}: {_show(old)} -> {_show(new)}")


def _compare_dicts(path: str, old: dict[Any, Any], new: dict[Any, Any], lines: list[str]) -> None:
    for key in [*old, *(key for key in new if key not in old)]:
        place = f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}" if path else str(key)
        if key not in new:
            lines.append(f"{place}: removed {_show(old[key])}")
        elif key not in old:
            lines.append(f"{place}: added {_show(new[key])}")
        else:
            _compare(place, old[key], new[key], lines)
    # elsewhere the order of keys has no meaning
    if path == "degrees":
        _compare_order(path, list(old), list(new), lines)


def _compare_named(path: str, old: list[Any], new: list[Any], lines: list[str]) -> bool:
    """Compare by name. False if names repeat, then they are compared by position."""
    name = _KEYS[path]
    before, after = {name(item): item for item in old}, {name(item): item for item in new}
    if len(before) != len(old) or len(after) != len(new):
        return False
    for key in [*before, *(key for key in after if key not in before)]:
        if key not in after:
            lines.append(f"{path}: removed {_show(before[key])}")
        elif key not in before:
            lines.append(f"{path}: added {_show(after[key])}")
        else:
            _compare(f"{path} {key}", before[key], after[key], lines)
    _compare_order(path, list(before), list(after), lines)
    return True


def _compare_order(path: str, old: list[Any], new: list[Any], lines: list[str]) -> None:
    """The order of mesh axes counts, and that of rules, since the first match wins."""
    kept_old, kept_new = [key for key in old if key in new], [key for key in new if key in old]
    if kept_old != kept_new:
        lines.append(f"{path}: order {', '.join(map(str, kept_old))} -> {', '.join(map(str, kept_new))}")


def _show(value: Any) -> str:
    return json.dumps(value)
