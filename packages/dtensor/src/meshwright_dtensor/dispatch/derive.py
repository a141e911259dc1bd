"""Derives the local program of a torch function from the layouts of its inputs.

The function runs once on fake tensors of the global shapes, and its aten ops are recorded.  The rules and the policy of
propagate/choose.py give every op its states.  Then comes the proof: the function runs on fake *local* tensors and must
record the same ops, localised.  If it does, it is run on the local tensors as it is (tier 1); else its ops are run one by
one with conversions between them (tier 2).  A call that cannot be derived raises :class:`Underivable`: its inputs are
gathered and it is run replicated (tier 3).  A call that gathers shards is of tier 2 or 3 however it is run: see
:func:`~meshwright_dtensor.propagate.rewrites.gathers`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright_dtensor._torch.core import pytree, quiet_fakes
from meshwright_dtensor._torch.decompositions import Decomposing
from meshwright_dtensor._torch.modes import fake_mode, without_modes
from meshwright_dtensor.comm.log import current_site, record
from meshwright_dtensor.errors import MeshwrightError, UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of
from meshwright_dtensor.propagate.choose import Choice, Chooser, Underivable
from meshwright_dtensor.propagate.rewrites import (
    check_writes,
    choose_with_rewrites,
    gathers,
    hoist,
    moved_bytes,
)
from meshwright_dtensor.rules import LocalContext, NodeView, across, is_random, localise
from meshwright_dtensor.rules.book import rule_book
from meshwright_dtensor.rules.node import aten_ops, base_name
from meshwright_dtensor.sharding.boxes import dim_order_of, local_shape_of, region_of
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State, States
from meshwright_dtensor.tensor.global_tensor import DetachedView
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs
from meshwright_dtensor.trace.graph import Node, Recorder, Ref, Value, function_name, is_ref, refs_in

Tensor = torch.Tensor


@dataclass(slots=True)
class Traced:
    """A function's ops on tensors of certain shapes."""

    nodes: list[Node]
    values: list[Value]
    out: Any
    detaches: bool = False
    unreturned_write: str = ""


@dataclass(slots=True)
class Derivation:
    """The states of one call and how it is run.

    Attributes:
        tier: 1, 2 or 3, for the report.
        one_call: the call itself is run on the local tensors; else its ops one by one.
        first: states that each tensor input is converted to before the call, or before the first op.
        out: the function's output with every tensor replaced by its :class:`Layout`.
        direct: the positional arguments after the first that localise the call, or None to pass the call's own; only
            meaningful for ``one_call``.
        composite: the context when the call is exactly one composite node.
        gathered_view: an output aliases an input on one device but not here, because the input had to be moved.
    """

    tier: int
    traced: Traced
    choice: Choice
    first: list[States]
    out: Any
    direct: tuple[Any, ...] | None = None
    composite: LocalContext | None = None
    gathered_view: bool = False
    returns_input: bool = False
    reason: str = ""
    one_call: bool = False


_SIZED = frozenset({torch.reshape, torch.broadcast_to}).union(
    getattr(torch.Tensor, name) for name in ("view", "reshape", "expand", "broadcast_to")
)


def fake_like(shape: Sequence[int], local: Tensor, mode: Any) -> Tensor:
    """A fake tensor of ``shape`` with the dtype, device and memory order of ``local``."""
    order = list(dim_order_of(local) if local.dim() == len(shape) else range(len(shape)))
    with mode:
        fake = torch.empty([shape[d] for d in order], dtype=local.dtype, device=local.device)
        return fake if order == sorted(order) else fake.permute([order.index(d) for d in range(len(order))])


_DECOMPOSED = aten_ops(
    "nll_loss_forward nll_loss2d_forward multi_margin_loss dist renorm _chunk_cat _softmax "
    "_log_softmax _native_batch_norm_legit.no_stats diag_embed trace _trilinear as_strided"
)
"""Ops that are run as torch's decompositions of them where that moves fewer bytes; none that write to buffers, of which
decompositions would record gradients."""

_ATTENTION_FLAGS = threading.RLock()
"""sdpa_kernel() sets flags of the process, so only one thread may trace at a time."""


@dataclass(slots=True)
class TensorCall:
    """A torch call to derive a program for.

    Attributes:
        tensors: the distinct tensor arguments in ``args`` and ``kwargs``, in pytree order.
        locals_: their local tensors.
        weights: indices of those that are parameters.
    """

    context: MeshContext
    func: Function
    args: Args
    kwargs: Kwargs
    tensors: Sequence[Tensor]
    locals_: Sequence[Tensor]
    weights: frozenset[int] = frozenset()
    mode: Any = field(default_factory=fake_mode)

    def trace(
        self,
        shapes: Sequence[Sequence[int]],
        args: Args,
        kwargs: Kwargs,
        decomposed: frozenset[str] = frozenset(),
    ) -> Traced:
        """Record the call on fake tensors of these shapes in place of its tensors, ops of these names by their parts."""
        fakes = [fake_like(shape, t, self.mode) for shape, t in zip(shapes, self.locals_, strict=True)]
        fake_of = {id(t): f for t, f in zip(self.tensors, fakes, strict=True)}
        with without_modes():
            fake_args, fake_kwargs = pytree.tree_map_only(
                Tensor, lambda t: fake_of.get(id(t), t), (args, kwargs)
            )
            recorder = Recorder(rule_book(self.context).composites, fakes)
            math_only = sdpa_kernel(SDPBackend.MATH)
            parts = Decomposing(decomposed) if decomposed else contextlib.nullcontext()
            with (
                _ATTENTION_FLAGS,
                quiet_fakes(),
                torch.no_grad(),
                self.mode,
                math_only,
                recorder,
                parts,
            ):
                out = self.func(*fake_args, **fake_kwargs)
        return Traced(
            recorder.nodes,
            recorder.values,
            recorder.references(out),
            recorder.detaches,
            recorder.unreturned_write,
        )


def derive(
    call: TensorCall, layouts: Sequence[Layout], forced: Sequence[States | None], goal: Sequence[State | None]
) -> Derivation:
    """Find the local program of a call.

    Args:
        layouts: of its tensors.
        forced: states that the plan wants an input in, None to leave it to the policy.
        goal: per mesh axis, the state that the plan wants the first output in.

    Raises Underivable: with the reason.
    """
    try:
        traced = call.trace([m.shape for m in layouts], call.args, call.kwargs)
    except MeshwrightError:
        raise
    except Exception as e:
        raise Underivable(f"does not run on fake tensors: {type(e).__name__}: {_first_line(e)}") from e
    _check_recorded(traced, len(layouts))
    context, tensors = call.context, call.tensors
    start = [tuple(planned or m.states) for m, planned in zip(layouts, forced, strict=True)]
    start_states = dict(enumerate(start))
    traced, choice = _fewest_moved(call, layouts, traced, start_states, goal)
    results = refs_in(traced.out)
    produced, wanted, hoisted = hoist(traced.nodes, results, choice, start_states)
    copies = {i for i, t in enumerate(tensors) if isinstance(t, DetachedView)}
    stored = {i: m.states for i, m in enumerate(layouts)}
    gathered_view = check_writes(traced.nodes, results, choice, stored, copies)

    def layout(x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        value = traced.values[x.i]
        if len(value.stride) != len(value.shape):
            raise UnsupportedError(
                f"{function_name(call.func)} gives a sparse tensor, which cannot be spread over a mesh; call it on x.full_tensor()"
            )
        return layout_of(context, produced.get(x.i, context.replicated), value.shape, value.dtype)

    out = pytree.tree_map(layout, traced.out, is_leaf=is_ref)
    derived = Derivation(2, traced, choice, start, out, gathered_view=gathered_view)
    derived.returns_input = any(n.mutates for n in traced.nodes) or any(r.i < len(layouts) for r in results)
    derived.reason = _as_one_call(call, layouts, derived, list(wanted.values()), hoisted)
    if not derived.one_call:
        _check_steps(traced, len(layouts), derived.reason)
    tier, reason = gathers(traced.nodes, choice, start_states, context.sizes)
    if tier > 1:
        derived.reason = reason
    derived.tier = tier if derived.one_call else max(tier, 2)
    return derived


def _choose(
    call: TensorCall, traced: Traced, start: Mapping[int, States], goal: Sequence[State | None]
) -> tuple[Choice, float]:
    """The states of the ops, and the bytes that are moved for them."""
    plain = frozenset(i for i, t in enumerate(call.tensors) if type(t) is Tensor and not t.requires_grad)
    with without_modes():
        chooser = Chooser(
            call.context, rule_book(call.context), traced.nodes, traced.values, call.weights, plain
        )
        choice = choose_with_rewrites(chooser, start, goal)
        return choice, moved_bytes(chooser, choice, start)


def _fewest_moved(
    call: TensorCall,
    layouts: Sequence[Layout],
    traced: Traced,
    start: Mapping[int, States],
    goal: Sequence[State | None],
) -> tuple[Traced, Choice]:
    """The states of the ops, and of those that would gather a value of their parts if that moves fewer bytes."""
    choice, nbytes = _choose(call, traced, start, goal)
    results = refs_in(traced.out)
    # the other results have no derivative on one device
    alone = [n.name for n in traced.nodes if not any(r in results for r in n.outs[1:])]
    names = [name for name in alone if {name, base_name(name)} & _DECOMPOSED]
    if not names or gathers(traced.nodes, choice, start, call.context.sizes)[0] == 1:
        return traced, choice
    parts = call.trace([m.shape for m in layouts], call.args, call.kwargs, frozenset(names))
    other, fewer = _choose(call, parts, start, goal)
    return (parts, other) if fewer < nbytes else (traced, choice)


def _check_recorded(traced: Traced, inputs: int) -> None:
    """Refuse a call that does more than the recorded ops tell."""
    if traced.unreturned_write:
        raise Underivable(f"{traced.unreturned_write} writes to an argument and returns nothing")
    made = {r.i for n in traced.nodes for r in n.outs} | set(range(inputs))
    for n in traced.nodes:
        written = n.mutates and base_name(n.name).endswith("_") and torch.Tag.inplace_view not in n.op.tags
        if written and traced.values[n.ins[0].i].shape != traced.values[n.outs[0].i].shape:
            raise Underivable(f"{n.name} changes the shape in place")
    if any(r.i not in made for r in refs_in(traced.out)):
        raise Underivable("returns a tensor that no recorded op has made")
    for index in {r.i for n in traced.nodes for r in n.ins} - made:
        if traced.values[index].dtype == torch.bool and traced.values[index].shape:
            raise Underivable("takes a mask that is no tensor, for the global shape")


def _as_one_call(
    call: TensorCall, layouts: Sequence[Layout], derived: Derivation, first: list[States], hoisted: bool
) -> str:
    """Make the derivation one call, with all conversions before the call; else return why that is not possible."""
    context, traced, choice, out = call.context, derived.traced, derived.choice, derived.out
    if any(map(is_random, traced.nodes)):
        return "draws random numbers: drawn whole and sliced"
    if not hoisted:
        return "moves data between its ops"
    results, nodes = refs_in(traced.out), traced.nodes
    is_output = bool(nodes) and results == nodes[0].outs and (isinstance(out, Layout) or len(results) > 1)
    if len(nodes) == 1 and nodes[0].op is None and is_output:
        derived.composite = local_context(context, traced, choice, 0)
    else:
        for k, node in enumerate(nodes):
            if node.op is None:
                ctx = local_context(context, traced, choice, k)
                if not rule_book(context).composite(node.name).plain(ctx):
                    return f"contains {node.name}, which needs its own local form"
            elif across.is_combined(NodeView.of(node, traced.values, 1), choice.ins[k], choice.outs[k]):
                return f"{node.name} combines the results of all ranks"
        sized = out if call.func in _SIZED and isinstance(out, Layout) else None
        if sized is not None and not _why_not_local(call, layouts, traced, choice, first, sized):
            derived.direct = tuple(sized.local_shape)
        else:
            reason = _why_not_local(call, layouts, traced, choice, first)
            if reason:
                return reason
    derived.one_call, derived.first = True, first
    return ""


def _check_steps(traced: Traced, inputs: int, reason: str) -> None:
    """Refuse to run a call op by op where the recorded ops are not all of it."""
    if traced.detaches:
        raise Underivable(f"{reason}; and it detaches a value inside")
    made = {r.i for n in traced.nodes for r in n.outs} | set(range(inputs))
    if any(r.i not in made for n in traced.nodes for r in n.ins):
        raise Underivable(f"{reason}; and it makes a tensor constant inside")
    # traced without gradients: what F.linear_cross_entropy passes on depends on requires_grad
    if any(n.op is not None and n.op.namespace not in ("aten", "prims") for n in traced.nodes):
        raise Underivable(f"{reason}; and it calls a custom operator")


def coordinates(
    context: MeshContext, states: Sequence[States], shapes: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Mesh coordinates that cover all local shapes: one if all sizes divide evenly, else the first and last ranks.

    With uneven interval shards, every rank may hold another length.
    """
    by_shapes: dict[tuple[Any, ...], tuple[int, ...]] = {}
    ranks = []
    for axis, n in enumerate(context.sizes):
        along = (s[axis] for s in states)
        uneven = any(isinstance(state, IntervalShard) and not state.even for state in along)
        ranks.append(range(0, n, 1 if uneven else max(n - 1, 1)))
    for coords in itertools.product(*ranks):
        local = tuple(
            local_shape_of(tuple(shape), context.sizes, coords, s)
            for s, shape in zip(states, shapes, strict=True)
        )
        by_shapes.setdefault(local, coords)
    return list(by_shapes.values())


def local_shape(
    context: MeshContext, shape: Sequence[int], states: States, coords: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Shape of the part of a value that the rank at ``coords`` (this rank by default) holds."""
    return local_shape_of(tuple(shape), context.sizes, coords or context.coords, states)


def _why_not_local(
    call: TensorCall,
    layouts: Sequence[Layout],
    traced: Traced,
    choice: Choice,
    first: list[States],
    sized: Layout | None = None,
) -> str:
    """Why the call does not give the local result on the local tensors of some rank; empty if it does on all ranks.

    `sized`: the layout whose local shape replaces the size arguments, None to pass the arguments of the call.
    """
    context = call.context
    for coords in coordinates(context, first, [m.shape for m in layouts]):
        shapes = [local_shape(context, m.shape, s, coords) for m, s in zip(layouts, first, strict=True)]
        args = call.args if sized is None else (call.args[0], *sized.local_shape_at(coords))
        try:
            local = call.trace(shapes, args, call.kwargs if sized is None else {})
        except Exception as e:
            return f"does not run on local shapes: {_first_line(e)}"
        reason = _differs(context, traced, local, choice, coords)
        if reason:
            return reason
    return ""


def _differs(
    context: MeshContext, whole: Traced, local: Traced, choice: Choice, coords: tuple[int, ...]
) -> str:
    """Why the local trace is not the localised global one; empty when it is."""
    if len(local.nodes) != len(whole.nodes):
        return f"records {len(local.nodes)} ops on local shapes, {len(whole.nodes)} on global ones"
    for k, (g, loc) in enumerate(zip(whole.nodes, local.nodes, strict=True)):
        if g.outs != loc.outs or g.name != loc.name:
            return f"{g.name} became {loc.name} on local shapes"
        for ref, states in zip(g.outs, choice.outs[k], strict=True):
            if local.values[ref.i].shape != local_shape(context, whole.values[ref.i].shape, states, coords):
                return f"{g.name} gives another local shape than its layout says"
        wanted, here = (g.op, g.args, g.kwargs), (loc.op, loc.args, loc.kwargs)
        if g.op is not None:
            wanted = localised(context, whole, choice, k, coords)
            outs, ins = ([local.values[r.i].shape for r in refs] for refs in (loc.outs, loc.ins))
            here = localise(NodeView.of(loc, local.values, 1), outs, ins)
        if wanted[0] != here[0] or not _same(wanted[1], here[1]) or not _same(wanted[2], here[2]):
            return f"{g.name} has other arguments on local shapes"
    if whole.out != local.out and not _same(whole.out, local.out):
        return "returns something else on local shapes"
    return ""


def localised(
    context: MeshContext, traced: Traced, choice: Choice, k: int, coords: tuple[int, ...] | None = None
) -> tuple[Any, Any, Any]:
    """Op, arguments and keywords of node ``k`` on the local tensors of the rank at ``coords`` (by default this rank)."""
    node, values = traced.nodes[k], traced.values
    ins, outs = (
        [local_shape(context, values[r.i].shape, s, coords) for r, s in zip(refs, states, strict=True)]
        for refs, states in ((node.ins, choice.ins[k]), (node.outs, choice.outs[k]))
    )
    held = None
    if node.ins:
        shape = values[node.ins[0].i].shape
        held = region_of(shape, context.sizes, coords or context.coords, choice.ins[k][0])
    return localise(NodeView.of(node, values, 1), outs, ins, held)


def _same(a: Any, b: Any) -> bool:
    return pytree.tree_leaves(a, is_leaf=is_ref) == pytree.tree_leaves(b, is_leaf=is_ref)


def local_context(context: MeshContext, traced: Traced, choice: Choice, k: int) -> LocalContext:
    """The arguments of the local function of node ``k``, a composite."""
    node, values = traced.nodes[k], traced.values

    def note(kind: Any, axis: int, nbytes: int, phase: Any) -> None:
        where = current_site(node.name).module
        record(kind, context.axes[axis], nbytes, phase, where, node.name, f"inside {node.name}")

    return LocalContext(
        mesh=context.mesh,
        node=node,
        ins=tuple(choice.ins[k]),
        outs=tuple(choice.outs[k]),
        in_shapes=tuple(values[r.i].shape for r in node.ins),
        out_shapes=tuple(values[r.i].shape for r in node.outs),
        # an inner context (MeshContext.inner) has some of the axes and the attention settings of all
        attention={
            i: context.attention[name] for i, name in enumerate(context.axes) if name in context.attention
        },
        record=note,
    )


def _first_line(e: BaseException) -> str:
    return (str(e).splitlines() or [""])[0][:200]
