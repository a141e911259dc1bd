"""The problem of placements on one mesh axis: legal options, conversions and their costs (solved in solve.py)."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Self

from meshwright_dtensor.sharding.states import State, forward_kind, is_shard
from meshwright_planner.cost.prices import AxisCosts, Collective, backward_move, convertible, forward_move
from meshwright_planner.placement.ilp import RESULT, ConversionStep, Move, Phase, Placement, Route
from meshwright_planner.placement.legal_rows import Legality, Option
from meshwright_planner.placement.pinned import pinned
from meshwright_planner.placement.saved_bytes import SavedTensors
from meshwright_planner.trace.tape import Tape

__all__ = ["RESULT", "Placement", "PlacementProblem"]

NOTICEABLE = 0.001
"""A weight with less than this fraction of all weights' bytes may be replicated."""


class PlacementProblem:
    """The placement problem of one tape on one axis. `pins` fixes the states of parameters, by name.

    Attributes:
        whole: the replicated state.
        patience: default time limit of a solution in seconds.
        saved: its saved tensors.
    """

    whole: State = "I"
    patience: float = 60.0

    def __init__(self, legality: Legality, pins: Mapping[str, State] | None = None) -> None:
        self.legality = legality
        self.tape, self.quotient, self.costs = legality.tape, legality.quotient, legality.costs
        self.pins = pinned(legality, dict(pins or {}))
        self.options = {k: legality.options(k) for k in self.quotient.nodes}
        nodes, value_of = self.tape.nodes, self.quotient.value
        self._maker = {value_of(ref.i): k for k in self.quotient.nodes for ref in nodes[k].outs}
        self.saved = SavedTensors(self.tape, self.quotient, self.costs)
        self._routes: dict[tuple[int, bool, bool, State, State], Route] = {}

    def on(self, tape: Tape) -> Self:
        """The same problem for a tape that differs in sizes and saved tensors only."""
        other = copy.copy(self)
        other.tape, other.legality = tape, self.legality.on(tape)
        other.saved = SavedTensors(tape, self.quotient, self.costs)
        return other

    def across(self, costs: AxisCosts) -> Self:
        """The same problem for ranks joined by other links."""
        other = copy.copy(self)
        other.costs, other.legality, other._routes = costs, self.legality.across(costs), {}
        other.saved = SavedTensors(self.tape, self.quotient, costs)

        def priced(k: int, option: Option) -> Option:
            seconds = sum(map(costs.collective, option.collectives)) * (1 + self.tape.again[k])
            return replace(option, inner_seconds=seconds) if option.collectives else option

        other.options = {k: [priced(k, option) for option in some] for k, some in self.options.items()}
        return other

    def pinning(self, pins: Mapping[str, State]) -> PlacementProblem:
        """The same problem with other pins, which change no legal options (no interval shards but those it was made with)."""
        other = copy.copy(self)
        other.pins = pinned(self.legality, dict(pins))
        return other

    def again(self, placement: Placement) -> Placement:
        """A placement of a problem of other sizes, with its costs for this one."""
        values = self.tape.values
        options = {k: self.legality.option(k, o.ins, o.outs) for k, o in placement.options.items()}
        moved = [(c, c.collective.resized(values[c.value].nbytes)) for c in placement.conversions]
        conversions = [replace(conversion, collective=collective) for conversion, collective in moved]
        placed = replace(placement, options=options, conversions=conversions)
        placed.compute_seconds, placed.forward_seconds, placed.communication_seconds = self.seconds(placed)
        placed.saved_bytes = self.saved.total(placed)
        return placed

    def seconds(self, placement: Placement) -> tuple[float, float, float]:
        """Seconds of compute, of its forward pass, and of communication, by the options and conversions of a placement."""
        counts, options = self.quotient.node_count, placement.options
        parts = [(option.seconds * counts[k], option.forward) for k, option in options.items()]
        between = sum(self.costs.collective(c.collective) * c.count for c in placement.conversions)
        inner = sum(option.inner_seconds * counts[k] for k, option in options.items())
        return sum(s for s, _ in parts), sum(s * forward for s, forward in parts), between + inner

    def shares(self, placement: Placement) -> tuple[float, ...]:
        """The fraction of the communication of a placement (of one microbatch) that each searched axis has."""
        seconds = [0.0] * len(self.costs.degrees)
        for c in placement.conversions:
            seconds[c.collective.axis] += self.costs.collective(c.collective) * c.count
        for k, option in placement.options.items():
            for collective in option.collectives:
                seconds[collective.axis] += self.costs.collective(collective) * self.quotient.node_count[k]
        total = sum(seconds)
        return tuple(s / total if total else 1.0 / len(seconds) for s in seconds)

    def weights(self, alone: bool = False) -> frozenset[int]:
        """Parameters of two dims or more, with a noticeable fraction of all bytes, that can be used as shards.

        `alone`: only if the call that reads them is a single operation. Nothing is converted inside a call, so a state that one
        operation can use need not suit the next (a whole LSTM is one call).
        """
        quotient, values = self.quotient, self.tape.values
        usable: dict[int, set[State]] = {}
        calls = Counter((n.call, n.call_inputs) for n in map(self.tape.nodes.__getitem__, quotient.nodes))
        for value, node, position in quotient.edges:
            reader = self.tape.nodes[node]
            if alone and calls[reader.call, reader.call_inputs] > 1:
                usable[value] = set()
                continue
            if len(values[value].shape) > 1 and self.legality.parameter_choices(value):
                wanted = {option.ins[position] for option in self.options[node]}
                states = {s for s in self.legality.parameter_states(value) if is_shard(s)}
                usable[value] = usable.get(value, states) & wanted
        sizes = {value: values[value].nbytes * quotient.value_count[value] for value in usable}
        total = sum(sizes.values())
        return frozenset(v for v, states in usable.items() if states and sizes[v] >= NOTICEABLE * total)

    def inside_one_call(self, value: int, node: int) -> bool:
        """Whether a value is produced and read by one torch function call: a plan has no conversions inside calls."""
        maker = self._maker.get(value)
        if maker is None or node == RESULT:
            return False
        first, second = self.tape.nodes[maker], self.tape.nodes[node]
        return first.call is not None and (first.call, first.call_inputs) == (second.call, second.call_inputs)

    def writes(self, node: int, position: int) -> bool:
        """Whether a node writes to this input, or is a view of it that is written through."""
        is_first = node != RESULT and not position
        return is_first and (self.tape.nodes[node].mutates or node in self.tape.through)

    def is_parameter(self, value: int) -> bool:
        """Whether a value is a parameter."""
        return (self.tape.values[value].name or "").startswith("param:")

    def storable(self, value: int, divided: bool) -> list[State]:
        """The states in which a parameter may be stored. `divided`: sharded only."""
        if value in self.pins:
            return [self.pins[value]]
        return [s for s in self.legality.parameter_states(value) if is_shard(s) or not divided]

    def may_move(self, value: int, source: State, target: State) -> bool:
        """Whether a value may be brought from one state to another.

        A tensor-parallel axis moves activations, never weights (gathering weights is what ZeRO does, on the data
        axis).  A parameter that the user placed is gathered where it must be.
        """
        free = not self.is_parameter(value) or self.quotient.value(value) in self.pins
        return free or not is_shard(source)

    def route(self, value: int, source: State, target: State) -> Route:
        """The steps that bring a value from one state to another; None where there is no way."""
        if source != target and not self.may_move(value, source, target):
            return None
        nbytes, grad = self.tape.values[value].nbytes, self.tape.grad[value]
        key = (nbytes, grad, self.is_parameter(value), source, target)
        if key not in self._routes:
            self._routes[key] = self._steps(*key)
        return self._routes[key]

    def _steps(self, nbytes: int, grad: bool, parameter: bool, source: State, target: State) -> Route:
        if not convertible(source, target):
            return None
        backward = backward_move(source, target, nbytes) if grad else None
        collectives: tuple[tuple[Phase, Collective | None, State], ...] = (
            ("forward", forward_move(source, target, nbytes), forward_kind(target)),
            ("backward", backward, target),
        )
        return tuple(
            ConversionStep(
                (Move(source, None, phase, collective),),
                self.costs.collective(collective),
                (phase, source, kind),
                repeated=phase == "forward",
            )
            for phase, collective, kind in collectives
            if collective is not None
        )

    def replicated(self) -> Placement:
        """The placement with everything replicated."""
        options = {k: self.options[k][0] for k in self.quotient.nodes}
        saved: dict[object, float] = {}
        for number, item in enumerate(self.tape.saved):
            if item.root is None or not self.tape.lasts(item.root):
                key = item.root if item.root is not None else ("inner", number)
                saved[key] = max(saved.get(key, 0.0), float(self.saved.nbytes(item)))
        placement = Placement(options, saved_bytes=sum(saved.values()), status="replicated")
        placement.compute_seconds, placement.forward_seconds, _ = self.seconds(placement)
        return placement
