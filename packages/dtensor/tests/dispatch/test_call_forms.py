"""Calls that give the same tensors by place, by name or in a list, and again with other tensors: the values of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import fake_group

CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "places": lambda x, w, b: F.layer_norm(x, (8,), w, b),
    "names": lambda x, w, b: F.layer_norm(x, (8,), weight=w, bias=b),
    "names in another order": lambda x, w, b: F.layer_norm(x, (8,), bias=b, weight=w),
    "names alone": lambda x, w, b: torch.where(condition=x > 0, input=w, other=b),
    "a place and a name": lambda x, w, b: torch.addcmul(b, x, tensor2=w, value=0.5),
    "a number first": lambda x, w, b: torch.pow(2.0, x) + w,
    "a list": lambda x, w, b: torch.cat([x, w, b]),
    "a list and a name": lambda x, w, b: torch.stack(tensors=[x, w, b], dim=1),
    "one tensor twice": lambda x, w, b: torch.lerp(x, end=w, weight=x),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_tensors_arrive_where_they_are_given(call: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    with fake_group(2):
        mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
        for seed in range(2):
            torch.manual_seed(seed)
            x, w, b = torch.randn(4, 8), torch.randn(8), torch.randn(8)
            if call in (CALLS["a list"], CALLS["a list and a name"]):
                w, b = w.expand(4, 8).clone(), b.expand(4, 8).clone()
            ours = call(*(distribute(t, mesh, ["I"]) for t in (x, w, b)))
            assert torch.equal(ours.to_local(), call(x, w, b))
