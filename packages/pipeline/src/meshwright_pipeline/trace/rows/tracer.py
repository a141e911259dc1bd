"""Traces the code between units on a few rows, and applies the rules of `provenance` to every operation.

The code is traced twice: on the rows of a microbatch and on those of the batch. Comparing the two shows which values are
constants and which depend on the number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.devices import HOST
from meshwright_pipeline._torch import WeakTensorKeys, draws, named_arguments, op_name, written_arguments
from meshwright_pipeline.pytrees import differing_dims, expanded_zeros, map_leaves, tensors_of
from meshwright_pipeline.trace.loss_denominators import SUMS, GlueMode, Place, mean_over_targets
from meshwright_pipeline.trace.profile import Label, Profile
from meshwright_pipeline.trace.rows import provenance
from meshwright_pipeline.trace.rows.provenance import FIXED, UNKNOWN, Operation, Provenance

Tensor = torch.Tensor
Inputs = dict[int, Provenance]
"""Id of a tensor that an operation takes -> its provenance."""

_SHAPES = frozenset("self size shape repeats".split())
"""Arguments of operations that move elements which may grow with the number of rows."""
_TAKES_PART = frozenset("slice select narrow split split_with_sizes unbind chunk index_select".split())
_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class BatchSizeDependent(Exception):
    """The model behaves differently for another number of rows."""


class ReadsValues(BatchSizeDependent):
    """Python code, or a shape, depends on values that are not available in a profiled run."""


class RowTracer(GlueMode):
    """Traces one run: operations go through `run`, and, inside of it, the torch functions of code between units too.

    Args:
        rows: number of rows of the batch.
        like: a profile with another number of rows. Dims that differ from it are row dims.
        before: a trace with another number of rows.

    Attributes:
        calls: the torch functions that code between units calls, in order.
        fixed: the calls of sums and means whose value only inputs determine.
        averaging: number of losses that average over targets.
    """

    def __init__(self, rows: int, like: Profile, before: RowTracer | None = None) -> None:
        super().__init__()
        self.rows, self.like, self.before = rows, like, before
        self.known = WeakTensorKeys()
        self.tape: list[tuple[str, dict[str, Any]]] = []
        self.sizes: list[tuple[int, ...]] = []
        self.calls: list[str] = []
        self.fixed: list[Place] = []
        self.averaging = 0
        self.function: Any = None
        # the tensors are kept, so that no other tensor gets their memory
        self._overwritten: dict[int, Tensor] = {}
        self._fixed_results: list[Tensor] = []

    # ---- provenance of values
    def provenance(self, tensor: Tensor) -> Provenance | None:
        """The provenance of a value; None if it depends on no row."""
        if self._overwritten and tensor.untyped_storage().data_ptr() in self._overwritten:
            return UNKNOWN
        value: Provenance | None = self.known.get(tensor)
        return value

    def seed(self, tensor: Tensor, dim: int | None, live: bool) -> None:
        """Set the provenance of an input or unit result: its rows are along `dim`. None: rows interact in it."""
        if dim is None:
            self.known[tensor] = UNKNOWN
            return
        size = tensor.shape[dim]
        rows = torch.arange(self.rows, dtype=torch.int32, device=HOST).repeat_interleave(size // self.rows)
        shape = [size if d == dim else 1 for d in range(tensor.dim())]
        self.known[tensor] = Provenance(rows.view(shape).expand(tensor.shape), live=live)

    def returned(self, tensor: Tensor, label: Label) -> None:
        """Set the provenance of a tensor that a unit has returned."""
        dims = differing_dims(tensor, self.like.leaf(label))
        if dims or label[:2] in self.like.of_batch:
            self.seed(tensor, dims[0] if len(dims) == 1 else None, live=True)

    # ---- operations, below autograd
    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation, and derive the provenance of its results."""
        operands = tensors_of((args, kwargs))
        inputs = {id(t): value for t in operands if (value := self.provenance(t)) is not None}
        if not inputs:
            return func(*args, **kwargs)
        if written := written_arguments(func):
            return self._in_place(func, args, kwargs, inputs, written)
        live = any(value.live for value in inputs.values())
        out = _shape_only(func, args, kwargs, operands) if live else func(*args, **kwargs)
        results = self._results(func, args, kwargs, inputs, out)
        for tensor, value in zip(tensors_of(out), results, strict=True):
            if not any(tensor is t for t in operands):
                self.known[tensor] = value
        return out

    def _in_place(self, func: Any, args: Any, kwargs: Any, inputs: Inputs, written: list[str]) -> Any:
        arguments, live = named_arguments(func, args, kwargs), any(value.live for value in inputs.values())
        target = arguments["self"] if written == ["self"] else None
        if not isinstance(target, Tensor):
            for tensor in tensors_of([arguments[name] for name in written]):
                self._overwritten[tensor.untyped_storage().data_ptr()] = tensor
            if live:
                text = f"an operation writes its results to an out= tensor ({op_name(func)})"
                raise BatchSizeDependent(text)
            return func(*args, **kwargs)
        if target.dim() == 0 and id(target) in inputs and inputs[id(target)].power is not None:
            self.known[target] = self._results(func, args, kwargs, inputs, target)[0]
        else:
            self._overwritten[target.untyped_storage().data_ptr()] = target
        # expanded zeros cannot be written to
        return target if live else func(*args, **kwargs)

    def _results(self, func: Any, args: Any, kwargs: Any, inputs: Inputs, out: Any) -> list[Provenance]:
        index, outs = len(self.tape), tensors_of(out)
        # clone() keeps the memory format, and one row alone may be contiguous when the batch is not: no tape entry
        if op_name(func) == "clone":
            return [inputs[id(tensor)] for tensor in tensors_of((args, kwargs))]
        results = self._by_rule(func, args, kwargs, inputs, out)
        self.sizes.append(tuple(tensor.numel() for tensor in outs))
        if self.before is None:
            return results
        sizes_before = self.before.sizes[index]
        if len(sizes_before) != len(outs):
            return [UNKNOWN] * len(outs)

        # there must be as many elements of each row, or of a number, in both traces
        few, many = self.before.rows, self.rows
        return [
            value if (before == now if value.rows is None else before * many == now * few) else UNKNOWN
            for value, before, now in zip(results, sizes_before, self.sizes[-1], strict=True)
        ]

    def _by_rule(self, func: Any, args: Any, kwargs: Any, inputs: Inputs, out: Any) -> list[Provenance]:
        outs, name = tensors_of(out), op_name(func).removesuffix("_")
        arguments = named_arguments(func, args, kwargs)
        index = self._record(name, {arg: _constants(value, inputs) for arg, value in arguments.items()})
        if not outs:
            raise ReadsValues(f"a value is read ({name.strip('_')})")
        masks = [t for t in tensors_of(arguments.get("indices")) if t.dtype in (torch.bool, torch.uint8)]
        if torch.Tag.dynamic_output_shape in func.tags and (name != "index" or masks):
            raise ReadsValues(f"values decide a shape ({name})")
        if not all(value.known for value in inputs.values()):
            return [UNKNOWN] * len(outs)
        if name in provenance.MOVES and all(value.rows is not None for value in inputs.values()):
            return self._moved(func, args, kwargs, inputs, out, index)
        named: dict[str, Provenance] = {}
        for arg, argument in arguments.items():
            for place, tensor in enumerate(tensors_of(argument)):
                if id(tensor) in inputs:
                    named[arg if isinstance(argument, Tensor) else f"{arg}.{place}"] = inputs[id(tensor)]
        op = Operation(name, arguments, named, outs[0], lambda arg: self._scale(index, arg, arguments))
        result = self._computed(op, torch.Tag.pointwise in func.tags, draws(func, args, kwargs))
        first_only = name.startswith("nll")
        return [
            result if tensor.shape == outs[0].shape and not (place and first_only) else UNKNOWN
            for place, tensor in enumerate(outs)
        ]

    def _moved(
        self, func: Any, args: Any, kwargs: Any, inputs: Inputs, out: Any, at: int
    ) -> list[Provenance]:
        """The results of an operation that only moves elements of rows; `at`: its index on the tape."""
        arguments, name = named_arguments(func, args, kwargs), op_name(func).removesuffix("_")

        def rows_of(tensor: Tensor) -> Tensor | None:
            return inputs[id(tensor)].rows if id(tensor) in inputs else None

        results = provenance.moved_rows(func, args, kwargs, rows_of, out)
        source = rows_of(arguments["self"]) if name in _TAKES_PART else None
        takes_rows = name in _TAKES_PART and _takes_some_rows(name, arguments, source, out)
        constants = [arg for arg in arguments if arg not in _SHAPES]
        if takes_rows or any(self._scale(at, arg, arguments) != 0 for arg in constants):
            return [UNKNOWN] * len(results)
        live = any(value.live for value in inputs.values())
        fixed = any(value.fixed for value in inputs.values())
        return [Provenance(rows, live=live, fixed=fixed) for rows in results]

    def _computed(self, op: Operation, pointwise: bool, random: bool) -> Provenance:
        """The first result of an operation that computes."""
        result = provenance.result_provenance(op, pointwise)
        if random:
            # random numbers have the rows of their shape, and inputs do not determine them
            result = UNKNOWN if result.rows is None else Provenance(result.rows)
        if result.power is not None and not result.live and op.row_inputs:
            # only inputs determine the number: known for the whole batch if torch.sum or torch.mean computes it
            if self.function not in SUMS or any(value.fixed for value in op.inputs.values()):
                return UNKNOWN
            self._fixed_results.append(op.out)
            result = FIXED
        # cross_entropy and nll_loss are handled in `call`; others are not known to average over targets
        return UNKNOWN if op.name.startswith("nll_loss") and result.power == 0 else result

    # ---- constants
    def _record(self, name: str, arguments: dict[str, Any]) -> int:
        """Append an operation to the tape; its index there."""
        index = len(self.tape)
        # of a tensor that has been cloned
        name = "view" if name == "_unsafe_view" else name
        self.tape.append((name, {arg: sketch(value) for arg, value in arguments.items()}))
        if self.before is not None and (index >= len(self.before.tape) or self.before.tape[index][0] != name):
            raise BatchSizeDependent(f"with another number of rows the model does something else: {name}")
        return index

    def _scale(self, index: int, arg: str, arguments: dict[str, Any]) -> int | None:
        """See Operation.scale."""
        if self.before is None:
            return 0
        depends = [self.provenance(t) is not None for t in tensors_of(arguments.get(arg))]
        if all(depends) and depends:
            return 0
        before, after = self.before.tape[index][1].get(arg), self.tape[index][1].get(arg)
        # a list with tensors that depend on rows: its constants must be equal
        if not any(depends) and isinstance(before, float) and isinstance(after, float):
            return provenance.growth_power(before, after, self.before.rows, self.rows)
        return 0 if before == after else None

    # ---- torch functions, above autograd
    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        place = self.place(func, sys._getframe(2))
        self.calls.append(getattr(func, "__name__", str(func)))
        averaging = mean_over_targets(func, args, kwargs)
        if averaging is not None:
            scores: Tensor = averaging["input"]
            self.averaging += 1
            zero = torch.zeros((), dtype=scores.dtype, device=scores.device)
            self.known[zero] = self._averaged(averaging)
            return zero
        if func in _READS and any(self.provenance(t) is not None for t in tensors_of((args, kwargs))):
            raise ReadsValues(f"values are read ({func.__name__})")
        self.function, self._fixed_results = func, []
        try:
            result = func(*args, **kwargs)
        finally:
            self.function = None
        if self._fixed_results and place is not None:
            if len(self._fixed_results) == 1 and self._fixed_results[0] is result:
                self.fixed.append(place)
            else:
                for tensor in tensors_of(result):
                    self.known[tensor] = UNKNOWN
        return result

    def _averaged(self, arguments: dict[str, Any]) -> Provenance:
        """A mean over targets. Its denominator is known for the whole batch if only inputs determine the targets."""
        scores, target, weight = arguments["input"], arguments["target"], arguments.get("weight")
        of_scores, of_target = self.provenance(scores), self.provenance(target)
        if weight is not None and self.provenance(weight) is not None:
            return UNKNOWN
        # constant targets may contain row indices, and these differ between microbatches
        if of_target is None or of_target.rows is None or of_target.live or of_target.fixed:
            return UNKNOWN
        operands = [of_target.rows]
        if of_scores is not None:
            classes = min(1, scores.dim() - 1)
            rows = of_scores.rows
            rows = None if rows is None else provenance.rows_without(rows, [classes])
            if rows is None:
                return UNKNOWN
            operands.append(rows.squeeze(classes).expand(target.shape))
        interact = provenance.combine_rows(operands, target.shape) is None
        return UNKNOWN if interact else Provenance(power=0)


def _shape_only(func: Any, args: Any, kwargs: Any, operands: Sequence[Tensor]) -> Any:
    """Results as zeros without memory: values that units would compute are not available."""
    device = next(t.device for t in operands)
    if any(a.alias_info is not None for a in func._schema.arguments):
        # a view
        return func(*args, **kwargs)
    try:
        meta_args, meta_kwargs = map_leaves(lambda _, t: t.to("meta"), (args, kwargs))
        if meta_kwargs.get("device") is not None:
            meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
        out = func(*meta_args, **meta_kwargs)
    except Exception:
        # no meta kernel, or a shape that depends on values
        return func(*args, **kwargs)
    return map_leaves(lambda _, t: expanded_zeros(t, device), out)


def _constants(value: Any, inputs: Inputs) -> Any:
    """An argument, with None in place of tensors that depend on rows."""
    if isinstance(value, Tensor):
        return None if id(value) in inputs else value
    return [_constants(item, inputs) for item in value] if isinstance(value, (list, tuple)) else value


def sketch(value: Any) -> Any:
    """A summary to compare between two traces: numbers as they are, tensors by shape and statistics of their values."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Tensor):
        return tuple(map(sketch, value)) if isinstance(value, (list, tuple)) else str(value)
    shape = tuple(value.shape)
    no_values = value.is_meta or not value.numel() or value.is_complex()
    if no_values or (isinstance(value, nn.Parameter) and shape):
        return shape
    small = provenance.compact(value.detach())
    if small.dtype == torch.bool:
        small = small.to(torch.uint8)
    low, high = small.aminmax()
    if bool(low == high):
        return float(low)
    return shape, float(low), float(high), float(small.sum(dtype=torch.float64))


def _takes_some_rows(name: str, arguments: dict[str, Any], rows: Tensor | None, out: Any) -> bool:
    """Whether an operation takes some elements along a row dim: the number of rows may then matter."""
    tensor: Tensor = arguments["self"]
    if rows is None:
        return True
    if name == "slice" and out.shape == tensor.shape and arguments.get("end") in (None, sys.maxsize):
        return False
    return provenance.several_rows_along(rows, arguments["dim"] % tensor.dim())
