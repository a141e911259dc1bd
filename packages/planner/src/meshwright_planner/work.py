"""What the modules of a model do, one after the other, for strategies that divide a model by modules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from meshwright_dtensor.strategy import ModuleWork, ParameterSize, SearchRequest, StrategyCost
from meshwright_dtensor.units import parameter_units
from meshwright_planner.placement import Placement, PlacementProblem


def module_work(problem: PlacementProblem, placement: Placement) -> tuple[ModuleWork, ...]:
    """The work of one rank in the order of execution, consecutive operations of one module together."""
    tape = problem.tape
    saved: dict[int, float] = {}
    seen: set[object] = set()
    for number, item in enumerate(tape.saved):
        key = item.root if item.root is not None else ("inner", number)
        name = "" if item.root is None else tape.values[item.root].name or ""
        if key not in seen and not name.startswith("param:"):
            seen.add(key)
            saved[item.node] = saved.get(item.node, 0.0) + item.nbytes
    found: list[ModuleWork] = []
    maker: dict[int, str] = {}
    for index, node in enumerate(tape.nodes):
        option = placement.options[problem.quotient.node(index)]
        if not found or found[-1].module != node.module:
            found.append(ModuleWork(node.module))
        names = (tape.values[r.i].name or "" for r in node.ins)
        read = frozenset(name.removeprefix("param:") for name in names if name.startswith("param:"))
        entering = frozenset(
            (r.i, maker[r.i], tape.values[r.i].nbytes)
            for r in node.ins
            if r.i in maker and maker[r.i] != node.module and tape.values[r.i].dtype.is_floating_point
        )
        maker.update((r.i, node.module) for r in node.outs)
        before = found[-1]
        found[-1] = replace(
            before,
            seconds=before.seconds + option.seconds,
            saved_bytes=before.saved_bytes + saved.get(index, 0.0),
            parameters=before.parameters | read,
            entering=before.entering | entering,
        )
    return tuple(found)


def parameter_sizes(
    model: nn.Module,
    used: torch.dtype | None,
    problem: PlacementProblem,
    placement: Placement,
    holds: frozenset[str] | None = None,
) -> tuple[tuple[ParameterSize, ...], ...]:
    """The parameters of each unit (see units.parameter_units) as a placement leaves them to one rank.

    `used`: dtype that they are computed in, None for their own. `holds`: names that the rank has, None for all.
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

    return tuple(
        tuple(size(name, p) for name, p in own if holds is None or name in holds)
        for _, _, own in parameter_units(model)
    )


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
