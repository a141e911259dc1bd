"""torchmetrics over parallel models, whose outputs are global values: they are those of all ranks already.

from meshwright.integrations.torchmetrics import without_sync
accuracy = without_sync(Accuracy(task="multiclass", num_classes=10))     # a metric, a collection, or a module that has metrics
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

Metrics = TypeVar("Metrics", bound=nn.Module)


def without_sync(metrics: Metrics) -> Metrics:
    """Let each metric in a module compute from the values that this rank has seen, which are those of all ranks.

    Otherwise torchmetrics sums states over ranks, so that sums and counts are those of one device times the number of ranks.

    Args:
        metrics: a metric, a MetricCollection, or a module with metrics inside; it is changed.

    Returns:
        The same object.
    """
    module: Any
    for module in metrics.modules():
        # those of class Metric, without importing torchmetrics
        if hasattr(module, "distributed_available_fn") and hasattr(module, "sync_on_compute"):
            module.distributed_available_fn = _alone
    return metrics


def _alone() -> bool:
    return False
