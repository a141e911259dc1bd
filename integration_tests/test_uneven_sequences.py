"""Sequence parallelism over sequences that the ranks do not divide: text of odd lengths, and the patches of pictures."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch import nn
from zoo import llama

import meshwright as mw
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.verification.compare import compare, one_rounding_away, whole

ROWS = 4


def vit(patches: int) -> nn.Module:
    """Pictures of `patches` rows of as many patches, and one token for the class."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    drop = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    return ViTForImageClassification(ViTConfig(image_size=8 * patches, patch_size=8, **sizes, **drop))


def model_and_batch(name: str, length: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model, equal in every call, and a batch of this many tokens, or rows of patches."""
    torch.manual_seed(3)
    if name == "vit":
        pixels, labels = torch.randn(ROWS, 3, 8 * length, 8 * length), torch.randint(2, (ROWS,))
        return vit(length), {"pixel_values": pixels, "labels": labels}
    ids = torch.randint(5, 128, (ROWS, length))
    return llama(), {"input_ids": ids, "labels": ids}


def step(rank: int, size: int, name: str, length: int) -> dict[str, Any]:
    """A step with and without the ranks: what differs, and what is communicated between blocks."""
    model, batch = model_and_batch(name, length)
    single, near = model_and_batch(name, length)[0], model_and_batch(name, length)[0]
    one_rounding_away(near.parameters())
    plan = plan_once(model, batch, cluster="laptop-cpu", dp=1, tp=size, sequence_parallel=True)
    model = mw.parallelize(model, plan, batch=batch)
    blocks = [m for n, m in model.named_modules() if n.endswith((".layers.1", ".layer.1"))]
    shapes: list[Any] = []
    for block in blocks:
        block.register_forward_pre_hook(
            lambda module, args: shapes.append((tuple(args[0].shape), tuple(args[0].to_local().shape)))
        )
    losses, states = [], []
    for each in (single, near):
        torch.manual_seed(4)
        losses.append(each(**batch).loss)
        losses[-1].backward()
        states.append(torch.get_rng_state())
    torch.manual_seed(4)
    with communication() as log:
        loss = model(**batch).loss
        loss.backward()
    values = [{n: p.grad for n, p in each.named_parameters()} for each in (single, model, near)]
    gradients = compare(0, "gradient", values[0], values[1], 1e-5, perturbed=values[2])
    planned = Counter[Any]()
    for c in plan.collectives:
        if not c.why.startswith("inside ") and "cross_entropy" not in c.why:
            planned[c.kind, c.phase] += c.count * c.nbytes
    made = Counter[Any]()
    for e in log.events:
        if e.function != "cross_entropy":
            made[e.kind, e.phase] += e.nbytes
    return {
        "sequence": plan.sequence_parallel,
        "loss": abs(float(whole(loss)) - float(losses[0].detach())),
        "wrong": [(c.name, c.difference, c.scale) for c in gradients if not c.ok],
        "same numbers": torch.equal(torch.get_rng_state(), states[0]),
        "shapes": shapes,
        "planned": +planned,
        "made": +made,
    }


CASES = [("vit", 4, 2), ("vit", 4, 4), ("llama", 11, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length", "ranks"), CASES)
def test_a_sequence_that_does_not_divide_is_split(
    rank_pool: RankPool, name: str, length: int, ranks: int
) -> None:
    tokens = length**2 + 1 if name == "vit" else length
    results = rank_pool.run(ranks, step, name, length)
    for result in results:
        assert result["sequence"] and result["loss"] <= 1e-6 and not result["wrong"]
        # ViT calls one dropout twice, which a plan has one rule for
        assert result["same numbers"] and (name == "vit" or result["planned"] == result["made"])
        # between blocks a rank has its tokens only
        assert all(whole[:2] == (ROWS, tokens) for whole, _ in result["shapes"])
    lengths = [result["shapes"][0][1][1] for result in results]
    assert sum(lengths) == tokens and len(set(lengths)) > 1 and min(lengths) > 0


@pytest.mark.parametrize(
    ("name", "length", "ranks", "told"),
    [
        (
            "llama",
            9,
            4,
            r"leaves each rank a part of the sequence \(9 tokens\).*tp=4 does not: pad the batch",
        ),
        ("vit", 1, 4, r"\(2 tokens between blocks\) for each of 4 ranks.*change the degree"),
    ],
)
def test_a_sequence_that_leaves_a_rank_without_tokens_is_refused(
    name: str, length: int, ranks: int, told: str
) -> None:
    model, batch = model_and_batch(name, length)
    with pytest.raises(UsageError, match=told):
        mw.plan(model, batch, cluster="laptop-cpu", world_size=ranks, tp=ranks, sequence_parallel=True)
    # without it the same degrees are planned
    assert not mw.plan(model, batch, cluster="laptop-cpu", world_size=ranks, tp=ranks).sequence_parallel
