"""An adapter of PEFT is trained, saved, resumed and merged in a parallel model with the numbers of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .plans import LIMITS, PLANS, check, gap

pytest.importorskip("accelerate")
pytest.importorskip("peft")

from .accelerate_script import samples
from .peft_script import adapted, logits_of, on_rank, one_device

# PEFT reads a name that transformers renames
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def test_adapter_has_the_numbers_of_one_device(rank_pool: RankPool, tmp_path: Path) -> None:
    exact, limit = one_device("no", tmp_path / "one"), LIMITS["no"]
    check(rank_pool.run(2, on_rank, "tp2", "no", tmp_path / "tp2"), exact, limit)
    resumed = rank_pool.run(2, on_rank, "pp2", "no", tmp_path / "pp2", tmp_path / "tp2")
    assert len(resumed[0]["losses"]) == 2
    check(resumed, exact, limit)


def unloaded(rank: int, size: int, plan: str, folder: Path) -> list[float] | str:
    """What the model without adapters computes, or why there is none."""
    batch = {name: value[None].repeat(4, 1) for name, value in samples(1, seed=2)[0].items()}
    model = mw.auto_parallelize(adapted(), batch, **PLANS[plan])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    try:
        model.save_pretrained(str(folder))
    except mw.errors.MeshwrightError as error:
        assert "save_pretrained(path, state_dict=" in str(error)
    try:
        return logits_of(model.merge_and_unload())
    except mw.errors.MeshwrightError as error:
        return str(error)


def test_adapters_are_merged_and_unloaded(rank_pool: RankPool, tmp_path: Path) -> None:
    model = adapted()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.fill_(0.3)
    exact = logits_of(model.merge_and_unload())
    for logits in rank_pool.run(2, unloaded, "zero3", tmp_path):
        assert gap(logits, exact) < LIMITS["no"]
    for line in rank_pool.run(2, unloaded, "pp2", tmp_path):
        assert "after the model was divided into stages" in str(line)
