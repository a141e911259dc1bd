"""Borrow a model for one run on other tensors than its own, and give it back as it was."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.conversions import KeptApply

Swap = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def borrowed(model: nn.Module, swap: Swap) -> Iterator[None]:
    """While open, every parameter and buffer of `model` is `swap(it)`; tied ones stay tied.

    On leaving, modules have the very parameters, buffers, children and attributes they had, and the random generators of torch,
    numpy and Python are where they were.  Attributes that the forward mutates in place (a list, say) stay mutated.
    """
    modules = list(model.modules())
    attributes = [dict(vars(m)) for m in modules]
    parameters = [dict(m._parameters) for m in modules]
    buffers = [dict(m._buffers) for m in modules]
    children = [dict(m._modules) for m in modules]  # some models replace layers when they see their input
    memo: dict[int, torch.Tensor] = {}

    def once(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in memo:
            new = swap(tensor)
            if isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter):
                new = nn.Parameter(new, tensor.requires_grad)
            memo[id(tensor)] = new
        return memo[id(tensor)]

    with _generators():
        try:
            for module in modules:
                for table in (module._parameters, module._buffers):
                    for name, tensor in table.items():
                        if tensor is not None:
                            table[name] = once(tensor)  # type: ignore[assignment]
                if module._parameters:  # a forward may cast a router to the dtype that it has
                    kept: Any = module
                    kept._apply = KeptApply(module)
            yield
        finally:
            for module, own, *saved in zip(modules, attributes, parameters, buffers, children):
                vars(module).clear()
                vars(module).update(own)
                tables: tuple[Any, ...] = (module._parameters, module._buffers, module._modules)
                for table, entries in zip(tables, saved):
                    table.clear()
                    table.update(entries)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """While open, Python looks for no garbage: a search makes much that lives, and looking at it took a fourth of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    python = random.getstate()
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    state = torch.get_rng_state()
    cuda = (
        torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    )
    try:
        yield
    finally:
        random.setstate(python)
        if numpy is not None and numpy_state is not None:
            numpy.random.set_state(numpy_state)
        torch.set_rng_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
