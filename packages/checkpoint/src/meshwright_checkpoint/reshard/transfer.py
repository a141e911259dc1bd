"""Transfer boxes of tensors between ranks, in memory.

All ranks gather which boxes each rank has and wants, and compute the same routes. A box that a rank already has is copied
locally. Otherwise the holder with the fewest bytes to send sends it. Tensors are transferred one after the other, in
rounds of one all-to-all each. The old shards of a tensor are freed as soon as all of it has arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from meshwright_checkpoint._torch import free_memory, storage_id
from meshwright_checkpoint.errors import MismatchError
from meshwright_checkpoint.format.safetensors_file import DTYPES
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.shards.local_shards import LocalShards, box_nbytes
from meshwright_checkpoint.shards.write_shares import coverage_problem, split_box
from meshwright_checkpoint.state.collect import describe_shards
from meshwright_dtensor.sharding.boxes import Box, box_numel, box_shape, intersect

ROUND_NBYTES = 48 << 20
"""Most bytes that a rank sends, receives or allocates in one round, unless one tensor alone is larger."""
ALIGN = 16
Shards: TypeAlias = dict[str, LocalShards]
Messages: TypeAlias = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Route:
    """A box of tensor `key` that is sent from one rank to another, or copied on one rank."""

    key: str
    box: Box
    dtype: torch.dtype
    source: int
    target: int

    @property
    def nbytes(self) -> int:
        """Padded size in a message."""
        return -(-box_nbytes(self.box, self.dtype) // ALIGN) * ALIGN


@dataclass
class Round:
    """Routes of one all-to-all. `done`: tensors that are complete afterwards."""

    routes: list[Route] = field(default_factory=list)
    done: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TransferStats:
    """Bytes that this rank sent to others, and the number of rounds."""

    sent: int
    rounds: int


def plan_rounds(have: Shards, want: Shards, ranks: Ranks) -> list[Round]:
    """Plan a transfer that fills `want` on every rank from what all ranks `have` (a collective call).

    Args:
        have: key -> this rank's shards. Equal keys on several ranks are one tensor.
        want: key -> where this rank's new shards go. Storage of size zero is allocated when its turn comes.

    Raises MismatchError: a wanted tensor is missing or has another shape. Nothing was transferred.
    """
    gathered = ranks.gather(ranks.run_checked(lambda: [describe_shards(have), describe_shards(want)]))
    sizes = [
        {
            key: sum(box_numel(_box(box)) for box in boxes) * DTYPES[dtype].itemsize
            for key, (_, dtype, boxes) in wanted.items()
        }
        for _, wanted in gathered
    ]
    return list(_rounds(_routes(gathered), sizes))


def run_rounds(
    plan: list[Round], have: Shards, want: Shards, free: Mapping[str, torch.Tensor], ranks: Ranks
) -> TransferStats:
    """Run the rounds of `plan_rounds` (a collective call).

    `free`: key -> tensor whose memory is freed after its transfer. The key is then removed from `have`.
    Extra memory: at most three times `ROUND_NBYTES`, and the new shard of one tensor.
    """
    users: dict[int, int] = defaultdict(int)
    for key in free:
        if key in have:
            users[storage_id(have[key].local)] += 1
    messages = _message_buffers(plan, ranks)
    sent = 0
    with torch.no_grad():
        for transfer_round in plan:
            sent += _run_round(transfer_round, have, want, ranks, messages)
            for key in transfer_round.done:
                if key in free and key in have:
                    storage = storage_id(have.pop(key).local)
                    users[storage] -= 1
                    if not users[storage]:
                        free_memory(free[key])
    return TransferStats(sent, len(plan))


def _routes(gathered: list[Any]) -> dict[str, list[Route]]:
    """Key -> routes; the same on every rank. Raises MismatchError."""
    types, holders = _checked_holders(gathered)
    sending = [0] * len(gathered)
    routes: dict[str, list[Route]] = {key: [] for key in types}
    for key, parts in holders.items():
        dtype = DTYPES[types[key][1]]
        for rank, (_, wanted) in enumerate(gathered):
            for box in wanted[key][2] if key in wanted else ():
                for part, owners in parts.items():
                    common = intersect(part, _box(box))
                    if common is None:
                        continue
                    source = rank if rank in owners else min(owners, key=lambda r: (sending[r], r))
                    pieces = _cut(common, dtype.itemsize)
                    routes[key] += [Route(key, piece, dtype, source, rank) for piece in pieces]
                    if source != rank:
                        sending[source] += box_nbytes(common, dtype)
    return routes


def _checked_holders(
    gathered: list[Any],
) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict[str, dict[Box, list[int]]]]:
    """Key -> (shape, dtype name), and key -> box -> ranks that hold it.

    Raises MismatchError if a wanted tensor is missing, or if shapes, dtypes or boxes do not fit together.
    """
    types: dict[str, tuple[tuple[int, ...], str]] = {}
    holders: dict[str, dict[Box, list[int]]] = {}
    wrong: dict[str, str] = {}
    for rank, (have, _) in enumerate(gathered):
        for key, (shape, dtype, boxes) in have.items():
            first = types.setdefault(key, (tuple(shape), dtype))
            if first != (tuple(shape), dtype):
                wrong[key] = f"{key}: ranks hold {list(first[0])} {first[1]} and {shape} {dtype}"
            for box in boxes:
                holders.setdefault(key, {}).setdefault(_box(box), []).append(rank)
    missing: dict[str, None] = {}
    for _, wanted in gathered:
        for key, (shape, _, _) in wanted.items():
            if key not in types:
                missing[key] = None
            elif types[key][0] != tuple(shape):
                wrong[key] = f"{key}: shape {list(types[key][0])} is held, {shape} is needed"
    for key, parts in holders.items():
        problem = coverage_problem(types[key][0], list(parts))
        if problem:
            wrong[key] = f"{key}: its parts on all ranks {problem}"
    if missing or wrong:
        raise MismatchError("of the running ranks", tuple(missing), (), tuple(wrong.values()))
    return types, holders


def _cut(box: Box, itemsize: int) -> Iterator[Box]:
    """Cut a box into pieces that fit in a round."""
    while box_numel(box) * itemsize > ROUND_NBYTES:
        head, tail = split_box(box, itemsize, ROUND_NBYTES)
        yield from head
        if not tail:
            return
        for part in tail[:-1]:
            yield from _cut(part, itemsize)
        box = tail[-1]
    yield box


def _rounds(routes: dict[str, list[Route]], new: list[dict[str, int]]) -> Iterator[Round]:
    """Group routes into rounds. `new`: per rank, the bytes that each tensor needs there."""
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


def _message_buffers(plan: list[Round], ranks: Ranks) -> Messages:
    """Send and receive buffers. All rounds share them, because gloo releases them late."""
    out = into = 0
    for transfer_round in plan:
        crossing = [route for route in transfer_round.routes if route.source != route.target]
        out = max(out, sum(route.nbytes for route in crossing if route.source == ranks.rank))
        into = max(into, sum(route.nbytes for route in crossing if route.target == ranks.rank))
    send, received = (torch.empty(size, dtype=torch.uint8, device=ranks.device) for size in (out, into))
    return send, received


def _run_round(transfer_round: Round, have: Shards, want: Shards, ranks: Ranks, messages: Messages) -> int:
    """Run one round; the number of bytes that this rank sent."""
    me = ranks.rank
    for route in transfer_round.routes:
        if route.target == me:
            allocate(want[route.key].local)
            if route.source == me:
                want[route.key].view(route.box).copy_(have[route.key].view(route.box))
    crossing = [route for route in transfer_round.routes if route.source != route.target]
    if not crossing:
        return 0
    # the sort is stable
    out = sorted((r for r in crossing if r.source == me), key=lambda r: r.target)
    into = sorted((r for r in crossing if r.target == me), key=lambda r: r.source)
    send = messages[0][: sum(r.nbytes for r in out)]
    received = messages[1][: sum(r.nbytes for r in into)]
    for route, view in _message_views(out, send):
        view.copy_(have[route.key].view(route.box))
    sizes_in = [sum(r.nbytes for r in into if r.source == rank) for rank in range(ranks.size)]
    sizes_out = [sum(r.nbytes for r in out if r.target == rank) for rank in range(ranks.size)]
    dist.all_to_all_single(received, send, sizes_in, sizes_out, group=ranks.group)
    for route, view in _message_views(into, received):
        want[route.key].view(route.box).copy_(view)
    return sum(box_nbytes(r.box, r.dtype) for r in out)


def _message_views(routes: list[Route], message: torch.Tensor) -> Iterator[tuple[Route, torch.Tensor]]:
    at = 0
    for route in routes:
        nbytes = box_nbytes(route.box, route.dtype)
        yield route, message[at : at + nbytes].view(route.dtype).view(box_shape(route.box))
        at += route.nbytes


def allocate(local: torch.Tensor) -> None:
    """Allocate the storage of a tensor that `deallocate` has emptied."""
    if local.numel():
        elements = 1 + sum((n - 1) * step for n, step in zip(local.shape, local.stride(), strict=True))
        nbytes = int(local.storage_offset() + elements) * local.element_size()
        if local.untyped_storage().nbytes() < nbytes:
            local.untyped_storage().resize_(nbytes)


def deallocate(local: torch.Tensor) -> None:
    """Free the storage of a tensor until `allocate`; small tensors keep it."""
    if prod(local.shape) * local.element_size() > ALIGN:
        local.untyped_storage().resize_(0)


def _box(box: Any) -> Box:
    return tuple((start, length) for start, length in box)
