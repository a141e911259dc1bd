"""Plans as JSON: stable, readable text, and strict parsing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan.fields import PlanFields

WIDTH = 110
_REQUEST_FIELDS = ("request", "batch")


def to_data(plan: PlanFields) -> dict[str, Any]:
    """The plan as plain dicts and lists. Mesh axes stand in mesh order, other keys in alphabetical order."""
    data: dict[str, Any] = _plain(plan, tuple(plan.degrees) if isinstance(plan.degrees, Mapping) else ())
    # left out of the text when empty
    if not data.get("experts"):
        data.pop("experts", None)
    provenance = data.get("provenance")
    # empty for plans that were written by hand
    if isinstance(provenance, dict):
        for name in _REQUEST_FIELDS:
            if not provenance.get(name):
                provenance.pop(name, None)
    return data


def identity(plan: PlanFields) -> dict[str, Any]:
    """`to_data` without what does not count for equality: time of creation, request and batch."""
    data = to_data(plan)
    if isinstance(data.get("provenance"), dict):
        for name in ("created", *_REQUEST_FIELDS):
            data["provenance"].pop(name, None)
    return data


def _plain(value: Any, axes: tuple[str, ...]) -> Any:
    if isinstance(value, BaseModel):
        pairs = ((name, getattr(value, name, None)) for name in type(value).model_fields)
        return {name: _plain(field, axes) for name, field in pairs if field is not None}
    if isinstance(value, Mapping):
        rank = {axis: place for place, axis in enumerate(axes)}
        keys = sorted(value, key=lambda key: (rank.get(key, len(axes)), str(key)))
        return {key: _plain(value[key], axes) for key in keys}
    return [_plain(item, axes) for item in value] if isinstance(value, (list, tuple)) else value


def dumps(data: object) -> str:
    """JSON text with two spaces per level; values that fit on one line are on one line, except the plan and its lists."""
    return _render(data, 0, 0) + "\n"


def _render(value: object, level: int, used: int) -> str:
    """`value` as JSON at this nesting level, after `used` columns of its first line."""
    flat = json.dumps(value, ensure_ascii=True, allow_nan=False)
    if not isinstance(value, (dict, list)) or not value:
        return flat
    is_list_of_objects = isinstance(value, list) and all(isinstance(item, dict) for item in value)
    opened = level == 0 or (level == 1 and is_list_of_objects)
    if not opened and used + len(flat) + 1 <= WIDTH:
        return flat
    inner = "  " * (level + 1)
    if isinstance(value, dict):
        heads, items, ends = [f"{inner}{json.dumps(str(key))}: " for key in value], list(value.values()), "{}"
    else:
        heads, items, ends = [inner] * len(value), value, "[]"
    lines = [head + _render(item, level + 1, len(head)) for head, item in zip(heads, items, strict=True)]
    return ends[0] + "\n" + ",\n".join(lines) + "\n" + "  " * level + ends[1]


def loads(text: str | bytes) -> Any:
    """The value of JSON text. Raises PlanError unless it is one JSON value without repeated keys."""
    try:
        if isinstance(text, (bytes, bytearray)):
            text = bytes(text).decode("utf-8-sig")
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        ends = not text[error.pos :].strip() if isinstance(text, str) else False
        rule = f"expected JSON at {where} ({'the text ends there' if ends else error.msg})"
        raise PlanError("", _excerpt(text, error.pos), rule) from None
    except UnicodeDecodeError as error:
        excerpt = error.object[error.start : error.start + 8]
        raise PlanError("", excerpt, "expected UTF-8 text") from None
    except RecursionError:
        raise PlanError("", None, "its brackets are nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise PlanError("", _excerpt(text, 0), f"expected JSON ({error})") from None


def _excerpt(text: object, position: int) -> object:
    return text[max(0, position - 20) : position + 20] if isinstance(text, str) else type(text).__name__


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for key, value in pairs:
        if key in data:
            raise PlanError(key, value, "the same key stands twice in one object; keep one")
        data[key] = value
    return data


def _no_constant(text: str) -> Any:
    raise PlanError("", text, "expected finite numbers")
