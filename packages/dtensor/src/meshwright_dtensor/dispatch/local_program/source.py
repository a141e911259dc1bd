"""Writes the Python source of the functions that run local programs: no loop, no unpacking of arguments that never change.

A model makes hundreds of calls a step, and a program is run millions of times. Source is compiled once for each form of call;
programs of the same form differ in the objects that its names stand for.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch

# the names of the source
from meshwright_dtensor._torch.core import dtensor_local, make_subclass  # noqa: F401
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, converted  # noqa: F401
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs

Tensor = torch.Tensor
_IMMUTABLE = frozenset(
    {type(None), bool, int, float, str, torch.dtype, torch.device, torch.memory_format, torch.layout}
    | {type(Ellipsis)}
)


class Call:
    """The source of a call of ``func`` with other tensors in place of those in ``args`` and ``kwargs``.

    Arguments whose type is immutable are the ones given here: they are part of the key of the program. Others are taken from
    ``args`` and ``kwargs`` of each call, by these names.

    Attributes:
        names: the objects that the source names.
        count: of the tensors, in pytree order.
    """

    def __init__(self, func: Function, args: Args, kwargs: Kwargs) -> None:
        self.names: dict[str, Any] = {"func": func}
        self.count = 0
        by_place = [self._argument(a, f"args[{i}]") for i, a in enumerate(args)]
        by_name = [f"{name}={self._argument(a, f'kwargs[{name!r}]')}" for name, a in kwargs.items()]
        self._template = f"func({', '.join([*by_place, *by_name])})"

    def source(self, tensors: Sequence[str]) -> str:
        """The source with these expressions for the tensors."""
        return self._template.format(*tensors)

    def _argument(self, a: Any, given: str) -> str:
        if isinstance(a, Tensor):
            self.count += 1
            return f"{{{self.count - 1}}}"
        if type(a) in (tuple, list) and any(isinstance(x, Tensor) for x in a):
            parts = [self._argument(x, f"{given}[{i}]") for i, x in enumerate(a)]
            return f"({', '.join(parts)},)" if type(a) is tuple else f"[{', '.join(parts)}]"
        if not _immutable(a):
            return given
        name = f"constant_{len(self.names)}"
        self.names[name] = a
        return name


def call_of(func: Function, args: Args, kwargs: Kwargs, count: int) -> Call | None:
    """The source of a call; None where it has other than ``count`` tensors that can be written, or names that cannot."""
    if any(not name.isidentifier() or keyword.iskeyword(name) for name in kwargs):
        return None
    call = Call(func, args, kwargs)
    return call if call.count == count else None


def _immutable(a: Any) -> bool:
    kind = type(a)
    if kind in (tuple, torch.Size):
        return all(map(_immutable, a))
    if kind is slice:
        return all(map(_immutable, (a.start, a.stop, a.step)))
    return kind in _IMMUTABLE


def function_of(parameters: str, lines: Sequence[str], names: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with these parameters and lines of source, in which the names stand for these objects."""
    return _maker(parameters, tuple(lines), tuple(names))(*names.values())  # type: ignore[no-any-return]


@cache
def _maker(parameters: str, lines: tuple[str, ...], names: tuple[str, ...]) -> Callable[..., Any]:
    def source() -> Iterator[str]:
        yield f"def make({', '.join(names)}):"
        yield f"    def run({parameters}):"
        yield from (f"        {line}" for line in lines)
        yield "    return run"

    made: dict[str, Any] = {}
    # among the names of this module: frames of the function are not the user's, and what all programs name is found in one place
    exec(compile("\n".join(source()), "<local program>", "exec"), globals(), made)
    return made["make"]  # type: ignore[no-any-return]
