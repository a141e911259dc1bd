"""The problem of placements: legal options, conversions and their costs (solved in solve.py), and users' marks as pins.

On one mesh axis here; on two, in two_axes.py, states are tuples with one state per axis.
"""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Self, TypeAlias

from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.hints import marks_of
from meshwright_dtensor.model.tied_parameters import tied_names, with_ties
from meshwright_dtensor.sharding.states import State, format_state, forward_kind, is_shard
from meshwright_planner.cost import prices
from meshwright_planner.placement.ilp import RESULT, ConversionStep, Move, Placement, Route
from meshwright_planner.placement.legal_rows import Legality, Option
from meshwright_planner.placement.saved_bytes import SavedTensors
from meshwright_planner.trace.tape import Tape

__all__ = ["RESULT", "Placement", "PlacementProblem"]

NOTICEABLE = 0.001
"""A weight with less than this fraction of all weights' bytes may be replicated."""

Pins: TypeAlias = Mapping[str, State | Sequence[State | None]]
"""Parameter name -> its state; on several axes the state on each, None: free."""


class PlacementProblem:
    """The placement problem of one tape on one axis. `pins` fixes the states of parameters, by name.

    Attributes:
        pins: representative parameter value -> the state on each axis that is fixed, None: free.
        whole: the replicated state.
        patience: default time limit of a solution in seconds.
        saved: its saved tensors.
    """

    whole: State = "I"
    patience: float = 60.0

    def __init__(self, legality: Legality, pins: Pins | None = None) -> None:
        self.legality = legality
        self.tape, self.quotient, self.costs = legality.tape, legality.quotient, legality.costs
        self.pins = _pinned_on_each(legality, pins or {})
        self.options = {k: legality.options(k) for k in self.quotient.nodes}
        nodes, value_of = self.tape.nodes, self.quotient.value
        self._maker = {value_of(ref.i): k for k in self.quotient.nodes for ref in nodes[k].outs}
        self.saved = SavedTensors(self.tape, self.quotient, self.costs)
        self._routes: dict[tuple[int, int, bool, bool, State, State], Route] = {}
        self._storable: dict[tuple[int, bool], list[State]] = {}
        self._readers: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for value, node, position in self.quotient.edges:
            self._readers[value].append((node, position))

    def on(self, tape: Tape) -> Self:
        """The same problem for a tape that differs in sizes and saved tensors only."""
        other = copy.copy(self)
        other.tape, other.legality = tape, self.legality.on(tape)
        other.saved = SavedTensors(tape, self.quotient, self.costs)
        return other

    def across(self, costs: prices.AxisCosts) -> Self:
        """The same problem for ranks joined by other links."""
        other = copy.copy(self)
        other.costs, other.legality, other._routes = costs, self.legality.across(costs), {}
        other.saved = SavedTensors(self.tape, self.quotient, costs)

        def priced(k: int, option: Option) -> Option:
            seconds = sum(map(costs.collective, option.collectives)) * (1 + self.tape.again[k])
            return replace(option, inner_seconds=seconds) if option.collectives else option

        other.options = {k: [priced(k, option) for option in some] for k, some in self.options.items()}
        return other

    def pinning(self, pins: Pins) -> Self:
        """The same problem with other pins, which change no legal options (no interval shards but those it was made with)."""
        other = copy.copy(self)
        other.pins, other._storable = _pinned_on_each(self.legality, pins), {}
        return other

    def again(self, placement: Placement) -> Placement:
        """A placement of a problem of other sizes, with its costs for this one."""
        values = self.tape.values
        options = {k: self.legality.option(k, o.ins, o.outs) for k, o in placement.options.items()}
        sized = ((c, values[c.value]) for c in placement.conversions)
        moved = [(c, c.collective.resized(value.nbytes, prices.inner_dim(value.shape))) for c, value in sized]
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
        quotient, values, nodes = self.quotient, self.tape.values, self.tape.nodes
        calls = Counter((n.call, n.call_inputs) for n in map(nodes.__getitem__, quotient.nodes))
        sizes: dict[int, int] = {}
        usable = set()
        for value, readers in self._readers.items():
            if not self.is_parameter(value) or len(values[value].shape) < 2:
                continue
            if not self.legality.parameter_choices(value):
                continue
            sizes[value] = values[value].nbytes * quotient.value_count[value]
            split = alone and any(calls[nodes[n].call, nodes[n].call_inputs] > 1 for n, _ in readers)
            if split or value in self.pins:
                continue
            states = self.usable(value, self.storable(value, False))
            if any(any(map(is_shard, prices.along(s))) for s in states):
                usable.add(value)
        total = sum(sizes.values())
        return frozenset(v for v in usable if sizes[v] >= NOTICEABLE * total)

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
        """The states in which a parameter may be stored; `divided`: sharded over the most ranks that can use it."""
        key = (value, divided)
        if key not in self._storable:
            states = [s for s in self.legality.parameter_states(value) if self._allowed(value, s)]
            if divided:
                ranks = {s: self.costs.sharers(self.costs.split((s,))) for s in self.usable(value, states)}
                states = [s for s in states if ranks.get(s) == max(ranks.values())] if ranks else states
            self._storable[key] = states
        return self._storable[key]

    def _allowed(self, value: int, state: State) -> bool:
        """Whether the pins allow a parameter to be stored in this state."""
        return all(pin in (None, s) for pin, s in zip(self.pins.get(value, ()), prices.along(state)))

    def usable(self, value: int, states: Sequence[State]) -> list[State]:
        """The states in which every reader can use a parameter without moving a shard of it."""
        readers = self._readers.get(value, [])
        wanted = [{option.ins[position] for option in self.options[node]} for node, position in readers]

        def is_used(stored: State, some: set[State]) -> bool:
            return any(stored == state or self.may_move(value, stored, state) for state in some)

        return [s for s in states if all(is_used(s, some) for some in wanted)]

    def may_move(self, value: int, source: State, target: State) -> bool:
        """Whether a value may be brought from one state to another.

        A tensor-parallel axis moves activations, never shards of weights (gathering weights is what ZeRO does, on the data
        axis).  A parameter that the user placed is gathered where it must be.
        """
        if not self.is_parameter(value):
            return True
        outer_first, pins = prices.along(source), self.pins.get(self.quotient.value(value))
        for axis, (a, b) in enumerate(zip(outer_first, prices.along(target), strict=True)):
            if a == b or (pins is not None and pins[axis] is not None):
                continue
            # a dim with an inner shard cannot get an outer shard without moving the inner one
            inner = (int(s) for s in outer_first[axis + 1 :] if isinstance(s, int))
            if is_shard(a) or (isinstance(b, int) and int(b) in inner):
                return False
        return True

    def route(self, value: int, source: State, target: State) -> Route:
        """The steps that bring a value from one state to another; None where there is no way."""
        if source != target and not self.may_move(value, source, target):
            return None
        held, grad = self.tape.values[value], self.tape.grad[value]
        key = (prices.inner_dim(held.shape), held.nbytes, grad, self.is_parameter(value), source, target)
        if key not in self._routes:
            self._routes[key] = self._steps(*key)
        return self._routes[key]

    def _steps(
        self, inner: int, nbytes: int, grad: bool, parameter: bool, source: State, target: State
    ) -> Route:
        if not prices.convertible(source, target):
            return None
        steps: list[ConversionStep] = []
        forward = prices.forward_move(source, target, nbytes, inner)
        if forward is not None:
            moves, key = (Move(source, None, "forward", forward),), ("forward", source, forward_kind(target))
            steps.append(ConversionStep(moves, self.costs.collective(forward), key, repeated=True))
        backward = prices.backward_move(source, target, nbytes, inner) if grad else None
        if backward is not None:
            moves, key = (Move(source, None, "backward", backward),), ("backward", source, target)
            steps.append(ConversionStep(moves, self.costs.collective(backward), key))
        return tuple(steps)

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


def marked(model: nn.Module, searched: Iterable[str]) -> dict[str, dict[str, State]]:
    """Searched axis -> parameter name -> state that it is marked with there. Raises UsageError: a mark on another axis."""
    axes = tuple(searched)
    marks: dict[str, dict[str, State]] = {axis: {} for axis in axes}
    for name, parameter in model.named_parameters():
        for axis, state in marks_of(parameter).items():
            if axis not in axes:
                shown = with_ties(name, tied_names(model))
                raise UsageError(
                    f"parameter {shown} is marked {format_state(state)} on axis {axis!r}, where placements are not searched; "
                    f"mark it on {' or '.join(map(repr, axes)) or 'no axis'}, or write the rule into the plan"
                )
            marks[axis][name] = state
    return marks


def _pinned(legality: Legality, marks: dict[str, State]) -> dict[int, State]:
    """Value of the tape -> state on one axis, for the representatives of repeated blocks: a mark on one copy speaks for all.

    Raises UsageError: copies of one block are marked differently, or a mark cannot be had at this degree.
    """
    by_value: dict[int, tuple[str, State]] = {}
    tied = legality.tape.tied
    for name, state in marks.items():
        value = legality.tape.parameters.get(name)
        if value is None:
            continue
        value = legality.quotient.value(value)
        first, other = by_value.setdefault(value, (name, state))
        shown = with_ties(name, tied)
        if other != state:
            raise UsageError(
                f"{with_ties(first, tied)} is marked {format_state(other)} and {shown} {format_state(state)}, but they are copies "
                "in repeated blocks, which are planned alike; mark them alike"
            )
        if state not in legality.parameter_states(value):
            shape = legality.tape.values[value].shape
            raise UsageError(
                f"{shown} of shape {list(shape)} is marked {format_state(state)}, which {legality.costs.degree} ranks "
                "cannot share; pin another degree, or change the mark"
            )
    return {value: state for value, (_, state) in by_value.items()}


def _pinned_on_each(legality: Legality, pins: Pins) -> dict[int, tuple[State | None, ...]]:
    """Value -> the states on each axis in which the user or a strategy stores it."""
    by_axis = [
        _pinned(on_axis, {n: s for n, pin in pins.items() if (s := prices.along(pin)[axis]) is not None})  # type: ignore[arg-type]
        for axis, on_axis in enumerate(legality.axes or (legality,))
    ]
    values = dict.fromkeys(value for held in by_axis for value in held)
    return {value: tuple(held.get(value) for held in by_axis) for value in values}
