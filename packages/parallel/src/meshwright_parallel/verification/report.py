"""The report of a verification: every loss, gradient, parameter and optimizer state against one device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from meshwright_dtensor.errors import VerificationError
from meshwright_dtensor.utils.names import count_of

if TYPE_CHECKING:
    from meshwright_dtensor.utils.console import Table

Kind = Literal["loss", "gradient", "parameter", "buffer", "state"]


@dataclass(frozen=True)
class Comparison:
    """One tensor of one step.

    Attributes:
        step: from 0; -1 is before the first one, where values must be equal bit for bit.
        kind: "loss", "gradient", "parameter" (after the step), "buffer" (after it) or "state" (of the optimizer).
        name: fully qualified name; for a state, name and key ("layer.weight/exp_avg").
        dtype: such as "float32".
        difference: largest absolute difference over all elements and ranks; infinite where one side has no value, or
            one side only has a nan or infinity.
        scale: the tensor's largest magnitude on one device, by which the difference is divided.
        tolerance: largest relative difference that passes.
        note: the failure where it is not a number, or why the tensor is no measure.
        bound: largest difference that passes, for a tensor that is no measure (one device does not determine it).
    """

    step: int
    kind: Kind
    name: str
    dtype: str
    difference: float
    scale: float
    tolerance: float
    note: str = ""
    bound: float | None = None

    @property
    def measured(self) -> bool:
        """Whether one device determines the tensor, so that it is compared relative to its largest value."""
        return self.bound is None

    @property
    def relative(self) -> float:
        """`difference` / `scale`; 0 where there is no difference."""
        if self.difference == 0.0:
            return 0.0
        return self.difference / self.scale if self.scale > 0.0 else math.inf

    @property
    def ok(self) -> bool:
        """Whether it passes."""
        return self.relative <= self.tolerance if self.bound is None else self.difference <= self.bound


@dataclass(frozen=True)
class Fault:
    """The first call at which the parallel run differs from one device.

    Attributes:
        phase: "forward": the value of the call differs, and no value before it. "backward": all values agree; the
            gradient of the call's result differs, and no gradient that the backward pass computed before it. So a
            consumer of the result returns a wrong gradient.
        module: full name of the module whose forward makes the call; "" is the model.
        function: the torch function.
        occurrence: which call of that function in the module's forward, from 0.
        relative: largest difference, relative to the largest value on one device.
        layout: layout of the result.
        inputs: layouts of the tensors given to the call.
    """

    phase: Literal["forward", "backward"]
    module: str
    function: str
    occurrence: int
    relative: float
    layout: str
    inputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        call = f"{self.function} #{self.occurrence} in module {self.module or '(model)'!r}"
        quantity = "the value of" if self.phase == "forward" else "the gradient of the result of"
        inputs = f" from {'; '.join(self.inputs)}" if self.inputs else ""
        return f"{quantity} {call} differs first, by {self.relative:.1e}: {self.layout}{inputs}"


@dataclass(frozen=True)
class VerificationReport:
    """A parallel run against a run on one device, the same on every rank.

    Attributes:
        model: class name.
        degrees: mesh axis -> degree.
        steps: how many were run.
        losses: per step (one device, parallel).
        comparisons: every tensor of every step.
        fault: the first call of the first step whose value or gradient differs, if one was found.
        tied: first name -> other names of every tied parameter; comparisons go by the first.
    """

    model: str
    degrees: dict[str, int]
    steps: int
    losses: tuple[tuple[float, float], ...]
    comparisons: tuple[Comparison, ...]
    fault: Fault | None = None
    tied: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether every comparison passes."""
        return all(c.ok for c in self.comparisons)

    @property
    def failures(self) -> list[Comparison]:
        """The comparisons that do not pass, worst first."""
        return [c for c in self.worst(len(self.comparisons)) if not c.ok]

    def worst(self, count: int = 10, kind: Kind | None = None) -> list[Comparison]:
        """The comparisons closest to, or furthest over, their tolerance."""
        chosen = [c for c in self.comparisons if kind is None or c.kind == kind]
        return sorted(chosen, key=_badness, reverse=True)[:count]

    def raise_if_bad(self) -> None:
        """Raise VerificationError, naming the worst tensor, unless everything passes."""
        bad = self.failures
        if bad:
            first = bad[0]
            raise VerificationError(
                f"{len(bad)} of {len(self.comparisons)} tensors differ from one device; worst: {first.kind} {self._named(first)!r} "
                f"in step {first.step}, {first.note or f'relative difference {first.relative:.1e}'} "
                f"(tolerance {first.tolerance:.0e})" + (f"; {self.fault}" if self.fault else "")
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; infinities are given as text."""
        kinds = dict.fromkeys(c.kind for c in self.comparisons)
        return {
            "ok": self.ok,
            "model": self.model,
            "degrees": dict(self.degrees),
            "steps": self.steps,
            "losses": [{"one_device": _plain(a), "parallel": _plain(b)} for a, b in self.losses],
            "tensors": len(self.comparisons),
            "no_measure": sum(not c.measured for c in self.comparisons),
            "failures": len(self.failures),
            "fault": None if self.fault is None else {k: _plain(v) for k, v in asdict(self.fault).items()},
            "tied": {name: list(others) for name, others in self.tied.items()},
            "worst": {kind: _entry(self.worst(1, kind)[0]) for kind in kinds},
            "comparisons": [_entry(c) for c in self.comparisons],
        }

    def render(self, count: int = 8, width: int = 110) -> str:
        """A table for people: per kind how many tensors and the worst difference, then the worst tensors."""
        from meshwright_dtensor.utils.console import as_text

        return as_text(self._shown(count), width)

    def _repr_html_(self) -> str:
        """The report for a notebook."""
        from meshwright_dtensor.utils.html import text_html

        return text_html(self.render())

    def _shown(self, count: int) -> Iterator[str | Table]:
        from meshwright_dtensor.utils.console import table_of

        mesh = " x ".join(f"{axis} {degree}" for axis, degree in self.degrees.items()) or "one rank"
        yield f"{self.model} on {mesh} against one device, {count_of(self.steps, 'step')}"
        rows: list[tuple[object, ...]] = []
        for kind in dict.fromkeys(c.kind for c in self.comparisons):
            of_kind = [c for c in self.comparisons if c.kind == kind]
            passed = sum(c.ok for c in of_kind)
            measured = [c.relative for c in of_kind if c.measured]
            worst = f"{max(measured):.1e}" if measured else "-"
            verdict = "all" if passed == len(of_kind) else f"{passed} of {len(of_kind)}"
            rows.append((kind, len(of_kind), len(of_kind) - len(measured), worst, verdict))
        numbers = ("tensors", "no measure", "worst relative")
        yield table_of(("what", *numbers, "passes"), rows, right=numbers)
        for step, (one_device, parallel) in enumerate(self.losses):
            yield f"step {step}: loss on one device {one_device:.9g}, parallel {parallel:.9g}"
        rows = []
        for c in self.worst(count):
            mark = ("ok" if c.ok else "DIFFERS") + (f": {c.note}" if c.note else "")
            relative, tolerance = f"{c.relative:.1e}", f"{c.tolerance:.0e}"
            rows.append((c.step, c.kind, self._named(c) or "-", relative, tolerance, mark))
        yield "furthest from one device:"
        yield table_of(("step", "what", "name", "relative", "tolerance", ""), rows)
        yield "the same as one device" if self.ok else f"DIFFERENT: {count_of(len(self.failures), 'tensor')}"
        if self.fault is not None:
            yield str(self.fault)

    def _named(self, comparison: Comparison) -> str:
        """The tensor's name with every name of a tied parameter: "embed.weight = head.weight/exp_avg"."""
        name, slash, key = comparison.name.partition("/")
        return " = ".join((name, *self.tied.get(name, ()))) + slash + key


def _badness(comparison: Comparison) -> tuple[float, float]:
    """Sort key: multiples of the tolerance; tensors that are no measure come last, unless they fail."""
    if comparison.bound is not None:
        return (0.0 if comparison.ok else math.inf), 0.0
    over = comparison.relative / comparison.tolerance if comparison.tolerance > 0.0 else math.inf
    return (over if comparison.relative > 0.0 else 0.0), comparison.relative


def _entry(comparison: Comparison) -> dict[str, Any]:
    data = asdict(comparison)
    data.update(relative=comparison.relative, measured=comparison.measured, ok=comparison.ok)
    return {key: _plain(value) for key, value in data.items()}


def _plain(value: Any) -> Any:
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)
