"""Torch's machinery of activation checkpointing, by its private names."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import _checkpoint_without_reentrant_generator, noop_context_fn
from torch.utils.flop_counter import flop_registry

Region = Generator[None, None, None]


def recomputed_region(run: Callable[[], Any], device: torch.device, policy: str) -> Region:
    """What autograd saves between the first and the second step of this generator is dropped; `run` makes it again.

    Args:
        run: runs the region once more, when the backward pass needs what was dropped.
        device: where the region computes: its random state is restored for `run`.
        policy: "full"; "selective" keeps the results of matmuls, convolutions and attention, so that `run` does not compute
            them again; "alternate" keeps those of attention and of every other matmul or convolution, the first included.
    """

    def again(_place: torch.Tensor) -> None:
        run()

    place = torch.empty(
        0, device=device
    )  # torch looks at its arguments for the devices whose random state counts
    contexts = noop_context_fn if policy == "full" else partial(_keep_expensive, policy == "alternate")
    region: Region = _checkpoint_without_reentrant_generator(
        again, True, contexts, "default", False, True, place
    )
    return region


def _keep_expensive(alternate: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    kept: list[_Kept] = []
    return _Keep(kept, alternate), _Reuse(kept, alternate)


class _Choice:
    """Which of the expensive ops of one run are kept: attention, and of the others all, or every other one."""

    def __init__(self, alternate: bool) -> None:
        self.alternate, self.met = alternate, 0

    def keeps(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether the result of the op that comes next is kept."""
        if not _is_expensive(op, args, kwargs):
            return False
        if not self.alternate or "scaled_dot_product" in str(op):
            return True
        self.met += 1
        return self.met % 2 == 1


class _Kept:
    """The result of one expensive op."""

    def __init__(self, op: Any, out: Any) -> None:
        self.op, self.out = op, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [x._version for x in pytree.tree_leaves(self.out) if isinstance(x, torch.Tensor)]

    @property
    def intact(self) -> bool:
        """Whether nobody has written to it."""
        return self._versions() == self.versions


class _Keep(TorchDispatchMode):
    """Keeps the results of expensive ops.

    Not torch's create_selective_checkpoint_contexts: that one wants every op of the first run to come again, while a
    program that is derived in the first run is only carried out in the second.
    """

    def __init__(self, kept: list[_Kept], alternate: bool) -> None:
        super().__init__()
        self.kept, self.choice = kept, _Choice(alternate)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.choice.keeps(func, args, kwargs or {}):
            self.kept.append(_Kept(func, out))
        return out


class _Reuse(TorchDispatchMode):
    """Gives the results of expensive ops back, in the order in which they were kept."""

    def __init__(self, kept: list[_Kept], alternate: bool) -> None:
        super().__init__()
        self.kept, self.alternate = kept, alternate
        self.place, self.choice = 0, _Choice(alternate)

    def __enter__(self) -> Any:
        self.place, self.choice = 0, _Choice(self.alternate)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.choice.keeps(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        kept = self.kept[self.place] if self.place < len(self.kept) else None
        self.place += 1
        if kept is None or kept.op is not func:
            raise RuntimeError(
                f"{func} runs in another place than in the first run; the module is not deterministic"
            )
        if not kept.intact:  # written to in place since: compute it again
            return func(*args, **(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, kept.out)


def _is_expensive(op: Any, args: Any, kwargs: Any) -> bool:
    """By what an op costs: torch counts flops of matmuls, convolutions and attention; all else is bound by memory."""
    packet = getattr(op, "_overloadpacket", None)
    if packet not in flop_registry and "scaled_dot_product" not in str(op):
        return False
    if any(isinstance(x, FakeTensor) for x in args):
        return False
    names = (argument.name for argument in op._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return not given.get("dropout_p")  # it draws: left out, what is drawn after it would be other numbers
