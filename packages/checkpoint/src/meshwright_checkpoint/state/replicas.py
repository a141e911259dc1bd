"""Compares the copies of values that several ranks hold: parameters, gradients, buffers and optimizer states, bit for bit.

Copies begin to differ where memory or a link flips a bit, or where ranks compute the same value by operations that are not
deterministic. Nothing shows it: each rank goes on with its own.

Each rank sends a checksum of each part that it holds to the rank that the name and place of the part choose, which compares those
of all ranks. So a rank sends and receives as many checksums as it holds parts, on any number of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from meshwright_checkpoint._torch import unwrapped
from meshwright_checkpoint.errors import ReplicaError
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.shards.local_shards import box_text, local_shards
from meshwright_checkpoint.state.collect import check_call, named_tensors, parameter_names
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import extremes
from meshwright_dtensor.stages.optimizers import own_state
from meshwright_dtensor.utils.checksum import checksum

Tensor = torch.Tensor

MOST_TOLD = 8
"""Parts that an error names."""


@dataclass(frozen=True)
class Part:
    """What this rank holds of one value.

    what: for people, such as "gradient of 'head.weight'".
    boxes: its boxes in the global value, as text.
    local: the local tensor; shares memory.
    """

    what: str
    boxes: str
    local: Tensor

    @property
    def key(self) -> int:
        """A number of 62 bits: equal for the same part on other ranks."""
        digest = blake2b(f"{self.what} {self.boxes}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2


def check_replicas(model: nn.Module, optimizer: Optimizer | None = None) -> None:
    """Compare what several ranks hold of the same values (a collective call).

    Compared are parameters, their gradients, buffers and, with `optimizer`, its states. It takes one pass over the memory of each
    rank.

    Raises:
        ReplicaError: copies differ; on every rank, with the first value that differs and the ranks.
        UsageError: `model` is no module, or the optimizer holds a parameter of another model.
    """
    check_call("check_replicas", model)
    ranks = Ranks()
    if ranks.size == 1:
        return
    with own_state(unwrapped(model), optimizer):
        parts = [part for part in _parts(unwrapped(model), optimizer) if part.local.numel()]
        sums = [checksum(part.local) for part in parts]
    differing = _exchange(parts, sums, ranks)
    if extremes([len(differing)], ranks.group)[0][1]:
        raise ReplicaError(_told(parts, differing, ranks))


class ReplicaWatch:
    """Calls `check_replicas` before every `interval`-th step of an optimizer. Made by `watch_replicas`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, interval: int) -> None:
        self.model, self.interval, self.steps = model, interval, 0
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        if self.steps % self.interval == 0:
            check_replicas(self.model, optimizer)

    def remove(self) -> None:
        """Check no more."""
        self._handle.remove()


def watch_replicas(model: nn.Module, optimizer: Optimizer, interval: int = 100) -> ReplicaWatch:
    """Compare the copies of parameters, gradients, buffers and optimizer states before every `interval`-th step.

    A bit that flips on one rank raises ReplicaError on all of them at most `interval` steps later. Returns the watch; its `remove`
    ends it. Every rank has to call it.

    Raises UsageError: `interval` is not a positive number of steps.
    """
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 1:
        raise UsageError(f"interval is {interval!r}; give a number of steps from 1 on, such as 100")
    check_call("watch_replicas", model)
    return ReplicaWatch(model, optimizer, interval)


def _parts(model: nn.Module, optimizer: Optimizer | None) -> Iterator[Part]:
    """What this rank holds, in the order of the state dict."""
    names = named_tensors(model)
    for name, tensor in names.tensors.items():
        yield _part("parameter" if isinstance(tensor, nn.Parameter) else "buffer", name, tensor)
        if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
            yield _part("gradient of", name, tensor.grad, tensor)
    if optimizer is None:
        return
    groups = parameter_names(optimizer, names)
    for name, parameter in zip(
        itertools.chain(*groups),
        (p for group in optimizer.param_groups for p in group["params"]),
        strict=True,
    ):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield _part(f"optimizer state {key!r} of", name, value, parameter)


def _part(kind: str, name: str, tensor: Tensor, parameter: Tensor | None = None) -> Part:
    what = f"{kind} {name!r}"
    held = local_shards(tensor, what, parameter)
    return Part(what, " ".join(box_text(there) for there, _ in held.boxes), held.local)


def _exchange(parts: Sequence[Part], sums: Sequence[int], ranks: Ranks) -> dict[int, dict[int, list[int]]]:
    """Key of each part that this rank compares, and that differs -> checksum -> the ranks that hold it."""
    sent: list[list[tuple[int, int]]] = [[] for _ in range(ranks.size)]
    for part, total in zip(parts, sums, strict=True):
        sent[part.key % ranks.size].append((part.key, total))
    device = ranks.device
    counts = torch.tensor([len(pairs) for pairs in sent], device=device)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=ranks.group)
    numbers = arriving.tolist()
    values = torch.tensor([*itertools.chain(*sent)], dtype=torch.int64, device=device).view(-1, 2)
    received = values.new_empty(sum(numbers), 2)
    dist.all_to_all_single(received, values, numbers, [len(pairs) for pairs in sent], group=ranks.group)
    holders: dict[int, dict[int, list[int]]] = {}
    senders = itertools.chain(*([rank] * number for rank, number in enumerate(numbers)))
    for rank, (key, total) in zip(senders, received.tolist(), strict=True):
        holders.setdefault(key, {}).setdefault(total, []).append(rank)
    return {key: by_sum for key, by_sum in holders.items() if len(by_sum) > 1}


def _told(parts: Sequence[Part], differing: dict[int, dict[int, list[int]]], ranks: Ranks) -> str:
    """The error, the same on every rank (a collective call)."""
    holders = {key: list(by_sum.values()) for key, by_sum in list(differing.items())[: 100 * MOST_TOLD]}
    all_holders = {int(key): held for of_rank in ranks.gather(holders) for key, held in of_rank.items()}
    mine = {part.key: [order, part.what, part.boxes] for order, part in enumerate(parts)}
    named = ranks.gather({key: mine[key] for key in all_holders if key in mine})
    names = {int(key): tuple(name) for of_rank in named for key, name in of_rank.items()}
    first, *others = sorted(all_holders, key=names.__getitem__)
    _, what, boxes = names[first]
    rest = [names[key][1] for key in others[: MOST_TOLD - 1]]
    more = f" So does {', '.join(rest)}" if rest else ""
    more += f" and {len(others) - len(rest)} more" if len(others) > len(rest) else ""
    place = f" at {boxes}" if boxes.strip("[] ") else ""
    return (
        f"{what}{place} differs between ranks that hold copies of it: {_who(all_holders[first])}.{more and more + '.'} "
        "Memory or a link has changed a bit, code has changed one rank's copy, or an operation is not deterministic "
        "(torch.use_deterministic_algorithms). Go back to a checkpoint: mw.load(mw.latest(...), ...). If it is the same rank "
        "again, look at its device"
    )


def _who(held: Sequence[Sequence[int]]) -> str:
    """Which ranks differ from which: where more than half of them agree, those are taken to be right."""
    *few, most = sorted(held, key=len)
    if len(most) <= sum(map(len, few)):
        # no majority says which ones are right
        return " and ".join(map(_ranks, sorted(map(list, held)))) + " have different ones"
    odd = sorted(itertools.chain(*few))
    return f"{_ranks(odd)} from {_ranks(most)}"


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_TOLD])) + (", ..." if len(ranks) > MOST_TOLD else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
