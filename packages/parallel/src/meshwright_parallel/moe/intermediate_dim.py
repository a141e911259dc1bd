"""Tensor parallelism inside experts: which dims can be sharded, proved by adding up the outputs of the parts.

An expert with an intermediate size F (gate and up project to it, down projects from it) is the sum of experts made of parts of
F. Which dims hold F once, or twice in a row or interleaved, is found by trying.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from meshwright_dtensor.devices import HOST
from meshwright_parallel.moe.probe import TOLERANCE, Proved
from meshwright_parallel.moe.probe_model import Candidate, Sample, copied, sample_of

Tensor = torch.Tensor
Cut = tuple[int, int]
"""(dim, number of its segments, each of which is sharded)"""
MAX_COMBINATIONS = 256
"""Combinations that are tried."""


def inner_states(candidate: Candidate, proved: Proved) -> dict[str, str]:
    """Parameter path -> state in which ranks hold parts of each expert; empty where that was not proved.

    A parameter without the intermediate dim is left out: one of the ranks adds it.
    """
    if candidate.kind != "fused":
        return {}
    factor = candidate.reduction()
    with torch.random.fork_rng(devices=()):
        sample = sample_of(candidate, proved.attributes, factor, torch.Generator().manual_seed(0))
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(4, proved.width // factor, generator=generator, device=HOST)
        first, second = sample.used[-1], sample.used[-2]
        chosen = torch.tensor([first, second, first, second], device=HOST)
        if proved.assignment == "mask":
            chosen = torch.nn.functional.one_hot(chosen, sample.count)
        arguments = (x, chosen[:, None], torch.rand(4, 1, generator=generator, device=HOST) + 0.5)
        for inner in sorted({size for size in sample.widths() if size % 2 == 0}):
            for cuts in itertools.islice(_combinations(candidate, sample, inner), MAX_COMBINATIONS):
                if _adds_up(sample, cuts, arguments):
                    segments = {1: "", 2: f"; {inner * factor}+{inner * factor}"}
                    return {path: f"S({dim}{segments[n]})" for path, (dim, n) in cuts.items()}
    return {}


def _combinations(candidate: Candidate, sample: Sample, inner: int) -> Iterator[dict[str, Cut]]:
    options: list[list[tuple[str, Cut] | None]] = []
    for path in candidate.experts:
        shape = sample.module.get_parameter(path).shape
        cuts: list[tuple[str, Cut] | None] = [
            (path, (dim, parts))
            for dim in range(1, len(shape))
            for size, parts in ((inner, 1), (2 * inner, 2), (2 * inner, 1))
            if shape[dim] == size
        ]
        if not cuts and len(shape) > 2:
            # a weight that every part would need whole
            return
        options.append(cuts or [None])
    for choice in itertools.product(*options):
        yield dict(cut for cut in choice if cut is not None)


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
    except Exception:
        # a module may reject parts with any error
        return False
    if whole.shape != added.shape:
        return False
    return bool((whole - added).abs().max() <= TOLERANCE * float(whole.abs().max()))
