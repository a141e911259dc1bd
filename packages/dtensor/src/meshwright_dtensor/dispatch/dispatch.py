"""Runs a torch call on global tensors: builds its key, finds or derives its local program, runs it on the local tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import any_autocast, dtensor_local
from meshwright_dtensor._torch.functional import is_recorded
from meshwright_dtensor._torch.modes import functorch_active, kept_dispatch_keys
from meshwright_dtensor.comm.log import NOWHERE, CommLog, current_site
from meshwright_dtensor.devices import autocast_types
from meshwright_dtensor.dispatch import fallback, tensor_methods
from meshwright_dtensor.dispatch.call_key import AS_THEY_ARE, BY_NAME, first_places, freeze, repeats
from meshwright_dtensor.dispatch.derive import TensorCall, derive
from meshwright_dtensor.dispatch.gathered_views import ViewWrite
from meshwright_dtensor.dispatch.local_program.program import build, note, remember
from meshwright_dtensor.dispatch.local_program.run import Runner, runner_of
from meshwright_dtensor.dispatch.planned_calls import Target
from meshwright_dtensor.dispatch.value_readers import READERS
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, replicated_layout
from meshwright_dtensor.model.compiled import refuse_traced_call
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor, parameter_local
from meshwright_dtensor.propagate.choose import Underivable
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor
from meshwright_dtensor.tensor.staged import StagedOperand
from meshwright_dtensor.trace.function_kinds import DATA_DEPENDENT, Args, Function, Kwargs, is_in_place
from meshwright_dtensor.trace.graph import function_name
from meshwright_dtensor.trace.module_stack import FRAMES, Frames
from meshwright_dtensor.trace.one_device import OF_A_GROUP, collective_of, in_model

Tensor = torch.Tensor
_NORMS = (F.batch_norm, F.instance_norm)
_ON_MESH = frozenset({GlobalTensor, MeshParameter})


def dispatch(
    cls: type,
    func: Function,
    types: Any,
    args: Args = (),
    kwargs: Kwargs | None = None,
    method: Function | None = None,
) -> Any:
    """``__torch_function__`` of global tensors: run a torch function that has one, or a mesh parameter, among its arguments.

    ``method``: torch's method for the call, if it has not come through torch; it makes a call whose program is not known.
    """
    tensors: Any = args
    key: tuple[Any, ...]
    count = 0 if kwargs else len(args)
    # the two forms of most calls, without a loop
    if count == 1 and type(args[0]) is GlobalTensor:
        layout = args[0]._layout
        context, key = layout.context, (func, layout)
    elif count == 2 and type(args[0]) is GlobalTensor is type(args[1]) and args[0] is not args[1]:
        layout = args[0]._layout
        context, key = layout.context, (func, layout, args[1]._layout)
    else:
        try:
            tensors, key, context = _key_of(func, args, kwargs)
        except StagedOperand:
            # their own rules run the call
            return NotImplemented if method is None else method(*args, **kwargs or {})
    if any_autocast():
        key = (*key, tuple([(d, torch.get_autocast_dtype(d)) for d in autocast_types()]))
    target = None
    if Frames.with_rules and (stack := FRAMES.stack):
        target = stack[-1].target(func)
        if target is not None:
            key = (*key, target)
    run = context.programs.get(key)
    kwargs = kwargs or {}
    if run is None:
        if method is not None:
            return _by_torch(func, method, args, kwargs)
        result = _run_special(func, args, kwargs)
        if result is not NotImplemented:
            return result
        context = _context_of(tensors)
        run = _make(context, func, args, kwargs, tensors, target)
        remember(context, key, run)
    site = NOWHERE
    if CommLog._active:
        site = current_site(function_name(func))
    return run(args, kwargs, tensors, site)


def _by_torch(func: Function, method: Function, args: Args, kwargs: Kwargs) -> Any:
    """The call by torch's own method, which asks for it again."""
    if FRAMES.stack:
        FRAMES.stack[-1].recall(func)
    return method(*args, **kwargs)


def _key_of(
    func: Function, args: Args, kwargs: Kwargs | None
) -> tuple[list[Any], tuple[Any, ...], MeshContext]:
    """The tensors of a call, its key and its mesh. Raises StagedOperand: the rules of one of the tensors run the call."""
    parts: list[Any] = [func]
    tensors: list[Any] = []
    for a in args:
        kind = type(a)
        if kind is GlobalTensor:
            tensors.append(a)
            parts.append(a._layout)
        elif kind in AS_THEY_ARE:
            parts.append(a)
        elif kind is MeshParameter:
            tensors.append(a)
            parts.append(a._key)
        else:
            parts.append(freeze(a, tensors))
    if kwargs:
        parts.append(BY_NAME)
        for name, a in kwargs.items():
            parts.append(name)
            parts.append(a if type(a) in AS_THEY_ARE else freeze(a, tensors))
    if len(tensors) > 1 and (repeated := repeats(tensors)):
        parts.append(repeated)
    on_mesh = tensors and type(tensors[0]) in _ON_MESH
    return tensors, tuple(parts), tensors[0]._layout.context if on_mesh else _context_of(tensors)


def _run_special(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """The result of a call that has no local program: tensor methods, functorch transforms, ``out=``; else NotImplemented."""
    handler = tensor_methods.HANDLERS.get(func) or tensor_methods.by_name(getattr(func, "__name__", ""))
    if handler is not None:
        return handler(func, args, kwargs)
    refuse_traced_call()
    if (getattr(func, "__module__", None) or "").startswith("torch.distributed"):
        return fallback.run_collective(func, args, kwargs)
    if (collective := collective_of(func, args)) and in_model():
        raise UnsupportedError(OF_A_GROUP.format("the model", collective))
    if functorch_active():
        return fallback.run_on_full(func, args, kwargs)
    if kwargs.get("out") is not None:
        return fallback.run_with_out(func, args, kwargs, lambda f, a, k: dispatch(GlobalTensor, f, (), a, k))
    return READERS[func](*args, **kwargs) if func in READERS else NotImplemented


def _context_of(tensors: Sequence[Any]) -> MeshContext:
    context: MeshContext | None = None
    for t in tensors:
        if isinstance(t, (GlobalTensor, MeshParameter)):
            here = t._layout.context
        elif isinstance(t, DTensor):
            here = layout_of_dtensor(t).context
        else:
            continue
        if context is not None and here is not context and here.mesh != context.mesh:
            raise UnsupportedError(
                f"a call mixes tensors over two meshes, {context.mesh} and {here.mesh}; move one with .full_tensor() first"
            )
        context = context or here
    if context is None:
        raise UnsupportedError(
            "no tensor of this call is on a device mesh; pass a global tensor or a mesh parameter"
        )
    return context


@kept_dispatch_keys()
def _make(
    context: MeshContext,
    func: Function,
    args: Any,
    kwargs: Any,
    tensors: Sequence[Any],
    target: Target | None,
) -> Runner:
    pairs = [_layout_and_local(context, t) for t in tensors]
    layouts = [layout for layout, _ in pairs]
    name = function_name(func)
    _check_not_recorded(name, pairs)
    in_place = is_in_place(name) or kwargs.get("inplace") is True
    if in_place and isinstance(tensors[0] if tensors else None, DetachedView):
        return ViewWrite(func).run
    if func in _NORMS:
        _check_statistics(func, args, kwargs)
    if name in DATA_DEPENDENT:
        note(context, name, 3, layouts, "depends on the data")
        return fallback.Replicated(context, func, in_place).run
    forced: list[States | None] = [None] * len(tensors)
    goal: tuple[Any, ...] = ()
    if target is not None:
        forced, goal = target.states(context, layouts)
        if in_place and forced:
            # the written tensor keeps its layout: a write to a converted copy would be lost
            forced[0] = None
    try:
        first = first_places(tensors)
        distinct = sorted(set(first))
        inputs, parts = [tensors[i] for i in distinct], [pairs[i][1] for i in distinct]
        weights = frozenset(k for k, t in enumerate(inputs) if isinstance(t, MeshParameter))
        call = TensorCall(context, func, args, kwargs, inputs, parts, weights)
        d = derive(call, [layouts[i] for i in distinct], [forced[i] for i in distinct], goal)
        places = [distinct.index(i) for i in first]
        program = build(call, layouts, places, d, in_place)
    except Underivable as e:
        note(context, name, 3, layouts, str(e))
        return fallback.Replicated(context, func, in_place).run
    note(context, name, d.tier, layouts, d.reason)
    return runner_of(program)


def _check_not_recorded(name: str, pairs: Sequence[tuple[Layout, Tensor]]) -> None:
    """Refuse to derive a program for tensors that a compiler records: it would be kept, and its trial recorded too."""
    if any(is_recorded(local) for _, local in pairs):
        layouts = [layout for layout, _ in pairs]
        raise UnsupportedError(
            f"{name} on {layouts} runs for the first time while a compiler records the call around it"
        )


def _check_statistics(func: Function, args: Any, kwargs: Any) -> None:
    """Refuse running statistics that would be updated in a converted copy."""
    bound = inspect.signature(func).bind(*args, **kwargs)
    bound.apply_defaults()
    if not bound.arguments.get("training", bound.arguments.get("use_input_stats")):
        return
    for name in ("running_mean", "running_var"):
        statistics = bound.arguments[name]
        if isinstance(statistics, GlobalTensor) and not statistics._layout.replicated:
            raise UnsupportedError(
                f"{function_name(func)} updates {name} in place, and it is given as {statistics._layout!r}; running statistics "
                'must be replicated: give a plain tensor or statistics.redistribute(["I", ...])'
            )


def _layout_and_local(context: MeshContext, t: Any) -> tuple[Layout, Tensor]:
    if isinstance(t, GlobalTensor):
        return t._layout, t._local
    if isinstance(t, DTensor):
        layout = layout_of_dtensor(t)
        has_copy = isinstance(t, MeshParameter) and t._copy is not None
        return layout, parameter_local(t, layout.states) if has_copy else dtensor_local(t)
    return replicated_layout(context, t), t
