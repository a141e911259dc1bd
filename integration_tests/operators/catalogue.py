"""The operators of torch's test database, and a few small samples of their arguments."""

from __future__ import annotations

import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

MAX_ELEMENTS, MAX_LISTED = 4000, 300
DTYPES = (torch.float64, torch.complex128, torch.int64, torch.bool, torch.float32)
SEED = 5


@dataclass(frozen=True)
class Place:
    """Where the tensor of this index is in the arguments of a sample."""

    index: int


@dataclass
class Sample:
    """Arguments of one call.

    Attributes:
        tensors: the distinct tensors among them, detached.
        trains: for each, whether it requires grad.
        arguments: (args, kwargs) with a `Place` for each tensor.
        process: from torch's database: makes a result unique, for example up to the signs of eigenvectors.
    """

    tensors: list[Tensor]
    trains: list[bool]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    process: Callable[[Any], Any]

    def filled(self, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with these tensors in them."""
        args, kwargs = pytree.tree_map(
            lambda x: tensors[x.index] if isinstance(x, Place) else x, self.arguments
        )
        return args, kwargs


@cache
def operators() -> tuple[Any, ...]:
    """The rows of torch's database (`OpInfo`) that run on CPU."""
    if "expecttest" not in sys.modules:
        # only torch's own test cases need this package
        stub: Any = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return tuple(op for op in op_db if dtype_of(op) is not None)


def name_of(op: Any) -> str:
    """Name and variant of a row, which is unique."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


@cache
def by_name() -> dict[str, Any]:
    """Name -> row."""
    return {name_of(op): op for op in operators()}


def dtype_of(op: Any, device: str = "cpu") -> torch.dtype | None:
    """The first dtype of `DTYPES`, or any other, that the operator supports; None for none."""
    supported = op.supported_dtypes(device)
    return next((dtype for dtype in DTYPES if dtype in supported), next(iter(supported), None))


def samples(op: Any, count: int, device: str = "cpu") -> list[Sample]:
    """At most `count` samples, the same on every rank: the first of each kind of arguments before the second of any."""
    dtype = dtype_of(op, device)
    if dtype is None:
        return []
    trains = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    random.seed(SEED)
    torch.manual_seed(SEED)
    listed: list[tuple[Any, Sample]] = []
    for given in op.sample_inputs(device, dtype, requires_grad=trains):
        sample = _sample(given)
        if sample is not None and sum(t.numel() for t in sample.tensors) <= MAX_ELEMENTS:
            listed.append((_kind(sample), sample))
        if len(listed) == MAX_LISTED:
            break
    # samples with dims of one or no element come last of their kind
    listed.sort(key=lambda pair: sum(size < 2 for t in pair[1].tensors for size in t.shape))
    seen: dict[Any, int] = {}
    turns = []
    for kind, _ in listed:
        turns.append(seen.get(kind, 0))
        seen[kind] = turns[-1] + 1
    # samples whose dims can be sharded come first
    order = sorted(range(len(listed)), key=lambda i: (turns[i], not _shards(listed[i][1]), i))
    return [listed[i][1] for i in order[:count]]


def _sample(given: Any) -> Sample | None:
    leaves, spec = pytree.tree_flatten(((given.input, *given.args), dict(given.kwargs)))
    places: dict[int, int] = {}
    tensors: list[Tensor] = []
    trains: list[bool] = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if leaf.layout != torch.strided or leaf.is_nested or leaf.is_quantized:
            return None
        if id(leaf) not in places:
            places[id(leaf)] = len(tensors)
            tensors.append(leaf.detach().clone())
            trains.append(leaf.requires_grad)
        leaves[i] = Place(places[id(leaf)])
    if not tensors:
        return None
    return Sample(tensors, trains, pytree.tree_unflatten(leaves, spec), given.output_process_fn_grad)


def _kind(sample: Sample) -> Any:
    """What tells samples apart: dims of the tensors and names of the options."""
    (args, kwargs), dims = sample.arguments, tuple(t.dim() for t in sample.tensors)
    return (
        dims,
        tuple(type(a).__name__ for a in args),
        tuple(kwargs),
        tuple(v for v in kwargs.values() if type(v) is bool),
    )


def _shards(sample: Sample) -> bool:
    return any(size >= 2 for t in sample.tensors for size in t.shape)
