"""Views of parameters as global tensors that can be written to where autograd does not record them.

A view is read as a global tensor.  A write to it goes to the stored value of the parameter, not to a compute copy or to a
gathered value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_like, dtensor_local, pytree
from meshwright_dtensor.dispatch.dispatch import dispatch
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor, parameter_local
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.permuted import with_order_of
from meshwright_dtensor.stored.views import Origin, Step, frozen_arguments
from meshwright_dtensor.stored.writes import view_write_or_draw, write_out, write_whole
from meshwright_dtensor.tensor.compute_copy import computing
from meshwright_dtensor.tensor.foreach import one_by_one, writes_lists
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor, version_of, wrap
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs, kind_of

Tensor = torch.Tensor


class ParameterView(DetachedView):
    """A possible view of a parameter, or of another such view. `shown`: the global tensor that computations take."""

    shown: GlobalTensor
    _parameter: MeshParameter
    _seen: int
    _parent: MeshParameter | ParameterView
    _taken: Step

    def check_fresh(self) -> None:
        """Take the view again if the parameter was written to since."""
        if self._seen != _writes_to(self._parameter):
            origin = self.origin()
            if origin is not None:
                self._refresh(origin)
        if isinstance(self.shown, DetachedView):
            self.shown.check_fresh()

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if writes_lists(getattr(func, "__name__", "")):
            return one_by_one(func, args, kwargs)
        kind = kind_of(func)
        first = args[0] if args else None
        if kind in ("view", "alias") and isinstance(first, ParameterView):
            return as_parameter_views(func(*_shown(args), **_shown(kwargs)), func, args, kwargs)
        target = kwargs.get("tensor") if kind == "init" else first
        writes = kind in ("write", "fill", "init") or kwargs.get("inplace") is True
        if writes and isinstance(target, ParameterView):
            origin = target.origin()
            if origin is not None:
                result = write_whole(origin, func, target, args, kwargs)
                target._refresh(origin)
                return result
        if isinstance(kwargs.get("out"), ParameterView):
            return write_out(func, args, kwargs)
        return func(*_shown(args), **_shown(kwargs))

    def origin(self) -> Origin | None:
        """How the view was taken of the parameter; None if it is a copy on one device."""
        parent, step = self._parent, self._taken
        before = parent.origin() if isinstance(parent, ParameterView) else Origin.of(parent)
        origin = None if before is None else before.then(step.func, step.args, step.kwargs)
        return origin if isinstance(origin, Origin) or origin is None else origin[step.index or 0]

    def _refresh(self, origin: Origin) -> None:
        base = origin.base
        layout = layout_of_dtensor(base)
        with torch.no_grad():
            self.shown = origin(wrap(parameter_local(base, layout.states), layout))
        self._local, self._layout, self._memo = self.shown._local, self.shown._layout, None
        self._seen = _writes_to(self._parameter)


def viewed_or_written(func: Function, types: Any, args: Args, kwargs: Kwargs) -> Any:
    """Run ``func`` on a parameter if it takes a view that autograd does not record, writes or draws.

    NotImplemented if the parameter is an ordinary operand.
    """
    kind, grad = kind_of(func), torch.is_grad_enabled()
    first = args[0] if args else None
    if not isinstance(first, DTensor) or (kind == "fill" and isinstance(first, MeshParameter)):
        return NotImplemented
    if kind == "alias" and isinstance(first, MeshParameter) and func.__name__ == "detach":
        # detach() of the local tensor shares its version counter; stock DTensor's detach() does not
        local = dtensor_local(first).detach()
        return mesh_value(with_order_of(first, dtensor_like(local, first)))
    running = computing(first)
    if kind == "view":
        if not isinstance(first, MeshParameter) or (grad and first.requires_grad):
            return NotImplemented
        # a forward may need the view: it is one of the value that computations take
        if running or (grad and not _idle_copy(first)):
            return as_parameter_views(dispatch(MeshParameter, func, types, args, kwargs), func, args, kwargs)
    elif (grad or running) and kind in ("draw", "new_empty") and not _reads_shape_only(func, first):
        return NotImplemented
    return view_write_or_draw(func, args, kwargs)


def _reads_shape_only(func: Function, x: DTensor) -> bool:
    """Whether a draw reads no more than the stored shape and dtype, so that autograd has nothing to record."""
    return (func.__name__ == "new_empty" or func.__name__.endswith("_like")) and _idle_copy(x)


def _idle_copy(x: DTensor) -> bool:
    """Whether a parameter has a compute copy and no forward runs: it then stands for its stored value."""
    copy = x._copy if isinstance(x, MeshParameter) else None
    return copy is not None and not copy.computing


def _shown(tree: Any) -> Any:
    def shown(view: ParameterView) -> GlobalTensor:
        view.check_fresh()
        return view.shown

    return pytree.tree_map_only(ParameterView, shown, tree)


def _writes_to(base: MeshParameter) -> int:
    return version_of(dtensor_local(base)) + (0 if base._copy is None else base._copy.touched)


def as_parameter_views(result: Any, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The views that ``func`` gave of a parameter or of a view of one, as ParameterViews."""
    # p.T is p.permute(1, 0), and p.flatten(1) may be p
    if isinstance(result, (ParameterView, MeshParameter)):
        return result
    rest, options = frozen_arguments((args[1:], kwargs))
    if isinstance(result, GlobalTensor):
        return _view(result, args[0], Step(func, rest, options))
    return type(result)([_view(v, args[0], Step(func, rest, options, i)) for i, v in enumerate(result)])


def _view(shown: GlobalTensor, parent: Any, taken: Step) -> ParameterView:
    view: Any = wrap(shown._local, shown._layout, ParameterView)
    view.shown, view._parent, view._taken = shown, parent, taken
    view._parameter = parent._parameter if isinstance(parent, ParameterView) else parent
    view._seen = _writes_to(view._parameter)
    return view  # type: ignore[no-any-return]
