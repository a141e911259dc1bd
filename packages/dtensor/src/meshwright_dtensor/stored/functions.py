"""Torch functions on stored DTensors: the ``__torch_function__`` of MeshValue, PermutedDTensor and MeshView.

Any optimizer computes with parameters, gradients and states as with plain tensors.  Elementwise functions run on the local
tensors (see elementwise), fused steps and assignment under a mask too.  Stock DTensor does the rest, but it leaves the norm
of a shard partial, which later in-place operations refuse and of which ``.item()`` shows one rank's part.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch import core
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stored import writes
from meshwright_dtensor.stored.elementwise import (
    assigns_under_mask,
    fast_elementwise,
    on_local_parts,
    order_of,
    same_specs,
)
from meshwright_dtensor.stored.gather import as_recorded, complete_value, gather_stored, run_by_rules
from meshwright_dtensor.stored.mesh_value import MeshValue, mesh_value
from meshwright_dtensor.stored.permuted import PermutedDTensor, elementwise, permuted_layout, with_order_of
from meshwright_dtensor.tensor.foreach import one_by_one, writes_lists
from meshwright_dtensor.tensor.staged import Staged
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs, kind_of

Tensor = torch.Tensor

_QUERIES = frozenset(
    "size dim stride numel is_floating_point is_complex __hash__ __repr__ __format__ __len__ __get__ __set__ element_size "
    "nelement ndimension is_contiguous get_device _is_view".split()
)
"""Functions that ask about the tensor, not for its value."""
_STOCK = (_QUERIES - {"__format__"}) | frozenset(
    "detach clone contiguous to cpu cuda type float double half bfloat16 sum mean norm vector_norm linalg_vector_norm amax amin "
    "all any count_nonzero stack backward requires_grad_ detach_ retain_grad register_hook __delete__ new_empty new_zeros new_ones "
    "new_full new_tensor zeros_like ones_like full_like empty_like is_shared share_memory_ __setstate__".split()
)
"""Functions that stock DTensor runs; all others run as on global tensors."""


_UNRECORDED = _QUERIES | frozenset(
    "__delete__ detach requires_grad_ retain_grad is_shared share_memory_".split()
)


def _mesh_value_call(
    cls: type, func: Function, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
) -> Any:
    if any(t not in (MeshValue, DTensor, Tensor) for t in types):
        # parameters and global tensors have rules of their own
        return NotImplemented
    if torch.is_grad_enabled() and _records(func, args, kwargs):
        args, kwargs = core.pytree.tree_map(as_recorded, (args, kwargs or {}))
        return func(*args, **kwargs)
    if kind_of(func) == "alias" and args[0].requires_grad and func.__name__ == "__get__":
        # writes to .data of a leaf are not counted
        local = core.dtensor_local(args[0])
        return mesh_value(core.dtensor_like(local.data, args[0]))
    result = fast_elementwise(func, args, kwargs)
    if result is not NotImplemented:
        return mesh_value(result)
    result = writes.view_write_or_draw(func, args, kwargs)
    return optimizer_call(func, args, kwargs) if result is NotImplemented else result


def _records(func: Function, args: Args, kwargs: Kwargs | None) -> bool:
    """Whether autograd records the call: it takes the value of a leaf, and does not write."""
    operands = core.pytree.tree_leaves((args, kwargs))
    if not any(isinstance(x, MeshValue) and x.requires_grad for x in operands):
        return False
    return kind_of(func) in ("view", "draw") or (kind_of(func) == "" and func.__name__ not in _UNRECORDED)


def _full_tensor(self: MeshValue, **options: Any) -> Tensor:
    """The whole value on every rank (a collective call), connected to autograd where it is a leaf."""
    recorded = torch.is_grad_enabled() and self.requires_grad
    return as_recorded(self).full_tensor() if recorded else gather_stored(self)  # type: ignore[no-any-return]


def _permuted_call(
    cls: type, func: Function, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
) -> Any:
    result = fast_elementwise(func, args, kwargs)
    if result is not NotImplemented:
        return with_order_of(args[0], result)
    if any(issubclass(t, (writes.MeshView, Staged)) for t in types):
        # they have rules of their own
        return NotImplemented
    result = writes.view_write_or_draw(func, args, kwargs, views=False)
    return optimizer_call(func, args, kwargs) if result is NotImplemented else result


def _view_call(
    cls: type, func: Function, types: Iterable[type], args: Args = (), kwargs: Kwargs | None = None
) -> Any:
    kwargs = kwargs or {}
    kind, name = kind_of(func), getattr(func, "__name__", "")
    first = args[0] if args else None
    if kind == "init" or (kwargs.get("inplace") is True and isinstance(first, writes.MeshView)):
        return writes.write(func, args, kwargs)
    if isinstance(first, writes.MeshView):
        if kind in ("view", "alias"):
            view = writes.view_of(first, func, args[1:], kwargs)
            if view is not NotImplemented:
                return view
        elif kind in ("write", "fill"):
            return writes.write(func, args, kwargs)
        elif kind == "set data":
            return writes.set_data(*args)
        elif name in _QUERIES:
            with core.stock_call():
                return func(*args, **kwargs)
    if isinstance(kwargs.get("out"), writes.MeshView):
        return writes.write_out(func, args, kwargs)
    if writes_lists(name):
        return one_by_one(func, args, kwargs)
    # a fused function writes to all of its lists
    if name.startswith(("_fused", "_amp_foreach")) and name.endswith("_"):
        for view in core.pytree.tree_leaves(args):
            if isinstance(view, writes.MeshView):
                raise UnsupportedError(
                    f"{name} is given a view of shape {list(view.shape)} of a tensor over a mesh, and a write to it might "
                    "not reach that tensor; write to one view after the other, with its own methods"
                )
    args, kwargs = core.pytree.tree_map_only(writes.MeshView, writes.MeshView.current, (args, kwargs))
    return func(*args, **kwargs)


# stock DTensor gathers by types that gloo has, and not 16-bit integers
MeshValue.full_tensor = _full_tensor  # type: ignore[assignment, method-assign]
MeshValue.__torch_function__ = classmethod(_mesh_value_call)  # type: ignore[assignment]
PermutedDTensor.__torch_function__ = classmethod(_permuted_call)  # type: ignore[assignment]
writes.MeshView.__torch_function__ = classmethod(_view_call)  # type: ignore[assignment]


def optimizer_call(func: Function, args: Args, kwargs: Kwargs | None) -> Any:
    """``func`` on local tensors or by stock DTensor, with partial results completed.

    Raises UnsupportedError: the tensors of a fused step have different placements.
    """
    name = getattr(func, "__name__", "")
    kwargs = kwargs or {}
    if name.startswith("_fused") or (name == "__setitem__" and assigns_under_mask(*args)):
        return _on_locals(func, name, args, kwargs)
    operands = (x for a in args for x in (a if isinstance(a, (list, tuple)) else (a,)))
    if any(permuted_layout(x) is not None for x in operands):
        return _on_permuted(func, name, args, kwargs)
    with core.stock_call():
        # the norms of many gradients are stacked first, and completed together
        if name != "stack":
            args = tuple([_completed(a) if isinstance(a, MeshValue) else a for a in args])
        result = on_local_parts(func, name, args, kwargs)
    if result is NotImplemented:
        if kwargs.get("out") is not None:
            return writes.write_out(func, args, kwargs)
        result = _by_stock(func, args, kwargs)
    if isinstance(result, (list, tuple)) and name.startswith("_foreach"):
        for tensor in result:
            mesh_value(core.settled(tensor) if isinstance(tensor, DTensor) else tensor)
    return _shown(result)


def _on_permuted(func: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    result = elementwise(func, args, kwargs)
    if result is not NotImplemented:
        return result if isinstance(result, PermutedDTensor) else _shown(result)
    if writes_lists(name):
        return one_by_one(func, args, kwargs)
    in_place = name.endswith("_") and not name.endswith("__")
    return writes.write(func, args, kwargs) if in_place else run_by_rules(func, args, kwargs)


def _shown(result: Any) -> Any:
    """A result of stock DTensor, complete and of our class."""
    if not isinstance(result, DTensor):
        return result
    with core.stock_call():
        return mesh_value(core.settled(complete_value(result)))


def _by_stock(func: Function, args: Args, kwargs: Kwargs) -> Any:
    name = getattr(func, "__name__", "")
    by_list = writes_lists(name)
    fused = name.startswith(("_f", "_amp")) and not by_list
    if kind_of(func) == "write":
        return writes.write(func, args, kwargs)
    # it tells of the tensor, or gives one value that can be completed
    stock = name in _STOCK or (name in ("max", "min") and len(args) == 1 and not kwargs)
    if fused or (stock and not writes.mixes_plain_tensors(args, kwargs)):
        try:
            with core.stock_call(), core.quiet_exchanges():
                return func(*args, **kwargs)
        except NotImplementedError:
            # no rule: raised on every rank before any communication
            if fused:
                raise
    if by_list:
        return one_by_one(func, args, kwargs)
    return run_by_rules(func, args, kwargs)


def _completed(x: MeshValue) -> MeshValue:
    """``x`` itself, completed in place: a later write must reach this tensor."""
    whole = complete_value(x)
    if whole is not x:
        core.set_dtensor_parts(x, core.dtensor_local(whole), core.dtensor_spec(whole))
    return x


def _on_locals(func: Function, name: str, args: Args, kwargs: Kwargs) -> Any:
    with core.stock_call(), torch.no_grad():
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        if not same_specs([a for a in lists if isinstance(a[0], DTensor)]):
            for members in zip(*lists, strict=False):
                _check_alike(name, members)
        local_args, local_kwargs = core.pytree.tree_map_only(DTensor, core.dtensor_local, (args, kwargs))
        return func(*local_args, **local_kwargs)


def _check_alike(name: str, members: Sequence[Tensor]) -> None:
    """Refuse tensors that have the shape of the parameter, which comes first, and other placements."""
    first = members[0]
    if not isinstance(first, DTensor):
        return
    for other in members[1:]:
        if other.shape != first.shape or first.dim() == 0:
            # a count of steps
            continue
        same = isinstance(other, DTensor) and other.placements == first.placements
        if not same or order_of(first) != order_of(other):
            placements = other.placements if isinstance(other, DTensor) else "a plain tensor"
            raise UnsupportedError(
                f"{name} on a parameter of shape {list(first.shape)} with placements {first.placements} is given a state with "
                f"other placements ({placements}); load optimizer states with optimizer.load_state_dict(), or use fused=False"
            )
