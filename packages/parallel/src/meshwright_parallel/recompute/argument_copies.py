"""Copies of the arguments of a recomputed module, made before its first run writes to them.

A key-value cache grows with each run, so the second run of a layer needs the cache as it was before the first. Mutable objects
are copied: containers, and instances of Python classes with their attributes, each object once. Tensors are shared, because
a run that writes to one is refused. An object that cannot be copied gets its earlier attributes during the second run. Modules,
functions, and state that only C code can read are shared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
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
    """The version counter of a tensor: how often it was written to, as far as torch counts."""
    local = x._local if isinstance(x, GlobalTensor) else x
    return local._version if isinstance(local, Tensor) and not local.is_inference() else 0


class ArgumentCopies:
    """The arguments of one call of a module, as they were when it began."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy the arguments. Raises UnsupportedError: one is an iterator, which the first run exhausts."""
        copier = _Copier(lambda tensor: tensor)
        self._arguments = copier.copied((args, kwargs))
        self._tensors, self._attributes = copier.tensors, copier.attributes
        self._written_by_module: set[int] = set()

    def finished(self) -> None:
        """The first run has ended: tensors written to until now were written to by the module itself."""
        self._written_by_module = {i for i, record in enumerate(self._tensors) if record.is_written()}

    @contextlib.contextmanager
    def once_more(self, module: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """New copies of the arguments for another run of `module` (a class name).

        Raises UnsupportedError: a tensor among them was written to in place since, so its value is lost.
        """
        self._check(module)
        copier = _Copier(_rewrapped, shared=[x for x, _ in self._attributes])
        args, kwargs = copier.copied(self._arguments)
        attributes = [(x, {key: copier.copied(v) for key, v in of.items()}) for x, of in self._attributes]
        current = [(x, _attributes(x)) for x, _ in attributes]
        try:
            for x, before in attributes:
                _set_attributes(x, before)
            yield args, kwargs
        finally:
            for x, after in current:
                _set_attributes(x, after)

    def _check(self, module: str) -> None:
        index = next((i for i, record in enumerate(self._tensors) if record.is_written()), None)
        if index is None:
            return
        owner = self._tensors[index].owner
        tensor = f"a tensor in the {owner} given to" if owner else "an input of"
        when = "by the module itself" if index in self._written_by_module else "after the module had run"
        raise UnsupportedError(
            f"{tensor} a recomputed {module} was modified in place {when}, so the module cannot run again on the same value; "
            "use the out-of-place form (of a key-value cache, the dynamic one), or remove the module from plan.recompute"
        )


class _TensorRecord(NamedTuple):
    """A tensor, its version and local tensor when it was recorded, and the class of its owner ("" for none)."""

    tensor: Tensor
    version: int
    local: Any
    owner: str

    def is_written(self) -> bool:
        # t_() on a global tensor replaces its local tensor without a version count
        return version_of(self.tensor) != self.version or _local_of(self.tensor) is not self.local


def _local_of(x: Tensor) -> Any:
    return x._local if isinstance(x, GlobalTensor) else None


_Key = str | types.MemberDescriptorType


class _Copier:
    """Copies objects that may refer to each other, once each: `tensors`, and `attributes` of objects that cannot be copied."""

    def __init__(self, tensor: Callable[[Tensor], Tensor], shared: Iterable[Any] = ()) -> None:
        self.tensors: list[_TensorRecord] = []
        self.attributes: list[tuple[Any, dict[_Key, Any]]] = []
        self._tensor = tensor
        self._copies: dict[int, Any] = {id(x): x for x in shared}
        self._owner = ""

    def copied(self, x: Any) -> Any:
        """`x`, or its copy if something in it is mutable."""
        if type(x) in _CONSTANTS:
            return x
        if id(x) not in self._copies:
            self._copies[id(x)] = self._copy(x)
        return self._copies[id(x)]

    def _copy(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.tensors.append(_TensorRecord(x, version_of(x), _local_of(x), self._owner))
            return self._tensor(x)
        if isinstance(x, _SHARED):
            return x
        if isinstance(x, tuple):
            return self._tuple(x)
        if isinstance(x, _METHODS):
            owner = self.copied(x.__self__)
            if owner is x.__self__:
                return x
            if type(x) is types.MethodType:
                return types.MethodType(x.__func__, owner)
            return getattr(owner, x.__name__)
        if type(x) is functools.partial:
            return functools.partial(self.copied(x.func), *self.copied(x.args), **self.copied(x.keywords))
        if isinstance(x, torch.Generator):
            return x.clone_state()
        # not isinstance, which proxies pass
        return self._container(x) if issubclass(type(x), _CONTAINERS) else self._object(x)

    def _tuple(self, x: tuple[Any, ...]) -> Any:
        items = [self.copied(item) for item in x]
        # a cycle: an item refers to the tuple
        if id(x) in self._copies:
            return self._copies[id(x)]
        if all(new is old for new, old in zip(items, x, strict=True)):
            return x
        kind: Any = type(x)
        try:
            return self._filled(tuple.__new__(kind, items), x)
        except TypeError:
            # torch.return_types are made by C code
            return kind(items)

    def _container(self, x: Any) -> Any:
        kind: Any = type(x)
        base: Any = next(base for base in _CONTAINERS if issubclass(kind, base))
        new = self._copies[id(x)] = base.__new__(kind)
        # with the methods of the base class: those of a subclass may have side effects
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
            self._copies[id(x)] = new
            return self._filled(new, x)
        self._copies[id(x)] = x
        if isinstance(x, Iterator) and not isinstance(x, io.IOBase):
            raise UnsupportedError(
                f"a recomputed module was given a {type(x).__name__}, an iterator, which is exhausted when the module runs "
                "again; give it a list, or remove the module from plan.recompute"
            )
        attributes = _attributes(x)
        if attributes:
            self.attributes.append((x, self._values(x, attributes)))
        return x

    def _filled(self, new: Any, x: Any) -> Any:
        attributes = _attributes(x)
        if attributes:
            _set_attributes(new, self._values(x, attributes))
        return new

    def _values(self, x: Any, attributes: Mapping[_Key, Any]) -> dict[_Key, Any]:
        outer, self._owner = self._owner, type(x).__name__
        values = {key: self.copied(value) for key, value in attributes.items()}
        self._owner = outer
        return values


def _empty(x: Any) -> Any:
    """A new object of the class of `x` without attributes; None where C code keeps state of it."""
    kind: Any = type(x)
    if hasattr(kind, "__del__"):
        # deleting the copy would release the resource of both
        return None
    try:
        return object.__new__(kind)
    except TypeError:
        # "not safe": a class with C state
        if issubclass(kind, types.SimpleNamespace):
            return kind.__new__(kind)
        return copy.copy(x) if issubclass(kind, bytearray) or hasattr(kind, "__copy__") else None


@functools.lru_cache(maxsize=256)
def _slots(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """The slots of Python classes; members of C classes may be read-only."""
    tables = (vars(base).values() for base in kind.__mro__ if "__slots__" in vars(base))
    members = itertools.chain.from_iterable(tables)
    return tuple(member for member in members if isinstance(member, types.MemberDescriptorType))


def _attributes(x: Any) -> dict[_Key, Any]:
    """The attributes of an object, by name, or by descriptor for slots; without properties."""
    instance_dict, kind = getattr(x, "__dict__", None), cast(Any, type(x))
    attributes: dict[_Key, Any] = dict(instance_dict) if isinstance(instance_dict, dict) else {}
    for slot in _slots(kind):
        # never set
        with contextlib.suppress(AttributeError):
            attributes[slot] = slot.__get__(x)
    return attributes


def _set_attributes(x: Any, attributes: Mapping[_Key, Any]) -> None:
    """Make these the only attributes of `x`."""
    instance_dict, kind = getattr(x, "__dict__", None), cast(Any, type(x))
    if isinstance(instance_dict, dict):
        instance_dict.clear()
        instance_dict.update({key: value for key, value in attributes.items() if isinstance(key, str)})
    for slot in _slots(kind):
        if slot in attributes:
            slot.__set__(x, attributes[slot])
        else:
            with contextlib.suppress(AttributeError):
                slot.__delete__(x)


def _rewrapped(x: Tensor) -> Tensor:
    """A new wrapper of a global tensor: values that one run caches on it are not kept for the next."""
    return wrap(x._local, x._layout) if type(x) is GlobalTensor else x
