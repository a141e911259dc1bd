"""The errors of pydantic models in our terms: the field, its value, the rule that it breaks, the nearest legal value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import BaseModel

from meshwright_dtensor.utils.names import did_you_mean, listing

Location = tuple[int | str, ...]


class Problem(NamedTuple):
    """One error of a model. `field` is the path of the value, such as "pipeline.stages[1]"."""

    field: str
    value: object
    rule: str
    nearest: str | None = None


def problem_of(model: type[BaseModel], item: Mapping[str, Any]) -> Problem:
    """The problem of one entry of `ValidationError.errors()` of `model`."""
    location, value, kind = item["loc"], item.get("input"), item["type"]
    place = path_text(location)
    if kind == "extra_forbidden":
        names = fields_at(model, location[:-1])
        close = did_you_mean(str(location[-1]), names)
        return Problem(place, value, f"there is no such field; the fields are {listing(names, 16)}", close)
    if kind == "missing":
        return Problem(place, None, "it is required and missing")
    if kind == "literal_error":
        expected = str(item.get("ctx", {}).get("expected", ""))
        choices = [choice.strip().strip("'") for choice in re.split(r",| or ", expected)]
        return Problem(
            place, value, f"it must be one of {listing(choices)}", did_you_mean(value, choices) or choices[0]
        )
    rule = item["msg"].replace("Input should be", "it should be").replace("Value error, ", "")
    return Problem(place, value, rule[:1].lower() + rule[1:])


def path_text(location: Location) -> str:
    """The path of a value: parts joined by dots, positions in brackets. "[key]", pydantic's mark of keys, is no part of it."""
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "[key]":
            shown = str(part).encode("ascii", "backslashreplace").decode()
            text += f".{shown}" if text else shown
    return text


def fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """The field names of the model that stands at `location` inside `model`."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(part) for part in getattr(annotation, "__args__", ()))
    return next((model for model in inner if model), None)
