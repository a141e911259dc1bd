"""Why a plan does not use a degree or an option: plan again with it, and compare."""

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
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.names import did_you_mean, suggestion
from meshwright_planner.recompute.rules import in_words
from meshwright_planner.reports.plan_view import name_of, seconds_of

OPTIONS = ("zero", "zero_degree", "microbatches", "schedule", "recompute", "sequence_parallel", "precision",
           "context_attention", "context_balance")  # fmt: skip
"""Options that a question may name, in addition to degrees."""

NEEDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "pp": ("schedule", "microbatches"),
        "cp": ("context_attention", "context_balance"),
        "tp": ("sequence_parallel",),
        "dp": ("zero", "zero_degree"),
    }
)
"""Degree -> options that have no meaning where it is 1."""

Verdict = Literal["chosen", "slower", "faster", "infeasible", "illegal"]


@dataclass(frozen=True)
class WhyNot:
    """The answer.

    Args:
        question: the degree or option of the question, "tp=4".
        verdict: "chosen" - the plan has it already; "slower" - the best plan with it takes longer; "faster" - it takes less, so
            the plan is not the best for this request; "infeasible" - nothing with it fits the memory; "illegal" - not possible.
        reason: in words.
        plan: the best plan with it, if there is one.
        kept: other keywords of the plan's request, which hold here too: keyword of `plan` -> value.
        dropped: keywords of the plan's request that contradict the question, and do not hold here.
        free: if kept degrees leave no ranks for the question, the answer without them.
    """

    question: str
    verdict: Verdict
    reason: str
    plan: ParallelPlan | None = None
    kept: Mapping[str, Any] = field(default_factory=dict)
    dropped: Mapping[str, Any] = field(default_factory=dict)
    free: WhyNot | None = None

    def __str__(self) -> str:
        kept, dropped = _listed(self.kept), _listed(self.dropped)
        conditions = f" (with {kept}, as the plan was requested)" if kept else ""
        conditions += f" (without {dropped}, which it contradicts)" if dropped else ""
        return f"{self.question}{conditions}: {self.verdict}: {self.reason}\n{self.free or ''}"

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "asked": self.question,
            "verdict": self.verdict,
            "reason": self.reason,
            "kept": dict(self.kept),
            "dropped": dict(self.dropped),
            "best": None if self.plan is None else name_of(self.plan),
            "step_seconds": getattr(self.plan and self.plan.predicted, "step_seconds", None),
            "free": None if self.free is None else self.free.to_dict(),
        }


def parse_pins(text: str) -> dict[str, Any]:
    """The pins of "tp=4" or "tp=4,recompute=full". Raises UsageError where the text has another form."""
    pins: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise UsageError(f"--why-not {text}: {part!r} is not NAME=VALUE; write for example tp=4")
        words = {"true": True, "false": False}
        pins[name] = words.get(value.lower(), int(value) if value.isdigit() else value)
    return pins


def check_names(pins: Mapping[str, Any], request: PlanRequest, host: PluginHost) -> None:
    """Check that each pin is a known degree or option. Raises UsageError."""
    axes = {*request.degrees, *(registered.record.axis for registered in host.strategies().values())}
    degrees = (*DEGREES, *sorted(axes - {*DEGREES, *OPTIONS}))
    for name, value in pins.items():
        if name not in (*degrees, *OPTIONS):
            raise UsageError(
                f"--why-not {name}={value}: there is no such option; give a degree ({', '.join(degrees)}), or one of "
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
    """Why `winner` does not use the degrees and options in `pins`.

    Args:
        winner: the plan.
        model, batch: the model and batch of the plan.
        request: its request (see `request_of`); `pins` take precedence.
        pins: mesh axis -> degree, or option of `plan` -> value.
        host: where planners are found; None discovers what is installed.

    Raises UsageError: there is no such option, or the model does not take the batch.
    """
    question, plugins = _listed(pins), host or discover()
    check_names(pins, request, plugins)
    dropped = _contradicted(request, pins)
    given = _without(request, dropped)
    pinned = _pinned(given, pins)
    left_out = (*pins, "cluster", "cost_model", "degrees")
    kept = {name: value for name, value in pinned.given().items() if name not in left_out}
    kept |= {axis: degree for axis, degree in request.degrees.items() if axis not in pins}
    if all(_has(winner, name, value) for name, value in pins.items()):
        return WhyNot(question, "chosen", f"the plan has it: {name_of(winner)}", winner, kept, dropped)
    blocking = _blocking(given, pins)
    if not blocking:
        best = _planned(model, batch, request, pinned, question, plugins)
        answer = best if isinstance(best, WhyNot) else _compared(question, winner, best)
        return replace(answer, kept=kept, dropped=dropped)
    free = why_not(winner, model, batch, _without(request, blocking), pins, plugins)
    free = replace(free, dropped={**blocking, **free.dropped})
    degrees = {axis: degree for axis, degree in pinned.pins.items() if degree != 1}
    product = " x ".join(f"{axis} {n}" for axis, n in degrees.items())
    reason = (
        f"the plan was requested with {_listed(blocking)}, and {product} needs {math.prod(degrees.values())} ranks, or a multiple, "
        f"but there are {pinned.world_size or 1}: plan again without {_listed(blocking)} to use {question}"
    )
    return WhyNot(question, "illegal", reason, kept=kept, dropped=dropped, free=free)


def request_of(plan: ParallelPlan, **changes: Any) -> PlanRequest:
    """The request of a plan; changes that are not None replace its keywords. Raises PlanError for an unknown keyword."""
    names = {field.name for field in fields(PlanRequest)}
    given: dict[str, Any] = dict(plan.provenance.request)
    for name, value in given.items():
        if name not in names:
            rule, fix = "plan() has no such keyword; remove it", did_you_mean(name, names)
            raise PlanError(f"provenance.request.{name}", value, rule, fix)
    if given.get("planner") == "trial":
        # the trial planner would run plans on ranks of this machine
        del given["planner"]
    given.setdefault("cluster", plan.provenance.cluster)
    if plan.provenance.cost_model is not None:
        given.setdefault("cost_model", plan.provenance.cost_model)
    if plan.precision is not None:
        given.setdefault("precision", plan.precision.parameters)
    given |= {name: value for name, value in changes.items() if value is not None}
    return PlanRequest(**{**given, "world_size": plan.world_size, "top_k": 1})


def _planned(
    model: nn.Module, batch: Any, request: PlanRequest, pinned: PlanRequest, question: str, host: PluginHost
) -> ParallelPlan | WhyNot:
    """The best plan with the pins, or the answer why there is none."""
    axes = {*DEGREES, "zero", *pinned.degrees, *request.degrees}
    try:
        pinned.check(axes)
    except UsageError as error:
        # no search is needed
        request.check(axes)
        return WhyNot(question, "illegal", str(error))
    planner = host.get(PlannerSpec, request.planner).load()()
    try:
        best: ParallelPlan = planner.plan(model, batch, pinned)[0]
        return best
    except InfeasibleError as error:
        return WhyNot(question, "infeasible", str(error))
    except (PlanError, UsageError) as error:
        # raises where the model or the request itself is wrong
        planner.plan(model, batch, request)
        return WhyNot(question, "illegal", str(error))
    except MeshwrightError as error:
        return WhyNot(question, "illegal", str(error))


def _contradicted(request: PlanRequest, pins: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of the request that contradict the pins: keyword -> value."""
    names = {name for axis, needing in NEEDS.items() if pins.get(axis) == 1 for name in needing}
    # pp is not in the list: a question about a schedule must name its pp
    for axis in ("cp", "tp", "dp"):
        if getattr(request, axis) == 1 and any(_asks(name, pins.get(name)) for name in NEEDS[axis]):
            names.add(axis)
    if pins.get("zero") == 0 or _indivisible(pins.get("dp"), request.zero_degree):
        names.add("zero_degree")
    if pins.get("zero") == 0:
        names.add("zero_unit")
    if _indivisible(request.dp, pins.get("zero_degree")):
        names.add("dp")
    values = {name: getattr(request, name) for name in sorted(names) if _asks(name, getattr(request, name))}
    if request.zero == 0 and _asks("zero_degree", pins.get("zero_degree")):
        values["zero"] = 0
    return {name: value for name, value in values.items() if name not in pins}


def _blocking(request: PlanRequest, pins: Mapping[str, Any]) -> dict[str, Any]:
    """The fewest degrees of the request that leave no ranks for the pins: keyword or axis -> degree; empty where all fit."""
    degrees = {axis: getattr(request, axis) for axis in DEGREES} | {"zero_degree": request.zero_degree}
    degrees |= request.degrees
    held = {name: degree for name, degree in degrees.items() if degree is not None and name not in pins}
    for count in range(len(held) + 1):
        for names in itertools.combinations(held, count):
            blocking = {name: held[name] for name in names}
            if _fits(_pinned(_without(request, blocking), pins)):
                return blocking
    # the pins themselves are impossible, and planning reports it
    return {}


def _fits(request: PlanRequest) -> bool:
    """Whether the product of the pinned degrees divides the number of ranks."""
    degrees = request.pins.values()
    whole = all(isinstance(n, int) and n > 0 for n in degrees)
    return whole and (request.world_size or 1) % math.prod(degrees) == 0


def _without(request: PlanRequest, names: Mapping[str, Any]) -> PlanRequest:
    """The request without some of its keywords and degrees."""
    nothing: dict[str, Any] = {name: None for name in names if name not in request.degrees}
    degrees = {axis: degree for axis, degree in request.degrees.items() if axis not in names}
    return replace(request, **nothing, degrees=degrees)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def _asks(name: str, value: object) -> bool:
    """Whether an option has a value that requests something."""
    return value not in (None, False) and (name, value) != ("zero_degree", 1)


def _indivisible(ranks: object, degree: object) -> bool:
    """Whether `degree` does not divide the data ranks."""
    return isinstance(ranks, int) and isinstance(degree, int) and degree > 0 and ranks % degree != 0


def _pinned(request: PlanRequest, pins: Mapping[str, Any]) -> PlanRequest:
    keywords = {name: value for name, value in pins.items() if name in DEGREES or name in OPTIONS}
    axes = {name: value for name, value in pins.items() if name not in keywords}
    return replace(request, top_k=1, **keywords, degrees={**request.degrees, **axes})


def _has(plan: ParallelPlan, name: str, value: object) -> bool:
    """Whether a plan has the value of a pin."""
    if name == "recompute":
        same = {rule.policy for rule in plan.recompute} == {value} and in_words(plan.recompute) == value
        return same or [rule.pattern for rule in plan.recompute] == [value]
    options: dict[str, object] = {
        "dp": plan.degree("dp") * plan.degree("zero"),
        "zero": 0 if plan.zero is None else plan.zero.stage,
        "zero_degree": plan.degree("zero"),
        "sequence_parallel": plan.sequence_parallel,
        "precision": "fp32" if plan.precision is None else plan.precision.parameters,
        **{option: getattr(plan.pipeline, option, None) for option in ("microbatches", "schedule")},
        **{f"context_{option}": getattr(plan.context, option, None) for option in ("attention", "balance")},
    }
    return value is not None and options.get(name, plan.degree(name)) == value


def _compared(question: str, winner: ParallelPlan, other: ParallelPlan) -> WhyNot:
    ours, theirs = winner.predicted, other.predicted
    if ours is None or theirs is None:
        return WhyNot(question, "slower", "one of the two plans has no prediction", other)
    now, then = human_seconds(ours.step_seconds), human_seconds(theirs.step_seconds)
    gain = theirs.step_seconds - ours.step_seconds
    if gain < -1e-3 * ours.step_seconds:
        text = f"{name_of(other)} is predicted to take {then}, and the plan takes {now}: plan again with {question}"
        return WhyNot(question, "faster", text, other)
    before, after = seconds_of(winner), seconds_of(other)
    more = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in {**before, **after}}
    worse = sorted(((s, part) for part, s in more.items() if s > 0), reverse=True)[:3]
    pairs = ((part, *(human_seconds(s.get(part, 0.0)) for s in (after, before))) for _, part in worse)
    causes = ", ".join(f"{part} {new} instead of {old}" for part, new, old in pairs)
    text = (
        f"the best plan with it is {name_of(other)}: {then} a step, {100 * gain / ours.step_seconds:.1f}% more than "
        f"{name_of(winner)} with {now}{f' ({causes})' if causes else ''}; {human_bytes(theirs.total_bytes)} of memory per rank "
        f"instead of {human_bytes(ours.total_bytes)}"
    )
    return WhyNot(question, "slower", text, other)
