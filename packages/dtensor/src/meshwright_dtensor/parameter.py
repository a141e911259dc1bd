"""Mesh parameters: stock DTensors that take part in global tensor computations.

The class of an ordinary ``nn.Parameter`` over a DTensor is swapped for :class:`MeshParameter`; optimizers and tools see
a DTensor with a DTensor gradient, and torch functions with an activation run through the dispatcher.  Autograd's leaf
is the local tensor inside, so gradients are accumulated in C++; ``parameter.grad`` is that gradient as a DTensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from meshwright_dtensor._torch.core import (
    dtensor_like,
    dtensor_local,
    dtensor_spec,
    quiet_exchanges,
    set_dtensor_parts,
    settled,
    share_memory,
    stock_call,
)
from meshwright_dtensor.comm.log import NOWHERE, Site
from meshwright_dtensor.comm.redistribute import convert
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of, stored_placement
from meshwright_dtensor.model.stage_info import is_repeated, mark_repeated
from meshwright_dtensor.sharding.boxes import read_region
from meshwright_dtensor.sharding.states import States, complete
from meshwright_dtensor.stored import permuted
from meshwright_dtensor.stored.gather import stored_layout
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.serialization import WholeMemory
from meshwright_dtensor.stored.writes import MeshView
from meshwright_dtensor.tensor.compute_copy import ComputeCopy
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, local_in, wrap

Tensor = torch.Tensor


class MeshParameter(WholeMemory, DTensor):
    """A parameter on a mesh: a DTensor with one state per mesh axis.

    With state ``X`` on an axis, gradients stay partial sums there until an engine (data parallel) reduces them.
    """

    _layout: Layout
    _key: tuple[str, Layout]
    # the states, if one is an interval shard
    _order: States | None
    _copy: ComputeCopy | None = None
    _shown_gradient: DTensor | None = None

    @property
    def __tensor_flatten__(self) -> Any:
        # torch swaps tensors that have it, as parametrizations do, and an engine would lose the parameter; others get new values
        raise AttributeError

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        """The dtype of the stored value; while a model with compute copies runs, that of the copy."""
        copy = self._copy
        return self._layout.dtype if copy is None or not copy.computing else copy.layout.dtype

    @property
    def compute_layout(self) -> Layout:
        """The layout of the value that computations take: of the compute copy, if there is one."""
        return self._layout if self._copy is None else self._copy.layout

    def compute_with(self, copy: ComputeCopy | None) -> None:
        """Let computations take `copy` instead of the stored value (None: the stored value again)."""
        self._copy = copy
        # its part in the keys of programs
        self._key = ("parameter", self.compute_layout)

    @property
    def grad(self) -> DTensor | None:  # type: ignore[override]
        """The gradient as a DTensor with the parameter's placements; it shares memory with the local gradient."""
        local = dtensor_local(self).grad
        if local is None:
            return None
        # create_graph=True: autograd goes on from it
        if local.requires_grad and torch.is_grad_enabled():
            return gradient_of(self, local)  # type: ignore[return-value]
        shown = self._shown_gradient
        # requires_grad_() of a gradient gives it a tensor of its own in that memory
        if shown is None or not (
            dtensor_local(shown) is local
            or (shown.requires_grad and share_memory(dtensor_local(shown), local))
        ):
            shown = mesh_value(dtensor_like(local.detach() if local.requires_grad else local, self))
            if self._order is not None:
                shown = permuted.as_permuted(shown, self._layout)
            self._shown_gradient = shown
            if is_repeated(self):
                mark_repeated(shown)
        return shown

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        dtensor_local(self).grad = None if value is None else self._local_of(value)
        self._shown_gradient = None

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def requires_grad_(self, requires_grad: bool = True) -> MeshParameter:
        """Switch the gradient on or off, also for the leaf inside."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Any], Any]) -> Any:
        """``hook`` sees the gradient as a DTensor and may return another."""
        self._refuse_hooks()

        def run(g: Tensor) -> Tensor | None:
            new = hook(gradient_of(self, g))
            return None if new is None else self._local_of(new)

        return dtensor_local(self).register_hook(run)

    def _local_of(self, value: Tensor) -> Tensor:
        """This rank's part of a gradient: of a plain one, which is the whole, or of one in any layout (a collective call)."""
        value = value.current() if isinstance(value, MeshView) else value
        if isinstance(value, GlobalTensor):
            return local_in(value, complete(self._layout.states))
        if not isinstance(value, DTensor):
            return read_region(value.detach(), self._layout.region).clone()
        same = value.placements == self.placements and permuted.permuted_layout(
            value
        ) is permuted.permuted_layout(self)
        return dtensor_local(value) if same else permuted.local_part_of(value, self._layout)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        """``hook`` is called with this parameter once its gradient has been accumulated in a backward pass."""
        self._refuse_hooks()
        # the garbage collector does not see hooks of this kind: one that held the parameter would never be freed
        parameter = weakref.ref(self)

        def run(_leaf: Tensor) -> None:
            this = parameter()
            if this is not None:
                hook(this)

        return dtensor_local(self).register_post_accumulate_grad_hook(run)

    def _refuse_hooks(self) -> None:
        if self._copy is not None:
            raise UnsupportedError(
                "a gradient hook on a parameter that is sharded by zero or computed in another precision would never run: its "
                "gradient is put together when the backward pass ends; read or change .grad after backward() instead"
            )

    def copy_(self, other: Any, non_blocking: bool = False) -> MeshParameter:
        """Overwrite the value; a plain tensor is the global value, as in ``load_state_dict`` of a one-device checkpoint."""
        other = other.current() if isinstance(other, MeshView) else other
        if isinstance(other, DTensor) and other.shape == self.shape:
            other = self._local_of(other)
        elif isinstance(other, Tensor):
            whole = other.full_tensor() if hasattr(other, "full_tensor") else other
            other = read_region(whole.expand(self.shape), self._layout.region)
        dtensor_local(self).copy_(other, non_blocking)
        return self

    def set_(self, source: Any = None, *options: Any) -> Any:
        """Take over the value of a tensor, as ``parameter.data = source`` does: torch's parametrizations call it."""
        if options or not isinstance(source, Tensor):
            return super().set_(source, *options)
        self.data = source
        return self

    def to_local(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """This rank's part, recorded by autograd; its gradient is the gradient of the part.

        With an interval shard the part is in the order of its intervals (``global_layout.region``).
        """
        if grad_placements is not None:
            raise UnsupportedError(
                "to_local(grad_placements=...) on a mesh parameter; the gradient is that of this rank's part"
            )
        if self._copy is None:
            local = parameter_local(self, self._layout.states)
            return local.view_as(local)
        if torch.is_grad_enabled() and self.requires_grad:
            raise UnsupportedError(
                "to_local() with a gradient, of a parameter that is sharded by zero or computed in another precision: no "
                "gradient arrives at the stored part; use full_tensor(), or to_local() under torch.no_grad()"
            )
        return dtensor_local(self).detach()

    def full_tensor(self, *, grad_placements: Sequence[Placement] | None = None) -> Tensor:
        """The whole value on every rank (a collective call), connected to autograd."""
        if grad_placements is not None:
            raise UnsupportedError(
                "full_tensor(grad_placements=...) on a mesh parameter; the gradient is that of the whole value"
            )
        if self._copy is not None and not (torch.is_grad_enabled() and self.requires_grad):
            # in the stored precision
            local = dtensor_local(self).detach()
            stored = convert(local, self._layout, self._layout.context.replicated)
            return local.view_as(local) if stored is local else stored
        whole = parameter_local(self, self._layout.context.replicated)
        return whole.view_as(whole) if whole.dtype == self._layout.dtype else whole.to(self._layout.dtype)

    @property
    def global_layout(self) -> Layout:
        """The layout of the parameter; in ``placements``, an interval shard is a plain shard of the permuted tensor."""
        return self._layout

    def redistribute(  # type: ignore[override]
        self, device_mesh: Any = None, placements: Sequence[Placement] | None = None, **options: Any
    ) -> DTensor:
        """As stock DTensor does; a parameter with an interval shard gives true order, without autograd."""
        if permuted.is_permuted(self._layout.states):
            return permuted.redistributed(self, self._layout, placements, device_mesh, options)
        source: DTensor = self
        # torch would warn about the gradient of the leaf inside
        if not torch.is_grad_enabled():
            source = dtensor_like(dtensor_local(self).detach(), self)
        with stock_call(), quiet_exchanges():
            result = DTensor.redistribute(source, device_mesh, placements, **options)
        return result if options.get("async_op") else settled(result)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with stock_call():
            text = DTensor.__repr__(self)
        return f"{text[:-1]}, layout={self._layout!r})" if permuted.is_permuted(self._layout.states) else text

    def __deepcopy__(self, memo: dict[int, Any]) -> MeshParameter:
        with torch.no_grad():
            local = dtensor_local(self).detach().clone()
        copy = new_mesh_parameter(dtensor_like(local, self), self._layout.states, self.requires_grad)
        memo[id(self)] = copy
        return copy


def new_mesh_parameter(dtensor: DTensor, states: States, requires_grad: bool = True) -> MeshParameter:
    """See :func:`meshwright_dtensor.api.as_mesh_parameter`, which also installs the dispatcher."""
    context = MeshContext.of(dtensor.device_mesh)
    expected = tuple(stored_placement(s) for s in states)
    if tuple(dtensor.placements) != expected or "P" in states:
        raise UnsupportedError(
            f"parameter placements {tuple(dtensor.placements)} do not fit states {states}; they should be {expected}"
        )
    leaf = dtensor_local(dtensor).detach().requires_grad_(requires_grad)
    parameter: Any = nn.Parameter(dtensor_like(leaf.detach(), dtensor), requires_grad)
    if requires_grad:
        # before the class is swapped: a hook on the wrapper itself, which no gradient may reach
        parameter.register_hook(_refuse_gradient)
    # nn.Parameter calls a cached op of torch, which may return an equal mesh of an earlier run
    set_dtensor_parts(parameter, leaf, dtensor_spec(dtensor))
    parameter.__class__ = MeshParameter
    parameter._layout = layout_of(context, states, dtensor.shape, dtensor.dtype)
    parameter._order = states if permuted.is_permuted(states) else None
    parameter.compute_with(None)
    if "X" in states:
        # torch swaps no tensor with a weak reference: gradients of another one here would be summed twice
        parameter._unswapped = weakref.ref(parameter)
    return parameter  # type: ignore[no-any-return]


def _refuse_gradient(gradient: Tensor) -> None:
    raise UnsupportedError(
        "a gradient reached a mesh parameter through a stock DTensor operation, where meshwright cannot add it up; compute with "
        "the parameter itself, parameter.to_local() or parameter.full_tensor() instead of redistribute() or _foreach functions"
    )


def state_like(parameter: MeshParameter, local: Tensor) -> DTensor:
    """An optimizer state as a DTensor with the layout of the parameter; `local` is this rank's part."""
    return mesh_value(permuted.with_order_of(parameter, dtensor_like(local, parameter)))


def gradient_of(parameter: MeshParameter, local: Tensor) -> Tensor:
    """The gradient of `parameter` of which `local` is this rank's part: a DTensor, or, where autograd goes on, a global tensor."""
    if local.requires_grad and torch.is_grad_enabled():
        layout = parameter.compute_layout
        states = tuple(
            "P" if s == "X" and layout.context.sizes[i] > 1 else s for i, s in enumerate(layout.states)
        )
        # a compute copy may have another dtype
        local = local.to(parameter._layout.dtype)
        return wrap(local, layout_of(layout.context, states, layout.shape, local.dtype))
    return mesh_value(permuted.as_permuted(dtensor_like(local, parameter), parameter._layout))


def layout_of_dtensor(dtensor: DTensor) -> Layout:
    """The layout in which computations take a DTensor of Replicate, Shard and Partial(sum): that of its compute copy, if any."""
    return dtensor.compute_layout if isinstance(dtensor, MeshParameter) else stored_layout(dtensor)


def parameter_local(p: DTensor, states: States, site: Site = NOWHERE) -> Tensor:
    """The local tensor of a parameter (or any DTensor) in ``states``, recorded by autograd."""
    layout = layout_of_dtensor(p)
    if isinstance(p, MeshParameter):
        local = dtensor_local(p) if p._copy is None else p._copy.take()
    else:
        local = p.to_local()
    return convert(local, layout, states, site)
