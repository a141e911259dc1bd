"""Refuses parameters and modules that are added to a pipelined model: other ranks have divided it without them."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from meshwright_dtensor.errors import UsageError

_ATTRIBUTE = "_meshwright_fixed"


def refuse_additions(model: nn.Module) -> None:
    """Make adding or replacing a parameter or a module raise UsageError."""
    for module in model.modules():
        module.__dict__[_ATTRIBUTE] = True
    _watch_registrations()


@cache
def _watch_registrations() -> None:
    register_module_parameter_registration_hook(_check_parameter)
    register_module_module_registration_hook(_check_module)


def _check_parameter(module: nn.Module, name: str, parameter: Any) -> None:
    if _ATTRIBUTE in module.__dict__ and parameter is not module._parameters.get(name):
        _refuse("parameter", name, module)


def _check_module(module: nn.Module, name: str, added: Any) -> None:
    if _ATTRIBUTE in module.__dict__ and added is not module._modules.get(name):
        _refuse("module", name, module)


def _refuse(kind: str, name: str, module: nn.Module) -> None:
    raise UsageError(
        f"{kind} {name!r} of a {type(module).__name__} was added or replaced after the model was divided into stages: ranks of "
        "other stages would not know of it; change the model (adapters such as LoRA, new heads) before parallelize()"
    )
