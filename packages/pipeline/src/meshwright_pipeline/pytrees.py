"""What modules return: trees of tensors, leaf by leaf: tuples, dicts and whatever torch's pytree knows, and in those, or by
themselves, objects that are nothing but fields (dataclasses, SimpleNamespace).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from meshwright_pipeline._torch import pytree


def map_leaves(change: Callable[[int, torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with every tensor replaced by `change(index of the leaf, tensor)`."""
    return _mapped(change, tree, itertools.count())


def _mapped(change: Callable[[int, torch.Tensor], Any], tree: Any, counting: Iterator[int]) -> Any:
    leaves, spec = pytree.tree_flatten(tree)
    found = []
    for leaf in leaves:
        fields = _fields(leaf)
        if fields is None:
            index = next(counting)
            found.append(change(index, leaf) if isinstance(leaf, torch.Tensor) else leaf)
        else:
            found.append(made := copy.copy(leaf))
            for name, value in fields.items():
                object.__setattr__(made, name, _mapped(change, value, counting))  # it may be frozen
    return pytree.tree_unflatten(found, spec)


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree in order; what is no container is one leaf."""
    return list(_leaves(tree))


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree in order."""
    return [x for x in _leaves(tree) if isinstance(x, torch.Tensor)]


def _leaves(tree: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(tree):
        fields = _fields(leaf)
        if fields is None:
            yield leaf
        else:
            yield from _leaves(fields)


def _fields(leaf: Any) -> dict[str, Any] | None:
    """The fields of an object that is nothing but those and has tensors in one; None of any other."""
    kind = type(leaf)  # not isinstance: a stand-in for a number (see copies) would take that for a look at it
    if issubclass(kind, SimpleNamespace):
        fields = vars(leaf)
    elif dataclasses.is_dataclass(kind) and not issubclass(kind, torch.nn.Module):
        names = (one.name for one in dataclasses.fields(leaf))
        fields = {
            name: getattr(leaf, name) for name in names if hasattr(leaf, name)
        }  # others are not set yet
    else:
        return None
    return dict(fields) if _has_tensors(fields) else None


def _has_tensors(tree: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) or _fields(leaf) is not None for leaf in pytree.tree_leaves(tree)
    )


def attribute_tensors(leaf: Any) -> list[torch.Tensor]:
    """The tensors in the attributes of an object of any other class (a cache, say)."""
    if issubclass(type(leaf), (torch.Tensor, torch.nn.Module, type)):
        return []
    return tensors_of(dict(getattr(leaf, "__dict__", {})))


def differing_dims(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    """The dims of which two tensors with as many have different sizes."""
    return [dim for dim, size in enumerate(one.shape) if other.shape[dim] != size]


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of `expanded_zeros` do: it cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def expanded_zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of zeros of that shape and dtype that takes no memory."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
