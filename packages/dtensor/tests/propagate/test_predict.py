"""The prediction of a recorded run equals the run: states of the results, and every collective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.propagate.choose import MeshShape
from meshwright_dtensor.propagate.predict import Predictor
from meshwright_dtensor.rules import RuleBook
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.graph import Recorder

Tensor = torch.Tensor
SHAPE = (8, 6, 4)


def shared(x: Tensor) -> Tensor:
    """Gathered once for two readers; the third takes the shard."""
    return x.sort(0).values + x.flip(0) * 2 + x


def reduced(x: Tensor) -> Tensor:
    """A partial sum that two operations need reduced."""
    total = x.sum(0)
    return total.exp() + total.pow(2)


def gathered(x: Tensor) -> Tensor:
    """No local program: the result and its readers are replicated."""
    return (x * torch.masked_select(x, x > 0).sum()).cumsum(1)


def written(x: Tensor) -> Tensor:
    """A write that has no local program, to a shard."""
    y = x * 1
    y.index_add_(0, torch.tensor([0, 3]), torch.ones(2, 6, 4))
    return y.tanh()


def not_needed(x: Tensor) -> Tensor:
    """A tensor that is gathered for an integer result has no gradient."""
    return x * (x.argsort(0) > 3)


def compared(x: Tensor) -> Tensor:
    """Rows with rows."""
    flat = x.flatten(1)
    return (flat @ flat.t()).softmax(-1)


def normed(x: Tensor) -> Tensor:
    """Statistics of all rows."""
    return F.batch_norm(x, None, None, training=True)


def reordered(x: Tensor) -> Tensor:
    """The rows go to another dim, and are sliced there."""
    return x.transpose(0, 1).reshape(48, 4)[3:].roll(2, 0)


CASES: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (shared, reduced, gathered, written, not_needed, compared, normed, reordered)
}


def executed(rank: int, world: int, sizes: tuple[int, ...], states: tuple[Any, ...]) -> dict[str, Any]:
    """Case -> collectives, and states of the result."""
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("dp", "zero")[: len(sizes)])
    actual = {}
    for name, function in CASES.items():
        x = torch.randn(SHAPE, generator=seeded(0))
        given = distribute(x, mesh, states).requires_grad_()
        with communication() as log:
            out = function(given * 1)
            assert isinstance(out, GlobalTensor)
            end_states = out._layout.states
            torch.autograd.backward([out._local], [torch.ones_like(out._local)])
        moved = Counter(
            (e.kind, e.axis, e.phase, e.function, e.why) for e in log.events for _ in range(e.nbytes)
        )
        actual[name] = moved, end_states
    return actual


def predicted(name: str, sizes: tuple[int, ...], states: tuple[Any, ...]) -> tuple[Counter[Any], Any]:
    """The same, without ranks."""
    x = torch.randn(SHAPE, generator=seeded(0)).requires_grad_()
    book = RuleBook.first_party()
    recorder = Recorder(book.composites)
    recorder.mark(x, "input:x")
    with recorder:
        out = CASES[name](x * 1)
    grad = [i == 0 for i in range(len(recorder.values))]
    for node in recorder.nodes:
        for ref in node.outs:
            grad[ref.i] = recorder.values[ref.i].differentiable and any(grad[r.i] for r in node.ins)
    grid = MeshShape(("dp", "zero")[: len(sizes)], sizes)
    result = recorder.index_of(out)
    actual = Predictor(
        grid, book, recorder.nodes, recorder.values, grad, {0: states}, (), results=[result or 0]
    ).run()
    moved: Counter[Any] = Counter()
    for m in actual.moved:
        moved[m.kind, m.axis, m.phase, m.function, m.why] += m.nbytes
    return moved, actual.states.get(result or 0, ("I",) * len(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "states"),
    [((2,), (0,)), ((4,), (0,)), ((2,), (1,)), ((2, 2), (0, 0)), ((2, 2), (0, 1))],
    ids=str,
)
def test_prediction_equals_executed_run(
    rank_pool: RankPool, sizes: tuple[int, ...], states: tuple[Any, ...]
) -> None:
    world = sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
    for name, (moved, end_states) in rank_pool.run(world, executed, sizes, states)[0].items():
        numbers = {key for key in moved if moved[key] <= 8}  # of one element
        expected = Counter({key: n for key, n in moved.items() if key not in numbers})
        actual, ends = predicted(name, sizes, states)
        assert actual == expected, name
        assert ends == end_states, name


def test_prediction_gives_reason_of_gathered_call() -> None:
    x = torch.ones(SHAPE)
    book = RuleBook.first_party()
    recorder = Recorder(book.composites)
    recorder.mark(x, "input:x")
    with recorder:
        torch.masked_select(x, x > 0).sum()
    actual = Predictor(
        MeshShape(("dp",), (2,)), book, recorder.nodes, recorder.values, [False] * 9, {0: (0,)}, ()
    ).run()
    (why,) = actual.gathered.values()
    assert why == "depends on the data"
    assert [(m.kind, m.nbytes) for m in actual.moved] == [
        ("all_gather", 8 * 6 * 4 * 4),
        ("all_gather", 8 * 6 * 4),
    ]
