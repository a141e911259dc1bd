"""Rows over R, P and dims become rows over I, X, P and dims, which also fix the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from meshwright_dtensor.rules.node import NodeView, Strategy
from meshwright_dtensor.sharding.states import I, R, States, X
from meshwright_dtensor.trace.graph import Ref


def refine(view: NodeView, rows: Iterable[Strategy], needs_grad: Callable[[Ref], bool]) -> list[Strategy]:
    """Rows over I, X, P and dims.

    The replicated row splits in two: gradients complete everywhere (I), or partial everywhere (X).  In any other row a
    replicated input gets a partial gradient (X), since every rank sees part of the work; and a replicated output that
    needs a gradient makes the row illegal, unless the row says that its gradients are ``complete``.  Where no output
    carries a gradient to the inputs, replicated inputs are I.
    """
    ins, outs = view.node.ins, view.node.outs
    rows = list(rows)
    severed = any(row.source == "factory" for row in rows)
    out_grad = [needs_grad(r) and not severed for r in outs]
    in_grad = [needs_grad(r) and any(out_grad) for r in ins]

    def partial(states: States, grads: list[bool]) -> States:
        return tuple(
            (X if grad else I) if state == R else state for state, grad in zip(states, grads, strict=True)
        )

    result: dict[tuple[States, States], Strategy] = {}
    for row in rows:
        if all(state == R for state in row.ins + row.outs):
            options: list[tuple[States, States]] = [((I,) * len(ins), (I,) * len(outs))]
            if any(out_grad):
                options.append((partial(row.ins, in_grad), partial(row.outs, out_grad)))
        else:
            if not row.complete and any(s == R and g for s, g in zip(row.outs, out_grad, strict=True)):
                continue
            options = [(partial(row.ins, in_grad), tuple(I if s == R else s for s in row.outs))]
        for key in options:
            result.setdefault(key, Strategy(key[0], key[1], row.source, row.complete))
    return list(result.values())
