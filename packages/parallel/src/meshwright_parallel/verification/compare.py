"""Compare the tensors of two runs, each relative to its own largest magnitude."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_parallel.verification.report import Comparison, Kind

TOLERANCES: Mapping[torch.dtype, float] = MappingProxyType(
    {
        torch.float64: 1e-11,
        torch.complex128: 1e-11,
        torch.float32: 1e-5,
        torch.complex64: 1e-5,
        torch.float16: 1e-2,
        torch.bfloat16: 6e-2,
    }
)
"""Largest difference, relative to the tensor's largest value, that summation order may cause in a model of ordinary
depth: about 100 roundings in float32, 10 in the half types, whose sums are rounded at every layer."""

NOISE_ROUNDINGS = 8
"""A tensor can be rounding noise only below this many roundings of the largest value of its kind."""

NOISE_SPREAD = 0.25
"""A tensor is rounding noise where one rounding of the initial weights moves it by more than this part of itself."""

NOISE_REACH = 16.0
"""How many times the noise of one device that of the parallel run may be."""

Tensors = Mapping[str, torch.Tensor | None]
Key = tuple[int, Kind, str]


@torch.no_grad()
def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The global value as a plain detached tensor (a collective call for tensors that lie on a mesh)."""
    if tensor is None:
        return None
    if isinstance(tensor, (DTensor, GlobalTensor)):
        tensor = tensor.full_tensor()
    return tensor.detach()


@torch.no_grad()
def compare(
    step: int,
    kind: Kind,
    expected: Tensors,
    found: Tensors,
    tolerance: float | None,
    *,
    neighbour: Tensors = MappingProxyType({}),
    reach: Mapping[str, float] = MappingProxyType({}),
    found_only: bool = False,
) -> list[Comparison]:
    """One comparison per name of either side, in order; `found` holds tensors that lie on a mesh, or plain ones.

    Args:
        tolerance: None for that of each tensor's dtype.
        neighbour: the tensors of a run on one device whose initial weights are one rounding away. What that changes
            beyond recognition holds rounding noise only (an attention key's bias has no gradient but that), and is
            held to stay that small.
        reach: name -> largest difference, for tensors that are no measure.
        found_only: this rank holds only a part of the tensors; the others are for other ranks to compare.
    """
    largest = _largest(kind, expected)
    results = []
    for name in dict.fromkeys(found if found_only else [*expected, *found]):
        want, got = expected.get(name), whole(found.get(name))
        sample = want if want is not None else got
        if sample is None:
            continue
        limit = TOLERANCES.get(sample.dtype, 0.0) if tolerance is None else tolerance
        difference, note = apart(want, got)
        bound = reach.get(name)
        if bound is None and want is not None:
            bound = _noise(want, neighbour.get(name), largest[_family(kind, name)])
        if bound is not None and not note:
            note = "no measure" if name in reach else "rounding noise only"
        dtype = str(sample.dtype).removeprefix("torch.")
        results.append(Comparison(step, kind, name, dtype, difference, magnitude(want), limit, note, bound))
    return results


def _noise(want: torch.Tensor, near: torch.Tensor | None, largest: float) -> float | None:
    """How large a tensor may be that is nothing but rounding noise on one device; None for all others."""
    if near is None or not _rounds(want) or near.shape != want.shape:
        return None
    noise = max(magnitude(want), magnitude(near))
    if noise > NOISE_ROUNDINGS * torch.finfo(want.dtype).eps * largest:
        return None
    spread, _ = apart(want, near)
    return NOISE_REACH * noise if NOISE_SPREAD * noise < spread < math.inf else None


def _family(kind: Kind, name: str) -> str:
    """Tensors of one family have values of one kind: all gradients, or the states of one key (exp_avg, step)."""
    return name.rpartition("/")[2] if kind == "state" else ""


def _largest(kind: Kind, tensors: Tensors) -> dict[str, float]:
    largest: dict[str, float] = {}
    for name, tensor in tensors.items():
        family = _family(kind, name)
        largest[family] = max(largest.get(family, 0.0), magnitude(tensor))
    return largest


@torch.no_grad()
def one_rounding_away(parameters: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """Scale every element up or down by one rounding, in place: of its own dtype, or of `dtype`."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        if _rounds(parameter):
            up = torch.randint(0, 2, tuple(parameter.shape), generator=generator).to(parameter.device)
            # in the parameter's own dtype: an integer tensor times a number is float32, which knows no float64 rounding
            eps = torch.finfo(dtype or parameter.dtype).eps
            parameter.mul_(1 + eps * (2 * up - 1).to(parameter.dtype))


def farthest_move(before: Tensors, after: Tensors) -> dict[str, float]:
    """Name -> largest change of any element."""
    return {
        name: magnitude(new - old)
        for name, old in before.items()
        if old is not None and (new := after[name]) is not None
    }


def agreed(mine: list[Comparison], divided: bool = False) -> list[Comparison]:
    """The same comparisons with the largest difference of any rank, on every rank.

    `divided`: ranks hold different tensors, and each comparison has to be made by one of them at least.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not (mine or divided):
        return mine
    everyone: list[dict[Key, Comparison]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, {_key(c): c for c in mine})
    results = []
    for key in dict.fromkeys(key for theirs in everyone for key in theirs):
        entries = [(rank, theirs[key]) for rank, theirs in enumerate(everyone) if key in theirs]
        rank, worst = max(entries, key=lambda entry: entry[1].difference)
        difference, note = worst.difference, worst.note
        shown = f"{note} (rank {rank})" if math.isinf(difference) else note
        if len(entries) < len(everyone) and not divided:
            lack = next(rank for rank, theirs in enumerate(everyone) if key not in theirs)
            difference, shown = math.inf, f"missing on rank {lack}"
        results.append(replace(entries[0][1], difference=difference, note=shown))
    return results


def uncompared(
    made: Iterable[Comparison], step: int, kind: Kind, expected: Iterable[str], dtype: str
) -> list[Comparison]:
    """A failure for every name of `expected` that no rank has compared."""
    names = {c.name for c in made if c.step == step and c.kind == kind}
    missing = (name for name in expected if name not in names)
    return [Comparison(step, kind, name, dtype, math.inf, 0.0, 0.0, "on no rank", None) for name in missing]


def _key(comparison: Comparison) -> Key:
    return comparison.step, comparison.kind, comparison.name


def _rounds(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In double precision, a complex number as its two parts."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def magnitude(tensor: torch.Tensor | None) -> float:
    """The largest finite magnitude of any element, 0 of none."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    if tensor.is_floating_point() and tensor.element_size() > 1:
        low, high = (float(x) for x in torch.aminmax(tensor.detach()))
        if math.isfinite(low) and math.isfinite(high):  # nearly always, and in a fifth of the time
            return max(-low, high)
    finite = torch.nan_to_num(_wide(tensor.detach()), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max().item())


def apart(want: torch.Tensor | None, got: torch.Tensor | None) -> tuple[float, str]:
    """Largest absolute difference, or infinity and what is wrong."""
    if want is None or got is None:
        if want is got:
            return 0.0, ""
        return math.inf, "missing in the parallel run" if got is None else "missing on one device"
    if want.shape != got.shape:
        return math.inf, f"shape {tuple(got.shape)} instead of {tuple(want.shape)}"
    if want.dtype != got.dtype:
        return math.inf, f"{got.dtype} instead of {want.dtype}"
    if want.numel() == 0:
        return 0.0, ""
    a, b = _wide(want), _wide(got.to(want.device))
    worst = float((a - b).abs_().max())
    if math.isfinite(worst):  # then so is every element of both
        return worst, ""
    unlike = (
        (torch.isfinite(a) != torch.isfinite(b))
        | (torch.isnan(a) != torch.isnan(b))
        | (torch.isinf(a) & (a != b))
    )
    if bool(unlike.any()):
        return math.inf, f"{int(unlike.sum())} elements are not finite on one side only"
    delta = torch.where(torch.isfinite(a), a - b, 0.0)
    return float(delta.abs().max().item()), ""
