"""Split backward passes: both halves give the gradients of the whole, and as many weights as possible are deferred."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshwright_pipeline.runtime.actions.split_backward import SplitBackward


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(6), nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(self.norm(x))))


def straight(p: nn.ParameterDict, layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    for layer in layers:
        x = layer(x)
    return [x * p["scale"]]


def tied(p: nn.ParameterDict, layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """One weight at two places of the path, and a bias computed from it once for every layer."""
    bias = torch.tanh(p["scale"] * 2)
    for layer in layers:
        x = layer(x * p["scale"]) + bias
    return [x]


def off_path(p: nn.ParameterDict, layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """An output that depends on no input, and a path of weights alone that joins the other late."""
    alone = torch.tanh(layers[0](p["square"]))
    return [layers[1](x) + alone.sum(0), alone * p["scale"]]


def through(p: nn.ParameterDict, layers: nn.ModuleList, x: Tensor) -> list[Tensor]:
    """Several results of one node, some unused, and a function that torch does not know."""
    first, _, last = x.split(2, -1)
    return [torch.cat([first * last, first, last], -1) @ p["square"], layers[0](x).sum()]


def run(
    build: Callable[..., list[Tensor]], split: bool
) -> tuple[dict[str, Tensor | None], Tensor | None, list[str]]:
    torch.manual_seed(0)
    p = nn.ParameterDict({"scale": torch.randn(6), "square": torch.randn(6, 6), "unused": torch.randn(2)})
    layers = nn.ModuleList(Layer() for _ in range(2))
    x = torch.randn(4, 6, requires_grad=True)
    outputs = build(p, layers, x)
    gradients = [torch.randn_like(o) for o in outputs]
    early: list[str] = []
    named = [*p.named_parameters(), *layers.named_parameters()]
    if split:
        halves = SplitBackward(outputs, [x])
        halves.input_gradients(gradients)
        early = [name for name, parameter in named if parameter.grad is not None]
        assert x.grad is not None
        halves.weight_gradients()
    else:
        torch.autograd.backward(outputs, gradients)
    return {name: parameter.grad for name, parameter in named}, x.grad, early


@pytest.mark.parametrize(
    ("build", "early"),
    [(straight, 0), (tied, 1), (off_path, 8), (through, 0)],
    ids=["straight", "tied", "off path", "through"],
)
def test_both_halves_match_the_whole_backward(build: Callable[..., list[Tensor]], early: int) -> None:
    """`early`: the number of weights whose gradients cannot be deferred."""
    want, want_input, _ = run(build, False)
    got, got_input, at_once = run(build, True)
    assert torch.equal(got_input, want_input)  # type: ignore[arg-type]
    assert len(at_once) == early
    for name, gradient in want.items():
        assert (gradient is None) == (got[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(got[name], gradient, rtol=1e-6, atol=1e-7)


def test_second_half_does_all_without_inputs() -> None:
    weight = torch.ones(3, requires_grad=True)
    halves = SplitBackward([(weight * 2).sum()], [])
    halves.input_gradients(None)
    assert weight.grad is None
    halves.weight_gradients()
    assert weight.grad is not None and torch.equal(weight.grad, torch.full((3,), 2.0))
