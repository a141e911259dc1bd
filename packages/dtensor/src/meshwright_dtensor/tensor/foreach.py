"""Functions that write to lists of tensors (``torch._foreach_add_``), one tensor after the other.

They give nothing, so tracing sees no operation in them, and each tensor of a list may lie otherwise than the next: every
write is left to the tensor's own method, which knows where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_PREFIX = "_foreach_"
_METHODS = {"maximum_": "clamp_min_", "minimum_": "clamp_max_"}
"""Those whose method has another name."""


def writes_lists(name: str) -> bool:
    """Whether a function of this name writes to the tensors of its first list."""
    return name.startswith(_PREFIX) and name.endswith("_")


def one_by_one(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """``func``, a function for which `writes_lists`, by the methods of the tensors."""
    name = func.__name__.removeprefix(_PREFIX)
    targets, *rest = args
    options = dict(kwargs)
    if name in ("addcdiv_", "addcmul_"):  # their methods take the factor by name only
        factor = rest.pop() if len(rest) > 2 else options.pop("scalars", options.pop("value", 1))
        options["value"] = factor.tolist() if isinstance(factor, torch.Tensor) else factor
    for index, target in enumerate(targets):
        own = {key: _of(value, index) for key, value in options.items()}
        getattr(target, _METHODS.get(name, name))(*[_of(value, index) for value in rest], **own)


def _of(value: Any, index: int) -> Any:
    """What a list holds for one tensor; anything else is for all."""
    return value[index] if isinstance(value, (list, tuple)) else value
