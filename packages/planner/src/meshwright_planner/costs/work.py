"""What the modules of a model do, one after the other, for strategies that divide a model by modules."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright_dtensor.states import State, is_shard
from meshwright_dtensor.strategy import ModuleWork, ParameterSize, SearchRequest, StrategyCost
from meshwright_dtensor.units import parameter_units
from meshwright_planner.costs.peak import Replay
from meshwright_planner.costs.prices import BACKWARD
from meshwright_planner.placing.placement import Placement, PlacementProblem


@dataclass(frozen=True)
class ModuleRun:
    """Consecutive operations of one module, whatever their sizes.

    Args:
        module: its full name.
        nodes: its operations: (node, representative).
        parameters: names of the parameters that they read.
        entering: (value, module that made it).
    """

    module: str
    nodes: tuple[tuple[int, int], ...]
    parameters: frozenset[str]
    entering: tuple[tuple[int, str], ...]


def module_runs(problem: PlacementProblem) -> tuple[ModuleRun, ...]:
    """The operations in the order of execution, consecutive ones of one module together."""
    tape, representative = problem.tape, problem.quotient.node
    maker: dict[int, str] = {}
    found: list[ModuleRun] = []
    for module, nodes in itertools.groupby(enumerate(tape.nodes), lambda entry: entry[1].module):
        own: list[tuple[int, int]] = []
        read: set[str] = set()
        entering: dict[tuple[int, str], None] = {}
        for index, node in nodes:
            own.append((index, representative(index)))
            for ref in node.ins:
                value = tape.values[ref.i]
                if value.name is not None and value.name.startswith("param:"):
                    read.add(value.name.removeprefix("param:"))
                made = maker.get(ref.i)
                if made is not None and made != module and value.dtype.is_floating_point:
                    entering[ref.i, made] = None
            maker.update((ref.i, module) for ref in node.outs)
        found.append(ModuleRun(module, tuple(own), frozenset(read), tuple(entering)))
    return tuple(found)


def module_work(replay: Replay, runs: Sequence[ModuleRun] | None = None) -> tuple[ModuleWork, ...]:
    """The work of one rank in the order of execution; `runs`: those of the problem, where they are known."""
    problem, placement = replay.problem, replay.placement
    tape, quotient, share = problem.tape, problem.quotient, problem.costs.share
    runs = module_runs(problem) if runs is None else runs
    run_of = {index: number for number, run in enumerate(runs) for index, _ in run.nodes}
    own, common = _kept(problem, placement, run_of)
    seconds = {k: option.seconds for k, option in placement.options.items()}
    ahead = {k: s / (1 + BACKWARD + placement.again.get(k, 0.0)) for k, s in seconds.items()}
    beside = {k: replay.alive[n] + replay.gradient.get(n, 0.0) for k, n in replay.place.items()}
    waiting = {k: _waiting(problem, placement, k) for k in replay.place}
    states: dict[int, State] = {}
    found = []
    for number, run in enumerate(runs):
        whole = sum(seconds[k] for _, k in run.nodes)
        found.append(
            ModuleWork(
                run.module,
                whole,
                own[number],
                run.parameters,
                frozenset(
                    (i, made, math.ceil(tape.values[i].nbytes * share(states.get(quotient.value(i), "I"))))
                    for i, made in run.entering
                ),
                frozenset(common[number].items()),
                max(beside[k] for _, k in run.nodes),
                sum(waiting[k] for _, k in run.nodes),
                sum(ahead[k] for _, k in run.nodes) / whole if whole else 1 / (1 + BACKWARD),
            )
        )
        for index, k in run.nodes:
            for ref, state in zip(tape.nodes[index].outs, placement.options[k].outs):
                states[quotient.value(ref.i)] = state
    return tuple(found)


def _waiting(problem: PlacementProblem, placement: Placement, k: int) -> float:
    """Bytes of the gradients of the results of a node, where it computes with a parameter that is trained."""
    tape, node = problem.tape, problem.tape.nodes[k]
    if placement.again:  # where modules run again, a backward is not split
        return 0.0
    if not any(tape.grad[r.i] and (tape.values[r.i].name or "").startswith("param:") for r in node.ins):
        return 0.0
    outs = zip(node.outs, placement.options[k].outs, strict=True)
    return sum(tape.values[r.i].nbytes * problem.costs.share(s) for r, s in outs if tape.grad[r.i])


def _kept(
    problem: PlacementProblem, placement: Placement, run_of: Mapping[int, int]
) -> tuple[list[float], list[dict[int, float]]]:
    """By run, the bytes that autograd keeps of it alone, and by tensor those that it keeps of others too."""
    tape, share = problem.tape, problem.costs.share
    count = 1 + max(run_of.values(), default=-1)
    own, common = [0.0] * count, [dict[int, float]() for _ in range(count)]
    keepers: dict[int, dict[int, float]] = {}
    for item in tape.saved:
        option, run = placement.options[problem.quotient.node(item.node)], run_of[item.node]
        if item.root is None:
            split = any(map(is_shard, (*option.ins, *option.outs)))
            own[run] += problem.kept_bytes(item) * (share(0) if split else 1.0)
        elif not (tape.values[item.root].name or "").startswith("param:"):
            size = item.nbytes * (share(0) if problem.keeps_shard(item, option) else 1.0)
            of = keepers.setdefault(item.root, {})
            of[run] = max(of.get(run, 0.0), size)
    for root, of in keepers.items():
        if len(of) == 1:
            ((run, size),) = of.items()
            own[run] += size
        else:
            for run in of:
                common[run][root] = max(of.values())
    return own, common


def parameter_sizes(
    model: nn.Module, used: torch.dtype | None, problem: PlacementProblem, placement: Placement
) -> tuple[dict[str, ParameterSize], ...]:
    """The parameters of each unit (see units.parameter_units) by name, as a placement leaves them to one rank.

    `used`: dtype that they are computed in, None for their own.
    """
    tape, degree = problem.tape, problem.costs.degree

    def size(name: str, p: torch.Tensor) -> ParameterSize:
        value = tape.parameters.get(name)
        state = "I" if value is None else placement.stored.get(problem.quotient.value(value), "I")
        shape, taken = list(p.shape), []
        if isinstance(state, int) and degree > 1:
            shape[state] = -(-shape[state] // degree)
            taken = [int(state)]
        cast = used.itemsize if used is not None and p.is_floating_point() else p.element_size()
        return ParameterSize(tuple(shape), tuple(taken), (p.element_size(), cast), p.requires_grad)

    return tuple({name: size(name, p) for name, p in own} for _, _, own in parameter_units(model))


def inside_of(request: SearchRequest, cost: StrategyCost, up: Callable[[float], int]) -> SearchRequest:
    """What other strategies see of a model when one rank holds a part of its modules."""
    return replace(
        request,
        parameter_bytes=up(request.parameter_bytes * cost.parameters),
        gradient_bytes=up(request.gradient_bytes * cost.gradients),
        activation_bytes=up(request.activation_bytes * cost.activations),
        forward_seconds=request.forward_seconds * cost.compute,
        backward_seconds=request.backward_seconds * cost.compute,
        flops=request.flops * cost.compute,
    )
