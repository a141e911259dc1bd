"""What modules return: trees of tensors (tuples, dicts, dataclasses that torch's pytree knows), leaf by leaf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright_pipeline._torch import pytree


def map_leaves(change: Callable[[int, torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with every tensor replaced by `change(index of the leaf, tensor)`."""
    leaves, spec = pytree.tree_flatten(tree)
    return pytree.tree_unflatten(
        [change(i, x) if isinstance(x, torch.Tensor) else x for i, x in enumerate(leaves)], spec
    )


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree in order; what is no container is one leaf."""
    return pytree.tree_leaves(tree)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree in order."""
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]


def unlike_dims(one: torch.Tensor, other: torch.Tensor) -> list[int]:
    """The dims of which two tensors with as many have different sizes."""
    return [dim for dim, size in enumerate(one.shape) if other.shape[dim] != size]


def repeats(tensor: torch.Tensor) -> bool:
    """Whether elements of a tensor share memory, as those of `nothing` do: it cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def nothing(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of zeros of that shape and dtype that takes no memory."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
