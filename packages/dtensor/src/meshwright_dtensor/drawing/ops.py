"""Random operations as fills: which numbers an operation draws, in which memory order, and how they become its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from meshwright_dtensor._torch.core import OpOverload, op_arguments, op_name, pytree
from meshwright_dtensor.drawing.whole import Kind
from meshwright_dtensor.sharding import boxes
from meshwright_dtensor.utils.host import HOST

Tensor = torch.Tensor
Form: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
"""Shape, strides and dtype of a tensor."""

# Ops that overwrite their first argument with numbers that depend on scalars only.
_FILLS = frozenset(
    f"aten::{name}_" for name in "normal uniform exponential random log_normal cauchy geometric".split()
)
# Ops that draw the same count of numbers for each element, whatever its value.
_ELEMENTWISE = frozenset(
    f"aten::{name}"
    for name in "bernoulli bernoulli_ rand_like randn_like randint_like normal native_dropout".split()
)
# Ops without tensor arguments: they are given the global shape.
_FACTORIES = frozenset(f"aten::{name}" for name in ("rand", "randn", "randint", "randperm", "normal"))


@dataclass(frozen=True)
class Fill:
    """An operation that fills a tensor in place, and its scalars.

    Attributes:
        dtype: of the numbers; None for that of the result.
    """

    op: Any
    scalars: tuple[Any, ...] = ()
    dtype: torch.dtype | None = None

    def run(self, tensor: Tensor, generator: torch.Generator | None) -> Tensor:
        """Fill the tensor."""
        filled: Tensor = self.op(tensor, *self.scalars, generator=generator)
        return filled


def kind(op: OpOverload) -> str | None:
    """ "fill", "elementwise" or "factory"; None of an operation whose count of numbers depends on values."""
    name = op_name(op)
    tensors = [kind for kind in op_arguments(op).values() if kind == "Tensor"]
    if name in _FILLS or (name == "aten::bernoulli_" and len(tensors) == 1):
        return "fill"
    if name in _ELEMENTWISE and tensors:
        return "elementwise"
    if name in _FACTORIES and not tensors:
        return "factory"
    return None


def bound(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names; those left out are not in it."""
    return {**dict(zip(op_arguments(op), args, strict=False)), **kwargs}


def kind_of_fill(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Kind:
    """What a fill does: its name and all of its scalars."""
    given = bound(op, args, kwargs)
    names = [name for name in list(op_arguments(op))[1:] if name != "generator" and name in given]
    return Kind(op_name(op).removeprefix("aten::"), tuple(given[name] for name in names))


def fill_of(op: OpOverload, given: Mapping[str, Any]) -> Fill | None:
    """What fills a tensor with the numbers that `op` draws on CPUs; None if nothing is known to.

    Of probabilities in a tensor, uniform numbers are compared with them.
    """
    aten, name = torch.ops.aten, op_name(op).removeprefix("aten::").removesuffix("_")
    if name in ("rand", "rand_like"):
        return Fill(aten.uniform_.default, (0.0, 1.0))
    if name in ("randn", "randn_like"):
        return Fill(aten.normal_.default, (0.0, 1.0))
    if name in ("randint", "randint_like"):
        low, high = given.get("low", 0), given["high"]
        return None if isinstance(high, Tensor) else Fill(getattr(aten.random_, "from"), (low, high))
    if name == "normal":
        mean, std = given.get("mean", 0.0), given.get("std", 1.0)
        if isinstance(mean, Tensor):
            return Fill(aten.normal_.default, (0.0, 1.0 if isinstance(std, Tensor) else std))
        return Fill(aten.normal_.default, (0.0, 1.0) if isinstance(std, Tensor) else (mean, std))
    if name == "native_dropout":
        return Fill(aten.bernoulli_.float, (1.0 - given["p"],), torch.bool)
    if name == "bernoulli":
        p = given.get("p", given["self"])
        if not isinstance(p, Tensor):
            return Fill(aten.bernoulli_.float, (p,))
        wide = p.dtype == torch.float64
        return Fill(aten.uniform_.default, (0.0, 1.0), torch.float64 if wide else torch.float32)
    return None


def finished(op: OpOverload, given: Mapping[str, Any], numbers: Tensor) -> Any:
    """What `op` returns of the numbers that `fill_of` has drawn for it, all of them of this rank's part."""
    name = op_name(op).removeprefix("aten::").removesuffix("_")
    if name == "native_dropout":
        kept = 1.0 - given["p"]
        # of a dim of size 1, the stride tells the order of the whole
        result = torch.empty_strided(
            numbers.shape, numbers.stride(), dtype=given["input"].dtype, device=numbers.device
        ).copy_(given["input"])
        # in its dtype, as torch has it
        scale = torch.tensor(0.0 if kept == 0 else 1.0 / kept, dtype=result.dtype, device=HOST)
        return result.mul_(numbers).mul_(scale), numbers
    if name == "normal":
        if isinstance(given.get("std"), Tensor):
            numbers = numbers.mul_(given["std"])
        mean, of_one_scalar = given.get("mean", 0.0), isinstance(given.get("mean"), Tensor)
        return numbers.add_(mean) if of_one_scalar or isinstance(given.get("std"), Tensor) else numbers
    return numbers


def forms_of_results(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], whole: Sequence[Form]
) -> list[Form]:
    """The forms of the whole results, of whole arguments of these forms, on one device."""
    leaves, spec = pytree.tree_flatten(
        (list(args), {k: v for k, v in kwargs.items() if k not in ("generator", "device")})
    )
    following = iter(whole)
    described = tuple(next(following) if isinstance(x, Tensor) else _hashable(x) for x in leaves)
    tensors = tuple(isinstance(x, Tensor) for x in leaves)
    return _forms(op, described, tensors, spec)


def _hashable(value: Any) -> Any:
    return None if isinstance(value, torch.Generator) else value


@lru_cache(1024)
def _forms(op: OpOverload, leaves: tuple[Any, ...], tensors: tuple[bool, ...], spec: Any) -> list[Form]:
    values = [
        torch.empty_strided(x[0], x[1], dtype=x[2], device="meta") if tensor else x
        for x, tensor in zip(leaves, tensors, strict=True)
    ]
    args, kwargs = pytree.tree_unflatten(values, spec)
    if not any(tensors):
        kwargs["device"] = "meta"
    results = pytree.tree_leaves(op(*args, **kwargs))
    if op_name(op) == "aten::normal":
        # meta tensors keep the order of their inputs, and others do not
        results = [t.contiguous() for t in results]
    return [(tuple(t.shape), t.stride(), t.dtype) for t in results]


def form(local: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Form:
    """The form of the whole tensor of which `local` is a part."""
    gaps = boxes.has_gaps(local, shape, order)
    return shape, boxes.strides_of(shape, order, gaps), local.dtype


Put = Callable[..., None]


def put_of(op: OpOverload, given: Mapping[str, Any]) -> tuple[Put, Tensor] | None:
    """How numbers and probabilities become results, for an operation that compares them; None for others."""
    if op_name(op).removesuffix("_") != "aten::bernoulli":
        return None
    p = given.get("p", given["self"])
    return (_put_less, p) if isinstance(p, Tensor) else None


def _put_less(numbers: Tensor, result: Tensor, p: Tensor) -> None:
    result.copy_(numbers < p)
