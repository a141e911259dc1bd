"""Repeated blocks of a model: of one class, with equal submodules, sizes and attributes, in one list; and the hooks inside them.

Calls of forward hooks inside a block are recorded, so that the hooks of copied blocks can be called with their own tensors.
transformers collects outputs by such hooks (router logits, attentions), and a loss on them needs those of every block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.model.blocks import has_forward
from meshwright_planner import _torch
from meshwright_planner._torch import pytree
from meshwright_planner.trace.recorder.borrow_model import Swap
from meshwright_planner.trace.recorder.storage_recorder import StorageRecorder

MIN_MEMBERS = 3
"""Fewest members of a family: the first two and the last always run."""

_NUMBERS = ("idx", "index", "layer_id", "layer_number", "block_id")
"""Parts of names of attributes that only hold the number of the block."""

_SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device, complex, bytes)


def families(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Name of a block -> (name of the first block of its family, whether it is the last)."""
    members_of: dict[str, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members: dict[Any, list[str]] = {}
        for key, child in module.named_children():
            held = next(child.children(), None) is not None and next(child.parameters(), None) is not None
            # other modules are never called
            if held and has_forward(child):
                marks = _signature(child)
                if marks is not None:
                    members.setdefault(marks, []).append(f"{name}.{key}" if name else key)
        for family in members.values():
            if len(family) >= MIN_MEMBERS:
                members_of.update((block, (family[0], block == family[-1])) for block in family)
    return members_of


def _signature(block: nn.Module) -> Any:
    """Equal for blocks of one family; None if a block has hooks that cannot be compared."""
    hooks = _torch.hooks_inside(block)
    if hooks is None:
        return None
    parts: list[Any] = [hooks]
    order: dict[int, int] = {}
    for name, module in block.named_modules(remove_duplicate=False):
        public = ((key, value) for key, value in vars(module).items() if not key.startswith("_"))
        attributes = tuple((key, _attribute(key, value)) for key, value in public)
        tensors = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad, order.setdefault(id(t), len(order)))
            for table in _torch.own_tensors(module)
            for key, t in table.items()
            if t is not None
        )
        parts.append((name, type(module), attributes, tensors))
    return tuple(parts)


def _attribute(key: str, value: Any) -> Any:
    if type(value) is int and any(word in key for word in _NUMBERS):
        return "which"
    if isinstance(value, _SIMPLE):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)) and all(isinstance(x, _SIMPLE) for x in value):
        return tuple(value)
    return id(value)


@dataclass(frozen=True)
class HookCall:
    """One call of a hook: the module below the block, the number of the hook on it, and the flattened arguments and output."""

    module: str
    place: int
    leaves: tuple[Any, ...]
    spec: Any

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the hook gets."""
        return [x for x in self.leaves if isinstance(x, torch.Tensor)]


@dataclass
class HookCalls:
    """The hook calls of one run, in order. passive: no hook computed anything or changed its module's output."""

    seen: list[HookCall] = field(default_factory=list)
    passive: bool = True


@contextlib.contextmanager
def recorded_hooks(block: nn.Module, recorder: StorageRecorder) -> Iterator[HookCalls]:
    """Inside, the calls of hooks below `block` are recorded."""
    hook_calls = HookCalls()
    tables = [(name, _torch.forward_hooks(m)) for name, m in block.named_modules() if name]
    before = [dict(table) for _, table in tables]

    def noting(name: str, place: int, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, args: Any, output: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, output))
            hook_calls.seen.append(HookCall(name, place, tuple(leaves), spec))
            before = recorder.extent()
            result = hook(module, args, output)
            hook_calls.passive &= result is None and recorder.extent() == before
            return result

        return run

    for name, table in tables:
        for place, (key, hook) in enumerate(table.items()):
            table[key] = noting(name, place, hook)
    wrapped = [list(table) for _, table in tables]
    try:
        yield hook_calls
    finally:
        for (_, table), keys, hooks in zip(tables, wrapped, before):
            # else hooks were added or removed during the run
            hook_calls.passive &= list(table) == keys
            table.update((key, hook) for key, hook in hooks.items() if key in table)


def replay_hooks(
    hook_calls: list[HookCall], block: nn.Module, recorder: StorageRecorder, fake_copy: Swap
) -> bool:
    """Call the hooks of a copied block with fake copies of the recorded tensors; returns whether they were passive."""
    for hook_call in hook_calls:
        module = block.get_submodule(hook_call.module)
        hook = list(_torch.forward_hooks(module).values())[hook_call.place]
        leaves = [fake_copy(x) if isinstance(x, torch.Tensor) else x for x in hook_call.leaves]
        args, output = pytree.tree_unflatten(leaves, hook_call.spec)
        before = recorder.extent()
        if hook(module, args, output) is not None or recorder.extent() != before:
            return False
    return True
