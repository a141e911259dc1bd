"""When compute copies are gathered and given up.

Stages 1 and 2, and mixed precision alone: memory is kept, and values are gathered anew at the start of every forward of the
model, since nothing tells reliably that no parameter was changed.  Stage 3: a unit is gathered when it is first used and
given up when its module has run; the backward pass gathers it again.  The unit that was used next the last time is gathered
ahead.  Gathering happens at the first use of a parameter, wherever that is: tied parameters, weights that another module
reads and functions of parameters outside of any forward need no special case.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.comm.log import CommLog
from meshwright_parallel._torch.core import backward_is_running, saving_is_hooked
from meshwright_parallel.engine.param_group import Copy, State, Unit
from meshwright_parallel.engine.saved_tensors import SavedTensors

_ATTRIBUTE = "_meshwright_unit"


@dataclass
class Group:
    """Copies that become one unit: those of the parameters that belong to `module`, or are left to the root."""

    name: str
    outside: bool
    copies: list[Copy]


class Gathering:
    """The gathered copies of one model.

    Args:
        mesh: the device mesh.
        groups: what is gathered together, in the order of the model's modules.
        frees: memory is given up between uses (stage 3).
    """

    def __init__(self, mesh: DeviceMesh, groups: Sequence[Group], frees: bool) -> None:
        self.mesh, self.groups, self.frees = mesh, tuple(groups), frees
        self.storages: dict[int, Unit] = {}
        self.units = [Unit(self, i, g.name, g.outside, g.copies) for i, g in enumerate(self.groups)]
        self.depth = 0
        self.leaves_are_safe = not frees
        self._hooks: list[SavedTensors] = []
        # which unit is used after which, in forward and in backward, as it was the last time
        self._after: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._last: int | None = None
        self._recent: deque[Unit] = deque(maxlen=2)
        self._backward = self._learnt = False
        for unit in self.units:
            for one in unit.copies:
                one.parameter.compute_with(one)

    def __deepcopy__(self, memo: dict[int, Any]) -> Gathering:
        """For a copied model: an engine of its own, over the copies of the parameters."""
        groups = []
        for group in self.groups:
            copies = []
            for one in group.copies:
                parameter = copy.deepcopy(one.parameter, memo)
                copies.append(Copy(parameter, one.layout, one.axis, one.shards))
            groups.append(Group(group.name, group.outside, copies))
        made = memo[id(self)] = Gathering(self.mesh, groups, self.frees)
        return made

    @property
    def phase(self) -> str:
        """Of a collective that starts now."""
        return "backward" if CommLog.listening() and backward_is_running() else "forward"

    @property
    def live_bytes(self) -> int:
        """Bytes of all buffers that are held now."""
        return sum(unit.nbytes for unit in self.units if unit.buffer is not None)

    # ------------------------------------------------------------------------------------ a forward
    def enter(self, outside: bool) -> None:
        """The forward of a unit's module begins; `outside` for the model itself."""
        if not backward_is_running():
            if outside and self.depth:  # a forward that was left by something that is no Exception
                self._end()
                self.depth = 0
            if self.depth == 0:
                self._begin()
        self.depth += 1

    def leave(self, units: Sequence[Unit]) -> None:
        """The forward of the module of these units has ended."""
        self.depth = max(0, self.depth - 1)
        if backward_is_running():  # recomputation: what it gathered is needed at once
            return
        if self.depth == 0:
            self._end()
        elif self.frees:
            for unit in units:
                if not (self._learnt and torch.is_grad_enabled() and self._is_last(unit)):
                    unit.drop()

    def _is_last(self, unit: Unit) -> bool:
        """Whether no block comes after it: the last of a forward is the first of the backward pass."""
        following = self._after[0].get(unit.index)
        return following is None or self.units[following].outside

    def _begin(self) -> None:
        for unit in self.units:
            unit.drop(keep_memory=not self.frees)
        self._last, self._backward = None, False
        if not self.frees:
            return
        if torch.is_grad_enabled() and not saving_is_hooked():
            saved = SavedTensors(self)
            saved.hooks.__enter__()
            self._hooks.append(saved)
        self.leaves_are_safe = bool(self._hooks) or not torch.is_grad_enabled()

    def _end(self) -> None:
        while self._hooks:
            self._hooks.pop().hooks.__exit__()
        self.leaves_are_safe = not self.frees
        if self._last is not None:
            self._after[0].pop(self._last, None)
            self._learnt = True
        self._last = None
        for unit in self.units:
            if unit.state is State.FLYING:  # gathered ahead, and not used this time
                unit.drop(keep_memory=not self.frees)
            elif self.frees and not torch.is_grad_enabled():
                unit.drop()

    # ------------------------------------------------------------------------------------ uses
    def need(self, unit: Unit) -> None:
        """Gather a unit that is about to be used, and start on the one that follows."""
        if unit.state is State.READY:  # its values are out of date
            unit.drop(keep_memory=not self.frees)
        if unit.state is State.STALE:
            unit.launch()
        unit.finish()  # before the next is on its way: what both were gathered into would be there at once
        self._moved(unit)

    def changed(self, unit: Unit) -> bool:
        """Outside of any forward: whether what was gathered is out of date."""
        return not backward_is_running() and unit.changed()

    def backward_reaches(self, unit: Unit) -> None:
        """A saved view of a unit is read."""
        if unit.state is State.READY:
            if self._last != unit.index or not self._backward:
                self._moved(unit)
            return
        self.need(unit)

    def _moved(self, unit: Unit) -> None:
        """Remember what is used after what, and gather ahead."""
        backward = self.frees and backward_is_running()
        if backward != self._backward:
            self._backward, self._last = backward, None
            self._recent.clear()
        if not (self.depth or backward):
            return
        after = self._after[backward]
        if self._last is not None and self._last != unit.index:
            after[self._last] = unit.index
        self._last = unit.index
        if backward and not unit.outside and unit not in self._recent:
            if len(self._recent) == 2 and self._recent[0].state is State.READY:
                self._recent[0].drop()  # parts that get no gradient would keep it
            self._recent.append(unit)
        following = after.get(unit.index)
        if following is not None and self.units[following].state is State.STALE:
            self.units[following].launch()

    # ------------------------------------------------------------------------------------ gradients
    def gradient_taken(self, unit: Unit) -> None:
        """A gradient of the unit has been taken; when all have, the backward pass is done with it."""
        unit.fired += 1
        if unit.fired >= unit.trainable:
            unit.fired = 0
            if self.frees and unit.state is State.READY:
                unit.drop()

    def after_backward(self) -> None:
        """A backward pass has ended."""
        if self._backward and self._last is not None:
            self._after[1].pop(self._last, None)
        self._last, self._backward = None, False
        for unit in self.units:
            unit.fired = 0
            if self.frees:
                unit.drop()


@dataclass(eq=False)
class UnitHook:
    """What a module knows of the units that belong to it."""

    engine: Gathering
    indices: tuple[int, ...]
    outside: bool

    def __deepcopy__(self, memo: dict[int, Any]) -> UnitHook:
        return UnitHook(copy.deepcopy(self.engine, memo), self.indices, self.outside)


def hook_module(module: nn.Module, hook: UnitHook) -> None:
    """Tell the engine when the forward of `module` begins and ends."""
    module.__dict__[_ATTRIBUTE] = hook
    module.register_forward_pre_hook(_before, prepend=True)
    module.register_forward_hook(_after_forward, always_call=True)


def gathering_of(model: nn.Module) -> Gathering | None:
    """The engine that gathers the parameters of `model`, if it has one."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found.engine if isinstance(found, UnitHook) else None


def _before(module: nn.Module, args: Any) -> None:
    hook: UnitHook = module.__dict__[_ATTRIBUTE]
    hook.engine.enter(hook.outside)


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    hook: UnitHook = module.__dict__[_ATTRIBUTE]
    hook.engine.leave([hook.engine.units[i] for i in hook.indices])
