"""Run a model once on substituted tensors, and restore it."""

from __future__ import annotations

import contextlib
import gc
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import nn

from meshwright_dtensor.dispatch.module_to import KeptApply
from meshwright_planner import _torch
from meshwright_planner.trace.recorder.module_state import ModuleState

Swap = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def borrowed(model: nn.Module, swap: Swap) -> Iterator[None]:
    """Inside, every parameter and buffer of `model` is replaced by `swap(it)`; tied ones stay tied.

    On exit, the modules have the same parameters, buffers, children, hooks and attributes as before, with the same contents
    (see `ModuleState`), and the random generators of torch, numpy and Python have their old state.
    """
    modules = list(model.modules())
    before = ModuleState(modules)
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
                for table in _torch.own_tensors(module):
                    for name, tensor in table.items():
                        if tensor is not None:
                            table[name] = once(tensor)  # type: ignore[assignment]
                # a forward may call to() on a module (routers)
                if _torch.own_tensors(module)[0]:
                    _torch.convert_by(module, KeptApply(module))
            yield
        finally:
            before.put_back()


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, garbage collection is off: a search creates many long-lived objects, and scanning them took a quarter of the time."""
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
