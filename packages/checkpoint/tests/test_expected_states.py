"""What the states of an optimizer will take is what they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright_checkpoint.state.expected_states import bytes_per_element, is_predictable

FORMS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.AdamW, {}),
    (torch.optim.Adam, {"amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.Muon, {}),
    (torch.optim.Adafactor, {}),
]


def held(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of states."""
    return sum(
        value.nbytes
        for states in optimizer.state.values()
        for value in states.values()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize(("kind", "options"), FORMS)
def test_bytes_of_states(kind: Any, options: dict[str, Any]) -> None:
    weights = [nn.Parameter(torch.ones(300, 700)), nn.Parameter(torch.ones(64, 32, dtype=torch.bfloat16))]
    frozen = nn.Parameter(torch.ones(9, 9), requires_grad=False)
    optimizer = kind([*weights, frozen], lr=0.1, **options)
    # as schedulers do: the step of the instance is another one
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    names = {id(weight): f"weight {number}" for number, weight in enumerate([*weights, frozen])}
    before, streams = held(optimizer), torch.get_rng_state()
    each = bytes_per_element(optimizer, names)
    assert held(optimizer) == before and torch.equal(torch.get_rng_state(), streams)
    assert all(weight.grad is None and bool((weight == 1).all()) for weight in weights)
    expected = sum(each.get(names[id(weight)], 0.0) * weight.numel() for weight in weights)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    # counts of steps, and factors, are small
    assert held(optimizer) - before == pytest.approx(expected, abs=5000)
    assert not any(bytes_per_element(optimizer, names).values())


def test_other_optimizers_are_not_tried() -> None:
    class Own(torch.optim.SGD):
        pass

    weight = [nn.Parameter(torch.ones(2))]
    assert not is_predictable(Own(weight, lr=0.1)) and not is_predictable(torch.optim.LBFGS(weight))
    assert is_predictable(torch.optim.SGD(weight, lr=0.1))
