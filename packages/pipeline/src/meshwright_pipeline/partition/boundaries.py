"""Assigns unit calls to stages, and finds the tensors that cross the stage boundaries."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.utils.names import listing
from meshwright_pipeline.partition.units import Ownership
from meshwright_pipeline.trace.profile import NO_LABELS, PARAMETERS, Key, Label, Profile


@dataclass(frozen=True)
class Cut:
    """The stage boundaries of a profiled model.

    Attributes:
        stage: unit call -> the stage that runs it.
        last: for each stage, the last unit call that it runs.
        crossing: for each stage but the last, the tensors that it sends to the next one, in order. Tensors for a later stage
            are forwarded by the stages between.
        final: the tensors that the code after the last unit call uses.
    """

    stage: Mapping[Key, int]
    last: tuple[Key, ...]
    crossing: tuple[tuple[Label, ...], ...]
    final: tuple[Label, ...] = ()

    def received(self, stage: int) -> tuple[Label, ...]:
        """The tensors that a stage receives from the previous one."""
        return self.crossing[stage - 1] if stage else ()

    def sent(self, stage: int) -> tuple[Label, ...]:
        """The tensors that a stage sends to the next one."""
        return self.crossing[stage] if stage < len(self.crossing) else ()


def cut(profile: Profile, owned: Ownership) -> Cut:
    """Assign each unit call to a stage that holds the unit, in ascending order of stages.

    Raises:
        PlanError: a unit is called after later stages have begun and none of them holds it, a stage has nothing to run, or
            parameters are read outside of their unit on other stages.
    """
    stage = _assign(profile.order, owned)
    # units that several stages hold may all have been assigned to the first of these
    if len(set(stage.values())) < len(owned.stages):
        stage = _evenly(profile.order, owned) or stage
    last: list[Key] = []
    for index in range(len(owned.stages)):
        calls = [key for key in profile.order if stage[key] == index]
        if not calls:
            names, rule = listing(owned.stages[index], 4), _empty_stage(profile, owned, index)
            raise PlanError(f"pipeline.stages[{index}]", names, rule)
        last.append(calls[-1])
    _check_read_parameters(profile, owned, stage)
    held = [{unit for (unit, _), at in stage.items() if at == index} for index in range(len(owned.stages))]
    reason = divided_state(profile.keeping, held, owned.everywhere, owned.holders)
    if reason is not None:
        raise PlanError("pipeline.stages", [list(stage) for stage in owned.stages], reason)
    *between, final = crossing(profile, stage, len(owned.stages) + 1)
    return Cut(stage, tuple(last), tuple(between), final)


def divided_state(
    keeping: Mapping[str, Collection[str]],
    stages: Sequence[Collection[str]],
    everywhere: Collection[str],
    holders: Mapping[str, frozenset[str]],
) -> str | None:
    """Why units cannot be on these stages: several of them hold state that calls write. None if none do.

    `keeping`: see Profile. `everywhere`: see Ownership. `holders`: see module_state.holders.
    """
    around = sorted(name for name in keeping.get("", ()) if name in holders)
    if around:
        unit = min(holders[around[0]] - {""})
        return (
            f"the model writes to its {around[0]!r} between its modules, and module {unit!r} holds it too, on its own stage: pass "
            "it to that module as an argument, or plan without pp"
        )
    writers: dict[str, int] = {}
    for index, units in enumerate((everywhere, *stages)):
        for unit in sorted(units):
            for name in sorted(keeping.get(unit, ())):
                path, others = f"{unit}.{name}", holders.get(f"{unit}.{name}", frozenset()) - {unit}
                written = f"module {unit!r} writes to its {name.lstrip(':')!r} in each of its calls, and "
                if "" in others:
                    return f"{written}the model around it holds it too, on all stages: return it, or plan without pp"
                if not index or writers.setdefault(path, index) != index or not others.issubset(units):
                    return (
                        f"{written}several stages hold it, each with a state of its own; name it in one stage"
                    )
    return None


def _empty_stage(profile: Profile, owned: Ownership, index: int) -> str:
    """Why a stage has nothing to run."""
    order = listing(dict.fromkeys(unit for unit, _ in profile.order), 8)
    text = f"none of its modules is called after those of stage {index - 1}; the order of calls is {order}"
    earlier = {unit for units in owned.stages[:index] for unit in units}
    if any(call for _, call in profile.order) and earlier.issuperset(owned.stages[index]):
        text += (
            ". Earlier stages hold them too, because the model calls its modules more than once: call them once on all rows "
            "(torch.cat), or plan without pp"
        )
    return text


def _check_read_parameters(profile: Profile, owned: Ownership, stage: Mapping[Key, int]) -> None:
    """Check that stages hold the units whose parameters are read outside of them, for what they run."""
    called = {unit for unit, _ in profile.order}
    uses = [(stage[key], labels) for key, labels in profile.consumes.items()]
    uses.append((len(owned.stages) - 1, profile.final))
    for unit in profile.read:
        at = {index for index, labels in uses if any(label[:2] == (unit, PARAMETERS) for label in labels)}
        if unit in owned.everywhere or at.issubset(owned.allowed(unit)):
            continue
        text = f"code outside of module {unit!r} uses its parameters; add it to pipeline.shared"
        if unit not in called:
            text = (
                f"module {unit!r} itself is never called; code outside calls its submodules or uses its parameters. Name the "
                f"submodules instead ({unit}.*), or add it to pipeline.shared"
            )
        raise PlanError("pipeline.shared", listing(owned.everywhere), text, unit)


def _assign(order: Sequence[Key], owned: Ownership) -> dict[Key, int]:
    stage: dict[Key, int] = {}
    current = 0
    for unit, call in order:
        allowed = owned.allowed(unit)
        here = next((index for index in allowed if index >= current), None)
        if here is None:
            again = f" again (call {call + 1})" if call else ""
            fix = " (each of them then holds it), or call it once on all rows (torch.cat)" if call else ""
            text = f"it is called{again} after stage {current} has begun: name it in stage {current} or a later one too{fix}"
            raise PlanError(f"pipeline.stages[{allowed[-1]}]", unit, text)
        stage[unit, call] = current = here
    return stage


def _evenly(order: Sequence[Key], owned: Ownership) -> dict[Key, int] | None:
    """Assign calls to stages so that the largest number of calls on a stage is smallest; None if a stage would stay empty.

    A plan names the units of each stage, not their calls. The planner may have cut between two calls of the same unit.
    """
    allowed = [set(owned.allowed(unit)) for unit, _ in order]
    total, count = len(order), len(owned.stages)
    # end of the stages so far -> (most calls of a stage, begin of each stage)
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(count):
        extended: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (longest, begins) in best.items():
            for end in range(begin + 1, total + 1):
                if stage not in allowed[end - 1]:
                    break
                candidate = max(longest, end - begin), (*begins, begin)
                extended[end] = min(extended.get(end, candidate), candidate)
        best = extended
    if total not in best:
        return None
    begins = best[total][1]
    return {key: bisect.bisect_right(begins, place) - 1 for place, key in enumerate(order)}


def crossing(profile: Profile, stage: Mapping[Key, int], count: int) -> tuple[tuple[Label, ...], ...]:
    """For each boundary, the labels that are produced before it and used after it. The last stage produces the result."""
    position = {key: index for index, key in enumerate(profile.order)}
    needs = [(stage[key], labels) for key, labels in profile.consumes.items()] + [(count - 1, profile.final)]
    boundaries: list[tuple[Label, ...]] = []
    for before in range(count - 1):
        needed = NO_LABELS.union(*(labels for after, labels in needs if after > before))
        sent = [label for label in needed if label[1] != PARAMETERS and stage[label[:2]] <= before]
        boundaries.append(tuple(sorted(sent, key=lambda label: (position[label[:2]], label[2:]))))
    return tuple(boundaries)
