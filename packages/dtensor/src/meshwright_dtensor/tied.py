"""Tied parameters: one tensor under several names. Torch-free until a model is looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """First name -> its other names, of every parameter of `model` that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {first: tuple(others) for first, *others in names.values() if others}


def with_ties(name: str, tied: Mapping[str, Sequence[str]]) -> str:
    """The name for people, with those of the same parameter: "'embed.weight' (tied to 'head.weight')"."""
    others = [
        other
        for first, rest in tied.items()
        if name in (first, *rest)
        for other in (first, *rest)
        if other != name
    ]
    return repr(name) + (f" (tied to {', '.join(map(repr, others))})" if others else "")
