"""Tied parameters: one tensor under several names. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def all_names(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Parameter]]:
    """Each parameter of `model` once, with all of its names, in the order of the first names."""
    by_id: dict[int, tuple[list[str], nn.Parameter]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_id.setdefault(id(parameter), ([], parameter))[0].append(name)
    return [(tuple(names), parameter) for names, parameter in by_id.values()]


def tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """First name -> other names, of each parameter of `model` with several names."""
    return {names[0]: names[1:] for names, _ in all_names(model) if names[1:]}


def with_ties(name: str, tied: Mapping[str, Sequence[str]]) -> str:
    """The name for messages, with the other names of its parameter: "'embed.weight' (tied to 'head.weight')"."""
    groups = ((first, *rest) for first, rest in tied.items())
    others = [other for group in groups if name in group for other in group if other != name]
    return repr(name) + (f" (tied to {', '.join(map(repr, others))})" if others else "")
