"""Why a plan does not use a degree or an option: planned again with it, and laid beside the winner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import nn

from meshwright_dtensor.errors import InfeasibleError, MeshwrightError, PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, PluginHost, discover
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.strategy.plan_request import DEGREES
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.names import did_you_mean, suggestion
from meshwright_planner.evaluation.candidate import human_seconds
from meshwright_planner.recompute.rules import in_words
from meshwright_planner.reports.plan_view import name_of, seconds_of

OPTIONS = ("zero", "zero_degree", "microbatches", "schedule", "recompute", "sequence_parallel", "precision",
           "context_attention", "context_balance")  # fmt: skip
"""Options that may be asked about, beside degrees."""

NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pp": ("schedule", "microbatches"),
        "cp": ("context_attention", "context_balance"),
        "tp": ("sequence_parallel",),
        "dp": ("zero", "zero_degree"),
    }
)
"""Degree -> options that mean nothing where it is 1."""

Verdict = Literal["chosen", "slower", "faster", "infeasible", "illegal"]


@dataclass(frozen=True)
class WhyNot:
    """The answer.

    Args:
        asked: the degree or option in words, "tp=4".
        verdict: "chosen" - the plan has it already; "slower" - its best plan takes longer; "faster" - it does not, so that
            the plan is not the best of this request; "infeasible" - nothing with it fits the memory; "illegal" - it cannot be.
        reason: in words.
        plan: the best with it, where there is one.
        kept: what else was asked for when the plan was made, and held here too: keyword of `plan` -> value.
        dropped: what was asked for then and cannot be beside what is asked now, and so was let go.
        free: where degrees that are kept leave no ranks for what is asked: the answer without them, which it drops.
    """

    asked: str
    verdict: Verdict
    reason: str
    plan: ParallelPlan | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)
    dropped: Mapping[str, Any] = field(default_factory=dict)
    free: WhyNot | None = None

    def __str__(self) -> str:
        kept, gone = _listed(self.kept), _listed(self.dropped)
        beside = f" (beside {kept}, as the plan was asked for)" if kept else ""
        beside += f" (without {gone}, which cannot be beside it)" if gone else ""
        return f"{self.asked}{beside}: {self.verdict}: {self.reason}\n{self.free or ''}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        predicted = None if self.plan is None else self.plan.predicted
        return {
            "asked": self.asked,
            "verdict": self.verdict,
            "reason": self.reason,
            "kept": dict(self.kept),
            "dropped": dict(self.dropped),
            "best": None if self.plan is None else name_of(self.plan),
            "step_seconds": None if predicted is None else predicted.step_seconds,
            "free": None if self.free is None else self.free.to_dict(),
        }


def parse_pins(text: str) -> dict[str, Any]:
    """What "tp=4" or "tp=4,recompute=full" pins.

    Raises:
        UsageError: it is not of that form.
    """
    pins: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"--why-not {text}: {part!r} is not NAME=VALUE; write for example tp=4")
        pins[name] = {"true": True, "false": False}.get(
            value.lower(), int(value) if value.isdigit() else value
        )
    return pins


def check_names(pins: Mapping[str, Any], request: PlanRequest, host: PluginHost) -> None:
    """That what is asked about is a degree or an option that there is.

    Raises:
        UsageError: it is not.
    """
    axes = {*request.degrees, *(found.record.axis for found in host.strategies().values())}
    degrees = (*DEGREES, *sorted(axes - {*DEGREES, *OPTIONS}))
    for name, value in pins.items():
        if name not in (*degrees, *OPTIONS):
            raise UsageError(
                f"--why-not {name}={value}: there is no such option; ask about a degree ({', '.join(degrees)}), or one of "
                f"{', '.join(OPTIONS)}{suggestion(name, (*degrees, *OPTIONS))}"
            )


def why_not(
    winner: ParallelPlan,
    model: nn.Module,
    batch: Any,
    request: PlanRequest,
    pins: Mapping[str, Any],
    host: PluginHost | None = None,
) -> WhyNot:
    """Why `winner` does not use what `pins` names.

    Args:
        winner: the plan in question.
        model, batch: those it was planned for.
        request: as it was planned (see `request_of`); where it says something of a pin, the pin counts.
        pins: mesh axis -> degree, or option of `plan` -> value.
        host: where planners are found; None discovers what is installed.

    Raises:
        UsageError: there is no such option, or the model does not take the batch.
    """
    asked, found = _listed(pins), host or discover()
    check_names(pins, request, found)
    dropped = _in_the_way(request, pins)
    given = _without(request, dropped)
    pinned = _pinned(given, pins)
    kept = {
        name: value
        for name, value in pinned.given().items()
        if name not in (*pins, "cluster", "cost_model", "degrees")
    }
    kept |= {axis: degree for axis, degree in request.degrees.items() if axis not in pins}
    blocking = _blocking(given, pins)
    if not blocking or all(_has(winner, name, value) for name, value in pins.items()):
        answer = _answer(winner, model, batch, request, pinned, pins, asked, found)
        return replace(answer, kept=kept, dropped=dropped)
    free = why_not(winner, model, batch, _without(request, blocking), pins, found)
    free = replace(free, dropped={**blocking, **free.dropped})
    reason = (
        f"the plan was asked for with {_listed(blocking)}, and {_product(pinned)}, or a multiple of them, where there are "
        f"{pinned.world_size or 1}: plan again without {_listed(blocking)} to have {asked}"
    )
    return WhyNot(asked, "illegal", reason, kept=kept, dropped=dropped, free=free)


def request_of(
    plan: ParallelPlan,
    *,
    cluster: str | None = None,
    cost_model: str | None = None,
    optimizer: str | None = None,
    memory_limit: int | str | None = None,
) -> PlanRequest:
    """What a plan was asked for, with the keywords that are not None in place of its own.

    Raises:
        PlanError: the plan says that it was asked for something that this release does not know.
    """
    known = {one.name for one in fields(PlanRequest)}
    given: dict[str, Any] = dict(plan.provenance.request)
    for name, value in given.items():
        if name not in known:
            raise PlanError(
                f"provenance.request.{name}",
                value,
                "plan() has no such keyword; remove it",
                did_you_mean(name, known),
            )
    if given.get("planner") == "trial":  # which would run the plans on ranks of this machine
        del given["planner"]
    given.setdefault("cluster", plan.provenance.cluster)
    if plan.provenance.cost_model is not None:
        given.setdefault("cost_model", plan.provenance.cost_model)
    if plan.precision is not None:
        given.setdefault("precision", plan.precision.parameters)
    changes: dict[str, Any] = {
        "cluster": cluster,
        "cost_model": cost_model,
        "optimizer": optimizer,
        "memory_limit": memory_limit,
    }
    given |= {name: value for name, value in changes.items() if value is not None}
    return PlanRequest(**{**given, "world_size": plan.world_size, "top_k": 1})


def _answer(
    winner: ParallelPlan,
    model: nn.Module,
    batch: Any,
    request: PlanRequest,
    pinned: PlanRequest,
    pins: Mapping[str, Any],
    asked: str,
    host: PluginHost,
) -> WhyNot:
    if all(_has(winner, name, value) for name, value in pins.items()):
        return WhyNot(asked, "chosen", f"the plan has it: {name_of(winner)}", winner)
    axes = {*DEGREES, "zero", *pinned.degrees, *request.degrees}  # which there are the planner knows
    try:
        pinned.check(axes)
    except UsageError as error:  # known without a search
        request.check(axes)
        return WhyNot(asked, "illegal", str(error))
    planner = host.get(PlannerSpec, request.planner).load()()
    try:
        best: ParallelPlan = planner.plan(model, batch, pinned)[0]
    except InfeasibleError as error:
        return WhyNot(asked, "infeasible", str(error))
    except (PlanError, UsageError) as error:
        planner.plan(
            model, batch, request
        )  # where it is the model or the request that is at fault, that is said
        return WhyNot(asked, "illegal", str(error))
    except MeshwrightError as error:
        return WhyNot(asked, "illegal", str(error))
    return _compared(asked, winner, best)


def _in_the_way(request: PlanRequest, pins: Mapping[str, Any]) -> dict[str, Any]:
    """What the request says that cannot be beside the pins: keyword -> value."""
    names = {name for axis, needing in NEEDS.items() if pins.get(axis) == 1 for name in needing}
    for axis in ("cp", "tp", "dp"):  # a schedule does not bring its pp: that is to be asked for with it
        if getattr(request, axis) == 1 and any(_asks(name, pins.get(name)) for name in NEEDS[axis]):
            names.add(axis)
    if pins.get("zero") == 0 or _parts(pins.get("dp"), request.zero_degree):
        names.add("zero_degree")
    if _parts(request.dp, pins.get("zero_degree")):
        names.add("dp")
    found = {name: getattr(request, name) for name in sorted(names) if _asks(name, getattr(request, name))}
    if request.zero == 0 and _asks("zero_degree", pins.get("zero_degree")):
        found["zero"] = 0
    return {name: value for name, value in found.items() if name not in pins}


def _blocking(request: PlanRequest, pins: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest degrees of the request that leave no ranks for the pins: keyword or axis -> degree; empty where all fits."""
    known = {axis: getattr(request, axis) for axis in DEGREES} | {"zero_degree": request.zero_degree}
    known |= request.degrees
    held = {name: degree for name, degree in known.items() if degree is not None and name not in pins}
    for count in range(len(held) + 1):
        for names in itertools.combinations(held, count):
            found = {name: held[name] for name in names}
            if _fits(_pinned(_without(request, found), pins)):
                return found
    return {}  # the pins themselves are at fault, which planning says


def _fits(request: PlanRequest) -> bool:
    """Whether the degrees that it pins leave each a share of the ranks."""
    degrees = request.pins.values()
    whole = all(isinstance(n, int) and n > 0 for n in degrees)
    return whole and (request.world_size or 1) % math.prod(degrees) == 0


def _product(request: PlanRequest) -> str:
    degrees = {axis: degree for axis, degree in request.pins.items() if degree != 1}
    return f"{' x '.join(f'{axis} {n}' for axis, n in degrees.items())} takes {math.prod(degrees.values())} ranks"


def _without(request: PlanRequest, names: Mapping[str, Any]) -> PlanRequest:
    """The request without some of what it asks for."""
    nothing: dict[str, Any] = {name: None for name in names if name not in request.degrees}
    degrees = {axis: degree for axis, degree in request.degrees.items() if axis not in names}
    return replace(request, **nothing, degrees=degrees)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _asks(name: str, value: object) -> bool:
    """Whether an option asks for something at all."""
    return value not in (None, False) and (name, value) != ("zero_degree", 1)


def _parts(ranks: object, degree: object) -> bool:
    """Whether so many data ranks are not cut into parts of `degree`."""
    return isinstance(ranks, int) and isinstance(degree, int) and degree > 0 and ranks % degree != 0


def _pinned(request: PlanRequest, pins: Mapping[str, Any]) -> PlanRequest:
    own = {name: value for name, value in pins.items() if name in DEGREES or name in OPTIONS}
    others = {name: value for name, value in pins.items() if name not in own}
    return replace(request, top_k=1, **own, degrees={**request.degrees, **others})


def _has(plan: ParallelPlan, name: str, value: object) -> bool:
    """Whether a plan has what a pin says."""
    if name == "dp":
        return plan.degree("dp") * plan.degree("zero") == value
    if name == "zero":
        return value == (0 if plan.zero is None else plan.zero.stage)
    if name == "zero_degree":
        return plan.degree("zero") == value
    if name in ("microbatches", "schedule"):
        return plan.pipeline is not None and getattr(plan.pipeline, name) == value
    if name == "recompute":
        same = {rule.policy for rule in plan.recompute} == {value} and in_words(plan.recompute) == value
        return same or [rule.pattern for rule in plan.recompute] == [value]
    if name == "sequence_parallel":
        return plan.sequence_parallel == value
    if name == "precision":
        return value == ("fp32" if plan.precision is None else plan.precision.parameters)
    if name in ("context_attention", "context_balance"):
        return plan.context is not None and getattr(plan.context, name.removeprefix("context_")) == value
    return plan.degree(name) == value


def _compared(asked: str, winner: ParallelPlan, other: ParallelPlan) -> WhyNot:
    ours, theirs = winner.predicted, other.predicted
    if ours is None or theirs is None:
        return WhyNot(asked, "slower", "nothing is predicted of one of the two", other)
    gain = theirs.step_seconds - ours.step_seconds
    if gain < -1e-3 * ours.step_seconds:
        text = f"{name_of(other)} is predicted at {human_seconds(theirs.step_seconds)}, and the plan at "
        text += f"{human_seconds(ours.step_seconds)}: plan again with it"
        return WhyNot(asked, "faster", text, other)
    mine, its = seconds_of(winner), seconds_of(other)
    parts = {part: its.get(part, 0.0) - mine.get(part, 0.0) for part in {**mine, **its}}
    worse = sorted(((s, part) for part, s in parts.items() if s > 0), reverse=True)[:3]
    causes = ", ".join(
        f"{part} {human_seconds(its.get(part, 0.0))} for {human_seconds(mine.get(part, 0.0))}"
        for _, part in worse
    )
    text = (
        f"its best is {name_of(other)}: {human_seconds(theirs.step_seconds)} a step, "
        f"{100 * gain / ours.step_seconds:.1f}% more than {name_of(winner)} with {human_seconds(ours.step_seconds)}"
    )
    if causes:
        text += f" ({causes})"
    memory = f"{human_bytes(theirs.total_bytes)} of memory a rank for {human_bytes(ours.total_bytes)}"
    return WhyNot(asked, "slower", f"{text}; {memory}", other)
