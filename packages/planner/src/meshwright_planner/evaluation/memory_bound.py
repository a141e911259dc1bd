"""What no placement and no configuration can go below: what is out of the question need not be tried."""

from __future__ import annotations

import math
from collections.abc import Mapping

from meshwright_planner.cost.operations import OPTIMIZERS
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.context import Basis
from meshwright_planner.memory.parts import Sizes, parameter_bytes


def floor_bytes(basis: Basis, degrees: Mapping[str, int] | None = None) -> float:
    """Bytes that a rank holds at least when the optimizer steps: its part of parameters, gradients and states.

    `degrees`: on axes where gradients are summed and nothing is placed, every rank holds what the others hold; without
    them the model is divided over all ranks.
    """
    setting = basis.setting
    parts = setting.world_size
    if degrees is not None:
        parts = math.prod(d for axis, d in degrees.items() if not _replicas(basis, axis))
    parameters, trained = basis.bytes
    return (parameters + trained * (1 + OPTIMIZERS[setting.optimizer])) / parts


def _replicas(basis: Basis, axis: str) -> bool:
    strategy, survey = basis.setting.strategies[axis], basis.surveys.get(axis)
    own = survey is not None and bool(survey.parameters)
    return strategy.gradient == "deferred" and not strategy.gathers and not own


def least_bytes(candidate: Candidate, sizes: Sizes) -> float:
    """Bytes below which no other placement on its searched axes brings a candidate: with everything divided there."""
    axes, problem, placement = candidate.searched, candidate.problem, candidate.placement
    if not axes:
        return float(candidate.total_bytes)
    degree = math.prod(candidate.point.degree(axis) for axis in axes)
    stored = kept = 1 / degree
    if (
        candidate.fields.get("pipeline") is None
    ):  # a stage may have other shares of what is divided than the model
        now, _ = parameter_bytes(sizes, problem, placement)
        stored = min(1.0, sum(size for _, size, _ in sizes.parameters) / degree / now) if now else 1.0
        undivided = problem.replicated().saved_bytes * placement.times
        kept = min(1.0, undivided / degree / placement.saved_bytes) if placement.saved_bytes else 1.0
    factors = {"parameters": stored, "gradients": stored, "optimizer": stored, "activations": kept}
    return sum(size * factors.get(part, 1 / degree) for part, size in candidate.memory.items())
