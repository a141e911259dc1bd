"""The result of a call on the rank that builds, in a form that the other ranks of the host make the same result from."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_dtensor._torch import core
from meshwright_dtensor.deferred import mapped_files
from meshwright_dtensor.deferred.mapped_files import opened
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.utils.host import HOST

Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and storage offset of a tensor, in elements."""
_NOT_SENT = object()


@dataclass(frozen=True)
class _Input:
    """The argument of this index itself, or with a geometry a view of its memory."""

    index: int
    view: Geometry | None
    dtype: torch.dtype


@dataclass(frozen=True)
class _File:
    """A tensor in the file of this index among those that are sent along."""

    index: int
    nbytes: int
    geometry: Geometry
    dtype: torch.dtype


@dataclass(frozen=True)
class _Values:
    """A tensor in ordinary memory."""

    data: bytes
    geometry: Geometry
    dtype: torch.dtype


@dataclass(frozen=True)
class Result:
    """What a call returned and wrote.

    is_sent: whether the result is here; otherwise another rank must make the call itself.
    tree: the result, with a description in place of each tensor.
    geometries: of the arguments in files that were written, by index.
    written: values of the arguments in ordinary memory that were written, by index.
    """

    is_sent: bool
    tree: Any
    geometries: dict[int, Geometry]
    written: dict[int, _Values]


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Shape, strides and storage offset."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def encode(
    result: Any,
    inputs: Sequence[torch.Tensor],
    written: Sequence[int],
    numbers: dict[int, int],
    holds: Callable[[torch.Tensor], bool],
) -> tuple[Result, list[int]]:
    """The result of a call, and the numbers of the open files to send along.

    Args:
        inputs: the tensors among the arguments.
        written: indices of those that the call has written into.
        numbers: address of a storage that the call has made -> number of its open file.
        holds: whether a tensor is in a file that the ranks share.

    Raises MeshwrightError: the call has written into memory that other ranks cannot take.
    """
    files: dict[int, int] = {}
    tree = core.pytree.tree_map_only(torch.Tensor, lambda x: _encoded(x, inputs, numbers, files), result)
    is_sent = not any(leaf is _NOT_SENT for leaf in core.pytree.tree_leaves(tree))
    if not is_sent and written:
        raise MeshwrightError(
            "deferred_init: a call writes into a shared file and returns a tensor that is not of the CPU, or sparse; the other "
            "ranks of this host cannot take it: use deferred_init(shared=False)"
        )
    geometries = {i: geometry_of(inputs[i]) for i in written if holds(inputs[i])}
    values = {i: _values(inputs[i]) for i in written if i not in geometries}
    return Result(is_sent, tree if is_sent else None, geometries, values), list(files) if is_sent else []


def _encoded(
    leaf: torch.Tensor, inputs: Sequence[torch.Tensor], numbers: dict[int, int], files: dict[int, int]
) -> Any:
    if leaf.layout != torch.strided or not on_host(leaf.device):
        return _NOT_SENT
    for index, tensor in enumerate(inputs):
        if leaf is tensor:
            return _Input(index, None, leaf.dtype)
    if not mapped_files.is_plain(leaf):
        return _NOT_SENT
    address = leaf.untyped_storage().data_ptr()
    for index, tensor in enumerate(inputs):
        if address and mapped_files.is_plain(tensor) and tensor.untyped_storage().data_ptr() == address:
            return _Input(index, geometry_of(leaf), leaf.dtype)
    if address in numbers:
        index = files.setdefault(numbers[address], len(files))
        return _File(index, leaf.untyped_storage().nbytes(), geometry_of(leaf), leaf.dtype)
    return _values(leaf)


def _values(tensor: torch.Tensor) -> _Values:
    dense = torch.empty_like(tensor).copy_(tensor)
    data = _bytes_of(dense).numpy().tobytes() if dense.numel() else b""
    return _Values(data, geometry_of(dense), tensor.dtype)


def _bytes_of(dense: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor; numpy does not know bfloat16."""
    return torch.empty(0, dtype=torch.uint8, device=HOST).set_(dense.untyped_storage())  # type: ignore[arg-type]


def decode(
    result: Result, inputs: Sequence[torch.Tensor], files: Sequence[int]
) -> tuple[Any, list[torch.UntypedStorage]]:
    """The same result on another rank, from its own arguments and the open files that came along; and the new storages.

    Raises MeshwrightError: the call has changed the shape of an argument.
    """
    for index, geometry in result.geometries.items():
        if geometry_of(inputs[index]) != geometry:
            raise MeshwrightError(
                f"deferred_init: a call changes the shape of a tensor from {geometry_of(inputs[index])[0]} to {geometry[0]} "
                "while it writes, and the ranks of this host share its file: use deferred_init(shared=False)"
            )
    for index, values in result.written.items():
        inputs[index].copy_(_tensor(values))
    storages: dict[int, torch.UntypedStorage] = {}
    tree = core.pytree.tree_map(lambda leaf: _decoded(leaf, inputs, files, storages), result.tree)
    return tree, list(storages.values())


def _decoded(
    leaf: Any, inputs: Sequence[torch.Tensor], files: Sequence[int], storages: dict[int, torch.UntypedStorage]
) -> Any:
    if isinstance(leaf, _Input):
        tensor = inputs[leaf.index]
        if leaf.view is None:
            return tensor
        shape, strides, offset = leaf.view
        return torch.empty(0, dtype=leaf.dtype, device=HOST).set_(
            tensor.untyped_storage(), offset, shape, strides
        )  # type: ignore[arg-type]
    if isinstance(leaf, _File):
        if leaf.index not in storages:
            storages[leaf.index] = opened(files[leaf.index], leaf.nbytes)
        shape, strides, offset = leaf.geometry
        return torch.empty(0, dtype=leaf.dtype, device=HOST).set_(
            storages[leaf.index], offset, shape, strides
        )  # type: ignore[arg-type]
    return _tensor(leaf) if isinstance(leaf, _Values) else leaf


def _tensor(values: _Values) -> torch.Tensor:
    shape, strides, _ = values.geometry
    tensor = torch.empty_strided(shape, strides, dtype=values.dtype, device=HOST)
    if values.data:
        _bytes_of(tensor).copy_(torch.frombuffer(bytearray(values.data), dtype=torch.uint8))
    return tensor


def close_files(files: Sequence[int]) -> None:
    """Close open files that were sent along."""
    for number in files:
        os.close(number)
