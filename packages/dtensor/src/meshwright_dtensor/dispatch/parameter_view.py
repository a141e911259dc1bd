"""Views of parameters as global tensors: what is not recorded by autograd may be written to, also through a view.

Such a view is read as the global tensor that it is.  A write goes to the stored value of the parameter, not to its compute
copy or to what had to be gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_from, dtensor_local, dtensor_spec, pytree
from meshwright_dtensor.dispatch.dispatch import dispatch
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor, parameter_local
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.permuted import with_order_of
from meshwright_dtensor.stored.views import Origin, frozen_arguments
from meshwright_dtensor.stored.writes import view_write_or_draw, write_out, write_whole
from meshwright_dtensor.tensor.compute_copy import computing
from meshwright_dtensor.tensor.foreach import one_by_one, writes_lists
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor, version_of, wrap
from meshwright_dtensor.trace.function_kinds import kind_of

Tensor = torch.Tensor


class ParameterView(DetachedView):
    """What a function of torch gave of a parameter, or of such a view, that may be a view.

    Attributes:
        shown: the global tensor that it is to computations.
    """

    shown: GlobalTensor
    _parameter: MeshParameter
    _seen: int
    _parent: MeshParameter | ParameterView
    _taken: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]

    def check_fresh(self) -> None:
        """Look again if the parameter was written to after the view was taken."""
        if self._seen != _writes_to(self._parameter):
            origin = self.origin()
            if origin is not None:
                self._look_again(origin)
        if isinstance(self.shown, DetachedView):
            self.shown.check_fresh()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if writes_lists(getattr(func, "__name__", "")):
            return one_by_one(func, args, kwargs)
        kind = kind_of(func)
        first = args[0] if args else None
        if kind in ("view", "alias") and isinstance(first, ParameterView):
            return remembered(func(*_shown(args), **_shown(kwargs)), func, args, kwargs)
        target = kwargs.get("tensor") if kind == "init" else first
        writes = kind in ("write", "fill", "init") or kwargs.get("inplace") is True
        if writes and isinstance(target, ParameterView):
            origin = target.origin()
            if origin is not None:
                write_whole(origin, func, target, args, kwargs)
                target._look_again(origin)
                return None if getattr(func, "__name__", "") == "__setitem__" else target
        if isinstance(kwargs.get("out"), ParameterView):
            return write_out(func, args, kwargs)
        return func(*_shown(args), **_shown(kwargs))

    def origin(self) -> Origin | None:
        """Where it comes from; None where one device has copied on the way."""
        parent, (func, args, kwargs, index) = self._parent, self._taken
        before = parent.origin() if isinstance(parent, ParameterView) else Origin.of(parent)
        found = None if before is None else before.then(func, args, kwargs)
        return found if isinstance(found, Origin) or found is None else found[index or 0]

    def _look_again(self, origin: Origin) -> None:
        base = origin.base
        layout = layout_of_dtensor(base)
        with torch.no_grad():
            self.shown = origin(wrap(parameter_local(base, layout.states), layout))
        self._local, self._layout, self._memo = self.shown._local, self.shown._layout, None
        self._seen = _writes_to(self._parameter)


def viewed_or_written(
    func: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """``func`` of a parameter, where it takes a view that autograd does not record, writes or draws.

    NotImplemented where a parameter is an operand like any other.
    """
    kind, grad = kind_of(func), torch.is_grad_enabled()
    first = args[0] if args else None
    if not isinstance(first, DTensor) or (kind == "fill" and isinstance(first, MeshParameter)):
        return NotImplemented
    if kind == "alias" and isinstance(first, MeshParameter) and func.__name__ == "detach":
        local = dtensor_local(
            first
        ).detach()  # whose writes are counted as the parameter's: stock DTensor forgets that
        return mesh_value(with_order_of(first, dtensor_from(local, dtensor_spec(first))))
    running = computing(first)
    if kind == "view":
        if not isinstance(first, MeshParameter) or (grad and first.requires_grad):
            return NotImplemented
        if running or (
            grad and not _idle_copy(first)
        ):  # a forward may take it: the value that is computed with
            return remembered(dispatch(MeshParameter, func, types, args, kwargs), func, args, kwargs)
    elif (grad or running) and kind in ("draw", "new_empty"):
        asks = kind == "new_empty" or func.__name__.endswith(
            "_like"
        )  # for shape and dtype only: autograd has no part in it
        if not asks or not _idle_copy(first):
            return NotImplemented
    return view_write_or_draw(func, args, kwargs)


def _idle_copy(x: DTensor) -> bool:
    """Whether a parameter has a compute copy and no forward is running, so that it is its stored value, dtype and all."""
    copy = x._copy if isinstance(x, MeshParameter) else None
    return copy is not None and not copy.computing


def _shown(tree: Any) -> Any:
    return pytree.tree_map_only(ParameterView, _one_shown, tree)


def _one_shown(view: ParameterView) -> GlobalTensor:
    view.check_fresh()
    return view.shown


def _writes_to(base: MeshParameter) -> int:
    return version_of(dtensor_local(base)) + (0 if base._copy is None else base._copy.touched)


def remembered(result: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``result``, what ``func`` made of a parameter or of a view of one, as views that know where they come from."""
    if isinstance(result, ParameterView):  # p.T is p.permute(1, 0)
        return result
    parent, *rest = args
    args, kwargs = (parent, *frozen_arguments(rest)), frozen_arguments(kwargs)
    if isinstance(result, GlobalTensor):
        return _view(result, (func, args, kwargs, None))
    return type(result)([_view(one, (func, args, kwargs, index)) for index, one in enumerate(result)])


def _view(
    shown: GlobalTensor, taken: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]
) -> ParameterView:
    view: Any = wrap(shown._local, shown._layout, ParameterView)
    func, (parent, *rest), kwargs, index = taken
    view.shown, view._parent, view._taken = shown, parent, (func, tuple(rest), kwargs, index)
    view._parameter = parent._parameter if isinstance(parent, ParameterView) else parent
    view._seen = _writes_to(view._parameter)
    return view  # type: ignore[no-any-return]
