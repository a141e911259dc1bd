"""Auxiliary losses of mixtures of experts are those of the whole batch: loss, balance of the experts, every gradient.

transformers takes the routers' logits out of the forward by hooks that it registers when they are first wanted. The first rank
alone runs the model to plan it (`auto_parallelize`), so whatever state that run leaves would be there on one rank only.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from zoo import EXPERTS

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.verification.compare import Comparison, compare, one_rounding_away

BALANCED: Mapping[str, Any] = MappingProxyType(
    {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.5}
)
FAMILIES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "Mixtral": {"num_local_experts": 4},
        "Qwen3Moe": {"head_dim": 8, "moe_intermediate_size": 24, "num_experts": 4},
        "Olmoe": {"num_experts": 4, "eos_token_id": None},
    }
)
MIXES: list[tuple[int, dict[str, int]]] = [
    (2, {"dp": 2}),
    (2, {"dp": 2, "zero": 3}),
    (2, {"tp": 2}),
    (2, {"ep": 2, "tp": 1}),
    (4, {"dp": 2, "tp": 2}),
]


def make(family: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**EXPERTS | BALANCED | FAMILIES[family])
    model: nn.Module = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:  # experts are far from balanced
                p.normal_(0, 0.2)
    return model


def batch(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(5, 90, (4, 9), generator=torch.Generator().manual_seed(2))
    if not padded:
        return {"input_ids": ids, "labels": ids}
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[3, :1] = 0  # each data rank has another number of tokens
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


@dataclass
class Told:
    wrong: list[Comparison]
    logits: int
    hooks: int


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def outputs(model: nn.Module, padded: bool) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """What the model returns, its tensors by name, and every gradient."""
    out = model(**batch(padded))
    out.loss.backward()
    seen = {f"router logits {i}": t for i, t in enumerate(out.router_logits)}
    return (
        out,
        {"loss": out.loss, "aux_loss": out.aux_loss} | seen,
        {n: p.grad for n, p in model.named_parameters()},
    )


def compared_with_one_device(
    rank: int, world_size: int, family: str, pins: dict[str, int], padded: bool
) -> Told:
    single, near = make(family), make(family)
    one_rounding_away(near.parameters())
    model = mw.auto_parallelize(copy.deepcopy(single), batch(padded), **pins)
    hung = hooks(model)
    (_, want, want_gradients), (_, _, near_gradients) = outputs(single, padded), outputs(near, padded)
    output, got, gradients = outputs(model, padded)
    compared = compare(0, "loss", want, got, 1e-5)
    compared += compare(0, "gradient", want_gradients, gradients, 1e-5, perturbed=near_gradients)
    return Told([c for c in compared if not c.ok], len(output.router_logits), hung)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "world", "pins"),
    [("Mixtral", *mix) for mix in MIXES] + [(family, *MIXES[-1]) for family in ("Qwen3Moe", "Olmoe")],
    ids=str,
)
def test_the_balance_of_experts_is_that_of_one_device(
    rank_pool: RankPool, family: str, world: int, pins: dict[str, int]
) -> None:
    told = rank_pool.run(world, compared_with_one_device, family, pins, False, timeout=120)
    assert len({t.hooks for t in told}) == 1, "planning left hooks on the rank that planned"
    for t in told:
        assert not t.wrong and t.logits == 2


@pytest.mark.slow
@pytest.mark.parametrize(("world", "pins"), MIXES, ids=str)
def test_padding_counts_for_nothing(rank_pool: RankPool, world: int, pins: dict[str, int]) -> None:
    for t in rank_pool.run(world, compared_with_one_device, "Mixtral", pins, True, timeout=120):
        assert not t.wrong and t.logits == 2
