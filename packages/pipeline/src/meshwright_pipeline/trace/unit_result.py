"""The result of one unit call as zeros, from a run on the meta device, or on zeros: output, attributes, and its
entries in lists, dicts and objects of the arguments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright_pipeline import _torch
from meshwright_pipeline._torch import hooks_of
from meshwright_pipeline.pytrees import (
    attribute_tensors,
    containers_of,
    expanded_zeros,
    is_expanded,
    leaves_of,
    map_leaves,
    tensors_within,
)
from meshwright_pipeline.trace import side_outputs
from meshwright_pipeline.trace.forward_hooks import Forward
from meshwright_pipeline.trace.meta_model import back_on_meta, with_zeros
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Result
from meshwright_pipeline.trace.side_outputs import Entries
from meshwright_pipeline.trace.state.known_memory import UnitWrites


def unit_result(
    name: str, unit: nn.Module, forward: Forward, call: Call, device: torch.device, use_zeros: bool = False
) -> Result:
    """Run a unit for the shapes of its results: on the meta device, or with zeros for values."""
    hook_outputs: dict[str, Any] = {}
    # integers of the batch that the unit returns as they are, such as the lengths of a packed sequence
    integers: list[torch.Tensor] = []

    def record(path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _module, _args, output: hook_outputs.__setitem__(path, output)

    def argument(_: int, tensor: torch.Tensor) -> torch.Tensor:
        if not use_zeros:
            return tensor.to("meta")
        # what comes from the batch has values, and code may read them (lengths, masks)
        if tensor.is_meta or is_expanded(tensor):
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        value = tensor.detach().clone()
        if not (value.is_floating_point() or value.is_complex()):
            integers.append(value)
        return value

    def stand_in(_: int, tensor: torch.Tensor) -> torch.Tensor:
        given = any(tensor is value for value in integers)
        return tensor if given else expanded_zeros(tensor, device)

    with contextlib.ExitStack() as stack:
        stack.enter_context(back_on_meta(unit))
        for path, part in unit.named_modules():
            if path and hooks_of(part):
                stack.enter_context(_torch.forward_hooks(part, {-1: record(path)}))
        if use_zeros:
            stack.enter_context(with_zeros(unit, device))
        args, kwargs = stack.enter_context(_given(argument, call))
        entries = Entries(containers_of((args, kwargs)))
        before = side_outputs.attribute_leaves(unit)
        with UnitWrites(name, unit, tensors_within((args, kwargs))) as writes:
            output = forward(*args, **kwargs)
        side_outputs.check_sendable(name, output, (args, kwargs))
        put = entries.changed(name)
        attributes, grown = side_outputs.new_side_outputs(before, unit)
        kept = {*attributes, *writes.written()}
        side = hook_outputs | attributes | {path: entry.of(entries.containers) for path, entry in put.items()}
    side = {path: map_leaves(stand_in, value) for path, value in side.items()}
    read = tuple(writes.read.values())
    return Result(map_leaves(stand_in, output), side, grown, frozenset(kept), put, read=read)


@contextlib.contextmanager
def _given(change: Callable[[int, torch.Tensor], torch.Tensor], call: Call) -> Iterator[Call]:
    """The arguments with other tensors, inside also those in attributes of objects."""
    objects = [leaf for leaf in leaves_of(call) if attribute_tensors(leaf)]
    before = [dict(vars(leaf)) for leaf in objects]
    try:
        for leaf, attributes in zip(objects, before, strict=True):
            vars(leaf).update(map_leaves(change, attributes))
        yield map_leaves(change, call)
    finally:
        for leaf, attributes in zip(objects, before, strict=True):
            vars(leaf).clear()
            vars(leaf).update(attributes)
