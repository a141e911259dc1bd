"""Activation checkpointing by the plan: chosen modules keep their inputs only, and run again in the backward pass.

The second run has the module's usual hooks. So its planned layouts, random numbers, buffers and collectives are those of the
first, on every rank. torch's non-reentrant checkpointing does the bookkeeping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase as NORMS

from meshwright_dtensor._torch.modes import with_function_modes
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.plan import ParallelPlan, RecomputeRule
from meshwright_dtensor.trace.module_stack import FRAMES, Frame
from meshwright_parallel._torch.checkpoint import Region, recomputed_region
from meshwright_parallel.recompute.argument_copies import ArgumentCopies, version_of

_ATTRIBUTE = "_meshwright_recompute"


def recomputed_modules(model: nn.Module, plan: ParallelPlan) -> dict[str, RecomputeRule]:
    """Name -> rule of the recomputed modules: of nested ones the outermost, and never the model itself.

    A module without a forward is not recomputed, but its parts may be.

    Raises PlanError: a rule matches no module.
    """
    chosen: dict[str, RecomputeRule] = {}
    used: set[RecomputeRule] = set()
    for name, module in model.named_modules():
        rule = next((r for r in plan.recompute if name and r.matches(name)), None)
        if rule is None:
            continue
        used.add(rule)
        if has_forward(module) and not any(name.startswith(f"{outer}.") for outer in chosen):
            chosen[name] = rule
    for index, rule in enumerate(plan.recompute):
        if rule not in used and not any(rule.matches(name) for name in chosen):
            reason = f"no module of this {type(model).__name__} matches"
            raise PlanError(f"recompute[{index}].pattern", rule.pattern, reason)
    return chosen


def install_recompute(model: nn.Module, plan: ParallelPlan, device: torch.device) -> None:
    """Install recomputation of the modules in `plan.recompute`, before any other hooks."""
    for name, rule in recomputed_modules(model, plan).items():
        module = model.get_submodule(name)
        module.__dict__[_ATTRIBUTE] = _Recomputed(device, rule.policy)
        module.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)
        module.register_forward_hook(_end, always_call=True)


class _Recomputed:
    """The running calls of one module; `again`: the current call is a second run."""

    def __init__(self, device: torch.device, policy: str) -> None:
        self.device, self.policy = device, policy
        self.again = False
        self.running: list[tuple[Region, _Call] | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recomputed:
        return _Recomputed(self.device, self.policy)


class _Call:
    """One call of a module, with the arguments and buffers to run it again."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.arguments = ArgumentCopies(args, kwargs)
        self.begun = copy(FRAMES.begun)
        self.before = {
            (part, name): (buffer, version_of(buffer), buffer.clone())
            for part in module.modules()
            for name, buffer in part.named_buffers(recurse=False)
        }

    def finished(self) -> None:
        """The call has ended: keep only those buffers that it wrote to."""
        self.arguments.finished()
        self.before = {
            (part, name): entry
            for (part, name), entry in self.before.items()
            # torch updates running statistics without a version count
            if isinstance(part, NORMS)
            or part._buffers.get(name) is not entry[0]
            or version_of(entry[0]) != entry[1]
        }

    def run(self) -> None:
        """Run the module again, on its original arguments."""
        state = self.module.__dict__[_ATTRIBUTE]
        state.again, outer = True, state.again
        # the modules around a backward pass are not the caller
        here = FRAMES.replaced([Frame("", {})], copy(self.begun))
        again = self.arguments.once_more(type(self.module).__name__)
        try:
            with here, self._buffers(), again as (args, kwargs):
                self.module(*args, **kwargs)
        finally:
            state.again = outer

    @contextlib.contextmanager
    def _buffers(self) -> Iterator[None]:
        """Inside, the buffers that the first run changed have their values from before it; later writes are dropped."""
        current = {(part, name): part._buffers[name] for part, name in self.before}
        for (part, name), (_, _, old) in self.before.items():
            part._buffers[name] = old.clone()
        try:
            yield
        finally:
            for (part, name), buffer in current.items():
                part._buffers[name] = buffer


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    state: _Recomputed = module.__dict__[_ATTRIBUTE]
    if state.again or not torch.is_grad_enabled():
        state.running.append(None)
        return
    call = _Call(module, args, kwargs)
    region = recomputed_region(with_function_modes(call.run), state.device, state.policy)
    state.running.append((region, call))
    next(region)


def _end(module: nn.Module, args: Any, output: Any) -> None:
    state: _Recomputed = module.__dict__[_ATTRIBUTE]
    running = state.running.pop() if state.running else None
    if running is None:
        return
    region, call = running
    call.finished()
    with contextlib.suppress(StopIteration):
        next(region)
