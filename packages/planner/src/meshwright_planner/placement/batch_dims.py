"""The batch dims of tensors: found by propagating a sharding of the batch through the rules.

Only the data axis shards the rows of the batch.  A searched axis could shard them too (with sharded and
gathered weights that is ZeRO-3), so the search leaves out all states that follow from a sharded batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.rules.node import NodeView
from meshwright_dtensor.sharding.states import is_shard
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.tape import Tape

BatchDims = dict[int, set[int]]
"""Value -> its batch dims."""


def batch_dims(tape: Tape, nodes: Iterable[int], rules: RuleBook, degree: int) -> BatchDims:
    """The batch dims of the values of representative `nodes` (in order); a batch that does not divide has none."""
    if tape.rows < 2 or tape.rows % degree:
        return {}
    seeds = [i for i in _inputs(tape) if tape.values[i].shape[:1] == (tape.rows,)]
    return _pushed(tape, nodes, rules, degree, dict.fromkeys(seeds, 0), lambda value: value)


def sequence_dims(tape: Tape, quotient: Quotient, rules: RuleBook, degree: int) -> BatchDims:
    """The dims that follow from sharding dim 1 of the inputs over `degree` ranks, by representative value."""
    shapes = {i: tape.values[i].shape for i in _inputs(tape)}
    seeds = [i for i, s in shapes.items() if len(s) > 1 and s[0] == tape.rows and s[1] % degree == 0]
    return _pushed(tape, quotient.nodes, rules, degree, dict.fromkeys(seeds, 1), quotient.value)


def _inputs(tape: Tape) -> list[int]:
    return [i for i, value in enumerate(tape.values) if (value.name or "").startswith("input:")]


def _pushed(
    tape: Tape,
    nodes: Iterable[int],
    rules: RuleBook,
    degree: int,
    seeds: dict[int, int],
    canon: Callable[[int], int],
) -> BatchDims:
    dims: BatchDims = defaultdict(set)
    for index, dim in seeds.items():
        dims[canon(index)].add(dim)
    for index in nodes:
        node = tape.nodes[index]
        dims_in = [dims.get(canon(ref.i), set()) for ref in node.ins]
        if not any(dims_in):
            continue
        for row in rules.strategies(NodeView.of(node, tape.values, degree)):
            shards = [(s, k) for s, k in zip(row.ins, dims_in) if is_shard(s)]
            if any(k for _, k in shards) and all(not k or s in k for s, k in shards):
                for ref, state in zip(node.outs, row.outs):
                    if isinstance(state, int):
                        dims[canon(ref.i)].add(state)
    return dims
