"""Tensor methods and attributes that are no computation: ``.grad``, ``.data``, ``backward()``, hooks, strides, storage."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_like, dtensor_local, pytree, stock_call
from meshwright_dtensor.comm.collectives import FORWARD_MODE
from meshwright_dtensor.dispatch.gathered_views import source, whole
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.layout import Layout, layout_of, replicated_layout
from meshwright_dtensor.parameter import MeshParameter, gradient_of
from meshwright_dtensor.sharding.boxes import dim_order_of
from meshwright_dtensor.sharding.states import States, complete
from meshwright_dtensor.stored.gather import stored_layout
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.tensor.compute_copy import is_of_copy, mark_as_copy
from meshwright_dtensor.tensor.foreach import one_by_one, writes_lists
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor, detached, local_in, wrap
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs, differentiated

Tensor = torch.Tensor
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_ON_LOCAL = frozenset(
    "is_contiguous is_floating_point is_complex is_signed element_size is_inference get_device is_pinned is_neg is_conj "
    "is_distributed is_same_size is_shared _is_view retain_grad requires_grad_ is_sparse".split()
)
_STORAGE = frozenset(
    "data_ptr untyped_storage storage resize_ resize_as_ share_memory_ typed_storage".split()
)


def _on_local(func: Function, args: Args, kwargs: Kwargs) -> Any:
    first = args[0]
    # a parameter would come here again
    with stock_call():
        result = func(*[x._local if isinstance(x, GlobalTensor) else x for x in args], **kwargs)
    return first if isinstance(first, GlobalTensor) and result is first._local else result


def _backward(func: Function, args: Args, kwargs: Kwargs) -> None:
    """``loss.backward()``: the gradient of a global value is that of the whole; a partial sum is reduced first."""
    x = args[0]
    if isinstance(x, DTensor):
        # backward() of a leaf is that of a view of it
        with torch.enable_grad():
            x = x.view_as(x)
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    layout = x._layout
    gradient = given.pop("gradient", None)
    if gradient is None and layout.shape.numel() != 1:
        raise RuntimeError("grad can be implicitly created only for scalar outputs")
    states = complete(layout.states)
    local = local_in(x, states)
    if gradient is not None:
        given["gradient"] = _local_in(gradient, states, layout)
    inputs = given.pop("inputs", None)
    if inputs is not None:
        given["inputs"] = [_leaf(t) for t in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    local.backward(**given)


def _local_in(g: Tensor, states: States, layout: Layout) -> Tensor:
    """The local tensor in ``states`` of a gradient of a value in ``layout``; a plain tensor is the global value."""
    context = layout.context
    return local_in(g if isinstance(g, GlobalTensor) else wrap(g, replicated_layout(context, g)), states)


def _leaf(t: Tensor) -> Tensor:
    if isinstance(t, GlobalTensor):
        return t._local
    # of a mesh parameter
    copy = getattr(t, "_copy", None)
    if copy is not None:
        return copy.leaf()  # type: ignore[no-any-return]
    return dtensor_local(t) if isinstance(t, DTensor) else t


def _as_gradient(t: Any, g: Tensor | None) -> Tensor | None:
    """The gradient at the leaf of a global tensor or DTensor in the form of that tensor; of others, as it is."""
    if isinstance(t, GlobalTensor) and g is not None:
        return _gradient_in(t._layout, g)
    if isinstance(t, DTensor) and g is not None:
        copy = getattr(t, "_copy", None)
        if copy is not None and not (g.requires_grad and torch.is_grad_enabled()):
            g = copy.stored_gradient(g)
        if isinstance(t, MeshParameter):
            return gradient_of(t, g)
        recorded = g.requires_grad and torch.is_grad_enabled()
        return wrap(g, stored_layout(t)) if recorded else mesh_value(dtensor_like(g, t))
    return g


def _gradient_in(layout: Layout, g: Tensor) -> GlobalTensor:
    """The gradient of a value in ``layout``, of whose local tensor it is ``g``."""
    return wrap(g, layout_of(layout.context, _gradient_states(layout), layout.shape, g.dtype))


def _gradient_states(layout: Layout) -> tuple[Any, ...]:
    """The dual states, so that the gradient of a gradient has the states of the value."""
    return tuple({"X": "P", "P": "X"}.get(s, s) if isinstance(s, str) else s for s in layout.states)


def _gradient(func: Function, args: Args, kwargs: Kwargs) -> Any:
    return _as_gradient(args[0], args[0]._local.grad)


def _set_gradient(func: Function, args: Args, kwargs: Kwargs) -> None:
    x, g = args
    x._local.grad = None if g is None else _local_in(g, _gradient_states(x._layout), x._layout)


def _register_hook(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A gradient hook sees the gradient as a global tensor and may return another one."""
    x, hook = args
    if isinstance(x, DTensor):
        with stock_call():
            return func(*args, **kwargs)

    # without the tensor: autograd's graph holds the hook, the tensor the graph, and torch does not collect such a cycle
    layout = x._layout

    def run(g: Tensor) -> Tensor | None:
        new = hook(_gradient_in(layout, g))
        return None if new is None else _local_in(new, _gradient_states(layout), layout)

    return x._local.register_hook(run)


def _autograd_grad(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``torch.autograd.grad`` with respect to global tensors and mesh parameters."""
    names = "outputs inputs grad_outputs retain_graph create_graph only_inputs allow_unused is_grads_batched".split()
    given = dict(zip(names, args, strict=False)) | kwargs
    if given.pop("is_grads_batched", False):
        return _one_by_one(func, given)
    outputs = [given.pop("outputs")] if isinstance(given["outputs"], Tensor) else list(given.pop("outputs"))
    inputs = differentiated(given.pop("inputs"))
    seeds = given.pop("grad_outputs", None)
    seeds = [None] * len(outputs) if seeds is None else [seeds] if isinstance(seeds, Tensor) else list(seeds)
    locals_, local_seeds = [], []
    for out, seed in zip(outputs, seeds, strict=True):
        if not isinstance(out, GlobalTensor):
            locals_.append(out)
            local_seeds.append(seed)
            continue
        states = complete(out._layout.states)
        locals_.append(local_in(out, states))
        local_seeds.append(None if seed is None else _local_in(seed, states, out._layout))
    # a Function of the user has whole values of parameters, while the modules it calls read the parameters themselves
    sources = [source(t) for t in inputs]
    gradients = torch.autograd.grad(locals_, [_leaf(t) for t in sources], local_seeds, **given)
    results = map(_as_gradient, sources, gradients)
    return tuple(g if s is t else whole(g) for s, t, g in zip(sources, inputs, results, strict=True))


def _one_by_one(func: Function, given: dict[str, Any]) -> tuple[Tensor | None, ...]:
    """``is_grads_batched``: torch would map over the gradients of the outputs at once, and collectives cannot be mapped."""
    seeds = given.pop("grad_outputs")
    seeds = [seeds] if isinstance(seeds, Tensor) else list(seeds)
    count = next(len(seed) for seed in seeds if seed is not None)
    rows = []
    for i in range(count):
        # the graph is needed for the next one
        kept = {"retain_graph": True} if i + 1 < count else {}
        of_row = [None if seed is None else seed[i] for seed in seeds]
        rows.append(_autograd_grad(func, (), {**given, **kept, "grad_outputs": of_row}))
    return tuple(None if each[0] is None else torch.stack(each) for each in zip(*rows, strict=True))


def _stride(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Strides of the global value in the memory order of the local one."""
    x = args[0]
    shape, local = x._layout.shape, x._local.stride()
    strides = [0] * len(shape)
    step = 1
    for d in reversed(dim_order_of(x._local)):
        strides[d] = step if local[d] else 0
        step *= shape[d] if local[d] else 1
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return tuple(strides) if dim is None else strides[dim]


def _storage(func: Function, args: Args, kwargs: Kwargs) -> Any:
    x = next(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, GlobalTensor))
    raise UnsupportedError(
        f"{getattr(func, '__name__', func)} asks for the storage of a global tensor ({x._layout!r}), which holds this rank's part "
        "only; use x.to_local() for the part or x.full_tensor() for the whole value"
    )


def _forward_mode(func: Function, args: Args, kwargs: Kwargs) -> Any:
    raise UnsupportedError(FORWARD_MODE)


def _cut_off(x: GlobalTensor, local: Tensor) -> GlobalTensor:
    """The global tensor of ``local``, the local tensor of ``x`` without its autograd history."""
    # a detached tensor has no _base
    if is_of_copy(x._local):
        mark_as_copy(local)
    return detached(local, x._layout, x) if isinstance(x, DetachedView) else wrap(local, x._layout)


class _EmptyMemo(dict[Any, Any]):
    """A memo that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


def _data(func: Function, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    other = _cut_off(x, x._local.data)
    # they share memory but not a version counter, so neither may keep converted values
    x._memo, other._memo = _EmptyMemo(), _EmptyMemo()
    return other


def _set_data(func: Function, args: Args, kwargs: Kwargs) -> None:
    x, new = args
    if not isinstance(new, GlobalTensor) or new._layout is not x._layout:
        raise UnsupportedError(
            f"x.data of a global tensor ({x._layout!r}) can only be set to one of the same layout; use x.copy_(value) instead"
        )
    x._local.data = new._local


def _property(func: Function, args: Args, kwargs: Kwargs) -> Any:
    return func(args[0]._local, *args[1:])


def _conjugate_transposed(func: Function, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if x.dim() not in (0, 2):
        x._layout.template.H  # noqa: B018  (torch's own refusal, in its own words)
    return torch.adjoint(x) if x.dim() else torch.conj(x)


def _reshape_in_place(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """``x.t_()`` and the like: the same object becomes ``x.t()``."""
    x = args[0]
    if torch.is_grad_enabled() and x.is_leaf and x.requires_grad:
        raise RuntimeError(
            f"a leaf Variable that requires grad is being used in an in-place operation, {func.__name__}; use the form that gives "
            "a new tensor"
        )
    changed = getattr(torch.Tensor, func.__name__.removesuffix("_"))(*args, **kwargs)
    x._local, x._layout, x._memo = changed._local, changed._layout, None
    x.__dict__.pop("_middle", None)
    return x


# attributes that compute: the function has a local program; the getter on the local tensor would return one rank's part
_GETTERS: dict[Any, tuple[Handler, Handler | None]] = {
    torch.Tensor.grad: (_gradient, _set_gradient),
    torch.Tensor._grad: (_gradient, _set_gradient),
    torch.Tensor.data: (_data, _set_data),
    torch.Tensor.T: (lambda f, a, k: a[0].permute(tuple(reversed(range(a[0].dim())))), None),
    torch.Tensor.mT: (lambda f, a, k: a[0].transpose(-1, -2) if a[0].dim() else a[0].permute(()), None),
    torch.Tensor.H: (_conjugate_transposed, None),
    torch.Tensor.mH: (lambda f, a, k: torch.adjoint(a[0]), None),
    torch.Tensor.real: (lambda f, a, k: torch.real(a[0]), None),
    torch.Tensor.imag: (lambda f, a, k: torch.imag(a[0]), None),
    # asked of the class, past the property
    torch.Tensor.shape: (lambda f, a, k: a[0].shape, None),
    torch.Tensor.nbytes: (lambda f, a, k: a[0].numel() * a[0].element_size(), None),
    torch.Tensor._base: (lambda f, a, k: None, None),
}


def _handlers() -> dict[Any, Handler]:
    table: dict[Any, Handler] = {
        torch.Tensor.backward: _backward,
        torch.Tensor.register_hook: _register_hook,
        torch.autograd.grad: _autograd_grad,
        torch.Tensor.stride: _stride,
        torch.Tensor.is_same_size: lambda f, a, k: a[0].shape == (a[1] if len(a) > 1 else k["other"]).shape,
        **dict.fromkeys(
            (torch.Tensor.detach, torch.detach), lambda f, a, k: _cut_off(a[0], a[0]._local.detach())
        ),
    }
    for name in ("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"):
        table[getattr(torch.Tensor, name)] = _reshape_in_place
    for getter, (read, write) in _GETTERS.items():
        table[getter.__get__] = read
        if write is not None:
            table[getter.__set__] = write
    return table


HANDLERS = MappingProxyType(_handlers())
"""Handlers by function object."""


_BY_NAME: dict[str, Handler] = {
    **dict.fromkeys(_STORAGE, _storage),
    **dict.fromkeys(_ON_LOCAL, _on_local),
    **dict.fromkeys(("_make_dual", "make_dual"), _forward_mode),
    **dict.fromkeys(("__get__", "__set__", "__delete__"), _property),
}


def by_name(name: str) -> Handler | None:
    """The handler for a function name, None if it has none."""
    return one_by_one if writes_lists(name) else _BY_NAME.get(name)
