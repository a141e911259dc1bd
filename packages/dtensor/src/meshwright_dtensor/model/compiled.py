"""Refuses compiled and scripted modules: a graph would take this rank's part of a value for the whole."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from meshwright_dtensor._torch.core import COMPILED_ATTRIBUTES, compiled_by, without_tracing
from meshwright_dtensor.errors import UnsupportedError


def check_not_compiled(model: nn.Module) -> None:
    """Refuse a model with compiled or scripted modules. Raises UnsupportedError: naming the module."""
    for name, module in model.named_modules():
        compiler = compiled_by(module)
        if compiler is not None:
            what = f"module {name!r}" if name else "the model"
            _refuse(f"{what} is compiled by {compiler}")


def refuse_compiling(model: nn.Module) -> None:
    """Make compiling, scripting and tracing raise UnsupportedError: of a parallel model, of its modules and of its calls."""
    refusal = _Refusal()
    for module in model.modules():
        module.__dict__.update(dict.fromkeys(COMPILED_ATTRIBUTES, refusal))
    model.register_forward_pre_hook(refuse_traced_call, prepend=True)


def refuse_traced_call(*_: Any) -> None:
    """Raise UnsupportedError if what runs is being compiled or traced: the call of a parallel model, a function of its tensors."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        _refuse()


@without_tracing
def _refuse(subject: str = "torch.compile or torch.jit was given a parallel model") -> NoReturn:
    raise UnsupportedError(
        f"{subject}: a graph would take this rank's part of a value for the whole, and compiled regions are not implemented "
        "yet; use the ordinary module, without torch.compile and torch.jit"
    )


class _Refusal:
    """An attribute of a module that raises where torch uses it to compile the module."""

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse()

    @property
    def _torchscript_modifier(self) -> NoReturn:
        # torch.jit.trace asks all attributes of a module
        _refuse()

    def __eq__(self, other: object) -> bool:
        # torch.compile compares the attribute with the module's id
        if isinstance(other, int):
            _refuse()
        return self is other

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self
