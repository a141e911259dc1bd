"""The user's own activation checkpoints (`torch.utils.checkpoint`): which nodes run in one, and which are recomputed.

A non-reentrant checkpoint is recognized by its saved-tensor hooks.  It counts the tensors saved in it, and recomputation stops
when as many are there again.  Results that its policy saves are not recomputed.  A reentrant checkpoint is an
autograd.Function, which recomputes everything.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch

from meshwright_planner import _torch


@dataclass(eq=False)
class Checkpoint:
    """One call of a checkpoint: torch's record of it (None if it is reentrant), the number of its nodes, and the first."""

    frame: Any = None
    nodes: int = 0
    first: int = 0
    _calls: Counter[Any] = field(default_factory=Counter)

    def add(self, node: int) -> None:
        """A node runs in it."""
        if not self.nodes:
            self.first = node
        self.nodes += 1

    @property
    def saved(self) -> int:
        """Number of tensors that autograd has saved in it so far."""
        return 0 if self.frame is None else _torch.checkpoint_saved(self.frame)

    def runs_again(self, saved: int) -> bool:
        """Whether a node that began when so many tensors were saved is recomputed; valid after the run."""
        if self.frame is None or saved < self.saved:
            return True
        return self.saved > 0 and not _torch.checkpoint_stops(self.frame)

    @cached_property
    def results(self) -> Mapping[Any, Mapping[int, Any]] | None:
        """The results that its policy saves, by operation and number of the call; None without a policy."""
        return None if self.frame is None else _torch.checkpoint_results(self.frame)

    def number(self, op: Any) -> int | None:
        """The number of the call of an operation in it that begins now, from 0; None without a policy."""
        if self.results is None:
            return None
        self._calls[op] += 1
        return self._calls[op] - 1


class CheckpointPosition(NamedTuple):
    """The position of a node in one of the checkpoints that it runs in.

    Args:
        checkpoint: the checkpoint.
        original: for a copied node, the checkpoint that its original ran in; else the same.
        saved: number of tensors saved in it before the node ran.
        op, number: the operation and the number of its call in the checkpoint, if it has a policy.
    """

    checkpoint: Checkpoint
    original: Checkpoint
    saved: int
    op: Any = None
    number: int | None = None

    @property
    def kept(self) -> list[torch.Tensor]:
        """The results that a policy saves, so that the node is not recomputed."""
        if self.original.results is None or self.number is None:
            return []
        return _torch.checkpoint_kept(self.original.results.get(self.op, {}).get(self.number))


@dataclass(slots=True)
class Held:
    """What autograd keeps in place of a tensor that it saves: a function that saves its own result would keep itself."""

    tensor: torch.Tensor | None


@dataclass(slots=True)
class Observer:
    """Calls a function until the run ends.

    Autograd's functions keep hooks and what they return, unseen by the garbage collector. A hook that refers to the recorder, whose
    tensors refer to those functions, would keep all tensors of the run for ever.
    """

    function: Callable[[torch.Tensor], torch.Tensor] | None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.function is not None, "the run has ended"
        return self.function(tensor)


Place = tuple[CheckpointPosition, ...]
"""The checkpoints that a node runs in."""


@dataclass
class Checkpoints:
    """The checkpoints that are open while a model is recorded.

    `observe`: called with each tensor that autograd saves in one of them, and returns it.
    """

    observe: Callable[[torch.Tensor], torch.Tensor]
    _own: Callable[..., Any] | None = None
    _observer: Observer = field(default_factory=lambda: Observer(None))
    _reentrant: list[Checkpoint] = field(default_factory=list)
    _open: list[Checkpoint] = field(default_factory=list)
    _by_frame: dict[int, Checkpoint] = field(default_factory=dict)
    _copies: list[tuple[Checkpoint, Checkpoint]] = field(default_factory=list)
    _left: Checkpoint | None = None
    _top: Any = None

    @contextlib.contextmanager
    def watched(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """Inside, `pack` gets every tensor that autograd saves outside of checkpoints."""
        with self._holding(pack) as hold, _torch.reentrant_checkpoints(self._in_reentrant):
            self._own, self._observer = hold, Observer(self.observe)
            try:
                yield
            finally:
                self._own = self._observer.function = None

    @contextlib.contextmanager
    def _holding(self, observe: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[Callable[..., Any]]:
        """Inside, `observe` gets every tensor that autograd saves. The hook; nothing can be unpacked after the block."""
        observer, held = Observer(observe), list[Held]()

        def hold(tensor: torch.Tensor) -> Held:
            held.append(Held(observer(tensor)))
            return held[-1]

        try:
            with torch.autograd.graph.saved_tensors_hooks(hold, lambda holder: holder.tensor):
                yield hold
        finally:
            observer.function = None
            for holder in held:
                holder.tensor = None
            held.clear()

    @contextlib.contextmanager
    def _in_reentrant(self) -> Iterator[None]:
        self._reentrant.append(Checkpoint())
        try:
            with self._holding(self.observe):
                yield
        finally:
            self._left = self._reentrant.pop()

    def keeper(self, nodes: int) -> int:
        """The node that saves a tensor which autograd gets after `nodes` nodes.

        torch saves the inputs of a reentrant checkpoint when it has run: they belong to its first node.
        """
        left = self._left
        return left.first if left is not None and left.nodes and left.first + left.nodes == nodes else nodes

    def open(self) -> list[Checkpoint]:
        """The checkpoints that are open now."""
        hooks = None if self._own is None else _torch.saving_hooks()
        top = None if hooks is None or hooks[0] is self._own else hooks[0]
        if top is not self._top:
            self._top, self._open = top, []
            if top is not None:
                assert self._own is not None
                frames = [_torch.checkpoint_of(hooks) for hooks in _torch.saving_hooks_above(self._own)]
                if frames[0] is not None and id(frames[0]) not in self._by_frame:
                    self._top = _torch.observe_checkpoint(self._observer)
                held = (f for f in frames if f is not None)
                self._open.extend(self._by_frame.setdefault(id(f), Checkpoint(f)) for f in held)
        return [*self._reentrant, *self._open]

    def place(self, op: Any) -> Place:
        """The place of an operation that begins now."""
        return tuple(CheckpointPosition(c, c, c.saved, op, c.number(op)) for c in self.open())

    def again(self, around: Sequence[Checkpoint]) -> Callable[[Checkpoint], Checkpoint]:
        """A checkpoint of recorded nodes -> that of their copies here; `around`: those open during the whole block."""
        copies = dict(zip(around, self.open(), strict=True))
        self._copies += copies.items()

        def copy_of(checkpoint: Checkpoint) -> Checkpoint:
            if checkpoint not in copies:
                copies[checkpoint] = Checkpoint(checkpoint.frame)
            return copies[checkpoint]

        return copy_of

    def alike(self) -> bool:
        """Whether the checkpoints of copies have as many nodes as their originals."""
        return all(checkpoint.nodes == other.nodes for checkpoint, other in self._copies)


def times_again(place: Place, reached: Collection[Checkpoint]) -> int:
    """How often a node is recomputed; `reached`: the checkpoints that the backward pass enters."""
    entered = (spot for spot in place if spot.checkpoint in reached)
    return sum(spot.original.runs_again(spot.saved) and not spot.kept for spot in entered)
