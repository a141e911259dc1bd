"""Borrow a model for one run on other tensors than its own, and give it back as it was."""

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
from meshwright_planner.trace.recorder.module_state import Contents

Swap = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def borrowed(model: nn.Module, swap: Swap) -> Iterator[None]:
    """While open, every parameter and buffer of `model` is `swap(it)`; tied ones stay tied.

    On leaving, modules have the very parameters, buffers, children, hooks and attributes they had, those attributes hold what
    they held (see `Contents`), and the random generators of torch, numpy and Python are where they were.
    """
    modules = list(model.modules())
    before = Contents(modules)
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
                if _torch.own_tensors(module)[0]:  # a forward may cast a router to the dtype that it has
                    _torch.convert_by(module, KeptApply(module))
            yield
        finally:
            before.put_back()


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
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
