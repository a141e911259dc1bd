"""The user's own checkpoints (`torch.utils.checkpoint`): which nodes run in one, and which of them run again.

One that is not reentrant hangs its own hooks up for what autograd keeps, by which it is known.  It counts what is kept, and
stops running again as soon as as much is there; what its policy keeps does not run again.  A reentrant one is a Function,
which runs all again.
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
    """One call of a checkpoint.

    Args:
        frame: what torch knows of it; None of a reentrant one.
        nodes: how many nodes ran in it.
        first: the first of them.
    """

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
        """How many tensors autograd has kept in it so far."""
        return 0 if self.frame is None else _torch.checkpoint_saved(self.frame)

    def runs_again(self, saved: int) -> bool:
        """Whether what began when so many tensors were kept runs again, once all of it has run."""
        if self.frame is None:
            return True
        return saved < self.saved or (self.saved > 0 and not _torch.checkpoint_stops(self.frame))

    @cached_property
    def _results(self) -> Mapping[Any, Mapping[int, Any]] | None:
        return None if self.frame is None else _torch.checkpoint_results(self.frame)

    def number(self, op: Any) -> int | None:
        """Which call of an operation in it begins now, from 0; None where the results of none are kept."""
        if self._results is None:
            return None
        self._calls[op] += 1
        return self._calls[op] - 1

    def kept(self, op: Any, number: int | None) -> list[torch.Tensor]:
        """The results of a call, where a policy of the checkpoint keeps them, so that it does not run again."""
        if self._results is None or number is None:
            return []
        return _torch.checkpoint_kept(self._results.get(op, {}).get(number))


class Spot(NamedTuple):
    """One of the checkpoints that something runs in.

    Args:
        here: the checkpoint.
        ran: the one that what it is a copy of ran in, else the same.
        saved: how many tensors that had kept by then.
        op, number: the operation, and which call of it in the checkpoint it is, where its policy keeps results.
    """

    here: Checkpoint
    ran: Checkpoint
    saved: int
    op: Any = None
    number: int | None = None

    @property
    def kept(self) -> list[torch.Tensor]:
        """The results of what it is a copy of, where a policy keeps them."""
        return self.ran.kept(self.op, self.number)


Place = tuple[Spot, ...]
"""The checkpoints that something runs in."""


@dataclass
class Checkpoints:
    """Those that are open while a model is recorded.

    Args:
        look: told of what autograd keeps in one of them.
    """

    look: Callable[[torch.Tensor], object]
    _own: Callable[..., Any] | None = None
    _reentrant: list[Checkpoint] = field(default_factory=list)
    _open: list[Checkpoint] = field(default_factory=list)
    _known: dict[int, Checkpoint] = field(default_factory=dict)
    _alike: list[tuple[Checkpoint, Checkpoint]] = field(default_factory=list)
    _left: Checkpoint | None = None
    _top: Any = None

    @contextlib.contextmanager
    def watched(self, pack: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """While open, autograd hands what it keeps to `pack`, but for what it keeps in checkpoints."""
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with _torch.reentrant_checkpoints(self._in_reentrant):
                self._own = pack
                try:
                    yield
                finally:
                    self._own = None

    @contextlib.contextmanager
    def _in_reentrant(self) -> Iterator[None]:
        self._reentrant.append(Checkpoint())
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._looked, lambda tensor: tensor):
                yield
        finally:
            self._left = self._reentrant.pop()

    def keeper(self, nodes: int) -> int:
        """The node that keeps what autograd is given when there are so many nodes: of a reentrant one its first.

        That keeps what goes into it, as others do, but torch says so when it has run.
        """
        left = self._left
        return left.first if left is not None and left.nodes and left.first + left.nodes == nodes else nodes

    def _looked(self, tensor: torch.Tensor) -> torch.Tensor:
        self.look(tensor)
        return tensor

    def open(self) -> list[Checkpoint]:
        """Those that are open now."""
        hooks = None if self._own is None else _torch.saving_hooks()
        top = None if hooks is None or hooks[0] is self._own else hooks[0]
        if top is not self._top:
            self._top = top
            self._open = [] if top is None else self._look()
        return [*self._reentrant, *self._open]

    def place(self, op: Any) -> Place:
        """Where an operation runs that begins now."""
        return tuple(Spot(one, one, one.saved, op, one.number(op)) for one in self.open())

    def again(self, around: Sequence[Checkpoint]) -> Callable[[Checkpoint], Checkpoint]:
        """One that some nodes ran in -> the one that their copies run in here; `around`: those that were open all the while."""
        known = dict(zip(around, self.open(), strict=True))
        self._alike += known.items()

        def here(one: Checkpoint) -> Checkpoint:
            if one not in known:
                known[one] = Checkpoint(one.frame)
            return known[one]

        return here

    def alike(self) -> bool:
        """Whether as much ran in those in which copies stand as in those that they are copied from."""
        return all(one.nodes == other.nodes for one, other in self._alike)

    def _look(self) -> list[Checkpoint]:
        assert self._own is not None
        frames = [_torch.checkpoint_of(hooks) for hooks in _torch.saving_hooks_above(self._own)]
        if frames[0] is not None and id(frames[0]) not in self._known:
            self._top = _torch.look_at_checkpoint(self.look)
        return [self._of(frame) for frame in frames if frame is not None]

    def _of(self, frame: Any) -> Checkpoint:
        found = self._known.get(id(frame))
        if found is None:
            found = self._known[id(frame)] = Checkpoint(frame)
        return found


def times_again(place: Place, reached: Collection[Checkpoint]) -> int:
    """How often a node runs again; `reached`: the checkpoints that a gradient goes back through."""
    return sum(spot.here in reached and spot.ran.runs_again(spot.saved) and not spot.kept for spot in place)
