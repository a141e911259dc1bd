"""Tier 3: runs a call replicated, on gathered values. Also ``out=``, ``autograd.Function`` and checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from meshwright_dtensor._torch.core import declared_writes, dtensor_local, pytree, stock_call, storage_key
from meshwright_dtensor._torch.modes import outside_functorch, without_functorch
from meshwright_dtensor.comm.log import Site, current_site
from meshwright_dtensor.dispatch.gathered_views import (
    COPIES,
    gathered_view,
    standing_for,
    whole,
    write_to_whole,
)
from meshwright_dtensor.dispatch.local_program.program import note
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.layout import Layout, replicated_layout
from meshwright_dtensor.mesh.mesh import extremes, group_over
from meshwright_dtensor.parameter import layout_of_dtensor, parameter_local
from meshwright_dtensor.propagate.elementwise_function import runs_on_shards
from meshwright_dtensor.tensor.compute_copy import refuse_write_to_copy
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor, local_in, version_of, wrap
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs, check_strided
from meshwright_dtensor.trace.graph import function_name
from meshwright_dtensor.trace.one_device import OF_A_GROUP, in_model

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import MeshContext

Tensor = torch.Tensor


def label(context: MeshContext, tree: Any) -> Any:
    """``tree`` with every plain tensor labelled as a replicated global tensor."""

    def labelled(x: Any) -> Any:
        if isinstance(x, Tensor) and not isinstance(x, (GlobalTensor, DTensor)):
            return wrap(x, replicated_layout(context, x))
        return x

    # structseq: a pytree leaf
    if isinstance(tree, tuple) and hasattr(tree, "n_fields"):
        return type(tree)([labelled(x) for x in tree])
    return pytree.tree_map(labelled, tree)


class Replicated:
    """The program of a call without a local form: gather the inputs, run, label the outputs replicated."""

    __slots__ = ("_writes", "context", "func", "in_place")

    def __init__(self, context: MeshContext, func: Callable[..., Any], in_place: bool) -> None:
        self.context, self.func, self.in_place = context, func, in_place
        self._writes = declared_writes(func)

    def run(self, args: Any, kwargs: Any, tensors: Sequence[Any], site: Site) -> Any:
        """Run on gathered values; a write is copied back into this rank's part."""
        strided = function_name(self.func).startswith("as_strided")
        if strided:
            _check_order(args[0], self.context)
        if self.in_place:
            return self._write(args, kwargs, site)
        given, spec = pytree.tree_flatten((args, kwargs))
        full = [whole(x, site) for x in given]
        if strided and isinstance(given[0], DTensor) and full[0].storage_offset():
            # the whole parameter may be in the middle of a larger buffer
            full[0] = full[0].clone()
        before = [(version_of(x), x.grad_fn) if isinstance(x, Tensor) else (0, None) for x in full]
        full_args, full_kwargs = pytree.tree_unflatten(full, spec)
        result = self.func(*full_args, **full_kwargs)
        written = self._declared(args, kwargs)
        check_strided(self.func, *pytree.tree_leaves(result))
        out = label(self.context, result)
        for x, value, (version, graph) in zip(given, full, before, strict=True):
            if isinstance(x, (GlobalTensor, DTensor)) and (version_of(value) != version or id(x) in written):
                self._write_back(x, value, recorded=value.grad_fn is not graph)
        return self._with_views(out, given, full, args, kwargs)

    def _declared(self, args: Args, kwargs: Kwargs) -> set[int]:
        """Ids of the arguments that the schema of an operator says it writes to."""
        if not self._writes:
            return set()
        places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        return {id(x) for place, given in places if place in self._writes for x in pytree.tree_leaves(given)}

    def _with_views(self, out: Any, given: list[Any], full: list[Any], args: Args, kwargs: Kwargs) -> Any:
        """``out``, whose tensors that share memory with a gathered copy are views of what was gathered."""
        copies = {
            storage_key(value): x
            for x, value in zip(given, full, strict=True)
            if isinstance(x, (GlobalTensor, DTensor)) and value is not _own_memory(x)
        }
        leaves, spec = pytree.tree_flatten(out)
        for place, made in enumerate(leaves):
            key = storage_key(made._local) if type(made) is GlobalTensor else None
            base = None if key is None else copies.get(key)
            if base is not None:
                where = None if out is made else place
                leaves[place] = gathered_view(made._local, made._layout, base, self.func, args, kwargs, where)
        return out if isinstance(out, Tensor) and leaves[0] is out else pytree.tree_unflatten(leaves, spec)

    def _write_back(self, x: Any, value: Tensor, recorded: bool) -> None:
        """Keep this rank's part of what the function, whose name does not tell, has written to a gathered copy of ``x``."""
        memory = _own_memory(x)
        if memory is not None and storage_key(memory) == storage_key(value):
            return
        if recorded:
            raise UnsupportedError(
                f"{function_name(self.func)} writes to an argument of shape {list(value.shape)} that is sharded, and autograd "
                "would have to record the write; call it under torch.no_grad(), or on x.full_tensor()"
            )
        with torch.no_grad():
            x.copy_(value.detach())

    def _write(self, args: Any, kwargs: Any, site: Site) -> Any:
        target = args[0]
        rest, full_kwargs = pytree.tree_map(lambda x: whole(x, site), (args[1:], kwargs))
        if not isinstance(target, GlobalTensor):
            if isinstance(target, DTensor):
                raise UnsupportedError(
                    f"{function_name(self.func)} on a mesh parameter has no local form; change it on one device "
                    "before parallelize, or write through parameter.data with a DTensor"
                )
            return self.func(target, *rest, **full_kwargs)
        shape = tuple(target._layout.shape)

        def change(full: Tensor) -> Any:
            result = self.func(full, *rest, **full_kwargs)
            if full is not target._local and tuple(full.shape) != shape:
                raise UnsupportedError(
                    f"{function_name(self.func)} would change the shape of a sharded tensor from {list(shape)} to "
                    f"{list(full.shape)} in place; use the out-of-place form"
                )
            return result

        result = write_to_whole(target, change, site)
        if target._local.shape != target._layout.local_shape:
            target._layout, target._memo = replicated_layout(self.context, target._local), None
        return target if result is not None else None


def _check_order(x: Any, context: MeshContext) -> None:
    """Refuse a sharded tensor for as_strided, which reads memory, if a rank's part is not contiguous (a collective call)."""
    if not isinstance(x, GlobalTensor) or x._layout.replicated:
        return
    # a part with a dim of size 1 does not tell the order, so the ranks decide together
    ranks = group_over(context.mesh, context.axes)
    if extremes([x._local.is_contiguous()], ranks) != [(1, 1)]:
        raise UnsupportedError(
            f"as_strided of a sharded tensor ({x._layout!r}) whose parts are not contiguous would read other elements than on "
            "one device; use x.contiguous()"
        )


def _own_memory(x: Any) -> Tensor | None:
    """The tensor that a write to this rank's part goes to; None where the part is in another one (a compute copy)."""
    if isinstance(x, GlobalTensor):
        return None if isinstance(x, DetachedView) else x._local
    return dtensor_local(x) if getattr(x, "_copy", None) is None else None


def run_collective(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A collective of ``torch.distributed`` called by the user: on the whole values, which every rank has alike.

    Inside of a model it copies, and values may be sharded (see one_device).

    Raises UnsupportedError: a value is sharded or partial, so this rank has a part of it; or, inside of a model, the group.
    """
    if in_model():
        group = next((a for a in (*args, *kwargs.values()) if isinstance(a, dist.ProcessGroup)), None)
        if group is not None and group.size() > 1:
            raise UnsupportedError(OF_A_GROUP.format("the model", function_name(func)))
        real = pytree.tree_map_only(
            Tensor, lambda x: torch.view_as_real(x) if x.is_complex() else x, (args, dict(kwargs))
        )
        with stock_call():
            return func(*real[0], **real[1])

    def whole_here(x: Any) -> Any:
        if not isinstance(x, (GlobalTensor, DTensor)):
            return x
        layout = x._layout if isinstance(x, GlobalTensor) else layout_of_dtensor(x)
        if isinstance(x, GlobalTensor) and all(isinstance(state, str) for state in layout.states):
            # a sum that is not complete yet; the collective may write to it
            complete = layout.with_states(layout.context.replicated)
            x._local, x._layout, x._memo = local_in(x, complete.states), complete, None
        elif not layout.replicated:
            raise UnsupportedError(
                f"torch.distributed.{function_name(func)} is given a global tensor of which this rank has a part ({layout!r}). "
                "Every rank reads the same whole value from it already, so nothing has to be exchanged: use the value as it is, "
                "or pass x.full_tensor(), the whole value, or x.to_local(), this rank's part"
            )
        return x._local if isinstance(x, GlobalTensor) else parameter_local(x, layout.states).detach()

    whole_args, whole_kwargs = pytree.tree_map(whole_here, (args, dict(kwargs)))
    return func(*whole_args, **whole_kwargs)


def run_on_full(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run on gathered plain values and return plain results: a functorch transform would lose the labels.

    Raises UnsupportedError: the transform is of a parameter over a mesh.
    """
    for x in pytree.tree_leaves((args, kwargs)):
        if isinstance(x, Tensor) and isinstance(outside_functorch(x), DTensor) and not isinstance(x, DTensor):
            raise UnsupportedError(
                f"{function_name(func)} inside a functorch transform (torch.func, vmap) of a parameter or gradient over a mesh; "
                "transform its whole value instead, x.full_tensor()"
            )
    # a tensor that the transform has not wrapped is a constant of it: it is gathered outside, where collectives have gradients
    with without_functorch():
        full_args, full_kwargs = pytree.tree_map(whole, (args, kwargs))
    return func(*full_args, **full_kwargs)


def run_with_out(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], run: Callable[..., Any]) -> Any:
    """``out=``: compute without it, then write the result into it, in its own layout.

    Raises UnsupportedError: ``out`` has another shape, which torch would resize.
    """
    kwargs = dict(kwargs)
    out = kwargs.pop("out")
    over = any(isinstance(x, (GlobalTensor, DTensor)) for x in pytree.tree_leaves((args, kwargs)))
    result = run(func, args, kwargs) if over else func(*args, **kwargs)
    outs, results = (out, result) if isinstance(out, (tuple, list)) else ((out,), (result,))
    for o, r in zip(outs, results, strict=True):
        if tuple(o.shape) != tuple(r.shape):
            raise UnsupportedError(
                f"out= of shape {list(o.shape)} does not fit the result of shape {list(r.shape)} of {function_name(func)}, "
                "and a global tensor is not resized; pass one of the right shape or none"
            )
        if isinstance(o, DetachedView):
            raise UnsupportedError(
                f"out= of {function_name(func)} is a view that had to be gathered from its sharded base, and the write would "
                "not reach the base; write to the base itself"
            )
        if isinstance(o, GlobalTensor):
            refuse_write_to_copy(o._local)
            if not isinstance(r, GlobalTensor):
                r = label(o._layout.context, r)
            o._local.copy_(r.redistribute(o._layout.states)._local)
        else:
            o.copy_(whole(r))
    return out


def run_function(cls: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A user's ``autograd.Function``: its forward and backward get gathered plain values on every rank.

    If they use parameters in other ways (a reversible layer runs its modules inside), their results are global tensors and
    are gathered too.
    """
    if cls is CheckpointFunction:
        function, preserve, *rest = args
        return checkpoint(function, *rest, use_reentrant=False, preserve_rng_state=preserve)
    if runs_on_shards(cls, args, kwargs):
        layout = next(a for a in args if isinstance(a, GlobalTensor))._layout
        return wrap(cls.apply(*[a._local if isinstance(a, GlobalTensor) else a for a in args]), layout)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, (GlobalTensor, DTensor))]
    layouts = tuple(x._layout if isinstance(x, GlobalTensor) else layout_of_dtensor(x) for x in tensors)
    context = layouts[0].context
    context.cached(_note_function, cls.__name__, layouts)
    site = current_site(getattr(cls, "__name__", "Function"))
    full_args, full_kwargs = pytree.tree_map(lambda x: whole(x, site), (args, kwargs))
    # a Function may save its input by identity or write to it, so it gets no tensor that is used elsewhere
    aliased = {id(whole(t)) for t in tensors if isinstance(t, GlobalTensor)}
    full_args = tuple(x.view_as(x) if isinstance(x, Tensor) and id(x) in aliased else x for x in full_args)
    given = zip(pytree.tree_leaves((args, kwargs)), pytree.tree_leaves((full_args, full_kwargs)), strict=True)
    with standing_for([(full, x) for x, full in given if isinstance(x, DTensor) and not full.is_leaf]):
        return label(context, _with_plain_results(cls).apply(*full_args, **full_kwargs))


def _note_function(context: MeshContext, name: str, layouts: tuple[Layout, ...]) -> None:
    note(context, name, 3, layouts, "a custom autograd.Function is given whole values")


@cache
def _with_plain_results(cls: Any) -> Any:
    """A subclass whose forward and backward return plain gathered values: autograd does not know global tensors.

    Its backward runs with the COPIES of its forward.
    """
    with_setup = cls.setup_context is not torch.autograd.Function.setup_context

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not with_setup:
            args[0].meshwright_copies = COPIES.get()
        return pytree.tree_map(whole, cls.forward(*args, **kwargs))

    def setup_context(ctx: Any, *arguments: Any, **named: Any) -> None:
        ctx.meshwright_copies = COPIES.get()
        cls.setup_context(ctx, *arguments, **named)

    def backward(ctx: Any, *gradients: Any) -> Any:
        with standing_for(ctx.meshwright_copies):
            return pytree.tree_map(whole, cls.backward(ctx, *gradients))

    methods: dict[str, Any] = {"forward": staticmethod(forward), "__module__": cls.__module__}
    if with_setup:
        methods["setup_context"] = staticmethod(setup_context)
    # else it has vjp
    if cls.backward is not torch.autograd.Function.backward:
        methods["backward"] = staticmethod(backward)
    return type(cls.__name__, (cls,), methods)
