"""What the modules of a model do, one after the other, for strategies that divide a model by modules."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from meshwright_dtensor.strategy import ModuleWork, ParameterSize, SearchRequest, StrategyCost
from meshwright_dtensor.units import parameter_units
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


def module_work(
    problem: PlacementProblem, placement: Placement, runs: Sequence[ModuleRun] | None = None
) -> tuple[ModuleWork, ...]:
    """The work of one rank in the order of execution; `runs`: those of the problem, where they are known."""
    tape = problem.tape
    saved: dict[int, float] = {}
    seen: set[object] = set()
    for number, item in enumerate(tape.saved):
        key = item.root if item.root is not None else ("inner", number)
        name = "" if item.root is None else tape.values[item.root].name or ""
        if key not in seen and not name.startswith("param:"):
            seen.add(key)
            saved[item.node] = saved.get(item.node, 0.0) + item.nbytes
    seconds = {k: option.seconds for k, option in placement.options.items()}
    return tuple(
        ModuleWork(
            run.module,
            sum(seconds[k] for _, k in run.nodes),
            sum(saved.get(index, 0.0) for index, _ in run.nodes),
            run.parameters,
            frozenset((i, made, tape.values[i].nbytes) for i, made in run.entering),
        )
        for run in (module_runs(problem) if runs is None else runs)
    )


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
