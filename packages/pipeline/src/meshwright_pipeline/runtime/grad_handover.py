"""Gradients of a step that runs inside the call: kept apart until `loss.backward()` hands them over.

While the schedule runs, computations take stand-ins of the parameters, at which autograd accumulates the gradients of all
microbatches. The loss that is returned is connected to the parameters themselves by one function, whose backward gives
them these gradients, scaled by what it is given: hooks, bucketed sums, scalers and accumulation see an ordinary pass.
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
from meshwright_pipeline._torch import leaf_of, parameters_swapped, stored_dtype

Tensor = torch.Tensor


class Sink:
    """Where the gradient of one parameter is added up during a step.

    Attributes:
        parameter: the parameter.
        leaf: the tensor at which autograd accumulates its gradient outside of a step.
        anchor: makes autograd come by where the memory of the parameter is no leaf.
        added: what has been added to the gradient from there, in the dtype that the parameter is stored in.
    """

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.leaf = leaf_of(parameter)
        self.anchor = torch.zeros((), device=self.leaf.device, requires_grad=True)
        self._own: Tensor | None = None
        self.added: Tensor | None = None

    @property
    def stand_in(self) -> nn.Parameter:
        """A leaf over the memory of the parameter."""
        leaf = leaf_of(self.parameter)
        if self._own is None or leaf is not self.leaf or self._own.data_ptr() != leaf.data_ptr():
            self.leaf, self._own = leaf, nn.Parameter(leaf.detach())
        return self._own  # type: ignore[return-value]

    @property
    def dtype(self) -> torch.dtype:
        """In which gradients of microbatches, and of copies on other ranks, are added up."""
        return stored_dtype(self.parameter)

    def add(self, gradient: Tensor) -> None:
        """Add to the gradient."""
        if self.added is None:
            self.added = gradient.to(self.dtype, copy=True)
        else:
            self.added += gradient

    def take(self) -> Tensor | None:
        """The gradient of the step; it is kept no longer."""
        total, self.added = self.added, None
        if self._own is not None and self._own.grad is not None:
            total = self._own.grad if total is None else total + self._own.grad
            self._own.grad = None
        return total


class _StageCopy(ComputeCopy):
    """What a parameter over a mesh is computed with during a step: the stand-in, or what its own copy gathers."""

    __slots__ = ("inner", "sink")

    def __init__(self, sink: Sink, parameter: MeshParameter, inner: ComputeCopy | None) -> None:
        super().__init__(parameter.compute_layout)
        self.sink, self.inner = sink, inner

    @property
    def computing(self) -> bool:
        """As its own copy says."""
        return self.inner is not None and self.inner.computing

    def take(self) -> Tensor:
        """See ComputeCopy."""
        if self.inner is None:
            return self.sink.stand_in
        # not through a leaf: that would keep memory which is gathered for one use only
        taken = self.inner.take().detach()
        return _Into.apply(taken, self.sink.anchor, self.sink)  # type: ignore[no-any-return]

    def leaf(self) -> Tensor:
        """See ComputeCopy."""
        return self.sink.leaf

    def stored_gradient(self, gradient: Tensor) -> Tensor:
        """See ComputeCopy."""
        return gradient if self.inner is None else self.inner.stored_gradient(gradient)

    def follow(self, requires_grad: bool) -> None:
        """See ComputeCopy."""
        if self.inner is not None:
            self.inner.follow(requires_grad)


class _Into(torch.autograd.Function):
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
    """The sinks of all trainable parameters of a model that this rank holds.

    Args:
        model: the model; its parameters may be ordinary ones or lie over a mesh.
        plain: compute with ordinary tensors although parameters lie over a mesh (of one rank).
    """

    def __init__(self, model: nn.Module, plain: bool) -> None:
        self.model, self.plain = model, plain
        self._sinks: dict[int, Sink] = {}

    def trainable(self) -> list[tuple[str, Sink]]:
        """(name, sink) of every parameter that requires a gradient now."""
        found = []
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                sink = self._sinks.get(id(parameter))
                if sink is None:
                    sink = self._sinks[id(parameter)] = Sink(parameter)
                sink.leaf = leaf_of(parameter)
                found.append((name, sink))
        return found

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Inside, computations take stand-ins, and gradients go to the sinks."""
        sinks = {id(sink.parameter): sink for _, sink in self.trainable()}
        swaps: list[tuple[nn.Module, str, Tensor]] = []
        copies: list[tuple[MeshParameter, ComputeCopy | None]] = []
        seen: set[int] = set()
        for module in self.model.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                sink = sinks.get(id(parameter))
                if isinstance(parameter, MeshParameter) and not self.plain:
                    if sink is not None and id(parameter) not in seen:
                        seen.add(id(parameter))
                        copies.append((parameter, parameter._copy))
                elif sink is not None:
                    swaps.append((module, name, sink.stand_in))
                elif isinstance(parameter, MeshParameter):
                    swaps.append((module, name, nn.Parameter(leaf_of(parameter), requires_grad=False)))
        for meshed, inner in copies:
            meshed.compute_with(_StageCopy(sinks[id(meshed)], meshed, inner))
        try:
            with parameters_swapped(swaps):
                yield
        finally:
            for meshed, inner in copies:
                meshed.compute_with(inner)

    def take(self) -> list[tuple[str, Sink, Tensor | None]]:
        """(name, sink, gradient of the step) of every trainable parameter."""
        return [(name, sink, sink.take()) for name, sink in self.trainable()]

    def forget(self) -> None:
        """Give up the gradients of a step that has failed."""
        for sink in self._sinks.values():
            sink.take()


def _once() -> None:
    """Refuse a backward pass that is to be differentiated in its turn: autograd's mode is on in no other.

    Raises:
        UnsupportedError: it is one.
    """
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "a backward pass with create_graph=True through a pipelined model: that of its stages has no derivative, so that what "
            "is made of these gradients (a gradient penalty, a Hessian) would train nothing; leave create_graph out, or plan "
            "without pp"
        )


class _HandOver(torch.autograd.Function):
    """The loss, connected to the parameters whose gradients are known already."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        loss: Tensor,
        held: list[Tensor | None],
        after: Callable[[], None],
        anchor: Tensor,
        *leaves: Tensor,
    ) -> Tensor:
        ctx.held, ctx.after, ctx.spent = held, after, False
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        _once()
        held = list(ctx.held)
        if ctx.spent:
            raise UsageError(
                "backward() through the loss of a pipelined step a second time; its gradients have been handed over: call the "
                "model again"
            )
        ctx.spent = True
        ctx.held.clear()  # they are scaled in place
        ctx.after()
        return (None, None, None, None, *(None if g is None else g.mul_(gradient.to(g.dtype)) for g in held))


def connected(
    loss: Tensor, gradients: Sequence[tuple[Sink, Tensor | None]], after: Callable[[], None]
) -> Tensor:
    """`loss` with a backward that hands over `gradients`; `after` is called when that begins.

    The gradients are taken over, and scaled in place.
    """
    with torch.enable_grad():
        leaves = [sink.leaf for sink, _ in gradients]
        held = [gradient for _, gradient in gradients]
        # a stage whose parameters are all frozen has a loss with a gradient too, as on one device
        anchor = torch.zeros((), device=loss.device, requires_grad=True)
        return _HandOver.apply(loss.detach(), held, after, anchor, *leaves)  # type: ignore[no-any-return]


class _Return(torch.autograd.Function):
    """What a model returned, connected to its parameters: gradients of it start the backward passes of the stages."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        outputs: list[Tensor],
        differentiable: list[bool],
        back: Callable[[list[Tensor | None]], list[Tensor | None]],
        after: Callable[[], None],
        anchor: Tensor,
        *leaves: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.back, ctx.after = back, after
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(x for x, d in zip(outputs, differentiable, strict=True) if not d))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        _once()
        back, ctx.back = ctx.back, None
        if back is None:
            raise UsageError(
                "backward() through what a pipelined model returned a second time; what its stages kept is gone: add the losses "
                "up and call backward() once, or call the model again"
            )
        found = back(list(gradients))
        ctx.after()
        return (None, None, None, None, None, *found)


def returned(
    outputs: Sequence[Tensor],
    differentiable: Sequence[bool],
    leaves: Sequence[Tensor],
    back: Callable[[list[Tensor | None]], list[Tensor | None]],
    after: Callable[[], None],
) -> tuple[Tensor, ...]:
    """`outputs`, of which a backward pass calls `back` with their gradients, and hands over what that returns to `leaves`.

    `after` is called before that.
    """
    with torch.enable_grad():
        anchor = torch.zeros((), device=outputs[0].device, requires_grad=True)
        return _Return.apply(list(outputs), list(differentiable), back, after, anchor, *leaves)  # type: ignore[no-any-return]


class _LossOnly(torch.autograd.Function):
    """Identity; raises where a loss made of it is differentiated."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # type: ignore[override]
        raise UsageError(
            "the model has computed its loss, so that the backward passes of this step have run, and another one was computed "
            "from what else it returned; compute all of the loss outside (call the model without labels) or all of it inside"
        )


def loss_only(value: Tensor) -> Tensor:
    """`value`, of which no gradient may be asked."""
    with torch.enable_grad():
        anchor = torch.zeros((), device=value.device, requires_grad=True)
        return _LossOnly.apply(value, anchor)  # type: ignore[no-any-return]
