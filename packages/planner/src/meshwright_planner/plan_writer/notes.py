"""From evaluated candidates to plans: the fields, and the notes that say why."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import replace

from meshwright_dtensor.cluster import SlowNode
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import (
    ParallelPlan,
    PlannedCollective,
    PrecisionRule,
    Prediction,
    Provenance,
    StageTime,
    StepSplit,
    ZeroRule,
)
from meshwright_dtensor.sharding.states import format_state
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.fingerprint import fingerprint
from meshwright_dtensor.utils.names import listing
from meshwright_planner.clusters.local_machine import PREFIX
from meshwright_planner.evaluation.candidate import Candidate, human_seconds
from meshwright_planner.evaluation.context import Setting
from meshwright_planner.plan_writer.idle_axes import idle_axes
from meshwright_planner.plan_writer.rules import Writer
from meshwright_planner.recompute.effect import communicated
from meshwright_planner.search.optimality import Proof

WORTH_SAYING = 0.1
"""Part of what one plan is faster than another from which a part of the step is named in the comparison."""

DISTRIBUTIONS = ("meshwright-dtensor", "meshwright-planner", "meshwright-parallel", "torch", "scipy")


def plan_of(
    setting: Setting, candidate: Candidate, planner: str, notes: Iterable[str], proof: Proof
) -> ParallelPlan:
    """The plan that says what a candidate is, and how good that is."""
    activations, collectives = [], list(candidate.collectives)
    sequence = False
    axes, placement = candidate.searched, candidate.placement
    if candidate.recompute and not placement.again:  # chosen by stages: what is sent again is not in it
        sent = communicated(candidate.problem, placement, candidate.recompute)
        placement = replace(placement, conversions=sent)
    writer = Writer(candidate.problem, placement, axes, candidate.placements, candidate.apart)
    parameters = writer.parameters(setting.model) if axes or candidate.placements else []
    if axes:
        activations = writer.activations()
        collectives = [*writer.collectives(), *collectives]
        sequence = writer.splits_sequence()
        if setting.sequence_parallel and not sequence:
            raise UsageError(
                f"sequence_parallel=True: no value that flows between repeated blocks of this {type(setting.model).__name__} "
                "can be split along the sequence; leave it out"
            )
    return ParallelPlan(
        world_size=setting.world_size,
        degrees=dict(candidate.degrees),
        strategies={axis: setting.strategies[axis].name for axis in candidate.degrees},
        zero=ZeroRule(stage=candidate.stage) if candidate.stage else None,  # type: ignore[arg-type]
        precision=PrecisionRule(parameters=setting.precision) if setting.dtype is not None else None,  # type: ignore[arg-type]
        sequence_parallel=sequence,
        parameters=tuple(parameters),
        activations=tuple(activations),
        recompute=candidate.recompute,
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
        collectives=tuple(sorted(collectives, key=_collective_key)),
        **candidate.fields,
        provenance=Provenance(
            planner=planner,
            versions=_versions(),
            model=fingerprint(setting.model),
            cluster=setting.cluster.name,
            cost_model=None if setting.cost_model is None else setting.cost_model.name,
            request=dict(setting.request),
            batch=_sizes(setting),
            notes=(*notes, *candidate.notes),
        ),
    )


def _sizes(setting: Setting) -> dict[str, int]:
    """Rows and tokens of the batch that is planned for."""
    tokens = setting.batch.sequence_length
    return {"rows": setting.batch.size} | ({} if tokens is None else {"tokens": tokens})


def _split(candidate: Candidate) -> StepSplit:
    """Where the seconds go."""
    rule = candidate.fields.get("pipeline")
    each = candidate.placement.compute_seconds / (rule["microbatches"] if rule else 1)
    return StepSplit(
        optimizer_seconds=candidate.optimizer_seconds,
        bubble_seconds=candidate.bubble_seconds,
        exposed={axis: seconds for axis, seconds in candidate.exposed.items() if seconds},
        hidden={axis: seconds for axis, seconds in candidate.hidden.items() if seconds},
        stages=tuple(
            StageTime(forward_seconds=each * ahead, backward_seconds=each * back)
            for ahead, back in candidate.stages
        ),
        between_seconds=each * candidate.between,
    )


def reasons(setting: Setting, ranked: Sequence[Candidate], place: int, *, only: bool) -> list[str]:
    """Why the candidate at `place` of `ranked` (best first) is what it is, and how it compares, a line each.

    `only`: the request allows no other combination of degrees.
    """
    own = ranked[place]
    notes = [
        f"bound by {own.bound}; {human_bytes(own.total_bytes)} of {human_bytes(own.allowed)} per rank with "
        f"{setting.optimizer}",
    ]
    if own.problem.tape.real:
        notes.append("the model looks at its data: profiled in a real run, not on fake tensors")
    if setting.cluster.name.startswith(PREFIX):
        notes.append(f"planned for the machine at hand: {setting.cluster.source}")
    notes += own.problem.tape.division.notes if own.problem.tape.division is not None else ()
    notes += [*_beyond(setting, own), *idle_axes(own), *_marked(own)]
    for slow in setting.cluster.slow_among(setting.world_size):
        notes.append(_slow(slow))
    if own.placement.status == "in turns":
        bound = own.placement.bound
        above = own.placement.objective / bound - 1 if bound else 0.0
        notes.append(
            f"placements on {' and '.join(own.searched)} were found in turns: too many for one program, and what is found "
            f"takes at most {100 * above:.1f}% more than the least"
        )
    elif own.placement.status not in ("optimal", "replicated"):
        notes.append(f"the placement search stopped early: {own.placement.status}")
    after = ranked[place + 1] if place + 1 < len(ranked) else None
    if after is not None:
        notes.append(comparison(own, after))
    elif only and len(ranked) == 1:
        notes.append("the only combination of degrees that the request allows")
    for other in ranked:
        if other is not own:
            notes.append(f"also considered: {summary(other)}")
    return notes


def _beyond(setting: Setting, own: Candidate) -> list[str]:
    """That the user allows more memory than there is."""
    has, asked = setting.cluster.usable_bytes, setting.allowed
    if asked <= has:
        return []
    needed = (
        "" if own.total_bytes <= has else ", and so is what this plan needs: it runs on devices with more"
    )
    return [
        f"the memory limit of {human_bytes(asked)} is more than the {human_bytes(has)} that a model may take of a device of "
        f"{setting.cluster.name}{needed}"
    ]


def _marked(own: Candidate) -> list[str]:
    """Which activations the model itself brings somewhere on axes that the plan has: nobody planned that."""
    tape = own.problem.tape if own.problem.tape.origin is None else own.problem.tape.origin
    places: dict[str, list[str]] = {}
    for module, mark in tape.marks:
        wanted = [
            f"{axis} {format_state(state)}" for axis, state in mark.items() if own.point.degree(axis) > 1
        ]
        if wanted:
            alike = [
                f"{c}{module[len(f) :]}" for c, f in tape.copied.items() if f"{module}.".startswith(f"{f}.")
            ]
            found = places.setdefault(" and ".join(wanted), [])
            found += (name for name in (module or "the model itself", *alike) if name not in found)
    return [
        f"mark_sharding of an activation in {listing(names, 4)}: brought to {wanted} when it runs, which is neither planned around "
        "nor in what is predicted"
        for wanted, names in places.items()
    ]


def _slow(slow: SlowNode) -> str:
    """What a slow node means for a plan."""
    what = [f"computes {slow.compute:g} times as long"] if slow.compute > 1 else []
    what += [f"has {100 * slow.share:g}% of {slow.link}"] if slow.link is not None else []
    return (
        f"node {slow.node} {' and '.join(what) or 'is like the others'}: all ranks have as much to do, so all are predicted "
        "at its pace"
    )


def comparison(better: Candidate, other: Candidate) -> str:
    """Why one candidate comes before another: the part of the step that makes the difference, or memory."""
    if other.excess_bytes and not better.excess_bytes:
        return f"preferred to {other.name}, which exceeds the memory by {human_bytes(other.excess_bytes)}"
    gain = other.step_seconds - better.step_seconds
    parts = {
        "compute": other.compute_seconds - better.compute_seconds,
        "exposed communication": other.exposed_seconds - better.exposed_seconds,
        "bubble": other.bubble_seconds - better.bubble_seconds,
        "optimizer": other.optimizer_seconds - better.optimizer_seconds,
    }
    if gain < -1e-9 * better.step_seconds:  # of a planner that chooses by a measure of its own
        return (
            f"chosen before {other.name}, which is predicted {-100 * gain / better.step_seconds:.1f}% faster"
        )
    if gain <= 0:
        saved = other.total_bytes - better.total_bytes
        return f"as fast as {other.name}; " + (
            f"uses {human_bytes(saved)} less memory" if saved > 0 else "the outer axes are filled first"
        )
    said = [(name, s) for name, s in parts.items() if abs(s) >= WORTH_SAYING * gain]
    said.sort(key=lambda part: -abs(part[1]))
    less = [f"{human_seconds(s)} less {name}" for name, s in said if s > 0]
    more = [f"{human_seconds(-s)} more {name}" for name, s in said if s < 0]
    share = 100 * gain / other.step_seconds
    text = f"{share:.1f}% faster than {other.name}: {' and '.join(less)}"
    return f"{text}, but {' and '.join(more)}" if more else text


def summary(candidate: Candidate) -> str:
    """One line: degrees, time split, memory, what bounds it."""
    fit = f", exceeds the memory by {human_bytes(candidate.excess_bytes)}" if candidate.excess_bytes else ""
    bubble = f"bubble {human_seconds(candidate.bubble_seconds)} + " if candidate.bubble_seconds else ""
    return (
        f"{candidate.name}: step {human_seconds(candidate.step_seconds)} = compute "
        f"{human_seconds(candidate.compute_seconds)} + communication {human_seconds(candidate.exposed_seconds)} + {bubble}"
        f"optimizer {human_seconds(candidate.optimizer_seconds)}; {human_bytes(candidate.total_bytes)}{fit}; "
        f"bound by {candidate.bound}"
    )


def _versions() -> dict[str, str]:
    found = {}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _collective_key(c: PlannedCollective) -> tuple[str, str, int, str, str, str]:
    return (c.axis, c.phase, -c.nbytes * c.count, c.kind, c.module, c.why)
