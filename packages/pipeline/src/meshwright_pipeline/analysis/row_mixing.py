"""Tests numerically whether the rows of a batch interact. If they do, the batch cannot be split into microbatches.

The trial uses a few rows of a batch: it runs all of them, then each half as a microbatch. First the code between units
runs, with random numbers in place of unit results (the same for each row in both runs). Then each unit runs on the
arguments that it got there; of repeated units only one. If the result of a row differs, rows interact. Weights are random
stubs, so the trial needs no memory for the model. State that every forward writes (a buffer, a counter) would be written
once per microbatch: a second run of the same rows shows it. Code that fails in the trial is assumed to be batch-independent.
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

from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.trace.one_device import on_one_device
from meshwright_pipeline._torch import pytree, remove_hooks, weight_hooks
from meshwright_pipeline.analysis.loss_preview import ROWS, shrink_batch, skeleton_with_values, token_counts
from meshwright_pipeline.analysis.stub_weights import HALVED, StubMode, stub_tensor, with_stubs
from meshwright_pipeline.hook_code import returns_nothing
from meshwright_pipeline.module_state import LARGE, Place, State, TensorValues, changed_places, module_state
from meshwright_pipeline.partition.repeated_units import RepeatedUnitProfiler
from meshwright_pipeline.pytrees import contents_of, differing_dims, leaves_of, map_leaves, tensors_of
from meshwright_pipeline.trace.forward_hooks import Forward
from meshwright_pipeline.trace.meta_model import meta_tensors
from meshwright_pipeline.trace.microbatch import Call, microbatches, signature, snapshot
from meshwright_pipeline.trace.profile import Key, Label, Labels, Profile, Result
from meshwright_pipeline.trace.rng_replay import DrawLog
from meshwright_pipeline.trace.state.state_writes import modules_outside

Tensor = torch.Tensor

POOL = 65537
"""Size of the pool of random numbers for unit results. It is a prime, so no two rows start at the same number."""

FAR = 1e-4
"""Relative difference from which values count as different. Rounding differs by less."""
MOST_CALLS = 2000
"""Unit calls after which a run is stopped: with random results of units, a loop until they converge never ends."""
HUGE = 1e4
"""Values this many times larger than the median are mask values."""

_BATCH_INDEPENDENT = (nn.Linear, nn.Embedding)


@dataclass(frozen=True)
class CannotSplit:
    """Why a batch cannot be split into microbatches, and what the user can do.

    `by_values`: the module calls depend on values, so a pipeline of one microbatch is impossible, too.
    """

    why: str
    fix: str
    by_values: bool = False

    def __str__(self) -> str:
        return f"{self.why}; {self.fix}"


def find_row_mixing(
    model: nn.Module, units: tuple[str, ...], example: tuple[Sequence[Any], Mapping[str, Any]]
) -> CannotSplit | None:
    """Why a batch cannot be split, as far as the trial shows; None if nothing is found.

    `model`: or a skeleton of it; it is not changed. `example`: positional and keyword arguments of a batch, with or without
    values.
    """
    call: Call = (tuple(example[0]), dict(example[1]))
    size = BatchSize.of((t.shape, t.is_floating_point()) for t in tensors_of(call))
    rows = min(ROWS, size.rows or 0) // 2 * 2
    if rows < 2:
        return None
    for tokens in token_counts(size):
        try:
            with _isolated():
                few = _distinct_rows(shrink_batch(call, size, rows, tokens), rows)
                trial = _Trial(model, units, few)
                reason = trial.verdict()
                # units whose parameters are read elsewhere are held by all stages, and run like code between units
                if reason is None and trial.read:
                    others = tuple(unit for unit in units if unit not in trial.read)
                    reason = _Trial(model, others, few).verdict()
                return reason
        except _Endless:
            return CannotSplit(
                "how often the model calls its modules depends on their results, and a pipeline needs the same calls in every step",
                "call them a fixed number of times, or plan without pp",
                by_values=True,
            )
        except Exception:
            # the model may fail on few tokens or random numbers
            continue
    return None


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Restores the random generators of Python, NumPy and torch; without gradients and warnings inside."""
    python_state = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        with torch.random.fork_rng([]), torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _distinct_rows(call: Call, rows: int) -> Call:
    """The batch in full precision, with noise in floating-point tensors whose rows are all equal."""
    generator = torch.Generator().manual_seed(rows)

    def distinct(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = tensor.float() if tensor.dtype in HALVED else tensor
        has_rows = tensor.is_floating_point() and tensor.dim() and tensor.shape[0] == rows
        if has_rows and bool((tensor == tensor[:1]).all()):
            return tensor + torch.rand(tensor.shape, generator=generator, device=HOST)
        return tensor

    result: Call = pytree.tree_map_only(Tensor, distinct, call)
    return result


class _Endless(UnsupportedError):
    """A run calls units too often: how often depends on their results."""


class _BetweenUnits(RepeatedUnitProfiler):
    """Runs the code between units with random numbers as unit results, and records the arguments of units.

    `given`: (key shared by repeated units that are called alike, arguments) of each unit call, in order.
    `half`: which half of the rows runs; None for all rows, which have to run first.
    """

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        super().__init__(model, units, settled=True)
        self.given: list[tuple[Hashable, Call]] = []
        self.half: int | None = None
        self._shapes: dict[Label, torch.Size] = {}
        self._pool = torch.randn(POOL, generator=torch.Generator().manual_seed(2), device=HOST)

    def shape(self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawLog) -> Result:
        if len(self.given) >= MOST_CALLS:
            raise _Endless
        # before the run changes its arguments
        called, arguments = signature(call), _copied(call)
        result = super().shape(unit, forward, call, device, drawn)
        built = self._built[unit]
        self.given.append(((unit if built in self._different else built, called), arguments))
        return result

    def value(self, label: Label, like: Tensor, device: torch.device) -> Tensor:
        if not (like.is_floating_point() or like.is_complex()):
            return super().value(label, like, device).clone(memory_format=torch.contiguous_format)
        if self.half is None:
            self._shapes[label] = like.shape
            return self._random(label, like.shape).to(like.dtype)
        value = half_of(self._random(label, self._shapes[label]), like.shape, self.half)
        # of another shape for fewer rows: its arguments tell why
        value = self._random(label, like.shape) if value is None else value
        return value.to(like.dtype, copy=True)

    def _random(self, label: Label, shape: torch.Size) -> Tensor:
        """The numbers for a label; not stored, since those of all calls would be large."""
        pool = self._pool.roll(zlib.crc32(repr(label).encode()) % POOL)
        return pool.repeat(-(-shape.numel() // POOL))[: shape.numel()].view(shape)

    def _run(self, *args: Any) -> Profile:
        self.given.clear()
        return super()._run(*args)


class _Trial:
    """Runs a model on the rows `call`, on the CPU. `read`, set by `verdict`: units whose parameters are used between units."""

    def __init__(self, model: nn.Module, units: tuple[str, ...], call: Call) -> None:
        self.call, self.units = call, units
        stub, self.large = with_stubs(skeleton_with_values(model, units), units)
        for part in stub.modules():
            # they would count the trial as a step
            remove_hooks(part, returns_nothing)
        # a run may change attributes of units
        self.clean = copy.deepcopy(stub, {id(tensor): tensor for tensor in self.large})
        self.between = _BetweenUnits(stub, units)
        self.tried: set[Hashable] = set()
        self.read: tuple[str, ...] = ()

    def verdict(self) -> CannotSplit | None:
        """The first reason that is found."""
        before = self._state()
        whole = self._run(self.call, None)
        self.read, given = whole.read, list(self.between.given)
        after = self._state()
        if changed_places(before, after):
            self._run(self.call, None)
            again = changed_places(after, self._state())
            if again:
                return _writes("", again[0])
        parts = []
        for half, part in enumerate(microbatches(*self.call, 2)):
            if self._run(part, half).order != whole.order:
                raise ValueError("other modules are called for fewer rows")
            parts.append(list(self.between.given))
            at = written_from_rows(before, after, self._state())
            if at is not None:
                return _writes("", at)
        used = whole.final.union(*whole.consumes.values())
        for key, (like, entire), *others in zip(whole.order, given, *parts, strict=True):
            halves = [other[1] for other in others]
            differences = [row_difference(entire, part, half) for half, part in enumerate(halves)]
            if "rows" in differences:
                return CannotSplit(
                    f"the code before module {key[0]!r} combines several rows of the batch into its arguments: "
                    "microbatches would change the result",
                    "compute each row independently, combine rows after the last module, or use one microbatch",
                )
            alike = differences == ["", ""]
            if not alike:
                # its arguments depend on more than the rows
                like = key
            if like not in self.tried and not (alike and self._independent(key)):
                reason = self._unit(key, entire, halves, used)
                if reason is not None:
                    return reason
            self.tried.add(like)
        return None

    def _run(self, call: Call, half: int | None) -> Profile:
        self.between.half = half
        with StubMode(self.large):
            return self.between.run(*_copied(call))

    def _state(self) -> State:
        """The state of the model outside of units."""
        return module_state(modules_outside(self.between.model, self.units))

    # ---- a unit
    def _independent(self, key: Key) -> bool:
        """Whether a unit computes each row by itself, of arguments that do."""
        unit = self.clean.get_submodule(key[0])
        return type(unit) in _BATCH_INDEPENDENT and not weight_hooks(unit)

    def _unit(self, key: Key, entire: Call, halves: Sequence[Call], used: Labels) -> CannotSplit | None:
        """The reason that is found for a unit call."""
        unit = self.clean.get_submodule(key[0])
        try:
            stub, generator = copy.deepcopy(unit), torch.Generator().manual_seed(1)
            large: list[Tensor] = []
            for part, name, tensor in meta_tensors(stub):
                part.__dict__[name] = weight = stub_tensor(tensor.shape, tensor.dtype, generator)
                large += [weight] if weight.numel() > LARGE else []
            copies = [copy.deepcopy(stub, {id(tensor): tensor for tensor in large}) for _ in range(3)]
            scalars = frozenset(index for *call, path, index in used if tuple(call) == key and not path)
            with StubMode(large):
                return _unit_mixing(key[0], copies, entire, halves, scalars)
        except Exception:
            # the unit may fail on random numbers: nothing is known of it
            return None


def _unit_mixing(
    unit: str, copies: Sequence[nn.Module], entire: Call, halves: Sequence[Call], scalars: frozenset[int]
) -> CannotSplit | None:
    first, *others = copies
    before = module_state(first.named_modules())
    whole = _called(first, entire)
    after = module_state(first.named_modules())
    if changed_places(before, after):
        _called(first, entire)
        again = changed_places(after, module_state(first.named_modules()))
        if again:
            return _writes(unit, again[0])
    for half, (other, part) in enumerate(zip(others, halves, strict=True)):
        result = _called(other, part)
        at = written_from_rows(before, after, module_state(other.named_modules()))
        if at is not None:
            return _writes(unit, at)
        if row_difference(whole, result, half, scalars) == "rows":
            return CannotSplit(
                f"module {unit!r} computes a row differently when other rows of the batch are present: microbatches would "
                "change the result",
                "compute each row independently, or use one microbatch",
            )
    return None


def _called(unit: nn.Module, call: Call) -> Any:
    args, kwargs = _copied(call)
    for hook in weight_hooks(unit):
        hook(unit, args)
    return on_one_device(unit.forward, *args, **kwargs), contents_of((args, kwargs))


def _copied(call: Call) -> Call:
    """A copy of the arguments, which a run may change."""
    copied: Call = map_leaves(lambda _, t: t.clone(), snapshot(*call))
    return copied


def _writes(unit: str, at: Place) -> CannotSplit:
    name = ".".join(part for part in (unit, at[0]) if part)
    whose = f"module {name!r}" if name else "the model"
    return CannotSplit(
        f"{whose} writes to its {at[1]!r} in every forward: once for the whole batch on one device, once for each microbatch in a "
        "pipeline",
        "write it outside of the forward, or use one microbatch",
    )


# ---- results for half of the rows, compared with those for all


def half_of(whole: Tensor, shape: Sequence[int], half: int) -> Tensor | None:
    """Half number `half` of a tensor, with the given shape; None if there is none."""
    if whole.dim() != len(shape):
        return None
    for dim, size in enumerate(shape):
        if whole.shape[dim] != size:
            if whole.shape[dim] != 2 * size:
                return None
            whole = whole.narrow(dim, half * size, size)
    return whole


def row_difference(whole: Any, part: Any, half: int, scalars: frozenset[int] = frozenset()) -> str:
    """How the result for one half differs from the result for all rows.

    "rows": in floating-point values with rows, or in a leaf of `scalars`; "other": elsewhere, or not comparable; "": not.
    """
    leaves, others = leaves_of(whole), leaves_of(part)
    if len(leaves) != len(others):
        return "other"
    difference = ""
    for place, (a, b) in enumerate(zip(leaves, others, strict=True)):
        if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
            plain = isinstance(a, (bool, int, float, str)) and isinstance(b, (bool, int, float, str))
            difference = "other" if type(a) is not type(b) or (plain and a != b) else difference
            continue
        expected = half_of(a, b.shape, half)
        if expected is None or expected.dtype != b.dtype:
            if _trimmed(a, b):
                return "rows"
            difference = "other"
        elif differs(expected, b):
            fractions = b.is_floating_point() or b.is_complex()
            if fractions and (differing_dims(a, b) or place in scalars):
                return "rows"
            difference = "other"
    return difference


def _trimmed(a: Tensor, b: Tensor) -> bool:
    """Whether `b` has half of the rows of `a`, and another size in one more dim: that of the longest of its rows, say."""
    if a.dim() != b.dim() or not (b.is_floating_point() and a.dtype == b.dtype):
        return False
    sizes = [(m, n) for m, n in zip(a.shape, b.shape, strict=True) if m != n]
    return any(m == 2 * n for m, n in sizes) and any(m != 2 * n for m, n in sizes)


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors differ by more than rounding."""
    if not (a.is_floating_point() or a.is_complex()):
        return not torch.equal(a, b)
    size = torch.nan_to_num(torch.view_as_real(a) if a.is_complex() else a, 0.0, 0.0, 0.0).abs()
    median = float(size.median()) if size.numel() else 0.0
    # equal mask values do not count for the scale
    if median and not a.is_complex():
        size = size.masked_fill((size > HUGE * median) & (a == b), 0.0)
    limit = FAR * float(size.max()) if size.numel() else 0.0
    return not torch.allclose(a, b, rtol=0.0, atol=limit, equal_nan=True)


def written_from_rows(before: State, whole: State, half: State) -> Place | None:
    """A tensor that a forward overwrites with values that depend on its rows; None if there is none."""
    for at, old in before.items():
        if _from_rows(old, whole.get(at), half.get(at)):
            return at
    return None


def _from_rows(old: Any, new: Any, half: Any) -> bool:
    """The same for what stands in one place, also in lists and objects there."""
    if isinstance(old, TensorValues) and isinstance(new, TensorValues) and isinstance(half, TensorValues):
        return new.like(old) and half.like(old) and old != new and differs(new.tensor, half.tensor)
    if isinstance(old, tuple) and isinstance(new, tuple) and isinstance(half, tuple):
        return any(map(_from_rows, old, new, half))
    return False
