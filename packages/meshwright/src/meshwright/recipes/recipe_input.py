"""From the words of the command line to a recipe. Everything that is wrong is reported at once, each with its place."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from meshwright.recipes.schema import Recipe, plan_table, source_table
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.names import count_of
from meshwright_dtensor.utils.schema_errors import fields_at, path_text, problem_of

Places = dict[tuple[str, ...], str]
"""Path of a field -> where it was written."""

MAX_VALUES = 100_000
"""In a recipe of YAML, whose aliases could make of a few lines more than fits in memory."""
_DEPTH = 16
"""Of tables and lists."""
_SETTING = re.compile(r"([A-Za-z_][\w.-]*)=(.*)", re.DOTALL)
_TOML = re.compile(r"\s*(?:\[([\w.\" -]+)\]|([\w.\"-]+)\s*=)")
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


class RecipeError(UsageError):
    """A recipe is wrong. The message has a line for each error."""

    listed = True


def read_recipe(words: Sequence[str]) -> Recipe:
    """The recipe of these words: at most one file (TOML or YAML), and any number of FIELD=VALUE, which win over it.

    Raises RecipeError: the file cannot be read, or fields are wrong; the message has all of them.
    """
    files = [word for word in words if not _SETTING.fullmatch(word)]
    if len(files) > 1:
        raise RecipeError(f"{' '.join(files)}: give one recipe, and settings as FIELD=VALUE")
    name = files[0] if files else "the command line"
    data, places = _read(Path(name)) if files else ({}, {})
    for word in words:
        if match := _SETTING.fullmatch(word):
            path = tuple(match[1].split("."))
            _set(data, path, match[2])
            places |= _with_outer(path, word, places)
    _check_depth(data, name)
    try:
        return Recipe.model_validate(data)
    except UnicodeEncodeError as error:
        raise RecipeError(
            f"{name}: {ascii(error.object)[:80]} is no text: it has half of a character"
        ) from None
    except ValidationError as error:
        told: dict[str, list[str]] = {}
        for item in error.errors(include_url=False):
            field, rule = _told(item, places, name)
            told.setdefault(field, []).append(rule)
    # a field that may be of several types has an error for each
    lines = [f"{field}: {', or '.join(rules)}" for field, rules in told.items()]
    head = f"{name}: {count_of(len(lines), 'error')}\n  " if len(lines) > 1 else ""
    raise RecipeError(head + "\n  ".join(lines))


def _check_depth(data: Any, name: str) -> None:
    level = [data]
    for _ in range(_DEPTH):
        level = [x for table in level if isinstance(table, dict | list) for x in _inner(table)]
    if level:
        raise RecipeError(
            f"{name}: tables and lists are nested more than {_DEPTH} deep; no field of a recipe is"
        )


def _inner(table: Any) -> Any:
    return table.values() if isinstance(table, dict) else table


def _told(item: Any, places: Places, name: str) -> tuple[str, str]:
    """One error: place, field and value; the rule and the nearest legal value."""
    location, kind, problem = item["loc"], item["type"], problem_of(Recipe, item)
    rule, close, shown = problem.rule, problem.nearest, f" is {problem.value!r}"
    if kind == "extra_forbidden":
        tables = [(), *((table,) for table in Recipe.model_fields)]
        others = [(*table, location[-1]) for table in tables if location[-1] in fields_at(Recipe, table)]
        close = close or next(map(path_text, others), None)
        rule, shown = ("there is no such field" if close else rule), ""
    else:
        # what follows a field is a position in its value, or one of its types
        while location[-1] not in fields_at(Recipe, location[:-1]):
            location = location[:-1]
    path = tuple(map(str, location))
    place = next((places[path[:n]] for n in range(len(path), 0, -1) if path[:n] in places), name)
    shown = "" if kind in ("value_error", "missing") else shown
    return f"{place}: {path_text(location)}{shown}", rule + (f"; did you mean {close!r}?" if close else "")


def _read(path: Path) -> tuple[dict[str, Any], Places]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} cannot be read ({error}); give a recipe in TOML or YAML") from error
    if path.suffix in (".yaml", ".yml"):
        return _yaml(path, text)
    try:
        data = tomllib.loads(text)
    # ValueError: its own, and of numbers and dates that there are not
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    places: Places = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if match := _TOML.match(line):
            parts = tuple(part.strip(' "') for part in (match[1] or match[2]).split("."))
            table = parts if match[1] else table
            places |= _with_outer(table if match[1] else (*table, *parts), f"{path}, line {number}", places)
    return data, places


def _with_outer(path: tuple[str, ...], place: str, places: Places) -> Places:
    """The place of a field, and of the tables around it where they have none."""
    return {path: place} | {
        path[:n]: place for n in range(1, min(len(path), _DEPTH)) if path[:n] not in places
    }


def _yaml(path: Path, text: str) -> tuple[dict[str, Any], Places]:
    if find_spec("yaml") is None:
        raise RecipeError(f"{path} needs pyyaml; pip install pyyaml, or write it in TOML")
    import yaml

    def places(node: Any, outer: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            yield (*outer, str(key.value)), f"{path}, line {key.start_mark.line + 1}"
            yield from places(value, (*outer, str(key.value)))

    def count(node: Any, outer: tuple[int, ...]) -> int:
        """The values in a node, with aliases written out at each place."""
        if id(node) in outer:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1}: a value contains itself")
        if id(node) not in counts:
            inner = (
                [x for pair in node.value for x in pair] if isinstance(node, yaml.MappingNode) else node.value
            )
            parts = inner if isinstance(node, yaml.CollectionNode) else ()
            counts[id(node)] = 1 + sum(count(part, (*outer, id(node))) for part in parts)
        return counts[id(node)]

    counts: dict[int, int] = {}
    try:
        node = yaml.compose(text)
        if node is not None and count(node, ()) > MAX_VALUES:
            raise yaml.YAMLError(f"it has more than {MAX_VALUES} values")
        data = _numbers(yaml.safe_load(text))
    # ValueError: of numbers and dates that there are not
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise RecipeError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    return (data if isinstance(data, dict) else {}), dict(places(node, ()))


def _numbers(value: Any) -> Any:
    """YAML takes 1e-3 for text: it wants 1.0e-3."""
    if isinstance(value, dict):
        return {str(key): _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def _set(data: dict[str, Any], path: tuple[str, ...], text: str) -> None:
    """Write the value of one FIELD=VALUE, which is as in TOML, or else text."""
    long_forms = {"data": source_table, "plan": plan_table}
    for part in path[:-1]:
        table = long_forms.get(part, lambda value: value)(data.get(part))
        data[part] = table if isinstance(table, dict) else {}
        data = data[part]
    try:
        data[path[-1]] = tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        data[path[-1]] = text
