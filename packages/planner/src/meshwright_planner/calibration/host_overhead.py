"""Host overhead of model code, and of dispatch on a mesh, measured with a small transformer.

Operations are measured one by one (`calibration/operations.py`); between them a model calls modules and runs Python.  The step
time beyond the operations is the overhead of model code; the additional time of the same step on a mesh is that of dispatch.
Both are given per recorded operation, forward and backward together.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.devices import HOST, on_host
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.calibration.operations import device, sync
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.eager import EagerPlanner, default_rules

WIDTH, HEADS, TOKENS, LAYERS, ROWS = 64, 4, 16, 4, 2
STEPS = 30


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, device=HOST))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], HEADS, WIDTH // HEADS)
        q, k, v = (part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).reshape(x.shape))
        return out


class _Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = _Norm(), _Norm()
        self.attention, self.feed = _Attention(), _Feed()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.feed(self.after(x))


class Little(nn.Module):
    """A transformer so small that its operations take little more than their launch; its output is a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def step_seconds(model: nn.Module, x: Tensor) -> float:
    """Host seconds of a forward and backward, the minimum of several; on a CPU, time of this thread only."""
    clock = time.thread_time if on_host(device()) else time.perf_counter
    times = []
    for _ in range(STEPS):
        start = clock()
        model(x).backward()
        times.append(clock() - start)
        sync()
        model.zero_grad()
    return min(times)


def recorded(cluster: Cluster | str) -> tuple[int, float]:
    """Number of operations that the planner records of the model, and its predicted seconds on one rank."""
    request = PlanRequest(cluster=cluster, world_size=1)
    setting = EagerPlanner().setting(
        Little(), torch.randn(ROWS, TOKENS, WIDTH, device=HOST), request, discover()
    )
    candidate = Search(setting, default_rules()).evaluate({})
    return len(candidate.problem.tape.nodes), candidate.compute_seconds


def host(cluster: Cluster) -> float:
    """Seconds of model code per operation, on a machine whose operations are measured."""
    (count, predicted), x = recorded(cluster), torch.randn(ROWS, TOKENS, WIDTH, device=device())
    return max(0.0, step_seconds(Little().to(device()), x) - predicted) / count


def laid(ranks: int, lay: Callable[[nn.Module, Tensor], nn.Module]) -> float:
    """Seconds that a mesh adds to each operation; `lay`: applies data parallelism over the running ranks."""
    count, _ = recorded("laptop-cpu")
    # the same model on all ranks
    torch.manual_seed(0)
    x = torch.randn(ROWS * ranks, TOKENS, WIDTH, device=device())
    plain = step_seconds(Little().to(device()), x[:ROWS])
    return max(0.0, step_seconds(lay(Little().to(device()), x), x) - plain) / count
