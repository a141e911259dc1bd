"""Models on ranks that share a GPU, over gloo and over NCCL, train as they do on the GPU alone."""

from __future__ import annotations

import pytest

from meshwright_dtensor.testing.rank_pool import RankPool

from .conftest import NEEDS_GPU
from .training_cases import PLANS, differences

MODELS = {
    "dp2": "gpt2 vit",
    "tp2": "llama gpt2 bert vit t5 mixtral",
    "zero3": "llama t5",
    "pp2": "llama gpt2",
    "cp2": "llama",
    "ep2": "mixtral",
    "tp2-dp2": "llama bert",
    "pp2-zero2": "gpt2",
}
CASES = [(plan, model) for plan, models in MODELS.items() for model in models.split()]
IN_CI = {("tp2", "gpt2")}


def skip_sends_of_gloo(ranks: RankPool, device: str, plan: str) -> None:
    if device != "cpu" and ranks.backend == "gloo" and "pp" in plan:
        pytest.skip("gloo sends tensors of the CPU only")


def marked(plan: str, model: str) -> object:
    marks = () if (plan, model) in IN_CI else (pytest.mark.gpu,)
    return pytest.param(plan, model, marks=marks)


@pytest.mark.parametrize(("plan", "model"), [marked(*case) for case in CASES])
def test_a_model_trains_as_on_one_device(device_ranks: RankPool, device: str, plan: str, model: str) -> None:
    skip_sends_of_gloo(device_ranks, device, plan)
    size, pins = PLANS[plan]
    for wrong in device_ranks.run(size, differences, model, pins, device):
        assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("plan", ["dp2", "tp2", "zero3", "pp2"])
def test_half_precision_trains_as_on_one_device(
    device_ranks: RankPool, device: str, plan: str, precision: str
) -> None:
    skip_sends_of_gloo(device_ranks, device, plan)
    size, pins = PLANS[plan]
    for wrong in device_ranks.run(size, differences, "llama", pins, device, precision):
        assert not wrong


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"capturable": True}], ids=str)
@pytest.mark.parametrize("plan", ["tp2", "zero3"])
def test_optimizers_of_gpus_step_as_on_one_device(
    device_ranks: RankPool, device: str, plan: str, options: dict[str, bool]
) -> None:
    if device == "cpu" and "capturable" in options:
        pytest.skip(f"capturable {NEEDS_GPU}")
    size, pins = PLANS[plan]
    for wrong in device_ranks.run(size, differences, "llama", pins, device, "fp32", options):
        assert not wrong
