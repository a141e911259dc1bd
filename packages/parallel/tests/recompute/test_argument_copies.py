"""Arguments of a second run of a module: their original values, each object copied once, tensors shared."""

from __future__ import annotations

import functools
import gc
import itertools
import types
import weakref
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_parallel.recompute.argument_copies import ArgumentCopies


def again(copies: ArgumentCopies) -> tuple[Any, ...]:
    """The positional arguments of one more run."""
    with copies.once_more("Layer") as (args, _):
        return args


def copied(x: Any) -> Any:
    """An argument of a second run, after a first run without writes."""
    return again(ArgumentCopies((x,), {}))[0]


class Slots:
    """Private names and an unset one."""

    __slots__ = ("__weakref__", "__hidden", "items", "unset")

    def __init__(self) -> None:
        self.__hidden = [1]
        self.items = [torch.ones(2)]

    def grow(self) -> None:
        """Write to every part."""
        self.__hidden.append(2)
        self.items = [*self.items, torch.ones(2)]
        self.unset = 1

    def seen(self) -> Any:
        """The contents."""
        return len(self.__hidden), len(self.items), hasattr(self, "unset")


class Both(Slots):
    """Slots and a __dict__, made with arguments that are required."""

    def __new__(cls, size: int) -> Both:
        return super().__new__(cls)

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = [size]

    def grow(self) -> None:
        """Write to every part."""
        super().grow()
        self.size[0] += 1
        self.more = True

    def seen(self) -> Any:
        """The contents."""
        return super().seen(), self.size[0], hasattr(self, "more")


@dataclass(frozen=True)
class Frozen:
    """Attributes cannot be assigned, but one is a mutable list."""

    rows: list[int] = field(default_factory=lambda: [1])

    def grow(self) -> None:
        """Write to every part."""
        self.rows.append(2)

    def seen(self) -> Any:
        """The contents."""
        return tuple(self.rows)


class Ordered(OrderedDict[str, Any]):
    """Has attributes too, and its own __setitem__."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def grow(self) -> None:
        """Write to every part."""
        self["b"] = 2
        self.move_to_end("a")

    def seen(self) -> Any:
        """The contents."""
        return list(self.items()), self.__dict__


class Closing:
    """Has a __del__ with a side effect, so it must not be copied."""

    ended = 0

    def __init__(self) -> None:
        self.items = [1]

    def __del__(self) -> None:
        type(self).ended += 1

    def grow(self) -> None:
        """Write to every part."""
        self.items.append(2)
        self.more = True

    def seen(self) -> Any:
        """The contents."""
        return tuple(self.items), hasattr(self, "more")


class Error(Exception):
    """An object with state in C code."""

    def __init__(self) -> None:
        super().__init__("text")
        self.items = [1]

    def grow(self) -> None:
        """Write to every part."""
        self.items.append(2)

    def seen(self) -> Any:
        """The contents."""
        return self.args, tuple(self.items)


WRITTEN: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda: [1], lambda x: x.append(2), list),
    "nested": (lambda: {"a": ([1],)}, lambda x: x["a"][0].append(2), lambda x: len(x["a"][0])),
    "set": (lambda: {1}, lambda x: x.add(2), set),
    "deque": (lambda: deque([1, 2], 2), lambda x: x.append(3), lambda x: (list(x), x.maxlen)),
    "defaultdict": (
        lambda: defaultdict(list),
        lambda x: x[3].append(1),
        lambda x: (dict(x), x.default_factory),
    ),
    "counter": (lambda: Counter("ab"), lambda x: x.update("a"), dict),
    "user dict": (lambda: UserDict(a=1), lambda x: x.update(b=2), dict),
    "namespace": (lambda: types.SimpleNamespace(a=[1]), lambda x: x.a.append(2), lambda x: len(x.a)),
    "bytes": (lambda: bytearray(b"a"), lambda x: x.extend(b"b"), bytes),
    "array": (lambda: np.zeros(3), lambda x: x.fill(1.0), lambda x: x.sum()),
    "generator": (torch.Generator, lambda x: torch.rand(3, generator=x), lambda x: x.get_state().tolist()),
    **{
        kind.__name__: (make, lambda x: x.grow(), lambda x: x.seen())  # type: ignore[attr-defined]
        for kind, make in {
            Slots: Slots,
            Both: lambda: Both(3),
            Frozen: Frozen,
            Ordered: lambda: Ordered(a=1, c=3),
            Closing: Closing,
            Error: Error,
        }.items()
    },
}


@pytest.mark.parametrize("what", WRITTEN)
def test_each_run_gets_the_original_arguments(what: str) -> None:
    make, write, seen = WRITTEN[what]
    given, fresh = make(), make()
    copies = ArgumentCopies((given,), {"same": given})
    write(given)
    after = seen(given)
    assert after != seen(fresh), "the control: it has been written to"
    for _ in range(2):
        with copies.once_more("Layer") as (args, kwargs):
            assert type(args[0]) is type(given)
            assert seen(args[0]) == seen(fresh)
            assert kwargs["same"] is args[0]
            write(args[0])
            assert seen(args[0]) == after
    assert seen(given) == after


def test_objects_with_del_are_not_copied() -> None:
    given = Closing()
    before = Closing.ended
    copies = ArgumentCopies((given,), {})
    assert again(copies)[0] is given
    del copies
    gc.collect()
    assert Closing.ended == before


Pair = namedtuple("Pair", "a b")


def test_each_object_is_copied_once_and_tensors_are_shared() -> None:
    weight, shared = torch.ones(3), [torch.zeros(2)]
    holder = types.SimpleNamespace(shared=shared, weight=weight)
    holder.itself = holder
    a, b, pair, append = again(ArgumentCopies((holder, shared, Pair(shared, weight), shared.append), {}))
    assert a is not holder and a.itself is a
    assert a.shared is b and b is not shared and pair.a is b and type(pair) is Pair
    assert a.weight is weight and pair.b is weight and b[0] is shared[0]
    append(1)
    assert len(b) == 2 and len(shared) == 1


def test_methods_and_partial_functions_write_to_the_copy() -> None:
    given = Frozen()
    method, partial = again(ArgumentCopies((given.grow, functools.partial(Frozen.grow, given)), {}))
    method()
    partial()
    assert given.rows == [1] and method.__self__.rows == [1, 2, 2]


class Color(Enum):
    """An enumeration."""

    RED = 1


def test_immutable_objects_are_shared() -> None:
    values = torch.return_types.max((torch.ones(2), torch.zeros(2)))
    module = nn.Linear(2, 2)
    for x in (module, Color.RED, Frozen, len, torch.float32, torch.Size((1, 2)), (1, ("a", module)), values):
        assert copied(x) is x


def test_iterators_are_refused() -> None:
    for iterator in (iter([1]), (x for x in [1]), itertools.count(), zip([1], [2], strict=True)):
        with pytest.raises(UnsupportedError, match=r"iterator.*give it a list"):
            ArgumentCopies(([iterator],), {})


def test_refused_write_names_the_writer() -> None:
    holder = types.SimpleNamespace(keys=torch.zeros(2))
    top = torch.zeros(2)

    def case(by_module: bool, tensor: torch.Tensor) -> ArgumentCopies:
        copies = ArgumentCopies((top,), {"cache": holder})
        for turn in range(2):
            if (turn == 0) == by_module:
                tensor.add_(1)
            if turn == 0:
                copies.finished()
        return copies

    again(ArgumentCopies((top,), {"cache": holder}))
    with pytest.raises(
        UnsupportedError, match=r"SimpleNamespace given to a recomputed Layer.*by the module itself"
    ):
        again(case(True, holder.keys))
    with pytest.raises(
        UnsupportedError, match=r"SimpleNamespace.*modified in place after the module had run"
    ):
        again(case(False, holder.keys))
    with pytest.raises(UnsupportedError, match="an input of a recomputed Layer"):
        again(case(False, top))


def test_attributes_are_restored_after_an_error() -> None:
    given = Closing()
    copies = ArgumentCopies((given,), {})
    given.grow()
    with pytest.raises(ValueError, match="in the run"), copies.once_more("Layer"):
        assert given.items == [1]
        raise ValueError("in the run")
    assert given.items == [1, 2] and given.more


def test_copies_do_not_refer_to_the_originals() -> None:
    """A reference would be a cycle with the graph of the second run, which is never freed."""
    given = Slots()
    copies = ArgumentCopies(([given],), {})
    gone = weakref.ref(given)
    del given
    assert gone() is None and len(again(copies)[0]) == 1
