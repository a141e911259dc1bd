"""User values <-> JSON and tensors: exact, or an error. Nothing is unpickled.

JSON has no tuples, infinities, tensors, or keys that are not text. They become an object with one key that starts with "$".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright_checkpoint.errors import CorruptError
from meshwright_dtensor.errors import UnsupportedError

MAX_DEPTH = 64
Put = Callable[[str, torch.Tensor], str]


def encode(value: Any, put: Put, path: str, depth: int = 0) -> Any:
    """`value` as JSON. `put(path, tensor)` stores a tensor and returns its key.

    Raises UnsupportedError: a value cannot be stored exactly; the message has its path.
    """
    if depth > MAX_DEPTH:
        raise UnsupportedError(f"{path} is nested more than {MAX_DEPTH} levels deep; flatten it")
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
        return _encode_mapping(value, put, path, depth + 1)
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    # subclasses, such as enums of text and numpy floats, are stored as the plain value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return encode(kind(value), put, path, depth)
    if hasattr(value, "__array__") and not isinstance(value, type):
        fix = f"pass torch.as_tensor({path})"
    else:
        fix = "use numbers, text, lists, tuples, dicts and tensors, such as the state_dict() of the object"
    raise UnsupportedError(f"{path} is of type {type(value).__name__}, which a checkpoint cannot hold; {fix}")


def _encode_mapping(value: Mapping[Any, Any], put: Put, path: str, depth: int) -> dict[str, Any]:
    if all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode(x, put, f"{path}.{key}", depth) for key, x in value.items()}
    pairs = [
        [encode(key, put, f"{path} key", depth), encode(x, put, f"{path}.{key}", depth)]
        for key, x in value.items()
    ]
    return {"$items": pairs}


def decode(value: Any, get: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """Inverse of :func:`encode`; `get` returns the tensor of a key. Raises CorruptError for any other JSON."""
    if depth > 2 * MAX_DEPTH + 2:
        raise CorruptError("a value in the checkpoint is nested too deep")

    def nested(x: Any) -> Any:
        return decode(x, get, depth + 1)

    if isinstance(value, list):
        return [nested(x) for x in value]
    if not isinstance(value, dict):
        return value
    if not any(k.startswith("$") for k in value):
        return {k: nested(x) for k, x in value.items()}
    if len(value) == 1:
        ((kind, inner),) = value.items()
        if kind == "$tensor" and isinstance(inner, str):
            return get(inner)
        if kind == "$tuple" and isinstance(inner, list):
            return tuple(map(nested, inner))
        if kind == "$items" and _is_pairs(inner):
            try:
                return {nested(k): nested(x) for k, x in inner}
            except TypeError:
                raise CorruptError("a key in the checkpoint is a list or dict") from None
        if (scalar := _decode_scalar(kind, inner)) is not None:
            return scalar
    raise CorruptError(f"a value in the checkpoint has unknown form {ascii(value)[:100]}")


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value)


def _decode_scalar(kind: str, text: Any) -> float | torch.dtype | None:
    if kind == "$float" and text in ("inf", "-inf", "nan"):
        return float(text)
    dtype = getattr(torch, text, None) if kind == "$dtype" and isinstance(text, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None
