"""Prove by running a small copy that a module can be expert parallel. Its class and names do not matter.

For tokens x [N, H], an assignment and weights, the probe checks that:

- every row of the output depends on its own token only, and on the experts that its assignment names. Other experts may hold
  anything (here NaN), and get no gradient;
- the slots of a token add up: a token with two experts is the sum of two tokens with one expert each;
- the module works with another number of experts, once its integer attributes say so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from meshwright_dtensor.devices import HOST
from meshwright_parallel.moe.probe_model import Candidate, Sample, fused_count, sample_of

Tensor = torch.Tensor
Style = Literal["index", "mask"]

LIMIT_BYTES = 4 * 2**30
"""Largest copy that is made to probe a module."""
GRADIENT_BYTES = 2**28
"""Largest copy for which gradients are computed too."""
MANY = 64
"""Rows for one expert, more than an expert capacity allows."""
TOLERANCE = 1e-4
"""Relative to the largest value: allows another order of summation. A wrong combination differs far more."""


@dataclass(frozen=True)
class Proved:
    """The call of a module of experts. `attributes`: paths of those that hold the number of experts. `width`: size of a token."""

    assignment: Style
    attributes: tuple[str, ...]
    width: int


@dataclass(frozen=True)
class Rejected:
    """Why a module cannot be expert parallel."""

    reason: str


def probe(candidate: Candidate) -> Proved | Rejected:
    """Run a small copy of the module, and if need be one of full size. The caller's random state does not change."""
    answer = Rejected("it was not run")
    with torch.random.fork_rng(devices=()):
        for factor in dict.fromkeys((candidate.reduction(), 1)):
            copies = 3 if candidate.kind == "container" else fused_count(candidate.count)
            size = candidate.expert_bytes() * copies
            if factor == 1 and size > LIMIT_BYTES:
                limit = f"more than {LIMIT_BYTES // 2**30} GiB"
                reason = f"{answer.reason} in a small copy, and one of full size would take {size / 2**30:.1f} GiB, {limit}"
                return Rejected(reason)
            result = _probe(candidate, factor, factor > 1 or size <= GRADIENT_BYTES)
            if isinstance(result, Proved):
                return result
            answer = result
    return answer


def _probe(candidate: Candidate, factor: int, gradients: bool) -> Proved | Rejected:
    reason = "its forward runs for no known form of (tokens, assignment, weights)"
    for attributes in _attribute_sets(candidate):
        generator = torch.Generator().manual_seed(0)
        sample = sample_of(candidate, attributes, factor, generator)
        for width, style, dims in itertools.product(sample.widths(), ("index", "mask"), (2, 3)):
            trial = _Trial(sample, width, style, dims, generator)
            if trial.runs():
                violation = trial.violation(gradients)
                if violation is None:
                    return Proved("mask" if style == "mask" else "index", attributes, width * factor)
                reason = violation
    return Rejected(reason)


def _attribute_sets(candidate: Candidate) -> Iterator[tuple[str, ...]]:
    """Attributes that may hold the number of experts: all that are equal to it, or one of them, or none."""
    if candidate.kind == "container":
        yield ()
        return
    equal = candidate.attributes()
    yield from dict.fromkeys((tuple(equal), *((name,) for name in equal), ()))


class _Trial:
    """Calls of a sample with tokens of one width and number of dims, and one form of assignment."""

    def __init__(self, sample: Sample, width: int, style: str, dims: int, generator: torch.Generator) -> None:
        self.sample, self.style, self.dims = sample, style, dims
        self.x = torch.randn(4, width, generator=generator, device=HOST)
        self.w = torch.rand(4, 2, generator=generator, device=HOST) + 0.5
        # two experts in turn; a third is named by no token
        self.first, self.second = sample.used[-1], sample.used[-2]
        self.chosen = torch.tensor([self.first, self.second, self.first, self.second], device=HOST)
        self.other = torch.tensor([self.second, self.first, self.second, self.first], device=HOST)

    def assignment(self, *slots: Tensor) -> Tensor:
        """[N, k] or [N, 1, E] for k slots of each token."""
        if self.style == "index":
            return torch.stack(slots, 1)
        return sum(torch.nn.functional.one_hot(s, self.sample.count) for s in slots)[:, None]  # type: ignore[index]

    def runs(self) -> bool:
        """Whether the forward takes these arguments and returns a row for every token."""
        try:
            with torch.no_grad():
                self.out = self._run(self.x, self.assignment(self.chosen), self.w[:, :1])
        except Exception:
            # a module may reject arguments with any error
            return False
        return isinstance(self.out, Tensor) and self.out.shape == self.x.shape

    def violation(self, gradients: bool) -> str | None:
        """The first property that does not hold, or None."""
        try:
            with torch.no_grad():
                reason = self._rows() or self._slots() or self._experts() or self._training()
            return reason or (self._gradients() if gradients else None)
        except Exception as error:
            # a property whose check raises does not hold
            return f"a probe of it raised {type(error).__name__}: {' '.join(str(error).split())[:120]}"

    def _call(self, rows: Any = slice(None)) -> Tensor:
        return self._run(self.x[rows], self.assignment(self.chosen)[rows], self.w[rows, :1])  # type: ignore[no-any-return]

    def _run(self, x: Tensor, assignment: Tensor, weights: Tensor) -> Any:
        out = self.sample.module(x if self.dims == 2 else x[None], assignment, weights)
        return out if self.dims == 2 else out[0]

    def _rows(self) -> str | None:
        if not torch.isfinite(self.out).all() or not self.out.abs().sum() > 0:
            return "its output is not finite, or zero"
        for rows in ([2, 0, 3, 1], [1, 2], [3]):
            if not _close(self._call(rows), self.out[rows]):
                return "a row of its output depends on other rows"
        if not _close(self.out, self._run(self.x, self.assignment(self.chosen), self.w[:, :1])):
            return "two equal calls differ"
        if self.dims == 3 and self._depends_on_sequences():
            return "a row of its output depends on how rows are divided into sequences"
        return None

    def _depends_on_sequences(self) -> bool:
        """Whether tokens [2, 2, H] give another result than the same tokens as [1, 4, H], the form at run time."""
        assignment, weights = self.assignment(self.chosen), self.w[:, :1]
        try:
            out = self.sample.module(self.x.view(2, 2, -1), assignment, weights)
        except Exception:
            # then the model does not call it with several sequences
            return False
        return not _close(out.reshape(self.out.shape), self.out)

    def _slots(self) -> str | None:
        two = self.w if self.style == "index" else self.w[:, :1]
        both = self._run(self.x, self.assignment(self.chosen, self.other), two)
        last = self._run(self.x, self.assignment(self.other), two[:, -1:])
        if not _close(both, self.out + last):
            return "the output of a token with two experts is not the sum of those with one"
        return None

    def _experts(self) -> str | None:
        for expert in self.sample.used:
            named = (self.chosen == expert)[:, None].expand_as(self.out)
            originals = [part.clone() for part in self.sample.parts[expert]]
            for part in self.sample.parts[expert]:
                part.fill_(float("nan"))
            out = self._call()
            for part, values in zip(self.sample.parts[expert], originals, strict=True):
                part.copy_(values)
            if torch.isnan(out[~named]).any() or not _close(out[~named], self.out[~named]):
                return "a row depends on experts that its assignment does not name"
            if named.any() and not torch.isnan(out[named]).all():
                return "a row does not depend on the expert that its assignment names"
        return None

    def _training(self) -> str | None:
        """Training mode must not draw random numbers, write to buffers or drop rows: ranks see some of the rows only."""
        module, before = self.sample.module, torch.get_rng_state()
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        module.train()
        many = self._call([0] * MANY)
        module.eval()
        if not torch.equal(before, torch.get_rng_state()):
            return "it draws random numbers while training (dropout inside the experts); set their probability to 0"
        if not _close(many, self.out[[0] * MANY]):
            return "while training, a row of its output depends on other rows (a capacity of experts?)"
        changed = [name for name, b in module.named_buffers() if not torch.equal(b, buffers[name])]
        if changed:
            return f"it writes to its buffer {changed[0]}, which ranks with other rows would write otherwise"
        return None

    def _gradients(self) -> str | None:
        parameters = list(self.sample.module.parameters())
        for parameter in parameters:
            parameter.requires_grad_()
        with torch.enable_grad():
            self._call().square().sum().backward()
        parts_of = self.sample.parts.items()
        touched = {expert: any(_reached(part, parameters) for part in parts) for expert, parts in parts_of}
        for parameter in parameters:
            parameter.grad = None
            parameter.requires_grad_(False)
        wanted = {expert: expert in (self.first, self.second) for expert in self.sample.parts}
        return None if touched == wanted else "gradients reach other experts than the assignment names"


def _reached(part: Tensor, parameters: list[torch.nn.Parameter]) -> bool:
    """Whether the gradient of the memory of `part` is not zero."""
    memory = part.untyped_storage().data_ptr()
    for parameter in parameters:
        if parameter.grad is not None and parameter.untyped_storage().data_ptr() == memory:
            window = parameter.grad.reshape(-1)[part.storage_offset() : part.storage_offset() + part.numel()]
            return bool(window.abs().sum() > 0)
    return False


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= TOLERANCE * max(float(b.abs().max()), 1e-6))
