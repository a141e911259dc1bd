"""Gradients of the inputs of a model: the samples of a generator, say, or a learnt prompt.

A step runs on copies, at which autograd stops: each microbatch has its own rows, and the code after the last unit, which
runs on the whole batch, has a copy of the whole. Every stage may use an input, so its gradient is summed over the stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.runtime.actions.executor import writable
from meshwright_pipeline.runtime.tied_grads import Tie, TiedSum
from meshwright_pipeline.trace.microbatch import Call, microbatches

Tensor = torch.Tensor


class InputGradients:
    """One call of a model with inputs that require a gradient, in `count` microbatches.

    Attributes:
        given: the tensors that require a gradient, as whole values, connected to the graph outside.
        calls, whole: the arguments of microbatches, and of the code after the last unit.
    """

    def __init__(self, call: Call, count: int, group: dist.ProcessGroup) -> None:
        call = pytree.tree_map_only(GlobalTensor, lambda t: t.full_tensor() if t.requires_grad else t, call)
        self.given: list[Tensor] = [leaf for leaf in pytree.tree_leaves(call) if _wanted(leaf)]
        self._copies: list[list[Tensor]] = []
        with torch.no_grad():
            calls = microbatches(*call, count)
        self.calls = [self._copied(call, part) for part in calls]
        self.whole = self._copied(call, call)
        ranks = tuple(range(dist.get_world_size(group)))
        self._names = [f"input {place}" for place in range(len(self.given))]
        self._sum = TiedSum([Tie((name,), ranks) for name in self._names], group, "inputs")

    @staticmethod
    def wanted(call: Call) -> bool:
        """Whether an argument requires a gradient."""
        return any(_wanted(leaf) for leaf in pytree.tree_leaves(call))

    def _copied(self, call: Call, part: Call) -> Call:
        """`part` of `call`, with writable copies, over the same memory, of tensors that require a gradient."""
        leaves, spec = pytree.tree_flatten(part)
        copies: list[Tensor] = []
        for place, leaf in enumerate(pytree.tree_leaves(call)):
            if _wanted(leaf):
                copies.append(leaves[place].detach().requires_grad_())
                leaves[place] = writable(copies[-1])
        self._copies.append(copies)
        copied: Call = pytree.tree_unflatten(leaves, spec)
        return copied

    def gradients(self) -> list[Tensor | None]:
        """The gradients of `given` (collective along the axis); None where no stage has used one. Raises RankLost."""
        gradients: dict[str, Tensor | None] = {}
        for place, (name, given) in enumerate(zip(self._names, self.given, strict=True)):
            *parts, whole = (copies[place] for copies in self._copies)
            total = whole.grad
            if any(part.grad is not None for part in parts):
                of_parts = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
                split = len(parts) > 1 and parts[0].shape != given.shape
                of_calls = torch.cat(of_parts) if split else torch.stack(of_parts).sum(0)
                total = of_calls if total is None else total + of_calls
            gradients[name] = total
        self._copies.clear()
        like = dict(zip(self._names, self.given, strict=True))
        summed = self._sum.sum(gradients, like, {name: given.dtype for name, given in like.items()})
        return [summed[name] for name in self._names]


def _wanted(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
