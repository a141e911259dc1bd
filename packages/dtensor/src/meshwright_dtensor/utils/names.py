"""Names in messages: suggestions for misspelt names, and lists."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: object, options: Iterable[str]) -> str | None:
    """The option closest to `name`, or None if none is close."""
    text = str(name)
    options = list(options)
    close = difflib.get_close_matches(text, options, n=1)
    if close:
        return close[0]
    by_lower = {option.lower(): option for option in options}
    close = difflib.get_close_matches(text.lower(), list(by_lower), n=1)
    return by_lower[close[0]] if close else None


def suggestion(name: object, options: Iterable[str]) -> str:
    """ "; did you mean 'x'?" for the end of a message, "" if none is close."""
    close = did_you_mean(name, options)
    return f"; did you mean {close!r}?" if close else ""


def listing(names: Iterable[str], limit: int = 12) -> str:
    """`names` joined by commas, cut after `limit`; "none" if there are none."""
    names = list(names)
    shown = ", ".join(names[:limit])
    return f"{shown} and {len(names) - limit} more" if len(names) > limit else shown or "none"


def count_of(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks", "3 microbatches"."""
    plural = f"{noun}es" if noun.endswith(("s", "x", "ch")) else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def number_ranges(numbers: Iterable[int]) -> str:
    """ "0-3, 7"."""
    ordered = sorted(numbers)
    groups = itertools.groupby(enumerate(ordered), key=lambda item: item[1] - item[0])
    runs = ([number for _, number in group] for _, group in groups)
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def path_name(path: Iterable[Any]) -> str:
    """The path of a pytree leaf, its keys joined by dots ("0.image")."""
    return ".".join(map(_path_key, path))


def _path_key(part: Any) -> str:
    keys = (getattr(part, attribute, None) for attribute in ("key", "idx", "name"))
    return str(next((key for key in keys if key is not None), part))


def canonical(distribution: str) -> str:
    """The normalized name of a distribution (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution).lower()
