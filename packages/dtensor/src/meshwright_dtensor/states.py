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

A shard is written as its plain ``int`` dim in code and as ``"S(d)"`` in text.  This module imports nothing.
"""

from __future__ import annotations

from typing import Final

State = str | int
"""One of :data:`I`, :data:`X`, :data:`P` or the ``int`` tensor dim of a shard."""

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
    return type(state) is int


def forward_kind(state: State) -> State:
    """``"R"``, ``"P"`` or the shard dim: how the value itself lies on the axis."""
    return state if type(state) is int else _FORWARD[state]  # type: ignore[index]


def gradient_kind(state: State) -> State:
    """``"R"``, ``"P"`` or the shard dim: how the gradient of the value lies on the axis."""
    return state if type(state) is int else _GRADIENT[state]  # type: ignore[index]


def format_state(state: State) -> str:
    """Text form: ``"I"``, ``"X"``, ``"P"``, ``"R"`` or ``"S(2)"``."""
    return f"S({state})" if type(state) is int else str(state)


def parse_state(text: str) -> State:
    """The state that :func:`format_state` wrote.

    Raises:
        ValueError: with the text and the legal forms.
    """
    if text in (I, X, P):
        return text
    if text.startswith("S(") and text.endswith(")") and text[2:-1].isdigit():
        return int(text[2:-1])
    raise ValueError(f"state {text!r} is none of 'I', 'X', 'P', 'S(dim)' with dim >= 0")
