"""Ops that would gather a value are run as torch's decompositions of them: with the results of one device."""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, WIDTH = 6, 64


def _nll(reduction):
    def loss(x):
        labels = torch.arange(ROWS) % 4
        return F.nll_loss(
            x[:, :5], labels, torch.linspace(1, 2, 5, dtype=x.dtype), ignore_index=1, reduction=reduction
        )

    return loss


CALLS = {
    "layer_norm": lambda x: F.layer_norm(x, (WIDTH,), torch.linspace(1, 2, WIDTH, dtype=x.dtype)),
    "rms_norm": lambda x: F.rms_norm(x, (WIDTH,), torch.linspace(1, 2, WIDTH, dtype=x.dtype)),
    "softmax of all": lambda x: x.flatten().softmax(0).view(ROWS, WIDTH),
    "log_softmax of all": lambda x: x.flatten().log_softmax(0).view(ROWS, WIDTH),
    "nll_loss mean": _nll("mean"),
    "nll_loss none": _nll("none"),
    "nll_loss2d": lambda x: F.nll_loss(x.view(ROWS, 4, 4, 4), (torch.arange(ROWS * 16) % 4).view(ROWS, 4, 4)),
    "multi_margin": lambda x: F.multi_margin_loss(x, torch.arange(ROWS)),
    "stft": lambda x: torch.view_as_real(
        torch.stft(x, 16, 4, window=torch.ones(16, dtype=x.dtype), return_complex=True)
    ),
    "trace": lambda x: x[:, :ROWS].trace(),
    "diag": lambda x: x[:, 0].diag() + x[0, :ROWS].diag(),
    "bilinear": lambda x: F.bilinear(
        x, x, torch.linspace(0, 1, 3 * WIDTH**2, dtype=x.dtype).view(3, WIDTH, WIDTH)
    ),
    "dist": lambda x: torch.dist(x, x.detach() * x.detach(), 3),
    "renorm": lambda x: x.renorm(2, 1, 1.5),
    "instance_norm": lambda x: F.instance_norm(
        x.view(ROWS, WIDTH // 8, 8), weight=torch.ones(WIDTH // 8, dtype=x.dtype)
    ),
}
GATHERED = {("nll_loss2d", 1), ("multi_margin", 1), ("bilinear", 0), ("bilinear", 1)}
"""(call, sharded dim): the classes are sharded; the gradient of the weights of bilinear is larger than the few rows are."""


def differences(rank, world):
    """What differs from one device, and what is gathered."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    failures, gathered = [], set()
    dtypes = ((torch.float64, 1e-10), (torch.bfloat16, 0.05))
    for (name, call), (dtype, tolerance), state in itertools.product(CALLS.items(), dtypes, (0, 1)):
        if dtype is torch.bfloat16 and name not in ("layer_norm", "rms_norm", "softmax of all"):
            continue
        generator = seeded(2)
        plain = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        here = distribute(plain.detach(), mesh, [state]).requires_grad_()
        with communication() as log:
            actual = call(here)
        if any(e.kind == "all_gather" and e.nbytes > 16 * WIDTH for e in log.events):
            gathered.add((name, state))
        expected = call(plain)
        results = [r if isinstance(r, tuple) else (r,) for r in (actual, expected)]
        for first, *_ in results:
            (first * first).sum().backward()
        pairs = [*zip(*results, strict=True), (here.grad, plain.grad)]
        for place, (a, b) in enumerate(pairs):
            a = a.full_tensor() if hasattr(a, "full_tensor") else a
            if a.dtype != b.dtype or not torch.allclose(a, b, rtol=tolerance, atol=tolerance):
                failures.append((name, dtype, state, place, float((a - b).detach().abs().max())))
    return failures, gathered


def test_calls_are_those_of_one_device(rank_pool: RankPool) -> None:
    for failures, gathered in rank_pool.run(2, differences):
        assert not failures, failures
        assert gathered == GATHERED, gathered
