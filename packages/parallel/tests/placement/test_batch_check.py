"""Batches that differ between ranks are found in the first call, under every plan without stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_models import LENGTH, VOCABULARY, make, plan_of
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.batch_text import BatchTexts, describe, difference
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": {"dp": 2}},
    "tp": {"degrees": {"dp": 1, "tp": 2}},
    "zero": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
}


def ids(seed: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (4, LENGTH), generator=seeded(seed))


def differ(rank: int, size: int, options: dict[str, Any]) -> list[str]:
    """The errors of calls in which rank 1 has another batch: values, a shape, a flag, and values that come later."""
    torch.manual_seed(0)
    model = parallelize(make(), plan_of(**options))
    good, other, told = ids(1), ids(2), []
    for wrong in (other, good[:2]):
        try:
            model(wrong if rank == 1 else good)
            told.append("nothing")
        except UsageError as error:
            told.append(str(error))
    for call in range(70):
        try:
            model(other if rank == 1 and call > 60 else good)
        except UsageError as error:
            told.append(f"call {call + 3}: {error}")
            break
    return told


@pytest.mark.parametrize("name", list(PLANS))
def test_ranks_with_other_batches_are_told(rank_pool: RankPool, name: str) -> None:
    for values, shape, later in rank_pool.run(2, differ, PLANS[name]):
        assert values.startswith(
            "rank 1 was given another batch than rank 0 (the values of 0 [4, 5] int64 differ)"
        )
        for way in ("DistributedSampler", "mw.shard_loader(loader)", 'rows="local"'):
            assert way in values
        assert "(0 [4, 5] int64 against 0 [2, 5] int64)" in shape
        assert later.startswith("call 65: rank 1 was given another batch")


def test_descriptions_tell_values_apart() -> None:
    a = {"ids": torch.arange(6).view(2, 3), "mask": None, "n": 3}
    b = {**a, "ids": torch.arange(6).flip(0).view(2, 3)}
    text, other_text = describe((), a, values=True), describe((), b, values=True)
    assert describe((), a) == describe((), b) == "ids [2, 3] int64; n=3"
    for other, told in (
        (other_text, "the values of ids [2, 3] int64 differ"),
        (describe((), {**a, "n": 4}, values=True), "n=3 against n=4"),
        (text + "; more=1", "nothing against more=1"),
    ):
        assert difference("it", text, other).startswith(f"it was given another batch than rank 0 ({told}); ")
    # sparse, empty, meta, bool and large tensors have a description too
    odd = [torch.eye(3).to_sparse(), torch.ones(0), torch.ones(2, device="meta"), torch.tensor([True])]
    assert describe(odd, {}, values=True).count("values") == 4
    large = torch.zeros(2**18)
    assert describe([large], {}, values=True) != describe([large + 1], {}, values=True)
    # NaN is the same as itself
    assert describe([large * torch.nan], {}, values=True) == describe([large * torch.nan], {}, values=True)
    assert isinstance(describe([nn.Parameter(torch.ones(1))], {}, values=True), str)


def test_values_are_compared_at_first_and_every_so_often() -> None:
    texts = BatchTexts()
    compared = [call for call in range(200) if texts.describe([torch.ones(1)], {})[1]]
    assert compared == [0, 1, 2, 64, 128, 192]
