"""How much of the devices' arithmetic a run uses, and which shares of a step its plan predicts for waiting and communication."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import discover
from meshwright_planner.clusters.registry import cluster_of


def model_flops(model: nn.Module, example: Any, precision: str | None) -> float | None:
    """Operations of the model's products, convolutions and attention for a batch, forward and backward, without recomputation.

    None where the model cannot be profiled without running it.
    """
    try:
        whole = mw.profile(model, example, precision=precision).total
    except MeshwrightError:
        return None
    return float(whole.forward_flops + whole.backward_flops)


@dataclass(frozen=True)
class Utilisation:
    """What is known of the arithmetic of a step.

    flops: of the model for the batches of a step; None if unknown.
    peak: operations per second of all ranks together, as the data of their devices say; None if unknown.
    predicted: shares of the step that the plan predicts.
    """

    flops: float | None = None
    peak: float | None = None
    predicted: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def of(plan: ParallelPlan, flops: float | None, precision: str | None) -> Utilisation:
        """Of a run with this plan. `flops`: of the model in a step."""
        prediction, predicted = plan.predicted, {}
        if prediction is not None and prediction.step_seconds:
            bubble = 0.0 if prediction.split is None else prediction.split.bubble_seconds
            predicted = {
                "predicted_bubble": bubble / prediction.step_seconds,
                "predicted_communication": prediction.communication_seconds / prediction.step_seconds,
            }
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        try:
            rates = cluster_of(plan.provenance.cluster, discover(), ranks).flops
        except MeshwrightError:
            # of a cluster that this machine has no data of
            return Utilisation(flops, None, predicted)
        dtype = str(DTYPES[precision or "fp32"]).removeprefix("torch.")
        return Utilisation(flops, ranks * rates.get(dtype, rates["float32"]), predicted)

    def figures(self, seconds: float) -> dict[str, float]:
        """For a step of so many seconds: "mfu", the model's share of the peak (PaLM, Chowdhery et al., 2022), and predictions."""
        mfu = {} if self.flops is None or self.peak is None else {"mfu": self.flops / seconds / self.peak}
        return {**mfu, **self.predicted}
