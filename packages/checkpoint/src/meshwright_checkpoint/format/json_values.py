"""User's values as JSON and tensors, and back: exactly, or refused. Nothing is ever unpickled.

JSON has neither tuples, infinities nor keys that are no text; those, and tensors, become an object with one key that starts
with "$".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright_checkpoint.errors import CorruptError
from meshwright_dtensor.errors import UnsupportedError

MAX_DEPTH = 64


def encode(value: Any, put: Callable[[str, torch.Tensor], str], path: str, depth: int = 0) -> Any:
    """`value` as JSON. Tensors are handed to `put(path, tensor)`, which returns the key that stands for them.

    Raises:
        UnsupportedError: a value that has no exact form; the message has its path.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedError(f"{path} is nested more than {MAX_DEPTH} deep; keep less in it")
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": put(path, value)}
    if type(value) is list:
        return [encode(x, put, f"{path}.{i}", depth + 1) for i, x in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(x, put, f"{path}.{i}", depth + 1) for i, x in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(type(k) is str and not k.startswith("$") for k in value):
            return {k: encode(x, put, f"{path}.{k}", depth + 1) for k, x in value.items()}
        pairs = [
            [encode(k, put, f"{path} key", depth + 1), encode(x, put, f"{path}.{k}", depth + 1)]
            for k, x in value.items()
        ]
        return {"$items": pairs}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    for kind in (
        bool,
        int,
        float,
        str,
    ):  # an enum of text, a numpy float: not told apart from the plain value
        if isinstance(value, kind):
            return encode(kind(value), put, path, depth)
    if hasattr(value, "__array__") and not isinstance(value, type):
        raise UnsupportedError(
            f"{path} is of type {type(value).__name__}, which a checkpoint cannot hold; give torch.as_tensor({path})"
        )
    raise UnsupportedError(
        f"{path} is of type {type(value).__name__}, which a checkpoint cannot hold; use numbers, text, lists, tuples, dicts and "
        "tensors, such as the state_dict() of the object"
    )


def decode(value: Any, get: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """What :func:`encode` was given. Raises CorruptError for what it never writes."""
    if depth > 2 * MAX_DEPTH + 2:
        raise CorruptError("a value in the checkpoint is nested too deep")
    if isinstance(value, list):
        return [decode(x, get, depth + 1) for x in value]
    if not isinstance(value, dict):
        return value
    if not any(k.startswith("$") for k in value):
        return {k: decode(x, get, depth + 1) for k, x in value.items()}
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "$tensor" and isinstance(inner, str):
            return get(inner)
        if kind == "$tuple" and isinstance(inner, list):
            return tuple(decode(x, get, depth + 1) for x in inner)
        if kind == "$float" and inner in ("inf", "-inf", "nan"):
            return float(inner)
        if (
            kind == "$dtype"
            and isinstance(inner, str)
            and isinstance(getattr(torch, inner, None), torch.dtype)
        ):
            return getattr(torch, inner)
        if (
            kind == "$items"
            and isinstance(inner, list)
            and all(isinstance(p, list) and len(p) == 2 for p in inner)
        ):
            try:
                return {decode(k, get, depth + 1): decode(x, get, depth + 1) for k, x in inner}
            except TypeError:
                raise CorruptError("a key in the checkpoint is a list or dict") from None
    raise CorruptError(f"a value in the checkpoint has unknown form {ascii(value)[:100]}")
