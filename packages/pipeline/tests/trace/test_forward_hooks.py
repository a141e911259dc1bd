"""A replaced forward keeps its signature, and keeps no module alive; several forwards of a model share one replacement."""

from __future__ import annotations

import gc
import inspect
import types
import weakref
from typing import Any

import torch
import torch.overrides as overrides
from torch import Tensor, nn

from meshwright_pipeline.trace.forward_hooks import UnitCalls
from meshwright_pipeline.trace.loss_denominators import GlueMode


class Unit(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


def parameters(model: nn.Module) -> list[str]:
    """Parameters of the first module's forward, as model code sees them."""
    with UnitCalls(["0"]).handled(model, lambda *_: None):
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


def test_forwards_of_a_step_share_a_replacement() -> None:
    model, calls = nn.Sequential(Unit(), Unit()), UnitCalls(["0", "1"])
    x, ran = torch.ones(1, 3), list[Any]()

    def handler(key: Any, forward: Any, args: Any, kwargs: Any) -> Tensor:
        ran.append(key)
        return forward(*args, **kwargs)

    with calls.replaced(model):
        replaced = model[0].forward
        for _ in range(2):
            with calls.handled(model, handler):
                model(model(x))
                assert model[0].forward is replaced
        # a backward pass runs a forward again
        again = model(x)
        assert len(ran) == 8
    assert ran == 2 * [("0", 0), ("1", 0), ("0", 1), ("1", 1)]
    assert torch.equal(again, model(x)) and "forward" not in vars(model[0])
    # the negative control: alone, each forward has its own
    with calls.handled(model, handler):
        assert model[0].forward is not replaced


def test_no_function_mode_is_on_while_a_unit_runs() -> None:
    seen = list[Any]()

    class Glue(GlueMode):
        def call(self, func: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func)
            return func(*args, **kwargs)

    x = torch.ones(3)
    with Glue() as glue:
        torch.add(x, x)
        with glue.paused():
            assert overrides._len_torch_function_stack() == 0
            torch.mul(x, x)
        torch.sub(x, x)
        # another mode of the model's code may be on
        with overrides.BaseTorchFunctionMode(), glue.paused():
            assert overrides._len_torch_function_stack() == 2
            torch.mul(x, x)
    assert seen == [torch.add, torch.sub]
