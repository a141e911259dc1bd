"""The containers of batches: mappings, tuples, lists, or one tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from meshwright_dtensor.errors import UnsupportedError


def check_leaves(batch: Any) -> None:
    """Refuse values that are not tensors: those of the other ranks' rows would be missing."""
    for leaf in pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if not isinstance(leaf, torch.Tensor) and leaf is not None:
            raise UnsupportedError(
                f"the batch holds a {type(leaf).__name__} ({leaf!r:.40}), which describes this rank's rows only; "
                "let collate_fn return tensors, or loop over the plain loader"
            )


def joined(batch: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments in a container like `batch`; mappings of other classes become dicts."""
    if isinstance(batch, Mapping):
        return kwargs
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*args)
    return list(args) if isinstance(batch, list) else args if isinstance(batch, tuple) else args[0]
