"""Values that are made once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Memo:
    """Values by key, kept as long as the memo is."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made when it is first asked for."""
        if key not in self._made:
            self._made[key] = make()
        return cast("T", self._made[key])
