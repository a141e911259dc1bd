"""Where gradients flow: what every tensor asked for when it was used, and what the results ask of that.

An operation hands a gradient to an input where that required one when it ran: neither under `torch.no_grad()`, nor a detached
tensor, nor a frozen parameter.  A call of a torch.autograd.Function runs without gradients, and has one all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from meshwright_dtensor.trace.graph import Node
from meshwright_planner import _torch
from meshwright_planner._torch import COMPUTED, LEAF
from meshwright_planner.trace.user_checkpoints import Checkpoint, Place


@dataclass(slots=True, eq=False)
class Note:
    """How a node was run.

    Args:
        enabled: with gradients on.
        asked: per tensor input, what it asked for, as in `_torch.asked`.
        place: the checkpoints that it ran in.
        like: the note of the node that this one is a copy of.
        function: per tensor input, whether the Function that the node is a part of hands it a gradient.
    """

    enabled: bool
    asked: tuple[int, ...]
    place: Place = ()
    like: Note | None = None
    function: tuple[bool, ...] = field(default=())

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Per tensor input, whether it gets a gradient where one comes back to the node."""
        if self.enabled:
            return tuple(map(bool, self.asked))
        return self.function if self.like is None else self.like.wanted


def functions(
    nodes: Sequence[Node], notes: Sequence[Note], tensor: Callable[[int], torch.Tensor | None]
) -> None:
    """Find the calls of Functions among the nodes, and note whom they hand gradients to.

    `tensor`: value -> what it was, None where only its copy was seen.
    """
    maker = {ref.i: k for k, node in enumerate(nodes) if not notes[k].enabled for ref in node.outs}
    for value, last in maker.items():
        made = None if notes[last].like is not None else tensor(value)
        function = None if made is None or not made.requires_grad else _torch.function_of(made)
        if function is not None:
            _function(nodes, notes, tensor, maker, last, function)


def _function(
    nodes: Sequence[Node],
    notes: Sequence[Note],
    tensor: Callable[[int], torch.Tensor | None],
    maker: Mapping[int, int],
    last: int,
    function: object,
) -> None:
    """Note whom the nodes of one call of a Function hand gradients to; `last`: what made its result."""

    def between(k: int) -> Iterator[tuple[int, int | None, int]]:
        """Per input of a node: its value, what made it where that may be in the call, and what it asked for."""
        for ref, asked in zip(nodes[k].ins, notes[k].asked, strict=True):
            before = maker.get(ref.i)
            # without gradients, a view of what requires one still says so, and seems to be where that ends
            yield ref.i, None if asked == COMPUTED else before, asked

    inside, ahead = {last}, [last]
    while ahead:
        for _, before, _ in between(ahead.pop()):
            if before is not None and before not in inside:
                inside.add(before)
                ahead.append(before)
    reached: set[int] = set()
    for k in sorted(inside):
        found = []
        for value, before, asked in between(k):
            if before is not None or not asked:
                found.append(value in reached)
            else:
                given = tensor(value)
                found.append(given is None or _torch.takes(function, given))
        known = notes[k].function or (False,) * len(found)
        notes[k].function = tuple(a or b for a, b in zip(known, found, strict=True))
        if any(found):
            reached.update(ref.i for ref in nodes[k].outs)


def _ends(note: Note, maker: Note | None) -> bool:
    """Whether gradients end in a leaf that a node takes: it was computed, detached, and made to require one again.

    Inside of a Function, views seem to be leaves.
    """
    return maker is not None and (note.enabled or maker.enabled)


@dataclass(frozen=True)
class Flows:
    """Where gradients flow on a tape.

    Args:
        values: per value, whether a gradient comes to it.
        inputs: per node and tensor input, whether the node hands a gradient to it.
        reached: the checkpoints that a gradient goes back through.
    """

    values: list[bool]
    inputs: list[tuple[bool, ...]]
    reached: frozenset[Checkpoint]


def flows(
    nodes: Sequence[Node],
    notes: Sequence[Note],
    results: Iterable[int],
    values: int,
    roots: Mapping[int, int],
) -> Flows:
    """Those from `results`, the values among the results that require a gradient.

    Args:
        values: how many there are.
        roots: value -> the first value of its storage, where that is another one.
    """
    maker = {ref.i: note for node, note in zip(nodes, notes, strict=True) for ref in node.outs}
    grad = [False] * values
    stored: set[int] = set()  # storages that a gradient comes to

    def comes_to(value: int) -> None:
        grad[value] = True
        stored.add(roots.get(value, value))

    for result in results:
        comes_to(result)
    inputs: list[tuple[bool, ...]] = [()] * len(nodes)
    reached: set[Checkpoint] = set()
    for k in range(len(nodes) - 1, -1, -1):
        node, note = nodes[k], notes[k]
        nothing = (False,) * len(node.ins)
        back = any(grad[ref.i] for ref in node.outs)
        if not back and node.mutates:  # a part of something
            back = any(roots.get(ref.i, ref.i) in stored for ref in node.outs)
        inputs[k] = (note.wanted or nothing) if back else nothing
        if any(inputs[k]):
            reached.update(spot.here for spot in note.place)
        for ref, wanted, asked in zip(node.ins, inputs[k], note.asked, strict=True):
            if wanted and not (asked == LEAF and _ends(note, maker.get(ref.i))):
                comes_to(ref.i)
    return Flows(grad, inputs, frozenset(reached))
