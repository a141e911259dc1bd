"""Compute in float64 throughout, also where a model asks for float32 by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """While open, float32 in the arguments of any torch function is float64.

    Norms, softmaxes and routers often say float32 whatever the model's dtype. Left at that, a run in float64 would show
    float32's rounding again.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        wide = tuple(torch.float64 if a is torch.float32 else a for a in args)
        named = {k: torch.float64 if a is torch.float32 else a for k, a in (kwargs or {}).items()}
        return func(*wide, **named)
