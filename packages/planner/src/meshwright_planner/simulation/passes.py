"""One forward or backward of a rank, cut where collectives between replicas are joined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from meshwright_planner.simulation.events import Drain, Operation, Post, Work
from meshwright_planner.simulation.schedule_steps import Step

SHARED = "zero"
"""The axis whose ranks share parameters."""


@dataclass(frozen=True)
class Gathers:
    """What a rank gathers in a step, pass by pass.

    Args:
        blocks: phase -> gathers of what lies in repeated blocks, in order, of all passes.
        outside: those of what lies outside of them, in forward passes.
        steps: of the rank.
        last: the last stage.
        again: every pass gathers (stage 3), not only the first of a stage.
    """

    blocks: Mapping[str, Sequence[Post]]
    outside: Sequence[Post]
    steps: Sequence[Step]
    last: int
    again: bool
    _passes: Mapping[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        found: dict[str, list[int]] = {}
        for phase, kinds in (("forward", "F"), ("backward", "BI")):
            own = [i for i, step in enumerate(self.steps) if step.kind in kinds]
            first = {self.steps[i].stage: i for i in reversed(own)}
            found[phase] = own if self.again else sorted(first.values())
        object.__setattr__(self, "_passes", found)

    def of(self, index: int) -> list[tuple[float, Post]]:
        """Those of one step, in order, each with its part of the compute behind it: what a model begins with has none."""
        step = self.steps[index]
        phase = "forward" if step.kind == "F" else "backward"
        blocks = [(1.0, post) for post in _share(self.blocks[phase], self._passes[phase], index)]
        if phase == "backward":
            return blocks
        # an embedding is needed before all else, and what stands behind the blocks after them
        held = {one.stage for one in self.steps}
        where = 0 if 0 in held else self.last
        own = [i for i in self._passes[phase] if self.steps[i].stage == where]
        outside = _share(self.outside, own, index)
        if where == 0:
            return [*((0.0, post) for post in outside), *blocks]
        return [*blocks, *((1.0, post) for post in outside)]


def _share(posts: Sequence[Post], steps: Sequence[int], index: int) -> Sequence[Post]:
    """Of these posts, shared evenly by steps, the part of one."""
    if index not in steps:
        return ()
    place, count = steps.index(index), len(steps)
    return posts[place * len(posts) // count : (place + 1) * len(posts) // count]


def drained(post: Post, taken: float) -> Drain:
    """Wait for a collective, and for those before it; by what they took of compute beside them the rank is late then."""
    axis, _, kind = post.stream.partition(":")
    what = f"the parameters that {axis} shares" if kind == "gather" else f"the sum of gradients over {axis}"
    return Drain(post.group, post.stream, what, taken)


def computing(
    step: Step,
    seconds: float,
    gathers: Sequence[tuple[float, Post]],
    sums: Sequence[tuple[float, Post]],
    hides: bool,
    taken: float,
) -> list[Operation]:
    """One forward or backward of so many seconds.

    Gathers are joined one ahead, and each piece waits for its own; sums of gradients are joined as soon as the part of the
    backward pass is done that makes them.

    Args:
        gathers: see Gathers.of.
        sums: each with the part of the pass behind which it is joined.
        hides: collectives run beside compute; else a rank does nothing meanwhile.
        taken: see Drain.
    """
    whole = sum(weight for weight, _ in gathers)
    pieces = [(weight / whole if whole else 0.0, post) for weight, post in gathers]
    posts = [post for _, post in pieces]
    program: list[Operation] = list(posts[:1]) if hides else []
    done, until, left = 0.0, 0.0, list(sums)

    def go_on(until: float) -> None:
        nonlocal done
        if until > done:
            program.append(Work(seconds * (until - done), str(step)))
            done = until

    for place, (share, post) in enumerate(pieces):
        program += [] if hides else [post]
        program.append(drained(post, taken))
        program += posts[place + 1 : place + 2] if hides else []
        until += share
        while left and left[0][0] <= until:
            go_on(left[0][0])
            program += _joined(left.pop(0)[1], hides, taken)
        go_on(min(1.0, until))
    for fraction, post in left:
        go_on(fraction)
        program += _joined(post, hides, taken)
    go_on(1.0)
    return program


def _joined(post: Post, hides: bool, taken: float) -> list[Operation]:
    return [post] if hides else [post, drained(post, taken)]
