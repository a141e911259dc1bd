"""Experts that are divided inside: proved by adding up what the parts of one size give.

An expert with an inner size F (gate and up project into it, down out of it) is the sum of the experts made of its parts. Which
dims hold F, alone or two of it in a row or interleaved, is found by trying.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from meshwright_parallel.moe.probe import TOLERANCE, Found, kept_generator
from meshwright_parallel.moe.probe_model import Candidate, Sample, copied, sample_of

Tensor = torch.Tensor
Cut = tuple[int, int]
"""(dim, how many segments of it are each cut in two)"""
MOST = 256
"""Combinations that are tried."""


def inner_cuts(candidate: Candidate, found: Found) -> dict[str, str]:
    """Parameter path -> state in which ranks hold parts of each expert; empty where that was not proved.

    A parameter that has no part of the inner size is left out: it counts once, on one of the ranks.
    """
    if candidate.kind != "fused":
        return {}
    factor = candidate.reduction()
    with kept_generator():
        sample = sample_of(candidate, found.attributes, factor, torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4, found.width // factor, generator=generator)
        first, second = sample.used[-1], sample.used[-2]
        chosen = torch.tensor([first, second, first, second])
        if found.assignment == "mask":
            chosen = torch.nn.functional.one_hot(chosen, sample.count)
        arguments = (x, chosen[:, None], torch.rand(4, 1, generator=generator) + 0.5)
        for inner in sorted({size for size in sample.widths() if size % 2 == 0}):
            for cuts in itertools.islice(_combinations(candidate, sample, inner), MOST):
                if _adds_up(sample, cuts, arguments):
                    return {path: _text(cut, inner * factor) for path, cut in cuts.items()}
    return {}


def _combinations(candidate: Candidate, sample: Sample, inner: int) -> Iterator[dict[str, Cut]]:
    options: list[list[tuple[str, Cut] | None]] = []
    for path in candidate.experts:
        shape = sample.module.get_parameter(path).shape
        ways: list[tuple[str, Cut] | None] = [
            (path, (dim, parts))
            for dim in range(1, len(shape))
            for size, parts in ((inner, 1), (2 * inner, 2), (2 * inner, 1))
            if shape[dim] == size
        ]
        if not ways and len(shape) > 2:
            return  # a weight that every part would need whole
        options.append(ways or [None])
    for choice in itertools.product(*options):
        yield dict(way for way in choice if way is not None)


def _adds_up(sample: Sample, cuts: Mapping[str, Cut], arguments: tuple[Tensor, ...]) -> bool:
    def part(rank: int) -> Tensor:
        def values(path: str, parameter: Tensor) -> Tensor:
            if path not in cuts:
                return parameter.detach() if rank == 0 else torch.zeros_like(parameter)
            dim, segments = cuts[path]
            return torch.cat([s.chunk(2, dim)[rank] for s in parameter.detach().chunk(segments, dim)], dim)

        return copied(sample.module, values)(*arguments)  # type: ignore[no-any-return]

    try:
        with torch.no_grad():
            whole = sample.module(*arguments)
            added = part(0) + part(1)
    except Exception:  # whatever a module says to parts that it cannot use
        return False
    return whole.shape == added.shape and bool(
        (whole - added).abs().max() <= TOLERANCE * float(whole.abs().max())
    )


def _text(cut: Cut, inner: int) -> str:
    dim, segments = cut
    return f"S({dim})" if segments == 1 else f"S({dim}; {inner}+{inner})"
