"""Sizes of memory and times as text: "40GiB", "24 GB", "80e9", "12.3 ms". Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.names import did_you_mean

UNITS: Mapping[str, int] = MappingProxyType(
    {
        "B": 1,
        **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
        **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
    }
)
"""Unit -> bytes; upper and lower case are the same, and the B may be left out."""

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?(?:e\+?[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_MOST = 2**63 - 1


def parse_size(value: object, name: str = "size") -> int:
    """Bytes from a number, or from text such as "80GB", "512 MiB" or "80e9". `name`: of the option, for errors.

    Raises UsageError if `value` is no size, or not between 1 and 2**63 bytes.
    """
    example = "give bytes, or text such as '16GB' or '40GiB'"
    shown = f"{name}={value!r}"
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None:
            raise UsageError(f"{shown} is no size; {example}")
        number, unit = float(match[1]), match[2]
        by_lower = {unit.lower(): factor for unit, factor in UNITS.items()}
        factor = by_lower.get(unit.lower(), by_lower.get(f"{unit.lower()}b"))
        if factor is None:
            close = did_you_mean(unit, UNITS)
            hint = f"did you mean {close!r}?" if close else f"units are {', '.join(UNITS)}"
            raise UsageError(f"{shown}: {unit!r} is no unit of memory; {hint}; {example}")
        size = number * factor
    elif isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{shown} is no size; {example}")
    else:
        size = value
    if not 1 <= size <= _MOST:
        raise UsageError(
            f"{shown} is out of range: it must be at least one byte, and less than 2**63; {example}"
        )
    return int(size)


def human_bytes(size: float) -> str:
    """Text of a size in bytes: "1.5 GiB"."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def human_seconds(seconds: float) -> str:
    """Text of a time: "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
