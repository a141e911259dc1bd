"""Small copies of modules of experts, with random values, for the probe. The module itself is not changed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from meshwright_dtensor.devices import HOST

Tensor = torch.Tensor
SMALLEST = 16
"""Least size of a dim of a copy."""
SCALE = 0.3
"""Standard deviation of values: large enough that results are well above rounding."""


@dataclass(frozen=True)
class Candidate:
    """A module that may hold experts.

    Args:
        kind: "fused" - experts are equal parts of dim 0 of the parameters; "container" - one child each.
        count: number of experts, E.
        experts: paths of the experts' parameters (fused), or of the children in order (container).
        strong: its shapes alone suggest experts, so a rejection is reported.
    """

    name: str
    module: nn.Module
    kind: str
    count: int
    experts: tuple[str, ...]
    strong: bool = True

    def expert_bytes(self) -> int:
        """Bytes of one expert in float32."""
        if self.kind == "container":
            return 4 * sum(p.numel() for p in self.module.get_submodule(self.experts[0]).parameters())
        return 4 * sum(self.module.get_parameter(path).numel() for path in self.experts) // self.count

    def sizes(self) -> set[int]:
        """Sizes of the dims of one expert's parameters: the width of a token is one of them."""
        if self.kind == "container":
            shapes = [tuple(p.shape) for p in self.module.get_submodule(self.experts[0]).parameters()]
        else:
            whole = (self.module.get_parameter(path).shape for path in self.experts)
            shapes = [(s[0] // self.count, *s[1:]) for s in whole]
        return {size for shape in shapes for size in shape if size > 1}

    def reduction(self) -> int:
        """By how much a copy can divide all sizes: a power of two, 1 where they are small or odd."""
        factor, sizes = 1, self.sizes()
        while sizes and all(size % (2 * factor) == 0 and size // (2 * factor) >= SMALLEST for size in sizes):
            factor *= 2
        return factor

    def attributes(self) -> list[str]:
        """Paths of the integer attributes that are equal to the number of experts."""
        return [
            f"{prefix}.{name}" if prefix else name
            for prefix, module in self.module.named_modules()
            for name, value in vars(module).items()
            if type(value) is int and value == self.count
        ]


@dataclass(frozen=True)
class Sample:
    """A copy of a candidate's module.

    Args:
        count: number of experts in its attributes.
        used: numbers of the two or three experts that have values.
        parts: expert -> its parameters, or for fused experts views of its rows.
    """

    module: nn.Module
    count: int
    used: tuple[int, ...]
    parts: Mapping[int, list[Tensor]]

    def widths(self) -> list[int]:
        """Sizes of dims of the experts that have values."""
        shapes = (part.shape for parts in self.parts.values() for part in parts)
        return sorted({size for shape in shapes for size in shape if size > 1})


def sample_of(candidate: Candidate, attributes: tuple[str, ...], factor: int, rng: torch.Generator) -> Sample:
    """A copy with few experts whose sizes are divided by `factor`.

    A fused copy has another number of experts than the original. This proves `attributes` too, which are set to that number.
    In a container only three children have values, as on a rank that has only its own experts.
    """
    sizes = {size: size // factor for size in candidate.sizes()}
    sample = (_container if candidate.kind == "container" else _fused)(candidate, sizes, rng)
    for prefix, module in sample.module.named_modules():
        for name, value in list(vars(module).items()):
            path = f"{prefix}.{name}" if prefix else name
            if path in attributes:
                setattr(module, name, sample.count)
            elif type(value) is int and value in sizes:
                setattr(module, name, sizes[value])
    sample.module.eval()
    return sample


def _fused(candidate: Candidate, sizes: Mapping[int, int], generator: torch.Generator) -> Sample:
    count = fused_count(candidate.count)
    made: dict[str, Tensor] = {}

    def values(path: str, parameter: Tensor) -> Tensor:
        shape = [sizes.get(size, size) for size in parameter.shape]
        if path in candidate.experts:
            rows = parameter.shape[0] // candidate.count
            shape[0] = sizes.get(rows, rows) * count
        made[path] = drawn(shape, generator)
        return made[path]

    module = copied(candidate.module, values)
    parts = {e: [made[path].chunk(count)[e] for path in candidate.experts] for e in range(count)}
    return Sample(module, count, (0, 1, count - 1), parts)


def fused_count(count: int) -> int:
    """Number of experts of a fused copy: at least three, and not the original number."""
    return 3 if count != 3 else 4


def _container(candidate: Candidate, sizes: Mapping[int, int], generator: torch.Generator) -> Sample:
    used = tuple(dict.fromkeys((0, 1, candidate.count - 1)))
    prefixes = {f"{candidate.experts[e]}.": e for e in used}
    others = tuple(f"{path}." for path in candidate.experts)
    parts: dict[int, list[Tensor]] = {e: [] for e in used}

    def values(path: str, parameter: Tensor) -> Tensor:
        expert = next((e for prefix, e in prefixes.items() if path.startswith(prefix)), None)
        if expert is None and path.startswith(others):
            return torch.empty(0, *parameter.shape[1:], device=HOST)
        tensor = drawn([sizes.get(size, size) for size in parameter.shape], generator)
        if expert is not None:
            parts[expert].append(tensor)
        return tensor

    return Sample(copied(candidate.module, values), candidate.count, used, parts)


def drawn(shape: list[int], generator: torch.Generator) -> Tensor:
    """Random values; a large tensor repeats a block of them, because drawing them would be slow."""
    size, block = math.prod(shape), 2**16 + 1
    values = torch.randn(min(size, block), generator=generator, device=HOST) * SCALE
    if size > block:
        values = values.repeat(-(-size // block))[:size]
    return values.view(shape)


def copied(module: nn.Module, values: Callable[[str, Tensor], Tensor], prefix: str = "") -> nn.Module:
    """A copy of a module tree with parameters `values(path, parameter)` and copied buffers; all else is shared."""
    new = copy.copy(module)
    parameters = {
        name: None if p is None else nn.Parameter(values(f"{prefix}{name}", p), requires_grad=False)
        for name, p in module._parameters.items()
    }
    buffers = {
        name: None
        if b is None
        else torch.ones(b.shape, dtype=b.dtype, device=HOST)
        if b.is_meta
        else b.clone()
        for name, b in module._buffers.items()
    }
    children = {
        name: None if child is None else copied(child, values, f"{prefix}{name}.")
        for name, child in module._modules.items()
    }
    vars(new).update(_parameters=parameters, _buffers=buffers, _modules=children)
    return new
