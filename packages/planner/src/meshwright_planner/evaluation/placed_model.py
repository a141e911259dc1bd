"""Parameters whose gradients ranks sum, as the axes that own some of them leave them to one rank.

A placement, and what strategies are told of it: computed once, whatever is decided around it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.sharding.states import parse_state
from meshwright_dtensor.strategy import AttentionUse, ModuleWork, ParameterSize
from meshwright_planner.cost.attention import attention_uses
from meshwright_planner.evaluation.context import Basis, placements
from meshwright_planner.memory.module_work import module_runs, module_work, parameter_sizes
from meshwright_planner.memory.parts import copied_bytes, memory_parts, parameter_bytes, trained_sizes
from meshwright_planner.memory.peak import Moment, Replay, moments, updating
from meshwright_planner.placement.legal_rows import Rules
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.recompute.effect import recomputed
from meshwright_planner.recompute.live_again import alive_again, own_dropped
from meshwright_planner.trace.flops import backward_flops
from meshwright_planner.trace.tape import Tape

Sizes = tuple[ParameterSize, ...]


def summed_units(
    units: Iterable[Mapping[str, ParameterSize]],
    owners: Mapping[str, frozenset[str]],
    stated: Mapping[str, Mapping[str, str]],
    degrees: Mapping[str, int],
    summed: Iterable[str],
) -> tuple[Sizes, ...]:
    """The parameters of each unit whose gradients are summed over axes of `summed`.

    Args:
        units: per unit its parameters by name, whole on the axes that own some.
        owners: axis -> names of the parameters that it holds for itself.
        stated: name -> axis -> state as text, of the parameters that are cut (see Strategy.placements).
        degrees: of every axis.
        summed: axes on which gradients of other parameters are partial.
    """
    over = frozenset(summed)
    alike: dict[Sizes, Sizes] = {}  # equal units are one object
    found: list[Sizes] = []
    for unit in units:
        sizes: list[ParameterSize] = []
        whole: Counter[tuple[ParameterSize, int]] = Counter()
        for name, size in unit.items():
            axes = frozenset(axis for axis, names in owners.items() if name in names)
            if not axes:
                sizes.append(size)
            elif not over <= axes:
                states = stated.get(name, {})
                left = math.prod(degrees[axis] for axis in axes if axis not in states)
                whole[_cut(size, states, degrees), left] += 1
        for (size, ranks), count in whole.items():  # what is not cut is owned by one rank each, by turns
            sizes += [size] * -(-count // ranks)
        new = tuple(sizes)
        found.append(alike.setdefault(new, new))
    return tuple(found)


def _cut(size: ParameterSize, states: Mapping[str, str], degrees: Mapping[str, int]) -> ParameterSize:
    shape, sharded = list(size.shape), list(size.sharded_dims)
    for axis, text in states.items():
        state = parse_state(text, degrees[axis])
        if isinstance(state, int) and degrees[axis] > 1 and int(state) not in sharded:
            shape[state] = -(-shape[state] // degrees[axis])
            sharded.append(int(state))
    return replace(size, shape=tuple(shape), sharded_dims=tuple(sharded))


class Placed:
    """A placement of what one rank computes at once."""

    def __init__(
        self,
        basis: Basis,
        rules: Rules,
        problem: PlacementProblem,
        placement: Placement,
        like: Placed | None = None,
    ) -> None:
        """`like`: has the same states, on other sizes or with something else kept."""
        self.basis, self.rules, self.problem, self.placement = basis, rules, problem, placement
        self._asked: Mapping[int, float] = {}  # of `again`, what was asked for
        self.recompute: tuple[RecomputeRule, ...] = ()
        self._entering: dict[str, tuple[tuple[tuple[int, ...], int], ...]] = {}
        self._others: dict[object, Placed] = {}
        self._times: dict[int, Placement] = {1: placement}
        self._states: _States = _States(basis, problem, placement) if like is None else like._states

    @cached_property
    def again(self) -> Mapping[int, float]:
        """Representative node -> bytes that its module has alive beside what is kept, where it runs again."""
        if not self.problem.tape.dropped:
            return self._asked
        own = _alive_again(self.problem, self.placement)
        return {k: max(own.get(k, 0.0), self._asked.get(k, 0.0)) for k in {*own, *self._asked}}

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by part."""
        optimizer = self.basis.setting.optimizer
        return memory_parts(self.basis.sizes, self.problem, self.placement, optimizer)

    @cached_property
    def replay(self) -> Replay:
        """The backward pass, in thought."""
        return Replay(self.problem, self.placement, self.again)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """When a step may hold most."""
        return moments(self.replay, self.update)

    @cached_property
    def update(self) -> Moment:
        """The optimizer's step."""
        setting = self.basis.setting
        sizes = trained_sizes(self.basis.sizes, self.problem, self.placement)
        return updating(sizes, setting.optimizer, setting.cluster.accelerated)

    @cached_property
    def attention(self) -> tuple[AttentionUse, ...]:
        """The attention calls."""
        problem = self.problem
        return attention_uses(problem.tape, problem.quotient, problem.costs, self.rules.composites.values())

    @cached_property
    def flops(self) -> float:
        """Operations of one rank, forward and backward, with what runs again."""
        problem, again = self.problem, self.placement.again
        tape, counts = problem.tape, problem.quotient.node_count
        found = 0.0
        for k in problem.quotient.nodes:
            ahead = problem.legality.flops(k)
            back = backward_flops(tape.nodes[k], tape.values, tape.flows[k], ahead)
            found += counts[k] * (ahead * (1 + tape.again[k] + again.get(k, 0.0)) + back)
        return found / problem.costs.degree

    def own(self, names: frozenset[str]) -> tuple[float, float]:
        """Bytes of these parameters on one rank, of all and of those that are trained."""
        found = self._states.own
        if names not in found:
            found[names] = parameter_bytes(self.basis.sizes, self.problem, self.placement, names)
        return found[names]

    @property
    def copies(self) -> float:
        """Bytes of the copies of parameters that are computed with, where none share them."""
        return self._states.copies

    @property
    def parameters(self) -> tuple[dict[str, ParameterSize], ...]:
        """Per unit, its parameters by name."""
        return self._states.units

    def sizes(self, holds: frozenset[str] | None = None) -> tuple[tuple[ParameterSize, ...], ...]:
        """The parameters of each unit; `holds`: names that the rank has, None for all."""
        found = self._states.sizes
        if holds not in found:
            alike: dict[
                tuple[ParameterSize, ...], tuple[ParameterSize, ...]
            ] = {}  # equal units are one object
            every = (
                tuple(size for name, size in unit.items() if holds is None or name in holds)
                for unit in self._states.units
            )
            found[holds] = tuple(alike.setdefault(unit, unit) for unit in every)
        return found[holds]

    def summed(
        self, degrees: Mapping[str, int], over: Sequence[str], holds: frozenset[str] | None = None
    ) -> tuple[tuple[ParameterSize, ...], ...]:
        """The parameters of each unit whose gradients are summed `over` these axes, as all axes leave them to a rank.

        `holds`: as in `sizes`.
        """
        surveys = {a: s for a, s in self.basis.surveys.items() if degrees[a] > 1 and s.parameters}
        if not surveys:
            return self.sizes(holds)
        key = (tuple(over), tuple((axis, degrees[axis]) for axis in surveys), holds)
        found = self._states.summed
        if key not in found:
            owners = {axis: survey.parameters for axis, survey in surveys.items()}
            stated = placements(self.basis.setting.strategies, surveys, degrees)
            every = self._states.units
            if holds is not None:
                every = tuple({n: size for n, size in unit.items() if n in holds} for unit in every)
            found[key] = summed_units(every, owners, stated, degrees, over)
        return found[key]

    def trained(self, holds: frozenset[str] | None) -> int:
        """How many parameters an optimizer steps on one rank; `holds`: names of those that it has, None for all."""
        return sum(size.trainable for unit in self.sizes(holds) for size in unit)

    def entering(
        self, modules: Iterable[str], times: int
    ) -> dict[str, tuple[tuple[tuple[int, ...], int], ...]]:
        """Module -> shape and bytes of what goes into it in `times` microbatches."""
        for module in modules:
            if module not in self._entering:
                self._entering[module] = self.problem.tape.entering(module)
        return {
            m: tuple(
                ((shape[0] * times, *shape[1:]) if shape else shape, size * times)
                for shape, size in self._entering[m]
            )
            for m in modules
        }

    @cached_property
    def work(self) -> tuple[ModuleWork, ...]:
        """What modules do in a microbatch."""
        problem = self.problem
        runs = problem.quotient.once("runs", lambda: module_runs(problem))
        return module_work(self.replay, runs, self.recompute)

    def at(self, tape: Tape) -> Placed:
        """The same placement of a tape with another number of rows."""
        key = ("tape", id(tape))
        if key not in self._others:
            problem = self.problem.on(tape)
            self._others[key] = Placed(self.basis, self.rules, problem, problem.again(self.placement), self)
        return self._others[key]

    def repeated(self, times: int) -> Placement:
        """The placement of `times` microbatches, one after the other."""
        if times not in self._times:
            self._times[times] = _repeated(self.placement, times)
        return self._times[times]

    def with_recompute(self, rules: Sequence[RecomputeRule]) -> Placed:
        """The same placement where these modules run twice."""
        if not rules:
            return self
        key = ("recompute", tuple(rules))
        if key not in self._others:
            problem, placement, again = recomputed(self.problem, self.placement, rules)
            other = self._others[key] = Placed(self.basis, self.rules, problem, placement, self)
            other._asked, other.recompute = again, tuple(rules)
        return self._others[key]


def _alive_again(problem: PlacementProblem, placement: Placement) -> dict[int, float]:
    """What the model's own checkpoints have alive while they run again."""
    tape = problem.tape
    blocks = problem.quotient.once_for(tape, "own dropped", lambda _: own_dropped(problem))
    # what is kept meanwhile does not live beside that too
    origin = tape if tape.origin is None else tape.origin
    whole = replace(tape, saved=[*tape.saved, *tape.dropped], recompute=("own",), origin=origin)
    return alive_again(problem.on(whole), placement, blocks, dict(enumerate(tape.again)))


class _States:
    """What follows from the states of a placement alone, not from sizes of activations."""

    def __init__(self, basis: Basis, problem: PlacementProblem, placement: Placement) -> None:
        self._basis, self._problem, self._placement = basis, problem, placement
        self.own: dict[frozenset[str], tuple[float, float]] = {}
        self.sizes: dict[frozenset[str] | None, tuple[tuple[ParameterSize, ...], ...]] = {}
        self.summed: dict[object, tuple[tuple[ParameterSize, ...], ...]] = {}

    @cached_property
    def copies(self) -> float:
        """Bytes of the copies of parameters in the precision of the plan."""
        dtype = self._basis.setting.dtype
        if dtype is None:
            return 0.0
        return copied_bytes(self._basis.sizes, self._problem, self._placement, dtype)

    @cached_property
    def units(self) -> tuple[dict[str, ParameterSize], ...]:
        """Per unit, its parameters."""
        basis = self._basis
        return parameter_sizes(basis.units, basis.setting.dtype, self._problem, self._placement)


def _repeated(placement: Placement, times: int) -> Placement:
    return replace(
        placement,
        conversions=[replace(c, count=c.count * times) for c in placement.conversions],
        compute_seconds=placement.compute_seconds * times,
        forward_seconds=placement.forward_seconds * times,
        communication_seconds=placement.communication_seconds * times,
        saved_bytes=placement.saved_bytes * times,
        times=times,
    )
