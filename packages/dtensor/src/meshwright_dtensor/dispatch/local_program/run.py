"""Runs a local program: takes the local tensors in the states that it wants, calls it, labels its outputs.

Each program has a runner, a function of (args, kwargs, tensor arguments, site): the shortest one that its conversions and its
outputs allow, since a model makes hundreds of calls a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_local, pytree
from meshwright_dtensor.comm.log import Site
from meshwright_dtensor.comm.redistribute import Conversion
from meshwright_dtensor.dispatch.gathered_views import gathered_view
from meshwright_dtensor.dispatch.local_program.program import Program
from meshwright_dtensor.dispatch.local_program.source import function_of
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.tensor.compute_copy import refuse_write_to_copy
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, converted, wrap
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs

Tensor = torch.Tensor
Runner = Callable[[Args, Kwargs, Sequence[Any], Site], Any]


def runner_of(program: Program) -> Runner:
    """The function that runs ``program``."""
    whole = type(program.out) is Layout and not (program.gathered_view or program.writes)
    same = program.returns_input and _takes_one_unchanged(program)
    if whole and (same or not program.returns_input):
        return _written(program, same)
    return lambda args, kwargs, tensors, site: _run(program, args, kwargs, tensors, site)


def _takes_one_unchanged(program: Program) -> bool:
    return program.call is not None and program.reads == ("{}._local",) and program.conversions == (None,)


def _written(program: Program, same: bool) -> Runner:
    """The output is one new global tensor; ``same``: or the only input, as ``float`` and ``contiguous`` may return it."""
    tensors = [f"tensor_{i}" for i in range(len(program.reads))]
    names: dict[str, Any] = {"out": program.out}
    reads = []
    for i, (read, conversion) in enumerate(zip(program.reads, program.conversions, strict=True)):
        reads.append(read.format(tensors[i]))
        if conversion is not None:
            names[f"conversion_{i}"] = conversion
            of_global = read == "{}._local"
            reads[i] = (
                f"converted({tensors[i]}, conversion_{i}, site)"
                if of_global
                else f"conversion_{i}.apply({reads[i]}, site)"
            )
    if program.call is not None:
        names |= program.call.names
        result = program.call.source(["local"] if same else reads)
    elif program.takes_arguments:
        names["func"] = program.local
        result = f"func(args, kwargs, [{', '.join(reads)}])"
    else:
        names["func"] = program.local
        result = f"func([{', '.join(reads)}], site)"
    lines = [f"{', '.join(tensors)}, = tensors"] if tensors else []
    if same:
        lines += [
            f"local = {reads[0]}",
            f"result = {result}",
            "if result is local and tensor_0._layout is out:",
            "    return tensor_0",
        ]
        result = "result"
    lines += [
        "made = make_subclass(GlobalTensor, out.template)",
        f"made._local = {result}",
        "made._layout = out",
        "return made",
    ]
    return function_of("args, kwargs, tensors, site", lines, names)


def _run(program: Program, args: Args, kwargs: Kwargs, tensors: Sequence[Any], site: Site) -> Any:
    locals_ = [
        _local_of(t, conversion, program.writes, site)
        for t, conversion in zip(tensors, program.conversions, strict=True)
    ]
    if program.writes:
        refuse_write_to_copy(locals_[0])
    if program.takes_arguments:
        result = program.local(args, kwargs, locals_)
    else:
        result = program.local(locals_, site)
    out = program.out
    if type(out) is not Layout:
        if program.gathered_view:
            return _views(result, out, tensors[0], program.func, args, kwargs)
        return _label(result, out)
    if program.returns_input:
        same = _input_that_is(result, out, tensors, locals_)
        if same is not None:
            return same
    if program.gathered_view:
        return gathered_view(result, out, tensors[0], program.func, args, kwargs)
    return wrap(result, out)


def _local_of(t: Any, conversion: Conversion | None, writes: bool, site: Site) -> Tensor:
    """The local tensor of an argument, converted; ``writes``: the call writes to an argument."""
    if isinstance(t, GlobalTensor):
        return t._local if conversion is None else converted(t, conversion, site)
    if not isinstance(t, DTensor):
        local = t
    elif conversion is None and writes:
        # autograd records no write to a view that a function of its own has made
        return dtensor_local(t)
    elif isinstance(t, MeshParameter):
        local = dtensor_local(t) if t._copy is None else t._copy.take()
    else:
        local = t.to_local()
    return local if conversion is None else conversion.apply(local, site)


def _input_that_is(result: Any, out: Layout, tensors: Sequence[Any], locals_: list[Any]) -> Any:
    """The input that ``result`` is, so that the caller gets the same object; None if it is new."""
    for t, local in zip(tensors, locals_, strict=True):
        if t is result:
            return t
        if local is result and isinstance(t, (GlobalTensor, MeshParameter)):
            if (t._layout if isinstance(t, GlobalTensor) else t.compute_layout) is out:
                return t
    return None


def _label(result: Any, out: Any) -> Any:
    if type(out) is Layout:
        return wrap(result, out)
    if isinstance(result, (tuple, list)):
        if not isinstance(out, (tuple, list)):
            out = pytree.tree_leaves(out, is_leaf=lambda x: isinstance(x, Layout))
        made = [_label(r, o) for r, o in zip(result, out, strict=True)]
        # a tuple, a list or one of torch's structseqs: all of them take one iterable
        return type(result)(made)
    return result


def _views(result: Any, out: Any, base: Any, func: Function, args: Any, kwargs: Any) -> Any:
    """The results of a call, which are views of a base that had to be gathered."""
    layouts = pytree.tree_leaves(out, is_leaf=lambda x: isinstance(x, Layout))
    leaves, spec = pytree.tree_flatten(result)
    made = [
        gathered_view(leaf, layout, base, func, args, kwargs, place) if isinstance(layout, Layout) else leaf
        for place, (leaf, layout) in enumerate(zip(leaves, layouts, strict=True))
    ]
    return pytree.tree_unflatten(made, spec)
