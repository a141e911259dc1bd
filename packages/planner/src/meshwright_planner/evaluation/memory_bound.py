"""Lower bounds of memory. A configuration whose bound exceeds the limit is not tried."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright_planner.cost.operations import OPTIMIZERS
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.context import Basis
from meshwright_planner.memory.parts import Sizes, parameter_bytes


def floor_bytes(basis: Basis, degrees: Mapping[str, int] | None = None) -> float:
    """The least bytes of a rank while the optimizer steps: its part of parameters, gradients and states.

    `degrees`: replicas along axes that only sum gradients hold the same; without degrees the model is divided over all ranks.
    """
    setting = basis.setting
    parts = setting.world_size
    if degrees is not None:
        parts = math.prod(d for axis, d in degrees.items() if not _replicas(basis, axis))
    parameters, trained = basis.bytes
    return (parameters + trained * (1 + OPTIMIZERS[setting.optimizer])) / parts


def _replicas(basis: Basis, axis: str) -> bool:
    strategy, survey = basis.setting.strategies[axis], basis.surveys.get(axis)
    places = survey is not None and bool(survey.parameters)
    return strategy.gradient == "deferred" and not strategy.gathers and not places


def least_bytes(candidate: Candidate, sizes: Sizes) -> float:
    """The least bytes that any placement on the searched axes can reach: with everything sharded there."""
    axes, problem, placement = candidate.searched, candidate.problem, candidate.placement
    if not axes:
        return float(candidate.total_bytes)
    degree = math.prod(candidate.point.degree(axis) for axis in axes)
    stored = kept = 1 / degree
    # a stage of a pipeline may hold more or less sharded parameters than the model on average
    if candidate.fields.get("pipeline") is None:
        now, _ = parameter_bytes(sizes, problem, placement)
        stored = min(1.0, sum(size for _, size, _ in sizes.parameters) / degree / now) if now else 1.0
        undivided = problem.replicated().saved_bytes * placement.times
        kept = min(1.0, undivided / degree / placement.saved_bytes) if placement.saved_bytes else 1.0
    factors = {"parameters": stored, "gradients": stored, "optimizer": stored, "activations": kept}
    return sum(size * factors.get(part, 1 / degree) for part, size in candidate.memory.items())
