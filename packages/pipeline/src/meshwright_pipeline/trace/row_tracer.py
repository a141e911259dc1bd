"""Watches the code between units on a few rows, and tells of every value how that of the batch follows from microbatches.

Twice, on the rows of a microbatch and on those of the batch: what is a constant, and what is a number of rows in disguise, shows
between the two.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright_pipeline._torch import WeakTensorKeys, draws, op_name
from meshwright_pipeline.pytrees import differing_dims, expanded_zeros, map_leaves, tensors_of
from meshwright_pipeline.trace.loss_denominators import SUMS, GlueMode, Place, mean_over_targets
from meshwright_pipeline.trace.row_provenance import (
    FIXED,
    UNKNOWN,
    Operation,
    Provenance,
    combine_rows,
    compact,
    growth_power,
    moved_rows,
    only_moves_elements,
    result_provenance,
    rows_without,
    several_rows_along,
)

if TYPE_CHECKING:
    from meshwright_pipeline.trace.forward_hooks import Label
    from meshwright_pipeline.trace.profiler import Profile

Tensor = torch.Tensor

_SHAPES = frozenset("self size shape repeats".split())
"""Arguments of operations that move elements which may well grow with the rows."""
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class BatchSizeDependent(Exception):
    """With other numbers of rows the model does something else."""


class ReadsValues(BatchSizeDependent):
    """Values are read that are not known here, by Python or for a shape."""


class RowTracer:
    """One watched run.

    Args:
        rows: how many the batch has.
        like: a profile with another number of rows: what grows are rows.
        before: a watched run with another number of rows.

    Attributes:
        calls: the functions of torch that code between units calls, in order.
        fixed: where numbers that inputs alone decide are asked for.
        averaging: how many losses average over targets.
    """

    def __init__(self, rows: int, like: Profile, before: RowTracer | None = None) -> None:
        self.rows, self.like, self.before = rows, like, before
        self.kinds = WeakTensorKeys()
        self.tape: list[tuple[str, dict[str, Any]]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.calls: list[str] = []
        self.fixed: list[Place] = []
        self.averaging = 0
        self.function: Any = None
        self._spoiled: set[int] = set()
        self._made: list[Tensor] = []

    # ---- what is known
    def kind(self, tensor: Tensor) -> Provenance | None:
        """That of a value; None of one that depends on no row."""
        if self._spoiled and tensor.untyped_storage().data_ptr() in self._spoiled:
            return UNKNOWN
        found: Provenance | None = self.kinds.get(tensor)
        return found

    def seed(self, tensor: Tensor, dim: int | None, live: bool) -> None:
        """A value that comes from outside: its rows lie along `dim`; None: they meet in it."""
        if dim is None:
            self.kinds[tensor] = UNKNOWN
            return
        size = tensor.shape[dim]
        rows = torch.arange(self.rows, dtype=torch.int32).repeat_interleave(size // self.rows)
        shape = [size if d == dim else 1 for d in range(tensor.dim())]
        self.kinds[tensor] = Provenance(rows.view(shape).expand(tensor.shape), live=live)

    def returned(self, tensor: Tensor, label: Label) -> None:
        """A value that a unit has returned."""
        dims = differing_dims(tensor, self.like.leaf(label))
        if dims or label[:2] in self.like.of_batch:
            self.seed(tensor, dims[0] if len(dims) == 1 else None, live=True)

    # ---- below autograd
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and find out what is known of its results."""
        inputs = tensors_of((args, kwargs))
        known = {id(t): kind for t in inputs if (kind := self.kind(t)) is not None}
        if not known:
            return func(*args, **kwargs)
        live = any(kind.live for kind in known.values())
        schema = func._schema
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if written:
            return self._in_place(func, args, kwargs, known, live, written)
        out = _shape_only(func, args, kwargs, inputs) if live else func(*args, **kwargs)
        for tensor, kind in zip(tensors_of(out), self._kinds(func, args, kwargs, known, out), strict=True):
            if not any(tensor is t for t in inputs):
                self.kinds[tensor] = kind
        return out

    def _in_place(
        self, func: Any, args: Any, kwargs: Any, known: dict[int, Provenance], live: bool, written: list[str]
    ) -> Any:
        given = _named(func, args, kwargs)
        if written != ["self"] or not isinstance(given["self"], Tensor):
            for target in tensors_of([given[name] for name in written]):
                self._spoiled.add(target.untyped_storage().data_ptr())
            if live:
                raise BatchSizeDependent(f"results are written to memory that is given ({op_name(func)})")
            return func(*args, **kwargs)
        target = given["self"]
        if target.dim() == 0 and id(target) in known and known[id(target)].power is not None:
            kinds = self._kinds(func, args, kwargs, known, target)
            self.kinds[target] = kinds[0]
        else:
            self._spoiled.add(target.untyped_storage().data_ptr())
        # what has no memory of its own cannot be written to
        return target if live else func(*args, **kwargs)

    def _kinds(
        self, func: Any, args: Any, kwargs: Any, known: dict[int, Provenance], out: Any
    ) -> list[Provenance]:
        place, outs = len(self.tape), tensors_of(out)
        if (
            op_name(func) == "clone"
        ):  # of memory in one order there is none: a single row may have one where several have not
            return [known[id(one)] for one in tensors_of((args, kwargs))]
        found = self._by_rule(func, args, kwargs, known, out)
        self.sizes.append(tuple(one.numel() for one in outs))
        if self.before is None:
            return found
        before, rows = self.before.sizes[place], self.before.rows
        if len(before) != len(outs):
            return [UNKNOWN] * len(outs)
        # as many elements of each row, and of a number, whatever the number of rows
        grow = [
            old * (1 if kind.rows is None else self.rows) for old, kind in zip(before, found, strict=True)
        ]
        have = [
            one.numel() * (1 if kind.rows is None else rows) for one, kind in zip(outs, found, strict=True)
        ]
        return [kind if a == b else UNKNOWN for kind, a, b in zip(found, grow, have, strict=True)]

    def _by_rule(
        self, func: Any, args: Any, kwargs: Any, known: dict[int, Provenance], out: Any
    ) -> list[Provenance]:
        outs, name = tensors_of(out), op_name(func)
        if name.endswith("_"):
            name = name[:-1]
        arguments = _named(func, args, kwargs)
        here = self._note(name, {k: _unknown(v, known) for k, v in arguments.items()})
        if not outs:
            raise ReadsValues(f"a value is read ({name.strip('_')})")  # what is done with it is not seen
        if torch.Tag.dynamic_output_shape in func.tags and (name != "index" or _masks(arguments["indices"])):
            raise ReadsValues(f"values decide a shape ({name})")
        if any(kind.rows is None and kind.power is None for kind in known.values()):
            return [UNKNOWN] * len(outs)
        if only_moves_elements(name) and all(kind.rows is not None for kind in known.values()):
            rows = moved_rows(
                func, args, kwargs, lambda t: known[id(t)].rows if id(t) in known else None, out
            )
            if _takes_rows_apart(name, arguments, known, out) or any(
                self._scale(here, arg, arguments) != 0 for arg in arguments if arg not in _SHAPES
            ):
                return [UNKNOWN] * len(outs)
            live = any(kind.live for kind in known.values())
            fixed = any(kind.fixed for kind in known.values())
            return [Provenance(one, live=live, fixed=fixed) for one in rows]
        kinds: dict[str, Provenance] = {}
        for arg, value in arguments.items():
            for place, tensor in enumerate(tensors_of(value)):
                if id(tensor) in known:
                    kinds[arg if isinstance(value, Tensor) else f"{arg}.{place}"] = known[id(tensor)]
        given = Operation(name, arguments, kinds, outs[0], lambda arg: self._scale(here, arg, arguments))
        found = result_provenance(given, torch.Tag.pointwise in func.tags)
        if draws(func, args, kwargs) and found.rows is not None:
            found = Provenance(found.rows)  # of the rows of the batch, and not known from inputs
        elif draws(func, args, kwargs):
            found = UNKNOWN
        if (
            found.power is not None
            and not found.live
            and any(kind.rows is not None for kind in kinds.values())
        ):
            found = self._asked(outs[0], kinds)
        if name.startswith("nll_loss") and found.power == 0:
            found = UNKNOWN  # by a function that is not known to average over targets
        return [
            found if one.shape == outs[0].shape and not (i and name.startswith("nll")) else UNKNOWN
            for i, one in enumerate(outs)
        ]

    def _asked(self, out: Tensor, kinds: dict[str, Provenance]) -> Provenance:
        """A number that inputs alone decide: known for the whole batch where a function is asked for it that says how."""
        if self.function not in SUMS or any(kind.fixed for kind in kinds.values()):
            return UNKNOWN
        self._made.append(out)
        return FIXED

    # ---- constants
    def _note(self, name: str, arguments: dict[str, Any]) -> int:
        place = len(self.tape)
        name = "view" if name == "_unsafe_view" else name  # of what has been cloned
        self.tape.append((name, {arg: sketch(value) for arg, value in arguments.items()}))
        if self.before is not None and (place >= len(self.before.tape) or self.before.tape[place][0] != name):
            raise BatchSizeDependent(f"with other numbers of rows it does something else: {name}")
        return place

    def _scale(self, place: int, arg: str, arguments: dict[str, Any]) -> int | None:
        if self.before is None:
            return 0
        known = [self.kind(t) is not None for t in tensors_of(arguments.get(arg))]
        if all(known) and known:
            return 0
        before, after = self.before.tape[place][1].get(arg), self.tape[place][1].get(arg)
        # beside constants in a list, each of which is to be the same
        if not any(known) and isinstance(before, float) and isinstance(after, float):
            return growth_power(before, after, self.before.rows, self.rows)
        return 0 if before == after else None

    # ---- functions
    def call(self, func: Any, args: Any, kwargs: dict[str, Any], place: Place | None) -> Any:
        """Run a function of torch that code between units calls; `place`: of a sum or mean."""
        self.calls.append(getattr(func, "__name__", str(func)))
        averaging = mean_over_targets(func, args, kwargs)
        if averaging is not None:
            scores: Tensor = averaging["input"]
            self.averaging += 1
            zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
            self.kinds[zero] = self._averaged(averaging)
            return zero
        if func in _READS and any(self.kind(t) is not None for t in tensors_of((args, kwargs))):
            raise ReadsValues(f"values are read ({func.__name__})")
        self.function, self._made = func, []
        try:
            result = func(*args, **kwargs)
        finally:
            self.function = None
        if self._made and place is not None:
            if len(self._made) == 1 and self._made[0] is result:
                self.fixed.append(place)
            else:
                for tensor in tensors_of(result):
                    self.kinds[tensor] = UNKNOWN
        return result

    def _averaged(self, given: dict[str, Any]) -> Provenance:
        """A mean over targets that count, whose number is known for the whole batch where inputs alone decide it."""
        scores, target, weight = given["input"], given["target"], given.get("weight")
        of_scores, of_target = self.kind(scores), self.kind(target)
        if weight is not None and self.kind(weight) is not None:
            return UNKNOWN
        found = []
        if of_target is None or of_target.rows is None or of_target.live or of_target.fixed:
            return UNKNOWN  # constant ones may be numbers of rows: not the same ones in every microbatch
        found.append(of_target.rows)
        if of_scores is not None:
            classes = min(1, scores.dim() - 1)
            rows = None if of_scores.rows is None else rows_without(of_scores.rows, [classes])
            if rows is None:
                return UNKNOWN
            found.append(rows.squeeze(classes).expand(target.shape))
        return UNKNOWN if combine_rows(found, target.shape) is None else Provenance(power=0)


class TracedFunctions(GlueMode):
    """Inside, functions that code between units calls go through a watch."""

    def __init__(self, watch: RowTracer) -> None:
        super().__init__()
        self.watch = watch

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See Glue."""
        return self.watch.call(func, args, kwargs, self.place(func, sys._getframe(2)))


def _shape_only(func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor]) -> Any:
    """Results as zeros without memory: numbers that units would have made are not known here."""
    device = next(t.device for t in inputs)
    if any(a.alias_info is not None for a in func._schema.arguments):
        return func(*args, **kwargs)  # a view
    try:
        a, k = map_leaves(lambda _, t: t.to("meta"), (args, kwargs))
        if k.get("device") is not None:
            k = {**k, "device": torch.device("meta")}
        made = func(*a, **k)
    except Exception:  # no meta kernel, or shapes that depend on values: with numbers, then
        return func(*args, **kwargs)
    return map_leaves(lambda _, t: expanded_zeros(t, device), made)


def _named(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    found = {a.name: a.default_value for a in func._schema.arguments}
    found.update(zip(found, args, strict=False))
    found.update(kwargs)
    return found


def _unknown(value: Any, known: dict[int, Provenance]) -> Any:
    """What of an argument depends on no row; None in the place of what does."""
    if isinstance(value, Tensor):
        return None if id(value) in known else value
    return [_unknown(one, known) for one in value] if isinstance(value, (list, tuple)) else value


def _masks(indices: Sequence[Any]) -> bool:
    return any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in indices)


def sketch(value: Any) -> Any:
    """What is compared between two runs: numbers as such; tensors by shape and values, one value all over by that alone."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, Tensor):
        shape = tuple(value.shape)
        if (
            value.is_meta
            or not value.numel()
            or value.is_complex()
            or (isinstance(value, nn.Parameter) and shape)
        ):
            return shape
        small = compact(value.detach())
        if small.dtype == torch.bool:
            small = small.to(torch.uint8)
        low, high = small.aminmax()
        if bool(low == high):
            return float(low)
        return shape, float(low), float(high), float(small.sum(dtype=torch.float64))
    if isinstance(value, (list, tuple)):
        return tuple(sketch(one) for one in value)
    return str(value)


def _takes_rows_apart(name: str, arguments: dict[str, Any], known: dict[int, Provenance], out: Any) -> bool:
    """Whether an operation takes some along the dim where rows lie: how many there are may then matter."""
    if name not in (
        "slice",
        "select",
        "narrow",
        "split",
        "split_with_sizes",
        "unbind",
        "chunk",
        "index_select",
    ):
        return False
    tensor: Tensor = arguments["self"]
    rows = known[id(tensor)].rows if id(tensor) in known else None
    if rows is None:
        return True
    if name == "slice" and out.shape == tensor.shape and arguments.get("end") in (None, sys.maxsize):
        return False
    return several_rows_along(rows, arguments["dim"] % tensor.dim())
