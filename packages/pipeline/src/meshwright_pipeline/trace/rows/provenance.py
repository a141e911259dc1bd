"""Rules that say, operation by operation, which rows of the batch each value depends on.

Every value has a companion tensor with the row that each of its elements belongs to. Operations that move elements move
their rows too. Elementwise operations keep the row if all operands agree. A sum over several rows gives a number with a
power: for the whole batch, a number of power 0 is the mean of those of equal microbatches, one of power 1 is their sum,
and one of power p is count ** (p - 1) times their sum. What no rule proves is `UNKNOWN`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from meshwright_dtensor.devices import HOST
from meshwright_pipeline._torch import op_name, pytree

Tensor = torch.Tensor
NO_ROW = -1


@dataclass(frozen=True)
class Provenance:
    """How a value depends on the rows of the batch.

    Attributes:
        rows: the row of each element, `NO_ROW` if it depends on none; None for numbers and unknown values.
        power: the power of a number; None for values with rows and unknown values.
        live: depends on unit results or random numbers; otherwise on inputs of the model alone.
        fixed: computed with a number that only inputs determine. Each microbatch gets that of the whole batch.
    """

    rows: Tensor | None = None
    power: int | None = None
    live: bool = True
    fixed: bool = False

    @property
    def known(self) -> bool:
        """Whether the dependence on rows is proven."""
        return self.rows is not None or self.power is not None

    @property
    def is_constant(self) -> bool:
        """Whether it is the same number in every microbatch."""
        return self.fixed and not self.live


UNKNOWN = Provenance()
"""Rows may interact in it."""
FIXED = Provenance(power=0, live=False, fixed=True)
"""A number that only inputs determine. Each microbatch gets that of the whole batch."""


@dataclass(frozen=True)
class Operation:
    """One operation between units.

    Attributes:
        name: without namespace.
        arguments: by name.
        inputs: provenance of its tensors, by argument name.
        out: its first result.
        scale: for an argument that depends on no row, the power of the number of rows with which it grows (0 for a
            constant); None if it is not a power.
    """

    name: str
    arguments: dict[str, Any]
    inputs: dict[str, Provenance]
    out: Tensor
    scale: Callable[[str], int | None]

    @property
    def row_inputs(self) -> dict[str, Tensor]:
        """The rows of the arguments that have rows."""
        return {arg: value.rows for arg, value in self.inputs.items() if value.rows is not None}


Rule = Callable[[Operation, dict[str, Tensor]], Provenance]
"""Takes an operation and the rows of its arguments."""


def compact(rows: Tensor) -> Tensor:
    """The same rows, with expanded dims reduced to size 1."""
    for dim, (size, stride) in enumerate(zip(rows.shape, rows.stride(), strict=True)):
        if size > 1 and stride == 0:
            rows = rows.narrow(dim, 0, 1)
    return rows


def rows_without(rows: Tensor, dims: Sequence[int]) -> Tensor | None:
    """The rows with `dims` reduced to size 1; None if rows differ along them."""
    small = compact(rows)
    for dim in dims:
        if small.shape[dim] > 1:
            first = small.narrow(dim, 0, 1)
            if not bool((small == first).all()):
                return None
            small = first
    return small


def several_rows_along(rows: Tensor, dim: int) -> bool:
    """Whether rows differ along a dim."""
    small = compact(rows)
    return bool(((small != small.amax(dim, keepdim=True)) & (small != NO_ROW)).any())


def combine_rows(operands: Sequence[Tensor], shape: Sequence[int]) -> Tensor | None:
    """The rows of elements computed from several operands, broadcast to `shape`; None if two rows interact."""
    combined = compact(operands[0])
    for rows in operands[1:]:
        a, b = torch.broadcast_tensors(combined, compact(rows))
        if bool(((a != b) & (a != NO_ROW) & (b != NO_ROW)).any()):
            return None
        combined = torch.maximum(a, b)
    return combined.expand(tuple(shape))


MOVES = frozenset(
    "view _unsafe_view reshape _reshape_alias transpose permute t unsqueeze squeeze expand slice select split "
    "split_with_sizes unbind chunk alias detach flip roll repeat narrow movedim "
    "cat stack constant_pad_nd index_select".split()
)
"""Operations that only move elements."""
_LIKE = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like clone _to_copy contiguous lift_fresh".split()
)
_LINEAR = frozenset(
    "add sub rsub mul div neg sum mean _to_copy clone alias detach view unsqueeze squeeze expand".split()
)
_REDUCTIONS = (
    "amax amin max min argmax argmin logsumexp any all var std prod linalg_vector_norm norm sum mean".split()
)
_ALONG_A_DIM = "softmax _softmax log_softmax _log_softmax cumsum sort".split()
_LOSSES = "mse_loss smooth_l1_loss huber_loss binary_cross_entropy".split()
_LAST_DIMS: Mapping[str, tuple[str, int]] = MappingProxyType(
    dict.fromkeys(("tril", "triu"), ("self", 2))
    | {"mm": ("self", 1), "addmm": ("mat1", 1), "linear": ("input", 1)}
)
"""Operation -> the only argument that may have rows, and how many of its last dims belong to one row."""


def result_provenance(op: Operation, pointwise: bool) -> Provenance:
    """The provenance of an operation's result. At least one argument has a provenance."""
    inputs = list(op.inputs.values())
    if not all(value.known for value in inputs):
        return UNKNOWN
    if any(value.rows is None and not value.is_constant for value in inputs):
        return _number(op)
    # a constant may depend on how many rows there are
    if any(op.scale(arg) != 0 for arg in op.arguments if arg not in op.inputs):
        return UNKNOWN
    row_inputs, live = op.row_inputs, any(value.live for value in inputs)
    if not row_inputs and not live:
        return FIXED
    result, rule = UNKNOWN, _loss if op.name.startswith("nll_loss") else _RULES.get(op.name)
    if pointwise or op.name in _LIKE:
        result = Provenance(combine_rows(list(row_inputs.values()), op.out.shape))
    elif rule is not None:
        result = rule(op, row_inputs)
    if not result.known:
        return UNKNOWN
    return replace(result, live=live, fixed=any(value.fixed for value in inputs))


def _within_rows(op: Operation, row_inputs: dict[str, Tensor]) -> Provenance:
    """Rows times a constant matrix, or the triangle of a matrix of one row."""
    arg, count = _LAST_DIMS[op.name]
    if set(row_inputs) != {arg}:
        return UNKNOWN
    rows = row_inputs[arg]
    return _expanded(rows_without(rows, range(rows.dim() - count, rows.dim())), op)


def _gather(op: Operation, row_inputs: dict[str, Tensor]) -> Provenance:
    dim, index = op.arguments["dim"], op.arguments["index"]
    if "self" not in row_inputs or rows_without(row_inputs["self"], [dim]) is None:
        return UNKNOWN
    operands = [row_inputs["self"].gather(dim, index)]
    if "index" in row_inputs:
        operands.append(row_inputs["index"])
    return Provenance(combine_rows(operands, index.shape))


def _reduction(op: Operation, row_inputs: dict[str, Tensor]) -> Provenance:
    if len(row_inputs) != 1:
        return UNKNOWN
    (rows,) = row_inputs.values()
    rank, given = rows.dim(), op.arguments.get("dim")
    given = [given] if isinstance(given, int) else given
    dims = [dim % rank for dim in given] if given else list(range(rank))
    same = rows_without(rows, dims)
    if same is not None:
        for dim in () if op.out.dim() == rank else sorted(dims, reverse=True):
            same = same.squeeze(dim)
        return _expanded(same, op)
    others = [size for dim, size in enumerate(compact(rows).shape) if dim not in dims]
    if op.name not in ("sum", "mean") or any(size > 1 for size in others):
        return UNKNOWN
    return _over_all_rows(rows, 1 if op.name == "sum" else 0)


def _along_a_dim(op: Operation, row_inputs: dict[str, Tensor]) -> Provenance:
    rows = row_inputs.get("self")
    if rows is None or rows_without(rows, [op.arguments.get("dim", -1)]) is None:
        return UNKNOWN
    return _expanded(rows, op)


def _loss(op: Operation, row_inputs: dict[str, Tensor]) -> Provenance:
    shape, operands = tuple(op.arguments["self"].shape), dict(row_inputs)
    if op.name.startswith("nll_loss"):
        if not op.name.endswith("forward") or "weight" in row_inputs:
            return UNKNOWN
        classes = min(1, len(shape) - 1)
        shape = tuple(op.arguments["target"].shape)
        if "self" in operands:
            scores = rows_without(operands["self"], [classes])
            if scores is None:
                return UNKNOWN
            operands["self"] = scores.squeeze(classes)
    else:
        shape = tuple(torch.broadcast_shapes(shape, op.arguments["target"].shape))
    rows, reduction = combine_rows(list(operands.values()), shape), op.arguments.get("reduction", 1)
    if rows is None or reduction == 0:
        return Provenance(rows)
    return _over_all_rows(rows, 1 if reduction == 2 else 0)


def _batched_product(op: Operation, row_inputs: dict[str, Tensor]) -> Provenance:
    """Products of matrices that belong to one row each."""
    operands = [rows_without(rows, [1, 2]) for rows in row_inputs.values()]
    proven = [rows for rows in operands if rows is not None]
    return UNKNOWN if len(proven) < len(operands) else Provenance(combine_rows(proven, op.out.shape))


_RULES: Mapping[str, Rule] = MappingProxyType(
    dict.fromkeys(_LAST_DIMS, _within_rows)
    | dict.fromkeys(_LOSSES, _loss)
    | dict.fromkeys(_REDUCTIONS, _reduction)
    | dict.fromkeys(_ALONG_A_DIM, _along_a_dim)
    | {"gather": _gather, "bmm": _batched_product}
)


def _expanded(rows: Tensor | None, op: Operation) -> Provenance:
    return UNKNOWN if rows is None else Provenance(rows.expand(op.out.shape))


def _over_all_rows(rows: Tensor, power: int) -> Provenance:
    """A sum (power 1) or mean (power 0) over equally many elements of each row."""
    values, counts = compact(rows).unique(return_counts=True)
    if values[0] == NO_ROW or not bool((counts == counts[0]).all()):
        return UNKNOWN
    return Provenance(power=power)


# ---- numbers


def _number(op: Operation) -> Provenance:
    """The result of an operation on numbers: sums of equal powers, multiples, and copies."""
    numbers = {arg: value for arg, value in op.inputs.items() if not value.is_constant}
    if op.name not in _LINEAR or any(value.rows is not None for value in numbers.values()):
        return UNKNOWN
    # a number may be repeated as often as there are rows
    if op.name not in ("sum", "mean") and op.out.numel() != max(op.arguments[a].numel() for a in numbers):
        return UNKNOWN
    if op.name == "_to_copy":
        # the cast of a sum equals the sum of the cast values, except of fractions to integers
        before, after = op.arguments["self"].dtype, op.out.dtype
        if not after.is_floating_point and (before.is_floating_point or after == torch.bool):
            return UNKNOWN
    values, rule = list(numbers.values()), _POWER_RULES.get(op.name)
    power = values[0].power if rule is None else rule(op, values)
    live = any(value.live for value in values)
    return UNKNOWN if power is None else Provenance(power=power, live=live)


def _power_of_sum(op: Operation, numbers: list[Provenance]) -> int | None:
    powers, constants = {value.power for value in numbers}, _constant_operands(op)
    if constants or len(numbers) < len(op.inputs):
        powers.add(0)
    if len(powers) > 1 or any(op.scale(arg) != 0 for arg in (*constants, "alpha")):
        return None
    return powers.pop()


def _power_of_product(op: Operation, numbers: list[Provenance]) -> int | None:
    power = numbers[0].power
    if len(numbers) > 1 or power is None or op.arguments.get("rounding_mode") is not None:
        return None
    if op.name == "div" and op.inputs.get("self", FIXED).is_constant:
        return None
    for arg in _constant_operands(op):
        scale = op.scale(arg)
        if scale is None:
            return None
        power += scale if op.name == "mul" else -scale
    return power


_POWER_RULES: Mapping[str, Callable[[Operation, list[Provenance]], int | None]] = MappingProxyType(
    dict.fromkeys(("add", "sub", "rsub"), _power_of_sum) | dict.fromkeys(("mul", "div"), _power_of_product)
)


def _constant_operands(op: Operation) -> list[str]:
    return [arg for arg in ("self", "other") if arg in op.arguments and arg not in op.inputs]


# ---- operations that move elements


def moved_rows(
    func: Any, args: Any, kwargs: Any, rows_of: Callable[[Tensor], Tensor | None], out: Any
) -> list[Tensor]:
    """The rows of each tensor of `out`, after an operation that only moves elements: it is applied to the rows too."""
    name = op_name(func)

    def rows_in_place(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        rows = rows_of(value)
        if rows is not None:
            return rows
        if name == "index_select" and value is args[2]:
            return value
        return torch.full((), NO_ROW, dtype=torch.int32, device=HOST).expand(value.shape)

    if name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        rows = rows_of(args[0])
        assert rows is not None
        return [_viewed(rows, tuple(out.shape))]
    row_args, row_kwargs = pytree.tree_map(rows_in_place, (args, kwargs))
    if name == "constant_pad_nd":
        row_args, row_kwargs = (*row_args[:2], NO_ROW), {}
    return [x for x in pytree.tree_leaves(func(*row_args, **row_kwargs)) if isinstance(x, Tensor)]


def _viewed(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`rows` in another shape. Trailing expanded dims that do not change stay expanded."""
    same = 0
    while same < min(rows.dim(), len(shape)) and rows.shape[-1 - same] == shape[-1 - same]:
        if rows.stride(-1 - same):
            break
        same += 1
    if not same:
        return rows.reshape(shape)
    for _ in range(same):
        rows = rows.select(-1, 0)
    return rows.reshape((*shape[: len(shape) - same], *[1] * same)).expand(shape)


def growth_power(before: float, after: float, rows_before: int, rows_after: int) -> int | None:
    """The power of the number of rows with which a constant grows; None if it is not a power."""
    if before == after or (math.isnan(before) and math.isnan(after)):
        return 0
    for power in (1, -1):
        if math.isclose(after * rows_before**power, before * rows_after**power, rel_tol=1e-9):
            return power
    return None
