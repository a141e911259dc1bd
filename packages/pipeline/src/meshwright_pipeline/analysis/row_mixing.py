"""Whether a model makes of a row what it makes of it alone: what does not is not cut into microbatches.

It is tried, with numbers, on a few rows of a batch: once on all of them, and once on each half, as microbatches would be. The
code between units is run with numbers at random in the place of what units return, row by row the same in both; then every
unit, of copies one, on what it was given there. Where a row differs between the two, rows are mixed. Weights are numbers at
random too, so that models need no memory for this. What a forward writes (a buffer, a counter) it would write once for each
microbatch: that shows between a first and a second run. What cannot be run so is not known, and taken to be made row by row.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
import warnings
import zlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_pipeline._torch import forget_hooks, pytree, tensors_in
from meshwright_pipeline.analysis.half_batches import half_of, row_difference, written_from_rows
from meshwright_pipeline.analysis.loss_preview import (
    LONGEST,
    ROWS,
    TOKENS,
    shrink_batch,
    skeleton_with_values,
)
from meshwright_pipeline.analysis.module_state import LARGE, State, changed_places, module_state
from meshwright_pipeline.analysis.stub_weights import StubMode, stub_tensor
from meshwright_pipeline.partition.repeated_units import RepeatedUnitProfiler
from meshwright_pipeline.pytrees import map_leaves, tensors_of
from meshwright_pipeline.trace.forward_hooks import Forward
from meshwright_pipeline.trace.meta_model import meta_tensors
from meshwright_pipeline.trace.microbatch import Call, microbatches, signature
from meshwright_pipeline.trace.profile import Key, Label, Profile, Result
from meshwright_pipeline.trace.profiler import snapshot
from meshwright_pipeline.trace.rng_replay import DrawRecorder
from meshwright_pipeline.trace.state_writes import Place

Tensor = torch.Tensor

POOL = 65537
"""Numbers at random that results of units are taken from; no two rows begin at the same one."""

_BY_ROW = (nn.Linear, nn.Embedding)
_HALVED = (torch.float16, torch.bfloat16)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class CannotSplit:
    """What keeps a batch from being cut, and what would help."""

    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.why}; {self.fix}"


def find_row_mixing(
    model: nn.Module, units: tuple[str, ...], example: tuple[Sequence[Any], Mapping[str, Any]]
) -> CannotSplit | None:
    """What keeps a batch from being cut, as far as it is found; None where nothing is.

    Args:
        model: or a skeleton of it; it is left as it is.
        units: names of its units.
        example: positional and keyword arguments of a batch, with or without values.
    """
    call: Call = (tuple(example[0]), dict(example[1]))
    size = BatchSize.of((t.shape, t.is_floating_point()) for t in tensors_of(call))
    rows = min(ROWS, size.rows or 0) // 2 * 2
    if rows < 2:
        return None
    long = size.tokens or 0
    for tokens in dict.fromkeys([min(TOKENS, long), min(LONGEST, long)]):
        try:
            with _undisturbed():
                few = _told_apart(shrink_batch(call, size, rows, tokens), rows)
                trial = _Trial(model, units, few)
                found = trial.verdict()
                if (
                    found is None and trial.read
                ):  # every stage will hold those, and run them between the others
                    found = _Trial(model, tuple(u for u in units if u not in trial.read), few).verdict()
                return found
        except Exception:  # whatever a model does with so few tokens, or with numbers at random
            continue
    return None


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Inside, random numbers may be drawn, and nothing is recorded; generators are left as they were."""
    states = random.getstate()
    arrays: Any = sys.modules.get("numpy")
    theirs = None if arrays is None else arrays.random.get_state()
    try:
        with torch.random.fork_rng([]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(states)
        if arrays is not None:
            arrays.random.set_state(theirs)


def _told_apart(call: Call, rows: int) -> Call:
    """The same, in full precision; rows that are all alike are made different where they are fractions."""
    generator = torch.Generator().manual_seed(rows)

    def one(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not tensor.is_floating_point():
            return tensor
        tensor = tensor.float() if tensor.dtype in _HALVED else tensor
        if tensor.dim() and tensor.shape[0] == rows and bool((tensor == tensor[:1]).all()):
            return tensor + torch.rand(tensor.shape, generator=generator)
        return tensor

    found: Call = pytree.tree_map_only(Tensor, one, call)
    return found


class _Between(RepeatedUnitProfiler):
    """Runs the code between units with numbers at random in the place of what units return, and takes down what they are given.

    Attributes:
        given: (what copies that are called alike have in common, arguments) of each call, in order.
        half: which half of the rows runs; None for all, which have to run first.
    """

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        super().__init__(model, units)
        self.given: list[tuple[Hashable, Call]] = []
        self.half: int | None = None
        self._shapes: dict[Label, torch.Size] = {}
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(2))

    def shape(
        self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawRecorder
    ) -> Result:
        """See Profiler."""
        called, own = signature(call), _own(call)  # before the run changes what it is given
        result = super().shape(unit, forward, call, device, drawn)
        built = self._built[unit]
        self.given.append(((unit if built in self._apart else built, called), own))
        return result

    def value(self, label: Label, like: Tensor, device: torch.device) -> Tensor:
        """See Profiler."""
        if not (like.is_floating_point() or like.is_complex()):
            return torch.zeros(like.shape, dtype=like.dtype)
        if self.half is None:
            self._shapes[label] = like.shape
            return self._made(label, like.shape).to(like.dtype)
        own = half_of(self._made(label, self._shapes[label]), like.shape, self.half)
        if own is None:
            raise ValueError(f"{label[0]} returns another shape for fewer rows")
        return own.to(like.dtype, copy=True)

    def _made(self, label: Label, shape: torch.Size) -> Tensor:
        """The numbers of a label, made each time: those of every call together would be large."""
        own = self._pool.roll(zlib.crc32(repr(label).encode()) % POOL)
        return own.repeat(-(-shape.numel() // POOL))[: shape.numel()].view(shape)

    def _run(self, *args: Any) -> Profile:
        self.given.clear()
        return super()._run(*args)


class _Trial:
    """Runs a model on a few rows.

    Args:
        model, units: see `find_row_mixing`.
        call: the batch, of ordinary tensors on the CPU.

    Attributes:
        read: units whose parameters code between units computes with, once it has run.
    """

    def __init__(self, model: nn.Module, units: tuple[str, ...], call: Call) -> None:
        self.call, self.units = call, units
        made, self.large = _furnished(skeleton_with_values(model, units), units)
        self.clean = copy.deepcopy(
            made, {id(one): one for one in self.large}
        )  # runs may leave something in units
        self.between = _Between(made, units)
        self.tried: set[Hashable] = set()
        self.read: tuple[str, ...] = ()

    def verdict(self) -> CannotSplit | None:
        """What is found first."""
        before = self._kept()
        whole = self._run(self.call, None)
        self.read, given = whole.read, list(self.between.given)
        after = self._kept()
        if changed_places(before, after):
            self._run(self.call, None)
            again = changed_places(after, self._kept())
            if again:
                return _writes("", again[0])
        parts = []
        for half, part in enumerate(microbatches(*self.call, 2)):
            profile = self._run(part, half)
            if profile.order != whole.order:
                raise ValueError("other modules are called for fewer rows")
            parts.append(list(self.between.given))
            by_rows = written_from_rows(before, after, self._kept())
            if by_rows is not None:
                return _writes("", by_rows)
        taken = frozenset().union(*whole.consumes.values())
        for key, (like, entire), *others in zip(whole.order, given, *parts, strict=True):
            halves = [other[1] for other in others]
            alike = [row_difference(entire, part, half) for half, part in enumerate(halves)]
            if "rows" in alike:
                return CannotSplit(
                    f"the code before module {key[0]!r} makes something of several rows of the batch, and gives it that: "
                    "microbatches would change it",
                    "do it row by row, or behind the last module, or take one",
                )
            if alike != ["", ""]:
                like = key  # what it is given is not that of the rows alone
            found = None if like in self.tried else self._unit(key, entire, halves, taken)
            self.tried.add(like)
            if found is not None:
                return found
        return None

    def _run(self, call: Call, half: int | None) -> Profile:
        self.between.half = half
        with StubMode(self.large):
            return self.between.run(*_own(call))

    def _kept(self) -> State:
        """What the model keeps outside of units."""
        inside = tuple(f"{unit}." for unit in self.units)
        return module_state(
            (name, part)
            for name, part in self.between.model.named_modules()
            if name not in self.units and not name.startswith(inside)
        )

    # ---- a unit
    def _unit(
        self, key: Key, entire: Call, halves: Sequence[Call], taken: frozenset[Label]
    ) -> CannotSplit | None:
        """What is found of a call."""
        unit = self.clean.get_submodule(key[0])
        if type(unit) in _BY_ROW:
            return None
        try:
            filled, large = _filled(unit)
            rooms = [copy.deepcopy(filled, {id(one): one for one in large}) for _ in range(3)]
            with StubMode(large):
                return self._tried(key, rooms, entire, halves, taken)
        except Exception:  # whatever a unit does with numbers at random: of it nothing is known
            return None

    def _tried(
        self,
        key: Key,
        rooms: Sequence[nn.Module],
        entire: Call,
        halves: Sequence[Call],
        taken: frozenset[Label],
    ) -> CannotSplit | None:
        unit, (room, *others) = key[0], rooms
        before = module_state(room.named_modules())
        whole = _called(room, entire)
        after = module_state(room.named_modules())
        if changed_places(before, after):
            _called(room, entire)
            again = changed_places(after, module_state(room.named_modules()))
            if again:
                return _writes(unit, again[0])
        for half, (other, part) in enumerate(zip(others, halves, strict=True)):
            made = _called(other, part)
            by_rows = written_from_rows(before, after, module_state(other.named_modules()))
            if by_rows is not None:
                return _writes(unit, by_rows)
            wanted = frozenset(place for *at, path, place in taken if tuple(at) == key and not path)
            if row_difference(whole, made, half, wanted) == "rows":
                return CannotSplit(
                    f"module {unit!r} makes another thing of a row where other rows of the batch are beside it: microbatches would "
                    "change it",
                    "do it row by row, or take one",
                )
        return None


def _called(unit: nn.Module, call: Call) -> Any:
    args, kwargs = _own(call)
    return unit.forward(*args, **kwargs)


def _own(call: Call) -> Call:
    """A copy, which may be changed."""
    args, kwargs = snapshot(*call)
    found: Call = map_leaves(lambda _, t: t.clone(), (args, kwargs))
    return found


def _furnished(model: nn.Module, units: Sequence[str]) -> tuple[nn.Module, list[Tensor]]:
    """The same skeleton, and its large tensors: nothing in half precision; parameters outside of units at random, none zero."""
    generator, large = torch.Generator().manual_seed(0), list[Tensor]()
    for part in model.modules():
        forget_hooks(part)  # they would take what runs here for a step
        parameters, buffers = tensors_in(part)
        for name, tensor in list(parameters.items()):
            if tensor is not None and tensor.is_floating_point():
                made = stub_tensor(tensor.shape, _precise(tensor.dtype), generator)
                parameters[name] = nn.Parameter(made, requires_grad=False)
                large += [parameters[name]] if made.numel() > LARGE else []
        for name, tensor in list(buffers.items()):
            if tensor is not None and tensor.is_floating_point():
                buffers[name] = tensor.to(_precise(tensor.dtype))
    for unit in units:
        for part, name, tensor in meta_tensors(model.get_submodule(unit)):
            part.__dict__[name] = tensor.to(_precise(tensor.dtype))
    return model, large


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALVED else dtype


def _filled(unit: nn.Module) -> tuple[nn.Module, list[Tensor]]:
    """A copy of an emptied unit with numbers at random, and its large tensors."""
    made, large = copy.deepcopy(unit), list[Tensor]()
    generator = torch.Generator().manual_seed(1)
    for part, name, tensor in meta_tensors(made):
        part.__dict__[name] = filled = stub_tensor(tensor.shape, tensor.dtype, generator)
        if filled.numel() > LARGE:
            large.append(filled)
    return made, large


def _writes(unit: str, at: Place) -> CannotSplit:
    name = ".".join(part for part in (unit, at[0]) if part)
    whose = f"module {name!r}" if name else "the model"
    return CannotSplit(
        f"{whose} writes to its {at[1]!r} in every forward: one device does so once for the whole batch, a pipeline for each "
        "microbatch",
        "write it outside of the forward, or take one",
    )
