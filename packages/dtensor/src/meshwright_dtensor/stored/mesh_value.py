"""The arithmetic of optimizers on parameters, gradients and their states, which are DTensors that lie alike.

Any optimizer computes with them as with plain tensors.  What goes element by element runs on the local tensors (see
:mod:`meshwright_dtensor.stored.elementwise`), fused steps and assignment under a mask too; stock DTensor does the rest, but it
leaves
the norm of a shard partial, which later in-place operations refuse and of which ``.item()`` shows one rank's part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from meshwright_dtensor._torch.core import (
    dtensor_from,
    dtensor_local,
    dtensor_spec,
    pytree,
    quiet_exchanges,
    set_dtensor_parts,
    settled,
    stock_call,
)
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.stored.elementwise import lies_like, on_local_parts, quickly, same_specs
from meshwright_dtensor.stored.permuted import layout_in_runs
from meshwright_dtensor.tensor.foreach import one_by_one, writes_lists

Tensor = torch.Tensor


class MeshValue(DTensor):
    """A DTensor made from parameters and gradients outside of autograd; what it shows is never one rank's part.

    Pickled as the stock DTensor that it is but for its arithmetic.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(t is not MeshValue and t is not DTensor for t in types):
            return NotImplemented  # parameters and global tensors know better
        result = quickly(func, args, kwargs)
        if result is not NotImplemented:
            return mesh_value(result)
        result = _writing().handled(func, args, kwargs)
        return optimizer_call(func, args, kwargs) if result is NotImplemented else result

    _stock: DTensor | None = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # kept alive with the tensor: torch.save tells storages apart by their address
        self._stock = dtensor_from(dtensor_local(self), dtensor_spec(self))
        return self._stock.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        copy = mesh_value(dtensor_from(dtensor_local(self).detach().clone(), dtensor_spec(self)))
        memo[id(self)] = copy
        return copy


@cache
def _writing() -> Any:
    from meshwright_dtensor.stored import writes

    return writes


def mesh_value(dtensor: DTensor) -> DTensor:
    """The same object, as a :class:`MeshValue` where it is a stock DTensor that is no part of an autograd graph."""
    if type(dtensor) is DTensor and not dtensor.requires_grad:
        dtensor.__class__ = MeshValue
    return dtensor


def optimizer_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """``func`` by stock DTensor, where it can, without partial values in what it shows.

    Raises:
        UnsupportedError: a fused step meets tensors that do not lie alike.
    """
    name = getattr(func, "__name__", "")
    kwargs = kwargs or {}
    if name.startswith("_fused") or (name == "__setitem__" and assigns_under_mask(*args)):
        return _on_locals(func, name, args, kwargs)
    with stock_call():
        if name != "stack":  # the norms of many gradients are stacked first, and completed together
            args = tuple([_completed(a) if isinstance(a, MeshValue) else a for a in args])
        result = on_local_parts(func, name, args, kwargs)
    if result is NotImplemented:
        if kwargs.get("out") is not None:
            return _writing().write_out(func, args, kwargs)
        result = _by_stock(func, args, kwargs)
    if isinstance(result, DTensor):
        with stock_call():
            return mesh_value(settled(_complete(result)))
    if isinstance(result, (list, tuple)) and name.startswith("_foreach"):
        for one in result:
            mesh_value(settled(one) if isinstance(one, DTensor) else one)
    return result


def _by_stock(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = getattr(func, "__name__", "")
    by_list = writes_lists(name)
    fused = name.startswith("_f") and not by_list
    if fused or not _writing().meets_others(args, kwargs):
        try:
            with stock_call(), quiet_exchanges():
                return func(*args, **kwargs)
        except NotImplementedError:  # it has no rule, and says so on every rank before anything is moved
            if fused:
                raise
    if by_list:
        return one_by_one(func, args, kwargs)
    return _writing().by_global_rules(func, args, kwargs)


def _completed(x: MeshValue) -> MeshValue:
    """``x`` itself, from now on without partial values: what is written to it must not go to another tensor."""
    whole = _complete(x)
    if whole is not x:
        set_dtensor_parts(x, dtensor_local(whole), dtensor_spec(whole))
    return x


def _complete(x: DTensor) -> DTensor:
    """``x`` without partial values: on one axis after the other, as norms of norms."""
    if not any(p.is_partial() for p in x.placements):
        return x
    return settled(x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements]))


def assigns_under_mask(x: Any, mask: Any, value: Any) -> bool:
    """Whether ``x[mask] = value`` is a number for elements of each rank's part."""
    return (
        isinstance(x, DTensor)
        and isinstance(mask, DTensor)
        and mask.dtype is torch.bool
        and mask.shape == x.shape
        and lies_like(x, mask)
        and not isinstance(value, Tensor)
    )


def _on_locals(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with stock_call(), torch.no_grad():
        lists = [a for a in args if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)]
        if not same_specs([a for a in lists if isinstance(a[0], DTensor)]):
            for members in zip(*lists, strict=False):
                _check_alike(name, members)
        local_args, local_kwargs = pytree.tree_map_only(DTensor, dtensor_local, (args, kwargs))
        return func(*local_args, **local_kwargs)


def _check_alike(name: str, members: Sequence[Tensor]) -> None:
    """All that has the shape of the parameter, which comes first, lies as it does."""
    first = members[0]
    if not isinstance(first, DTensor):
        return
    for other in members[1:]:
        if other.shape != first.shape or first.dim() == 0:
            continue  # a count of steps
        same = isinstance(other, DTensor) and other.placements == first.placements
        if not same or not _same_runs(first, other):
            lies = other.placements if isinstance(other, DTensor) else "whole"
            raise UnsupportedError(
                f"{name} on a parameter of shape {list(first.shape)} that lies as {first.placements} met a state that lies "
                f"as {lies}; load optimizer states with optimizer.load_state_dict(), or use fused=False"
            )


def _same_runs(a: Tensor, b: Tensor) -> bool:
    runs = [layout_in_runs(x) for x in (a, b)]
    return runs[0] is runs[1] or (None not in runs and runs[0].states == runs[1].states)  # type: ignore[union-attr]
