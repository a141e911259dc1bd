"""Memory of one rank by part: parameters, gradients, optimizer states, buffers and activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from meshwright_planner.placement.problem import Placement, PlacementProblem


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    Args:
        parameters: (name, bytes, whether it is trained).
        buffers: bytes of all buffers.
        dtypes: name -> dtype of the floating-point parameters.
    """

    parameters: tuple[tuple[str, int, bool], ...]
    buffers: int
    dtypes: Mapping[str, torch.dtype]

    @staticmethod
    def of(model: nn.Module) -> Sizes:
        """The sizes of a model; a tied parameter counts once."""
        named = list(model.named_parameters())
        parameters = tuple((n, p.numel() * p.element_size(), p.requires_grad) for n, p in named)
        dtypes = {n: p.dtype for n, p in named if p.is_floating_point()}
        return Sizes(parameters, sum(b.numel() * b.element_size() for b in model.buffers()), dtypes)


def memory_parts(
    sizes: Sizes, problem: PlacementProblem, placement: Placement, states: float
) -> dict[str, int]:
    """Bytes by part: parameters, gradients, optimizer, buffers, activations, temporaries.

    `states`: bytes of optimizer states by those of trained parameters. Activations are what autograd
    saves, sharded as the placement says; a tied parameter counts once.  Each part has its maximum over a step; `memory/peak.py`
    finds the parts that are there at the same time, and the temporaries.
    """
    parameters, trainable = parameter_bytes(sizes, problem, placement)
    parts = {
        "parameters": parameters,
        "gradients": trainable,
        "optimizer": trainable * states,
        "buffers": sizes.buffers,
        "activations": placement.saved_bytes,
        "temporaries": 0,
    }
    return {name: math.ceil(size) for name, size in parts.items()}


def parameter_bytes(
    sizes: Sizes, problem: PlacementProblem, placement: Placement, names: Iterable[str] | None = None
) -> tuple[float, float]:
    """Bytes of these parameters (None: all) on one rank, and of those that are trained."""
    total = trained = 0.0
    for size, trains in _sizes_on_rank(sizes, problem, placement, names):
        total += size
        trained += size if trains else 0.0
    return total, trained


def trained_sizes(sizes: Sizes, problem: PlacementProblem, placement: Placement) -> list[float]:
    """Bytes on one rank of each trained parameter, in the order of the optimizer."""
    return [size for size, trains in _sizes_on_rank(sizes, problem, placement) if trains]


def _sizes_on_rank(
    sizes: Sizes, problem: PlacementProblem, placement: Placement, names: Iterable[str] | None = None
) -> Iterator[tuple[float, bool]]:
    """Bytes on one rank of each of these parameters (None: all), and whether it is trained."""
    wanted, tape = None if names is None else frozenset(names), problem.tape
    for name, nbytes, trains in sizes.parameters:
        if wanted is None or name in wanted:
            value = tape.parameters.get(name)
            state = "I" if value is None else placement.stored.get(problem.quotient.value(value), "I")
            yield nbytes * problem.costs.share(state), trains


def copied_bytes(sizes: Sizes, problem: PlacementProblem, placement: Placement, dtype: torch.dtype) -> float:
    """Bytes on one rank of the compute copies in `dtype` of parameters of another dtype."""
    names: dict[torch.dtype, list[str]] = {}
    for name, source in sizes.dtypes.items():
        if source != dtype:
            names.setdefault(source, []).append(name)
    nbytes = partial(parameter_bytes, sizes, problem, placement)
    return sum(nbytes(some)[0] / source.itemsize * dtype.itemsize for source, some in names.items())
