"""A placement of the model and everything that follows from it, computed once for all configurations that share it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property

from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.propagate.predict import PredictedMove
from meshwright_dtensor.rules.node import NodeView
from meshwright_dtensor.sharding.states import parse_state
from meshwright_dtensor.strategy import AttentionUse, CollectiveUse, ModuleWork, ParameterSize
from meshwright_dtensor.utils.memo import Memo
from meshwright_planner.cost.prices import work_of
from meshwright_planner.evaluation.context import Basis, Degrees, placements
from meshwright_planner.memory.module_work import module_work, parameter_sizes
from meshwright_planner.memory.parts import copied_bytes, memory_parts, parameter_bytes, trained_sizes
from meshwright_planner.memory.peak import Moment, Replay, moments, optimizer_moment
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.recompute.effect import alive_again, checkpoint_dropped, recomputed
from meshwright_planner.recompute.region import recomputed_blocks
from meshwright_planner.trace.flops import backward_flops, by_name
from meshwright_planner.trace.tape import Tape

UnitSizes = tuple[ParameterSize, ...]
"""The parameters of one unit."""

Entering = tuple[tuple[tuple[int, ...], int], ...]
"""Shape and bytes of each input tensor of a module."""


class Placed:
    """A placement of one microbatch on one rank."""

    def __init__(
        self, basis: Basis, problem: PlacementProblem, placement: Placement, like: Placed | None = None
    ) -> None:
        """`like`: a placement with the same states, on other sizes or with other recompute rules."""
        self.basis, self.problem, self.placement = basis, problem, placement
        # the part of `alive_again` that `recompute` causes
        self._planned_again: Mapping[int, float] = {}
        self.recompute: tuple[RecomputeRule, ...] = ()
        self._entering = cache(problem.tape.entering)
        self._others: dict[object, Placed] = {}
        self._times: dict[int, Placement] = {1: placement}
        # what depends on the states of the placement, not on the sizes of activations
        self._by_states: Memo = Memo() if like is None else like._by_states

    @cached_property
    def alive_again(self) -> Mapping[int, float]:
        """Representative node -> bytes that its module has alive while it is recomputed, saved tensors not included."""
        if not self.problem.tape.dropped:
            return self._planned_again
        problem, tape, planned = self.problem, self.problem.tape, self._planned_again
        blocks = problem.quotient.once_for(tape, "checkpoint dropped", lambda _: checkpoint_dropped(problem))
        # a tensor that stays saved meanwhile must not be counted a second time
        origin = tape if tape.origin is None else tape.origin
        whole = replace(tape, saved=[*tape.saved, *tape.dropped], recompute=("own",), origin=origin)
        by_model = alive_again(problem.on(whole), self.placement, blocks, dict(enumerate(tape.again)))
        return {k: max(by_model.get(k, 0.0), planned.get(k, 0.0)) for k in {*by_model, *planned}}

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by part."""
        return memory_parts(self.basis.sizes, self.problem, self.placement, self.basis.setting.states)

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
        """The attention calls, equal ones counted together; the searched axis shards heads if it can, as placements do."""
        attention = by_name(self.problem.legality.rules.composites).get("sdpa")
        if attention is None:
            return ()
        tape, quotient, costs = self.problem.tape, self.problem.quotient, self.problem.costs
        uses: Counter[AttentionUse] = Counter()
        for k in quotient.nodes:
            node = tape.nodes[k]
            if node.name != attention.name:
                continue
            q, key, v = (tape.values[ref.i] for ref in node.ins[:3])
            heads, key_heads = (t.shape[-3] if len(t.shape) > 2 else 1 for t in (q, key))
            split = costs.degree if heads % costs.degree == 0 else 1
            by_key = split if key_heads % split == 0 else 1
            states = [("I",) * len(refs) for refs in (node.ins, node.outs)]
            flops = attention.flops(NodeView.of(node, tape.values, 1))
            work = work_of(node, tape.values, tape.flows[k], flops, again=tape.again[k])
            use = AttentionUse(
                query_bytes=q.nbytes // split,
                key_value_bytes=(key.nbytes + v.nbytes) // by_key,
                output_bytes=tape.values[node.outs[0].i].nbytes // split,
                heads=heads // split,
                key_heads=key_heads // by_key,
                causal=bool(node.args[5]),
                seconds=costs.compute(work, node, tape.values, *states) / split,
            )
            uses[use] += quotient.node_count[k]
        return tuple(replace(use, count=count) for use, count in uses.items())

    @cached_property
    def shares(self) -> tuple[float, ...]:
        """Per searched axis, its part of the communication."""
        return self.problem.shares(self.placement)

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
        where = self.basis.sizes, self.problem, self.placement
        return self._by_states.once(("survey", names), lambda: parameter_bytes(*where, names))

    @property
    def copies(self) -> float:
        """Bytes of the compute copies of all parameters in the precision of the plan, where ranks do not share them."""
        sizes, problem, dtype = self.basis.sizes, self.problem, self.basis.setting.dtype
        if dtype is None:
            return 0.0
        return self._by_states.once("copies", lambda: copied_bytes(sizes, problem, self.placement, dtype))

    @property
    def _units(self) -> tuple[dict[str, ParameterSize], ...]:
        """Per unit, its parameters."""
        units, dtype = self.basis.units, self.basis.setting.dtype
        where = self.problem, self.placement
        return self._by_states.once("units", lambda: parameter_sizes(units, dtype, *where))

    def sizes(self, holds: frozenset[str] | None = None) -> tuple[UnitSizes, ...]:
        """The parameters of each unit; `holds`: names of those that the rank has, None for all."""

        def find() -> tuple[UnitSizes, ...]:
            shared: dict[UnitSizes, UnitSizes] = {}
            units = (tuple(_held(unit, holds).values()) for unit in self._units)
            # equal units are one object
            return tuple(shared.setdefault(unit, unit) for unit in units)

        return self._by_states.once(("sizes", holds), find)

    def summed(
        self, degrees: Degrees, over: Sequence[str], holds: frozenset[str] | None = None
    ) -> tuple[UnitSizes, ...]:
        """The parameters of each unit whose gradients are summed `over` these axes, on one rank; `holds`: as for `sizes`."""
        surveys = {a: s for a, s in self.basis.surveys.items() if degrees[a] > 1 and s.parameters}
        if not surveys:
            return self.sizes(holds)

        def find() -> tuple[UnitSizes, ...]:
            owners = {axis: survey.parameters for axis, survey in surveys.items()}
            stated = placements(self.basis.setting.strategies, surveys, degrees)
            return summed_units((_held(unit, holds) for unit in self._units), owners, stated, degrees, over)

        summing = tuple((axis, degrees[axis]) for axis in surveys)
        return self._by_states.once((tuple(over), summing, holds), find)

    def trained(self, holds: frozenset[str] | None) -> int:
        """How many parameters the optimizer of one rank updates; `holds`: as for `sizes`."""
        return sum(size.trainable for unit in self.sizes(holds) for size in unit)

    def entering(self, modules: Iterable[str], times: int) -> dict[str, Entering]:
        """Module -> shape and bytes of each of its input tensors, of `times` microbatches together."""

        def all_rows(inputs: Entering) -> Entering:
            return tuple(((s[0] * times, *s[1:]) if s else s, nbytes * times) for s, nbytes in inputs)

        return {module: all_rows(self._entering(module)) for module in modules}

    @cached_property
    def work(self) -> tuple[ModuleWork, ...]:
        """The work of each module in a microbatch."""
        return module_work(self.replay)

    def row_collectives(self, times: int, degrees: Degrees) -> Iterator[tuple[str, CollectiveUse, float]]:
        """(axis, collectives of one step, seconds of one of them) of operations that combine batch rows of several ranks.

        `times`: number of microbatches. A recomputed operation communicates again.
        """
        problem, tape = self.problem, self.problem.tape
        if tape.division is None:
            return
        recomputed = tuple(f"{name}." for name in recomputed_blocks(tape, self.recompute))
        made, value_of = self.placement.options.items(), problem.quotient.value
        outputs = (pair for k, option in made for pair in zip(tape.nodes[k].outs, option.outs))
        states = {value_of(ref.i): state for ref, state in outputs}
        counted: Counter[PredictedMove] = Counter()
        for moved, count in tape.division.moved:
            twice = moved.phase == "forward" and f"{moved.module}.".startswith(recomputed)
            share = 1.0
            if moved.value is not None:
                # of a value that a searched axis shards, each rank of that axis moves its part
                share = problem.costs.share(states.get(value_of(moved.value), "I"))
            part = replace(moved, nbytes=round(moved.nbytes * share), value=None)
            counted[part] += count * times * (1 + twice)
        for moved, count in counted.items():
            link, why = self.basis.link(degrees, moved.axis), moved.why
            if not why.startswith("inside "):
                why = f"{why} for {moved.function}, which combines rows of several ranks"
            use = CollectiveUse(moved.kind, moved.nbytes, count, moved.phase, why, moved.module)
            yield moved.axis, use, link.seconds(moved.kind, moved.nbytes, degrees[moved.axis])

    def at(self, tape: Tape) -> Placed:
        """The same placement on a tape with another number of rows."""
        key = ("tape", id(tape))
        if key not in self._others:
            problem = self.problem.on(tape)
            self._others[key] = Placed(self.basis, problem, problem.again(self.placement), self)
        return self._others[key]

    def repeated(self, times: int) -> Placement:
        """The placement of `times` microbatches, run one after the other."""
        if times not in self._times:
            once = self.placement
            self._times[times] = replace(
                once,
                conversions=[replace(c, count=c.count * times) for c in once.conversions],
                compute_seconds=once.compute_seconds * times,
                forward_seconds=once.forward_seconds * times,
                communication_seconds=once.communication_seconds * times,
                saved_bytes=once.saved_bytes * times,
                times=times,
            )
        return self._times[times]

    def with_recompute(self, rules: Sequence[RecomputeRule]) -> Placed:
        """The same placement where these modules are recomputed."""
        if not rules:
            return self
        key = ("recompute", tuple(rules))
        if key not in self._others:
            problem, placement, alive = recomputed(self.problem, self.placement, rules)
            other = self._others[key] = Placed(self.basis, problem, placement, self)
            other._planned_again, other.recompute = alive, tuple(rules)
        return self._others[key]


def _held(unit: Mapping[str, ParameterSize], holds: frozenset[str] | None) -> Mapping[str, ParameterSize]:
    """The parameters of a unit that a rank has."""
    return unit if holds is None else {name: size for name, size in unit.items() if name in holds}


def summed_units(
    units: Iterable[Mapping[str, ParameterSize]],
    owners: Mapping[str, frozenset[str]],
    stated: Mapping[str, Mapping[str, str]],
    degrees: Degrees,
    summed: Iterable[str],
) -> tuple[UnitSizes, ...]:
    """The parameters of each unit whose gradients are summed over axes of `summed`.

    Args:
        units: per unit its parameters by name, whole on the axes that own some.
        owners: axis -> names of the parameters that its strategy distributes over its ranks.
        stated: name -> axis -> state as text, of the parameters that are sharded (see Strategy.placements).
        degrees: of every axis.
        summed: axes on which gradients of other parameters are partial.
    """
    over = frozenset(summed)
    shared: dict[UnitSizes, UnitSizes] = {}
    result: list[UnitSizes] = []
    for unit in units:
        sizes: list[ParameterSize] = []
        owned: Counter[tuple[ParameterSize, int]] = Counter()
        for name, size in unit.items():
            axes = frozenset(axis for axis, names in owners.items() if name in names)
            if not axes:
                sizes.append(size)
            elif not over <= axes:
                states = stated.get(name, {})
                ranks = math.prod(degrees[axis] for axis in axes if axis not in states)
                owned[_sharded(size, states, degrees), ranks] += 1
        # parameters that are not sharded are dealt out over the ranks of the owning axes
        for (size, ranks), count in owned.items():
            sizes += [size] * -(-count // ranks)
        # equal units are one object
        result.append(shared.setdefault(tuple(sizes), tuple(sizes)))
    return tuple(result)


def _sharded(size: ParameterSize, states: Mapping[str, str], degrees: Degrees) -> ParameterSize:
    shape, sharded = list(size.shape), list(size.sharded_dims)
    for axis, text in states.items():
        state = parse_state(text, degrees[axis])
        if isinstance(state, int) and degrees[axis] > 1 and int(state) not in sharded:
            shape[state] = -(-shape[state] // degrees[axis])
            sharded.append(int(state))
    return replace(size, shape=tuple(shape), sharded_dims=tuple(sharded))
