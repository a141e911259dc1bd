"""The gradient reduction of data-like axes: buckets are summed while the backward pass goes on.

A plain tensor is the global value, so each rank's gradient is its part of the global gradient and the SUM over the
axis is the gradient of one device. While a backward pass runs, what it adds to a gradient (the increment) is kept
apart from what earlier passes left in `.grad`; only the increment is communicated, and `.grad` is written when the
pass has ended. A pass that raises therefore leaves every gradient as it was.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.mesh import group_over
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor
from meshwright_dtensor.sharding.states import States
from meshwright_parallel._torch.core import (
    add_in_place,
    at_end_of_backward,
    gradient_hooks,
    gradient_is_captured,
    leaf_of,
    local_of,
    with_local,
)
from meshwright_parallel.engine.buckets import Axes, Bucket, Filling, Slot, agreed_order, make_buckets
from meshwright_parallel.engine.param_group import UnshardedParameter, unsharded_of
from meshwright_parallel.strategies.data import BUCKET_BYTES

_ATTRIBUTE = "_meshwright_reduction"
Parameters = Iterable[tuple[str, torch.Tensor, Axes]]


class DataReduction:
    """Sums the gradients of parameters over the mesh axes on which they are partial.

    Args:
        mesh: the device mesh.
        parameters: (name, leaf tensor, axes on which its gradient is partial); DTensors or plain tensors, in
            registration order and alike on every rank. Those without axes are left alone.
        bucket_bytes: size at which a bucket is launched, 25 MiB by default, or how buckets are filled.
    """

    def __init__(
        self, mesh: DeviceMesh, parameters: Parameters, bucket_bytes: int | Filling = BUCKET_BYTES
    ) -> None:
        self.mesh = mesh
        self.filling = Filling(bucket_bytes) if isinstance(bucket_bytes, int) else bucket_bytes
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        once = {
            id(p): (name, p, tuple(a for a in partial if sizes[a] > 1)) for name, p, partial in parameters
        }
        self._parameters = [
            entry for entry in once.values() if entry[2] or unsharded_of(entry[1]) is not None
        ]
        used = {axis for name, p, partial in self._parameters for axis in _slot(name, p, partial).all_axes}
        self.axes = tuple(a for a in sizes if a in used)
        self._handles: list[RemovableHandle] = []
        self._slots: list[Slot] = []
        self._unsharded: list[UnshardedParameter | None] = []
        self._buckets: list[Bucket] = []
        self._leaves: list[tuple[torch.Tensor, bool]] = []
        self._ordered = False
        # the current pass: a reference that lives as long as it, what .grad held before, and how far the buckets are
        self._running: weakref.ref[Any] | None = None
        self._priors: dict[int, torch.Tensor | None] = {}
        self._ready: list[int] = []
        self._launched = 0
        self._install()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataReduction:
        """For a copied model: an engine of its own, on the copies of the parameters."""
        for unsharded in map(unsharded_of, (p for _, p, _ in self._parameters)):
            if unsharded is not None:
                # gives the copied parameters their compute copies
                copy.deepcopy(unsharded.group.engine, memo)
        copied = [(name, copy.deepcopy(p, memo), partial) for name, p, partial in self._parameters]
        return DataReduction(self.mesh, copied, self.filling)

    @property
    def needed(self) -> bool:
        """Whether any parameter has a gradient to be summed or taken elsewhere."""
        return bool(self._parameters)

    def refresh(self) -> None:
        """Follow changes of `requires_grad` and of storage; called before every forward, it costs microseconds.

        Raises:
            UnsupportedError: someone else's hook is on a gradient, of which it would see one rank's part.
        """
        leaves = [leaf_of(p) for _, p, _ in self._parameters]
        for leaf, (known, required), (name, _, _) in zip(leaves, self._leaves, self._parameters, strict=True):
            if leaf is not known or leaf.requires_grad != required:
                self._install()
                break
            if gradient_hooks(leaf) > 2:
                raise UnsupportedError(
                    f"parameter {name!r} has a gradient hook, which would see this rank's part of the gradient and run "
                    "before it is summed; read or change .grad after backward() instead"
                )

    def remove(self) -> None:
        """Take every hook off: gradients stay partial from now on."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def buckets(self) -> list[list[str]]:
        """Names of the parameters of each bucket, in the order in which they are summed."""
        return [[slot.name for slot in bucket.slots] for bucket in self._buckets]

    def _install(self) -> None:
        self.remove()
        self._forget_pass()
        self._leaves = [(leaf_of(p), p.requires_grad) for _, p, _ in self._parameters]
        self._slots = [_slot(name, p, axes) for name, p, axes in self._parameters if p.requires_grad]
        self._unsharded = [unsharded_of(p) for _, p, _ in self._parameters if p.requires_grad]
        for index, slot in enumerate(self._slots):
            slot.index = index
        # what is registered last is usually ready first; the first pass tells the true order
        self._buckets = make_buckets(self._slots[::-1], self.filling)
        self._ordered = False
        for slot in self._slots:
            self._handles.append(slot.leaf.register_hook(self._before(slot)))
            self._handles.append(slot.leaf.register_post_accumulate_grad_hook(_after(self, slot.index)))

    # ------------------------------------------------------------------------------------ hooks of a leaf
    def _before(self, slot: Slot) -> Callable[[torch.Tensor], torch.Tensor | None]:
        leaf, index = slot.leaf, slot.index

        def before_accumulation(gradient: torch.Tensor) -> torch.Tensor | None:
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    f"gradient of {slot.name!r}: create_graph=True does not work together with data parallelism; "
                    "use data degree 1 for higher derivatives"
                )
            if gradient_is_captured():  # torch.autograd.grad accumulates nothing: the sum is handed over
                return self._sum_now(slot, gradient)
            self._enter()
            if index in self._priors:  # twice in one pass (reentrant checkpointing): settle the first
                self._finish()
                self._enter()
            # what a pass that was given up has left at a copy counts for nothing
            self._priors[index] = None if slot.copied else leaf.grad
            if leaf.grad is not None:
                leaf.grad = None  # so that accumulation leaves the increment alone here
            return None

        return before_accumulation

    def _arrived(self, slot: Slot) -> None:
        leaf, increment = slot.leaf, slot.leaf.grad
        if increment is None:
            return
        _check(slot, increment)
        bucket = self._buckets[slot.bucket]
        bucket.put(slot, local_of(increment))
        if slot.copied:
            leaf.grad = None
        else:
            prior = self._priors[slot.index]
            # without a prior the sum arrives where the gradient lies, and nothing is left to do
            leaf.grad = with_local(leaf, bucket.lend(slot)) if prior is None else prior
        self._ready.append(slot.index)
        unsharded = self._unsharded[slot.index]
        if unsharded is not None:
            unsharded.gradient_consumed()
        # buckets start in one fixed order, so that ranks never pair different tensors
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._launch_next()

    def _launch_next(self) -> None:
        """Start the next bucket, and what is left of the one before it."""
        self._buckets[self._launched].launch(self.mesh)
        if self._launched:
            self._buckets[self._launched - 1].advance(self.mesh)
        self._launched += 1

    # ------------------------------------------------------------------------------------ one backward pass
    def _enter(self) -> None:
        """Notice the first gradient of a pass."""
        if self._running is not None and self._running() is not None:
            return  # the same pass, or one nested in it
        self._forget_pass()

        def end_of_backward() -> None:
            if self._running is token:
                self._finish()

        # autograd alone holds the callback: when the pass raises, the callback dies with it
        self._running = token = weakref.ref(end_of_backward, self._died)
        at_end_of_backward(end_of_backward)

    def _died(self, token: weakref.ref[Any]) -> None:
        """A pass is gone without having ended: make every `.grad` what it was before."""
        if self._running is not token:
            return
        ready = set(self._ready)
        for index, prior in self._priors.items():
            slot = self._slots[index]
            if slot.copied or index in ready or slot.leaf.grad is None:
                slot.leaf.grad = prior

    @torch.no_grad()
    def _finish(self) -> None:
        """Sum what is left, add it to what was there, and be as before the pass."""
        while self._launched < len(self._buckets):
            self._launch_next()
        if self._buckets:
            self._buckets[-1].advance(self.mesh)
        ready, priors = self._ready, self._priors
        for bucket in self._buckets:
            before, increments = [], []
            for slot in bucket.finish():
                # a rank that did not take part may have a gradient from before too
                prior = slot.holder.grad if slot.copied else priors.get(slot.index, slot.leaf.grad)
                if prior is not None:
                    before.append(local_of(prior))
                    increments.append(bucket.view(slot))
                elif slot.copied or slot.index not in priors:
                    slot.holder.grad = with_local(slot.holder, bucket.lend(slot))
            add_in_place(before, increments)
        self._forget_pass()
        engines = {id(u.group.engine): u.group.engine for u in self._unsharded if u is not None}
        for engine in engines.values():
            engine.end_backward()
        if not self._ordered:
            self._reorder(ready)

    def _forget_pass(self) -> None:
        self._running = None
        self._priors = {}
        self._ready = []
        self._launched = 0
        for bucket in self._buckets:
            bucket.reset()

    def _reorder(self, ready: list[int]) -> None:
        """After the first pass: fill the buckets in the order in which gradients came, unused ones last."""
        self._ordered = True
        order = list(dict.fromkeys([*ready, *reversed(range(len(self._slots)))]))
        if self.axes:
            order = agreed_order(order, self.mesh, self.axes, self._slots[0].leaf.device)
        self._buckets = make_buckets([self._slots[index] for index in order], self.filling)

    def _sum_now(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        total = local_of(gradient).clone(memory_format=torch.contiguous_format)
        nbytes = total.numel() * total.element_size()
        axes = tuple(axis for axis in self.axes if axis in slot.all_axes)
        if axes:
            record("all_reduce", "+".join(axes), nbytes, "backward", function="data", why="X->I")
            dist.all_reduce(total, group=group_over(self.mesh, axes))
        return with_local(gradient, total)


def _slot(name: str, parameter: torch.Tensor, axes: Axes) -> Slot:
    unsharded = unsharded_of(parameter)
    if unsharded is None:
        leaf = leaf_of(parameter)
        return Slot(name, leaf, axes, leaf)
    return Slot(
        name,
        unsharded.leaf(),
        tuple(axis for axis in axes if axis != unsharded.axis),
        local_of(parameter),
        unsharded.axis,
        unsharded.shards,
        unsharded.group.index,
    )


def _after(engine: DataReduction, index: int) -> Callable[[torch.Tensor], None]:
    """The hook of a leaf behind accumulation; it refers to its leaf, and to the engine that has it, only weakly.

    torch hides hooks of this kind from the garbage collector: a cycle through one would keep parameters and mesh for ever.
    The hook before accumulation, which it shows, keeps the engine as long as the leaf.
    """
    reference = weakref.ref(engine)

    def after_accumulation(leaf: torch.Tensor) -> None:
        engine = reference()
        if engine is not None:
            engine._arrived(engine._slots[index])

    return after_accumulation


def _check(slot: Slot, gradient: torch.Tensor) -> None:
    """Autograd itself sees to shape and dtype."""
    if gradient.layout != torch.strided:
        raise UnsupportedError(
            f"gradient of {slot.name!r} is {gradient.layout}; only dense gradients are summed: use sparse=False"
        )
    if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, slot.leaf).placements:
        raise UnsupportedError(
            f"gradient of {slot.name!r} lies as {gradient.placements}, its parameter as "
            f"{cast(DTensor, slot.leaf).placements}; redistribute it before it is accumulated"
        )


def partial_parameters(model: nn.Module, mesh: DeviceMesh) -> list[tuple[str, torch.Tensor, Axes]]:
    """The parameters of `model` with the mesh axes on which their gradient is partial (state X)."""
    names = mesh.mesh_dim_names or ()
    found: list[tuple[str, torch.Tensor, Axes]] = []
    for name, parameter in model.named_parameters():
        if isinstance(parameter, MeshParameter):
            states = layout_of_dtensor(parameter).states
            found.append((name, parameter, tuple(a for a, s in zip(names, states, strict=True) if s == "X")))
    return found


def make_groups(mesh: DeviceMesh, states: Iterable[States], gathers: Iterable[str] = ()) -> None:
    """Make the process groups over which gradients of parameters in these states are summed, on every rank alike.

    `gathers`: axes along which ranks share gradients. A rank may hold only some of the parameters (a pipeline stage), and
    a group is made by all ranks together.
    """
    names = mesh.mesh_dim_names or ()
    real = {a for a, n in zip(names, mesh.shape, strict=True) if n > 1}
    wanted = {tuple(a for a, s in zip(names, own, strict=True) if s == "X" and a in real) for own in states}
    # the order of buckets is agreed on over all of them, and over what shares gradients
    shared = real & set(gathers)
    wanted.add(tuple(a for a in names if a in shared or any(a in axes for axes in wanted)))
    for axes in sorted(wanted):
        if axes:
            group_over(mesh, axes)


def install_reduction(model: nn.Module, mesh: DeviceMesh, filling: Filling | int = BUCKET_BYTES) -> None:
    """The one engine that sums gradients, over every axis on which a parameter of `model` is in state X.

    It also takes the gradients of compute copies to the stored parts.
    """
    engine = DataReduction(mesh, partial_parameters(model, mesh), filling)
    if engine.needed:
        attach_reduction(model, engine)


def reduction_of(model: nn.Module) -> DataReduction | None:
    """The engine that sums the gradients of `model`, if it has one."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, DataReduction) else None


def attach_reduction(model: nn.Module, engine: DataReduction) -> None:
    """Make `engine` the one of `model`; an earlier one is taken off. Every forward lets it follow `requires_grad`."""
    before = reduction_of(model)
    if before is not None:
        before.remove()
    else:
        model.register_forward_pre_hook(_refresh)
    model.__dict__[_ATTRIBUTE] = engine


def _refresh(model: nn.Module, args: tuple[Any, ...]) -> None:
    engine = reduction_of(model)
    if engine is not None:
        engine.refresh()
