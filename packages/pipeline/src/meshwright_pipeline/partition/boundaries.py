"""Which stage runs which call of which unit, and what crosses the cuts between them."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.utils.names import listing
from meshwright_pipeline.partition.units import Ownership
from meshwright_pipeline.trace.profile import PARAMETERS, Key, Label, Profile


@dataclass(frozen=True)
class Cut:
    """A profiled model, cut.

    Attributes:
        stage: (unit, call) -> the stage that runs it.
        last: per stage, the last call that it runs.
        crossing: per stage but the last, what it sends to the next, in order. What a later stage needs is passed on by those
            between.
        final: what the code behind the last call takes.
    """

    stage: Mapping[Key, int]
    last: tuple[Key, ...]
    crossing: tuple[tuple[Label, ...], ...]
    final: tuple[Label, ...] = ()

    def received(self, stage: int) -> tuple[Label, ...]:
        """What a stage gets from the one before it."""
        return self.crossing[stage - 1] if stage else ()

    def sent(self, stage: int) -> tuple[Label, ...]:
        """What a stage sends to the next."""
        return self.crossing[stage] if stage < len(self.crossing) else ()


def cut(profile: Profile, owned: Ownership) -> Cut:
    """Assign every call to the stages that hold its unit, never going back.

    Raises:
        PlanError: a unit runs after later stages have begun and none of those holds it, a stage has nothing to run, or
            parameters are read outside of their unit on other stages.
    """
    stage = _assign(profile.order, owned)
    if len(set(stage.values())) < len(
        owned.stages
    ):  # units that several stages hold have all run on the first of these
        stage = _evenly(profile.order, owned) or stage
    called = {unit for unit, _ in profile.order}
    last: list[Key] = []
    for index in range(len(owned.stages)):
        own = [key for key in profile.order if stage[key] == index]
        if not own:
            text = (
                f"none of its modules is called after those of stage {index - 1}; the order of calls is "
                + listing(dict.fromkeys(unit for unit, _ in profile.order), 8)
            )
            before = {unit for held in owned.stages[:index] for unit in held}
            if any(call for unit, call in profile.order) and before.issuperset(owned.stages[index]):
                text += (
                    ". Earlier stages hold them too, since the model calls its modules more than once: call them once, on all rows "
                    "put together (torch.cat), or plan without pp"
                )
            raise PlanError(f"pipeline.stages[{index}]", listing(owned.stages[index], 4), text)
        last.append(own[-1])
    everywhere = set(owned.everywhere)
    for unit in profile.read:
        if unit not in everywhere:
            text = f"code outside of module {unit!r} computes with its parameters; add it to pipeline.shared"
            if unit not in called:
                text = (
                    f"module {unit!r} is never called itself, code outside calls its parts or computes with its parameters; name "
                    f"those parts in its place ({unit}.*), or add it to pipeline.shared"
                )
            raise PlanError("pipeline.shared", listing(owned.everywhere), text, unit)
    count = len(owned.stages)
    *between, final = crossing(profile, stage, count + 1)
    return Cut(stage, tuple(last), tuple(between), final)


def _assign(order: Sequence[Key], owned: Ownership) -> dict[Key, int]:
    stage: dict[Key, int] = {}
    current = 0
    for unit, call in order:
        allowed = owned.allowed(unit)
        here = next((index for index in allowed if index >= current), None)
        if here is None:
            again = "" if call == 0 else f" for the {call + 1}. time"
            fix = (
                " (each then holds it), or call it once, on all rows put together (torch.cat)" if call else ""
            )
            text = f"it is called{again} after stage {current} has begun: name it in stage {current} or a later one too{fix}"
            raise PlanError(f"pipeline.stages[{allowed[-1]}]", unit, text)
        stage[unit, call] = current = here
    return stage


def _evenly(order: Sequence[Key], owned: Ownership) -> dict[Key, int] | None:
    """A stage for every call, never going back, so that each stage has some and the longest as few as can be; None: no way.

    Planning cuts a model that calls its units again between calls, and writes down the units alone.
    """
    allowed = [set(owned.allowed(unit)) for unit, _ in order]
    most, count = len(order), len(owned.stages)
    # (calls of the longest stage, where each stage begins) of the first calls, on the stages so far
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for stage in range(count):
        found: dict[int, tuple[int, tuple[int, ...]]] = {}
        for begin, (longest, begins) in best.items():
            for end in range(begin + 1, most + 1):
                if stage not in allowed[end - 1]:
                    break
                now = max(longest, end - begin), (*begins, begin)
                found[end] = min(found.get(end, now), now)
        best = found
    if most not in best:
        return None
    begins = best[most][1]
    return {key: bisect.bisect_right(begins, place) - 1 for place, key in enumerate(order)}


def crossing(profile: Profile, stage: Mapping[Key, int], count: int) -> tuple[tuple[Label, ...], ...]:
    """Per cut, the labels made before it that something behind it consumes; the last stage makes the result."""
    position = {key: index for index, key in enumerate(profile.order)}
    needs = [(stage[key], labels) for key, labels in profile.consumes.items()] + [(count - 1, profile.final)]
    found: list[tuple[Label, ...]] = []
    for before in range(count - 1):
        labels = {
            label
            for behind, wanted in needs
            if behind > before
            for label in wanted
            if label[1] != PARAMETERS and stage[label[:2]] <= before
        }
        found.append(tuple(sorted(labels, key=lambda label: (position[label[:2]], label[2:]))))
    return tuple(found)
