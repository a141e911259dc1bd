"""What the parts of a plan are made of: frozen models whose typos are PlanErrors, and the types of their fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from meshwright_dtensor.plan import validate as checks

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class FrozenDict(dict[Any, Any]):
    """A dict that refuses to change, since the plan that holds it is a value."""

    def _refuse(self, *_: object, **__: object) -> Any:
        raise TypeError("a plan is frozen: build a changed copy with plan.replace(...)")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[type[dict[Any, Any]], tuple[dict[Any, Any]]]:
        return type(self), (dict(self),)


def _count(value: int) -> int:
    return checks.within(value, 0)


def _positive(value: int) -> int:
    return checks.within(value, 1)


Text = Annotated[StrictStr, AfterValidator(checks.text)]
Word = Annotated[Text, AfterValidator(checks.not_empty)]
Count = Annotated[StrictInt, AfterValidator(_count)]
Positive = Annotated[StrictInt, AfterValidator(_positive)]
Seconds = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
Axis = Annotated[StrictStr, AfterValidator(checks.axis_name)]
AxisProduct = Annotated[StrictStr, AfterValidator(checks.axis_product)]
Frozen = AfterValidator(FrozenDict)
ParameterState = Annotated[StrictStr, AfterValidator(checks.parameter_state)]
ValueState = Annotated[StrictStr, AfterValidator(checks.value_state)]
States = Annotated[dict[Axis, ValueState], Frozen]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Given = StrictBool | StrictInt | Number | Text | Annotated[dict[Axis, Positive], Frozen]


class PlanMeta(ModelMetaclass):
    if not TYPE_CHECKING:  # type checkers take the signature from the fields

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except ValidationError as error:
                raise checks.plan_error(cls, error) from None


class Model(BaseModel, metaclass=PlanMeta):
    """A frozen model whose typos are PlanErrors."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
