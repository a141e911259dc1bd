"""Gradients of a step that runs inside the call: kept until `loss.backward()` passes them to the parameters.

While the schedule runs, computations use stand-ins of the parameters, at which autograd accumulates the gradients of
all microbatches. The returned loss is connected to the parameters themselves by one autograd function. Its backward
gives them these gradients, scaled by the gradient of the loss. So hooks, bucketed reductions, gradient scalers and
accumulation see an ordinary backward pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.tensor.compute_copy import ComputeCopy
from meshwright_pipeline._torch import (
    leaf_of,
    parameters_of,
    parameters_swapped,
    stored_dtype,
    without_subclasses,
)

Tensor = torch.Tensor


class Sink:
    """Accumulates the gradient of one parameter during a step.

    Attributes:
        leaf: the tensor at which autograd accumulates its gradient outside of a step.
        anchor: makes autograd visit a use of the parameter whose memory is no leaf.
        added: the sum of the gradients of such uses, in the dtype that the parameter is stored in.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.leaf = leaf_of(parameter)
        self.anchor = torch.zeros((), device=self.leaf.device, requires_grad=True)
        self._stand_in: nn.Parameter | None = None
        self.added: Tensor | None = None

    @property
    def stand_in(self) -> nn.Parameter:
        """A leaf over the memory of the parameter."""
        leaf = leaf_of(self.parameter)
        if self._stand_in is None or leaf is not self.leaf or self._stand_in.data_ptr() != leaf.data_ptr():
            self.leaf, self._stand_in = leaf, nn.Parameter(leaf.detach())
        return self._stand_in

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which gradients of microbatches, and of copies on other ranks, are summed."""
        return stored_dtype(self.parameter)

    def add(self, gradient: Tensor) -> None:
        """Add to the gradient."""
        if self.added is None:
            self.added = gradient.to(self.dtype, copy=True)
        else:
            self.added += gradient

    def take(self) -> Tensor | None:
        """The gradient of the step, which is then forgotten."""
        total, self.added = self.added, None
        if self._stand_in is not None and self._stand_in.grad is not None:
            total = self._stand_in.grad if total is None else total + self._stand_in.grad
            self._stand_in.grad = None
        return total


class _StageCopy(ComputeCopy):
    """The compute copy of a mesh parameter during a step: the stand-in, or the unsharded copy of ZeRO (`inner`)."""

    __slots__ = ("inner", "sink")

    def __init__(self, sink: Sink, parameter: MeshParameter, inner: ComputeCopy | None) -> None:
        super().__init__(parameter.compute_layout)
        self.sink, self.inner = sink, inner

    @property
    def computing(self) -> bool:
        return self.inner is not None and self.inner.computing

    @property
    def of_engine(self) -> ComputeCopy | None:
        return self.inner

    def take(self) -> Tensor:
        if self.inner is None:
            return self.sink.stand_in
        # not through a leaf, which would keep the unsharded memory beyond its one use
        unsharded = self.inner.take().detach()
        return _ToSink.apply(unsharded, self.sink.anchor, self.sink)  # type: ignore[no-any-return]

    def leaf(self) -> Tensor:
        return self.sink.leaf

    def stored_gradient(self, gradient: Tensor) -> Tensor:
        return gradient if self.inner is None else self.inner.stored_gradient(gradient)

    def follow(self, requires_grad: bool) -> None:
        if self.inner is not None:
            self.inner.follow(requires_grad)


class _ToSink(torch.autograd.Function):
    """Identity whose gradient goes to a sink."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, sink: Sink) -> Tensor:
        ctx.sink = sink
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.sink.add(gradient)
        return None, None, None


class Sinks:
    """The sinks of all trainable parameters of this rank. `plain`: compute with ordinary tensors, not on the mesh (of one rank)."""

    def __init__(self, model: nn.Module, plain: bool) -> None:
        self.plain = plain
        # a step of a model whose modules were replaced is refused
        self._modules = {module: f"{path}." if path else "" for path, module in model.named_modules()}
        self._sinks: dict[int, Sink] = {}

    def trainable(self) -> dict[str, Sink]:
        """Name -> sink of every parameter that requires a gradient now."""
        return self._of(parameters_of(self._modules))

    def _of(self, held: list[tuple[nn.Module, str, nn.Parameter]]) -> dict[str, Sink]:
        sinks, seen = dict[str, Sink](), set[int]()
        # the functions of mesh parameters would give the same flag, in forty calls
        with without_subclasses():
            trained = [entry for entry in held if entry[2].requires_grad]
        for module, name, parameter in trained:
            at = id(parameter)
            if at not in seen:
                seen.add(at)
                sink = self._sinks.get(at)
                if sink is None:
                    sink = self._sinks[at] = Sink(parameter)
                sink.leaf = leaf_of(parameter)
                sinks[self._modules[module] + name] = sink
        return sinks

    def flags(self) -> list[bool]:
        """Which parameters require a gradient now, also inside of `active`."""
        with without_subclasses():
            return [parameter.requires_grad for *_, parameter in parameters_of(self._modules)]

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, computations use the stand-ins, and gradients go to the sinks."""
        held = parameters_of(self._modules)
        sinks = {id(sink.parameter): sink for sink in self._of(held).values()}
        swaps: list[tuple[nn.Module, str, Tensor]] = []
        copies: dict[int, tuple[MeshParameter, ComputeCopy | None]] = {}
        for module, name, parameter in held:
            sink = sinks.get(id(parameter))
            if isinstance(parameter, MeshParameter) and not self.plain:
                if sink is not None:
                    copies[id(parameter)] = (parameter, parameter._copy)
            elif sink is not None:
                swaps.append((module, name, sink.stand_in))
            elif isinstance(parameter, MeshParameter):
                swaps.append((module, name, nn.Parameter(leaf_of(parameter), requires_grad=False)))
        for mesh_parameter, inner in copies.values():
            mesh_parameter.compute_with(_StageCopy(sinks[id(mesh_parameter)], mesh_parameter, inner))
        try:
            with parameters_swapped(swaps):
                yield
        finally:
            for mesh_parameter, inner in copies.values():
                mesh_parameter.compute_with(inner)

    def forget(self) -> None:
        """Drop the gradients of a step that has failed."""
        for sink in self._sinks.values():
            sink.take()


class _Connected(torch.autograd.Function):
    """Results of a step, connected to the leaves that get gradients when the results are differentiated."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        results: list[Tensor],
        differentiable: list[bool],
        backward: Callable[[list[Tensor | None]], Sequence[Tensor | None]],
        after: Callable[[], None],
        anchor: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.backward_of_step, ctx.after = backward, after
        ctx.set_materialize_grads(False)
        # a view made in here could not be written to in place
        outputs = [x.data for x in results]
        ctx.mark_non_differentiable(*(x for x, d in zip(outputs, differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        # gradients are enabled only in a backward pass that is to be differentiated
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "a backward pass with create_graph=True through a pipelined model: the backward passes of its stages have no "
                "derivative, so a loss of these gradients (a gradient penalty, a Hessian) would train nothing; leave create_graph "
                "out, or plan without pp"
            )
        backward, ctx.backward_of_step = ctx.backward_of_step, None
        if backward is None:
            raise UsageError(
                "backward() a second time through the results of one pipelined step; its activations and gradients have been "
                "used: add the losses up and call backward() once, or call the model again"
            )
        leaf_gradients = backward(list(gradients))
        ctx.after()
        return (None, None, None, None, None, *leaf_gradients)


def connected(
    results: Sequence[Tensor],
    differentiable: Sequence[bool],
    leaves: Sequence[Tensor],
    backward: Callable[[list[Tensor | None]], Sequence[Tensor | None]],
    after: Callable[[], None],
) -> tuple[Tensor, ...]:
    """`results`, connected to `leaves`. `differentiable`: which results have a gradient.

    `backward` is called once, with the gradients of the results, and returns those of the leaves; `after` is called after it.
    """
    with torch.enable_grad():
        # results have a gradient also where all parameters of the stage are frozen, as on one device
        anchor = torch.zeros((), device=results[0].device, requires_grad=True)
        return _Connected.apply(list(results), list(differentiable), backward, after, anchor, *leaves)  # type: ignore[no-any-return]


class _NotDifferentiable(torch.autograd.Function):
    """Identity; raises in its backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        raise UsageError(
            "the model has computed its loss, so the backward passes of this step have run, and another loss was computed from "
            "its other outputs; compute all of the loss outside (call the model without labels) or all of it inside"
        )


def not_differentiable(value: Tensor) -> Tensor:
    """`value`; differentiating it is an error, since the backward passes have run."""
    with torch.enable_grad():
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        return _NotDifferentiable.apply(value, anchor)  # type: ignore[no-any-return]
