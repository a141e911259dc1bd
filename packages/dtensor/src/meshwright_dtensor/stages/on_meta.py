"""Functions on meta tensors in place of values of stages: what every rank knows of a call before any rank runs it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshwright_dtensor._torch.core import TorchDispatchMode, pytree, stock_call
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stages import stage_tensor
from meshwright_dtensor.trace.function_kinds import (
    PYTHON_WRITES,
    Args,
    Function,
    Kwargs,
    check_strided,
    kind_of,
)

Tensor = torch.Tensor
Values = Sequence[stage_tensor.StageValue]

_MOST_RESULTS = 1 << 12
"""Calls of which a model remembers the result on meta tensors."""

_PLAIN = frozenset(
    (
        int,
        bool,
        float,
        complex,
        str,
        type(None),
        type(...),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    )
)
"""Types of arguments that tell what they are by their value."""


def map_arguments(change: Callable[[Any], Any], tree: Any) -> Any:
    """``change`` of everything in the arguments of a call; a tenth of the time of pytree's."""
    if type(tree) in (tuple, list):
        return type(tree)([map_arguments(change, x) for x in tree])
    return {key: map_arguments(change, x) for key, x in tree.items()} if type(tree) is dict else change(tree)


def tried(func: Function, args: Args, kwargs: Kwargs, operands: Values) -> tuple[Any, bool] | None:
    """What a call gives on meta tensors, and whether it draws; None if it reads values, or is wrong, as every rank sees.

    An operand that it gives is an operand on every rank: then it is its place among the operands.
    """
    metas = {id(x): _on_meta(x) for x in operands}
    try:
        with _Draws() as draws:
            result = on_metas(func, args, kwargs, metas)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return None
    leaves = pytree.tree_leaves(result)
    if not all(x is None or (isinstance(x, Tensor) and x.is_meta) for x in leaves):
        return None
    check_strided(func, *leaves)
    return next((i for i, x in enumerate(operands) if metas[id(x)] is result), result), draws.any


def rehearsed(func: Function, args: Args, kwargs: Kwargs, operands: Values) -> tuple[Any, bool]:
    """What a write gives on new meta tensors, on every rank, so that all raise alike; and whether it draws random numbers.

    Raises UnsupportedError: it changes a shape in place. Raises the errors of one device.
    """
    # data that is set is checked by itself, and may have another memory order
    if getattr(func, "__name__", "") in PYTHON_WRITES or kind_of(func) == "set data":
        return None, False
    results, key = operands[0].whole_model.results_on_meta, form_of(func, args, kwargs)
    if key in results:
        return results[key]  # type: ignore[no-any-return]
    result: Any = None
    metas = {id(x): stage_tensor.meta_like(x) for x in operands}  # type: ignore[arg-type]
    forms = [(x.size(), x.stride()) for x in metas.values()]
    with torch.no_grad(), _Draws() as draws, meta_alone():
        result = on_metas(func, args, kwargs, metas)
    if [(x.size(), x.stride()) for x in metas.values()] != forms:
        raise UnsupportedError(
            f"{getattr(func, '__name__', func)} would change the shape of a value of a pipeline stage in place; use the form "
            "that gives a new tensor"
        )
    outcome = (NotImplemented if result is NotImplemented else None, draws.any)
    if key is not None:
        remember(results, key, outcome)
    return outcome


def on_metas(func: Function, args: Args, kwargs: Kwargs, metas: dict[int, Tensor]) -> Any:
    """``func`` on meta tensors; `metas`: those in place of values of stages, by their ids."""
    args, kwargs = map_arguments(lambda x: metas[id(x)] if id(x) in metas else _on_meta(x), (args, kwargs))
    return func(*args, **kwargs)


def _on_meta(x: Any) -> Any:
    """A meta tensor of the same shape; that in place of a value itself, with its history."""
    if isinstance(x, stage_tensor.StageTensor) and x._value.is_meta:
        return x._value
    if not isinstance(x, Tensor) or x.is_meta or _is_number(x):
        return x
    return stage_tensor.meta_like(x)


def draw(func: Function, args: Args, kwargs: Kwargs) -> None:
    """Draw the random numbers that ``func`` draws where the value is held: the generators of all ranks stay equal."""

    def zeros(x: Any) -> Any:
        if isinstance(x, stage_tensor.StageValue):
            # numbers that are indices
            return torch.zeros(tuple(x.size()), dtype=x.dtype, device=x.device)  # type: ignore[attr-defined]
        return x

    # how many elements a mask chooses is known where its values are
    by_mask = getattr(func, "__name__", "") in ("__setitem__", "index_put_")
    if by_mask and any(x.dtype == torch.bool for x in pytree.tree_leaves(args[1:]) if isinstance(x, Tensor)):
        return
    with torch.no_grad():
        func(*map_arguments(zeros, args), **map_arguments(zeros, kwargs))


@contextlib.contextmanager
def meta_alone() -> Iterator[None]:
    """Inside, a call on meta tensors may read values, which they do not have; other errors are raised on every rank."""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        if not isinstance(error, NotImplementedError) and "meta" not in str(error):
            raise


class _Draws(TorchDispatchMode):
    """Sees whether random numbers are drawn, or indices are checked: a rank without the value does that too."""

    any = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        indexed = func.__name__.startswith(("index", "gather", "scatter", "take", "put", "embedding"))
        self.any = self.any or indexed or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def form_of(func: Function, args: Args, kwargs: Kwargs) -> Any:
    """What the result on meta tensors follows from, to look it up the next time; None where that cannot be said."""

    def form(x: Any) -> Any:
        if isinstance(x, Tensor):
            x = stage_tensor.value_of(x)
            return (x.shape, x.stride(), x.dtype, x.requires_grad)
        if isinstance(x, (list, tuple)):
            return (type(x), *map(form, x))
        # such as a learning rate, which changes in every step; not a probability
        if type(x) is float and not draws:
            return float
        if type(x) not in _PLAIN:
            # a function would be kept, and all that it refers to
            raise TypeError
        return type(x), x

    draws = kind_of(func) in ("draw", "fill", "init")
    try:
        with stock_call():
            named = tuple((name, form(x)) for name, x in kwargs.items())
            key = (func, torch.is_inference_mode_enabled(), form(args), named)
        hash(key)
    except TypeError:
        return None
    return key


def remember(results: dict[Any, Any], key: Any, outcome: tuple[Any, bool]) -> None:
    """Keep what a call gives; indices that count up would fill the memory."""
    if len(results) >= _MOST_RESULTS:
        results.clear()
    results[key] = outcome


def _is_number(x: Tensor) -> bool:
    """Whether it is one number that every rank has, and that a call may read, such as a learning rate."""
    return type(x) is torch.Tensor and x.dim() == 0 and on_host(x.device)
