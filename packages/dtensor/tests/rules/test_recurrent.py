"""Recurrent layers and cells whose batch is sharded: each rank runs its own rows, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.rules import NodeView, RuleBook
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.graph import Recorder

BATCH, TIME, WIDTH = 6, 5, 4


class Cells(nn.Module):
    """A cell in a loop, from zeros as large as the batch."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, t, i]."""
        h: Any = torch.zeros(x.shape[0], WIDTH)
        h = (h, torch.zeros_like(h)) if isinstance(self.cell, nn.LSTMCell) else h
        results = []
        for step in range(x.shape[1]):
            h = self.cell(x[:, step], h)
            results.append(h[0] if isinstance(h, tuple) else h)
        return torch.stack(results, 1)


class Learnt(nn.Module):
    """A layer from a learnt state, alike for every row."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.layer = nn.Parameter(torch.ones(1, 1, WIDTH)), nn.GRU(3, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [b, t, i]."""
        return self.layer(x, self.start.expand(1, x.shape[0], WIDTH))[0]


class First(nn.Module):
    """The outputs of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer has it."""
        return self.layer(x)[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (lambda: First(nn.LSTM(3, WIDTH, batch_first=True)), 0),
    "lstm, batch in the middle": (lambda: First(nn.LSTM(3, WIDTH, num_layers=2)), 1),
    "lstm both ways": (lambda: First(nn.LSTM(3, WIDTH, bidirectional=True, batch_first=True)), 0),
    "lstm projected": (lambda: First(nn.LSTM(3, WIDTH, proj_size=2, batch_first=True)), 0),
    "gru": (lambda: First(nn.GRU(3, WIDTH, batch_first=True)), 0),
    "gru, batch in the middle": (lambda: First(nn.GRU(3, WIDTH)), 1),
    "rnn": (lambda: First(nn.RNN(3, WIDTH, num_layers=2, batch_first=True)), 0),
    "gru from a learnt state": (Learnt, 0),
    "lstm cell": (lambda: Cells(nn.LSTMCell(3, WIDTH)), 0),
    "gru cell": (lambda: Cells(nn.GRUCell(3, WIDTH)), 0),
    "rnn cell": (lambda: Cells(nn.RNNCell(3, WIDTH)), 0),
}
"""Name -> (model, dim of the batch)."""


def compare(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    """Name -> (all agrees with one device, collectives, shape that the rank has of the result, calls not run as they are)."""
    results = {}
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    for name in names:
        torch.manual_seed(0)
        make, dim = MODELS[name]
        model = make()
        x = torch.randn(*((BATCH, TIME, 3) if dim == 0 else (TIME, BATCH, 3)))
        expected = model(x)
        (expected**2).sum().backward()
        gradients = {key: p.grad for key, p in model.named_parameters()}
        shared = {key: distribute(p.detach(), mesh, ["X"]) for key, p in model.named_parameters()}
        for p in shared.values():
            p.requires_grad_()
        before = len(MeshContext.of(mesh).report.entries)
        with communication() as log:
            out = torch.func.functional_call(model, shared, (distribute(x, mesh, [dim]),))
            (out**2).sum().backward()
        assert isinstance(out, GlobalTensor)
        agree = [torch.allclose(out.full_tensor(), expected, rtol=1.3e-6, atol=1e-5)]
        for key, p in shared.items():
            total = p.grad.full_tensor()
            agree.append(torch.allclose(total, gradients[key], rtol=1.3e-6, atol=1e-5))
        moved = [(e.kind, e.function) for e in log.events if e.function not in ("", "sum")]
        others = [e.function for e in MeshContext.of(mesh).report.entries[before:]]
        results[name] = all(agree), moved, tuple(out.to_local().shape), others
    return results


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_each_rank_runs_its_own_rows(rank_pool: RankPool, world: int) -> None:
    for name, (agrees, moved, shape, others) in rank_pool.run(world, compare, list(MODELS))[0].items():
        assert agrees, name
        assert not moved, (name, moved)
        assert shape[MODELS[name][1]] == BATCH // world, name
        assert not others, (name, others)


@pytest.mark.parametrize("mode", [1, 2])
@pytest.mark.parametrize("batch_first", [False, True])
def test_cudnn_layers_shard_the_batch(mode: int, batch_first: bool) -> None:
    """Mode 2 is an LSTM, 1 an RNN of tanh; the shapes are those that torch says of them."""
    shape = (BATCH, TIME, 3) if batch_first else (TIME, BATCH, 3)
    sizes = [shape, (16, 3), (16, 4), (16,), (16,), (1, BATCH, WIDTH), (1, BATCH, WIDTH)]
    x, *weights, h, c = (torch.empty(size, device="meta") for size in sizes)

    def layer(dropout: float) -> NodeView:
        recorder = Recorder({}, [x, *weights, h, c])
        with recorder, torch.no_grad():
            cell = c if mode == 2 else None
            torch.ops.aten._cudnn_rnn(
                x, weights, 4, None, h, cell, mode, WIDTH, 0, 1, batch_first, dropout, True, False, [], None
            )
        return NodeView.of(recorder.nodes[0], recorder.values, 2)

    book, batch = RuleBook.first_party(), 0 if batch_first else 1
    whole, split = book.strategies(layer(0.0))
    assert split.ins == (batch, *("R",) * 4, *(1,) * mode) and whole.source == "replicate"
    assert split.outs == (batch, 1, 1 if mode == 2 else "R", "R")
    assert len(book.strategies(layer(0.5))) == 1  # draws masks
