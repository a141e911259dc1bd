"""What a host holds: a record with who registered it, and what was left out as broken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .records import Record

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class Registered(Generic[R]):
    """A record and who registered it."""

    record: R
    distribution: str
    version: str
    entry_point: str

    @property
    def name(self) -> str:
        """The record's name."""
        return self.record.name

    def load(self) -> Any:
        """Import and return the record's target. PluginError names distribution, target and fix."""
        return self.record.load(self.distribution)


@dataclass(frozen=True)
class Problem:
    """A plugin, or a part of one, that was left out, and why."""

    distribution: str
    version: str
    entry_point: str
    reason: str

    def __str__(self) -> str:
        who = f"{self.distribution} {self.version}".strip()
        return (
            f"{who} (entry point {self.entry_point!r}): {self.reason}"
            if self.entry_point
            else f"{who}: {self.reason}"
        )
