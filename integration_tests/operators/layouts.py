"""The layouts in which the tensors of a sample are tried, and the tensors of a mesh in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright_dtensor.api import as_mesh_parameter, distribute
from meshwright_dtensor.sharding.boxes import shardable
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.tensor.global_tensor import wrap

States = tuple[str | int, ...]
PLAIN: States = ()
"""In place of states: the tensor stays a plain one, the same on every rank."""


@dataclass(frozen=True)
class Layouts:
    """States of every tensor of a sample.

    `kind`: activation, parameter or stored (gradients and optimizer states). `memory`: dense, gaps (not contiguous) or
    transposed.
    """

    name: str
    states: tuple[States, ...]
    kind: str = "activation"
    memory: str = "dense"

    @property
    def sharded(self) -> bool:
        """Whether a rank holds a part of some tensor."""
        return any(isinstance(s, int) for states in self.states for s in states)


def layouts(tensors: Sequence[Tensor], sizes: tuple[int, ...], kind: str = "activation") -> list[Layouts]:
    """The layouts of a sample on a mesh of these sizes, each once, the first under any name."""
    result: dict[tuple[Any, ...], Layouts] = {}
    for layout in _named(tensors, sizes, kind):
        result.setdefault((layout.states, layout.memory), layout)
    return list(result.values())


def _named(tensors: Sequence[Tensor], sizes: tuple[int, ...], kind: str) -> Iterator[Layouts]:
    whole: States = ("I",) * len(sizes)
    count, dims = len(tensors), max((t.dim() for t in tensors), default=0)

    def each(wanted: Sequence[Sequence[str | int]]) -> tuple[States, ...]:
        return tuple(_legal(t, states, sizes) for t, states in zip(tensors, wanted, strict=True))

    rows: list[Sequence[str | int]]
    if len(sizes) == 1:
        rows = [[d] for d in (*range(dims), -1)]
    else:
        rows = [[0, 1], [1, 0], ["I", 0], [0, 0], [-1, -2]]
    if kind == "activation":
        yield Layouts("whole", (whole,) * count)
    for row in rows:
        yield Layouts(f"shards {_text(row)}", each([row] * count), kind)
    if kind != "activation":
        return
    partial = ["P"] * len(sizes)
    yield Layouts("partial", each([partial] * count))
    if count > 1:
        yield Layouts("first sharded", (*each([rows[0], *[["I"] * len(sizes)] * (count - 1)]),))
        yield Layouts("first sharded, others plain", (each([rows[0]] * count)[0], *[PLAIN] * (count - 1)))
        yield Layouts("others sharded", (whole, *each([rows[0]] * count)[1:]))
        yield Layouts("mixed dims", each([rows[i % len(rows)] for i in range(count)]))
        yield Layouts("first partial", each([partial, *[rows[0]] * (count - 1)]))
    if len(sizes) > 1:
        yield Layouts("partial and shards", each([["P", 0]] * count))
    yield Layouts("gaps", each([rows[0]] * count), memory="gaps")
    yield Layouts("transposed", each([rows[-1]] * count), memory="transposed")


def _text(row: Sequence[str | int]) -> str:
    return "/".join(str(s) if isinstance(s, str) else f"S({s})" for s in row)


def _legal(tensor: Tensor, wanted: Sequence[str | int], sizes: tuple[int, ...]) -> States:
    """The states that this tensor can be in, whole where it cannot."""
    left, states = list(tensor.shape), []
    for state, n in zip(wanted, sizes, strict=True):
        if state == "P" and (
            tensor.dtype.itemsize < 2 or not (tensor.is_floating_point() or tensor.is_complex())
        ):
            state = "I"
        if isinstance(state, int):
            dim = state + tensor.dim() if state < 0 else state
            if 0 <= dim < tensor.dim() and left[dim] >= 2 and shardable(left[dim], n):
                left[dim] = -(-left[dim] // n)
                state = dim
            else:
                state = "I"
        states.append(state)
    return tuple(states)


def in_memory(value: Tensor, memory: str) -> Tensor:
    """`value` in a new order of memory; autograd records it."""
    if memory == "gaps":
        return torch.stack([value, value.detach()], -1).select(-1, 0)
    if memory == "transposed" and value.dim() > 1:
        return value.transpose(0, -1).contiguous().transpose(0, -1)
    return value


def on_mesh(leaf: Tensor, mesh: DeviceMesh, states: States, layouts: Layouts) -> Any:
    """`leaf`, a global value, as a tensor of the mesh. The gradient of an activation arrives at `leaf`."""
    if leaf.device.type != mesh.device_type:
        # some operators take indices on the CPU, wherever the rest is
        return in_memory(leaf, layouts.memory)
    if layouts.kind == "activation":
        if states == PLAIN:
            return in_memory(leaf, layouts.memory)
        made = distribute(leaf, mesh, states)
        local = _with_summands(made, leaf, mesh, states)
        return wrap(in_memory(local, layouts.memory), made.global_layout)
    placements = [Shard(s) if isinstance(s, int) else Replicate() for s in states]
    stored = mesh_value(distribute_tensor(leaf.detach().clone(), mesh, placements, src_data_rank=None))
    return stored if layouts.kind == "stored" else as_mesh_parameter(stored, states, leaf.requires_grad)


def _with_summands(made: Any, leaf: Tensor, mesh: DeviceMesh, states: States) -> Tensor:
    """The local tensor, with other summands of the same partial sum: 2x - x, which is exact.

    Those of a conversion, x + 0, hide wrong rules: f(x) + f(0) is f(x) for too many functions.
    """
    local, weight = made.to_local(), 1
    for axis, state in enumerate(states):
        if state == "P":
            rank, last = mesh.get_local_rank(axis), mesh.size(axis) - 1
            weight *= 2 if rank == 0 else -1 if rank == last else 0
    if "P" not in states:
        return local
    value = distribute(leaf.detach(), mesh, ["I" if s == "P" else s for s in states]).to_local()
    # inf - inf is no number
    summand = torch.where(value.isfinite(), value * weight - local.detach(), torch.zeros_like(value))
    return local + summand
