"""Placement problems small enough to try every answer."""

from __future__ import annotations

from itertools import product

from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.states import State, forward_kind
from meshwright_planner.costs.prices import AxisCosts, backward_move, convertible, forward_move
from meshwright_planner.machines.known import LAPTOP_CPU
from meshwright_planner.placing.legal import Legality
from meshwright_planner.placing.placement import RESULT, PlacementProblem
from meshwright_planner.placing.program import MemoryTerms
from meshwright_planner.profile.batch import Batch
from meshwright_planner.profile.quotient import quotient
from meshwright_planner.profile.recording import record

BOOK = RuleBook.first_party()
FREE = MemoryTerms(price=0.0, parameter_factor=4.0)


def problem_of(model: nn.Module, batch: Batch, degree: int = 2, merge: bool = True) -> PlacementProblem:
    tape = record(model, batch, BOOK.composites)
    costs = AxisCosts(LAPTOP_CPU, LAPTOP_CPU.link(1, degree), degree)
    return PlacementProblem(Legality(tape, quotient(tape, merge), BOOK, costs, tape.rows))


def brute_force(problem: PlacementProblem) -> float:
    """The least cost over every combination of options and of parameter states."""
    tape, costs = problem.tape, problem.costs
    names = [v for v in range(len(tape.values)) if (tape.values[v].name or "").startswith("param:")]
    stored = [problem.legality.parameter_states(v) for v in names]
    nodes = problem.quotient.nodes
    best = float("inf")
    for states in product(*stored):
        for options in product(*(problem.options[k] for k in nodes)):
            left: dict[int, State] = dict(zip(names, states))
            wanted: list[tuple[int, State, int]] = [(tape.results[0], "I", RESULT)]
            seconds = 0.0
            for k, option in zip(nodes, options):
                node = tape.nodes[k]
                wanted += [(r.i, s, k) for r, s in zip(node.ins, option.ins)]
                left.update({r.i: s for r, s in zip(node.outs, option.outs)})
                seconds += option.seconds + option.inner_seconds
            events = set()
            for value, target, reader in wanted:
                source, nbytes = left.get(value, "I"), tape.values[value].nbytes
                # a weight is not moved, and within a call of a torch function nothing is
                fixed = (value in names and source != "I") or problem.inside_one_call(value, reader)
                if not convertible(source, target) or (fixed and source != target):
                    seconds = float("inf")
                    break
                events.add((value, "forward", forward_kind(target), forward_move(source, target, nbytes)))
                if tape.grad[value]:
                    events.add((value, "backward", target, backward_move(source, target, nbytes)))
            best = min(best, seconds + sum(costs.collective(move) for _, _, _, move in events))
    return best
