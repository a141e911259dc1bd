"""The layouts that every architecture is run in: pins of mw.plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Layout:
    """How many ranks, and what of the plan is pinned; `fallback`: other pins, for models that these are refused for.

    backend: of compiled regions, if the plan has any.
    """

    ranks: int
    pins: dict[str, Any]
    fallback: dict[str, Any] = field(default_factory=dict)
    backend: str = "inductor"


def pipelined(ranks: int, schedule: str, microbatches: int = 4) -> Layout:
    """A pipeline over all ranks; with the whole batch at once, where several microbatches are not possible."""
    pins = {"pp": ranks, "dp": 1, "schedule": schedule, "microbatches": microbatches}
    return Layout(ranks, pins, {"microbatches": 1})


LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "tp2": Layout(2, {"dp": 1, "tp": 2}),
        "dp2 x tp2": Layout(4, {"dp": 2, "tp": 2}),
        "zero3 x 2": Layout(2, {"dp": 2, "tp": 1, "zero": 3}),
        "pp2": pipelined(2, "1f1b"),
    }
)

_COMPILED: dict[str, Any] = {"dp": 1, "tp": 2, "compile": True}
COMPILED: Mapping[str, Layout] = MappingProxyType(
    {
        # a model without repeated blocks: all of its parts
        "tp2 recorded": Layout(2, _COMPILED, {"compile": "*"}, "aot_eager"),
        "tp2 compiled": Layout(2, _COMPILED, {"compile": "*"}),
    }
)
"""With compiled regions: recorded and run operation by operation, and compiled by inductor."""
