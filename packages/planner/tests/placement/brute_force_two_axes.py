"""Placement problems on two axes, small enough to try every answer."""

from __future__ import annotations

from itertools import product

from brute_force import BOOK
from torch import nn

from meshwright_dtensor.comm.redistribute import route
from meshwright_dtensor.sharding.states import State, States, forward_kind, is_shard
from meshwright_dtensor.strategy import Link
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.cost.prices import AxisCosts, backward_move, convertible, forward_move, inner_dim
from meshwright_planner.placement.legal_rows import Legality
from meshwright_planner.placement.problem import RESULT
from meshwright_planner.placement.two_axes import JointLegality, JointProblem
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record

SLOW = Link("slow", 5e-5, 5e8)
"""What joins the ranks of the outer axis."""


class Narrow(JointProblem):
    """A problem of which some parameters may be stored in a few pairs only: `kept`, by value."""

    def __init__(self, legality: JointLegality) -> None:
        super().__init__(legality)
        self.kept: dict[int, list[State]] = {}

    def storable(self, value: int, divided: bool) -> list[State]:
        states = super().storable(value, divided)
        return [s for s in states if s in self.kept.get(value, states)]


def joint_problem_of(
    model: nn.Module, batch: Batch, degrees: tuple[int, int] = (2, 2), merge: bool = True
) -> Narrow:
    tape = record(model, batch, BOOK.composites)
    repeats = quotient(tape, merge)
    links = (SLOW, LAPTOP_CPU.link(1, degrees[1]))
    axes = [
        Legality(tape, repeats, BOOK, AxisCosts(LAPTOP_CPU, link, degree))
        for link, degree in zip(links, degrees, strict=True)
    ]
    return Narrow(JointLegality(axes))


def moved(problem: JointProblem, value: int, source: States, target: States) -> tuple[float, bool]:
    """Seconds of one conversion, both passes, and whether consumers share it."""
    seconds, nbytes = 0.0, problem.tape.values[value].nbytes
    inner = inner_dim(problem.tape.values[value].shape)
    here, sends, cuts = list(source), False, False
    for axis, a, b in route(source, target):
        size = nbytes
        for other, state in enumerate(here):
            if other != axis and is_shard(state):
                size //= problem.costs.degrees[other]
        forward, back = forward_move(a, b, size, inner), backward_move(a, b, size, inner)
        seconds += problem.costs.axes[axis].collective(forward)
        if problem.tape.grad[value]:
            seconds += problem.costs.axes[axis].collective(back)
        sends |= forward is not None
        cuts |= forward is None and forward_kind(a) != forward_kind(b)
        here[axis] = b
    return seconds, sends or not cuts


def joint_brute_force(problem: JointProblem) -> float:
    """The least cost over every combination of options and of parameter states on both axes."""
    tape = problem.tape
    names = [v for v in range(len(tape.values)) if (tape.values[v].name or "").startswith("param:")]
    nodes = problem.quotient.nodes
    best = float("inf")
    for states in product(*(problem.storable(v, False) for v in names)):
        for options in product(*(problem.options[k] for k in nodes)):
            left = dict(zip(names, states, strict=True))
            wanted = [(tape.results[0], ("I", "I"), (RESULT, 0))]
            seconds = 0.0
            for k, option in zip(nodes, options, strict=True):
                node = tape.nodes[k]
                wanted += [
                    (r.i, s, (k, j)) for j, (r, s) in enumerate(zip(node.ins, option.ins, strict=True))
                ]
                left.update({r.i: s for r, s in zip(node.outs, option.outs, strict=True)})
                seconds += option.seconds + option.inner_seconds
            done: dict[object, float] = {}
            for value, target, reader in wanted:
                source = left.get(value, ("I", "I"))
                cannot = not all(convertible(a, b) for a, b in zip(source, target, strict=True))
                # a weight is not moved, and within a call of a torch function nothing is
                if value in names and source != target:
                    cannot |= any(is_shard(a) and a != b for a, b in zip(source, target, strict=True))
                    cannot |= is_shard(source[1]) and source[0] != target[0] and target[0] == source[1]
                if cannot or (source != target and problem.inside_one_call(value, reader[0])):
                    seconds = float("inf")
                    break
                between = tuple(
                    "I" if (a, b) == ("P", "X") else a for a, b in zip(source, target, strict=True)
                )
                for a, b in ((source, between), (between, target)):
                    cost, shared = moved(problem, value, a, b)
                    done[value, a, b, None if shared and value not in names else reader] = cost
            best = min(best, seconds + sum(done.values()))
    return best
