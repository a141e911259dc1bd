"""Reductions along a sharded dim: each rank reduces its part, then the results of all ranks are gathered and reduced again.

Only results are communicated, not the reduced tensor. Their gradient is a slice: each rank takes the gradient of its result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from meshwright_dtensor.comm.log import current_site
from meshwright_dtensor.comm.redistribute import conversion_between
from meshwright_dtensor.rules.composites.base import LocalContext, LocalFunction
from meshwright_dtensor.rules.node import NodeView, aten_ops, base_name, dims_of
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import P, R, State, States

Tensor = torch.Tensor

_AGAIN: dict[str, Callable[..., Tensor]] = {
    "aten.amax": torch.amax,
    "aten.amin": torch.amin,
    # of all elements; with the gradient of max() where one is no number
    "aten.max": lambda results, dim: results.max(),
    "aten.min": lambda results, dim: results.min(),
    "aten.any": torch.any,
    "aten.all": torch.all,
    "aten.prod": lambda results, dim: results.prod(dim, dtype=results.dtype),
    "aten.logsumexp": torch.logsumexp,
}
"""Reductions of which the results of parts are reduced again in the same way."""
_NORMS = aten_ops("norm linalg_vector_norm")
_MOMENTS = aten_ops("var std var_mean std_mean")
_PLACES = frozenset({"aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default"})


def combines(view: NodeView) -> bool:
    """Whether the results of parts of the reduced dims can be combined."""
    name = view.node.name
    if name in _PLACES:
        return isinstance(view.bound()["dim"], int)
    return base_name(name) in {*_AGAIN, *_NORMS, *_MOMENTS, "aten.aminmax"}


def is_combined(view: NodeView, ins: Sequence[States], outs: Sequence[States]) -> bool:
    """Whether an op in these states reduces a dim that is sharded, and its results are whole."""
    return bool(ins and outs and _combined_axes(ins, outs)) and combines(view)


def _combined_axes(ins: Sequence[States], outs: Sequence[States]) -> list[int]:
    """Mesh axes along which the first input is sharded and the results are neither sharded nor partial."""
    whole = [all(not isinstance(s[axis], int) and s[axis] != P for s in outs) for axis in range(len(ins[0]))]
    return [axis for axis, state in enumerate(ins[0]) if isinstance(state, int) and whole[axis]]


def local_form(
    call: LocalContext, view: NodeView, run: Callable[[list[Tensor]], Any]
) -> LocalFunction | None:
    """The local function of a reduction along sharded dims, where ``run`` is the op on a part; None if no such dim is sharded."""
    if not is_combined(view, call.ins, call.outs):
        return None
    parts = _Parts(call, view, _combined_axes(call.ins, call.outs))
    if parts.name in _MOMENTS:
        return lambda tensors: parts.moments(tensors[0])
    if call.node.name in _PLACES:
        return lambda tensors: parts.places(tensors[0])
    return lambda tensors: parts.again(tensors[0], run(tensors))


class _Parts:
    """One reduction whose input is sharded along ``axes`` on dims that are reduced."""

    def __init__(self, call: LocalContext, view: NodeView, axes: list[int]) -> None:
        self.call, self.axes, self.bound = call, axes, view.bound()
        self.name = base_name(call.node.name)
        self.dims = dims_of(self.bound.get("dim"), len(call.in_shapes[0]))

    def gathered(self, *results: Tensor) -> tuple[Tensor, ...]:
        """Each of the results, from all ranks along a new first dim; autograd records it."""
        call, states = self.call, tuple(map(_moved_up, self.call.outs[0]))
        source = tuple(0 if axis in self.axes else state for axis, state in enumerate(states))
        ranks, count = math.prod(map(call.size, self.axes)), len(results)
        shape = torch.Size([ranks * count, *call.out_shapes[0]])
        conversion = conversion_between(call.context, source, states, shape)
        assert conversion is not None
        whole = conversion.apply(torch.stack(results), current_site(f"inside {call.node.name}"))
        return whole.view(ranks, count, *whole.shape[1:]).unbind(1)

    def again(self, x: Tensor, results: Any) -> Any:
        """Reduce the results of parts as the parts were."""
        if self.name == "aten.aminmax":
            return [self._extreme(x, *pair) for pair in zip(results, (torch.amin, torch.amax), strict=True)]
        if self.name in _NORMS:
            order = self.bound.get("ord", self.bound.get("p"))
            order = 2 if order is None else order
            if math.isinf(order):
                return self._extreme(x.abs(), results, torch.amax if order > 0 else torch.amin)
            (norms,) = self.gathered(results)
            # of order 0: the number of elements that are not zero
            return torch.linalg.vector_norm(norms, order, 0) if order else norms.sum(0)
        if self.name == "aten.logsumexp" and not x.is_complex():
            return self._log_of_sum(x.to(results.dtype), results.shape)
        reduce = _AGAIN[self.name]
        if self.name in ("aten.amax", "aten.amin", "aten.max", "aten.min"):
            return self._extreme(x, results, reduce)
        return reduce(*self.gathered(results), 0)

    def _log_of_sum(self, x: Tensor, shape: torch.Size) -> Tensor:
        """The logarithm of the sum over all ranks; elements of -inf, even a rank's whole part, have no gradient."""
        (tops,) = self.gathered(x.detach().amax(self.dims).reshape(shape))
        top = tops.amax(0)
        top = top.masked_fill(~top.isfinite(), 0)
        wide = top.reshape([1 if d in self.dims else n for d, n in enumerate(x.shape)])
        (parts,) = self.gathered((x - wide).exp().sum(self.dims).reshape(shape))
        return parts.sum(0).log() + top

    def _extreme(self, x: Tensor, result: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
        """The extreme of all ranks; as on one device all elements that attain it have the same part of the gradient."""
        (results,) = self.gathered(result)
        extreme = reduce(results, 0)
        if results.requires_grad:
            with torch.no_grad():
                kept = result.reshape([1 if d in self.dims else n for d, n in enumerate(x.shape)])
                (counts,) = self.gathered(self._equal(x, kept).sum(self.dims).reshape(result.shape))
                ties = self._equal(results, extreme)
                # half precision does not count far
                counts = counts.double()
                share = (counts * ties.sum(0) / (counts * ties).sum(0)).to(results.dtype)
            results.register_hook(lambda gradient: gradient * share)
        return extreme

    def _equal(self, a: Tensor, b: Tensor) -> Tensor:
        """Where a is b. To torch's max() of all elements, one that is no number is the largest, and has a gradient."""
        return (a == b) | (a.isnan() & b.isnan()) if self.name in ("aten.max", "aten.min") else a == b

    def moments(self, x: Tensor) -> Any:
        """Variance, or standard deviation, and mean of all parts."""
        dtype, correction = x.dtype, self.bound.get("correction")
        if correction is None:
            correction = int(self.bound.get("unbiased", True))
        x = x.float() if dtype.itemsize < 4 else x
        part = torch.var_mean(x, self.dims, correction=0, keepdim=bool(self.bound.get("keepdim")))
        held = torch.full_like(part[1], math.prod([x.shape[d] for d in self.dims]))
        variances, means, counts = self.gathered(part[0].to(x.dtype), part[1], held)
        total = math.prod([self.call.in_shapes[0][d] for d in self.dims])
        mean = (means * counts).sum(0) / total
        apart = means - mean
        if x.is_complex():
            variances, counts, apart = variances.real, counts.real, apart.abs()
        variance = ((variances + apart.square()) * counts).sum(0) / max(total - correction, 0)
        if "std" in self.name:
            # the root has no derivative at 0, where torch gives 0
            constant = variance == 0
            variance = variance.masked_fill(constant, 1).sqrt().masked_fill(constant, 0)
        if not x.is_complex():
            variance, mean = variance.to(dtype), mean.to(dtype)
        return (variance, mean) if self.name.endswith("_mean") else variance

    def places(self, x: Tensor) -> Any:
        """The extreme along one dim and its place, the first one of several."""
        (dim,), keep = self.dims, bool(self.bound["keepdim"])
        pick, reduce = (torch.min, torch.amin) if "min" in self.name else (torch.max, torch.amax)
        best, place = pick(x, dim, keep)
        held = self.call.region(self.call.in_shapes[0], self.call.ins[0])[dim]
        positions = torch.cat([torch.arange(start, start + n, device=x.device) for start, n in held])
        (values,), (places,) = self.gathered(best), self.gathered(positions[place])
        tied = (values == reduce(values.detach(), 0)) | values.isnan()
        first = places.masked_fill(~tied, self.call.in_shapes[0][dim]).amin(0)
        if "arg" in self.name:
            return first
        return values.gather(0, (places == first).byte().argmax(0, keepdim=True)).squeeze(0), first


def _moved_up(state: State) -> State:
    """The state of the same dim after a new first one."""
    if isinstance(state, IntervalShard):
        return state.on(state + 1)
    return state + 1 if isinstance(state, int) else state


def rows(view: NodeView) -> list[tuple[States, States]]:
    """The rows of reduced dims: sharded, with whole results."""
    ndim, outs = len(view.in_shapes[0]), (R,) * len(view.node.outs)
    dims = dims_of(view.bound().get("dim"), ndim) if combines(view) else []
    return [((dim,), outs) for dim in dims if dim < ndim]
