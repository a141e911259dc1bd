"""The layouts that every model is run in."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from architectures.layouts import Layout

LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "tp2": Layout(2, {"dp": 1, "tp": 2}),
        "zero3": Layout(2, {"dp": 2, "tp": 1, "zero": 3}),
        "pp2": Layout(2, {"pp": 2, "dp": 1}),
        "dp2 x tp2": Layout(4, {"dp": 2, "tp": 2}),
        "unpinned": Layout(2, {}),
    }
)
