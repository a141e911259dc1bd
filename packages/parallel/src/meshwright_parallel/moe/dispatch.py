"""Tokens go to their experts and come back: what runs in place of the forward of a module of experts.

The module's own forward runs on plain local tensors: this rank's experts, and the rows that were sent to them from every
rank of the expert axis. The router's choice is taken as it is: nothing is dropped, padded or reordered for a token.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of
from meshwright_dtensor.parameter import layout_of_dtensor
from meshwright_dtensor.plan import ExpertsRule
from meshwright_dtensor.sharding.states import State, States, is_shard
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, local_in, wrap
from meshwright_parallel.moe.all_to_all import Route, named_anywhere, tied
from meshwright_parallel.moe.local_parameters import LocalExperts
from meshwright_parallel.moe.routing import Rows, chosen_rows

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Call:
    """How the module was called: its arguments, the local assignment, dims of weights and tokens."""

    bound: inspect.BoundArguments
    assignment: Tensor
    weights_ndim: int
    tokens_ndim: int


@dataclass
class Dispatch:
    """The forward of a module of experts whose parameters are shared along a mesh axis.

    Args:
        module: the module; its own forward is called on this rank's experts.
        name: its fully qualified name.
        rule: what the plan says of it.
        axis: the mesh axis along which its experts are shared.
        inner: the forward that it had before.
    """

    module: nn.Module
    name: str
    rule: ExpertsRule
    axis: str
    inner: Callable[..., Any]

    def __post_init__(self) -> None:
        self.__signature__ = inspect.signature(self.inner)
        self._names = list(self.__signature__.parameters)[:3]

    def __call__(self, *args: Any, **kwargs: Any) -> GlobalTensor:
        """The output of the module for global tokens [..., H], assignment and weights."""
        bound = self.__signature__.bind(*args, **kwargs)
        given = [bound.arguments.get(name) for name in self._names]
        if len(given) < 3 or not all(isinstance(t, Tensor) for t in given):
            raise UnsupportedError(
                f"experts {self.name!r} were called without tensors for {', '.join(self._names)}; under expert parallelism "
                "they take tokens, the experts of each token and their weights, as when they were planned"
            )
        context = layout_of_dtensor(next(self.module.parameters())).context  # type: ignore[arg-type]
        tokens, assignment, weights = (_global(t, context) for t in given)
        flat: Any = tokens if tokens.ndim == 2 else tokens.reshape(-1, tokens.shape[-1])
        out: Any = self._run(context, flat, assignment, weights, bound, tokens.ndim)
        return out if tokens.ndim == 2 else out.reshape(tokens.shape)  # type: ignore[no-any-return]

    def _run(
        self,
        context: MeshContext,
        tokens: GlobalTensor,
        assignment: GlobalTensor,
        weights: GlobalTensor,
        bound: inspect.BoundArguments,
        ndim: int,
    ) -> GlobalTensor:
        own = context.axes.index(self.axis)
        states = self._row_states(context, tokens._layout, own)
        x, chosen, weight = (local_in(t, states) for t in (tokens, assignment, weights))
        whole = length = x.shape[0]
        start = 0
        if states[own] == "X":  # every rank has all the rows: each speaks for its part of them
            step = -(-length // context.sizes[own])
            start = min(context.coords[own] * step, length)
            length = min(step, length - start)
            x, chosen, weight = (t.narrow(0, start, length) for t in (x, chosen, weight))
        rows = chosen_rows(chosen, weight, self.rule, self.name)
        out = self._through(context, x, rows, states, _Call(bound, chosen, weight.ndim, ndim))
        if states[own] == "X":
            out = nn.functional.pad(out, (0, 0, start, whole - start - length))
        left: States = tuple(s if is_shard(s) else "P" if s == "X" else "I" for s in states)
        return wrap(out, layout_of(context, left, tokens.shape, out.dtype))

    def _through(
        self,
        context: MeshContext,
        x: Tensor,
        rows: Rows,
        states: States,
        call: _Call,
    ) -> Tensor:
        """Rows [N, H] of this rank to their experts and back: [N, H]."""
        own = context.axes.index(self.axis)
        route, rank = Route(context.group(own), self.axis, self.name), context.coords[own]
        each = self.rule.count // route.size
        idle: list[int] = []
        sent = rows.counts.view(route.size, each)
        if (
            self.rule.kind == "container"
        ):  # every rank must know which experts are idle: their gradients are None
            everything = route.counts(rows.counts.expand(route.size, -1))
            divided = [axis for axis, state in enumerate(states) if axis != own and is_shard(state)]
            total = named_anywhere(everything.sum(0), context, divided, self.name)
            received = everything[:, rank * each : (rank + 1) * each]
            called = {rank * each + e for e in received.sum(0).nonzero().flatten().tolist()}
            idle = [e for e in total.nonzero().flatten().tolist() if e not in called]
        else:
            received = route.counts(sent)
        there, here = sent.sum(1).tolist(), received.sum(1).tolist()
        travelling = x[rows.token]
        if rows.weight.dtype == x.dtype:  # one message is cheaper than two
            packed = route.rows(torch.cat([travelling, rows.weight], 1), there, here, "tokens and weights")
            arrived, weight = packed[:, :-1], packed[:, -1:]
            parts: tuple[Tensor, ...] = (packed,)
        else:
            arrived = route.rows(travelling, there, here, "tokens")
            weight = route.rows(rows.weight, there, here, "weights")
            parts = (arrived, weight)
        numbers = torch.arange(each, device=x.device).repeat(route.size)
        expert = numbers.repeat_interleave(received.reshape(-1), output_size=sum(here))
        local = LocalExperts(self.module, self.rule, rank, route.size, states, route.axis, idle)
        with local as tensors:
            if arrived.shape[0]:
                result = self._inner(local, arrived, weight, expert, call)
                tensors = tensors if self.rule.kind == "container" else []  # fused ones have gradients whole
            else:
                result, tensors = x.new_zeros((0, x.shape[1])), [*parts, *tensors]
        if torch.is_grad_enabled() and local.trained:
            # every rank must take part in the backward exchange, or those that do would wait for it
            anchor = [] if result.requires_grad else [torch.zeros((), device=x.device, requires_grad=True)]
            tensors = [*tensors, *anchor]
        result = tied(result, *tensors) if tensors else result
        back = route.rows(result, here, there, "results")
        return rows.combined(back, x.shape[0])

    def _inner(
        self,
        local: LocalExperts,
        x: Tensor,
        weight: Tensor,
        expert: Tensor,
        call: _Call,
    ) -> Tensor:
        """The module's own forward on the rows that arrived, one chosen expert each."""
        shape = (*(1,) * (call.tokens_ndim - 2), *x.shape)
        weight = weight.reshape(-1, *(1,) * (call.weights_ndim - 1))
        values = (x.reshape(shape), local.assignment(expert, call.assignment), weight)
        arguments = inspect.BoundArguments(
            self.__signature__,
            OrderedDict(call.bound.arguments | dict(zip(self._names, values, strict=True))),
        )
        result = self.inner(*arguments.args, **arguments.kwargs)
        if not isinstance(result, Tensor) or result.numel() != x.numel():
            what = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise UnsupportedError(
                f"experts {self.name!r} returned {what} for tokens of shape {list(shape)}; expert parallelism needs one row "
                "for every row, as when they were planned: plan again for this configuration"
            )
        return result.reshape(x.shape)

    def _row_states(self, context: MeshContext, layout: Layout, own: int) -> States:
        """Rows stay divided where parameters expect it; every rank of the other axes has all of its rows.

        X on an axis other than that of the experts says that its ranks compute with parts of every expert.
        """
        stored = [layout_of_dtensor(p).states for p in self.module.parameters()]  # type: ignore[arg-type]
        partial = {i for own_states in stored for i, s in enumerate(own_states) if s == "X"}
        parted = {i for own_states in stored for i, s in enumerate(own_states) if is_shard(s) and i != own}
        states: list[State] = []
        for axis, state in enumerate(layout.states):
            if isinstance(state, int) and int(state) == 0 and (axis == own or axis in partial):
                states.append(state)
            else:
                states.append("X" if axis == own or axis in parted else "I")
        return tuple(states)


def _global(tensor: Any, context: MeshContext) -> GlobalTensor:
    return (
        tensor if isinstance(tensor, GlobalTensor) else distribute(tensor, context.mesh, context.replicated)
    )
