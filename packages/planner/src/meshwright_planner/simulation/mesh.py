"""Coordinates of ranks on the mesh, and which replicas a simulation treats separately."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from operator import mul
from typing import TypeAlias

Place: TypeAlias = tuple[int, ...]
"""Coordinates on the loose axes."""


@dataclass(frozen=True)
class Mesh:
    """Ranks in row-major order of the axes, outermost first.

    Ranks that differ only on tight axes communicate in every block and are synchronous. Replicas, which differ on loose axes,
    communicate in collectives that are simulated one by one. Along "pp" ranks hold different stages.

    Args:
        degrees: axis -> degree, outermost first.
        loose: names of the loose axes.
    """

    degrees: Mapping[str, int]
    loose: tuple[str, ...] = ()

    @cached_property
    def strides(self) -> dict[str, int]:
        """Axis -> difference of adjacent ranks on it."""
        axes = list(self.degrees)[::-1]
        return dict(zip(axes, accumulate((self.degrees[axis] for axis in axes), mul, initial=1)))

    def coordinate(self, rank: int, axis: str) -> int:
        """Coordinate of a rank on an axis; 0 where the mesh has no such axis."""
        return rank // self.strides.get(axis, 1) % self.degrees.get(axis, 1)

    def place(self, rank: int) -> Place:
        """Coordinates of a rank on the loose axes."""
        return tuple(self.coordinate(rank, axis) for axis in self.loose)

    def ranks(self, place: Place, stage_rank: int) -> Iterator[int]:
        """The synchronous ranks of a replica and stage, ascending."""
        first = sum(c * self.strides[a] for c, a in zip(place, self.loose, strict=True))
        first += stage_rank * self.strides.get("pp", 0)
        tight = [axis for axis in self.degrees if axis not in self.loose and axis != "pp"]
        ranges = (range(0, self.degrees[axis] * self.strides[axis], self.strides[axis]) for axis in tight)
        for steps in product(*ranges):
            yield first + sum(steps)

    def spans(self, axes: Collection[str]) -> tuple[tuple[int, int], ...]:
        """Stride and degree of each of some axes, outermost first."""
        return tuple((self.strides[a], self.degrees[a]) for a in self.degrees if a in axes)


@dataclass(frozen=True)
class Replicas:
    """Equivalence classes of the places on the loose axes.

    Two places are equivalent when they share the same coordinates with every place that has a fault: along each axis they
    then communicate with the same classes.

    Args:
        mesh: the mesh of all ranks.
        representatives: representative -> number of places in its class.
        of: place -> its representative.
    """

    mesh: Mesh
    representatives: Mapping[Place, int]
    of: Mapping[Place, Place]

    @staticmethod
    def by_faults(mesh: Mesh, faulty: Collection[Place]) -> Replicas:
        """The classes, when these places have faults."""
        representatives: dict[tuple[tuple[bool, ...], ...], Place] = {}
        of: dict[Place, Place] = {}
        for place in product(*(range(mesh.degrees[axis]) for axis in mesh.loose)):
            key = tuple(tuple(a == b for a, b in zip(place, other)) for other in faulty)
            of[place] = representatives.setdefault(key, place)
        return Replicas(mesh, Counter(of.values()), of)

    def members(self, place: Place, axes: Collection[str]) -> frozenset[Place]:
        """The classes of the members of `place`'s collective over some axes."""
        coordinates = zip(self.mesh.loose, place, strict=True)
        ranges = (range(self.mesh.degrees[a]) if a in axes else (c,) for a, c in coordinates)
        return frozenset(self.of[p] for p in product(*ranges))
