"""Owners of matrices: each matrix is put together on one rank of its mesh, and what that rank computes goes to all others.

An owner has one coordinate on each mesh axis. Parts go to it axis by axis, the innermost axis first, in one all-to-all over each
axis along which a matrix is sharded: after an axis, the parts of a matrix are on ranks with the owner's coordinate there. Along
axes on which a matrix is replicated, only ranks with the owner's coordinate send. Results go the same way back, and along
replicated axes to every rank. So groups of single axes are enough, and a rank sends about as much as it holds. Nothing is sent
along an axis on which one coordinate has all of a matrix: its owner is there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from meshwright_dtensor.comm import group_calls
from meshwright_dtensor.comm.log import CommLog, record
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.sharding.balance import least_loaded
from meshwright_dtensor.sharding.boxes import (
    dense_strides,
    read_region,
    region_of,
    region_shape,
    write_region,
)
from meshwright_dtensor.sharding.intervals import IntervalShard

Tensor = torch.Tensor
Item: TypeAlias = tuple[int, tuple[int, ...]]
"""A part of a matrix: the number of the matrix, and the part's coordinate on each axis that shards it (on others, one for all)."""


def balanced_owners(
    context: MeshContext, layouts: Sequence[Layout], costs: Sequence[float]
) -> tuple[int, ...]:
    """The rank, in mesh order, that computes each matrix: see `least_loaded`.

    A matrix that ranks of one coordinate on an axis have alone (`holders`) is computed there.
    """
    allowed: list[list[int] | None] = []
    for layout in layouts:
        held = holders(layout)
        places = [range(n) if at is None else (at,) for n, at in zip(context.sizes, held, strict=True)]
        ranks = (_number(coords, context.sizes) for coords in itertools.product(*places))
        allowed.append(None if held.count(None) == len(held) else list(ranks))
    return least_loaded(costs, context.mesh.size(), allowed)


def holders(layout: Layout) -> tuple[int | None, ...]:
    """Per mesh axis the one coordinate whose ranks have all elements; None where several have some, or all of them."""
    places: list[int | None] = []
    for state in layout.states:
        ranks = []
        if isinstance(state, IntervalShard):
            ranks = [rank for rank, given in enumerate(state.intervals) if any(length for _, length in given)]
        places.append(ranks[0] if len(ranks) == 1 else None)
    return tuple(places)


@dataclass(frozen=True)
class _Route:
    """One all-to-all along a mesh axis: for each rank of the axis the items that go there, and that come from there."""

    axis: int
    sent: tuple[tuple[Item, ...], ...]
    received: tuple[tuple[Item, ...], ...]


class OwnerExchange:
    """Routes of some matrices on one mesh, each with an owner.

    Args:
        context: of the mesh.
        layouts: of the matrices.
        owners: number of the owner of each matrix among the ranks of the mesh, in mesh order.

    Attributes:
        mine: numbers of the matrices that this rank owns.
    """

    def __init__(self, context: MeshContext, layouts: Sequence[Layout], owners: Sequence[int]) -> None:
        self.context, self.layouts = context, tuple(layouts)
        self._owners = [_coords(owner, context.sizes) for owner in owners]
        self.mine = tuple(i for i, owner in enumerate(self._owners) if owner == context.coords)
        # per matrix and axis, the coordinate that has all of it, if the owner has that
        self._held = [
            tuple(place if place == at else None for place, at in zip(holders(layout), owner, strict=True))
            for layout, owner in zip(self.layouts, self._owners, strict=True)
        ]
        self._shards = [
            tuple(
                isinstance(state, int) and n > 1 and place is None
                for state, n, place in zip(layout.states, context.sizes, held, strict=True)
            )
            for layout, held in zip(self.layouts, self._held, strict=True)
        ]
        self._here = [
            all(place in (None, at) for place, at in zip(held, context.coords, strict=True))
            for held in self._held
        ]
        axes = [
            axis
            for axis, n in enumerate(context.sizes)
            if n > 1 and any(held[axis] is None for held in self._held)
        ]
        sharded = [axis for axis in reversed(axes) if any(shards[axis] for shards in self._shards)]
        self._to_owners = [self._gather_route(axis) for axis in sharded]
        self._from_owners = [self._scatter_route(axis) for axis in axes]

    def gather(self, parts: Sequence[Tensor], dim_orders: Sequence[tuple[int, ...]]) -> dict[int, Tensor]:
        """This rank's parts of all matrices -> {number: whole matrix} of those that it owns (a collective call).

        Args:
            parts: all of the same dtype; a part that is the whole matrix is returned itself.
            dim_orders: the dims of each whole matrix in memory, outermost first.
        """
        held = {(i, self._own_item(i)): part.reshape(-1) for i, part in enumerate(parts) if self._here[i]}
        like = parts[0].reshape(-1)
        for route in self._to_owners:
            self._exchange(route, held, like)
        wholes: dict[int, Tensor] = {}
        for i in self.mine:
            layout = self.layouts[i]
            if not any(self._shards[i]):
                wholes[i] = parts[i]
                continue
            whole = like.new_empty_strided(layout.shape, dense_strides(tuple(layout.shape), dim_orders[i]))
            for coords in self._items(i, {}):
                region = self._region(i, coords)
                write_region(whole, region, held.pop((i, coords)).view(region_shape(region)))
            wholes[i] = whole
        return wholes

    def scatter(self, wholes: Mapping[int, Tensor], like: Tensor) -> list[Tensor]:
        """{number: matrix} of those that this rank owns -> this rank's parts of all matrices, contiguous (a collective call).

        `like` has the dtype and device of the matrices: a rank may own none.
        """
        held = {
            (i, coords): read_region(whole, self._region(i, coords)).reshape(-1)
            for i, whole in wholes.items()
            for coords in self._items(i, {})
        }
        for route in self._from_owners:
            self._exchange(route, held, like)
        return [
            (held[i, self._own_item(i)] if self._here[i] else like.new_empty(0)).view(layout.local_shape)
            for i, layout in enumerate(self.layouts)
        ]

    def _exchange(self, route: _Route, held: dict[Item, Tensor], like: Tensor) -> None:
        """One all-to-all; what arrives is added to `held`."""
        axis, group = self.context.axes[route.axis], self.context.group(route.axis)
        pieces = [held[item] for items in route.sent for item in items]
        sent = [sum(map(self._numel, items)) for items in route.sent]
        counts = [sum(map(self._numel, items)) for items in route.received]
        row = torch.cat(pieces) if pieces else like.new_empty(0)
        self.context.calls.follow(f"all_to_all over {axis}, matrices of an optimizer")
        if CommLog.listening():
            nbytes = sum(counts) * row.element_size()
            record("all_to_all", axis, nbytes, "optimizer", "", "step", "matrices to and from their owners")
        arrived = group_calls.all_to_all(row, counts, sent, group)
        items = list(itertools.chain.from_iterable(route.received))
        held.update(zip(items, arrived.split([self._numel(item) for item in items]), strict=True))

    def _gather_route(self, axis: int) -> _Route:
        me, n = self.context.coords, self.context.sizes[axis]
        sent: list[list[Item]] = [[] for _ in range(n)]
        received: list[list[Item]] = [[] for _ in range(n)]
        for i, owner in enumerate(self._owners):
            # other ranks have copies, or parts that go another way
            here = all(me[a] == owner[a] for a in range(len(me)) if a > axis or not self._shards[i][a])
            if not here or not self._shards[i][axis]:
                continue
            if me[axis] != owner[axis]:
                sent[owner[axis]] += self._named(i, {a: me[a] for a in range(axis + 1)})
                continue
            for k in range(n):
                if k != me[axis]:
                    received[k] += self._named(i, {**{a: me[a] for a in range(axis)}, axis: k})
        return _Route(axis, tuple(map(tuple, sent)), tuple(map(tuple, received)))

    def _scatter_route(self, axis: int) -> _Route:
        me, n = self.context.coords, self.context.sizes[axis]
        sent: list[list[Item]] = [[] for _ in range(n)]
        received: list[list[Item]] = [[] for _ in range(n)]
        for i, owner in enumerate(self._owners):
            held = self._held[i]
            apart = any(me[a] != owner[a] for a in range(len(me)) if a > axis or held[a] is not None)
            if apart or held[axis] is not None:
                continue
            outer = {a: me[a] for a in range(axis)}
            if me[axis] != owner[axis]:
                received[owner[axis]] += self._named(i, {**outer, axis: me[axis]})
                continue
            for k in range(n):
                if k != me[axis]:
                    sent[k] += self._named(i, {**outer, axis: k})
        return _Route(axis, tuple(map(tuple, sent)), tuple(map(tuple, received)))

    def _named(self, i: int, given: Mapping[int, int]) -> Iterator[Item]:
        return ((i, coords) for coords in self._items(i, given))

    def _items(self, i: int, given: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
        """The parts of a matrix, of those with these coordinates on the axes that are given and shard it."""
        sizes = self.context.sizes
        return itertools.product(
            *(
                ((given[axis],) if axis in given else range(sizes[axis])) if shards else (place or 0,)
                for axis, (shards, place) in enumerate(zip(self._shards[i], self._held[i], strict=True))
            )
        )

    def _own_item(self, i: int) -> tuple[int, ...]:
        return next(self._items(i, dict(enumerate(self.context.coords))))

    def _region(self, i: int, coords: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
        return region_of(tuple(self.layouts[i].shape), self.context.sizes, coords, self.layouts[i].states)

    def _numel(self, item: Item) -> int:
        return math.prod(region_shape(self._region(*item)))


def _number(coords: Sequence[int], sizes: Sequence[int]) -> int:
    """The number of a rank in mesh order."""
    number = 0
    for place, n in zip(coords, sizes, strict=True):
        number = number * n + place
    return number


def _coords(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The coordinates of a rank that is numbered in mesh order."""
    coords = []
    for n in reversed(sizes):
        rank, place = divmod(rank, n)
        coords.append(place)
    return tuple(reversed(coords))
