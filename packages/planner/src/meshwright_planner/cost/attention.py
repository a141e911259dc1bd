"""The attention calls of a tape, for strategies that shard the sequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from meshwright_dtensor.rules import Composite, NodeView
from meshwright_dtensor.strategy import AttentionUse
from meshwright_planner.cost.prices import AxisCosts, work_of
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.tape import Tape


def attention_uses(
    tape: Tape, quotient: Quotient, costs: AxisCosts, composites: Iterable[Composite]
) -> tuple[AttentionUse, ...]:
    """The attention calls, equal ones counted together; the searched axis shards heads if it can, as placements do."""
    attention = {composite.name: composite for composite in composites}.get("sdpa")
    if attention is None:
        return ()
    uses: Counter[AttentionUse] = Counter()
    for k in quotient.nodes:
        node = tape.nodes[k]
        if node.name != attention.name:
            continue
        q, key, v = (tape.values[ref.i] for ref in node.ins[:3])
        heads, key_heads = (t.shape[-3] if len(t.shape) > 2 else 1 for t in (q, key))
        split = costs.degree if heads % costs.degree == 0 else 1
        by_key = split if key_heads % split == 0 else 1
        states = [("I",) * len(refs) for refs in (node.ins, node.outs)]
        flops = attention.flops(NodeView.of(node, tape.values, 1))
        work = work_of(node, tape.values, tape.flows[k], flops, again=tape.again[k])
        use = AttentionUse(
            query_bytes=q.nbytes // split,
            key_value_bytes=(key.nbytes + v.nbytes) // by_key,
            output_bytes=tape.values[node.outs[0].i].nbytes // split,
            heads=heads // split,
            key_heads=key_heads // by_key,
            causal=bool(node.args[5]),
            seconds=costs.compute(work, node, tape.values, *states) / split,
        )
        uses[use] += quotient.node_count[k]
    return tuple(replace(use, count=count) for use, count in uses.items())
