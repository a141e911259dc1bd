"""What a user changes on modules between steps: rows that interact through it are found, and what cannot be followed is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from pipe_models import Chain, chain_batch, chain_plan
from torch import Tensor, nn

from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline


def added(ids: Tensor) -> Tensor:
    return (ids + ids.sum()) % 7


class Centred(Chain):
    """Mixes the rows where a flag, an option, or a function says so."""

    centred = False

    def __init__(self) -> None:
        super().__init__()
        self.config, self.options = SimpleNamespace(centred=False), {"centre": "no"}
        self.mixed: Callable[[Tensor], Tensor] = torch.clone
        self.late: Callable[[Tensor], Tensor] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["ids"] = self.mixed(kwargs["ids"]) if self.late is None else self.late(kwargs["ids"])
        if self.centred or self.config.centred or self.options["centre"] == "yes":
            kwargs["ids"] = added(kwargs["ids"])
        return super().forward(*args, **kwargs)


def centre(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output - output.mean(0, keepdim=True)


def hook(model: Any) -> None:
    model.layers[1].register_forward_hook(centre)


def pre_hook(model: Any) -> None:
    model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] - args[0].mean(0, keepdim=True),))


def flag(model: Any) -> None:
    model.centred = True


def configuration(model: Any) -> None:
    model.config.centred = True


def option(model: Any) -> None:
    model.options["centre"] = "yes"


def new_options(model: Any) -> None:
    model.options = {"centre": "yes"}


def function(model: Any) -> None:
    model.mixed = added


def late(model: Any) -> None:
    model.late = added


def forward(model: Any) -> None:
    model.layers[1].forward = lambda x: x


def bound_elsewhere(model: Any) -> None:
    before = model.layers[1].forward
    model.layers[1].forward = MethodType(lambda self, x: before(x), model.layers[1])


def method(model: Any) -> None:
    model.layers[1].forward = MethodType(
        torch.autocast("cpu", enabled=False)(type(model.layers[1]).forward), model.layers[1]
    )


def removal(model: Any) -> None:
    del model.layers[1]


def watching(model: Any) -> None:
    seen: list[Any] = []
    model.layers[1].register_forward_hook(lambda module, args, output: seen.append(output.shape))


ROWS = "rows of the batch"
CHANGES: dict[str, tuple[Callable[[Any], None], str]] = {
    "hook": (hook, ROWS),
    "pre-hook": (pre_hook, ROWS),
    "flag": (flag, ROWS),
    "configuration": (configuration, ROWS),
    "option": (option, ROWS),
    "new options": (new_options, ROWS),
    "function": (function, ROWS),
    "function where there was none": (late, ROWS),
    "forward": (forward, "forward of module 'layers.1' was replaced after parallelize"),
    "forward that keeps a module": (
        bound_elsewhere,
        "forward of module 'layers.1' was replaced after parallelize",
    ),
    "forward around that of the class": (method, ""),
    "removal": (removal, "were added, removed or replaced after parallelize"),
    "watching": (watching, ""),
}


def change(rank: int, size: int, name: str, first: bool) -> str:
    torch.manual_seed(0)
    model = Centred()
    many = pipeline(model, chain_plan(ranks=size))
    if not first:
        many(**chain_batch())
    CHANGES[name][0](model)
    try:
        many(**chain_batch())
    except MeshwrightError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_steps(rank_pool: RankPool, name: str, first: bool) -> None:
    for message in rank_pool.run(2, change, name, first):
        assert (CHANGES[name][1] in message) if CHANGES[name][1] else not message
