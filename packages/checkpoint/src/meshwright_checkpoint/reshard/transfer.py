"""Bring boxes of tensors from the ranks that hold them to the ranks that want them, in memory.

Every rank tells what it holds and wants; who sends what to whom follows, on every rank alike.  What a rank has already is
copied and not sent; of several ranks that hold a box the one that has least to send gives it.  Tensors go one after the
other, in rounds of one all-to-all each, and what was held of a tensor is freed as soon as all of it has arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from meshwright_checkpoint._torch import free_memory, storage_id
from meshwright_checkpoint.errors import MismatchError
from meshwright_checkpoint.format.dtypes import DTYPES, dtype_name
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.shards.coverage import coverage_problem
from meshwright_checkpoint.shards.local_shards import LocalShards, box_nbytes, local_box
from meshwright_checkpoint.shards.write_shares import split_box
from meshwright_dtensor.sharding.boxes import Box, box_numel, box_shape, intersect, slice_of

ROUND_NBYTES = 48 << 20
"""Bytes that a rank sends, receives or takes new memory for in one round, unless one tensor alone is larger."""
ALIGN = 16


@dataclass(frozen=True)
class Route:
    """A box of tensor `key` that goes from one rank to another, or stays."""

    key: str
    box: Box
    dtype: torch.dtype
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """Its size in a message."""
        return -(-box_nbytes(self.box, self.dtype) // ALIGN) * ALIGN


@dataclass
class Round:
    """Routes that are taken together. `done`: tensors of which these are the last."""

    routes: list[Route] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TransferStats:
    """What this rank has sent to others, in bytes, and in how many rounds."""

    sent: int
    plan_rounds: int


def describe_shards(held: Mapping[str, LocalShards]) -> dict[str, Any]:
    """What a rank tells the others of the tensors that it holds or wants; JSON."""
    return {
        key: [list(part.shape), dtype_name(part.dtype, key), [there for there, _ in part.boxes]]
        for key, part in held.items()
    }


def transfer(
    have: dict[str, LocalShards],
    want: Mapping[str, LocalShards],
    free: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ranks: Ranks | None = None,
) -> TransferStats:
    """Fill `want` on every rank from what all ranks `have` (a collective call).

    Args:
        have: key -> this rank's part; equal keys are parts of one tensor.
        want: key -> where this rank's new part goes. Memory of size zero is given its size when its turn comes.
        free: tensors whose memory is given up once they have been moved, by their keys in `have`, which lose them then.
        ranks: who takes part; by default all.

    Extra memory: at most three times `ROUND_NBYTES`, and one tensor's new part.

    Raises:
        MismatchError: a wanted tensor is not there, or has another shape. Nothing has been moved then.
    """
    ranks = ranks or Ranks()
    return run_rounds(plan_rounds(have, want, ranks), have, want, free, ranks)


def plan_rounds(
    have: Mapping[str, LocalShards], want: Mapping[str, LocalShards], ranks: Ranks
) -> list[Round]:
    """What `transfer` does, on every rank alike; nothing is moved yet (a collective call). Raises what `transfer` raises."""
    gathered = ranks.gather(ranks.run_checked(lambda: [describe_shards(have), describe_shards(want)]))
    return list(_rounds(_routes(gathered), [_sizes(wanted) for _, wanted in gathered]))


def run_rounds(
    plan: list[Round],
    have: dict[str, LocalShards],
    want: Mapping[str, LocalShards],
    free: Mapping[str, torch.Tensor],
    ranks: Ranks,
) -> TransferStats:
    """Move what `plan_rounds` has found (a collective call); the rest is as in `transfer`."""
    users: dict[int, int] = defaultdict(int)
    for key in free:
        if key in have:
            users[storage_id(have[key].local)] += 1
    messages = _Messages(plan, ranks)
    sent = 0
    with torch.no_grad():
        for transfer_round in plan:
            sent += _take(transfer_round, have, want, ranks, messages)
            for key in transfer_round.done:
                if key in free and key in have:
                    storage = storage_id(have.pop(key).local)
                    users[storage] -= 1
                    if not users[storage]:
                        free_memory(free[key])
    return TransferStats(sent, len(plan))


def _routes(told: list[Any]) -> dict[str, list[Route]]:
    """Key -> routes, on every rank alike."""
    holders: dict[str, dict[Box, list[int]]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    wrong: dict[str, str] = {}
    for rank, (held, _) in enumerate(told):
        for key, (shape, dtype, boxes) in held.items():
            known = kinds.setdefault(key, (tuple(shape), dtype))
            if known != (tuple(shape), dtype):
                wrong[key] = f"{key}: ranks hold {list(known[0])} {known[1]} and {shape} {dtype}"
            for box in boxes:
                holders.setdefault(key, {}).setdefault(_box(box), []).append(rank)
    missing = {}
    for _, wanted in told:
        for key, (shape, _, _) in wanted.items():
            if key not in kinds:
                missing[key] = key
            elif kinds[key][0] != tuple(shape):
                wrong[key] = f"{key}: shape {list(kinds[key][0])} is held, {shape} is needed"
    for key, parts in holders.items():
        problem = coverage_problem(kinds[key][0], list(parts))
        if problem:
            wrong[key] = f"{key}: its parts on all ranks {problem}"
    if missing or wrong:
        raise MismatchError("of the running ranks", tuple(missing), (), tuple(wrong.values()))
    sending = [0] * len(told)
    found: dict[str, list[Route]] = {key: [] for key in kinds}
    for key, parts in holders.items():
        dtype = DTYPES[kinds[key][1]]
        for rank, (_, wanted) in enumerate(told):
            for box in wanted[key][2] if key in wanted else ():
                for part, owners in parts.items():
                    common = intersect(part, _box(box))
                    if common is None:
                        continue
                    source = rank if rank in owners else min(owners, key=lambda r: (sending[r], r))
                    for piece in _cut(common, dtype.itemsize):
                        found[key].append(Route(key, piece, dtype, source, rank))
                    if source != rank:
                        sending[source] += box_nbytes(common, dtype)
    return found


def _cut(box: Box, itemsize: int) -> Iterator[Box]:
    """Pieces that fit into a round."""
    while box_numel(box) * itemsize > ROUND_NBYTES:
        head, tail = split_box(box, itemsize, ROUND_NBYTES)
        yield from head
        if not tail:
            return
        for part in tail[:-1]:
            yield from _cut(part, itemsize)
        box = tail[-1]
    yield box


def _sizes(wanted: dict[str, Any]) -> dict[str, int]:
    return {
        key: sum(box_numel(_box(box)) for box in boxes) * DTYPES[dtype].itemsize
        for key, (_, dtype, boxes) in wanted.items()
    }


def _rounds(routes: dict[str, list[Route]], new: list[dict[str, int]]) -> Iterator[Round]:
    """`new`: per rank, the bytes of memory that each tensor takes there."""
    current = Round()
    load: dict[tuple[str, int], int] = defaultdict(int)
    for key, members in routes.items():
        begun: set[int] = set()
        for route in members:
            more = {("take", route.target): 0 if route.target in begun else new[route.target][key]}
            if route.source != route.target:
                more |= {("send", route.source): route.nbytes, ("receive", route.target): route.nbytes}
            if current.routes and any(load[what] + n > ROUND_NBYTES for what, n in more.items()):
                yield current
                current = Round()
                load.clear()
            current.routes.append(route)
            begun.add(route.target)
            for what, n in more.items():
                load[what] += n
        current.done.append(key)
    yield current


class _Messages:
    """Memory for what is sent and received in a round: the same in all of them, since gloo lets go of it late."""

    def __init__(self, plan: list[Round], ranks: Ranks) -> None:
        out = into = 0
        for transfer_round in plan:
            crossing = [route for route in transfer_round.routes if route.source != route.target]
            out = max(out, sum(route.nbytes for route in crossing if route.source == ranks.rank))
            into = max(into, sum(route.nbytes for route in crossing if route.target == ranks.rank))
        self.send = torch.empty(out, dtype=torch.uint8, device=ranks.device)
        self.received = torch.empty(into, dtype=torch.uint8, device=ranks.device)


def _take(
    transfer_round: Round,
    have: Mapping[str, LocalShards],
    want: Mapping[str, LocalShards],
    ranks: Ranks,
    messages: _Messages,
) -> int:
    """One round; the bytes that this rank has sent."""
    me = ranks.rank
    for route in transfer_round.routes:
        if route.target == me:
            allocate(want[route.key].local)
            if route.source == me:
                _part(want[route.key], route.box).copy_(_part(have[route.key], route.box))
    crossing = [route for route in transfer_round.routes if route.source != route.target]
    if not crossing:
        return 0
    out = sorted((r for r in crossing if r.source == me), key=lambda r: r.target)  # stable: else in order
    into = sorted((r for r in crossing if r.target == me), key=lambda r: r.source)
    send = messages.send[: sum(r.nbytes for r in out)]
    received = messages.received[: sum(r.nbytes for r in into)]
    for route, view in _places(out, send):
        view.copy_(_part(have[route.key], route.box))
    dist.all_to_all_single(
        received,
        send,
        output_split_sizes=[sum(r.nbytes for r in into if r.source == rank) for rank in range(ranks.size)],
        input_split_sizes=[sum(r.nbytes for r in out if r.target == rank) for rank in range(ranks.size)],
        group=ranks.group,
    )
    for route, view in _places(into, received):
        _part(want[route.key], route.box).copy_(view)
    return sum(box_nbytes(r.box, r.dtype) for r in out)


def _places(routes: list[Route], message: torch.Tensor) -> Iterator[tuple[Route, torch.Tensor]]:
    at = 0
    for route in routes:
        nbytes = box_nbytes(route.box, route.dtype)
        yield route, message[at : at + nbytes].view(route.dtype).view(box_shape(route.box))
        at += route.nbytes


def _part(held: LocalShards, box: Box) -> torch.Tensor:
    there, here = next(pair for pair in held.boxes if intersect(box, pair[0]) == box)
    return slice_of(held.local, local_box(box, there, here))


def allocate(local: torch.Tensor) -> None:
    """Give a tensor whose storage has size zero the memory that it needs."""
    if local.numel():
        elements = 1 + sum((n - 1) * step for n, step in zip(local.shape, local.stride(), strict=True))
        nbytes = int(local.storage_offset() + elements) * local.element_size()
        if local.untyped_storage().nbytes() < nbytes:
            local.untyped_storage().resize_(nbytes)


def deallocate(local: torch.Tensor) -> None:
    """Take the memory of a tensor away until its turn comes; small ones keep it."""
    if prod(local.shape) * local.element_size() > ALIGN:
        local.untyped_storage().resize_(0)


def _box(box: Any) -> Box:
    return tuple((start, length) for start, length in box)
