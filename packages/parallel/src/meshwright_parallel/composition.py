"""Which parallelisms go together: one table of what is refused, each entry with its reason and the fix.

`check_composition` runs before any memory is taken. An entry says what it refuses as a function of the situation; it
returns the offending (field, value) of the plan, or None. Add rules to the table of the field that they speak of;
docs/composition.md shows the same table to people, and the order in which a plan is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.states import State, States, format_state

if TYPE_CHECKING:
    from torch import nn

    from meshwright_dtensor.plan import ParallelPlan
    from meshwright_dtensor.strategy import Strategy

Found = tuple[str, object]


@dataclass(frozen=True)
class Situation:
    """What is about to be done.

    Attributes:
        model: as the user built it.
        plan: what is to be applied.
        strategies: one per mesh axis, in mesh order.
        states: parameter name -> state per mesh axis in which it will be stored.
    """

    model: nn.Module
    plan: ParallelPlan
    strategies: Sequence[Strategy]
    states: Mapping[str, States]

    def degree(self, axis: str) -> int:
        """Ranks along `axis`, 1 where the plan does not have it."""
        return self.plan.degree(axis)

    def stored(self, axis: str) -> dict[str, State]:
        """Parameter name -> its stored state on `axis`; empty where the plan does not have the axis."""
        if axis not in self.plan.degrees:
            return {}
        place = self.plan.axes.index(axis)
        return {name: states[place] for name, states in self.states.items()}


@dataclass(frozen=True)
class Rule:
    """One illegal combination.

    Attributes:
        name: what is combined, for the table in the documentation.
        broken: the offending plan field and its value, None where the plan is fine.
        reason: why it cannot be.
        fix: what to do instead.
    """

    name: str
    broken: Callable[[Situation], Found | None]
    reason: str
    fix: str


def _two_axes_on_one_dim(here: Situation) -> Found | None:
    if here.degree("zero") == 1:
        return None
    zero = here.plan.axes.index("zero")
    for name, states in here.states.items():
        own = states[zero]
        for axis, state in zip(here.plan.axes, states, strict=True):
            if (
                axis not in ("zero", "dp")
                and isinstance(own, int)
                and isinstance(state, int)
                and own == state
            ):
                if here.degree(axis) > 1:
                    return f"parameters ({name}).zero", format_state(own)
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        name="a parameter sharded on one dim by zero and by another axis",
        broken=_two_axes_on_one_dim,
        reason="zero gathers its shards into what the other axis computes with, which needs a dim of its own",
        fix="leave zero out of that parameter's rule, so that a free dim is chosen",
    ),
)
"""Everything that is refused. The first rule that is broken is reported."""


def check_composition(
    model: nn.Module, plan: ParallelPlan, strategies: Sequence[Strategy], states: Mapping[str, States]
) -> None:
    """Refuse a plan whose parts do not go together; nothing has been allocated yet.

    Raises:
        PlanError: field, value, the reason and the fix.
    """
    here = Situation(model, plan, strategies, states)
    for rule in RULES:
        found = rule.broken(here)
        if found is not None:
            field, value = found
            raise PlanError(field, value, f"{rule.reason}; {rule.fix}")
