"""How far a module runs again: torch stops once everything is there that autograd keeps of it."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright_planner.costs.kinds import VIEWS, base_name
from meshwright_planner.profile.tape import Tape

RESULTLESS = VIEWS | frozenset(
    "add sub mul div neg abs pow log sin cos erf silu gelu mish hardswish softplus linear mm addmm bmm baddbmm convolution "
    "cat stack clone copy _to_copy sum mean where index gather".split()
)
"""Operations of which autograd keeps no result: what is kept of theirs, the operation behind them takes as an input."""


def last_again(tape: Tape, block: Mapping[int, str]) -> dict[str, int]:
    """Module -> the last of its nodes that runs again; -1 where none does.

    `block`: node -> the module that runs again which it is in.  An operation that keeps inputs only is not computed again when
    it is the last: torch packs inputs before it computes.
    """
    found = dict.fromkeys(block.values(), -1)
    for item in tape.saved:
        name = block.get(item.node)
        if name is None:
            continue
        end = item.node if item.output else item.node - 1
        if item.output and item.root is not None and base_name(tape.nodes[item.node]) in RESULTLESS:
            if block.get(item.node + 1) != name:  # kept by what comes behind the module
                continue
        found[name] = max(found[name], end)
    return found
