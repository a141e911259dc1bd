"""Token dispatch: the forward of a module whose experts are sharded along a mesh axis.

All-to-alls send each token to its experts and the results back. Between them the module's own forward runs on plain local
tensors: this rank's experts, and the rows from every rank of the axis. No token is dropped or padded.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of
from meshwright_dtensor.parameter import layout_of_dtensor
from meshwright_dtensor.sharding.states import State, States, is_shard
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, local_in, wrap
from meshwright_parallel.moe.all_to_all import Route, as_global, sum_over_axes, tied
from meshwright_parallel.moe.local_parameters import ExpertsForward, LocalExperts
from meshwright_parallel.moe.routing import Rows, chosen_rows

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Call:
    """The call of the module: arguments, local assignment, dims of weights and tokens."""

    bound: inspect.BoundArguments
    assignment: Tensor
    weights_ndim: int
    tokens_ndim: int


@dataclass
class Dispatch(ExpertsForward):
    """The forward of a module of experts whose parameters are sharded along the mesh axis `axis`."""

    axis: str

    def __call__(self, *args: Any, **kwargs: Any) -> GlobalTensor:
        """The output of the module for global tokens [..., H], assignment and weights."""
        bound = self.__signature__.bind(*args, **kwargs)
        inputs = [bound.arguments.get(name) for name in self._names]
        if len(inputs) < 3 or not all(isinstance(t, Tensor) for t in inputs):
            raise UnsupportedError(
                f"experts {self.name!r} were called without tensors for {', '.join(self._names)}; under expert parallelism "
                "they must be called with tokens, the experts of each token and their weights, as when they were planned"
            )
        context = layout_of_dtensor(next(self.module.parameters())).context  # type: ignore[arg-type]
        tokens, assignment, weights = (as_global(t, context) for t in inputs)
        flat: Any = tokens if tokens.ndim == 2 else tokens.reshape(-1, tokens.shape[-1])
        out: Any = self._run(context, (flat, assignment, weights), bound, tokens.ndim)
        return out if tokens.ndim == 2 else out.reshape(tokens.shape)  # type: ignore[no-any-return]

    def _run(
        self, context: MeshContext, inputs: Sequence[GlobalTensor], bound: inspect.BoundArguments, ndim: int
    ) -> GlobalTensor:
        expert_axis = context.axes.index(self.axis)
        states = self._row_states(inputs[0]._layout, expert_axis)
        x, chosen, weight = (local_in(t, states) for t in inputs)
        total = length = x.shape[0]
        start = 0
        # every rank has all rows, and sends its part of them
        if states[expert_axis] == "X":
            step = -(-length // context.sizes[expert_axis])
            start = min(context.coords[expert_axis] * step, length)
            length = min(step, length - start)
            x, chosen, weight = (t.narrow(0, start, length) for t in (x, chosen, weight))
        rows = chosen_rows(chosen, weight, self.rule, self.name)
        out = self._through(context, x, rows, states, _Call(bound, chosen, weight.ndim, ndim))
        if states[expert_axis] == "X":
            out = nn.functional.pad(out, (0, 0, start, total - start - length))
        result: States = tuple(s if is_shard(s) else "P" if s == "X" else "I" for s in states)
        return wrap(out, layout_of(context, result, inputs[0].shape, out.dtype))

    def _through(self, context: MeshContext, x: Tensor, rows: Rows, states: States, call: _Call) -> Tensor:
        """Send rows [N, H] to their experts, and return the results [N, H]."""
        expert_axis = context.axes.index(self.axis)
        route = Route(context.group(expert_axis), self.axis, self.name)
        rank = context.coords[expert_axis]
        each = self.rule.count // route.size
        idle: list[int] = []
        sent = rows.counts.view(route.size, each)
        if self.rule.kind == "container":
            # every rank must know which experts have no row anywhere: their gradients are None
            counts = route.counts(rows.counts.expand(route.size, -1))
            row_axes = [axis for axis, state in enumerate(states) if axis != expert_axis and is_shard(state)]
            total = sum_over_axes(counts.sum(0), context, row_axes, self.name)
            received = counts[:, rank * each : (rank + 1) * each]
            busy = [received.sum(0), total]
        else:
            received, busy = route.counts(sent), []
        # all that the host has to know of the values, in one read: it waits for the device
        numbers = torch.cat([sent.sum(1), received.sum(1), *busy]).tolist()
        sizes_out, sizes_in = numbers[: route.size], numbers[route.size : 2 * route.size]
        if busy:
            here, anywhere = numbers[2 * route.size :][:each], numbers[2 * route.size + each :]
            called = {rank * each + e for e, count in enumerate(here) if count}
            idle = [e for e, count in enumerate(anywhere) if count and e not in called]
        rows = rows.first(sum(sizes_out))
        # one all-to-all is cheaper than two
        if rows.weight.dtype == x.dtype:
            packed = torch.cat([rows.of(x), rows.weight], 1)
            packed = route.rows(packed, sizes_out, sizes_in, "tokens and weights")
            arrived, weight = packed[:, :-1], packed[:, -1:]
            parts: tuple[Tensor, ...] = (packed,)
        else:
            arrived = route.rows(rows.of(x), sizes_out, sizes_in, "tokens")
            weight = route.rows(rows.weight, sizes_out, sizes_in, "weights")
            parts = (arrived, weight)
        local_numbers = torch.arange(each, device=x.device).repeat(route.size)
        expert = local_numbers.repeat_interleave(received.reshape(-1), output_size=sum(sizes_in))
        local = LocalExperts(self.module, self.rule, rank, route.size, states, route.axis, idle)
        with local.swapped() as tensors:
            if arrived.shape[0]:
                result = self._inner(local, arrived, weight, expert, call)
                # fused experts all get gradients
                tensors = tensors if self.rule.kind == "container" else []
            else:
                result, tensors = x.new_zeros((0, x.shape[1])), [*parts, *tensors]
        if torch.is_grad_enabled() and any(p.requires_grad for p in self.module.parameters()):
            # every rank must take part in the backward all-to-all, or the others would wait for it
            anchor = [] if result.requires_grad else [torch.zeros((), device=x.device, requires_grad=True)]
            tensors = [*tensors, *anchor]
        result = tied(result, *tensors) if tensors else result
        return rows.combined(route.rows(result, sizes_in, sizes_out, "results"), x.shape[0])

    def _inner(self, local: LocalExperts, x: Tensor, weight: Tensor, expert: Tensor, call: _Call) -> Tensor:
        """The module's own forward on the rows that arrived, one chosen expert each."""
        shape = (*(1,) * (call.tokens_ndim - 2), *x.shape)
        weight = weight.reshape(-1, *(1,) * (call.weights_ndim - 1))
        values = (x.reshape(shape), local.assignment(expert, call.assignment), weight)
        named = OrderedDict(call.bound.arguments | dict(zip(self._names, values, strict=True)))
        arguments = inspect.BoundArguments(self.__signature__, named)
        result = self.inner(*arguments.args, **arguments.kwargs)
        if not isinstance(result, Tensor) or result.numel() != x.numel():
            returned = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise UnsupportedError(
                f"experts {self.name!r} returned {returned} for tokens of shape {list(shape)}; expert parallelism needs one "
                "row for every row, as when they were planned: plan again for this configuration"
            )
        return result.reshape(x.shape)

    def _row_states(self, layout: Layout, expert_axis: int) -> States:
        """Rows stay sharded on the expert axis and where gradients of parameters are partial.

        X on another axis says that its ranks compute with parts of every expert.
        """
        stored = [layout_of_dtensor(p).states for p in self.module.parameters()]  # type: ignore[arg-type]
        partial = {axis for states in stored for axis, s in enumerate(states) if s == "X"}
        sharded = {axis for states in stored for axis, s in enumerate(states) if is_shard(s)} | {expert_axis}
        rows: list[State] = []
        for axis, state in enumerate(layout.states):
            if isinstance(state, int) and int(state) == 0 and (axis == expert_axis or axis in partial):
                rows.append(state)
            else:
                rows.append("X" if axis in sharded else "I")
        return tuple(rows)
