"""Which inputs of which operations receive a gradient.

An input receives a gradient when it required one while the operation ran: not under `torch.no_grad()`, not if it was detached,
not if it is a frozen parameter.  The body of a torch.autograd.Function runs with gradients disabled, but its inputs receive one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import or_

import torch

from meshwright_dtensor.trace.graph import Node
from meshwright_planner import _torch
from meshwright_planner._torch import COMPUTED, LEAF
from meshwright_planner.trace.user_checkpoints import Checkpoint, Place


@dataclass(slots=True, eq=False)
class Note:
    """How a node was run.

    Args:
        enabled: with gradients enabled.
        requires: per tensor input, whether it required a gradient, as in `_torch.gradient_kinds`.
        place: the checkpoints that it ran in.
        like: the note of the node that this one is a copy of.
        function: per tensor input, whether it receives a gradient from the autograd.Function that the node is a part of.
    """

    enabled: bool
    requires: tuple[int, ...]
    place: Place = ()
    like: Note | None = None
    function: tuple[bool, ...] = ()

    @property
    def wanted(self) -> tuple[bool, ...]:
        """Per tensor input, whether it receives a gradient when the node does."""
        if self.enabled:
            return tuple(map(bool, self.requires))
        return self.function if self.like is None else self.like.wanted


def find_function_gradients(
    nodes: Sequence[Node], notes: Sequence[Note], tensor: Callable[[int], torch.Tensor | None]
) -> None:
    """Find the calls of autograd.Functions among the nodes, and note which inputs receive a gradient.

    `tensor`: value -> the tensor; None when the value belongs to a copied block.
    """
    maker = {ref.i: k for k, node in enumerate(nodes) if not notes[k].enabled for ref in node.outs}

    def between(k: int) -> Iterator[tuple[int, int | None, int]]:
        """Per input of a node: its value, the node of the call that may have made it, and its gradient kind."""
        for ref, kind in zip(nodes[k].ins, notes[k].requires, strict=True):
            # with gradients disabled, a view of a tensor that requires one looks like a leaf
            yield ref.i, None if kind == COMPUTED else maker.get(ref.i), kind

    def note_call(function: object, last: int) -> None:
        """Note the inputs of the nodes of one call; `last`: the node of its result."""
        inside, pending = {last}, [last]
        while pending:
            new = {node for _, node, _ in between(pending.pop()) if node is not None} - inside
            inside |= new
            pending += new
        reached: set[int] = set()
        for k in sorted(inside):
            receives = []
            for value, before, requirement in between(k):
                if before is not None or not requirement:
                    receives.append(value in reached)
                else:
                    given = tensor(value)
                    receives.append(given is None or _torch.receives_gradient(function, given))
            earlier = notes[k].function or (False,) * len(receives)
            notes[k].function = tuple(map(or_, earlier, receives))
            if any(receives):
                reached.update(ref.i for ref in nodes[k].outs)

    for value, last in maker.items():
        made = None if notes[last].like is not None else tensor(value)
        function = None if made is None or not made.requires_grad else _torch.function_of(made)
        if function is not None:
            note_call(function, last)


def flows(
    nodes: Sequence[Node], notes: Sequence[Note], starts: Iterable[int], values: int, roots: Mapping[int, int]
) -> tuple[list[bool], list[tuple[bool, ...]], set[Checkpoint]]:
    """Whether each value, and each input per node, gets a gradient from `starts`; and the checkpoints of the backward pass.

    `starts`: the values among the results that require one.
    `values`: how many there are; `roots`: value -> the first value of its storage, if that is another.
    """
    maker = {ref.i: note for node, note in zip(nodes, notes, strict=True) for ref in node.outs}
    grad = [False] * values
    # storages that receive a gradient
    stored: set[int] = set()

    def comes_to(value: int) -> None:
        grad[value] = True
        stored.add(roots.get(value, value))

    for start in starts:
        comes_to(start)
    inputs: list[tuple[bool, ...]] = [()] * len(nodes)
    reached: set[Checkpoint] = set()
    for k in range(len(nodes) - 1, -1, -1):
        node, note = nodes[k], notes[k]
        nothing = (False,) * len(node.ins)
        back = any(grad[ref.i] for ref in node.outs)
        # a write to a part of a storage
        if not back and node.mutates:
            back = any(roots.get(ref.i, ref.i) in stored for ref in node.outs)
        inputs[k] = (note.wanted or nothing) if back else nothing
        if any(inputs[k]):
            reached.update(spot.checkpoint for spot in note.place)
        for ref, wanted, kind in zip(node.ins, inputs[k], note.requires, strict=True):
            made = maker.get(ref.i)
            # A tensor that was computed, detached, and made to require a gradient again is a leaf, and ends the flow. Inside
            # an autograd.Function views look like leaves.
            ends = kind == LEAF and made is not None and (note.enabled or made.enabled)
            if wanted and not ends:
                comes_to(ref.i)
    return grad, inputs, reached
