"""Muon on parameters over a mesh: each matrix is orthogonalised on one rank, which the others send their parts to.

Muon orthogonalises an update by products of bfloat16 matrices. On shards each product would be a sum of rounded parts, several
percent away from one device, and communicated five times. All else in a step is elementwise, so momentum and parameters stay in
the parts in which they are. Ranks send their parts of the update, in bfloat16, to the owner of the matrix, and get their parts
of the result back. The update equals that of one device, bit for bit.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.parameter import MeshParameter, state_like
from meshwright_dtensor.sharding.balance import orthogonalization_cost
from meshwright_dtensor.sharding.boxes import dim_order_of
from meshwright_dtensor.stages.stage_tensor import StageTensor
from meshwright_dtensor.stored.elementwise import parts_correspond
from meshwright_dtensor.stored.permuted import like_parameter
from meshwright_parallel._torch.core import local_of
from meshwright_parallel._torch.muon import SENT_DTYPE, learning_rates, orthogonalize
from meshwright_parallel.optim.matrix_owners import OwnerExchange, balanced_owners

Tensor = torch.Tensor

ROUND_ELEMENTS = 1 << 27
"""Matrices with so many elements in all are exchanged at a time: 256 MiB in bfloat16, which bounds the memory of a step."""


class MuonGroups:
    """The groups of a copy of Muon, which are iterated in its step after the closure.

    Parameters over a mesh are stepped here; what torch steps are groups of all others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[dict[str, Any]]:
        by_mesh: dict[MeshContext, list[_Matrix]] = {}
        for group in self._optimizer.param_groups:
            plain = [p for p in group["params"] if not isinstance(p, (MeshParameter, StageTensor))]
            if plain:
                yield {**group, "params": plain}
            for parameter in group["params"]:
                if isinstance(parameter, MeshParameter) and parameter.grad is not None:
                    matrices = by_mesh.setdefault(parameter.global_layout.context, [])
                    matrices.append(_Matrix(parameter, group))
        for context, matrices in by_mesh.items():
            _step(context, matrices, self._optimizer.state)


@dataclass
class _Matrix:
    parameter: MeshParameter
    group: Mapping[str, Any]

    @property
    def layout(self) -> Layout:
        return self.parameter.global_layout

    @property
    def scales_momentum(self) -> bool:
        """Whether torch scales the momentum itself, as it does where that is the update and needs no rounding."""
        return not self.group["nesterov"] and self.layout.dtype == SENT_DTYPE

    def update(self, state: Any) -> Tensor:
        """This rank's part of the matrix to orthogonalise, after a step of the momentum."""
        gradient = local_of(self.parameter.grad)  # type: ignore[arg-type]
        if torch.is_complex(gradient):
            raise RuntimeError("Muon does not support complex parameters")
        momentum = local_of(self._momentum(state[self.parameter], gradient))
        momentum.lerp_(gradient, 1 - self.group["momentum"])
        return gradient.lerp(momentum, self.group["momentum"]) if self.group["nesterov"] else momentum

    def _momentum(self, entries: dict[str, Any], gradient: Tensor) -> Tensor:
        momentum = entries.get("momentum_buffer")
        if momentum is None:
            momentum = state_like(
                self.parameter, torch.zeros_like(gradient, memory_format=torch.preserve_format)
            )
        elif not parts_correspond(self.parameter, momentum):
            momentum = like_parameter(momentum, self.parameter)
        entries["momentum_buffer"] = momentum
        return momentum

    def apply(self, orthogonal: Tensor) -> None:
        lr, adjusted = learning_rates(self.group, self.layout.shape)
        if self.layout.shape[0] > self.layout.shape[1]:
            # transposed in memory, as torch's: the same kernels round in the same way
            orthogonal = orthogonal.T.contiguous().T
        local = local_of(self.parameter)
        local.mul_(1 - lr * self.group["weight_decay"])
        local.add_(orthogonal, alpha=-adjusted)


def _rounds(context: MeshContext, layouts: tuple[Layout, ...]) -> list[tuple[slice, OwnerExchange]]:
    """Owners that are balanced over all matrices, and the exchange of each round."""
    owners = balanced_owners(context, layouts, [orthogonalization_cost(layout.shape) for layout in layouts])
    rounds: list[tuple[slice, OwnerExchange]] = []
    start = elements = 0
    for end, layout in enumerate([*layouts, None]):
        size = 0 if layout is None else layout.shape.numel()
        if end > start and (layout is None or elements + size > ROUND_ELEMENTS):
            part = slice(start, end)
            rounds.append((part, OwnerExchange(context, layouts[part], owners[part])))
            start, elements = end, 0
        elements += size
    return rounds


def _step(context: MeshContext, matrices: Sequence[_Matrix], state: Any) -> None:
    rounds = context.cached(_rounds, tuple(matrix.layout for matrix in matrices))
    wholes = []
    for part, exchange in rounds:
        updates = [matrix.update(state) for matrix in matrices[part]]
        orders = [dim_order_of(local_of(matrix.parameter)) for matrix in matrices[part]]
        wholes.append(exchange.gather([update.to(SENT_DTYPE) for update in updates], orders))
    # all that a rank owns before any result is sent: owners are balanced over the rounds, not in each
    results = [
        {i: orthogonalize(whole, matrices[part][i].group) for i, whole in gathered.items()}
        for (part, _), gathered in zip(rounds, wholes, strict=True)
    ]
    for (part, exchange), gathered, result in zip(rounds, wholes, results, strict=True):
        like = torch.empty(0, dtype=SENT_DTYPE, device=local_of(matrices[part][0].parameter).device)
        for matrix, orthogonal in zip(matrices[part], exchange.scatter(result, like), strict=True):
            matrix.apply(orthogonal)
        if any(matrix.scales_momentum for matrix in matrices[part]):
            for matrix, scaled in zip(matrices[part], exchange.scatter(gathered, like), strict=True):
                if matrix.scales_momentum:
                    local_of(state[matrix.parameter]["momentum_buffer"]).copy_(scaled)
