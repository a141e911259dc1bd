"""What hooks inside a block see while it runs, so that those of its copies are shown the same of theirs.

transformers takes outputs out of a model by such hooks (routers' logits, attentions): a loss of them needs those of every block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright_planner import _torch
from meshwright_planner._torch import pytree
from meshwright_planner.trace.recorder.storage_recorder import StorageRecorder


@dataclass(frozen=True)
class Sight:
    """One call of a hook.

    Args:
        module: whose hook it is, by its name below the block.
        place: which of that module's hooks.
        leaves, spec: the module's arguments and its output.
    """

    module: str
    place: int
    leaves: tuple[Any, ...]
    spec: Any

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the hook sees."""
        return [x for x in self.leaves if isinstance(x, torch.Tensor)]


@dataclass
class Sights:
    """What the hooks of one run saw, in order.

    Args:
        only_looked: none of them computed, or changed what its module returns.
    """

    seen: list[Sight] = field(default_factory=list)
    only_looked: bool = True


@contextlib.contextmanager
def watched_hooks(block: nn.Module, watcher: StorageRecorder) -> Iterator[Sights]:
    """Inside, hooks below `block` run as they do, and what they see is written down."""
    sights = Sights()
    tables = [(name, _torch.forward_hooks(m)) for name, m in block.named_modules() if name]
    before = [dict(table) for _, table in tables]
    for name, table in tables:
        for place, (key, hook) in enumerate(table.items()):
            table[key] = _noting(sights, watcher, name, place, hook)
    wrapped = [list(table) for _, table in tables]
    try:
        yield sights
    finally:
        for (_, table), keys, hooks in zip(tables, wrapped, before):
            sights.only_looked &= list(table) == keys  # else hooks came or went meanwhile
            table.update((key, hook) for key, hook in hooks.items() if key in table)


def _noting(
    sights: Sights, watcher: StorageRecorder, name: str, place: int, hook: Callable[..., Any]
) -> Callable[..., Any]:
    def run(module: nn.Module, args: Any, output: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, output))
        sights.seen.append(Sight(name, place, tuple(leaves), spec))
        before = watcher.extent()
        result = hook(module, args, output)
        sights.only_looked &= result is None and watcher.extent() == before
        return result

    return run


def show(
    sights: list[Sight],
    block: nn.Module,
    watcher: StorageRecorder,
    stand_in: Callable[[torch.Tensor], torch.Tensor],
) -> bool:
    """Run the hooks of a copied block on stand-ins for what they would see; whether they only looked."""
    for sight in sights:
        module = block.get_submodule(sight.module)
        hook = list(_torch.forward_hooks(module).values())[sight.place]
        leaves = [stand_in(x) if isinstance(x, torch.Tensor) else x for x in sight.leaves]
        args, output = pytree.tree_unflatten(leaves, sight.spec)
        before = watcher.extent()
        if hook(module, args, output) is not None or watcher.extent() != before:
            return False
    return True
