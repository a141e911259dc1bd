"""Functions that read values, on shards: the results of one device, and nothing of the size of the tensor is gathered."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, COLUMNS = 6, 64
CALLS = {
    "equal": lambda x: (torch.equal(x, x * 1), x.equal(x + 1), torch.equal(x, x[:1])),
    "allclose": lambda x: (torch.allclose(x, x + 1e-9), x.allclose(x * 1.1, rtol=0.01)),
    "cov": lambda x: x.cov(correction=0),
    "corrcoef": lambda x: torch.corrcoef(x),
    "bincount": lambda x: (x[:, 0] * 3).abs().long().bincount(minlength=4),
    "bincount weights": lambda x: torch.bincount((x[0] * 3).abs().long(), x[0]),
    "gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, x * 2, x.abs(), full=True),
}
"""Those of a matrix; where one of them is a number, of all elements."""
GATHERED = {("cov", 0), ("corrcoef", 0)}
"""With state: every row is multiplied with all others."""


def _negative(x):
    return F.gaussian_nll_loss(x, x, x)


def differences(rank, world):
    """What differs from one device, what is gathered, and errors."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    plain = torch.randn(ROWS, COLUMNS, generator=seeded(4), dtype=torch.float64)
    failures, gathered = [], set()
    for state in (0, 1):
        here = distribute(plain, mesh, [state])
        for name, call in CALLS.items():
            with communication() as log:
                actual = call(here)
            if any(e.kind == "all_gather" and e.nbytes > 64 for e in log.events):
                gathered.add((name, state))
            expected = call(plain)
            pairs = (
                zip(actual, expected, strict=True) if isinstance(expected, tuple) else [(actual, expected)]
            )
            for a, b in pairs:
                a = a.full_tensor() if hasattr(a, "full_tensor") else a
                if not (a == b if type(b) is bool else a.dtype == b.dtype and torch.allclose(a, b)):
                    failures.append((name, state, a, b))
        try:
            _negative(here)
        except ValueError:
            continue
        failures.append(("negative variance", state))
    return failures, gathered


def test_results_are_those_of_one_device(rank_pool: RankPool) -> None:
    for failures, gathered in rank_pool.run(2, differences):
        assert not failures, failures
        assert gathered == GATHERED, gathered
