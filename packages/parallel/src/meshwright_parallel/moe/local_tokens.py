"""Experts on local tokens: each rank runs all experts on its own rows, without an all-to-all.

A row of the output depends on its own token and on the experts, and on no other row (the probe proves it). So where an axis
shards the rows of a batch (`dp`, `zero`, `cp`), nothing has to be gathered, although routing (sorting, counting, indexing by
expert) combines rows: the module runs on this rank's rows as if they were the whole batch. On the other axes, such as `tp`,
these rows are a global value, and the module runs there as the plan says.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor, parameter_local
from meshwright_dtensor.plan import ExpertsRule, ParallelPlan
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, local_in, wrap
from meshwright_dtensor.trace.module_stack import FRAMES, Frame
from meshwright_parallel.moe.all_to_all import as_global, sum_over_axes, tied
from meshwright_parallel.moe.local_parameters import ExpertsForward, swapped_parameters
from meshwright_parallel.moe.plan_rules import expert_rules
from meshwright_parallel.moe.routing import rows_per_expert
from meshwright_parallel.recompute.checkpoint import recomputed_modules

Tensor = torch.Tensor


def local_token_modules(
    model: nn.Module, plan: ParallelPlan, strategies: Sequence[Strategy]
) -> dict[str, ExpertsRule]:
    """Name -> rule of the modules of experts that every rank runs on its own rows.

    These are the experts in the plan, or those that the probe finds. There are none unless an axis may shard the rows and no
    axis shards the experts. Call it before parameters are sharded: the probe runs copies of modules.
    """
    may_shard_rows = any(s.gradient == "deferred" and plan.degree(s.axis) > 1 for s in strategies)
    if not may_shard_rows or plan.degree("ep") > 1:
        return {}
    rules = expert_rules(model, plan)
    # recomputing an inner module would run it outside of the call that swaps parameters
    recomputed = recomputed_modules(model, plan) if plan.recompute else {}
    return {n: rule for n, rule in rules.items() if not any(r.startswith(f"{n}.") for r in recomputed)}


def install_local_tokens(model: nn.Module, rules: Mapping[str, ExpertsRule]) -> None:
    """Let the modules of these names run their experts on this rank's rows."""
    for name, module in model.named_modules():
        if name in rules and next(module.parameters(), None) is not None:
            module.forward = LocalTokens(module, name, rules[name], module.forward)


class LocalTokens(ExpertsForward):
    """The forward of a module of replicated experts, on the axes that shard the rows."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module for global tokens [..., H], assignment and weights."""
        bound = self.__signature__.bind(*args, **kwargs)
        inputs = self._tensors(bound)
        if inputs is None:
            return self.inner(*args, **kwargs)
        tokens = inputs[0]
        flat = _reshaped(tokens, (-1, tokens.shape[-1]) if tokens.ndim != 2 else tokens.shape)
        axes = self._row_axes(flat._layout)
        if not axes or any(t.shape[:1] != flat.shape[:1] for t in inputs[1:]):
            return self.inner(*args, **kwargs)
        return _reshaped(self._on_local_rows(bound, [flat, *inputs[1:]], tokens.ndim, axes), tokens.shape)

    def _tensors(self, bound: inspect.BoundArguments) -> list[Any] | None:
        """Tokens, assignment and weights; None where the call is of another form."""
        inputs = [bound.arguments.get(name) for name in self._names]
        others = [value for name, value in bound.arguments.items() if name not in self._names]
        if len(inputs) < 3 or not all(isinstance(t, Tensor) for t in inputs):
            return None
        if not isinstance(inputs[0], GlobalTensor) or any(isinstance(x, GlobalTensor) for x in others):
            return None
        return inputs

    def _row_axes(self, layout: Layout) -> frozenset[int]:
        """The axes that shard the rows, and over which the gradients of all parameters are summed later."""
        parameters = self.module.parameters()
        stored = [layout_of_dtensor(p) if isinstance(p, MeshParameter) else None for p in parameters]
        axes: set[int] = set()
        for axis, state in enumerate(layout.states):
            if not isinstance(state, int) or int(state) != 0:
                continue
            if any(p is None or p.context is not layout.context or p.states[axis] != "X" for p in stored):
                # this axis and those further in stay global
                break
            axes.add(axis)
        return frozenset(axes)

    def _on_local_rows(
        self, bound: inspect.BoundArguments, inputs: Sequence[Any], ndim: int, axes: Collection[int]
    ) -> GlobalTensor:
        """Run the module on this rank's rows; returns the global output [N, H]."""
        layout: Layout = inputs[0]._layout
        states = layout.states
        rows = tuple(state if axis in axes else "I" for axis, state in enumerate(states))
        global_axes = [i for i, n in enumerate(layout.context.sizes) if i not in axes and n > 1]
        values = [self._local_rows(t, layout, rows, global_axes) for t in inputs]
        length, width = values[0].shape
        values[0] = _reshaped(values[0], (*(1,) * (ndim - 2), length, width))
        bound.arguments.update(zip(self._names, values, strict=True))
        out = self._run(bound, self._idle(values[1], layout.context, axes), global_axes)
        if not isinstance(out, Tensor) or out.numel() != length * width:
            returned = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise UnsupportedError(
                f"experts {self.name!r} returned {returned} for tokens of shape {[length, width]}: experts must return one "
                "row for every row, as they did when they were probed; report the model, or use a batch whose rows the "
                "data ranks do not divide"
            )
        out = _reshaped(out, (length, width))
        local, inner_states = (out._local, out._layout.states) if isinstance(out, GlobalTensor) else (out, ())
        inner = dict(zip(global_axes, inner_states, strict=False))
        result: States = tuple(s if i in axes else inner.get(i, "I") for i, s in enumerate(states))
        return wrap(local, layout_of(layout.context, result, inputs[0].shape, local.dtype))

    def _local_rows(self, t: Tensor, like: Layout, rows: States, global_axes: Sequence[int]) -> Tensor:
        """This rank's rows of `t`, sharded as those of `like`: plain, or a global value on `global_axes`."""
        tensor = as_global(t, like.context)
        current = tensor._layout.states
        states = tuple(current[axis] if axis in global_axes else row for axis, row in enumerate(rows))
        local = local_in(tensor, states)
        if not global_axes:
            return local
        return wrap(local, layout_of(like.context, states, tensor.shape, tensor.dtype).inside(global_axes))

    def _idle(self, assignment: Tensor, context: MeshContext, axes: Collection[int]) -> list[nn.Module]:
        """Experts of a container that have rows on other ranks only. They must have a gradient here too."""
        if self.rule.kind != "container" or not torch.is_grad_enabled():
            return []
        chosen = assignment.full_tensor() if isinstance(assignment, GlobalTensor) else assignment
        local = rows_per_expert(chosen, self.rule)
        total = sum_over_axes(local, context, sorted(axes), self.name)
        idle = ((total > 0) & (local == 0)).tolist()
        return [
            self.module.get_submodule(child)
            for child, is_idle in zip(self.rule.children, idle, strict=True)
            if is_idle
        ]

    def _run(self, bound: inspect.BoundArguments, idle: Sequence[nn.Module], global_axes: list[int]) -> Any:
        """Run the module's own forward; every parameter that has a gradient on any rank gets one here."""

        def value(parameter: MeshParameter) -> Tensor:
            layout = layout_of_dtensor(parameter)
            local = parameter_local(parameter, layout.states)
            return local if not global_axes else wrap(local, layout.inside(global_axes))

        with swapped_parameters(self.module, value) as needed:
            out = self.inner(*bound.args, **bound.kwargs)
            if self.rule.kind == "container":
                needed = [p for child in idle for p in child.parameters()]
            elif not torch.is_grad_enabled() or not isinstance(out, Tensor) or out.requires_grad:
                return out
            if not needed or not isinstance(out, Tensor):
                return out
            leaves = [t._local if isinstance(t, GlobalTensor) else t for t in needed]
            if isinstance(out, GlobalTensor):
                return wrap(tied(out._local, *leaves), out._layout)
            return tied(out, *leaves)


def _reshaped(t: Any, shape: Sequence[int]) -> Any:
    """Reshape outside of the module's calls, so that the plan's call numbers (occurrences) stay right."""
    if tuple(t.shape) == tuple(shape):
        return t
    FRAMES.stack.append(Frame("", {}))
    try:
        return t.reshape(shape)
    finally:
        FRAMES.stack.pop()
