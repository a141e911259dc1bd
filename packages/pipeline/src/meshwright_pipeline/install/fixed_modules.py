"""Refuses parameters and modules that are added to a pipelined model, and buffers that are replaced: other ranks have divided it
without them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.stages.whole_model import whole_model_of

_ATTRIBUTE = "_meshwright_fixed"


def refuse_additions(model: nn.Module) -> None:
    """Make adding or replacing a parameter or a module raise UsageError, and replacing a buffer outside of a step."""
    for module in model.modules():
        module.__dict__[_ATTRIBUTE] = whole_model_of(model)
    _watch_registrations()


@cache
def _watch_registrations() -> None:
    register_module_parameter_registration_hook(_check_parameter)
    register_module_module_registration_hook(_check_module)
    register_module_buffer_registration_hook(_check_buffer)


def _check_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    if _ATTRIBUTE in module.__dict__ and parameter is not module._parameters.get(name):
        _refuse("parameter", name, module)


def _check_module(module: nn.Module, name: str, added: Any) -> None:
    if _ATTRIBUTE in module.__dict__ and added is not module._modules.get(name):
        _refuse("module", name, module)


def _check_buffer(module: nn.Module, name: str, buffer: Any) -> None:
    whole = module.__dict__.get(_ATTRIBUTE)
    before = module._buffers.get(name)
    if whole is not None and not whole.inside and before is not None and buffer is not before:
        raise UsageError(
            f"buffer {name!r} of a {type(module).__name__} was replaced after the model was divided into stages: ranks of other "
            f"stages would not know of it; write the new value with {name}.copy_(value)"
        )


def _refuse(kind: str, name: str, module: nn.Module) -> None:
    raise UsageError(
        f"{kind} {name!r} of a {type(module).__name__} was added or replaced after the model was divided into stages: ranks of "
        "other stages would not know of it; change the model (adapters such as LoRA, new heads) before parallelize()"
    )
