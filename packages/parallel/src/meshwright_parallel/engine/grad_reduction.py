"""Gradient reduction over data-like axes: buckets are reduced while the backward pass runs.

A plain tensor is the global value. So each rank's gradient is a part of the global gradient, and the SUM over the axis is
the gradient of one device. During a backward pass its contribution (the increment) is separate from the `.grad` of earlier
passes. Only the increment is communicated, and `.grad` is written at the end of the pass. So a pass that raises leaves every
gradient unchanged.
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
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.mesh import group_over
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.tensor.staged import check_copied
from meshwright_parallel._torch import core
from meshwright_parallel._torch.core import gradient_is_captured, leaf_of, local_of, with_local
from meshwright_parallel.engine.buckets import Axes, Bucket, BucketSizes, Slot, broadcast_order, make_buckets
from meshwright_parallel.engine.param_group import UnshardedParameter, unsharded_of
from meshwright_parallel.strategies.data import BUCKET_BYTES

_ATTRIBUTE = "_meshwright_reduction"
Parameters = Iterable[tuple[str, torch.Tensor, Axes]]


class DataReduction:
    """Sums the gradients of parameters over the mesh axes on which they are partial.

    Args:
        parameters: (name, leaf tensor, axes on which its gradient is partial); DTensors or plain tensors, in
            registration order and the same on every rank. Those without axes are ignored.
        bucket_bytes: size at which a bucket is reduced, 25 MiB by default, or all bucket sizes.
    """

    def __init__(
        self, mesh: DeviceMesh, parameters: Parameters, bucket_bytes: int | BucketSizes = BUCKET_BYTES
    ) -> None:
        core.release_failed_passes()
        self.mesh = mesh
        self.bucket_sizes = BucketSizes(bucket_bytes) if isinstance(bucket_bytes, int) else bucket_bytes
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
        reduced = ((name, p, tuple(a for a in axes if sizes[a] > 1)) for name, p, axes in parameters)
        unique = {id(entry[1]): entry for entry in reduced}
        self._parameters = [e for e in unique.values() if e[2] or unsharded_of(e[1]) is not None]
        used = {axis for name, p, partial in self._parameters for axis in _slot(name, p, partial).all_axes}
        self.axes = tuple(a for a in sizes if a in used)
        # by place in _parameters: the leaf whose gradient is watched, from when it first requires one
        self._watched: dict[int, tuple[torch.Tensor, list[RemovableHandle]]] = {}
        self._slots: list[Slot] = []
        # of every entry of _parameters; None of one that requires no gradient, which autograd does not accumulate either
        self._slot_at: list[Slot | None] = []
        self._unsharded: list[UnshardedParameter | None] = []
        self._buckets: list[Bucket] = []
        self._leaves: list[tuple[torch.Tensor, bool]] = []
        self._ordered = False
        # of the current pass: a reference that dies with it, the earlier .grad values, and the progress of the buckets
        self._running: weakref.ref[Any] | None = None
        self._priors: dict[int, torch.Tensor | None] = {}
        self._ready: list[int] = []
        self._launched = 0
        self._install()

    def __deepcopy__(self, memo: dict[int, Any]) -> DataReduction:
        """For a copied model: a new engine on the copied parameters. Raises UnsupportedError: of a pipelined one."""
        check_copied(p for _, p, _ in self._parameters)
        for unsharded in map(unsharded_of, (p for _, p, _ in self._parameters)):
            if unsharded is not None:
                # gives the copied parameters their compute copies
                copy.deepcopy(unsharded.group.engine, memo)
        copied = [(name, copy.deepcopy(p, memo), partial) for name, p, partial in self._parameters]
        return DataReduction(self.mesh, copied, self.bucket_sizes)

    def refresh(self) -> None:
        """Follow changes of `requires_grad` and of storage; called before every forward, it takes microseconds.

        Raises UnsupportedError: a gradient has a user's hook, which would get one rank's part of it.
        """
        self._follow()
        for (leaf, _), (name, _, _) in zip(self._leaves, self._parameters, strict=True):
            if core.gradient_hooks(leaf) > 2:
                raise UnsupportedError(
                    f"parameter {name!r} has a gradient hook, which would run before the sum over ranks, on this rank's part "
                    "of the gradient; read or change .grad after backward() instead"
                )

    def _follow(self) -> None:
        for (previous, required), (_, parameter, _) in zip(self._leaves, self._parameters, strict=True):
            leaf = leaf_of(parameter)
            if leaf is not previous or leaf.requires_grad != required:
                self._install()
                break

    def remove(self) -> None:
        """Remove all hooks: gradients stay partial from now on."""
        for place in list(self._watched):
            self._unwatch(place)

    def _unwatch(self, place: int) -> None:
        for handle in self._watched.pop(place)[1]:
            handle.remove()

    def _install(self) -> None:
        self._forget_pass()
        self._leaves = [(leaf_of(p), p.requires_grad) for _, p, _ in self._parameters]
        trained = [place for place, (_, required) in enumerate(self._leaves) if required]
        self._slots = [_slot(*self._parameters[place]) for place in trained]
        self._slot_at = [None] * len(self._parameters)
        for place, slot in zip(trained, self._slots, strict=True):
            self._slot_at[place] = slot
        self._unsharded = [unsharded_of(self._parameters[place][1]) for place in trained]
        for index, slot in enumerate(self._slots):
            slot.index = index
        # the last parameter usually has the first gradient; the first pass shows the true order
        self._buckets = make_buckets(self._slots[::-1], self.bucket_sizes)
        self._ordered = False
        for place, slot in zip(trained, self._slots, strict=True):
            self._watch(place, slot.leaf)

    def _watch(self, place: int, leaf: torch.Tensor) -> None:
        """Once and for all: a graph may be older than a change of `requires_grad` that is undone before its backward pass."""
        if place in self._watched:
            if self._watched[place][0] is leaf:
                return
            self._unwatch(place)
        before = leaf.register_hook(self._before(place, leaf))
        self._watched[place] = leaf, [before, leaf.register_post_accumulate_grad_hook(_after(self, place))]

    # ------------------------------------------------------------------------------------ hooks of a leaf
    def _before(self, place: int, leaf: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor | None]:
        def before_accumulation(gradient: torch.Tensor) -> torch.Tensor | None:
            # torch.autograd.grad accumulates nothing, and returns this sum
            if gradient_is_captured():
                if self._slot_at[place] is None:
                    self._follow()
                captured = self._slot_at[place]
                assert captured is not None
                # create_graph=True: a partial sum, which autograd completes where it is used
                return None if torch.is_grad_enabled() else self._sum_now(captured, gradient)
            if torch.is_grad_enabled():
                raise UnsupportedError(
                    f"backward(create_graph=True) would put the gradient of {self._parameters[place][0]!r}, which is summed over "
                    "ranks, and its graph into .grad; use torch.autograd.grad(loss, parameters, create_graph=True)"
                )
            # most are not the first of a pass: this runs for each gradient
            running = self._running
            if running is None or running() is None:
                self._begin_pass()
            slot = self._slot_at[place]
            if slot is None:
                return None
            index = slot.index
            # twice in one pass (reentrant checkpointing): finish the first
            if index in self._priors:
                self._finish()
                self._begin_pass()
            earlier = leaf.grad
            # a compute copy may still have a gradient of a pass that raised
            self._priors[index] = None if slot.has_compute_copy else earlier
            if earlier is not None:
                # so that autograd stores the increment alone
                leaf.grad = None
            return None

        return before_accumulation

    def _arrived(self, slot: Slot) -> None:
        leaf, increment = slot.leaf, slot.leaf.grad
        if increment is None:
            return
        if type(increment) is not torch.Tensor or increment.layout is not torch.strided:
            _check(slot, increment)
            increment = local_of(increment)
        bucket = self._buckets[slot.bucket]
        bucket.put(slot, increment)
        if slot.has_compute_copy:
            leaf.grad = None
        else:
            prior = self._priors[slot.index]
            if prior is None:
                # the view of the bucket that will hold the sum
                prior = bucket.view_as_gradient(slot)
                prior = prior if type(leaf) is torch.Tensor else with_local(leaf, prior)
            leaf.grad = prior
        self._ready.append(slot.index)
        unsharded = self._unsharded[slot.index]
        if unsharded is not None:
            unsharded.group.engine.gradient_consumed(unsharded.group)
        # one fixed order of collectives on all ranks
        while self._launched < len(self._buckets) and self._buckets[self._launched].complete:
            self._launch_next()

    def _launch_next(self) -> None:
        """Start the next bucket, and the all-reduce of the one before it."""
        self._buckets[self._launched].launch(self.mesh)
        if self._launched:
            self._buckets[self._launched - 1].advance(self.mesh)
        self._launched += 1

    # ------------------------------------------------------------------------------------ one backward pass
    def _begin_pass(self) -> None:
        """Called for the first gradient of a pass, not of one that is nested in it."""
        self._follow()
        self._forget_pass()

        def end_of_backward() -> None:
            if self._running is token:
                self._finish()

        # only autograd holds the callback: if the pass raises, the callback is freed
        self._running = token = weakref.ref(end_of_backward, self._restore_gradients)
        core.at_end_of_backward(end_of_backward)

    def _restore_gradients(self, token: weakref.ref[Any]) -> None:
        """A pass has raised: restore every `.grad`."""
        if self._running is not token:
            return
        ready = set(self._ready)
        for index, prior in self._priors.items():
            slot = self._slots[index]
            if slot.has_compute_copy or index in ready or slot.leaf.grad is None:
                slot.leaf.grad = prior

    @torch.no_grad()
    def _finish(self) -> None:
        """Reduce the remaining buckets, add the sums to earlier gradients, and end the pass."""
        while self._launched < len(self._buckets):
            self._launch_next()
        if self._buckets:
            self._buckets[-1].advance(self.mesh)
        ready, priors = self._ready, self._priors
        for bucket in self._buckets:
            earlier, increments = [], []
            for slot in bucket.finish():
                # also on a rank that had no gradient in this pass
                prior = slot.stored.grad if slot.has_compute_copy else priors.get(slot.index, slot.leaf.grad)
                if prior is not None:
                    earlier.append(local_of(prior))
                    increments.append(bucket.view(slot))
                elif slot.has_compute_copy or slot.index not in priors:
                    slot.stored.grad = with_local(slot.stored, bucket.view_as_gradient(slot))
            core.add_in_place(earlier, increments)
        self._forget_pass()
        for engine in dict.fromkeys(u.group.engine for u in self._unsharded if u is not None):
            engine.end_backward()
        if not self._ordered:
            self._reorder(ready)

    def _forget_pass(self) -> None:
        self._running, self._priors, self._ready, self._launched = None, {}, [], 0
        for bucket in self._buckets:
            bucket.reset()

    def _reorder(self, ready: list[int]) -> None:
        """After the first pass: refill the buckets in the order of the gradients, unused parameters last."""
        self._ordered = True
        order = list(dict.fromkeys([*ready, *reversed(range(len(self._slots)))]))
        if self.axes:
            order = broadcast_order(order, self.mesh, self.axes)
        self._buckets = make_buckets([self._slots[index] for index in order], self.bucket_sizes)

    def _sum_now(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        total = local_of(gradient).clone(memory_format=torch.contiguous_format)
        axes = tuple(axis for axis in self.axes if axis in slot.all_axes)
        if axes:
            record("all_reduce", "+".join(axes), total.nbytes, "backward", function="data", why="X->I")
            with waiting():
                dist.all_reduce(total, group=group_over(self.mesh, axes))
        return with_local(gradient, total)


def _slot(name: str, parameter: torch.Tensor, axes: Axes) -> Slot:
    unsharded = unsharded_of(parameter)
    if unsharded is None:
        leaf = leaf_of(parameter)
        return Slot(name, leaf, axes, leaf)
    rest, stored = tuple(axis for axis in axes if axis != unsharded.axis), local_of(parameter)
    return Slot(name, unsharded.leaf(), rest, stored, unsharded.axis, unsharded.shards, unsharded.group.index)


def _after(engine: DataReduction, place: int) -> Callable[[torch.Tensor], None]:
    """The hook after accumulation; it refers to the engine weakly.

    The garbage collector does not see hooks of this kind, so a cycle through one would never be freed. The hook before
    accumulation, which it sees, keeps the engine alive as long as the leaf.
    """
    reference = weakref.ref(engine)

    def after_accumulation(leaf: torch.Tensor) -> None:
        engine = reference()
        slot = None if engine is None else engine._slot_at[place]
        if engine is not None and slot is not None:
            engine._arrived(slot)

    return after_accumulation


def _check(slot: Slot, gradient: torch.Tensor) -> None:
    """Refuse gradients that cannot be summed; autograd itself checks shape and dtype."""
    if gradient.layout != torch.strided:
        text = f"gradient of {slot.name!r} is {gradient.layout}; only dense gradients are summed: use sparse=False"
        raise UnsupportedError(text)
    if isinstance(gradient, DTensor) and gradient.placements != cast(DTensor, slot.leaf).placements:
        raise UnsupportedError(
            f"gradient of {slot.name!r} has placements {gradient.placements}, but its parameter has "
            f"{cast(DTensor, slot.leaf).placements}; redistribute the gradient before it is accumulated"
        )


def make_groups(mesh: DeviceMesh, states: Iterable[States], gathers: Iterable[str] = ()) -> None:
    """Make the process groups that reduce gradients of parameters in these states; all ranks must call it.

    `gathers`: axes along which gradients are sharded. All ranks make a group together, although a rank may hold some of the
    parameters only (a pipeline stage).
    """
    names = mesh.mesh_dim_names or ()
    real = {a for a, n in zip(names, mesh.shape, strict=True) if n > 1}
    groups = {tuple(a for a, s in zip(names, row, strict=True) if s == "X" and a in real) for row in states}
    # the order of buckets is broadcast over all these axes and the shard axes
    sharded = real & set(gathers)
    groups.add(tuple(a for a in names if a in sharded or any(a in axes for axes in groups)))
    for axes in sorted(groups):
        if axes:
            group_over(mesh, axes)


def install_reduction(model: nn.Module, mesh: DeviceMesh, sizes: BucketSizes | int = BUCKET_BYTES) -> None:
    """Install the engine that reduces gradients over every axis on which a parameter of `model` is in state X.

    It also moves gradients of compute copies to the stored parameters, and is refreshed before every forward.
    """
    names = mesh.mesh_dim_names or ()
    partial = [
        (name, p, tuple(a for a, s in zip(names, layout_of_dtensor(p).states, strict=True) if s == "X"))
        for name, p in model.named_parameters()
        if isinstance(p, MeshParameter)
    ]
    engine = DataReduction(mesh, partial, sizes)
    # no gradient has to be reduced or moved to its stored parameter
    if not engine._parameters:
        return
    earlier = reduction_of(model)
    if earlier is not None:
        earlier.remove()
    else:
        model.register_forward_pre_hook(_refresh)
    model.__dict__[_ATTRIBUTE] = engine


def reduction_of(model: nn.Module) -> DataReduction | None:
    """The engine that reduces the gradients of `model`, if it has one."""
    engine = model.__dict__.get(_ATTRIBUTE)
    return engine if isinstance(engine, DataReduction) else None


def _refresh(model: nn.Module, args: tuple[Any, ...]) -> None:
    engine = reduction_of(model)
    if engine is not None:
        engine.refresh()
