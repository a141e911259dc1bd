"""The memory that a call is given or makes itself. A write elsewhere (to a global tensor, say) would be on one stage alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, UntypedStorage, nn

from meshwright_pipeline._torch import (
    TorchDispatchMode,
    has_own_memory,
    memory_of,
    named_arguments,
    op_name,
    written_arguments,
)
from meshwright_pipeline.module_state import tensors_held
from meshwright_pipeline.pytrees import tensors_of
from meshwright_pipeline.trace.side_outputs import CannotBeCut

_FOREIGN = (
    "{} writes in place to a tensor that no module holds (a global one, or one of a closure or a class), and other stages would "
    "not have the new values. Make it a buffer of the module that writes it (register_buffer), or plan without pp"
)


class KnownMemory:
    """The memory of given tensors, and of what is made from then on."""

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        # they are kept, so that no other tensor gets the memory of one of them
        self._given: list[Tensor] = []
        self._known: set[int | None] = set()
        self.give(given)

    def made(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note what an operation has made; views and written tensors are known or not as before."""
        if func._schema.is_mutable:
            # torch.load, pickle and copies of tensors make a storage unseen and then a tensor of it
            if op_name(func) == "set_" and any(isinstance(given, UntypedStorage) for given in args):
                self._known.add(memory_of(result))
            return
        # torch.tensor() makes its tensor unseen
        given = (
            {memory_of(tensor) for tensor in tensors_of((args, kwargs))}
            if op_name(func) != "lift_fresh"
            else set()
        )
        self._known.update({memory_of(tensor) for tensor in tensors_of(result)} - given)

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Tensors that the call has or gets too."""
        given = list(tensors)
        self._given += given
        self._known.update(map(memory_of, given))

    def __contains__(self, tensor: Tensor) -> bool:
        return memory_of(tensor) in self._known

    def check(self, who: str, written: Iterable[Tensor]) -> None:
        """Raise CannotBeCut if one of the tensors that `who` is about to write to is neither given nor made."""
        for tensor in written:
            if tensor not in self and has_own_memory(tensor):
                raise CannotBeCut(_FOREIGN.format(who))


class UnitWrites(TorchDispatchMode):
    """Records what the operations of a unit's call write to. `given`: the tensors of its arguments.

    read: the other tensors that they read (global ones, say), by id.
    """

    def __init__(self, name: str, unit: nn.Module, given: Iterable[Tensor]) -> None:
        super().__init__()
        held = tensors_held(unit.named_modules())
        self._held = [(".".join(filter(None, at)), tensor, memory_of(tensor)) for at, tensor in held]
        self._name, self._memory = name, KnownMemory([*given, *(tensor for _, tensor, _ in self._held)])
        self._written: set[int | None] = set()
        self.read: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            written = written_tensors(func, args, kwargs)
            self._memory.check(f"module {self._name!r}", written)
            self._written.update(map(memory_of, written))
        self.read.update((id(x), x) for x in tensors_of((args, kwargs)) if x not in self._memory)
        result = func(*args, **kwargs)
        self._memory.made(func, args, kwargs, result)
        return result

    def written(self) -> set[str]:
        """The names of the unit's tensors whose memory was written to, maybe through `.data` or a view, or replaced."""
        return {
            name
            for name, tensor, memory in self._held
            if memory in self._written or memory_of(tensor) != memory
        }


def written_tensors(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors that a call of an overload writes to."""
    named = named_arguments(func, args, kwargs)
    return tensors_of([named[name] for name in written_arguments(func)])
