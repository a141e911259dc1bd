"""Follows which results of units a value depends on, through the operations between units."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.trace.one_device import OF_A_GROUP, collective_of
from meshwright_pipeline import _torch
from meshwright_pipeline._torch import TorchDispatchMode, WeakTensorKeys
from meshwright_pipeline.hook_code import in_forward_hook
from meshwright_pipeline.pytrees import is_expanded, tensors_of, tensors_within
from meshwright_pipeline.trace.profile import BETWEEN, NO_LABELS, PARAMETERS, Key, Label
from meshwright_pipeline.trace.rng_replay import DrawLog, check_generator
from meshwright_pipeline.trace.rows.tracer import RowTracer
from meshwright_pipeline.trace.side_outputs import CannotBeCut
from meshwright_pipeline.trace.state.carried_tensors import CarriedTensors, LeftTensor
from meshwright_pipeline.trace.state.known_memory import KnownMemory, written_tensors

BATCH: Label = ("", PARAMETERS - 1, "", 0)
"""The label of the rows of the batch."""

_READS_PARAMETERS = (
    "code outside of module {!r} turns its parameters into numbers, truth values, lists or arrays. In a pipeline other stages do "
    "not have their values: do it in that module, keep the result a tensor (torch.where), add it to pipeline.shared, or plan "
    "without pp"
)

_HIDDEN = (
    "module {!r} leaves a tensor where no other stage has it (a global list, an object or a list that modules share, a class), and "
    "{} reads it there. Return it, keep it in an attribute of the module, or plan without pp"
)

_SHAPE_ONLY = frozenset(
    "empty_like zeros_like ones_like full_like new_zeros new_ones new_empty new_full rand_like randn_like "
    "is_same_size is_set_to".split()
)
"""Operations that use only the shape of their input."""


class LabelMode(TorchDispatchMode):
    """Propagates labels through operations between units. Operations inside units are not followed."""

    def __init__(
        self,
        tracer: RowTracer | None,
        meta: bool = True,
        chance: float | None = None,
        left: Iterable[LeftTensor] = (),
    ) -> None:
        """`meta`: code between units may use meta tensors. `chance`: the number that it gets where it draws one. `left`: by the
        forward before."""
        super().__init__()
        self.memory, self.carried = KnownMemory(), CarriedTensors(left)
        self.tracer, self.meta, self.chance = tracer, meta, chance
        self.labels = WeakTensorKeys()
        self.key = BETWEEN
        self.draws = DrawLog()
        self.written: set[Label] = set()
        # of what code between units has turned into numbers; all that follows may depend on them
        self.numbers = NO_LABELS
        self._depth = 0
        # tensors that a unit has computed -> the unit; those of code between units are others, with labels
        self._computed = WeakTensorKeys()
        # of the unit that runs
        self._parameters = WeakTensorKeys()
        # the tensors are kept, so that no other tensor gets their memory
        self._returned: dict[int, tuple[Tensor, Label]] = {}
        # what was written to a view is in its base, and in all other views
        self._written: dict[int, tuple[Tensor, frozenset[Label]]] = {}

    @contextlib.contextmanager
    def unit(self, key: Key, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Inside, the operations belong to this unit call. `parameters`: of the unit."""
        self._depth, self.key = self._depth + 1, key
        self._parameters = WeakTensorKeys()
        for parameter in parameters:
            self._parameters[parameter] = True
        try:
            yield
        finally:
            self._depth, self.key = self._depth - 1, BETWEEN

    def returned(self, tensor: Tensor, label: Label) -> None:
        """Label a tensor that a unit has returned."""
        self.labels[tensor] = frozenset({label})
        self._returned[tensor.untyped_storage().data_ptr()] = (tensor, label)

    def of(self, tree: Any) -> frozenset[Label]:
        """The labels of all tensors in a tree."""
        return NO_LABELS.union(*(self._of_one(tensor) for tensor in tensors_of(tree)))

    def _of_one(self, tensor: Tensor) -> frozenset[Label]:
        labels = self.labels.get(tensor, NO_LABELS)
        at = _memory_of(tensor) if self._written else None
        return labels if at is None else labels | self._written.get(at, (tensor, NO_LABELS))[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if call := collective_of(func, args):
            raise UnsupportedError(OF_A_GROUP.format(f"module {self.key[0] or 'the model'!r}", call))
        operands = tensors_of((args, kwargs))
        self._check_given(operands)
        self.carried.note(func, args, kwargs, operands)
        if func._schema.is_mutable and not self._depth:
            self.memory.check("code of the model between its modules", written_tensors(func, args, kwargs))
        if not (self.meta or self._depth) and any(tensor.is_meta for tensor in operands):
            raise RuntimeError("parameters of units are read between units")
        random = _torch.draws(func, args, kwargs)
        if random:
            check_generator(self.key, func, kwargs)
        if self.tracer is None or self._depth:
            result = self._execute(func, args, kwargs)
        else:
            result = self.tracer.run(func, args, kwargs)
        self.memory.made(func, args, kwargs, result)
        if random:
            self.draws.note(self.key, func, args, kwargs, result)
            if self.chance is not None and not self._depth and result.numel() == 1:
                result.fill_(self.chance)
        if self._depth:
            self._note_computed(func, args, kwargs, result)
        else:
            self._label(func, args, kwargs, result)
        return result

    def _note_computed(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the tensors that a unit computes from its arguments and parameters; others (a mask), every stage may make too."""
        if not func._schema.is_mutable and any(
            tensor in self._computed or tensor in self.labels or tensor in self._parameters
            for tensor in tensors_of((args, kwargs))
        ):
            for tensor in tensors_of(result):
                self._computed[tensor] = self.key[0]

    def _check_given(self, operands: Iterable[Tensor]) -> None:
        """Raise CannotBeCut if a tensor was computed inside of another unit, and has not been handed out by it."""
        for tensor in operands:
            unit = self._computed.get(tensor, self.key[0])
            if unit != self.key[0]:
                reader = f"module {self.key[0]!r}" if self._depth else "code outside of it"
                raise CannotBeCut(_HIDDEN.format(unit, reader))

    def hand_out(self, tree: Any) -> None:
        """Others may use the tensors within: each stage has its part of a cache."""
        # a cache holds those of all layers before
        if len(self._computed):
            for tensor in tensors_within(tree):
                self._computed.pop(tensor, None)

    def _label(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Label the result of an operation between units."""
        labels = self.of((args, kwargs))
        if func._schema.is_mutable:
            self._write(func, args, kwargs, labels)
        if labels and _torch.op_name(func) not in _SHAPE_ONLY:
            for tensor in tensors_of(result):
                self.labels[tensor] = self.labels.get(tensor, NO_LABELS) | labels
            if type(result) in (bool, int, float, complex):
                self.read((args, kwargs))

    def read(self, tree: Any) -> None:
        """Note that code between units reads values of tensors. Raises CannotBeCut: those of parameters of units."""
        self.carried.read(tensors_of(tree))
        labels = NO_LABELS if self._depth else self.of(tree)
        unit = min((label[0] for label in labels if label[1] == PARAMETERS), default=None)
        if unit is not None:
            raise CannotBeCut(_READS_PARAMETERS.format(unit))
        # what a hook watches does not change the values that follow; one that changes them by it sees its own stage
        if labels and not in_forward_hook():
            self.numbers |= labels

    def _write(self, func: Any, args: Any, kwargs: Any, labels: frozenset[Label]) -> None:
        """Note which memory an operation has written to, and label what shares it."""
        for tensor in written_tensors(func, args, kwargs):
            at = _memory_of(tensor)
            if at is not None:
                before = self._written.get(at, (tensor, NO_LABELS))[1]
                self._written[at] = tensor, before | labels

    def wrote_to(self, tensor: Tensor) -> bool:
        """Whether an operation between units has written to the memory of a tensor, maybe through `.data`."""
        return _memory_of(tensor) in self._written

    def _execute(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation. A write to expanded zeros is recorded and skipped."""
        written = [] if self._depth else _torch.written_arguments(func)
        target = _torch.named_arguments(func, args, kwargs)[written[0]] if len(written) == 1 else None
        if not isinstance(target, Tensor) or target.is_meta:
            return func(*args, **kwargs)
        if (returned := self._returned.get(target.untyped_storage().data_ptr())) is not None:
            self.written.add(returned[1])
        return target if is_expanded(target) else func(*args, **kwargs)


def _memory_of(tensor: Tensor) -> int | None:
    """The address of a tensor's storage; None if it has no memory."""
    # a tracer that counts the functions of a model does not see these
    with _torch.without_functions():
        if tensor.is_meta or tensor.layout is not torch.strided:
            return None
        return tensor.untyped_storage().data_ptr() or None


class ValueReads(TorchFunctionMode):
    """Calls `read` with each tensor that code turns into lists or arrays, which no operation below autograd tells."""

    def __init__(self, read: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.read = read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self.read(args[0])
        return func(*args, **(kwargs or {}))
