"""Catches ``autograd.Function.apply``, which bypasses ``__torch_function__``.

A global tensor carries the Python dispatch key, so functorch, C++ extensions, scripted functions and torch.compile raise
when they reach torch's dispatcher with it.  ``autograd.Function.apply`` never reaches it: it passes its arguments to
``forward`` and builds its own graph.  Its code is therefore replaced once, when the first global tensor or mesh parameter
is made; not the attribute, because models keep ``apply = MyFunction.apply`` from import time.  Calls without global
tensors run the original code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from meshwright_dtensor._torch.core import pytree, replace_code

_ROUTE = "_meshwright_route"

Runner = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def install_guard(run: Runner, is_global: Callable[[Any, Any], bool]) -> None:
    """Route ``Function.apply`` calls that have a global tensor among their arguments through ``run``; idempotent.

    Args:
        run: called with (Function class, args, kwargs).
        is_global: called with (Function class, argument); whether the class must not get this argument as it is.
    """
    function = torch.autograd.Function.__dict__["apply"].__func__
    if hasattr(function, _ROUTE):
        return
    original = replace_code(function, _Host.__dict__["apply"])

    def route(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for a in (*args, *kwargs.values()) if kwargs else args:
            if is_global(cls, a) or (
                isinstance(a, (list, tuple, dict)) and any(is_global(cls, x) for x in pytree.tree_leaves(a))
            ):
                return run(cls, args, kwargs)
        return original(cls, *args, **kwargs)

    setattr(function, _ROUTE, route)


class _Host:
    """Donor of the code of ``apply``; ``__class__`` in it is the class of the function that receives the code."""

    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        return __class__.__dict__["apply"].__func__._meshwright_route(cls, args, kwargs)  # type: ignore[name-defined]
