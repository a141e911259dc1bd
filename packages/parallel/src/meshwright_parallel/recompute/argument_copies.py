"""Copies of the arguments of a module that will run once more: what it wrote into them the first time is not in them.

A key-value cache grows by each run, so the second run of a layer needs the cache as the first one found it. Copied is what
can be written to: containers, and instances of Python classes with all that they hold, each object once however many times
it is passed. Tensors are shared, since a run that writes into one is refused. What cannot be copied but has attributes gets
those of before while the second run lasts. Shared as they are: modules, functions, and what C code alone sees into.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import logging
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, wrap

_CONSTANTS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, range, slice, type, types.FunctionType}
    | {torch.dtype, torch.device, torch.layout, torch.Size}
)
_SHARED = (nn.Module, type, Enum, DeviceMesh, logging.Logger, types.ModuleType, types.FunctionType)
_CONTAINERS = (OrderedDict, defaultdict, dict, list, set, deque)
_METHODS = (types.MethodType, types.BuiltinMethodType)


def version_of(x: Any) -> int:
    """How often a tensor was written to, as far as torch counts."""
    local = x._local if isinstance(x, GlobalTensor) else x
    if not isinstance(local, Tensor) or local.is_inference():
        return 0
    return local._version


class ArgumentCopies:
    """The arguments of one call of a module, as they were when it began."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy them.

        Raises:
            UnsupportedError: one is an iterator, which has nothing left for a second run.
        """
        copier = _Copier(lambda tensor: tensor)
        self._arguments = copier.copied((args, kwargs))
        self._tensors, self._attributes = copier.tensors, copier.attributes
        self._own: set[int] = set()

    def finished(self) -> None:
        """The first run is over: what was written to in place until now, it wrote to itself."""
        self._own = {place for place, held in enumerate(self._tensors) if held.written()}

    @contextlib.contextmanager
    def once_more(self, module: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """They, for another run of `module` (a class name): new copies each time.

        Raises:
            UnsupportedError: a tensor among them was written to in place since; its value of then is gone.
        """
        self._check(module)
        copier = _Copier(_wrapped_anew, shared=[x for x, _ in self._attributes])
        args, kwargs = copier.copied(self._arguments)
        attributes = [(x, {key: copier.copied(v) for key, v in of.items()}) for x, of in self._attributes]
        now = [(x, _attributes(x)) for x, _ in attributes]
        try:
            for x, before in attributes:
                _set_attributes(x, before)
            yield args, kwargs
        finally:
            for x, after in now:
                _set_attributes(x, after)

    def _check(self, module: str) -> None:
        place = next((place for place, held in enumerate(self._tensors) if held.written()), None)
        if place is None:
            return
        held = self._tensors[place]
        what = f"a tensor in the {held.holder} given to" if held.holder else "an input of"
        when = "by the module itself" if place in self._own else "after the module had run"
        raise UnsupportedError(
            f"{what} a recomputed {module} was modified in place {when}, so that it cannot run again as it did; use the "
            "out-of-place form (of a key-value cache, the dynamic one), or take the module out of plan.recompute"
        )


class _Held(NamedTuple):
    """A tensor, how often it had been written to, its local part, and the class of the object that holds it ("" for none)."""

    tensor: Tensor
    version: int
    local: Any
    holder: str

    def written(self) -> bool:
        # a global tensor that is turned in place (t_) has another part from then on, and no write is counted
        return version_of(self.tensor) != self.version or _local_of(self.tensor) is not self.local


def _local_of(x: Tensor) -> Any:
    return x._local if isinstance(x, GlobalTensor) else None


_Key = str | types.MemberDescriptorType


class _Copier:
    """Copies of things that may hold each other: of one object one copy.

    Attributes: `tensors` that were met, and `attributes` of each object that cannot be copied.
    """

    def __init__(self, tensor: Callable[[Tensor], Tensor], shared: Iterable[Any] = ()) -> None:
        self.tensors: list[_Held] = []
        self.attributes: list[tuple[Any, dict[_Key, Any]]] = []
        self._tensor = tensor
        self._made: dict[int, Any] = {id(x): x for x in shared}
        self._holder = ""

    def copied(self, x: Any) -> Any:
        """`x`, or its copy where something in it can be written to."""
        if type(x) in _CONSTANTS:
            return x
        if id(x) not in self._made:
            self._made[id(x)] = self._copy(x)
        return self._made[id(x)]

    def _copy(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.tensors.append(_Held(x, version_of(x), _local_of(x), self._holder))
            return self._tensor(x)
        if isinstance(x, _SHARED):
            return x
        if isinstance(x, tuple):
            return self._tuple(x)
        if isinstance(x, _METHODS):
            owner = self.copied(x.__self__)
            return x if owner is x.__self__ else _method_of(owner, x)
        if type(x) is functools.partial:
            return functools.partial(self.copied(x.func), *self.copied(x.args), **self.copied(x.keywords))
        if isinstance(x, torch.Generator):
            return x.clone_state()
        if issubclass(type(x), _CONTAINERS):  # and no proxy of one
            return self._container(x)
        return self._object(x)

    def _tuple(self, x: tuple[Any, ...]) -> Any:
        items = [self.copied(item) for item in x]
        if id(x) in self._made:  # it holds a list that holds it
            return self._made[id(x)]
        if all(new is old for new, old in zip(items, x, strict=True)):
            return x
        kind: Any = type(x)
        try:
            return self._filled(tuple.__new__(kind, items), x)
        except TypeError:  # torch.return_types are made by C code
            return kind(items)

    def _container(self, x: Any) -> Any:
        kind: Any = type(x)
        base: Any = next(base for base in _CONTAINERS if issubclass(kind, base))
        new = self._made[id(x)] = base.__new__(kind)
        # by the methods of the base: those of a class derived from it may do more than hold
        if base is set:
            set.update(new, x)
        elif base is list:
            list.extend(new, [self.copied(item) for item in list.__iter__(x)])
        elif base is deque:
            deque.__init__(new, (), x.maxlen)
            deque.extend(new, [self.copied(item) for item in deque.__iter__(x)])
        else:
            if base is defaultdict:
                new.default_factory = self.copied(x.default_factory)
            for key, value in base.items(x):
                base.__setitem__(new, key, self.copied(value))
        return self._filled(new, x)

    def _object(self, x: Any) -> Any:
        new = _empty(x)
        if new is not None:
            self._made[id(x)] = new
            return self._filled(new, x)
        self._made[id(x)] = x
        if isinstance(x, Iterator) and not isinstance(x, io.IOBase):
            raise UnsupportedError(
                f"a recomputed module was given a {type(x).__name__}, an iterator, which has nothing left when the module runs "
                "again; give it a list, or take the module out of plan.recompute"
            )
        found = _attributes(x)
        if found:
            self.attributes.append((x, self._values(x, found)))
        return x

    def _filled(self, new: Any, x: Any) -> Any:
        found = _attributes(x)
        if found:
            _set_attributes(new, self._values(x, found))
        return new

    def _values(self, x: Any, found: Mapping[_Key, Any]) -> dict[_Key, Any]:
        outer, self._holder = self._holder, type(x).__name__
        values = {key: self.copied(value) for key, value in found.items()}
        self._holder = outer
        return values


def _empty(x: Any) -> Any:
    """An object of the class of `x`, whose attributes are still to be set; None where C code keeps more of it."""
    kind: Any = type(x)
    if hasattr(kind, "__del__"):
        return None  # a copy that ends would end what both share
    try:
        return object.__new__(kind)
    except TypeError:  # "not safe": its memory is not that of an object alone
        if issubclass(kind, types.SimpleNamespace):
            return kind.__new__(kind)
        return copy.copy(x) if issubclass(kind, bytearray) or hasattr(kind, "__copy__") else None


def _method_of(owner: Any, method: Any) -> Any:
    if isinstance(method, types.MethodType):
        return types.MethodType(method.__func__, owner)
    return getattr(owner, method.__name__)


@functools.lru_cache(maxsize=256)
def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Those of Python classes; what C code calls a member may be read-only."""
    return tuple(
        member
        for base in kind.__mro__
        if "__slots__" in vars(base)
        for member in vars(base).values()
        if isinstance(member, types.MemberDescriptorType)
    )


def _attributes(x: Any) -> dict[_Key, Any]:
    """What an object holds, by name, and by descriptor where it lies in a slot; properties are not asked."""
    own, kind = getattr(x, "__dict__", None), cast(Any, type(x))
    found: dict[_Key, Any] = dict(own) if isinstance(own, dict) else {}
    for slot in _slots(kind):
        with contextlib.suppress(AttributeError):  # never set
            found[slot] = slot.__get__(x)
    return found


def _set_attributes(x: Any, attributes: Mapping[_Key, Any]) -> None:
    """Make `x` hold these and no others."""
    own, kind = getattr(x, "__dict__", None), cast(Any, type(x))
    if isinstance(own, dict):
        own.clear()
        own.update({key: value for key, value in attributes.items() if isinstance(key, str)})
    for slot in _slots(kind):
        if slot in attributes:
            slot.__set__(x, attributes[slot])
        else:
            with contextlib.suppress(AttributeError):
                slot.__delete__(x)


def _wrapped_anew(x: Tensor) -> Tensor:
    """What was gathered for one run is not kept alive by a new wrapper, and not found by the next run."""
    return wrap(x._local, x._layout) if type(x) is GlobalTensor else x
