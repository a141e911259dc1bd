"""Local programs: convert the tensor inputs of a call, run it on the local tensors, label the outputs.

Autograd records only the operations on local tensors, so the backward pass runs in C++, except inside communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.comm.log import Site
from meshwright_dtensor.comm.redistribute import Conversion, conversion_between
from meshwright_dtensor.dispatch.derive import Derivation, TensorCall, local_context, localised
from meshwright_dtensor.dispatch.local_program.source import Call, call_of, function_of
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext, TierEntry
from meshwright_dtensor.mesh.layout import Layout, layout_of
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.random import Part, draws_by_element, run_random
from meshwright_dtensor.rules import LocalContext, NodeView, across, is_random
from meshwright_dtensor.rules.book import rule_book
from meshwright_dtensor.rules.composites.linear import Linear
from meshwright_dtensor.sharding.boxes import dim_order_of
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs
from meshwright_dtensor.trace.graph import Ref, is_ref

Tensor = torch.Tensor
MAX_PROGRAMS = 16384
# a call is traced without gradients, where torch takes an op that has none
_DIFFERENTIABLE: dict[Any, Any] = {
    torch.ops.aten._embedding_bag_forward_only.default: torch.ops.aten._embedding_bag.default
}


@dataclass(slots=True, eq=False)
class Program:
    """A cached local program.

    Attributes:
        reads: per tensor argument its local tensor as source, of which the argument is ``{}`` (see `source`).
        conversions: per tensor argument its conversion to the wanted states, None where it has them.
        local: (args, kwargs, locals) or (locals, site) -> local outputs, by ``takes_arguments``.
        call: the source of ``local``, if it can be written.
        out: tree of layouts of the outputs.
        gathered_view: outputs alias an input on one device, but not here.
        returns_input: an output may be an input itself.
        func: the function of the call.
        writes: the first argument is written to.
    """

    reads: tuple[str, ...]
    conversions: tuple[Conversion | None, ...]
    local: Callable[..., Any]
    takes_arguments: bool
    call: Call | None
    out: Any
    gathered_view: bool
    returns_input: bool
    func: Function
    writes: bool


def build(
    call: TensorCall, layouts: Sequence[Layout], places: Sequence[int], d: Derivation, writes: bool
) -> Program:
    """The program of a derivation.

    Args:
        layouts: of every tensor argument.
        places: for every tensor argument, its input of the derivation (one tensor may be given twice).
        writes: the first argument is written to.
    """
    context = call.context
    conversions = tuple(
        conversion_between(context, m.states, d.first[i], m.shape)
        for m, i in zip(layouts, places, strict=True)
    )
    inputs = [places.index(i) for i in range(len(d.first))]
    direct = d.one_call and (d.composite is None or _is_call_itself(call.func, d.composite))
    source: Call | None = None
    local: Callable[..., Any]
    if direct:
        source = _source(call, d, len(layouts))
        local = _run_nested(call.func) if source is None else _call(source)
    elif d.composite is not None:
        local = _composite_runner(context, d.composite, inputs, len(layouts))
    else:
        local = _Steps(context, d, inputs)
    return Program(
        tuple(_read(call.tensors[i]) for i in places),
        conversions,
        local,
        direct,
        source,
        d.out,
        d.gathered_view,
        d.returns_input,
        call.func,
        writes,
    )


def _read(tensor: Tensor) -> str:
    """The source of the local tensor of an argument like this one, which the key of a program tells from others."""
    if isinstance(tensor, GlobalTensor):
        return "{}._local"
    if isinstance(tensor, MeshParameter):
        return "(dtensor_local({0}) if {0}._copy is None else {0}._copy.take())"
    return "{}.to_local()" if isinstance(tensor, DTensor) else "{}"


def _is_call_itself(func: Function, call: LocalContext) -> bool:
    """Whether the local form is the function itself with the other arguments of the call: of linear, which models call most."""
    composite = rule_book(call.context).composite(call.node.name)
    return type(composite) is Linear and func in composite.functions


def _source(call: TensorCall, d: Derivation, count: int) -> Call | None:
    if d.direct is None:
        return call_of(call.func, call.args, call.kwargs, count)
    # the first tensor, and the local sizes
    return call_of(call.func, (call.args[0], *d.direct), {}, 1)


def _call(call: Call) -> Callable[[Args, Kwargs, list[Tensor]], Any]:
    """Calls the function with the local tensors in place of its tensors."""
    locals_ = [f"locals_[{i}]" for i in range(call.count)]
    return function_of("args, kwargs, locals_", [f"return {call.source(locals_)}"], call.names)


def _run_nested(func: Function) -> Callable[[Args, Kwargs, list[Tensor]], Any]:
    def run(a: Args, k: Kwargs, locals_: list[Tensor]) -> Any:
        following = iter(locals_)
        a, k = pytree.tree_map(lambda x: next(following) if isinstance(x, Tensor) else x, (a, k))
        return func(*a, **k)

    return run


def _composite_runner(
    context: MeshContext, call: LocalContext, inputs: list[int], count: int
) -> Callable[[list[Tensor], Site], Any]:
    composite = rule_book(context).composite(call.node.name)
    run: Callable[..., Any] = composite.local(call)
    order = [inputs[r.i] for r in call.node.ins]
    if order == list(range(count)):
        return run if composite.located else lambda locals_, site: run(locals_)
    if composite.located:
        return lambda locals_, site: run([locals_[i] for i in order], site)
    return lambda locals_, site: run([locals_[i] for i in order])


class _Steps:
    """Runs the recorded ops one by one on the local tensors, with conversions between them."""

    def __init__(self, context: MeshContext, d: Derivation, inputs: Sequence[int]) -> None:
        self.context, self.out_tree = context, d.traced.out
        self.inputs = inputs
        traced, choice = d.traced, d.choice
        states: dict[int, States] = dict(enumerate(d.first))
        self.steps: list[tuple[Callable[[list[Tensor]], Any], list[tuple[int, Any]], list[int]]] = []
        for k, node in enumerate(traced.nodes):
            reads = []
            for ref, want in zip(node.ins, choice.ins[k], strict=True):
                shape = torch.Size(traced.values[ref.i].shape)
                reads.append(
                    (ref.i, conversion_between(context, states.get(ref.i, context.replicated), want, shape))
                )
            for ref, made in zip(node.outs, choice.outs[k], strict=True):
                states[ref.i] = made
            self.steps.append((self._local(d, k), reads, [r.i for r in node.outs]))

    def _local(self, d: Derivation, k: int) -> Callable[[list[Tensor]], Any]:
        node, context = d.traced.nodes[k], self.context
        if node.op is None:
            composite = rule_book(context).composite(node.name)
            return composite.local(local_context(context, d.traced, d.choice, k))
        if is_random(node):
            return _random_step(context, d, k)
        op, op_args, op_kwargs = localised(context, d.traced, d.choice, k)
        op = _DIFFERENTIABLE.get(op, op)
        leaves, spec = pytree.tree_flatten((op_args, op_kwargs), is_leaf=is_ref)
        order = {r.i: j for j, r in enumerate(node.ins)}

        def run(locals_: list[Tensor]) -> Any:
            a, kw = pytree.tree_unflatten(
                [locals_[order[x.i]] if isinstance(x, Ref) else x for x in leaves], spec
            )
            return op(*a, **kw)

        view = NodeView.of(node, d.traced.values, 1)
        return across.local_form(local_context(context, d.traced, d.choice, k), view, run) or run

    def __call__(self, locals_: list[Tensor], site: Site) -> Any:
        env = {i: locals_[place] for i, place in enumerate(self.inputs)}
        done: dict[tuple[int, int], Tensor] = {}
        for run, reads, outs in self.steps:
            values = []
            for i, conversion in reads:
                if conversion is None:
                    values.append(env[i])
                    continue
                key = (i, id(conversion))
                if key not in done:
                    done[key] = conversion.apply(env[i], site)
                values.append(done[key])
            result = run(values)
            made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            env.update(zip(outs, made, strict=True))
        return pytree.tree_map(lambda x: env[x.i] if isinstance(x, Ref) else x, self.out_tree, is_leaf=is_ref)


def _random_step(context: MeshContext, d: Derivation, k: int) -> Callable[[list[Tensor]], Any]:
    node, values = d.traced.nodes[k], d.traced.values
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs), is_leaf=is_ref)
    order = {r.i: j for j, r in enumerate(node.ins)}
    if not node.ins:
        return lambda locals_: node.op(*node.args, **node.kwargs)
    pairs = zip(node.ins, d.choice.ins[k], strict=True)
    layouts = [layout_of(context, s, values[r.i].shape, values[r.i].dtype) for r, s in pairs]
    by_element, shape_only = draws_by_element(node.op), "_like." in node.name

    def run(locals_: list[Tensor]) -> Any:
        tensors = [locals_[order[x.i]] for x in leaves if isinstance(x, Ref)]
        following = iter(tensors)
        a, kw = pytree.tree_unflatten([next(following) if isinstance(x, Ref) else x for x in leaves], spec)
        if not by_element:
            # multinomial: its inputs are replicated
            return node.op(*a, **kw)
        parts = [
            Part(tuple(m.shape), dim_order_of(t), m.region) for m, t in zip(layouts, tensors, strict=True)
        ]
        if not shape_only:
            return run_random(node.op, a, kw, parts, per_shard=context.rng == "fast")
        # as torch's own rand_like does: its op has no derivative
        with torch.no_grad():
            return run_random(node.op, a, kw, parts, per_shard=context.rng == "fast")

    return run


def remember(context: MeshContext, key: Any, program: Any) -> None:
    """Keep a program, and drop the oldest when there are too many (a scalar that varies makes many keys)."""
    if len(context.programs) >= MAX_PROGRAMS:
        context.programs.popitem(last=False)
    context.programs[key] = program


def note(context: MeshContext, function: str, tier: int, layouts: Sequence[Layout], reason: str) -> None:
    """Count a program; tier 2 and 3 are listed, and tier 3, with a shard that is gathered, is an error in strict mode."""
    if tier == 3 and not any(isinstance(state, int) for layout in layouts for state in layout.states):
        tier = 1
    context.report.tiers[tier] += 1
    if tier == 1:
        return
    described = ", ".join(map(repr, layouts))
    context.report.entries.append(TierEntry(function, tier, described, reason))
    if context.strict and tier == 3:
        raise UnsupportedError(
            f"strict mode: {function} on {described} would gather its inputs and run replicated ({reason}); "
            "add a rule through the meshwright_op_rules hook, or turn strict off"
        )
