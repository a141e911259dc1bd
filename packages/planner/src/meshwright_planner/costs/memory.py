"""Memory of one rank: what a placement makes it hold at the peak of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import nn

from meshwright_planner.costs.prices import OPTIMIZERS
from meshwright_planner.placing.placement import Placement, PlacementProblem


def parameter_factor(optimizer: str) -> float:
    """Bytes of parameter, gradient and optimizer state per byte of a trainable parameter."""
    return 2.0 + OPTIMIZERS[optimizer]


def memory_parts(
    model: nn.Module, problem: PlacementProblem, placement: Placement, optimizer: str
) -> dict[str, int]:
    """Bytes by part: parameters, gradients, optimizer, buffers, activations, temporaries.

    Optimizer states have the parameter's dtype, as torch's own optimizers keep them.  Activations are what autograd
    saves, sharded as the placement says; a parameter counts once however many names it has.  Each part is as large as it
    gets; which of it is there at once, and what is alive beside it, is `peak.py`'s to say.
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
        "temporaries": 0,
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
