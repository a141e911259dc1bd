"""Planned calls: the states in which a plan wants the inputs and the output of a call.

A plan addresses calls as (module name, function, occurrence), and as (..., forward) where one forward of the model calls the module
several times; the dispatcher asks the module stack for the target of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.plan.fields import ActivationRule
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.intervals import IntervalShard, repeat_to_fit
from meshwright_dtensor.sharding.states import State, States, parse_state
from meshwright_dtensor.trace.module_stack import ByForward, install_frames
from meshwright_dtensor.utils.names import did_you_mean

AxisStates = tuple[tuple[str, State], ...]


@dataclass(frozen=True)
class Target:
    """What the plan wants of one call: per tensor input, and for the output, states on some axes."""

    inputs: tuple[AxisStates | None, ...]
    output: AxisStates | None = None

    def states(
        self, context: MeshContext, layouts: Sequence[Layout]
    ) -> tuple[list[States | None], tuple[State | None, ...]]:
        """(states for every input or None, wanted state of the output per mesh axis).

        Interval shards in a plan are for the batch it was made for; they are fitted to the size of this batch.
        """
        forced: list[States | None] = []
        for position, layout in enumerate(layouts):
            planned = dict(self.inputs[position] or ()) if position < len(self.inputs) else {}
            states: States = ()
            for axis, current, n in zip(context.axes, layout.states, context.sizes, strict=True):
                wanted = planned.get(axis, current)
                if isinstance(wanted, int) and wanted >= len(layout.shape):
                    # another call than the planned one: how many calls a forward makes may depend on its data
                    wanted = current
                if isinstance(wanted, IntervalShard) and wanted != current:
                    outer = len(states)
                    shape = local_shape_of(tuple(layout.shape), context.sizes[:outer], (0,) * outer, states)
                    fit = repeat_to_fit(wanted, shape, n)
                    wanted = current if fit is None else fit
                states = (*states, wanted)
            forced.append(states if states != layout.states else None)
        goal = dict(self.output or ())
        return forced, tuple(goal.get(a) for a in context.axes)


def install_targets(model: nn.Module, plan: ParallelPlan) -> list[Any]:
    """Make the calls of ``model`` take their inputs in the states that ``plan.activations`` names.

    Returns:
        Handles; ``handle.remove()`` undoes it.

    Raises PlanError: a rule names no module of the model.
    """
    interned: dict[Target, Target] = {}
    by_name: dict[str, list[tuple[ActivationRule, Target]]] = {}
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for rule in plan.activations:
        target = _target(rule, plan)
        target = interned.setdefault(target, target)
        matched = [name for name in names if fnmatchcase(name, rule.module)]
        if not matched:
            text = f"the pattern matches no module of {type(model).__name__}; use one over model.named_modules() names"
            raise PlanError("activations.module", rule.module, text, did_you_mean(rule.module, names))
        for name in matched:
            by_name.setdefault(name, []).append((rule, target))
    return install_frames(model, {name: _by_forward(rules) for name, rules in by_name.items()})


def _by_forward(rules: Sequence[tuple[ActivationRule, Target]]) -> ByForward:
    """The targets of one module; of several rules for a call the first counts."""
    tables: dict[int | None, dict[str, dict[int, Target]]] = {}
    for forward in dict.fromkeys([None, *(rule.forward for rule, _ in rules)]):
        table = tables[forward] = {}
        for rule, target in rules:
            if rule.forward in (None, forward):
                table.setdefault(rule.function, {}).setdefault(rule.occurrence, target)
    return tables


def _target(rule: ActivationRule, plan: ParallelPlan) -> Target:
    def states(entry: Mapping[str, str] | None) -> AxisStates | None:
        if entry is None:
            return None
        try:
            return tuple((axis, parse_state(s, plan.degree(axis))) for axis, s in sorted(entry.items()))
        except ValueError as error:
            raise PlanError(
                "activations", dict(entry), f"{rule.function} of {rule.module!r}: {error}"
            ) from None

    outputs = rule.outputs
    return Target(tuple(states(e) for e in rule.inputs), states(outputs[0]) if outputs else None)
