"""A placement of the model and everything that follows from it, computed once for all configurations that share it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.strategy import AttentionUse, ModuleWork, ParameterSize
from meshwright_planner.cost.attention import attention_uses
from meshwright_planner.evaluation.context import Basis, placements
from meshwright_planner.evaluation.gradient_units import UnitSizes, summed_units
from meshwright_planner.memory.module_work import module_runs, module_work, parameter_sizes
from meshwright_planner.memory.parts import copied_bytes, memory_parts, parameter_bytes, trained_sizes
from meshwright_planner.memory.peak import Moment, Replay, moments, optimizer_moment
from meshwright_planner.placement.legal_rows import Rules
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.recompute.effect import recomputed
from meshwright_planner.recompute.live_again import alive_again, checkpoint_dropped
from meshwright_planner.trace.flops import backward_flops
from meshwright_planner.trace.tape import Tape


class Placed:
    """A placement of one microbatch on one rank."""

    def __init__(
        self,
        basis: Basis,
        rules: Rules,
        problem: PlacementProblem,
        placement: Placement,
        like: Placed | None = None,
    ) -> None:
        """`like`: a placement with the same states, on other sizes or with other recompute rules."""
        self.basis, self.rules, self.problem, self.placement = basis, rules, problem, placement
        # the part of `alive_again` that `recompute` causes
        self._planned_again: Mapping[int, float] = {}
        self.recompute: tuple[RecomputeRule, ...] = ()
        self._entering: dict[str, tuple[tuple[tuple[int, ...], int], ...]] = {}
        self._others: dict[object, Placed] = {}
        self._times: dict[int, Placement] = {1: placement}
        self._states: _States = _States(basis, problem, placement) if like is None else like._states

    @cached_property
    def alive_again(self) -> Mapping[int, float]:
        """Representative node -> bytes that its module has alive while it is recomputed, saved tensors not included."""
        if not self.problem.tape.dropped:
            return self._planned_again
        by_model, planned = _alive_in_checkpoints(self.problem, self.placement), self._planned_again
        return {k: max(by_model.get(k, 0.0), planned.get(k, 0.0)) for k in {*by_model, *planned}}

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by part."""
        optimizer = self.basis.setting.optimizer
        return memory_parts(self.basis.sizes, self.problem, self.placement, optimizer)

    @cached_property
    def replay(self) -> Replay:
        """The simulated backward pass."""
        return Replay(self.problem, self.placement, self.alive_again)

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """The moments at which memory may be fullest."""
        return moments(self.replay, self.update)

    @cached_property
    def update(self) -> Moment:
        """The optimizer's step."""
        setting = self.basis.setting
        sizes = trained_sizes(self.basis.sizes, self.problem, self.placement)
        return optimizer_moment(sizes, setting.optimizer, setting.cluster.accelerated)

    @cached_property
    def attention(self) -> tuple[AttentionUse, ...]:
        """The attention calls."""
        problem = self.problem
        return attention_uses(problem.tape, problem.quotient, problem.costs, self.rules.composites.values())

    @cached_property
    def flops(self) -> float:
        """Operations of one rank, forward and backward, recomputation included."""
        problem, again = self.problem, self.placement.again
        tape, counts = problem.tape, problem.quotient.node_count
        total = 0.0
        for k in problem.quotient.nodes:
            forward = problem.legality.flops(k)
            backward = backward_flops(tape.nodes[k], tape.values, tape.flows[k], forward)
            total += counts[k] * (forward * (1 + tape.again[k] + again.get(k, 0.0)) + backward)
        return total / problem.costs.degree

    def survey_bytes(self, names: frozenset[str]) -> tuple[float, float]:
        """Bytes of these parameters on one rank, of all and of the trained ones."""
        cache = self._states.survey_bytes
        if names not in cache:
            cache[names] = parameter_bytes(self.basis.sizes, self.problem, self.placement, names)
        return cache[names]

    @property
    def copies(self) -> float:
        """Bytes of the compute copies of all parameters, where ranks do not share them."""
        return self._states.copies

    @property
    def parameters(self) -> tuple[dict[str, ParameterSize], ...]:
        """Per unit, its parameters by name."""
        return self._states.units

    def sizes(self, holds: frozenset[str] | None = None) -> tuple[UnitSizes, ...]:
        """The parameters of each unit; `holds`: names of those that the rank has, None for all."""
        cache = self._states.sizes
        if holds not in cache:
            shared: dict[UnitSizes, UnitSizes] = {}
            units = (tuple(_held(unit, holds).values()) for unit in self._states.units)
            # equal units are one object
            cache[holds] = tuple(shared.setdefault(unit, unit) for unit in units)
        return cache[holds]

    def summed(
        self, degrees: Mapping[str, int], over: Sequence[str], holds: frozenset[str] | None = None
    ) -> tuple[UnitSizes, ...]:
        """The parameters of each unit whose gradients are summed `over` these axes, as all axes leave them to one rank.

        `holds`: as for `sizes`.
        """
        surveys = {a: s for a, s in self.basis.surveys.items() if degrees[a] > 1 and s.parameters}
        if not surveys:
            return self.sizes(holds)
        key = (tuple(over), tuple((axis, degrees[axis]) for axis in surveys), holds)
        cache = self._states.summed
        if key not in cache:
            owners = {axis: survey.parameters for axis, survey in surveys.items()}
            stated = placements(self.basis.setting.strategies, surveys, degrees)
            units = [_held(unit, holds) for unit in self._states.units]
            cache[key] = summed_units(units, owners, stated, degrees, over)
        return cache[key]

    def trained(self, holds: frozenset[str] | None) -> int:
        """How many parameters the optimizer of one rank updates; `holds`: as for `sizes`."""
        return sum(size.trainable for unit in self.sizes(holds) for size in unit)

    def entering(
        self, modules: Iterable[str], times: int
    ) -> dict[str, tuple[tuple[tuple[int, ...], int], ...]]:
        """Module -> shape and bytes of each of its input tensors, of `times` microbatches together."""
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
        """The work of each module in a microbatch."""
        problem = self.problem
        runs = problem.quotient.once("runs", lambda: module_runs(problem))
        return module_work(self.replay, runs, self.recompute)

    def at(self, tape: Tape) -> Placed:
        """The same placement on a tape with another number of rows."""
        key = ("tape", id(tape))
        if key not in self._others:
            problem = self.problem.on(tape)
            self._others[key] = Placed(self.basis, self.rules, problem, problem.again(self.placement), self)
        return self._others[key]

    def repeated(self, times: int) -> Placement:
        """The placement of `times` microbatches, run one after the other."""
        if times not in self._times:
            self._times[times] = _repeated(self.placement, times)
        return self._times[times]

    def with_recompute(self, rules: Sequence[RecomputeRule]) -> Placed:
        """The same placement where these modules are recomputed."""
        if not rules:
            return self
        key = ("recompute", tuple(rules))
        if key not in self._others:
            problem, placement, alive = recomputed(self.problem, self.placement, rules)
            other = self._others[key] = Placed(self.basis, self.rules, problem, placement, self)
            other._planned_again, other.recompute = alive, tuple(rules)
        return self._others[key]


def _held(unit: Mapping[str, ParameterSize], holds: frozenset[str] | None) -> Mapping[str, ParameterSize]:
    """The parameters of a unit that a rank has."""
    return unit if holds is None else {name: size for name, size in unit.items() if name in holds}


def _alive_in_checkpoints(problem: PlacementProblem, placement: Placement) -> dict[int, float]:
    """Bytes alive while the activation checkpoints in the user's model recompute, by representative node."""
    tape = problem.tape
    blocks = problem.quotient.once_for(tape, "checkpoint dropped", lambda _: checkpoint_dropped(problem))
    # a tensor that stays saved meanwhile must not be counted a second time
    origin = tape if tape.origin is None else tape.origin
    whole = replace(tape, saved=[*tape.saved, *tape.dropped], recompute=("own",), origin=origin)
    return alive_again(problem.on(whole), placement, blocks, dict(enumerate(tape.again)))


class _States:
    """Values that depend on the states of a placement, not on the sizes of activations."""

    def __init__(self, basis: Basis, problem: PlacementProblem, placement: Placement) -> None:
        self._basis, self._problem, self._placement = basis, problem, placement
        self.survey_bytes: dict[frozenset[str], tuple[float, float]] = {}
        self.sizes: dict[frozenset[str] | None, tuple[UnitSizes, ...]] = {}
        self.summed: dict[object, tuple[UnitSizes, ...]] = {}

    @cached_property
    def copies(self) -> float:
        """Bytes of the compute copies of the parameters, in the precision of the plan."""
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
