"""Gradients of what a model is given: the samples of a generator, say, or a prompt that is learnt.

A step runs on copies, at which autograd stops: each microbatch has its own rows, and the code behind the units, which runs on
the whole batch, has the whole. Every stage may take something of them, so what arrives there is summed over the stages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.runtime.executor import arrived
from meshwright_pipeline.runtime.tied_grads import Tie, TiedSum
from meshwright_pipeline.trace.microbatch import Call, microbatches

Tensor = torch.Tensor


class Inputs:
    """One call of a model, of whose tensors some have a gradient.

    Args:
        call: what the model was given.
        count: microbatches.
        group: the ranks of the axis.

    Attributes:
        given: the tensors with a gradient, as whole values, connected to what they are made of.
        calls, whole: what microbatches, and the code behind the units, are run on.
    """

    def __init__(self, call: Call, count: int, group: dist.ProcessGroup) -> None:
        call = pytree.tree_map_only(GlobalTensor, lambda t: t.full_tensor() if t.requires_grad else t, call)
        self.given: list[Tensor] = [x for x in pytree.tree_leaves(call) if _wanted(x)]
        self._copies: list[list[Tensor]] = []
        with torch.no_grad():
            calls = microbatches(*call, count)
        self.calls = [self._copied(call, part) for part in calls]
        self.whole = self._copied(call, call)
        names = [f"input {place}" for place in range(len(self.given))]
        everyone = tuple(range(dist.get_world_size(group)))
        self._sum = TiedSum([Tie((name,), everyone) for name in names], group, "inputs")
        self._names = names

    @staticmethod
    def wanted(call: Call) -> bool:
        """Whether a call has tensors with a gradient."""
        return any(_wanted(x) for x in pytree.tree_leaves(call))

    def _copied(self, call: Call, part: Call) -> Call:
        """`part`, of `call`, with copies of what has a gradient; they share its memory, and may be changed in place."""
        leaves, spec = pytree.tree_flatten(part)
        copies: list[Tensor] = []
        for place, known in enumerate(pytree.tree_leaves(call)):
            if _wanted(known):
                copies.append(leaves[place].detach().requires_grad_())
                leaves[place] = arrived(copies[-1])
        self._copies.append(copies)
        found: Call = pytree.tree_unflatten(leaves, spec)
        return found

    def gradients(self) -> list[Tensor | None]:
        """Those of `given` (collective along the axis); None where no stage has taken anything of one.

        Raises:
            Lost: a rank of the axis is gone.
        """
        found: dict[str, Tensor | None] = {}
        for place, (name, given) in enumerate(zip(self._names, self.given, strict=True)):
            *parts, whole = (copies[place] for copies in self._copies)
            total = whole.grad
            if any(part.grad is not None for part in parts):
                own = [torch.zeros_like(part) if part.grad is None else part.grad for part in parts]
                rows = len(parts) > 1 and parts[0].shape != given.shape
                taken = torch.cat(own) if rows else torch.stack(own).sum(0)
                total = taken if total is None else total + taken
            found[name] = total
        self._copies.clear()
        like = dict(zip(self._names, self.given, strict=True))
        summed = self._sum.sum(found, like, {name: x.dtype for name, x in like.items()})
        return [summed[name] for name in self._names]


def _wanted(x: object) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
