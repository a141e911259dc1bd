"""Private names of torch's activation checkpointing."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _checkpoint_without_reentrant_generator,
    noop_context_fn,
)
from torch.utils.flop_counter import flop_registry

Region = Generator[None, None, None]
without_modes = _disable_current_modes
_SELECTIVE = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


def recomputed_region(run: Callable[[], Any], device: torch.device, policy: str) -> Region:
    """A region whose saved tensors are dropped: what autograd saves between the first and second step of this generator.

    Args:
        run: runs the region once more, when the backward pass needs its saved tensors.
        device: where the region computes: its random state is restored for `run`.
        policy: "full" keeps nothing; "selective" keeps the results of matmuls, convolutions and attention; "alternate" keeps
            those of attention and of every other matmul or convolution, starting with the first.
    """

    def again(_argument: torch.Tensor) -> None:
        run()

    kept: list[_Kept] = []
    alternate = policy == "alternate"
    keep: Any = (
        noop_context_fn if policy == "full" else lambda: (_Keep(kept, alternate), _Reuse(kept, alternate))
    )
    # torch saves the random state of the devices of its arguments
    argument = torch.empty(0, device=device)
    region: Region = _checkpoint_without_reentrant_generator(
        again, True, keep, "default", False, True, argument
    )
    return region


def selective_checkpointing() -> bool:
    """Whether torch's selective checkpointing counts the ops that run here: it requires the same ops in both runs."""
    modes = range(torch._C._len_torch_dispatch_stack())
    return any(isinstance(torch._C._get_dispatch_stack_at(i), _SELECTIVE) for i in modes)


Notes = dict[Any, list[Any]]


def notes_of_checkpoint() -> tuple[Notes, Counter[Any] | None] | None:
    """Notes on the calls of the checkpointed region that runs here, kept as long as the region; None outside of all.

    The second value is None in the first run of the region, and counts the calls of each second run.
    """
    pair = torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]
    if pair is None:
        return None
    pack = inspect.unwrap(pair[0])
    of_first = pack.__qualname__.startswith("_checkpoint_hook.")
    if not of_first and not pack.__qualname__.startswith("_recomputation_hook."):
        return None
    variables = inspect.getclosurevars(pack).nonlocals
    if of_first:
        return variables["frame"].__dict__.setdefault(_NOTES, {}), None
    frame = variables["target_frame_ref"]().__dict__
    again = frame.setdefault(_AGAIN, {}).setdefault(variables["gid"], Counter())
    return frame.setdefault(_NOTES, {}), again


_NOTES, _AGAIN = "_meshwright_notes", "_meshwright_again"


class _Choice:
    """Chooses the expensive ops of one run that are kept: attention, and all others or every other one."""

    def __init__(self, alternate: bool) -> None:
        self.alternate, self.count = alternate, 0

    def keeps(self, op: Any, args: Any, kwargs: Any) -> bool:
        """Whether the result of the next op is kept."""
        if not _is_expensive(op, args, kwargs):
            return False
        if not self.alternate or "scaled_dot_product" in str(op):
            return True
        self.count += 1
        return self.count % 2 == 1


class _Kept:
    """The result of one expensive op."""

    def __init__(self, op: Any, out: Any) -> None:
        self.op, self.out = op, pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, out)
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [x._version for x in pytree.tree_leaves(self.out) if isinstance(x, torch.Tensor)]

    @property
    def intact(self) -> bool:
        """Whether it was not written to since."""
        return self._versions() == self.versions


class _Keep(TorchDispatchMode):
    """Keeps the results of expensive ops.

    torch's create_selective_checkpoint_contexts does not fit: it requires the same ops in both runs, but the first run also
    derives local programs, which the second only executes.
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
    """Returns the kept results of expensive ops, in their order."""

    def __init__(self, kept: list[_Kept], alternate: bool) -> None:
        super().__init__()
        self.kept, self.alternate = kept, alternate
        self.position, self.choice = 0, _Choice(alternate)

    def __enter__(self) -> Any:
        self.position, self.choice = 0, _Choice(self.alternate)
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.choice.keeps(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        kept = self.kept[self.position] if self.position < len(self.kept) else None
        self.position += 1
        if kept is None or kept.op is not func:
            text = f"{func} runs at another position than in the first run; a recomputed module must be deterministic"
            raise RuntimeError(text)
        # it was written to in place: compute it again
        if not kept.intact:
            return func(*args, **(kwargs or {}))
        return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, kept.out)


def _is_expensive(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether torch has a FLOP count for the op: matmuls, convolutions and attention. All others are memory-bound."""
    packet = getattr(op, "_overloadpacket", None)
    if packet not in flop_registry and "scaled_dot_product" not in str(op):
        return False
    if any(isinstance(x, FakeTensor) for x in args):
        return False
    names = (argument.name for argument in op._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    # skipping a random op would change all random numbers after it
    return not given.get("dropout_p")
