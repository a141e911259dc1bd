"""The compute copies of a placed model's parameters, and when their groups are unsharded and resharded.

ZeRO stages 1 and 2, and mixed precision without ZeRO: the buffers stay allocated. Their values are refreshed at the start of
every forward of the model, because no reliable signal tells that a parameter was changed; of the microbatches of a pipeline
at the start of the first.

Stage 3: a group is unsharded at the first use of one of its parameters, and resharded when its module has run. The backward
pass unshards it again. The group that was used next in the last pass is prefetched.

Unsharding happens at the first use of a parameter, wherever that is. So tied parameters, weights that another module reads, and
functions of parameters outside of any forward need no special case.
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
from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.model.blocks import parameter_units
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.ragged import spans_along
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.tensor.compute_copy import step_of_forwards
from meshwright_dtensor.tensor.staged import check_copied
from meshwright_parallel._torch.core import backward_is_running, saving_is_hooked
from meshwright_parallel.engine.flat_shards import Shards
from meshwright_parallel.engine.param_group import GroupSpec, ParamGroup, UnshardedParameter, UnshardState
from meshwright_parallel.engine.saved_tensors import SavedTensors

_ATTRIBUTE = "_meshwright_unit"


class UnshardEngine:
    """The unsharded parameters of one model.

    Args:
        specs: the parameter groups, in the order of the model's modules.
        reshards: memory is freed between uses (stage 3).

    Attributes:
        storages: storage of a buffer -> its group.
        forward_depth: nested forwards that run now.
        leaves_are_safe: autograd may save a leaf itself, because nothing frees its memory unnoticed.
    """

    def __init__(self, mesh: DeviceMesh, specs: Sequence[GroupSpec], reshards: bool) -> None:
        self.mesh, self.specs, self.reshards = mesh, tuple(specs), reshards
        self.storages: dict[int, ParamGroup] = {}
        self.groups = [ParamGroup(self, index, spec) for index, spec in enumerate(self.specs)]
        self.forward_depth = 0
        self.leaves_are_safe = not reshards
        self._hooks: list[SavedTensors] = []
        # group -> the group used after it in the last pass, for forward and for backward
        self._next: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._last: int | None = None
        self._recent: deque[ParamGroup] = deque(maxlen=2)
        self._backward = self._order_known = False
        # the pipeline's step that the last forward was a part of
        self._step: object | None = None
        for group in self.groups:
            for unsharded in group.parameters:
                unsharded.parameter.compute_with(unsharded)

    def __deepcopy__(self, memo: dict[int, Any]) -> UnshardEngine:
        """For a copied model: a new engine over the copied parameters. Raises UnsupportedError: of a pipelined one."""
        check_copied(old.parameter for spec in self.specs for old in spec.parameters)
        specs = []
        for spec in self.specs:
            parameters = [
                UnshardedParameter(copy.deepcopy(old.parameter, memo), old.layout, old.axis, old.shards)
                for old in spec.parameters
            ]
            specs.append(GroupSpec(spec.name, spec.is_root, parameters))
        engine = memo[id(self)] = UnshardEngine(self.mesh, specs, self.reshards)
        return engine

    @property
    def phase(self) -> str:
        """The phase of a collective that starts now."""
        return "backward" if CommLog.listening() and backward_is_running() else "forward"

    # ------------------------------------------------------------------------------------ a forward
    def begin_forward(self, is_root: bool) -> None:
        """The forward of a group's module begins; `is_root` for the model itself."""
        if not backward_is_running():
            # the forward before was left by a BaseException, which skips forward hooks
            if is_root and self.forward_depth:
                self._end()
                self.forward_depth = 0
            if self.forward_depth == 0:
                self._begin()
        self.forward_depth += 1

    def end_forward(self, groups: Sequence[ParamGroup]) -> None:
        """The forward of the module of these groups has ended."""
        self.forward_depth = max(0, self.forward_depth - 1)
        # recomputation: its backward needs the parameters at once
        if backward_is_running():
            return
        if self.forward_depth == 0:
            self._end()
        elif self.reshards:
            for group in groups:
                if not (self._order_known and torch.is_grad_enabled() and self._is_last_block(group)):
                    group.reshard()

    def _is_last_block(self, group: ParamGroup) -> bool:
        """Whether no block follows: the last block of the forward is the first of the backward pass."""
        following = self._next[0].get(group.index)
        return following is None or self.groups[following].is_root

    def _begin(self) -> None:
        before, self._step = self._step, step_of_forwards()
        if self.reshards or self._step is None or self._step is not before:
            for group in self.groups:
                group.reshard(keep_memory=not self.reshards)
        self._last, self._backward = None, False
        if not self.reshards:
            return
        if torch.is_grad_enabled() and not saving_is_hooked():
            saved = SavedTensors(self)
            saved.hooks.__enter__()
            self._hooks.append(saved)
        self.leaves_are_safe = bool(self._hooks) or not torch.is_grad_enabled()

    def _end(self) -> None:
        while self._hooks:
            self._hooks.pop().hooks.__exit__()
        self.leaves_are_safe = not self.reshards
        if self._last is not None:
            self._next[0].pop(self._last, None)
            self._order_known = True
        self._last = None
        for group in self.groups:
            # prefetched, but not used in this forward
            if group.state is UnshardState.IN_FLIGHT:
                group.reshard(keep_memory=not self.reshards)
            elif self.reshards and not torch.is_grad_enabled():
                group.reshard()

    # ------------------------------------------------------------------------------------ uses
    def unshard(self, group: ParamGroup) -> None:
        """Unshard a group that is about to be used, and prefetch the one that follows."""
        # its values are outdated
        if group.state is UnshardState.READY:
            group.reshard(keep_memory=not self.reshards)
        if group.state is UnshardState.STALE:
            group.start_unshard()
        # before the prefetch starts: otherwise both receive buffers would be allocated at once
        group.wait_for_unshard()
        self._record_use(group)

    def is_outdated(self, group: ParamGroup) -> bool:
        """Outside of any forward: whether the unsharded values are outdated."""
        return not backward_is_running() and any(unsharded.outdated for unsharded in group.parameters)

    def unshard_for_backward(self, group: ParamGroup) -> None:
        """A saved view of a group's buffer is read."""
        if group.state is UnshardState.READY:
            if self._last != group.index or not self._backward:
                self._record_use(group)
            return
        self.unshard(group)

    def _record_use(self, group: ParamGroup) -> None:
        """Record the order of uses, and prefetch the group that followed in the last pass."""
        backward = self.reshards and backward_is_running()
        if backward != self._backward:
            self._backward, self._last = backward, None
            self._recent.clear()
        if not (self.forward_depth or backward):
            return
        order = self._next[backward]
        if self._last is not None and self._last != group.index:
            order[self._last] = group.index
        self._last = group.index
        if backward and not group.is_root and group not in self._recent:
            if len(self._recent) == 2 and self._recent[0].state is UnshardState.READY:
                # a parameter without a gradient would keep it unsharded
                self._recent[0].reshard()
            self._recent.append(group)
        following = order.get(group.index)
        if following is not None and self.groups[following].state is UnshardState.STALE:
            self.groups[following].start_unshard()

    # ------------------------------------------------------------------------------------ gradients
    def gradient_consumed(self, group: ParamGroup) -> None:
        """A gradient of the group was moved to its bucket. After the last one, the backward pass is done with the group."""
        group.consumed_gradients += 1
        if group.consumed_gradients >= group.trainable:
            group.consumed_gradients = 0
            if self.reshards and group.state is UnshardState.READY:
                group.reshard()

    def end_backward(self) -> None:
        """A backward pass has ended."""
        if self._backward and self._last is not None:
            self._next[1].pop(self._last, None)
        self._last, self._backward = None, False
        for group in self.groups:
            group.consumed_gradients = 0
            if self.reshards:
                group.reshard()


@dataclass(eq=False)
class ModuleGroups:
    """The parameter groups of one module, stored on the module."""

    engine: UnshardEngine
    indices: tuple[int, ...]
    is_root: bool


def install_compute_copies(
    model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, strategies: Sequence[Strategy]
) -> None:
    """Give the parameters the compute copies that `plan` asks for: unsharded along the ZeRO axis, cast, or both."""
    axis = next((s.axis for s in strategies if s.gathers and plan.degree(s.axis) > 1), "")
    dtype = None if plan.precision is None else DTYPES[plan.precision.parameters]
    stage = plan.zero.stage if plan.zero is not None and axis else 0
    specs: dict[tuple[object, ...], GroupSpec] = {}
    modules: dict[str, nn.Module] = {}
    for name, module, parameters in parameter_units(model):
        modules[name] = module
        for _, parameter in parameters:
            assert isinstance(parameter, MeshParameter)
            unsharded = _unsharded(parameter, axis, dtype)
            if unsharded is not None:
                key = (name, unsharded.layout.dtype, parameter.dtype, parameter.device)
                specs.setdefault(key, GroupSpec(name, module is model, [])).parameters.append(unsharded)
    if not specs:
        return
    engine = UnshardEngine(mesh, list(specs.values()), reshards=stage == 3)
    for name, module in modules.items():
        indices = tuple(group.index for group in engine.groups if group.name == name)
        if indices or module is model:
            module.__dict__[_ATTRIBUTE] = ModuleGroups(engine, indices, module is model)
            module.register_forward_pre_hook(_before_forward, prepend=True)
            module.register_forward_hook(_after_forward, always_call=True)


def _unsharded(parameter: MeshParameter, axis: str, dtype: torch.dtype | None) -> UnshardedParameter | None:
    """The compute copy of a parameter; None where it is computed with as it is stored."""
    stored = parameter.compute_layout
    states: list[State] = list(stored.states)
    shard_dim = states[stored.context.axes.index(axis)] if axis else "I"
    compute_dtype = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
    if not isinstance(shard_dim, int):
        if compute_dtype == stored.dtype:
            return None
        layout = layout_of(stored.context, stored.states, stored.shape, compute_dtype)
        return UnshardedParameter(parameter, layout, "", None)
    mesh_dim = stored.context.axes.index(axis)
    states[mesh_dim] = "X"
    layout = layout_of(stored.context, tuple(states), stored.shape, compute_dtype)
    # from the strides of the global value: ranks must agree, and their shards may differ in length
    stride = parameter.stride()
    order = tuple(sorted(range(parameter.dim()), key=lambda d: (-stride[d], stored.shape[d] == 1)))
    context = stored.context
    spans = spans_along(tuple(stored.shape), context.sizes, context.coords, stored.states, mesh_dim)
    # the plan was checked
    assert spans is not None
    shards = Shards(tuple(layout.local_shape), int(shard_dim), spans, context.coords[mesh_dim], order)
    return UnshardedParameter(parameter, layout, axis, shards)


def _before_forward(module: nn.Module, args: Any) -> None:
    groups: ModuleGroups = module.__dict__[_ATTRIBUTE]
    groups.engine.begin_forward(groups.is_root)


def _after_forward(module: nn.Module, args: Any, output: Any) -> None:
    groups: ModuleGroups = module.__dict__[_ATTRIBUTE]
    groups.engine.end_forward([groups.engine.groups[i] for i in groups.indices])
