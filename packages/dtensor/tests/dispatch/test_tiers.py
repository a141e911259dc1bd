"""The tier of a call follows from its communication, for ``doctor`` and the strict mode."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


class Fifth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.sort(0).values / 5

    @staticmethod
    def backward(ctx, grad):
        return grad


CALLS = {
    "elementwise": (0, lambda x, w: x + 1, 1, False),
    "along another dim": (0, lambda x, w: x.softmax(1), 1, False),
    "a partial sum": (0, lambda x, w: x.sum(), 1, False),
    "along the sharded dim": (0, lambda x, w: x.softmax(0), 2, False),
    "along the only dim": (0, lambda x, w: x[:, 0].softmax(0), 3, True),
    "an element of the sharded dim": (0, lambda x, w: x[:, 0][1], 3, True),
    "without a program": (0, lambda x, w: x.masked_select(x > 0), 3, True),
    "a custom function": (0, lambda x, w: Fifth.apply(x), 3, True),
    "on whole values": ("I", lambda x, w: (x.softmax(0), x.masked_select(x > 0), Fifth.apply(x)), 1, False),
    "a weight is gathered, the rows stay": (0, lambda x, w: F.linear(x, w), 2, True),
}
"""Name -> state of the inputs, a call on them, the highest tier, whether something is gathered."""


def tiers(rank, world):
    """Name -> the highest tier of its calls, whether something is gathered, and the tiers that are listed."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    context = MeshContext.of(mesh)
    reported = {}
    for name, (state, call, *_) in CALLS.items():
        x, w = (distribute(torch.randn(4, 4), mesh, [state]) for _ in range(2))
        context.programs.clear()
        context.cache.clear()
        before, listed = dict(context.report.tiers), len(context.report.entries)
        with communication() as log:
            call(x, w)
        reported[name] = (
            max(t for t in (1, 2, 3) if context.report.tiers[t] > before[t]),
            any(e.kind == "all_gather" for e in log.events),
            [e.tier for e in context.report.entries[listed:] if e.reason],
        )
    return reported


def test_the_tier_is_what_is_communicated(rank_pool: RankPool) -> None:
    for reported in rank_pool.run(2, tiers):
        for name, (_, _, tier, gathered) in CALLS.items():
            expected = (tier, gathered, [tier] if tier > 1 else [])
            assert reported[name] == expected, (name, reported[name])


def strict(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    context = MeshContext.of(mesh)
    context.strict = True
    x = distribute(torch.randn(4, 4), mesh, [0])
    x.softmax(1).sum()
    messages = []
    for call in (lambda: x[:, 0].softmax(0), lambda: Fifth.apply(x), lambda: x.masked_select(x > 0)):
        # the second time as well: a refused program is not kept
        for _ in range(2):
            try:
                call()
            except UnsupportedError as error:
                messages.append(str(error))
    return messages


def test_strict_mode_refuses_what_would_run_on_gathered_values(rank_pool: RankPool) -> None:
    for messages in rank_pool.run(2, strict):
        assert len(messages) == 6 and all(m.startswith("strict mode: ") for m in messages), messages
        assert "aten._softmax.default gathers a value that is sharded on dim 0" in messages[0]
