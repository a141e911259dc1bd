"""A replaced forward keeps its signature, and keeps no module alive."""

from __future__ import annotations

import gc
import inspect
import types
import weakref
from typing import Any

from torch import Tensor, nn

from meshwright_pipeline.trace.forward_hooks import intercepted


class Unit(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def parameters(model: nn.Module) -> list[str]:
    """Parameters of the first module's forward, as model code sees them."""
    with intercepted(model, ["0"], lambda *_: None):
        return list(inspect.signature(model[0].forward).parameters)


def test_forward_bound_to_a_module_is_not_cached() -> None:
    class Held:
        pass

    model, held = nn.Sequential(Unit()), Held()
    assert parameters(model) == ["x", "scale"]

    def forward(self: Any, x: Tensor, other: int = len(repr(held))) -> Tensor:
        return x

    forward.__defaults__ = (held,)
    model[0].forward = types.MethodType(forward, model[0])
    assert parameters(model) == ["x", "other"]
    gone = weakref.ref(held)
    del forward, held, model
    gc.collect()
    assert gone() is None
