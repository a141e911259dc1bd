"""Compare the tensors of two runs, each relative to its own largest magnitude."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist

from meshwright_dtensor.devices import HOST
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
"""Largest difference, relative to the tensor's largest value, that another order of summation may cause: about 100
roundings in float32, and 10 in 16-bit types, whose sums are rounded at every layer."""

NOISE_ROUNDINGS = 8
"""A tensor can be rounding noise only below this many roundings of the largest value of its kind."""

NOISE_SPREAD = 0.25
"""A tensor is rounding noise if one rounding of the initial weights changes it by more than this part of itself."""

NOISE_REACH = 16.0
"""Largest noise of the parallel run, in multiples of that on one device."""

Tensors = Mapping[str, torch.Tensor | None]
Key = tuple[int, Kind, str]


@torch.no_grad()
def whole(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The global value as a plain detached tensor (a collective call for distributed tensors)."""
    if tensor is None:
        return None
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.full_tensor()
    return tensor.detach()


@torch.no_grad()
def compare(
    step: int,
    kind: Kind,
    expected: Tensors,
    actual: Tensors,
    tolerance: float | None,
    *,
    perturbed: Tensors = MappingProxyType({}),
    reach: Mapping[str, float] = MappingProxyType({}),
    actual_only: bool = False,
) -> list[Comparison]:
    """One comparison per name of either side, in order; `actual` holds distributed or plain tensors.

    Args:
        tolerance: None for that of each tensor's dtype.
        perturbed: the tensors of a run on one device whose initial weights are one rounding away. A tensor that this
            changes completely is rounding noise, such as the gradient of an attention key's bias. It must stay as small.
        reach: name -> largest difference, for tensors that are no measure.
        actual_only: this rank holds some of the tensors only; other ranks compare the others.
    """
    largest: dict[str, float] = defaultdict(float)
    for name, tensor in expected.items():
        largest[_family(kind, name)] = max(largest[_family(kind, name)], magnitude(tensor))
    results = []
    for name in dict.fromkeys(actual if actual_only else [*expected, *actual]):
        want, got = expected.get(name), whole(actual.get(name))
        sample = want if want is not None else got
        if sample is None:
            continue
        limit = TOLERANCES.get(sample.dtype, 0.0) if tolerance is None else tolerance
        difference, note = max_difference(want, got)
        bound = reach.get(name)
        if bound is None and want is not None:
            bound = _noise_bound(want, perturbed.get(name), largest[_family(kind, name)])
        if bound is not None and not note:
            note = "no measure" if name in reach else "rounding noise only"
        dtype = str(sample.dtype).removeprefix("torch.")
        results.append(Comparison(step, kind, name, dtype, difference, magnitude(want), limit, note, bound))
    return results


def _noise_bound(want: torch.Tensor, perturbed: torch.Tensor | None, largest: float) -> float | None:
    """How large a tensor may be that is only rounding noise on one device; None for all others."""
    if perturbed is None or not _is_inexact(want) or perturbed.shape != want.shape:
        return None
    noise = max(magnitude(want), magnitude(perturbed))
    if noise > NOISE_ROUNDINGS * torch.finfo(want.dtype).eps * largest:
        return None
    spread, _ = max_difference(want, perturbed)
    return NOISE_REACH * noise if NOISE_SPREAD * noise < spread < math.inf else None


def _family(kind: Kind, name: str) -> str:
    """Tensors of one family have comparable values: all gradients, or the states of one key (exp_avg, step)."""
    return name.rpartition("/")[2] if kind == "state" else ""


@torch.no_grad()
def one_rounding_away(parameters: Iterable[torch.Tensor], dtype: torch.dtype | None = None) -> None:
    """Scale every element up or down by one rounding of `dtype`, by default the parameter's dtype, in place."""
    generator = torch.Generator().manual_seed(0)
    for parameter in parameters:
        if _is_inexact(parameter):
            up = torch.randint(0, 2, tuple(parameter.shape), generator=generator, device=HOST).to(
                parameter.device
            )
            # in the parameter's dtype: an integer tensor times a number is float32, which has no float64 rounding
            eps = torch.finfo(dtype or parameter.dtype).eps
            parameter.mul_(1 + eps * (2 * up - 1).to(parameter.dtype))


def merge_ranks(local: list[Comparison], is_staged: bool = False) -> list[Comparison]:
    """The same comparisons with the largest difference of any rank, on every rank.

    `is_staged`: ranks hold different tensors, and each comparison is made by at least one of them.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1 or not (local or is_staged):
        return local
    by_rank: list[dict[Key, Comparison]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(by_rank, {_key(c): c for c in local})
    results = []
    for key in dict.fromkeys(key for comparisons in by_rank for key in comparisons):
        entries = [(rank, comparisons[key]) for rank, comparisons in enumerate(by_rank) if key in comparisons]
        rank, worst = max(entries, key=lambda entry: entry[1].difference)
        difference, note = worst.difference, worst.note
        shown = f"{note} (rank {rank})" if math.isinf(difference) else note
        if len(entries) < len(by_rank) and not is_staged:
            missing = next(rank for rank, comparisons in enumerate(by_rank) if key not in comparisons)
            difference, shown = math.inf, f"missing on rank {missing}"
        results.append(replace(entries[0][1], difference=difference, note=shown))
    return results


def _key(comparison: Comparison) -> Key:
    return comparison.step, comparison.kind, comparison.name


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in double precision; complex numbers as two real ones."""
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).double()


def magnitude(tensor: torch.Tensor | None) -> float:
    """The largest finite magnitude of any element; 0 of an empty tensor."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    if tensor.is_floating_point() and tensor.element_size() > 1:
        low, high = (float(x) for x in torch.aminmax(tensor.detach()))
        # the usual case, five times as fast
        if math.isfinite(low) and math.isfinite(high):
            return max(-low, high)
    finite = torch.nan_to_num(_wide(tensor.detach()), nan=0.0, posinf=0.0, neginf=0.0)
    return float(finite.abs().max().item())


def max_difference(want: torch.Tensor | None, got: torch.Tensor | None) -> tuple[float, str]:
    """Largest absolute difference and "", or infinity and the reason."""
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
    # then every element of both is finite
    if math.isfinite(worst):
        return worst, ""
    mismatch = (torch.isfinite(a) != torch.isfinite(b)) | (torch.isnan(a) != torch.isnan(b))
    mismatch |= torch.isinf(a) & (a != b)
    if bool(mismatch.any()):
        return math.inf, f"{int(mismatch.sum())} elements are not finite on one side only"
    delta = torch.where(torch.isfinite(a), a - b, 0.0)
    return float(delta.abs().max().item()), ""
