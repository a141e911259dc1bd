"""Connects the tensor classes to the dispatcher."""

from __future__ import annotations

from typing import Any

from meshwright_dtensor.dispatch import fallback
from meshwright_dtensor.dispatch.dispatch import dispatch
from meshwright_dtensor.dispatch.guard import install_guard
from meshwright_dtensor.dispatch.parameter_calls import parameter_call
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.tensor.global_tensor import GlobalTensor

# the dispatcher itself, not a method that calls it: one Python frame less per call
GlobalTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[assignment]
MeshParameter.__torch_function__ = classmethod(parameter_call)  # type: ignore[assignment]


def install() -> None:
    """Catch ``autograd.Function.apply``, which does not call ``__torch_function__``; idempotent."""
    install_guard(fallback.run_function, _is_hidden_from)


def _is_hidden_from(cls: Any, x: Any) -> bool:
    """Whether a Function must not see ``x``: torch's own Functions (DTensor's, FSDP's) know DTensors, so mesh parameters."""
    return isinstance(x, GlobalTensor) or (
        isinstance(x, MeshParameter) and not cls.__module__.startswith("torch.")
    )
