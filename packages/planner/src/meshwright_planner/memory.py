"""Memory of one rank: what a placement makes it hold at the peak of a step."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from torch import nn

from meshwright_planner.costs import OPTIMIZERS
from meshwright_planner.placement import Placement, PlacementProblem

TEMPORARIES = 3
"""How many of the largest results of single operations are alive at once beside what is saved: a value, its
gradient and one working copy."""


def parameter_factor(optimizer: str) -> float:
    """Bytes of parameter, gradient and optimizer state per byte of a trainable parameter."""
    return 2.0 + OPTIMIZERS[optimizer]


def memory_parts(
    model: nn.Module, problem: PlacementProblem, placement: Placement, optimizer: str
) -> dict[str, int]:
    """Bytes by part: parameters, gradients, optimizer, buffers, activations, temporaries.

    Optimizer states have the parameter's dtype, as torch's own optimizers keep them.  Activations are what autograd
    saves, sharded as the placement says; a parameter counts once however many names it has.
    """
    tape, share = problem.tape, problem.costs.share
    parameters = trainable = 0.0
    for name, parameter in model.named_parameters():
        value = tape.parameters.get(name)
        state = "I" if value is None else placement.stored.get(problem.quotient.value(value), "I")
        size = parameter.numel() * parameter.element_size() * share(state)
        parameters += size
        trainable += size if parameter.requires_grad else 0.0
    parts = {
        "parameters": parameters,
        "gradients": trainable,
        "optimizer": trainable * OPTIMIZERS[optimizer],
        "buffers": sum(b.numel() * b.element_size() for b in model.buffers()),
        "activations": placement.saved_bytes,
        "temporaries": sum(heapq.nlargest(TEMPORARIES, _results(problem, placement))),
    }
    return {name: math.ceil(size) for name, size in parts.items()}


def parameter_bytes(
    model: nn.Module, problem: PlacementProblem, placement: Placement, names: Iterable[str]
) -> tuple[float, float]:
    """Bytes of these parameters on one rank, of all and of those that are trained."""
    wanted, tape = frozenset(names), problem.tape
    every = trained = 0.0
    for name, parameter in model.named_parameters():
        if name in wanted:
            value = tape.parameters.get(name)
            state = "I" if value is None else placement.stored.get(problem.quotient.value(value), "I")
            size = parameter.numel() * parameter.element_size() * problem.costs.share(state)
            every += size
            trained += size if parameter.requires_grad else 0.0
    return every, trained


def _results(problem: PlacementProblem, placement: Placement) -> Iterable[float]:
    tape, share = problem.tape, problem.costs.share
    for index, option in placement.options.items():
        node = tape.nodes[index]
        for ref, state in zip(node.outs, option.outs):
            size = tape.values[ref.i].nbytes * share(state)
            yield size
            if tape.grad[ref.i]:
                yield size
