"""What autograd saves under the hooks of stage 3 is freed with the graph, without a backward pass too."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from meshwright_parallel.engine.saved_tensors import SavedTensors


class Engine:
    """An engine that has gathered nothing."""

    def __init__(self) -> None:
        self.storages: dict[int, object] = {}


def test_a_graph_that_is_dropped_frees_the_engine() -> None:
    """A result that a node saves of itself is a circle through the node, which no garbage collector sees."""
    engine, x = Engine(), torch.ones(3, requires_grad=True)
    with SavedTensors(engine).hooks:  # type: ignore[arg-type]
        y = torch.sigmoid(2 * x)
    gone = weakref.ref(engine)
    del engine, y
    gc.collect()
    assert gone() is None


def test_what_is_saved_is_what_was_there() -> None:
    x = torch.linspace(-1, 1, 3, requires_grad=True)
    with SavedTensors(Engine()).hooks:  # type: ignore[arg-type]
        y, z = torch.sigmoid(2 * x), torch.exp(x)
    (found,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(found.sum(), x)
    s = torch.sigmoid(2 * x.detach())
    assert torch.allclose(found, 2 * s * (1 - s)) and torch.allclose(second, 4 * s * (1 - s) * (1 - 2 * s))
    z.mul_(2)
    with pytest.raises(RuntimeError, match="is at version 1; expected version 0"):
        z.sum().backward()
