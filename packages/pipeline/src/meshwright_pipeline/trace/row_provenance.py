"""How values of the code between units follow from the rows of a batch, operation by operation.

Every value is watched with a companion: the row that each of its elements belongs to. Operations that move elements move
their rows too; operations between elements keep the row where it is one; sums over several rows make numbers. A number of
power 0 is, for the whole batch, the mean of those of equal microbatches; one of power 1 their sum; of power p
count ** (p - 1) times their sum. What is not proven by a rule here is `UNKNOWN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright_pipeline._torch import op_name, pytree

Tensor = torch.Tensor
NO_ROW = -1


@dataclass(frozen=True)
class Provenance:
    """What is known of a value.

    Attributes:
        rows: the row of each element, `NO_ROW` where it depends on none; None where the value is a number, or unknown.
        power: of a number; None where the value has rows, or is unknown.
        live: depends on what units return, or on random numbers; else on inputs of the model alone.
        fixed: has been made with a number that inputs alone decide, which is that of the whole batch in every microbatch.
    """

    rows: Tensor | None = None
    power: int | None = None
    live: bool = True
    fixed: bool = False


UNKNOWN = Provenance()
"""Nothing is known."""
FIXED = Provenance(power=0, live=False, fixed=True)
"""A number that inputs alone decide: that of the whole batch, wherever it is asked for."""


@dataclass(frozen=True)
class Operation:
    """One operation: its name, arguments by name, and the kinds of its tensors by the name of the argument.

    `scale`: of every argument that is a number but no tensor, or a tensor that depends on no row: how it grows with the
    number of rows (0 where it does not), None where that is not a power.
    """

    name: str
    arguments: dict[str, Any]
    kinds: dict[str, Provenance]
    out: Tensor
    scale: Callable[[str], int | None]


def compact(rows: Tensor) -> Tensor:
    """The same rows with dims of size 1 where they are the same all along them."""
    for dim, (size, stride) in enumerate(zip(rows.shape, rows.stride(), strict=True)):
        if size > 1 and stride == 0:
            rows = rows.narrow(dim, 0, 1)
    return rows


def rows_without(rows: Tensor, dims: Sequence[int]) -> Tensor | None:
    """The rows without some dims (of size 1 then), None where they are not the same along them."""
    small = compact(rows)
    for dim in dims:
        if small.shape[dim] > 1:
            first = small.narrow(dim, 0, 1)
            if not bool((small == first).all()):
                return None
            small = first
    return small


def several_rows_along(rows: Tensor, dim: int) -> bool:
    """Whether elements of several rows lie along a dim."""
    small = compact(rows)
    return bool(((small != small.amax(dim, keepdim=True)) & (small != NO_ROW)).any())


def combine_rows(rows: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """The rows of elements that are made of several, broadcast to `shape`; None where one is made of two rows."""
    found: Tensor | None = None
    for one in rows:
        small = compact(one)
        if found is None:
            found = small
            continue
        a, b = torch.broadcast_tensors(found, small)
        if bool(((a != b) & (a != NO_ROW) & (b != NO_ROW)).any()):
            return None
        found = torch.maximum(a, b)
    assert found is not None
    return found.expand(tuple(shape))


_MOVES = frozenset(
    "view _unsafe_view reshape _reshape_alias transpose permute t unsqueeze squeeze expand slice select split "
    "split_with_sizes unbind chunk alias detach flip roll repeat narrow movedim".split()
)
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like clone _to_copy contiguous lift_fresh".split()
)
_LINEAR = frozenset(
    "add sub rsub mul div neg sum mean _to_copy clone alias detach view unsqueeze squeeze expand".split()
)
_REDUCED = frozenset(
    "amax amin max min argmax argmin logsumexp any all var std prod linalg_vector_norm norm sum mean".split()
)
_ALONG = frozenset("softmax _softmax log_softmax _log_softmax cumsum sort".split())
_LOSSES = frozenset("mse_loss smooth_l1_loss huber_loss binary_cross_entropy".split())


def result_provenance(given: Operation, pointwise: bool) -> Provenance:
    """That of the result of an operation with at least one argument of some kind."""
    kinds = list(given.kinds.values())
    if any(kind.rows is None and kind.power is None for kind in kinds):
        return UNKNOWN
    live, fixed = any(kind.live for kind in kinds), any(kind.fixed for kind in kinds)
    numbers = [kind for kind in kinds if kind.rows is None and not (kind.fixed and not kind.live)]
    name = given.name
    if numbers:
        return _number(name, given)
    if any(given.scale(arg) != 0 for arg in given.arguments if arg not in given.kinds):
        return UNKNOWN  # a constant that depends on how many rows there are
    if all(kind.rows is None for kind in kinds) and not live:
        return FIXED
    rowed = {arg: kind.rows for arg, kind in given.kinds.items() if kind.rows is not None}
    found: Provenance | None
    if pointwise or name in _LIKE:
        found = Provenance(combine_rows(list(rowed.values()), given.out.shape))
    elif name in ("tril", "triu") and set(rowed) == {"self"}:
        last = rows_without(rowed["self"], [rowed["self"].dim() - 2, rowed["self"].dim() - 1])
        found = None if last is None else Provenance(last.expand(given.out.shape))
    elif name in _MOVES and len(rowed) == 1:
        found = None  # the caller moves the rows
    elif name == "gather" and "self" in rowed:
        index = given.arguments["index"]
        if rows_without(rowed["self"], [given.arguments["dim"]]) is None:
            return UNKNOWN
        moved_rows = rowed["self"].gather(given.arguments["dim"], index)
        both = [moved_rows, rowed["index"]] if "index" in rowed else [moved_rows]
        found = Provenance(combine_rows(both, index.shape))
    elif name in _LOSSES or name.startswith("nll_loss"):
        found = _loss(name, given, rowed)
    elif name in _REDUCED and len(rowed) == 1:
        found = _reduced(name, given, next(iter(rowed.values())))
    elif name in _ALONG and "self" in rowed:
        dims = [given.arguments.get("dim", -1)]
        found = (
            None
            if rows_without(rowed["self"], dims) is None
            else Provenance(rowed["self"].expand(given.out.shape))
        )
    elif name in ("mm", "addmm", "bmm", "linear"):
        found = _product(name, given, rowed)
    else:
        return UNKNOWN
    if found is None or (found.rows is None and found.power is None):
        return UNKNOWN
    return replace(found, live=live, fixed=fixed)


def _number(name: str, given: Operation) -> Provenance:
    """Of numbers: sums of alike powers, multiples, and copies."""
    kinds = [kind for kind in given.kinds.values() if not (kind.fixed and not kind.live)]
    if name not in _LINEAR or any(kind.rows is not None for kind in kinds):
        return UNKNOWN
    live = any(kind.live for kind in kinds)
    sizes = [given.arguments[arg].numel() for arg, kind in given.kinds.items() if kind.live or not kind.fixed]
    if name not in ("sum", "mean") and given.out.numel() != max(sizes):
        return UNKNOWN  # repeated, as often as there are rows perhaps
    if name == "_to_copy" and not _keeps_sums(given.arguments["self"].dtype, given.out.dtype):
        return UNKNOWN
    others = [arg for arg in ("self", "other") if arg in given.arguments and arg not in given.kinds]
    constant = others or len(kinds) < len(given.kinds)  # beside a number that inputs decide, or a constant
    if name in ("add", "sub", "rsub"):
        powers = {kind.power for kind in kinds}
        if constant:
            powers.add(0)
        if len(powers) > 1 or any(given.scale(arg) != 0 for arg in (*others, "alpha")):
            return UNKNOWN
        return Provenance(power=powers.pop(), live=live)
    if name in ("mul", "div"):
        if len(kinds) > 1 or (name == "div" and _is_fixed_or_constant("self", given)):
            return UNKNOWN
        if given.arguments.get("rounding_mode") is not None:
            return UNKNOWN
        power = kinds[0].power
        for arg in others:
            scale = given.scale(arg)
            if scale is None or power is None:
                return UNKNOWN
            power += scale if name == "mul" else -scale
        return Provenance(power=power, live=live)
    return Provenance(power=kinds[0].power, live=live)


def _keeps_sums(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a sum in another dtype is the sum of what is in that: whole numbers of fractions are not."""
    return after.is_floating_point or not (before.is_floating_point or after == torch.bool)


def _is_fixed_or_constant(arg: str, given: Operation) -> bool:
    kind = given.kinds.get(arg)
    return kind is None or (kind.fixed and not kind.live)


def _dims(given: Operation, rank: int) -> list[int]:
    dims = given.arguments.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [d % rank for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def _reduced(name: str, given: Operation, rows: Tensor) -> Provenance:
    dims = _dims(given, rows.dim())
    same = rows_without(rows, dims)
    if same is not None:
        keep = given.out.dim() == rows.dim()
        for dim in () if keep else sorted(dims, reverse=True):
            same = same.squeeze(dim)
        return Provenance(same.expand(given.out.shape))
    if name not in ("sum", "mean") or any(
        size > 1 for dim, size in enumerate(compact(rows).shape) if dim not in dims
    ):
        return UNKNOWN
    return _over_rows(rows, 1 if name == "sum" else 0)


def _over_rows(rows: Tensor, power: int) -> Provenance:
    """A sum (power 1) or mean over elements of all rows."""
    found, counts = compact(rows).unique(return_counts=True)
    if found[0] == NO_ROW or not bool((counts == counts[0]).all()):
        return UNKNOWN
    return Provenance(power=power)


def _loss(name: str, given: Operation, rowed: dict[str, Tensor]) -> Provenance:
    reduction = given.arguments.get("reduction", 1)
    own = dict(rowed)
    scores: Tensor = given.arguments["self"]
    shape = tuple(scores.shape)
    if name.startswith("nll_loss"):
        if not name.endswith("forward") or "weight" in rowed:
            return UNKNOWN
        classes = min(1, len(shape) - 1)
        shape = tuple(given.arguments["target"].shape)
        if "self" in own:
            flat = rows_without(own["self"], [classes])
            if flat is None:
                return UNKNOWN
            own["self"] = flat.squeeze(classes)
    else:
        shape = tuple(torch.broadcast_shapes(shape, given.arguments["target"].shape))
    rows = combine_rows(list(own.values()), shape)
    if rows is None or reduction == 0:
        return Provenance(rows)
    return _over_rows(rows, 1 if reduction == 2 else 0)


def _product(name: str, given: Operation, rowed: dict[str, Tensor]) -> Provenance:
    """Rows times a constant matrix; or matrices of one row each with one another."""
    if name == "bmm":
        parts = [rows_without(rows, [1, 2]) for rows in rowed.values()]
        found = [part for part in parts if part is not None]
        return Provenance(combine_rows(found, given.out.shape)) if len(found) == len(parts) else UNKNOWN
    left = {"mm": "self", "addmm": "mat1", "linear": "input"}[name]
    if set(rowed) != {left}:
        return UNKNOWN
    same = rows_without(rowed[left], [rowed[left].dim() - 1])
    return UNKNOWN if same is None else Provenance(same.expand(given.out.shape))


def only_moves_elements(name: str) -> bool:
    """Whether an operation only moves elements."""
    return name in _MOVES or name in ("cat", "stack", "constant_pad_nd", "index_select")


def moved_rows(
    func: Any, args: Any, kwargs: Any, rows: Callable[[Tensor], Tensor | None], out: Any
) -> list[Tensor]:
    """The rows behind an operation that only moves elements, one for each tensor of `out`: the same is done to them."""
    name = op_name(func)

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        own = rows(value)
        if own is not None:
            return own
        if name == "index_select" and value is args[2]:
            return value
        return torch.full((), NO_ROW, dtype=torch.int32).expand(value.shape)

    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        own = rows(args[0])
        assert own is not None
        return [_viewed(own, tuple(out.shape))]
    a, k = pytree.tree_map(one, (args, kwargs))
    if name == "constant_pad_nd":
        a, k = (*a[:2], NO_ROW), {}
    return [x for x in pytree.tree_leaves(func(*a, **k)) if isinstance(x, Tensor)]


def _viewed(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`rows` in another shape; dims at the end that stay, and along which they are the same, take no memory."""
    same = 0
    while same < min(rows.dim(), len(shape)) and rows.shape[-1 - same] == shape[-1 - same]:
        if rows.stride(-1 - same):
            break
        same += 1
    if not same:
        return rows.reshape(shape)
    front = rows
    for _ in range(same):
        front = front.select(-1, 0)
    front = front.reshape(shape[: len(shape) - same])
    for _ in range(same):
        front = front.unsqueeze(-1)
    return front.expand(shape)


def growth_power(before: float, after: float, rows_before: int, rows_after: int) -> int | None:
    """The power of the number of rows that a constant grows with, None where it is none."""
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0
    for power in (1, -1):
        if math.isclose(after * rows_before**power, before * rows_after**power, rel_tol=1e-9):
            return power
    return None
