"""Optimizers whose states are quantized in blocks of elements: each block is one of the whole value, on one rank.

Their step runs on plain local tensors. Where a rank's part of a parameter is not whole blocks, parameter and gradient are gathered
along as few mesh axes as give it some, and states stay where they are stepped. Under ZeRO with a `unit` in the plan (a multiple of
the block) nothing is gathered. States of a parameter's shape, and those with one entry for each block, are DTensors of global
values: checkpoints save them by boxes, and any layout loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor.comm.log import Site
from meshwright_dtensor.comm.redistribute import convert
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of, stock_layout
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.sharding.boxes import read_region
from meshwright_dtensor.sharding.states import complete
from meshwright_dtensor.stages.stage_tensor import StageTensor, value_of
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.permuted import dequantized, permuted_layout, placed_dtensor
from meshwright_dtensor.tensor.compute_copy import touch
from meshwright_dtensor.utils.step_copy import step_copy
from meshwright_parallel._torch.core import local_of
from meshwright_parallel.optim.block_layouts import whole_block_states

Tensor = torch.Tensor
_MARK = "_meshwright_blocks"
_SITE = Site(function="blocks of optimizer states")


@dataclass(frozen=True)
class Blocks:
    """How an optimizer quantizes its states.

    Attributes:
        size: elements of a block.
        per_block: names of states with one entry for each block.
        quantizes: whether the states of a parameter of so many elements are quantized.
        prepare: called with the optimizer's copy for one step, and a function from its local tensors to the elements of the whole
            parameter, which it may have to decide by.
        requantize: called with that copy, a local tensor and its states that were loaded.
    """

    size: int
    per_block: tuple[str, ...] = ()
    quantizes: Callable[[int], bool] = lambda numel: True
    prepare: Callable[[Any, Callable[[Tensor], int | None]], None] = lambda copied, numel_of: None
    requantize: Callable[[Any, Tensor, dict[str, Any]], None] = lambda copied, local, entries: None


def step_whole_blocks(
    optimizer: torch.optim.Optimizer, block: int, per_block: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """Let each step of `optimizer` see plain local tensors that are whole blocks of the parameters; returns the same optimizer.

    For optimizers that compute elementwise but for blocks of `block` elements, which follow each other in a contiguous parameter
    (states of 8 bits with a scale for each block). The last block of a parameter may have fewer elements. Plan with
    `zero_unit=block`, so that shards end at borders of blocks: otherwise parameters and gradients are gathered
    for the step. torchao's and bitsandbytes' optimizers need no such call.

    Args:
        block: elements of a block.
        per_block: names of states (1-D) that have one entry for each block.

    Raises UsageError: not an optimizer, or `block` is no number from 1 on.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"step_whole_blocks takes an optimizer, not {type(optimizer).__name__}; make it from model.parameters() first"
        )
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise UsageError(f"block is {block!r}; give the elements of a block, an int from 1 on")
    if isinstance(per_block, str):
        raise UsageError(f"per_block is {per_block!r}; give a list of names of states")
    optimizer.__dict__[_MARK] = Blocks(block, tuple(per_block))
    return optimizer


def marked_blocks(optimizer: torch.optim.Optimizer) -> Blocks | None:
    """What `step_whole_blocks` was called with."""
    return optimizer.__dict__.get(_MARK)


def refuse_stages_of_blocks(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError for a marked optimizer, of which some parameters are of pipeline stages."""
    if marked_blocks(optimizer) is not None:
        raise UnsupportedError(
            f"step_whole_blocks({type(optimizer).__name__}) under pp: its states could not be read on other stages; plan with pp=1"
        )


@dataclass
class _Part:
    """One parameter as it is stepped on this rank.

    Attributes:
        parameter: of the user's optimizer.
        local: the plain tensor that is stepped.
        stored: layout of the parameter, complete.
        stepped: layout of `local`.
        blocks: layout of a state with one entry for each block; None for a parameter that is not over a mesh.
        copied: whether `local` is not the stored part itself.
    """

    parameter: Tensor
    local: Tensor
    stored: Layout | None = None
    stepped: Layout | None = None
    blocks: Layout | None = None
    copied: bool = False


@dataclass
class BlockGroups:
    """The groups of a copy of an optimizer over plain local tensors; made when they are first read, after a closure has run."""

    optimizer: torch.optim.Optimizer
    copied: Any
    blocks: Blocks
    parts: list[list[_Part]] = field(default_factory=list)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._make()
        return iter(self.groups)

    def __len__(self) -> int:
        return len(self.optimizer.param_groups)

    def __getitem__(self, index: Any) -> Any:
        self._make()
        return self.groups[index]

    @torch.no_grad()
    def _make(self) -> None:
        if self.groups:
            return
        numels: dict[Tensor, int] = {}
        for group in self.optimizer.param_groups:
            parts = [_part(p, self.blocks) for p in group["params"] if not isinstance(p, StageTensor)]
            self.parts.append(parts)
            self.groups.append({**group, "params": [part.local for part in parts]})
            numels.update((part.local, part.parameter.numel()) for part in parts)
        self.blocks.prepare(self.copied, numels.get)
        for part in (part for parts in self.parts for part in parts):
            if part.parameter in self.optimizer.state:
                given = self.optimizer.state[part.parameter]
                entries = {key: _local_state(part, self.blocks, key, x) for key, x in given.items()}
                if part.stepped is not None:
                    self.blocks.requantize(self.copied, part.local, entries)
                self.copied.state[part.local] = entries

    @torch.no_grad()
    def keep(self) -> None:
        """After the step: give the optimizer its parameters, states and options."""
        if not self.groups:
            return
        if marked_blocks(self.optimizer) is not None:
            kept = ("state", "param_groups")
            self.optimizer.__dict__.update((k, x) for k, x in self.copied.__dict__.items() if k not in kept)
        for group, lent, parts in zip(self.optimizer.param_groups, self.groups, self.parts, strict=True):
            group.update((key, value) for key, value in lent.items() if key != "params")
            for part in parts:
                if part.local.grad is not None and isinstance(part.parameter, MeshParameter):
                    if part.copied:
                        assert part.stored is not None and part.stepped is not None
                        stepped = convert(part.local.detach(), part.stepped, part.stored.states, _SITE)
                        local_of(part.parameter).copy_(stepped)
                    touch(part.parameter)
                if part.local in self.copied.state:
                    entries = self.optimizer.state[part.parameter]
                    for key, x in self.copied.state[part.local].items():
                        old = entries.get(key)
                        if not (isinstance(old, DTensor) and local_of(old) is x):
                            entries[key] = _global_state(part, self.blocks, key, x)


def block_copy(optimizer: torch.optim.Optimizer, blocks: Blocks) -> torch.optim.Optimizer | None:
    """A copy of the optimizer over local tensors, for one step; None if it has DTensors of another framework."""
    for group in optimizer.param_groups:
        if any(
            isinstance(p, DTensor) and not isinstance(p, (MeshParameter, StageTensor))
            for p in group["params"]
        ):
            return None
    copied = step_copy(optimizer, type(optimizer.state)(dict))  # type: ignore[call-arg]
    copied.param_groups = BlockGroups(optimizer, copied, blocks)  # type: ignore[assignment]
    return copied


def _part(parameter: Tensor, blocks: Blocks) -> _Part:
    if not isinstance(parameter, MeshParameter):
        return _Part(parameter, parameter)
    given = parameter.global_layout
    stored = given.with_states(complete(given.states))
    local, stepped, of_blocks = local_of(parameter), stored, None
    if given.shape.numel() and blocks.quantizes(given.shape.numel()):
        stepped, of_blocks = given.context.cached(_layouts, stored, blocks.size)
    # one that has no gradient is not stepped; blocks are those of contiguous tensors
    copied = parameter.grad is not None and (stepped is not stored or not local.is_contiguous())
    if copied:
        gradient = local.grad
        local = convert(local.detach(), stored, stepped.states, _SITE).clone(
            memory_format=torch.contiguous_format
        )
        if gradient is not None:
            local.grad = convert(gradient.detach(), stored, stepped.states, _SITE).contiguous()
    return _Part(parameter, local, stored, stepped, of_blocks, copied)


def _layouts(context: MeshContext, stored: Layout, block: int) -> tuple[Layout, Layout]:
    """Layouts of a parameter, and of the list of its blocks, in which each rank has whole ones."""
    states, of_blocks = whole_block_states(tuple(stored.shape), context.sizes, stored.states, block)
    count = -(-stored.shape.numel() // block)
    return stored.with_states(states), layout_of(context, of_blocks, (count,), torch.float32)


def _layout_of_state(part: _Part, blocks: Blocks, key: str, shape: torch.Size, local: bool) -> Layout | None:
    """The layout of a state of this `shape` (`local`: of this rank's part); None for one that every rank has whole."""
    if not shape or part.stepped is None:
        return None
    if key in blocks.per_block and part.blocks is not None:
        wanted = part.blocks
        if shape == (wanted.local_shape if local else wanted.shape):
            return wanted
        raise UnsupportedError(
            f"state {key!r} has shape {list(shape)}, and one entry for each block of {blocks.size} elements is "
            f"{list(wanted.local_shape if local else wanted.shape)}; name only such states in per_block"
        )
    return part.stepped if shape == (part.stepped.local_shape if local else part.stepped.shape) else None


def _local_state(part: _Part, blocks: Blocks, key: str, x: Any) -> Any:
    """A state as the step takes it: this rank's part of one that is over the mesh, and any other as it is."""
    x = value_of(x) if isinstance(x, StageTensor) else x
    if not isinstance(x, Tensor):
        return x
    target = _layout_of_state(part, blocks, key, x.shape, local=False)
    if target is None:
        return x.full_tensor() if isinstance(x, DTensor) else x
    local = local_of(x) if isinstance(x, DTensor) else x.detach()
    source = (permuted_layout(x) or stock_layout(x)) if isinstance(x, DTensor) else None
    if source is not None and source.states == target.states:
        return local
    # codes and scales are those of other blocks
    local = dequantized(local)
    if source is None:
        return read_region(local, target.region).clone()
    return convert(local, source, target.states, _SITE)


def _global_state(part: _Part, blocks: Blocks, key: str, x: Any) -> Any:
    """A state of the step as the optimizer keeps it."""
    target = _layout_of_state(part, blocks, key, x.shape, local=True) if isinstance(x, Tensor) else None
    return x if target is None else mesh_value(placed_dtensor(x, target.with_dtype(x.dtype)))
