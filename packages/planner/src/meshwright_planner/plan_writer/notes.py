"""From evaluated candidates to plans: the fields, and the notes with the reasons."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan, PlannedCollective, PrecisionRule, ZeroRule
from meshwright_dtensor.plan.fields import Prediction, Provenance, StageTime, StepSplit
from meshwright_dtensor.sharding.states import format_state
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.fingerprint import fingerprint
from meshwright_dtensor.utils.names import listing
from meshwright_planner.clusters.local_machine import PREFIX
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.context import Setting
from meshwright_planner.plan_writer.compile_choice import compile_choice
from meshwright_planner.plan_writer.replicated import idle_axes, whole_weights
from meshwright_planner.plan_writer.rules import Writer
from meshwright_planner.plan_writer.shard_units import zero_rule
from meshwright_planner.recompute.effect import communicated
from meshwright_planner.search.optimality import Proof

NAMED = 0.1
"""A comparison names the parts of the step that differ by at least this part of the whole difference."""

DISTRIBUTIONS = ("meshwright-dtensor", "meshwright-planner", "meshwright-parallel", "torch", "scipy")


def plan_of(
    setting: Setting, candidate: Candidate, planner: str, notes: Iterable[str], proof: Proof
) -> ParallelPlan:
    """The plan of a candidate, with its proof."""
    collectives = [PlannedCollective(axis=axes, **asdict(use)) for axes, use in candidate.uses]
    activations, sequence = [], False
    axes, placement = candidate.searched, candidate.placement
    if candidate.recompute and not placement.again:
        # stages chose the recompute, so the placement lacks the communication that it repeats
        conversions = communicated(candidate.problem, placement, candidate.recompute)
        placement = replace(placement, conversions=conversions)
    writer = Writer(candidate.problem, placement, axes, candidate.placements, candidate.strategy_modules)
    parameters = writer.parameters(setting.model) if axes or candidate.placements else []
    if axes:
        activations = writer.activations()
        collectives = [*writer.collectives(), *collectives]
        sequence = writer.splits_sequence()
        if setting.sequence_parallel and not sequence:
            raise UsageError(
                f"sequence_parallel=True: no tensor between repeated blocks of this {type(setting.model).__name__} "
                "can be split along the sequence; leave it out"
            )
    in_chunks = ParallelPlan(
        world_size=setting.world_size,
        degrees=dict(candidate.degrees),
        strategies={axis: setting.strategies[axis].name for axis in candidate.degrees},
        zero=ZeroRule(stage=candidate.stage) if candidate.stage else None,  # type: ignore[arg-type]
        parameters=tuple(parameters),
        **candidate.fields,
    )
    zero, units = zero_rule(setting, candidate, in_chunks)
    notes = (*notes, *units)
    compiled = setting.compiled
    if compiled is None:
        choice = compile_choice(setting, candidate)
        compiled, notes = choice.rules, (*notes, *choice.notes)
    versions = {}
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    sizes = {"rows": setting.batch.size}
    if setting.batch.sequence_length is not None:
        sizes["tokens"] = setting.batch.sequence_length
    return in_chunks.replace(
        zero=zero,
        precision=PrecisionRule(parameters=setting.precision) if setting.dtype is not None else None,  # type: ignore[arg-type]
        sequence_parallel=sequence,
        activations=tuple(activations),
        recompute=candidate.recompute,
        compile=compiled,
        rng=setting.rng,
        predicted=Prediction(
            step_seconds=candidate.step_seconds,
            compute_seconds=candidate.compute_seconds,
            communication_seconds=candidate.exposed_seconds,
            split=_split(candidate),
            memory_bytes={**candidate.memory, "total": candidate.total_bytes},
            limit_bytes=setting.allowed,
            gap=proof.gap(candidate.step_seconds),
            proof=proof.words,
        ),
        collectives=tuple(
            sorted(collectives, key=lambda c: (c.axis, c.phase, -c.nbytes * c.count, c.kind, c.module, c.why))
        ),
        provenance=Provenance(
            planner=planner,
            versions=versions,
            model=fingerprint(setting.model),
            cluster=setting.cluster.name,
            cost_model=None if setting.cost_model is None else setting.cost_model.name,
            request=dict(setting.request),
            batch=sizes,
            notes=(*notes, *candidate.notes),
        ),
    )


def _split(candidate: Candidate) -> StepSplit:
    """The parts of the step in seconds."""
    rule = candidate.fields.get("pipeline")
    each = candidate.placement.compute_seconds / (rule["microbatches"] if rule else 1)
    inside = {axis: seconds for axis, seconds in candidate.inside.items() if seconds}
    collectives = [
        {axis: (seconds * forward, seconds * backward) for axis, seconds in inside.items()}
        for forward, backward in candidate.stage_communication
    ]
    return StepSplit(
        optimizer_seconds=candidate.optimizer_seconds,
        bubble_seconds=candidate.bubble_seconds,
        exposed={axis: seconds for axis, seconds in candidate.exposed.items() if seconds},
        hidden={axis: seconds for axis, seconds in candidate.hidden.items() if seconds},
        stages=tuple(
            StageTime(forward_seconds=each * forward, backward_seconds=each * backward, collectives=sent)
            for (forward, backward), sent in zip(
                candidate.stages, collectives or [{}] * len(candidate.stages), strict=True
            )
        ),
        between_seconds=each * candidate.between,
        between_collectives={
            axis: s * late for axis, s in inside.items() if (late := candidate.between_communication)
        },
    )


def reasons(setting: Setting, ranked: Sequence[Candidate], place: int, *, only: bool) -> list[str]:
    """The reasons for the candidate at `place` of `ranked` (best first), a note each; `only`: no other degrees are allowed."""
    candidate = ranked[place]
    notes = [
        f"bound by {candidate.bound}; {human_bytes(candidate.total_bytes)} of {human_bytes(candidate.allowed)} per rank with "
        f"{setting.optimizer}"
    ]
    tape = candidate.problem.tape
    if tape.real:
        notes += ["the model depends on the data of its batch: profiled in a real run, not on fake tensors"]
    if setting.cluster.name.startswith(PREFIX):
        notes.append(f"planned for the machine at hand: {setting.cluster.source}")
    notes += tape.division.notes if tape.division is not None else ()
    usable = setting.cluster.usable_bytes
    if setting.allowed > usable:
        needed = "" if candidate.total_bytes <= usable else "; this plan needs devices with more memory"
        notes.append(
            f"the memory limit of {human_bytes(setting.allowed)} is more than the {human_bytes(usable)} that a model can use on "
            f"a device of {setting.cluster.name}{needed}"
        )
    notes += [*idle_axes(candidate), *whole_weights(candidate), *_marked(candidate)]
    for slow in setting.cluster.slow_among(setting.world_size):
        effects = [f"computes {slow.compute:g} times as long"] if slow.compute > 1 else []
        effects += [f"has {100 * slow.share:g}% of {slow.link}"] if slow.link is not None else []
        notes.append(
            f"node {slow.node} {' and '.join(effects) or 'is like the others'}: all ranks get equal work, so the prediction "
            "assumes its pace for all"
        )
    if candidate.placement.status == "in turns":
        bound = candidate.placement.bound
        above = candidate.placement.objective / bound - 1 if bound else 0.0
        notes.append(
            f"placements on {' and '.join(candidate.searched)} were searched in turns, because one program for both is too large; "
            f"they take at most {100 * above:.1f}% longer than the best"
        )
    elif candidate.placement.status not in ("optimal", "replicated"):
        notes.append(f"the placement search stopped early: {candidate.placement.status}")
    following = ranked[place + 1] if place + 1 < len(ranked) else None
    if following is not None:
        notes.append(comparison(candidate, following))
    elif only and len(ranked) == 1:
        notes.append("the only combination of degrees that the request allows")
    notes += [f"also considered: {summary(other)}" for other in ranked if other is not candidate]
    return notes


def _marked(candidate: Candidate) -> list[str]:
    """Notes on activations that the model marks with mark_sharding, on axes of the plan. Planning ignores these marks."""
    tape = candidate.problem.tape if candidate.problem.tape.origin is None else candidate.problem.tape.origin
    modules_by_state: dict[str, list[str]] = {}
    for module, mark in tape.marks:
        states = [f"{axis} {format_state(s)}" for axis, s in mark.items() if candidate.point.degree(axis) > 1]
        if states:
            inside = [(c, first) for c, first in tape.copied.items() if f"{module}.".startswith(f"{first}.")]
            copies = [f"{copy}{module[len(first) :]}" for copy, first in inside]
            modules = modules_by_state.setdefault(" and ".join(states), [])
            modules += (name for name in (module or "the model itself", *copies) if name not in modules)
    return [
        f"mark_sharding of an activation in {listing(modules, 4)}: it is moved to {states} at run time, which neither the "
        "placements nor the prediction include"
        for states, modules in modules_by_state.items()
    ]


def comparison(better: Candidate, other: Candidate) -> str:
    """Why one candidate comes before another: the parts of the step that make the difference, or memory."""
    if other.excess_bytes and not better.excess_bytes:
        return f"preferred to {other.name}, which exceeds the memory by {human_bytes(other.excess_bytes)}"
    gain = other.step_seconds - better.step_seconds
    # some planners choose by their own measure
    if gain < -1e-9 * better.step_seconds:
        faster = -100 * gain / better.step_seconds
        return f"chosen before {other.name}, which is predicted {faster:.1f}% faster"
    if gain <= 0:
        saved = other.total_bytes - better.total_bytes
        return f"as fast as {other.name}; " + (
            f"uses {human_bytes(saved)} less memory" if saved > 0 else "the outer axes are filled first"
        )
    parts = [
        ("compute", other.compute_seconds - better.compute_seconds),
        ("exposed communication", other.exposed_seconds - better.exposed_seconds),
        ("bubble", other.bubble_seconds - better.bubble_seconds),
        ("optimizer", other.optimizer_seconds - better.optimizer_seconds),
    ]
    largest = sorted((p for p in parts if abs(p[1]) >= NAMED * gain), key=lambda part: -abs(part[1]))
    less = [f"{human_seconds(s)} less {name}" for name, s in largest if s > 0]
    more = [f"{human_seconds(-s)} more {name}" for name, s in largest if s < 0]
    share = 100 * gain / other.step_seconds
    text = f"{share:.1f}% faster than {other.name}: {' and '.join(less)}"
    return f"{text}, but {' and '.join(more)}" if more else text


def summary(candidate: Candidate) -> str:
    """A line with degrees, parts of the step, memory, and the bound."""
    fit = f", exceeds the memory by {human_bytes(candidate.excess_bytes)}" if candidate.excess_bytes else ""
    bubble = f"bubble {human_seconds(candidate.bubble_seconds)} + " if candidate.bubble_seconds else ""
    return (
        f"{candidate.name}: step {human_seconds(candidate.step_seconds)} = compute "
        f"{human_seconds(candidate.compute_seconds)} + communication {human_seconds(candidate.exposed_seconds)} + {bubble}"
        f"optimizer {human_seconds(candidate.optimizer_seconds)}; {human_bytes(candidate.total_bytes)}{fit}; "
        f"bound by {candidate.bound}"
    )
