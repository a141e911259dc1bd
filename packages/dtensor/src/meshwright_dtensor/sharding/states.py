"""The state of a tensor on one mesh axis: the placement of its value, and the placement of its gradient.

Four states make forward and backward communication add up exactly (I, R, V and P in the literature of SPMD types):

====  ============================  ==============================
name  forward                       gradient
====  ============================  ==============================
I     replicated                    replicated (complete)
X     replicated                    partial (its sum over the axis)
P     partial (sum over the axis)   replicated
d     sharded on tensor dim ``d``   sharded on tensor dim ``d``
====  ============================  ==============================

A shard is its plain ``int`` dim in code and ``"S(d)"`` in text. If ranks own other parts of the dim than its chunks, the
``int`` is a :class:`~meshwright_dtensor.sharding.intervals.IntervalShard` (``"S(0; 768+768+768)"``). Test
``isinstance(state, int)`` for a shard, and compare ``int(state)`` with a dim. This module imports no torch.
"""

from __future__ import annotations

from typing import Final

from meshwright_dtensor.sharding.intervals import IntervalShard, format_interval_shard, parse_interval_shard

State = str | int
""":data:`I`, :data:`X`, :data:`P` or the ``int`` tensor dim of a shard (an :class:`IntervalShard` if not cut in chunks)."""

States = tuple[State, ...]
"""One state per mesh axis, outermost axis first."""

I: Final = "I"  # noqa: E741
X: Final = "X"
P: Final = "P"
R: Final = "R"
"""Forward kind of both ``I`` and ``X``; in raw rule rows it stands for either."""

_FORWARD = {I: R, X: R, P: P, R: R}
_GRADIENT = {I: R, X: P, P: R, R: R}


def is_shard(state: State) -> bool:
    """Whether ``state`` is a shard of some tensor dim."""
    return isinstance(state, int)


def forward_kind(state: State) -> State:
    """``"R"``, ``"P"`` or the shard dim: the placement of the value."""
    return state if isinstance(state, int) else _FORWARD[state]


def gradient_kind(state: State) -> State:
    """``"R"``, ``"P"`` or the shard dim: the placement of the gradient."""
    return state if isinstance(state, int) else _GRADIENT[state]


def complete(states: States) -> States:
    """The states of the same value once its partial sums are added up, a gradient's too."""
    return tuple(I if state in (P, X) else state for state in states)


def format_state(state: State) -> str:
    """Text form: ``"I"``, ``"X"``, ``"P"``, ``"R"``, ``"S(2)"`` or that of `format_interval_shard`."""
    if isinstance(state, IntervalShard):
        return format_interval_shard(state)
    return f"S({state})" if isinstance(state, int) else state


def parse_state(text: str, n: int | None = None) -> State:
    """The state that :func:`format_state` wrote, on an axis of ``n`` ranks.

    Segments of a fused dim (``"S(0; 64+32+32)"``) need ``n``; without it the text is only checked. Raises ValueError if
    the text is none of the legal forms, or its intervals are no partition.
    """
    if text in (I, X, P):
        return text
    if text.startswith("S(") and text.endswith(")"):
        if text[2:-1].isdigit():
            return int(text[2:-1])
        state = parse_interval_shard(text, n)
        if state is not None:
            return state
    raise ValueError(
        f"state {text!r} is unknown: use 'I', 'X', 'P', 'S(dim)' with dim >= 0, 'S(dim; part+part)' "
        "or 'S(dim; offset:length | ...)'"
    )
