"""Inputs that are nearly right: bytes that are changed, and values of JSON that are."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

BYTES = (b"\0", b"\xff", b"{", b"[", b'"', b"-", b"1e999", b"\n", b"../", b"\xef\xbb\xbf", b"null", b"9" * 30)
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, float("nan"), float("inf"),
    "", "\0", "../../etc/passwd", "/", "é\U0001f600\ud800", "x" * 300, "__class__", "1", "nan",
    [], {}, [[]], [None], {"": None}, [1, "1"], {"a": {"b": [{}]}}, ["x"] * 50,
)  # fmt: skip
DEPTH = 100_000


def changed_bytes(data: bytes, choose: random.Random) -> bytes:
    """`data` with one to four places changed, cut out or filled."""
    for _ in range(choose.randint(1, 4)):
        at = choose.randrange(len(data) + 1)
        kind = choose.randrange(7)
        if kind == 0:
            data = data[:at] + bytes([choose.randrange(256)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + choose.randrange(1, 9) :]
        elif kind == 2:
            data = data[:at] + choose.choice(BYTES) + data[at:]
        elif kind == 3:
            data = data[:at]
        elif kind == 4:
            end = at + choose.randrange(1, 60)
            data = data[:end] + data[at:end] + data[end:]
        elif kind == 5 and data:
            bit = choose.randrange(8 * len(data))
            data = data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]
        else:
            data = data[:at] + choose.randbytes(choose.randrange(1, 9)) + data[at:]
    return data


def changed_value(value: Any, choose: random.Random) -> Any:
    """A value of JSON with one to three of its places changed: another value, one of elsewhere, none, or one too many."""
    value = copy.deepcopy(value)
    for _ in range(choose.randint(1, 3)):
        places = list(_places(value))
        if not places:
            return choose.choice(VALUES)
        container, key = choose.choice(places)
        kind = choose.randrange(6)
        if kind == 0:
            del container[key]
        elif kind == 1:
            other, other_key = choose.choice(places)
            if other_key in other if isinstance(other, dict) else other_key < len(other):
                container[key] = copy.deepcopy(other[other_key])
        elif kind == 2 and isinstance(container, dict):
            container[choose.choice(["", "x", key + key, "__init__", key.upper()])] = container.pop(key)
        elif kind == 3 and isinstance(container, list):
            container[key:key] = [copy.deepcopy(container[key])] * choose.choice([1, 3])
        elif kind == 4 and isinstance(container[key], (int, float)) and not isinstance(container[key], bool):
            container[key] = choose.choice([-1, 1]) * container[key] * choose.choice([0, 1, 2, 10**9])
        else:
            container[key] = copy.deepcopy(choose.choice(VALUES))
    return value


def changed_json(value: Any, choose: random.Random) -> bytes:
    """JSON text of a changed value, or changed JSON text, or brackets without end."""
    kind = choose.randrange(40)
    if kind == 0:
        return choose.choice([b"[", b'{"a":']) * DEPTH
    if kind < 12:
        return changed_bytes(json.dumps(value).encode(), choose)
    return json.dumps(changed_value(value, choose)).encode()


def _places(value: Any) -> Any:
    """(container, key) of all values inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from _places(inner)
