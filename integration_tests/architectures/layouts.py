"""The layouts that every architecture is run in: pins of mw.plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

LAYOUTS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "tp2": MappingProxyType({"dp": 1, "tp": 2}),
        "dp2 x tp2": MappingProxyType({"dp": 2, "tp": 2}),
        "zero3 x 2": MappingProxyType({"dp": 2, "tp": 1, "zero": 3}),
    }
)


def world_size(layout: str) -> int:
    """The ranks of a layout."""
    return math.prod(LAYOUTS[layout][axis] for axis in ("dp", "tp"))
