"""What a search is about: the model, its batch, the cluster, and what the user fixed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.cluster.cluster import Cluster
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy.strategy import Strategy
from meshwright_planner.costs.models import CheckedModel
from meshwright_planner.profile.batch import Batch

SHARED = "zero"
"""The axis along which ranks share training state."""

MARGIN = 0.03
"""Part by which a prediction of memory may be too low (docs/planner.md): so much of a limit is kept back."""


def kept_back(allowed: int, margin: float = MARGIN) -> int:
    """Bytes that may be predicted of a rank that is allowed so many."""
    return int(allowed / (1 + margin))


def allowing(predicted: int) -> int:
    """The least limit for which a plan of this prediction is called feasible."""
    return math.ceil(predicted * (1 + MARGIN)) + 1


def ended_by(budget: float | None) -> str:
    """What a note says of the time budget that ended a search; nothing where none did."""
    return "" if budget is None else f"; the time budget of {budget:g} s ended the search"


@dataclass(frozen=True)
class Setting:
    """What the search is about.

    Args:
        model, batch: the model and its example batch, of the global size.
        cluster: what it runs on.
        strategies: axis -> strategy, outermost axis first.
        optimizer: name in OPTIMIZERS.
        pins: degrees fixed by the user.
        world_size: number of ranks.
        limit: bytes that may be predicted of one rank.
        allowed: bytes that one rank has; the difference is what predictions may be wrong by.
        stored: searched axis -> parameter name -> state, fixed by the user.
        options: keywords that strategies know by name.
        data: data ranks (the product of the axes dp and zero), fixed by the user.
        stage: what ranks along zero share, fixed by the user; 0 where it is searched.
        precision: in which the model is computed, a name of plan.PrecisionRule; None is its own.
        recompute: a policy or a pattern (see plan), fixed by the user; None is searched.
        sequence_parallel: whether a searched axis splits the sequence between blocks; None is searched.
        time_budget: seconds that the search may take; None for as long as it takes.
        cost_model: says what operations and collectives take; None for the cluster's own figures.
        request: the keywords that were given, for the plan to keep.
    """

    model: nn.Module
    batch: Batch
    cluster: Cluster
    strategies: Mapping[str, Strategy]
    optimizer: str
    pins: Mapping[str, int]
    world_size: int
    limit: int
    allowed: int
    stored: Mapping[str, Mapping[str, State]]
    options: Mapping[str, Any] = field(default_factory=dict)
    data: int | None = None
    stage: int = 0
    precision: str | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    time_budget: float | None = None
    cost_model: CheckedModel | None = None
    request: Mapping[str, Any] = field(default_factory=dict)

    @property
    def figures(self) -> Cluster | None:
        """The cluster whose figures costs follow from; None where nobody knows."""
        return self.cluster if self.cost_model is None else self.cost_model.figures

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the copies that are computed with; None is the parameters' own."""
        return None if self.precision in (None, "fp32") else DTYPES[str(self.precision)]
