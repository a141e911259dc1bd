"""Names of the optimizers that a plan is made for, also of their classes. Imports no torch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright_dtensor.errors import UsageError

_CLASSES: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        **{("torch", name): name.lower() for name in ("AdamW", "Adam", "SGD", "Muon")},
        **{("bitsandbytes", name): name.lower() for name in ("AdamW", "Adam", "AdamW8bit")},
        ("bitsandbytes", "Adam8bit"): "adamw8bit",
        **{("torchao", name): "adamw8bit" for name in ("AdamW8bit", "Adam8bit", "AdamWFp8", "AdamFp8")},
        **{("torchao", name): "adamw4bit" for name in ("AdamW4bit", "Adam4bit")},
    }
)
"""(package, class) -> name. A subclass may do anything, so it is none of them."""

_ANYWHERE: Mapping[str, str] = MappingProxyType(
    {"Shampoo": "shampoo", "DistributedShampoo": "shampoo", "SOAP": "soap"}
)
"""The same for classes that users and many packages bring under one name."""


def optimizer_name(given: object) -> str:
    """The name of an optimizer: a name as it is, and that of a class of torch, bitsandbytes or torchao, or a partial of one.

    Raises UsageError: an optimizer that was made already, or a class that is not known.
    """
    if isinstance(given, str):
        return given
    options: dict[str, Any] = {}
    called = given
    while isinstance(called, functools.partial):
        options = {**called.keywords, **options}
        called = called.func
    if not isinstance(called, type):
        raise UsageError(
            f"optimizer is a {type(given).__name__} object; a plan is made before the model is made parallel, and an optimizer "
            "after that: give its class, or a name such as 'muon'"
        )
    name = _CLASSES.get((called.__module__.partition(".")[0], called.__name__)) or _ANYWHERE.get(
        called.__name__
    )
    if name is None:
        names = ", ".join(sorted({*_CLASSES.values(), *_ANYWHERE.values()}))
        raise UsageError(
            f"optimizer={called.__name__} of {called.__module__} is not known; give the name of one that keeps as much and needs "
            f"as much whole ({names}), and zero_unit for blocks of its own"
        )
    if options.get("block_size") is not None:
        raise UsageError(
            f"optimizer={called.__name__} with block_size={options['block_size']}: give the name {name!r}, and "
            f"zero_unit={options['block_size']}"
        )
    return f"{name}-momentum" if name == "sgd" and options.get("momentum") else name
