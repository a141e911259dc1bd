"""The state of a value on one mesh axis: how it lies there going forward, and how its gradient lies there coming back.

Four states make forward and backward communication add up exactly (I, R, V and P in the literature of SPMD types):

====  ============================  ==============================
name  forward                       gradient
====  ============================  ==============================
I     replicated                    replicated (complete)
X     replicated                    partial (its sum over the axis)
P     partial (sum over the axis)   replicated
d     sharded on tensor dim ``d``   sharded on tensor dim ``d``
====  ============================  ==============================

A shard is written as its plain ``int`` dim in code and as ``"S(d)"`` in text.  Where ranks own other parts of the dim than
its chunks, the ``int`` is a :class:`~meshwright_dtensor.sharding.intervals.Runs` (``"S(0; 768+768+768)"``): ask
``isinstance(state, int)``
whether a state is a shard, and compare ``int(state)`` with a dim.  This module imports no torch.
"""

from __future__ import annotations

from typing import Final

from meshwright_dtensor.sharding.intervals import Runs, format_runs, parse_runs

State = str | int
"""One of :data:`I`, :data:`X`, :data:`P` or the ``int`` tensor dim of a shard (:class:`Runs` where it is not cut in chunks)."""

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
    """``"R"``, ``"P"`` or the shard dim: how the value itself lies on the axis."""
    return state if isinstance(state, int) else _FORWARD[state]


def gradient_kind(state: State) -> State:
    """``"R"``, ``"P"`` or the shard dim: how the gradient of the value lies on the axis."""
    return state if isinstance(state, int) else _GRADIENT[state]


def format_state(state: State) -> str:
    """Text form: ``"I"``, ``"X"``, ``"P"``, ``"R"``, ``"S(2)"`` or that of `format_runs`."""
    if isinstance(state, Runs):
        return format_runs(state)
    return f"S({state})" if isinstance(state, int) else state


def parse_state(text: str, n: int | None = None) -> State:
    """The state that :func:`format_state` wrote, on an axis of ``n`` ranks.

    Parts of a fused dim (``"S(0; 64+32+32)"``) need ``n``; without it the text is only checked.

    Raises:
        ValueError: with the text and the legal forms, or what is wrong with the runs.
    """
    if text in (I, X, P):
        return text
    if text.startswith("S(") and text.endswith(")"):
        if text[2:-1].isdigit():
            return int(text[2:-1])
        state = parse_runs(text, n)
        if state is not None:
            return state
    raise ValueError(
        f"state {text!r} is none of 'I', 'X', 'P', 'S(dim)' with dim >= 0, 'S(dim; part+part)', 'S(dim; offset:length | ...)'"
    )
