"""Models of `torch.compile`: taken out of it before they become parallel, and refused afterwards, as scripted ones always are.

A graph of torch.compile would take this rank's part of a value for the whole; compiled regions do not.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn

from meshwright_dtensor._torch.core import (
    COMPILED_ATTRIBUTES,
    compiled_by,
    swap_compiled_call,
    without_tracing,
    wrapped_by_compile,
)
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.blocks import repeated_blocks


class Uncompiled:
    """A model without torch.compile; it keeps what was taken out.

    Attributes:
        model: the module inside of `torch.compile(module)`, else the model itself.
        patterns: names or patterns of the modules that were compiled; of a whole model its repeated blocks, "*" without any.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = wrapped_by_compile(model) or model
        self._calls: list[tuple[nn.Module, Any]] = []
        self._wrappers: list[tuple[nn.Module, str, nn.Module]] = []
        names = [""] if self.model is not model else []
        for name, module in list(self.model.named_modules()):
            call = swap_compiled_call(module)
            if call is not None:
                names.append(name)
                self._calls.append((module, call))
            for key, child in list(module.named_children()):
                inner = wrapped_by_compile(child)
                if inner is not None:
                    names.append(f"{name}.{key}" if name else key)
                    self._wrappers.append((module, key, child))
                    setattr(module, key, inner)
        self.patterns = repeated_blocks(self.model) or ("*",) if "" in names else tuple(dict.fromkeys(names))

    def restore(self) -> None:
        """Compile the modules again."""
        for module, call in self._calls:
            swap_compiled_call(module, call)
        for module, key, child in self._wrappers:
            setattr(module, key, child)


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
        f"{subject}: a graph would take this rank's part of a value for the whole; use the ordinary module, without torch.compile "
        "and torch.jit, and give mw.plan compile=True, which compiles its repeated blocks"
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
