"""Optimizers that need whole matrices, such as Shampoo and SOAP: each parameter is stepped on one rank, its owner.

Parameter, gradient and states go to the owner, which runs the optimizer's own step on plain whole tensors. Then parameters, and
states of their shape, go back to the parts in which they are; all other states (preconditioners) go to every rank, so that
state dicts, checkpoints and other layouts find them where those of one device are.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of
from meshwright_dtensor.parameter import MeshParameter, state_like
from meshwright_dtensor.sharding.balance import preconditioning_cost
from meshwright_dtensor.sharding.boxes import dim_order_of
from meshwright_dtensor.stored.elementwise import parts_correspond
from meshwright_dtensor.stored.permuted import like_parameter
from meshwright_dtensor.utils.step_copy import step_copy
from meshwright_parallel._torch.core import local_of
from meshwright_parallel.optim.matrix_owners import OwnerExchange, balanced_owners

Tensor = torch.Tensor
_MARK = "_meshwright_whole_matrices"


def step_whole_matrices(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let each step of `optimizer` compute a parameter on one rank, on the whole value; returns the same optimizer.

    For optimizers that multiply or decompose matrices (Shampoo, SOAP, variants of Muon), whose step reads nothing of one
    parameter for another, and iterates `self.param_groups` once. Owners are balanced by size. A step sends every parameter,
    gradient and state to the owner and back; states without the parameter's shape are sent to all ranks.
    `torch.optim.Muon` needs no such call.

    Raises UsageError: not an optimizer.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"step_whole_matrices takes an optimizer, not {type(optimizer).__name__}; make it from model.parameters() first"
        )
    optimizer.__dict__[_MARK] = True
    return optimizer


def refuse_stages(optimizer: torch.optim.Optimizer) -> None:
    """Raise UnsupportedError for a marked optimizer, of which some parameters are of pipeline stages."""
    if optimizer.__dict__.get(_MARK):
        raise UnsupportedError(
            f"step_whole_matrices({type(optimizer).__name__}) under pp: its states could not be read on other stages; plan with "
            "pp=1, or do not call step_whole_matrices, and it computes with the parameters of all stages"
        )


def whole_copy(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """A copy of a marked optimizer for one step on whole matrices; None for any other."""
    if not optimizer.__dict__.get(_MARK):
        return None
    copied = step_copy(optimizer, defaultdict(dict))
    copied.param_groups = OwnedGroups(optimizer, copied.state)  # type: ignore[assignment]
    return copied


def keep_changes(optimizer: torch.optim.Optimizer, copied: torch.optim.Optimizer) -> None:
    """Give a marked optimizer the attributes that a step has set on its copy."""
    if optimizer.__dict__.get(_MARK):
        changed = {k: x for k, x in copied.__dict__.items() if k not in ("state", "param_groups")}
        optimizer.__dict__.update(changed)


@dataclass(frozen=True)
class _Sent:
    """In the place of a tensor in a state that its owner describes: how it travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sharded: bool


class OwnedGroups:
    """The groups of a copy, once: each with the whole parameters that this rank owns."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: dict[Tensor, Any]) -> None:
        self._optimizer, self._state = optimizer, state
        self._used = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._used:
            raise UnsupportedError(
                f"the step of {type(self._optimizer).__name__} iterates its param_groups twice, and its matrices are gathered "
                "once: it cannot be used with step_whole_matrices"
            )
        self._used = True
        meshes: dict[MeshContext, list[tuple[int, MeshParameter]]] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            for p in group["params"]:
                if isinstance(p, MeshParameter) and p.grad is not None:
                    meshes.setdefault(p.global_layout.context, []).append((number, p))
        owned = [
            _Owned(context, [p for _, p in given], self._optimizer.state) for context, given in meshes.items()
        ]
        for number, group in enumerate(self._optimizer.param_groups):
            here = []
            for on_mesh, given in zip(owned, meshes.values(), strict=True):
                here += [whole for i, whole in on_mesh.wholes.items() if given[i][0] == number]
                self._state.update(
                    (on_mesh.wholes[i], x) for i, x in on_mesh.states.items() if given[i][0] == number
                )
            plain = [p for p in group["params"] if not isinstance(p, MeshParameter)]
            self._state.update((p, self._optimizer.state[p]) for p in plain if p in self._optimizer.state)
            lent = {**group, "params": [*plain, *here]}
            yield lent
            group.update((key, value) for key, value in lent.items() if key != "params")
            self._optimizer.state.update((p, self._state[p]) for p in plain if p in self._state)
        for on_mesh in owned:
            on_mesh.share(self._state)


class _Owned:
    """The parameters of one mesh, and of those that this rank owns the whole values and states."""

    @torch.no_grad()
    def __init__(self, context: MeshContext, parameters: Sequence[MeshParameter], states: Any) -> None:
        self.context, self.parameters, self._all_states = context, parameters, states
        self.layouts = tuple(p.global_layout for p in parameters)
        self._owners = context.cached(_owners, self.layouts)
        orders = [dim_order_of(local_of(p)) for p in parameters]
        self.wholes = self._gathered(
            [local_of(p).detach() for p in parameters], range(len(parameters)), orders
        )
        gradients = self._gathered([local_of(p.grad) for p in parameters], range(len(parameters)), orders)  # type: ignore[arg-type]
        self.states: dict[int, dict[str, Any]] = {i: {} for i in self.wholes}
        for i, whole in self.wholes.items():
            whole.grad = gradients[i]
        entries = [self._in_place(p, dict(states[p]) if p in states else {}) for p in parameters]
        for key in dict.fromkeys(itertools.chain.from_iterable(entries)):
            sharded = [i for i, given in enumerate(entries) if _is_sharded(given.get(key))]
            for i, x in self._gathered([local_of(entries[i][key]) for i in sharded], sharded, orders).items():
                self.states[i][key] = x
            for i in self.wholes:
                if key in entries[i] and i not in sharded:
                    self.states[i][key] = entries[i][key]

    def _in_place(self, parameter: MeshParameter, entries: dict[str, Any]) -> dict[str, Any]:
        """States of the parameter's shape as the parameter is sharded, and all others as plain tensors."""
        for key, x in entries.items():
            if not isinstance(x, DTensor):
                continue
            if x.shape != parameter.shape or not x.dim():
                entries[key] = x.full_tensor()
            elif not parts_correspond(parameter, x):
                entries[key] = like_parameter(x, parameter)
        return entries

    def _exchange(self, numbers: Sequence[int], layouts: Sequence[Layout]) -> OwnerExchange:
        return OwnerExchange(self.context, layouts, [self._owners[i] for i in numbers])

    def _gathered(
        self, parts: Sequence[Tensor], numbers: Sequence[int], orders: Sequence[tuple[int, ...]]
    ) -> dict[int, Tensor]:
        """Whole tensors, by the number of the parameter, that may be written to."""
        wholes: dict[int, Tensor] = {}
        for places in _alike(parts):
            exchange = self._exchange(
                [numbers[k] for k in places], [self.layouts[numbers[k]] for k in places]
            )
            gathered = exchange.gather([parts[k] for k in places], [orders[numbers[k]] for k in places])
            for place, whole in gathered.items():
                k = places[place]
                wholes[numbers[k]] = whole.clone() if whole is parts[k] else whole
        return dict(sorted(wholes.items()))

    @torch.no_grad()
    def share(self, states: Mapping[Tensor, Any]) -> None:
        """After the step: the parts of parameters and states on every rank."""
        self._scatter([(i, None) for i in range(len(self.parameters))], list(self.layouts), dict(self.wholes))
        sent: dict[tuple[int, int], Tensor] = {}
        forms: dict[int, Any] = {}
        for i, whole in self.wholes.items():
            forms[i] = self._described(i, states.get(whole, {}), sent)
        for axis, n in enumerate(self.context.sizes):
            if n == 1:
                continue
            of_ranks: list[Any] = [None] * n
            dist.all_gather_object(of_ranks, forms, group=self.context.group(axis))
            forms = {i: form for given in of_ranks for i, form in given.items()}
        leaves = [
            (i, place, leaf)
            for i in range(len(self.parameters))
            for place, leaf in enumerate(x for x in pytree.tree_leaves(forms[i]) if isinstance(x, _Sent))
        ]
        layouts = [
            self.layouts[i].with_dtype(x.dtype)
            if x.sharded
            else layout_of(self.context, self.context.replicated, x.shape, x.dtype)
            for i, _, x in leaves
        ]
        wholes = {k: sent[i, place] for k, (i, place, _) in enumerate(leaves) if (i, place) in sent}
        parts = self._scatter([(i, place) for i, place, _ in leaves], layouts, wholes)
        arrived = iter(parts)
        for i, parameter in enumerate(self.parameters):

            def placed(x: Any, parameter: MeshParameter = parameter) -> Any:
                if not isinstance(x, _Sent):
                    return x
                part = next(arrived)
                return state_like(parameter, part) if x.sharded else part

            entries = self._all_states[parameter]
            entries.clear()
            entries.update(pytree.tree_map(placed, forms[i]))

    def _described(self, i: int, entries: Mapping[str, Any], sent: dict[tuple[int, int], Tensor]) -> Any:
        """The entries with `_Sent` for large tensors of the mesh's device, which are put into `sent` in order."""
        shape, device = self.layouts[i].shape, local_of(self.parameters[i]).device
        top = {id(x) for x in entries.values()}
        leaves, spec = pytree.tree_flatten(dict(entries))
        places = itertools.count()

        def described(x: Any) -> Any:
            if not isinstance(x, Tensor) or x.numel() <= 1 or x.device != device:
                return x
            if x.layout != torch.strided:
                raise UnsupportedError(
                    f"a state of layout {x.layout} cannot be sent to other ranks; keep dense states"
                )
            sent[i, next(places)] = x
            return _Sent(tuple(x.shape), x.dtype, id(x) in top and x.shape == shape)

        return pytree.tree_unflatten([described(x) for x in leaves], spec)

    def _scatter(
        self, names: Sequence[tuple[int, int | None]], layouts: Sequence[Layout], wholes: Mapping[int, Tensor]
    ) -> list[Tensor]:
        """This rank's parts of all tensors; those without a place in a state are written to the parameters."""
        parts: list[Any] = [None] * len(names)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for k, layout in enumerate(layouts):
            by_dtype.setdefault(layout.dtype, []).append(k)
        for dtype, places in by_dtype.items():
            exchange = self._exchange([names[k][0] for k in places], [layouts[k] for k in places])
            mine = {place: wholes[k] for place, k in enumerate(places) if k in wholes}
            like = torch.empty(0, dtype=dtype, device=local_of(self.parameters[0]).device)
            for k, part in zip(places, exchange.scatter(mine, like), strict=True):
                # a tensor of its own: what arrives shares memory with other parts
                parts[k] = part.clone()
        for (i, place), part in zip(names, parts, strict=True):
            if place is None:
                local_of(self.parameters[i]).copy_(part)
        return parts


def _owners(context: MeshContext, layouts: tuple[Layout, ...]) -> tuple[int, ...]:
    """Owners of parameters."""
    return balanced_owners(context, layouts, [preconditioning_cost(layout.shape) for layout in layouts])


def _is_sharded(x: Any) -> bool:
    return isinstance(x, DTensor)


def _alike(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of tensors of each dtype."""
    groups: dict[torch.dtype, list[int]] = {}
    for k, x in enumerate(tensors):
        groups.setdefault(x.dtype, []).append(k)
    return list(groups.values())
