"""The differences between two plans, as lines of text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from meshwright_dtensor.plan.fields import PlanFields, call_text
from meshwright_dtensor.plan.serialization import identity


def diff(old: PlanFields, new: PlanFields) -> list[str]:
    """The changes from `old` to `new`, a line each; empty exactly if the two are equal."""
    lines: list[str] = []
    _compare("", identity(old), identity(new), lines)
    return lines


# lists whose entries are compared by name, so that a change of order does not hide other changes
_KEYS: dict[str, Callable[[dict[str, Any]], str]] = {
    "recompute": lambda rule: json.dumps(rule["pattern"]),
    "compile": lambda rule: json.dumps(rule["pattern"]),
    "parameters": lambda rule: json.dumps(rule["pattern"]),
    "experts": lambda rule: json.dumps(rule["module"]),
    "activations": lambda rule: (
        f"{json.dumps(rule['module'])} {call_text(rule['function'], rule['occurrence'], rule.get('forward'))}"
    ),
}


def _compare(path: str, old: Any, new: Any, lines: list[str]) -> None:
    if isinstance(old, dict) and isinstance(new, dict):
        _compare_items(path, ".{}" if path else "{}", old, new, lines)
        # elsewhere the order of keys has no meaning
        if path == "degrees":
            _compare_order(path, old, new, lines)
    elif isinstance(old, list) and isinstance(new, list):
        name = _KEYS.get(path)
        before, after = ({name(item): item for item in items} if name else {} for items in (old, new))
        # names may repeat
        if len(before) == len(old) and len(after) == len(new):
            _compare_items(path, " {}", before, after, lines, named=True)
            _compare_order(path, before, after, lines)
        else:
            _compare_items(path, "[{}]", dict(enumerate(old)), dict(enumerate(new)), lines)
    elif type(old) is not type(new) or old != new:
        lines.append(f"{path}: {json.dumps(old)} -> {json.dumps(new)}")


def _compare_items(
    path: str, suffix: str, old: dict[Any, Any], new: dict[Any, Any], lines: list[str], named: bool = False
) -> None:
    """Compare by key; `named`: the key is in the items, so what was added or removed shows it."""
    for key in dict.fromkeys((*old, *new)):
        inner = path + suffix.format(key)
        if key in old and key in new:
            _compare(inner, old[key], new[key], lines)
        else:
            change, items = ("removed", old) if key in old else ("added", new)
            lines.append(f"{path if named else inner}: {change} {json.dumps(items[key])}")


def _compare_order(path: str, old: dict[Any, Any], new: dict[Any, Any], lines: list[str]) -> None:
    """The order of mesh axes counts, and that of rules, since the first match wins."""
    kept_old, kept_new = [key for key in old if key in new], [key for key in new if key in old]
    if kept_old != kept_new:
        lines.append(f"{path}: order {', '.join(map(str, kept_old))} -> {', '.join(map(str, kept_new))}")
