"""Which rank computes what, so that all have about as much to do. Imports no torch."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def least_loaded(
    costs: Sequence[float], ranks: int, allowed: Sequence[Sequence[int] | None] | None = None
) -> tuple[int, ...]:
    """The rank of each item: the costliest first, each to the rank with the least so far (of equal ones the first).

    `allowed`: per item the ranks that may have it; None: all of them.

    Source: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: at most 4/3 of the least possible load, where every
    rank may have every item.
    """
    loads = [0.0] * ranks
    heap = [(0.0, rank) for rank in range(ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        among = None if allowed is None else allowed[index]
        if among is None:
            # an entry of a rank that has got more since is out of date
            while heap[0][0] != loads[heap[0][1]]:
                heapq.heapreplace(heap, (loads[heap[0][1]], heap[0][1]))
            owner = heap[0][1]
        else:
            owner = min(among, key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += costs[index]
    return tuple(owners)


def orthogonalization_cost(shape: Sequence[int]) -> float:
    """Of a Newton-Schulz iteration for a matrix, in products of two numbers, but for a constant factor.

    The Gram matrix is of the shorter side.
    """
    m, n = shape
    return float(m * n * min(m, n))


def preconditioning_cost(shape: Sequence[int]) -> float:
    """The same of products with a preconditioner of each dim (Shampoo, SOAP): as many as elements times that dim."""
    elements = 1
    for n in shape:
        elements *= n
    return float(elements * max(1, sum(shape)))
