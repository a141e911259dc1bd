"""The values of a call as a key and a list of tensors, and calls put together again from other tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor, detached, wrap
from meshwright_parallel.compile.cache_arguments import CacheUse, RecordedCaches, cache_key, caches_of
from meshwright_parallel.compile.watches import IMMUTABLE

Tensor = torch.Tensor
_PLAIN = frozenset(IMMUTABLE)


class CannotKey(Exception):
    """A value that a compiled graph cannot take; the text says which."""


def key_of(value: Any, tensors: list[Any], caches: list[Any]) -> Any:
    """What is equal for values that one graph can take. Raises CannotKey.

    Their tensors are appended to `tensors`, caches of `transformers` to `caches`.
    """
    kind = type(value)
    if kind is GlobalTensor:
        tensors.append(value)
        local = value._local
        return (value._layout, local.stride(), local.requires_grad)
    if kind is DetachedView:
        tensors.append(value)
        if value.stale:
            raise CannotKey("an argument is a view whose base was modified in place after the view was taken")
        local = value._local
        return (DetachedView, value._layout, local.stride(), local.requires_grad)
    if kind is Tensor:
        tensors.append(value)
        return (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
    if kind in _PLAIN:
        return (kind, value.hex() if kind is float else value)
    if kind is tuple or kind is list:
        return (kind, *[key_of(item, tensors, caches) for item in value])
    if kind is dict:
        return (dict, *[(name, key_of(item, tensors, caches)) for name, item in value.items()])
    if isinstance(value, Tensor):
        raise CannotKey(f"an argument is a {kind.__name__}")
    if inner := caches_of(value):
        caches += inner
        return cache_key(value)
    hint = " (train with use_cache=False)" if kind.__name__.endswith("Cache") else ""
    raise CannotKey(f"an argument is a {kind.__module__}.{kind.__qualname__}{hint}")


def with_values(value: Any, tensors: Iterator[Any], caches: Iterator[Any]) -> Any:
    """The same arguments with other tensors and caches, in the order of `key_of`."""
    if isinstance(value, Tensor):
        return next(tensors)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([with_values(item, tensors, caches) for item in value])
    if kind is dict:
        return {name: with_values(item, tensors, caches) for name, item in value.items()}
    given = [next(caches) for _ in caches_of(value)]
    return given[0] if given else value


@dataclass
class Outputs:
    """The form of the result of a graph.

    Attributes:
        leaves: per leaf of the result (number of the tensor among those of the call, None) for an argument that is returned,
            (None, layout) for a result of the graph (layout None: a plain tensor), (None, _Constant) for a plain value, or
            (None, _Cache) for a cache that is returned.
        caches: how the call uses its caches; keys and values for them are results of the graph, after those of the call.
    """

    leaves: list[tuple[int | None, Any]]
    spec: Any
    caches: CacheUse

    @staticmethod
    def of(result: Any, arguments: list[Any], caches: RecordedCaches) -> tuple[Outputs, list[Tensor]]:
        """The form of a result, and its local tensors. `arguments`: the tensors of the call. Raises CannotKey."""
        leaves, spec = pytree.tree_flatten((result, caches.tensors) if caches.appends else result)
        form: list[tuple[int | None, Any]] = []
        locals_: list[Tensor] = []
        numbers = {id(t): number for number, t in enumerate(arguments)}
        of_locals = {
            id(t._local): number for number, t in enumerate(arguments) if isinstance(t, GlobalTensor)
        }
        for leaf in leaves:
            number = numbers.get(id(leaf))
            if number is None and type(leaf) is GlobalTensor:
                number = of_locals.get(id(leaf._local))
                if number is not None and arguments[number]._layout is not leaf._layout:
                    raise CannotKey("it returns an argument under another layout")
            if number is not None:
                form.append((number, None))
            elif isinstance(leaf, GlobalTensor):
                if type(leaf) is not GlobalTensor:
                    raise CannotKey("it returns a view of a value that had to be gathered")
                form.append((None, leaf._layout))
                locals_.append(leaf._local)
            elif isinstance(leaf, Tensor):
                form.append((None, None))
                locals_.append(leaf)
            elif isinstance(leaf, IMMUTABLE):
                form.append((None, _Constant(leaf)))
            elif (cache := caches.number(leaf)) is not None:
                form.append((None, _Cache(cache)))
            else:
                raise CannotKey(f"it returns a {type(leaf).__qualname__}")
        return Outputs(form, spec, caches.use()), locals_

    def build(self, results: list[Tensor], arguments: list[Any], caches: list[Any]) -> Any:
        """The result, from the local tensors of a run and the tensors and caches of its call, which it appends to."""
        following = iter(results)
        leaves: list[Any] = []
        for number, form in self.leaves:
            if number is not None:
                leaves.append(arguments[number])
            elif type(form) is _Constant:
                leaves.append(form.value)
            elif type(form) is _Cache:
                leaves.append(caches[form.number])
            else:
                local = next(following)
                leaves.append(local if form is None else wrap(local, form))
        if self.spec.is_leaf():
            return leaves[0]
        result = pytree.tree_unflatten(leaves, self.spec)
        if self.caches.appends:
            result, appended = result
            self.caches.repeat(caches, appended)
        return result


@dataclass(frozen=True)
class _Cache:
    number: int


@dataclass(frozen=True)
class _Constant:
    value: Any


def local_parts(tensors: list[Any]) -> list[Tensor]:
    """The local part of each tensor of a call."""
    return [t._local if isinstance(t, GlobalTensor) else t for t in tensors]


Label = tuple[type[GlobalTensor], Layout] | None
"""The kind and the layout of a global tensor; None of a plain one."""


def labels_of(tensors: list[Any]) -> list[Label]:
    """The label of each tensor of a call."""
    return [(type(t), t._layout) if isinstance(t, GlobalTensor) else None for t in tensors]


def relabelled(locals_: list[Tensor], labels: list[Label]) -> list[Any]:
    """The tensors with these local parts and labels.

    A view that had to be gathered has a base that nothing writes to. How it was taken is not known, so that writing to it raises.
    """
    tensors: list[Any] = []
    for local, label in zip(locals_, labels, strict=True):
        if label is None:
            tensors.append(local)
        elif label[0] is DetachedView:
            tensors.append(detached(local, label[1], local.new_empty(0)))
        else:
            tensors.append(wrap(local, label[1]))
    return tensors
