"""Metrics of torchmetrics, fed with outputs of parallel models, have the values of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.integrations.torchmetrics import without_sync
from meshwright_dtensor.testing.rank_pool import RankPool

from .accelerate_script import ROWS, VOCABULARY, model, samples
from .plans import LIMITS, PLANS, gap

pytest.importorskip("torchmetrics")

from torchmetrics import CatMetric, MeanMetric, MetricCollection, PearsonCorrCoef, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix


class Metrics(nn.Module):
    """Metrics in a module, one of them in a collection, with sums, lists of values, and counts as states."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = MetricCollection(
            [MulticlassAccuracy(VOCABULARY), MulticlassConfusionMatrix(VOCABULARY)]
        )
        self.sum, self.mean, self.values = SumMetric(), MeanMetric(), CatMetric()
        self.correlation = PearsonCorrCoef()


def measured(net: nn.Module, metrics: Metrics) -> list[float]:
    ids = torch.stack([row["input_ids"] for row in samples(8, seed=6)])
    with torch.no_grad():
        for batch in ids.split(ROWS):
            outputs = net(input_ids=batch, labels=batch)
            guesses = outputs.logits.argmax(-1)
            metrics.counts.update(guesses, batch)
            for metric in (metrics.sum, metrics.mean):
                metric.update(outputs.loss)
            metrics.values.update(outputs.logits[:, 0, 0])
            metrics.correlation.update(outputs.logits[..., 0].flatten(), outputs.logits[..., 1].flatten())
    results = [
        *metrics.counts.compute().values(),
        *(m.compute() for m in metrics.children() if m is not metrics.counts),
    ]
    return [
        number
        for x in results
        for number in (x.full_tensor() if hasattr(x, "full_tensor") else x).flatten().tolist()
    ]


def on_rank(rank: int, size: int, plan: str) -> Any:
    batch = {name: value[None].repeat(4, 1) for name, value in samples(1, seed=2)[0].items()}
    net = mw.auto_parallelize(model().eval(), batch, **PLANS[plan])
    return measured(net, without_sync(Metrics()))


@pytest.mark.filterwarnings("ignore")
def test_metrics_have_the_values_of_one_device(rank_pool: RankPool) -> None:
    exact = measured(model().eval(), Metrics())
    for plan in PLANS:
        for numbers in rank_pool.run(2, on_rank, plan):
            assert gap(numbers, exact) < LIMITS["no"], plan
