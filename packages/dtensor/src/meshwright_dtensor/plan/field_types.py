"""The field types of plans: frozen pydantic models whose errors are PlanErrors with field, value, rule and nearest legal value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
)
from pydantic_core import PydanticCustomError, ValidationError

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.intervals import parse_interval_shard
from meshwright_dtensor.utils.names import did_you_mean
from meshwright_dtensor.utils.schema_errors import problem_of

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

T = TypeVar("T")

_MOST = 2**63 - 1
_SHARD = re.compile(r"S\((0|[1-9][0-9]{0,5})\)")


def _illegal(rule: str, nearest: str | None = None) -> PydanticCustomError:
    # passed as context, so that braces in the message are not filled in
    return PydanticCustomError("plan", "{rule}", {"rule": rule, "nearest": nearest or ""})


def within(value: int, least: int) -> int:
    """`value`, if it is at least `least` and fits 64 bits."""
    if value < least:
        raise _illegal(f"it must be at least {least}", str(least))
    if value > _MOST:
        raise _illegal("it must be less than 2**63", str(_MOST))
    return value


def text(value: str) -> str:
    """`value`, if it can be encoded as UTF-8: JSON can spell lone surrogates, which cannot be printed."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _illegal("it holds half a character (a lone surrogate); write whole ones") from None
    return value


def not_empty(value: str) -> str:
    """`value`, if it is not blank."""
    if not value.strip():
        raise _illegal("it must not be empty")
    return value


def axis_name(value: str) -> str:
    """`value`, if it can name a mesh axis."""
    if not value.isidentifier():
        raise _illegal("a mesh axis is named by an identifier", "tp")
    return value


def axis_product(value: str) -> str:
    """`value`, if it names one mesh axis or several joined by "+"."""
    for part in value.split("+"):
        axis_name(part)
    return value


def one_state(text: str, symbols: tuple[str, ...], rule: str) -> str:
    """`text`, if it is one of these symbols or a shard."""
    try:
        if text in symbols or _SHARD.fullmatch(text) or parse_interval_shard(text) is not None:
            return text
    except ValueError as error:
        raise _illegal(str(error)) from None
    raise _illegal(rule, _nearest_state(text, symbols))


value_state = partial(
    one_state,
    symbols=("I", "X", "P"),
    rule="a state is one of I, X, P, S(dim) with dim >= 0, and intervals of a dim as in S(0; 64+32+32)",
)
parameter_state = partial(
    one_state,
    symbols=("I",),
    rule="a parameter is I (replicated), S(dim) with dim >= 0, or has intervals of a dim as in S(0; 64+32+32)",
)


def _nearest_state(text: str, symbols: tuple[str, ...]) -> str:
    """The legal state that a wrong text most likely means."""
    shown = text[:200].strip().lower()
    digits = re.search(r"[0-9]{1,5}", shown)
    if digits and (shown[0] in "s[(" or shown[0].isdigit()):
        return f"S({int(digits.group())})"
    if shown.startswith(("s", "-")):
        return "S(0)"
    if shown[:1].upper() in symbols:
        return shown[0].upper()
    return "P" if shown.startswith("p") and "P" in symbols else "I"


def shard_unit(value: Any) -> Any:
    """`value`, if it says what shards do not cut: a number of elements, or a word."""
    if value is None or (isinstance(value, str) and value in ("row", "tensor")):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        near = did_you_mean(value, ("row", "tensor")) if isinstance(value, str) else None
        raise _illegal('a unit is a number of elements from 1 on, "row" or "tensor"', near)
    return within(value, 1)


def listed_rules(value: Any) -> Any:
    """`value`, if it is not a word or a bool: those are what the planner takes for such rules."""
    if isinstance(value, str | bool):
        raise _illegal(
            "a plan lists the modules; give True, 'auto' or a pattern to mw.plan, which decides and writes the list",
            '[{"pattern": "layers.*"}]',
        )
    return value


def plan_error(model: type[BaseModel], error: ValidationError) -> PlanError:
    """The first pydantic error as a PlanError. Unknown fields come first: they usually cause the others."""
    errors = error.errors(include_url=False)
    first = next((item for item in errors if item["type"] == "extra_forbidden"), errors[0])
    context: Mapping[str, Any] = first.get("ctx", {})
    problem = problem_of(model, first)
    if first["type"] == "plan":
        problem = problem._replace(rule=context["rule"], nearest=context.get("nearest") or None)
    elif first["type"] == "literal_error" and first["loc"] == ("version",):
        problem = problem._replace(
            rule="this release reads plans of version 1; upgrade meshwright-dtensor", nearest="1"
        )
    return PlanError(*problem)


class FrozenDict(dict[Any, Any]):
    """An immutable dict, since the plan that holds it is a value."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("a plan is frozen: build a changed copy with plan.replace(...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        return type(self), (dict(self),)


Text = Annotated[StrictStr, AfterValidator(text)]
Word = Annotated[Text, AfterValidator(not_empty)]
Count = Annotated[StrictInt, AfterValidator(partial(within, least=0))]
Positive = Annotated[StrictInt, AfterValidator(partial(within, least=1))]
ShardUnit = Annotated[int | str | None, BeforeValidator(shard_unit)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Axis = Annotated[StrictStr, AfterValidator(axis_name)]
AxisProduct = Annotated[StrictStr, AfterValidator(axis_product)]
Frozen = AfterValidator(FrozenDict)
ParameterState = Annotated[StrictStr, AfterValidator(parameter_state)]
ValueState = Annotated[StrictStr, AfterValidator(value_state)]
States = Annotated[dict[Axis, ValueState], Frozen]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Given = StrictBool | StrictInt | Number | Text | Annotated[dict[Axis, Positive], Frozen] | tuple[Text, ...]


class PlanMeta(ModelMetaclass):
    # type checkers take the signature from the fields
    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as error:
                raise plan_error(cls, error) from None


class Model(BaseModel, metaclass=PlanMeta):
    """A frozen model whose typos are PlanErrors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


def guarded(model: type[BaseModel], make: Callable[[], T]) -> T:
    """What `make` returns, its pydantic errors turned into PlanErrors."""
    try:
        return make()
    except ValidationError as error:
        raise plan_error(model, error) from None
    except RecursionError:
        raise PlanError("", None, "its values are nested too deeply") from None
