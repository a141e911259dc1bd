"""Memory of one rank: what a placement makes it hold at the peak of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright_planner.cost.operations import OPTIMIZERS
from meshwright_planner.placement.problem import Placement, PlacementProblem


def parameter_factor(optimizer: str) -> float:
    """Bytes of parameter, gradient and optimizer state per byte of a trainable parameter."""
    return 2.0 + OPTIMIZERS[optimizer]


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, looked up once.

    Args:
        parameters: name, bytes, and whether it is trained.
        buffers: bytes of all of them.
        dtypes: name -> dtype of the floating-point parameters.
    """

    parameters: tuple[tuple[str, int, bool], ...]
    buffers: int
    dtypes: Mapping[str, torch.dtype]

    @staticmethod
    def of(model: nn.Module) -> Sizes:
        """Those of a model; a parameter counts once however many names it has."""
        every = tuple((n, p.numel() * p.element_size(), p.requires_grad) for n, p in model.named_parameters())
        dtypes = {n: p.dtype for n, p in model.named_parameters() if p.is_floating_point()}
        return Sizes(every, sum(b.numel() * b.element_size() for b in model.buffers()), dtypes)

    def elsewise(self, dtype: torch.dtype) -> dict[torch.dtype, frozenset[str]]:
        """Dtype -> names of the parameters that are computed with as copies in `dtype`: not those that have it."""
        names: dict[torch.dtype, set[str]] = {}
        for name, own in self.dtypes.items():
            if own != dtype:
                names.setdefault(own, set()).add(name)
        return {own: frozenset(found) for own, found in names.items()}


def memory_parts(
    sizes: Sizes, problem: PlacementProblem, placement: Placement, optimizer: str
) -> dict[str, int]:
    """Bytes by part: parameters, gradients, optimizer, buffers, activations, temporaries.

    Optimizer states have the parameter's dtype, as torch's own optimizers keep them.  Activations are what autograd
    saves, sharded as the placement says; a parameter counts once however many names it has.  Each part is as large as it
    gets; which of it is there at once, and what is alive beside it, is `memory/peak.py`'s to say.
    """
    parameters, trainable = parameter_bytes(sizes, problem, placement)
    parts = {
        "parameters": parameters,
        "gradients": trainable,
        "optimizer": trainable * OPTIMIZERS[optimizer],
        "buffers": sizes.buffers,
        "activations": placement.saved_bytes,
        "temporaries": 0,
    }
    return {name: math.ceil(size) for name, size in parts.items()}


def parameter_bytes(
    sizes: Sizes, problem: PlacementProblem, placement: Placement, names: Iterable[str] | None = None
) -> tuple[float, float]:
    """Bytes of these parameters on one rank (None for all there are), of all and of those that are trained."""
    every = trained = 0.0
    for size, trains in _each(sizes, problem, placement, names):
        every += size
        trained += size if trains else 0.0
    return every, trained


def trained_sizes(sizes: Sizes, problem: PlacementProblem, placement: Placement) -> list[float]:
    """Bytes on one rank of each parameter that is trained, in the order in which an optimizer is given them."""
    return [size for size, trains in _each(sizes, problem, placement) if trains]


def _each(
    sizes: Sizes, problem: PlacementProblem, placement: Placement, names: Iterable[str] | None = None
) -> Iterator[tuple[float, bool]]:
    """Bytes on one rank of each of these parameters (None for all there are), and whether it is trained."""
    wanted, tape = None if names is None else frozenset(names), problem.tape
    for name, nbytes, trains in sizes.parameters:
        if wanted is None or name in wanted:
            value = tape.parameters.get(name)
            state = "I" if value is None else placement.stored.get(problem.quotient.value(value), "I")
            yield nbytes * problem.costs.share(state), trains


def copied_bytes(sizes: Sizes, problem: PlacementProblem, placement: Placement, dtype: torch.dtype) -> float:
    """Bytes on one rank of the copies that are computed with, of the parameters that are not of this dtype already."""
    return sum(
        parameter_bytes(sizes, problem, placement, names)[0] / own.itemsize * dtype.itemsize
        for own, names in sizes.elsewise(dtype).items()
    )
