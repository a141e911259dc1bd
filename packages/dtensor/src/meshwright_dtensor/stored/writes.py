"""Writes to stored DTensors (parameters, gradients, optimizer states) and to views of them.

Elementwise writes run on each rank's part, also through a view that shares the memory of its base.  For any other write
the whole value is gathered, viewed in the same way and written to as on one device; each rank then keeps its part.  Such
writes are collective calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch import core
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.sharding.boxes import read_region
from meshwright_dtensor.stored.elementwise import assigns_under_mask, is_elementwise, on_local_parts
from meshwright_dtensor.stored.gather import (
    as_global,
    gather_stored,
    run_by_rules,
    stored_layout,
    whole_value,
)
from meshwright_dtensor.stored.mesh_value import MeshValue, mesh_value
from meshwright_dtensor.stored.permuted import local_part_of, permuted_layout, with_order_of
from meshwright_dtensor.stored.views import Origin
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs, kind_of

Tensor = torch.Tensor

_OPERATORS = {"truediv": "div", "floordiv": "floor_divide", "mod": "remainder"}


def view_write_or_draw(func: Function, args: Args, kwargs: Kwargs | None, views: bool = True) -> Any:
    """Run ``func`` on a stored DTensor that is no view, if it takes a view, writes or draws.

    NotImplemented for other functions, and for writes that stock DTensor or the elementwise path can do.
    """
    kind = kind_of(func)
    if not kind or kind == "alias" or (kind == "view" and not views):
        return NotImplemented
    kwargs = kwargs or {}
    first = args[0] if args else None
    if kind == "view":
        view = view_of(first, func, args[1:], kwargs) if isinstance(first, DTensor) else NotImplemented
        # stock DTensor would take a list as an index for a plain tensor
        if view is NotImplemented and func.__name__ == "__getitem__" and not mixes_plain_tensors(args, {}):
            return run_by_rules(func, args, kwargs)
        return view
    if kind == "set data":
        return set_data(*args)
    if kind == "write" and _is_plain_write(first, func.__name__, args, kwargs):
        return NotImplemented
    if kind in ("write", "init"):
        return write(func, args, kwargs)
    if kind == "fill":
        if isinstance(first, DTensor):
            _refuse_leaf(first)
        run_by_rules(func, args, kwargs)
        return first
    if kind == "new_empty":
        # torch.nn.init changes the shape of the result in place, which only a global tensor can
        with torch.no_grad():
            return func(as_global(first), *args[1:], **kwargs)
    return run_by_rules(func, args, kwargs)


def _is_plain_write(first: Any, name: str, args: Args, kwargs: Kwargs) -> bool:
    """Whether a write is elementwise over DTensors only, or assigns a number under a mask."""
    if isinstance(first, DTensor) and _is_elementwise(name) and not mixes_plain_tensors(args, kwargs):
        return True
    return name == "__setitem__" and assigns_under_mask(*args)


class MeshView(MeshValue):
    """A view of a stored DTensor: a write reaches its base, and a read gives the base's present value."""

    _origin: Origin
    _shares: bool
    """Whether its local tensor shares memory with that of the base."""

    def current(self) -> DTensor:
        """The present value as a tensor that is no view (a collective call where the memory is not shared)."""
        if not self._shares:
            value, _ = self._origin.value()
            core.set_dtensor_parts(self, core.dtensor_local(value), core.copied_spec(value))
        return mesh_value(core.dtensor_like(core.dtensor_local(self), self))

    def requires_grad_(self, requires_grad: bool = True) -> MeshValue:
        """Switch the gradient on: a leaf in the memory of the base. Raises UnsupportedError: it is not in that memory."""
        if requires_grad and not self._shares:
            raise UnsupportedError(
                f"requires_grad_() of a view of shape {list(self.shape)} of a sharded tensor, which had to be gathered: writes to "
                "that tensor would not reach it; use x.detach().clone().requires_grad_()"
            )
        if requires_grad:
            self.__class__ = MeshValue  # type: ignore[assignment]
        return MeshValue.requires_grad_(self, requires_grad)

    def to_local(self, **options: Any) -> Tensor:
        """This rank's part."""
        return self.current().to_local(**options)

    def full_tensor(self, **options: Any) -> Tensor:
        """The whole value on every rank (a collective call)."""
        return self.current().full_tensor(**options)

    def redistribute(self, *args: Any, **options: Any) -> DTensor:
        """As stock DTensor does."""
        return self.current().redistribute(*args, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.current()
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copy: DTensor = self.current().__deepcopy__({})  # type: ignore[operator]
        memo[id(self)] = copy
        return copy


def view_of(x: DTensor, func: Function, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """``func(x, *args)`` as views of the base of ``x``; NotImplemented where one device copies."""
    origin = x._origin if isinstance(x, MeshView) else Origin.of(x)
    origins = origin.then(func, args, kwargs)
    if origins is None:
        return NotImplemented
    return _view(origins) if isinstance(origins, Origin) else tuple(map(_view, origins))


def _view(origin: Origin) -> MeshView:
    value, shares = origin.value()
    # a copied spec: the fast path compares specs by identity and must not take the view for its base
    view: Any = core.dtensor_from(core.dtensor_local(value), core.copied_spec(value))
    view.__class__ = MeshView
    view._origin, view._shares = origin, shares
    return view  # type: ignore[no-any-return]


def write(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Run a function that writes to its first argument, and return its result on one device."""
    name = getattr(func, "__name__", "")
    target = args[0] if args else kwargs.get("tensor")
    # a plain tensor, which takes whole values
    if not isinstance(target, DTensor):
        return func(*core.pytree.tree_map(whole_value, args), **core.pytree.tree_map(whole_value, kwargs))
    if isinstance(target, MeshView):
        origin = target._origin
        if target._shares and args:
            rest, options = core.pytree.tree_map_only(MeshView, MeshView.current, (args[1:], kwargs))
            with core.stock_call():
                _refuse_leaf(origin.base)
                if on_local_parts(func, name, (target, *rest), options) is not NotImplemented:
                    # torch has counted the write for the view only
                    core.count_write(origin.base)
                    return target
    else:
        origin = Origin.of(target)
        if args and _is_elementwise(name):
            _refuse_leaf(target)
            return _write_parts(func, target, args, kwargs)
    return write_whole(origin, func, target, args, kwargs)


def write_out(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``out=`` with stored DTensors: compute without it, then write the result into it.

    Raises UnsupportedError: the result has another shape, to which torch would resize ``out``.
    """
    rest = {key: value for key, value in kwargs.items() if key != "out"}
    result, out = func(*args, **rest), kwargs["out"]
    outs, results = (out, result) if isinstance(out, (tuple, list)) else ((out,), (result,))
    for target, value in zip(outs, results, strict=True):
        if torch.is_grad_enabled() and value.requires_grad:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)}: functions with out=... do not support automatic differentiation, but one of "
                "the arguments requires grad; call it under torch.no_grad(), or without out="
            )
        if target.shape != value.shape:
            raise UnsupportedError(
                f"out= of shape {list(target.shape)} does not fit the result of shape {list(value.shape)} of "
                f"{getattr(func, '__name__', func)}, and a tensor on a mesh is not resized; pass one of the right shape"
            )
        target.copy_(value.detach())
    return out


def _refuse_leaf(base: DTensor) -> None:
    if torch.is_grad_enabled() and base.requires_grad:
        raise RuntimeError(
            "a leaf Variable that requires grad, or a view of one, is being used in an in-place operation; write to it under "
            "torch.no_grad()"
        )


def _is_elementwise(name: str) -> bool:
    if name.startswith("__i") and name.endswith("__"):
        plain = name[3:-2]
        return is_elementwise(_OPERATORS.get(plain, plain))
    return is_elementwise(name)


def mixes_plain_tensors(args: Args, kwargs: Mapping[str, Any]) -> bool:
    """Whether the arguments contain plain or global tensors with dims, which stock DTensor does not accept."""
    for x in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(x, Tensor):
            if not isinstance(x, DTensor) and x.dim():
                return True
        elif isinstance(x, (tuple, list)) and mixes_plain_tensors(tuple(x), {}):
            return True
    return False


def _write_parts(func: Function, target: DTensor, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """An elementwise write, on this rank's part of everything, and the result of one device."""
    layout = stored_layout(target)

    def part(x: Any) -> Any:
        if x is target:
            return core.dtensor_local(target)
        if isinstance(x, DTensor) and x.shape == layout.shape and not isinstance(x, MeshView):
            return local_part_of(x, layout)
        x = whole_value(x)
        return read_region(x.expand(layout.shape), layout.region) if isinstance(x, Tensor) and x.dim() else x

    parts, options = core.pytree.tree_map(part, (args, dict(kwargs)))
    with torch.no_grad():
        result = func(*parts, **options)
    return target if isinstance(result, Tensor) else result


def write_whole(origin: Origin, func: Function, target: Tensor, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Write to the gathered value of the base, through the same view as ``target``; every rank keeps its part.

    Returns the result of one device: ``target``, or None of ``__setitem__``.
    Raises UnsupportedError: the function would change the shape, or autograd would have to record it.
    """
    base = origin.base
    _refuse_leaf(base)
    layout, local = stored_layout(base), core.dtensor_local(base).detach()
    if "P" in layout.states:
        raise UnsupportedError(
            f"a write to partial sums ({layout!r}) has no meaning for their sum; use x.redistribute(...) first"
        )
    given, options = core.pytree.tree_map(
        lambda x: x if x is target else whole_value(x), (args, dict(kwargs))
    )
    with torch.no_grad():
        whole = gather_stored(base)
        part = origin(whole)
        shape, strides = part.shape, part.stride()
        given, options = core.pytree.tree_map(lambda x: part if x is target else x, (given, options))
        result = func(*given, **options)
        if part.shape != shape or part.stride() != strides:
            raise UnsupportedError(
                f"{getattr(func, '__name__', func)} would change the shape of a stored tensor from {list(shape)} to "
                f"{list(part.shape)} in place, or its strides from {strides} to {part.stride()}; use the form that gives a new "
                "tensor"
            )
        if not core.share_memory(whole, local):
            local.copy_(read_region(whole, layout.region))
    return target if isinstance(result, Tensor) else result


def set_data(target: DTensor, value: Any) -> None:
    """``target.data = value``: new memory with this rank's part of the global value.

    It is that of `value` where that is a tensor over the mesh in the same layout, and a copy otherwise. What was taken before
    (``target.data``, ``target.detach()``) keeps the old memory, as on one device.

    Raises UnsupportedError: no tensor, or one of another shape or dtype.
    """
    if isinstance(target, MeshView):
        raise UnsupportedError(
            "x[index].data = value would give new memory to a view alone; use x[index] = value, which reaches x"
        )
    check_data(target, value)
    local = core.dtensor_local(target)
    part = _part_in_layout_of(target, value)
    if part is None:
        part = torch.empty_like(local)
        with torch.no_grad():
            mesh_value(with_order_of(target, core.dtensor_like(part, target))).copy_(value.detach())
    local.data = part
    core.count_write(target)


def _part_in_layout_of(target: DTensor, value: Any) -> Tensor | None:
    """This rank's part of `value` in its own memory; None if it has another layout or memory order."""
    if not isinstance(value, DTensor) or isinstance(value, MeshView):
        return None
    same = value.placements == target.placements and permuted_layout(value) is permuted_layout(target)
    part = core.dtensor_local(value).detach()
    return part if same and part.stride() == core.dtensor_local(target).stride() else None


def check_data(target: Tensor, value: Any) -> None:
    """Raise UnsupportedError unless `target.data = value` keeps shape and dtype."""
    with core.stock_call():
        # of a parameter, the stored dtype
        dtype = core.dtensor_local(target).dtype if isinstance(target, DTensor) else target.dtype
        wanted = f"{dtype} {list(target.shape)}"
        given = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    if given != wanted:
        raise UnsupportedError(
            f"parameter.data = value takes the global value, {wanted}, the same on every rank, and is given {given}; give all of "
            "it, or copy this rank's part into parameter.to_local() under torch.no_grad()"
        )
