"""The fields of a recipe: types, defaults and rules. docs/train.md explains each. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from meshwright.recipes import rules
from meshwright.recipes.rules import obeys
from meshwright_dtensor.strategy.plan_request import PlanRequest

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Listed = Field(strict=False)


class Table(BaseModel):
    """A table of a recipe: no other fields, no conversions between kinds of values, and defaults are checked too."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True)


def source_table(value: Any) -> Any:
    """A source in its long form: a string is a function, or a path; a list holds paths."""
    if rules.is_function(value):
        return {"function": value}
    return {"files": value} if isinstance(value, (str, list)) else value


def plan_table(value: Any) -> Any:
    """A plan in its long form: a string is a file."""
    return {"file": value} if isinstance(value, str) else value


class Source(Table):
    """Where rows come from: files, or a function."""

    files: Annotated[
        tuple[str, ...],
        Listed,
        BeforeValidator(lambda v: (v,) if isinstance(v, str) else v),
        obeys(rules.files),
    ] = ()
    function: Annotated[str | None, obeys(rules.function)] = None
    column: str = "text"
    dtype: Annotated[Literal["uint16", "uint32", "int32", "int64"] | None, obeys(rules.dtype)] = None
    workers: Whole = 0


class Optimizer(Table):
    """An optimizer of torch."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Positive = 3e-4
    weight_decay: Amount = 0.0
    betas: Annotated[tuple[Fraction, Fraction] | None, Listed, obeys(rules.moments)] = None
    eps: Annotated[Positive | None, obeys(rules.moments)] = None
    momentum: Annotated[Fraction | None, obeys(rules.momentum)] = None


class Schedule(Table):
    """The learning rate over the steps: up for `warm_up` steps, then down to the part `final` of its value."""

    name: Literal["constant", "linear", "cosine"] = "cosine"
    warm_up: Whole = 0
    final: Fraction = 0.1

    def factor(self, step: int, steps: int) -> float:
        """What the learning rate is multiplied by in a step, counted from 0."""
        if step < self.warm_up:
            return (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, steps - self.warm_up)
        fallen = {"constant": 0.0, "linear": done, "cosine": (1 - math.cos(math.pi * done)) / 2}
        return 1 - (1 - self.final) * fallen[self.name]


class _Plan(Table):
    file: str | None = None

    def pinned(self) -> dict[str, Any]:
        """The keywords of `mw.plan` that were given."""
        return {name: value for name, value in self if value is not None and name != "file"}


_DECIDED = ("world_size", "optimizer", "global_batch_size", "precision", "top_k")
"""Keywords of `mw.plan` that other fields of a recipe decide, or nobody."""
_TYPES = get_type_hints(PlanRequest)
_PINS: Mapping[str, Any] = MappingProxyType(
    {f.name: (_TYPES[f.name] | None, None) for f in fields(PlanRequest) if f.name not in _DECIDED}
)
Plan: Any = create_model("Plan", __base__=_Plan, **_PINS)
"""A plan file, or what is pinned of the plan that is searched: keywords of `mw.plan`."""


class Evaluation(Table):
    """What is evaluated, and how often."""

    data: Annotated[Source, BeforeValidator(source_table), obeys(rules.source)]
    interval: Count = 100
    batches: Count | None = None


class Checkpoints(Table):
    """When the run is saved, and which checkpoints stay."""

    interval: Count = 500
    keep_last: Count = 2
    keep_every: Count | None = None
    peer_copies: Count | None = None


class Metrics(Table):
    """How often metrics are written, and whether to TensorBoard too (None: where it is installed)."""

    interval: Count = 1
    tensorboard: Annotated[bool | None, obeys(rules.installed)] = None


class Recipe(Table):
    """What to train, on what, and how."""

    model: Annotated[str | dict[str, Any], obeys(rules.model)]
    data: Annotated[Source, BeforeValidator(source_table), obeys(rules.source)]
    steps: Count
    tokenizer: Annotated[str | None, obeys(rules.tokenizer)] = None
    batch_size: Count = 8
    accumulate: Annotated[Count, obeys(rules.divides)] = 1
    sequence_length: Annotated[int, Field(ge=2)] = 128
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    clip_norm: Positive = 1.0
    precision: Literal["fp32", "bf16"] | None = None
    world_size: Count | None = None
    out: Annotated[str, obeys(rules.outside)] = "meshwright-run"
    packing: Annotated[bool, obeys(rules.packing)] = True
    export: Annotated[str | None, obeys(rules.absent)] = None
    deterministic: bool = False
    check_replicas: Count | None = None
    check_stragglers: Count | None = 100
    rewinds: Whole = 0
    spike: Annotated[float | None, Field(gt=1), obeys(rules.spike)] = None
    optimizer: Optimizer = Optimizer()
    schedule: Annotated[Schedule, obeys(rules.warms_up)] = Schedule()
    plan: Annotated[Plan, BeforeValidator(plan_table), obeys(rules.plan)] = Plan()
    evaluation: Annotated[Evaluation | None, obeys(rules.evaluation)] = None
    checkpoints: Checkpoints = Checkpoints()
    metrics: Metrics = Metrics()

    @property
    def vocabulary(self) -> str:
        """The folder of the tokenizer, or "bytes"."""
        brought = isinstance(self.model, str) and any(Path(self.model).glob("tokenizer*"))
        return self.tokenizer or (str(self.model) if brought else "bytes")

    def keywords(self) -> dict[str, Any]:
        """What `mw.plan` is asked for."""
        momentum = "-momentum" if self.optimizer.momentum else ""
        return {
            **self.plan.pinned(),
            "optimizer": self.optimizer.name + momentum,
            "precision": self.precision,
        }
