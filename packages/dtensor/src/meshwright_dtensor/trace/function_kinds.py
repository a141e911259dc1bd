"""Kinds of torch functions, by name: views, in-place writes, random draws, functions of values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from meshwright_dtensor.errors import UnsupportedError

Function = Callable[..., Any]
"""A torch function, which is called with `Args` and `Kwargs`."""
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

DATA_DEPENDENT = frozenset(
    "item tolist numpy __bool__ __float__ __int__ __index__ __complex__ __format__ __contains__ nonzero __array__ equal "
    "allclose unique unique_consecutive masked_select bincount is_nonzero __dlpack__ "
    "as_strided as_strided_ as_strided_copy as_strided_scatter apply_ map_ map2_".split()
)
"""Functions whose result depends on values or on memory, not on layouts alone: they need the whole value."""

VIEWS = frozenset(
    "__getitem__ view reshape narrow select transpose t permute expand expand_as unsqueeze squeeze chunk split unbind diagonal "
    "as_strided unfold view_as flatten unflatten movedim swapaxes swapdims tensor_split ravel split_with_sizes "
    "hsplit vsplit dsplit moveaxis adjoint broadcast_to view_as_real view_as_complex".split()
)
"""Functions whose result shares memory with its input on one device."""
VIEW_GETTERS = frozenset(getattr(torch.Tensor, name) for name in ("T", "mT", "H", "mH", "real", "imag"))

FILLS = frozenset("normal_ uniform_ bernoulli_ exponential_ random_ log_normal_ cauchy_ geometric_".split())
"""Functions that fill a tensor with random numbers."""
_DRAWS = frozenset(
    "rand_like randn_like randint_like bernoulli normal multinomial poisson rrelu gumbel_softmax dropout dropout1d dropout2d "
    "dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout".split()
)
PYTHON_WRITES = frozenset("apply_ map_ map2_".split())
"""Writes of a function of the user, element by element: not of a meta tensor, which would crash."""
_ALIASES = frozenset({"detach", "contiguous"})
_NO_WRITES = frozenset("requires_grad_ detach_ share_memory_ rename_".split())


def differentiated(inputs: Any) -> list[Any]:
    """The inputs of ``torch.autograd.grad`` as a list. Raises UnsupportedError: one is a node of the graph."""
    listed = [inputs] if isinstance(inputs, (torch.Tensor, GradientEdge)) else list(inputs)
    if any(isinstance(x, GradientEdge) for x in listed):
        raise UnsupportedError(
            "torch.autograd.grad with respect to a GradientEdge: the node of a global tensor or mesh parameter has this rank's "
            "part; give the tensor itself"
        )
    return listed


def check_strided(func: Function, *results: Any) -> None:
    """Raise UnsupportedError if a result of a function is a sparse tensor or in another form without strides."""
    for x in results:
        if isinstance(x, torch.Tensor) and x.layout is not torch.strided:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} gives a {x.layout} tensor, which cannot be spread over a mesh; call it on "
                "x.full_tensor()"
            )


def is_in_place(name: str) -> bool:
    """Whether a function of this name writes to its first argument."""
    if name == "__setitem__":
        return True
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__index__", "__int__", "__iter__")
    return name.endswith("_") and not name.endswith("__") and not name.startswith("_foreach")


@cache
def kind_of(func: Callable[..., Any]) -> str:
    """The kind of a function that is called with a stored DTensor as its first argument; "" for all others.

    "view"; "alias" (``detach``, ``.data``); "write"; "fill" (with random numbers); "init" (``torch.nn.init``);
    "set data"; "draw" (a new tensor of random numbers); "new_empty".
    """
    name = getattr(func, "__name__", "")
    if getattr(func, "__module__", None) == nn.init.__name__:
        return "init"
    if name in ("__get__", "__set__"):
        attribute = getattr(func, "__self__", None)
        if attribute is torch.Tensor.data:
            return "alias" if name == "__get__" else "set data"
        return "view" if name == "__get__" and attribute in VIEW_GETTERS else ""
    for kind, names in (("view", VIEWS), ("alias", _ALIASES), ("draw", _DRAWS), ("fill", FILLS)):
        if name in names:
            return kind
    if name == "new_empty":
        return "new_empty"
    # _foreach_add_ and _fused_adamw_ write to lists, not to their first argument
    writes = is_in_place(name) and not name.startswith(("_f", "_a")) and name not in _NO_WRITES
    return "write" if writes else ""
