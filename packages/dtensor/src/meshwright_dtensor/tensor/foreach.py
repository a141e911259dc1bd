"""Functions that write to lists of tensors (``torch._foreach_add_``), run on one tensor after the other.

They return nothing, so tracing records no operation, and the tensors of a list may have different layouts: each write is
made by the in-place method of the tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright_dtensor.trace.function_kinds import Args, Function

_PREFIX = "_foreach_"
_METHODS = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}
"""Functions whose method has another name."""


def writes_lists(name: str) -> bool:
    """Whether a function of this name writes to the tensors of its first list."""
    return name.startswith(_PREFIX) and name.endswith("_")


def one_by_one(func: Function, args: Args, kwargs: Mapping[str, Any]) -> None:
    """Run ``func``, for which `writes_lists` is true, by the methods of the tensors."""
    name = func.__name__.removeprefix(_PREFIX)
    targets, *rest = args
    options = dict(kwargs)
    # the methods take the factor as a keyword only
    if name in ("addcdiv_", "addcmul_"):
        factor = rest.pop() if len(rest) > 2 else options.pop("scalars", options.pop("value", 1))
        options["value"] = factor.tolist() if isinstance(factor, torch.Tensor) else factor
    for index, target in enumerate(targets):
        keywords = {key: _item(value, index) for key, value in options.items()}
        getattr(target, _METHODS.get(name, name))(*[_item(value, index) for value in rest], **keywords)


def _item(value: Any, index: int) -> Any:
    """The item of a list; any other value is the same for all tensors."""
    return value[index] if isinstance(value, (list, tuple)) else value
