"""The layouts that every architecture is run in: pins of mw.plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How many ranks, and what of the plan is pinned."""

    ranks: int
    pins: dict[str, Any]


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "tp2": Layout(2, {"dp": 1, "tp": 2}),
        "dp2 x tp2": Layout(4, {"dp": 2, "tp": 2}),
        "zero3 x 2": Layout(2, {"dp": 2, "tp": 1, "zero": 3}),
    }
)
