"""Numeric check of one row: the op runs whole and on shards in this process, in float64, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.rules.localise import localise
from meshwright_dtensor.rules.node import NodeView, Strategy, numel
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.states import P, R, State
from meshwright_dtensor.trace.graph import is_ref
from meshwright_dtensor.utils.host import HOST

LIMIT = 65536
"""Largest tensor, in elements, that is checked at its own size."""

_REJECTED = (RuntimeError, IndexError, ValueError, NotImplementedError, TypeError)

Run = tuple[list[torch.Tensor], list[torch.Tensor]]
"""The inputs of an op as leaves of autograd, and its outputs."""


def check(view: NodeView, strategy: Strategy, *, seed: int = 0) -> bool:
    """Whether values and gradients of ``strategy`` are those of the whole op.

    False also if it cannot be tried: the op rejects random arguments, or cannot be shrunk consistently.
    """
    small = shrink(view)
    if small is None or small.node.op is None:
        return False
    generator = torch.Generator().manual_seed(seed)
    tried = False
    for positive in (True, False):
        outcome = _trial(small, strategy, positive, generator)
        if outcome is False:
            return False
        tried = tried or outcome is True
    return tried


def _trial(view: NodeView, strategy: Strategy, positive: bool, generator: torch.Generator) -> bool | None:
    """Whether the shards agree with the whole op; None if the whole op rejects its inputs."""
    inputs = [_drawn(view.shape(r), _wide(view.dtype(r)), positive, generator) for r in view.node.ins]
    floating = [x.is_floating_point() or x.is_complex() for x in inputs]
    first_only = [i == floating.index(True) for i in range(len(inputs))] if any(floating) else floating
    for grads in (floating, first_only, [False] * len(inputs)):
        # some ops refuse inputs that want a gradient
        with suppress(*_REJECTED):
            leaves, outputs = _run(view, inputs, view.out_shapes, view.in_shapes, grads)
            break
    else:
        return None
    n = view.n
    pieces = [_parts(x, state, n, generator) for x, state in zip(inputs, strategy.ins, strict=True)]
    outs = list(zip(view.out_shapes, strategy.outs, strict=True))
    try:
        ranks = []
        for rank in range(n):
            mine = [parts[rank] for parts in pieces]
            shapes = [local_shape_of(shape, (n,), (rank,), (state,)) for shape, state in outs]
            ranks.append(_run(view, mine, shapes, [tuple(x.shape) for x in mine], grads))
    except _REJECTED:
        return False
    for index, (whole, state) in enumerate(zip(outputs, strategy.outs, strict=True)):
        if not _agrees([local[index] for _, local in ranks], state, whole):
            return False
    return _gradients_agree(view, strategy, leaves, outputs, ranks, generator)


def _gradients_agree(
    view: NodeView,
    strategy: Strategy,
    leaves: list[torch.Tensor],
    outputs: list[torch.Tensor],
    ranks: list[Run],
    generator: torch.Generator,
) -> bool:
    """Backward: a partial output has a replicated gradient, a replicated input a partial one."""
    active = [i for i, out in enumerate(outputs) if out.requires_grad]
    wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    sharded = any(s != R for s in strategy.ins + strategy.outs)
    if not active or not wanted or (sharded and any(strategy.outs[i] == R for i in active)):
        return True
    gradients = [
        torch.randn(outputs[i].shape, dtype=torch.float64, generator=generator, device=HOST).to(
            outputs[i].dtype
        )
        for i in active
    ]
    try:
        whole = _gradients((leaves, outputs), active, wanted, gradients)
    except (RuntimeError, NotImplementedError):
        # the op has no derivative, so there is no backward to check
        return True
    parts = [_parts_exact(g, strategy.outs[i], view.n) for g, i in zip(gradients, active, strict=True)]
    local = []
    for rank, run in enumerate(ranks):
        if any(not run[1][i].requires_grad for i in active):
            return False
        local.append(_gradients(run, active, wanted, [part[rank] for part in parts]))
    # of the gradients of the inputs
    ins = map(strategy.ins.__getitem__, wanted)
    states = [s if isinstance(s, int) else P if s == R and sharded else R for s in ins]
    return all(map(_agrees, map(list, zip(*local, strict=True)), states, whole))


def _gradients(
    run: Run, active: list[int], wanted: list[int], of_outputs: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients of the ``wanted`` inputs for those of the ``active`` outputs; zeros for unused inputs."""
    inputs, results = [run[0][i] for i in wanted], [run[1][i] for i in active]
    return torch.autograd.grad(results, inputs, of_outputs, materialize_grads=True)


def _run(
    view: NodeView,
    inputs: Sequence[torch.Tensor],
    out_shapes: Sequence[tuple[int, ...]],
    in_shapes: Sequence[tuple[int, ...]],
    grads: Sequence[bool],
) -> Run:
    """The op on clones of ``inputs``."""
    op, args, kwargs = localise(view, out_shapes, in_shapes)
    leaves = [x.clone().requires_grad_(grad) for x, grad in zip(inputs, grads, strict=True)]
    feed = iter([x.clone() for x in leaves])
    flat, spec = pytree.tree_flatten((args, kwargs), is_leaf=is_ref)
    flat = [next(feed) if is_ref(x) else _wide(x) if isinstance(x, torch.dtype) else x for x in flat]
    args, kwargs = pytree.tree_unflatten(flat, spec)
    with torch.enable_grad():
        result = op(*args, **kwargs)
    return leaves, [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


def _agrees(locals_: list[torch.Tensor], state: State, whole: torch.Tensor) -> bool:
    """Whether local tensors in ``state`` are those of ``whole``."""
    if isinstance(state, int):
        return _close(torch.cat(locals_, state), whole)
    if state == P:
        return _close(sum(locals_[1:], locals_[0]), whole)
    return all(_close(x, whole) for x in locals_)


def _close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    if not (expected.is_floating_point() or expected.is_complex()):
        return torch.equal(actual, expected)
    return torch.allclose(actual, expected, rtol=1e-7, atol=1e-8, equal_nan=True)


def _parts(x: torch.Tensor, state: State, n: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Locals of ``x`` on ``n`` ranks; a partial sum is a random one."""
    if state == P:
        if not (x.is_floating_point() or x.is_complex()):
            return [x] + [torch.zeros_like(x)] * (n - 1)
        wide = (
            torch.randn(x.shape, dtype=torch.float64, generator=generator, device=HOST) for _ in range(n - 1)
        )
        noise = [part.to(x.dtype) for part in wide]
        return [x - sum(noise[1:], noise[0]), *noise] if noise else [x]
    return _parts_exact(x, state, n)


def _parts_exact(x: torch.Tensor, state: State, n: int) -> list[torch.Tensor]:
    return list(x.chunk(n, state)) if isinstance(state, int) else [x] * n


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype.is_floating_point else torch.complex128 if dtype.is_complex else dtype


def _drawn(
    shape: tuple[int, ...], dtype: torch.dtype, positive: bool, generator: torch.Generator
) -> torch.Tensor:
    """Random numbers; if ``positive``, no number is negative, and integers are 0."""
    if dtype.is_floating_point or dtype.is_complex:
        if positive:
            return (torch.rand(shape, dtype=torch.float64, generator=generator, device=HOST) + 0.1).to(dtype)
        return torch.randn(shape, dtype=dtype, generator=generator, device=HOST)
    if positive and dtype is not torch.bool:
        return torch.zeros(shape, dtype=dtype, device=HOST)
    return torch.randint(0, 2, shape, generator=generator, device=HOST).to(dtype)


def shrink(view: NodeView) -> NodeView | None:
    """``view`` if it is small; else the same node with its large sizes shortened consistently, or None."""
    shapes = {ref: view.shape(ref) for ref in (*view.node.ins, *view.node.outs)}
    if all(numel(s) <= LIMIT for s in shapes.values()):
        return view
    short = _short_sizes({size for shape in shapes.values() for size in shape if size > 8}, view.n)

    def shorter(x: Any) -> Any:
        return short.get(x, x) if isinstance(x, int) and not isinstance(x, bool) else x

    args, kwargs = pytree.tree_map(shorter, (view.node.args, view.node.kwargs), is_leaf=is_ref)
    new_shapes = {ref: tuple(short.get(size, size) for size in shape) for ref, shape in shapes.items()}
    node = replace(view.node, args=args, kwargs=kwargs)
    small = replace(view, node=node, shape=new_shapes.__getitem__, attention=None)
    if any(numel(s) > LIMIT for s in new_shapes.values()):
        return None
    try:
        ins = small.node.ins
        metas = [torch.empty(small.shape(r), dtype=_wide(small.dtype(r)), device="meta") for r in ins]
        _, outputs = _run(small, metas, small.out_shapes, small.in_shapes, [False] * len(metas))
    except _REJECTED:
        return None
    return small if [tuple(x.shape) for x in outputs] == small.out_shapes else None


def _short_sizes(sizes: set[int], n: int) -> dict[int, int]:
    """A small size for each of ``sizes``, all different, and divisible by ``n`` exactly if the size is."""
    short: dict[int, int] = {}
    for size in sorted(sizes):
        step = n if size % n == 0 else 1
        candidate = 3 * step
        while candidate in short.values() or (candidate % n != size % n and candidate % n == 0):
            candidate += step
        short[size] = candidate
    return short
