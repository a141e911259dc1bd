"""Tensors that a forward leaves in attributes of modules outside of units, and that the next forward reads there.

Only the rank of the last stage runs all the code between units, so other ranks would read something else. Registered buffers are
sent to them after each step (see state_writes); other tensors are not, so such a model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright_pipeline._torch import op_name, tensors_in
from meshwright_pipeline.module_state import Place, tensors_held
from meshwright_pipeline.trace.side_outputs import CannotBeCut
from meshwright_pipeline.trace.state.known_memory import written_tensors

_CARRIED = (
    "{} keeps a tensor in {!r} from one forward to the next, and other stages would not have it: register it as a buffer "
    "(register_buffer), which every stage gets, pass it as an argument of the forward, or plan without pp"
)

_OVERWRITES = frozenset({"copy_", "zero_", "fill_"})
"""Operations whose result does not depend on what was there."""


class HeldTensors:
    """The tensors in attributes of modules but registered buffers, as they are before a forward."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self._modules = modules
        self._before = self._now()

    def left(
        self, depends: Callable[[Tensor], bool], wrote_to: Callable[[Tensor], bool], given: Iterable[Tensor]
    ) -> tuple[LeftTensor, ...]:
        """What the forward has left there. A tensor that is made once and does not depend on the batch (a mask), each stage makes.

        `depends`: on the batch or results of units. `given`: the batch.
        """
        earlier = {id(tensor) for tensors in self._before.values() for tensor in tensors}
        batch = set(map(id, given))
        return tuple(
            LeftTensor(at, tensor, depends(tensor), id(tensor) in batch)
            for at, tensors in self._now().items()
            for tensor in tensors
            if (depends(tensor) or at in self._before) and (id(tensor) not in earlier or wrote_to(tensor))
        )

    def _now(self) -> dict[Place, list[Tensor]]:
        now: dict[Place, list[Tensor]] = {}
        registered = {(path, name) for path, part in self._modules for name in tensors_in(part)[1]}
        for at, tensor in tensors_held(self._modules):
            if at not in registered:
                now.setdefault(at, []).append(tensor)
        return now


@dataclass(frozen=True)
class LeftTensor:
    """A tensor that a forward has left in an attribute.

    Attributes:
        at: the module and the attribute.
        depends: on the batch or results of units.
        given: it is one of the batch.
    """

    at: Place
    tensor: Tensor
    depends: bool
    given: bool


class CarriedTensors:
    """Watches whether a forward reads what the one before has left."""

    def __init__(self, left: Iterable[LeftTensor]) -> None:
        self._left = {id(held.tensor): held for held in left if not held.given}
        self._read: dict[Place, LeftTensor] = {}

    def note(self, func: Any, args: Any, kwargs: Any, tensors: Iterable[Tensor]) -> None:
        """Note what an operation with these `tensors` reads."""
        if op_name(func) in _OVERWRITES:
            written = {id(tensor) for tensor in written_tensors(func, args, kwargs)}
            self.read(tensor for tensor in tensors if id(tensor) not in written)
            for key in written:
                self._left.pop(key, None)
        else:
            self.read(tensors)

    def read(self, tensors: Iterable[Tensor]) -> None:
        """Note that these tensors are read."""
        for tensor in tensors:
            if (held := self._left.get(id(tensor))) is not None:
                self._read[held.at] = held

    def check(self, left: Iterable[LeftTensor]) -> None:
        """Raise CannotBeCut if the forward has read some that differ from forward to forward. `left`: by this forward."""
        again = {held.at for held in left}
        for (path, name), held in self._read.items():
            if held.depends or held.at in again:
                who = f"module {path!r}" if path else "the model"
                raise CannotBeCut(_CARRIED.format(who, name))
