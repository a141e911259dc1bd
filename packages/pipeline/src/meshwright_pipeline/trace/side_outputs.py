"""What a unit leaves in attributes while it runs, for code outside to read (a balancing loss, say), and what nobody can send.

The first is told apart by the path of the part that has it and its name, "router:loss", where a hook's view of a part has the
path alone.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import OWN_PARTS
from meshwright_pipeline.pytrees import attribute_tensors, leaves_of

Attributes = dict[str, tuple[Any, tuple[Callable[[], Any], ...]]]
"""Place -> what is there, and what gives each of its leaves, tensors while they are alive."""


class CannotBeCut(UnsupportedError):
    """Tensors go from module to module in a way that no message can take."""


def is_attribute(path: str) -> bool:
    """Whether the path of a label is that of an attribute."""
    return ":" in path


def part_of(unit: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The part that has an attribute, and its name."""
    inside, _, name = path.partition(":")
    return unit.get_submodule(inside), name


def attribute_leaves(unit: nn.Module) -> Attributes:
    """Those of all its parts."""
    return {
        f"{path}:{name}": (value, tuple(map(_held, _inside(value))))
        for path, part in unit.named_modules()
        for name, value in part.__dict__.items()
        if name not in OWN_PARTS and _may_hold(type(value))
    }


def _held(leaf: Any) -> Callable[[], Any]:
    """What gives a leaf: its tensors are not kept alive for that, they may hold the graph of a step."""
    return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else lambda: leaf


def _inside(value: Any) -> list[Any]:
    """The leaves of what is in an attribute; none where it holds itself, which nobody could send."""
    try:
        return leaves_of(value)
    except RecursionError:
        return []


def _may_hold(kind: type) -> bool:
    """Whether tensors are looked for in attributes of this type."""
    return issubclass(kind, (torch.Tensor, list, tuple, dict, SimpleNamespace)) or dataclasses.is_dataclass(
        kind
    )


def new_side_outputs(before: Attributes, unit: nn.Module) -> tuple[dict[str, Any], frozenset[str]]:
    """What holds other tensors than before, by place, and where that has been added to what was there, and stays."""
    found, grown = dict[str, Any](), set[str]()
    for place, (value, now) in attribute_leaves(unit).items():
        old = before.get(place)
        if (old is None or not _same(old[1], now)) and any(isinstance(leaf(), torch.Tensor) for leaf in now):
            found[place] = value
            if old is not None and old[0] is value:
                grown.add(place)
    return found, frozenset(grown)


def _same(before: Sequence[Callable[[], Any]], now: Sequence[Callable[[], Any]]) -> bool:
    return len(before) == len(now) and all(old() is new() for old, new in zip(before, now, strict=True))


def check_sendable(unit: str, output: Any, given: Any) -> None:
    """That what a unit returns can be sent. What it was `given` it may give back: of a cache, each stage has its part.

    Raises:
        CannotBeCut: there are tensors where nobody can find them.
    """
    own = {id(leaf) for leaf in leaves_of(given)}
    for leaf in leaves_of(output):
        if id(leaf) not in own and attribute_tensors(leaf):
            raise CannotBeCut(
                f"module {unit!r} returns a {type(leaf).__name__} that holds tensors, which cannot be sent to another stage; "
                "return tensors in tuples, lists, dicts or dataclasses, register the class with torch.utils._pytree, or plan "
                "without pp"
            )


def check_grown(
    grown: Mapping[tuple[str, int], frozenset[str]], taken: frozenset[tuple[str, int, str, int]]
) -> None:
    """That nothing is taken from where a unit only adds: other stages do not add, and none comes to where it is taken out.

    Raises:
        CannotBeCut: something is.
    """
    for unit, call, path, _ in sorted(taken):
        if path in grown.get((unit, call), ()):
            inside, _, name = path.partition(":")
            raise CannotBeCut(
                f"module {f'{unit}.{inside}' if inside else unit!r} adds tensors to its {name!r} in its forward, and code outside "
                "takes them from there: other stages do not have them; return them, or set the attribute anew in each forward, or "
                "plan without pp"
            )
