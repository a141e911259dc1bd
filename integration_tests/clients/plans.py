"""The plans that every client is run under, and how far its numbers are from those of one device."""

from __future__ import annotations

from typing import Any

import torch

PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "tp2": {"tp": 2},
    "zero3": {"zero": 3},
    "pp2": {"pp": 2},
}
"""Names, and keywords of mw.auto_parallelize on two ranks."""
LIMITS = {"no": 1e-5, "bf16": 5e-3}
"""By precision, the largest gap of a loss that is still rounding: bfloat16 has 8 bits."""


def plan_of(name: str, size: int) -> dict[str, Any]:
    """Keywords of mw.auto_parallelize on `size` ranks; one rank has nothing to divide."""
    return PLANS[name] if size > 1 else {}


def gap(numbers: Any, exact: Any) -> float:
    """The largest difference of two lists of numbers, relative to the largest magnitude of the second."""
    given, wanted = torch.tensor(numbers, dtype=torch.float64), torch.tensor(exact, dtype=torch.float64)
    return float((given - wanted).abs().max() / wanted.abs().max())


def check(results: list[dict[str, Any]], exact: dict[str, Any], limit: float) -> None:
    """Hold the numbers of all ranks to those of one device, of which a resumed run has the last ones."""
    for result in results:
        for name, numbers in result.items():
            wanted = exact[name][-len(numbers) :]
            if name in ("rates", "metrics", "best"):
                assert numbers == wanted, name
            elif numbers:
                # later numbers follow from several steps of rounding
                assert gap(numbers, wanted) < (1 if name == "losses" else 20) * limit, name
