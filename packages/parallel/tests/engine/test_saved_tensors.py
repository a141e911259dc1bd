"""Tensors saved under the hooks of stage 3 are freed with the graph, also without a backward pass."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from meshwright_parallel.engine.saved_tensors import SavedTensors


class Engine:
    """An engine without unsharded parameters."""

    def __init__(self) -> None:
        self.storages: dict[int, object] = {}


def test_dropped_graph_frees_the_engine() -> None:
    """A node that saves its own result is a cycle that the garbage collector does not see."""
    engine, x = Engine(), torch.ones(3, requires_grad=True)
    with SavedTensors(engine).hooks:  # type: ignore[arg-type]
        y = torch.sigmoid(2 * x)
    gone = weakref.ref(engine)
    del engine, y
    gc.collect()
    assert gone() is None


def test_saved_tensors_keep_value_and_version() -> None:
    x = torch.linspace(-1, 1, 3, requires_grad=True)
    with SavedTensors(Engine()).hooks:  # type: ignore[arg-type]
        y, z = torch.sigmoid(2 * x), torch.exp(x)
    (actual,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(actual.sum(), x)
    s = torch.sigmoid(2 * x.detach())
    assert torch.allclose(actual, 2 * s * (1 - s)) and torch.allclose(second, 4 * s * (1 - s) * (1 - 2 * s))
    z.mul_(2)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        z.sum().backward()
