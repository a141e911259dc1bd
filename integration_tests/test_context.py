"""Context parallelism of unmodified models on real ranks, against one device: losses, gradients, steps, memory, log."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from zoo import bert, bert_batch, gpt2, llama

import meshwright as mw
from meshwright_dtensor.plan import ContextSharing, ParallelPlan
from meshwright_dtensor.testing import RankPool

TOKENS = 16  # divides into two chunks for each of up to 8 ranks


def grouped_llama() -> torch.nn.Module:
    return llama(num_key_value_heads=2, attention_dropout=0.1)


def causal_batch(rows: int = 2, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    """Labels are ignored unevenly, and both sides of every boundary between ranks count."""
    ids = torch.randint(5, 128, (rows, tokens), generator=torch.Generator().manual_seed(7))
    labels = ids.clone()
    labels[0, : tokens // 2 - 1] = -100
    return {"input_ids": ids, "labels": labels}


def padded_batch() -> dict[str, torch.Tensor]:
    batch = {key: torch.cat([value, value[:, :4]], 1) for key, value in bert_batch().items()}
    batch["attention_mask"][1, 9:] = 0
    return batch


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "llama": (grouped_llama, causal_batch),
    "gpt2": (gpt2, causal_batch),
    "bert": (bert, padded_batch),
    "llama padded": (
        grouped_llama,
        lambda: {**causal_batch(4), **{"attention_mask": padded_batch()["attention_mask"]}},
    ),
}


def plan_of(degrees: dict[str, int], form: str, balance: str) -> ParallelPlan:
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    sharing = ContextSharing(attention=form, balance=balance)
    return ParallelPlan(world_size=world_size, degrees=degrees, context=sharing)


def verified(rank: int, world_size: int, name: str, plan_json: str) -> tuple[bool, str]:
    """Three steps under a plan against the same on one device, dropout and all."""
    make, batch = MODELS[name]
    report = mw.verify(make, batch(), ParallelPlan.from_json(plan_json), steps=3)
    return report.ok, report.render()


def check(pool: RankPool, name: str, plan: ParallelPlan) -> None:
    ok, text = pool.run(plan.world_size, verified, name, plan.to_json())[0]
    assert ok, text


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("form", ["all_gather", "ring", "all_to_all"])
def test_two_ranks_train_as_one_device(name: str, form: str, rank_pool: RankPool) -> None:
    for balance in ("none", "zigzag"):
        check(rank_pool, name, plan_of({"cp": 2}, form, balance))


@pytest.mark.parametrize(
    ("name", "degrees", "form", "balance"),
    [
        ("llama", {"cp": 4}, "ring", "zigzag"),
        ("gpt2", {"cp": 4}, "all_to_all", "zigzag"),
        ("bert", {"cp": 4}, "all_gather", "none"),
        ("llama", {"dp": 2, "cp": 2}, "all_gather", "zigzag"),
        ("llama padded", {"dp": 2, "cp": 2}, "ring", "none"),
    ],
)
def test_four_ranks_train_as_one_device(
    name: str, degrees: dict[str, int], form: str, balance: str, rank_pool: RankPool
) -> None:
    check(rank_pool, name, plan_of(degrees, form, balance))
