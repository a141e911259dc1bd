"""Compares planners on one request: the plan of each in one table, and the time that each took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import Module

from meshwright_dtensor.errors import InfeasibleError, MeshwrightError, PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, PluginHost, discover
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.utils.bytesize import human_seconds
from meshwright_planner.reports.explain import explain


@dataclass(frozen=True)
class Answer:
    """The answer of one planner.

    Args:
        planner: its name.
        plan: its best plan; None where it has none, with the reason in `failure`.
        seconds, processor_seconds: wall-clock time and processor time of planning. Other processes do not affect the latter.
    """

    planner: str
    plan: ParallelPlan | None
    seconds: float
    processor_seconds: float
    failure: str | None = None


@dataclass(frozen=True)
class Comparison:
    """Answers of several planners, the fastest plan first, those without a plan last."""

    answers: tuple[Answer, ...]

    @property
    def plans(self) -> list[ParallelPlan]:
        """The plans, the fastest first."""
        return [answer.plan for answer in self.answers if answer.plan is not None]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        report = explain(self.plans).to_dict()
        entries = iter(report.pop("plans"))
        names = ("planner", "seconds", "processor_seconds", "failure")
        planners: list[dict[str, Any]] = [{n: getattr(answer, n) for n in names} for answer in self.answers]
        for answer, data in zip(self.answers, planners):
            data["plan"] = None if answer.plan is None else next(entries)
        return {**report, "planners": planners}

    def __str__(self) -> str:
        lines = [
            f"{answer.planner} answered in {human_seconds(answer.seconds)}"
            + ("" if answer.failure is None else f": {answer.failure}")
            for answer in self.answers
        ]
        if any(plan.provenance.measured_seconds is not None for plan in self.plans):
            lines.append("some plans are also measured; the order is by predicted time, which all plans have")
        return f"{explain(self.plans)}\n" + "\n".join(lines) + "\n"


def compare(
    model: Module, batch: Any, request: PlanRequest, planners: Sequence[str], host: PluginHost | None = None
) -> Comparison:
    """The best plan of each planner for one request, with the same costs.

    Args:
        model, batch, request: as for a planner; `request.planner` is ignored.
        planners: names of registered planners.
        host: where they are found; None discovers what is installed.

    Raises:
        PluginError: there is no planner of that name.
        UsageError: the request or the batch is wrong.
    """
    plugins = host or discover()
    answers: list[Answer] = []
    refusal: MeshwrightError | None = None
    for name in planners:
        planner = plugins.get(PlannerSpec, name).load()()
        start, worked = time.perf_counter(), time.process_time()
        plan, failure = None, None
        try:
            plan = planner.plan(model, batch, replace(request, planner=name, top_k=1))[0]
        except (InfeasibleError, PlanError, UsageError) as error:
            # the other planners may still answer
            failure, refusal = str(error).rstrip(), error
        answers.append(Answer(name, plan, time.perf_counter() - start, time.process_time() - worked, failure))
    if refusal is not None and not isinstance(refusal, InfeasibleError) and not any(a.plan for a in answers):
        raise refusal

    def order(answer: Answer) -> tuple[bool, float, float]:
        predicted = None if answer.plan is None else answer.plan.predicted
        step_seconds = 0.0 if predicted is None else round(predicted.step_seconds, 12)
        return predicted is None, step_seconds, answer.seconds

    return Comparison(tuple(sorted(answers, key=order)))
