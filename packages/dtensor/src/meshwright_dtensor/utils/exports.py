"""Packages whose public names are loaded on first use (PEP 562), so that importing them and their plugins needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def load_on_first_use(
    package: str, exports: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """The `__all__`, `__getattr__` and `__dir__` of a package.

    exports: module (".errors" is one of the package) -> its names, as after `from module import`; "" is the module itself.
    """
    origins: dict[str, tuple[str, str]] = {}
    for module, names in exports.items():
        for name in names.split(","):
            attribute, _, alias = name.strip().partition(" as ")
            origins[alias or attribute or module.rpartition(".")[2]] = module, attribute
    namespace = vars(sys.modules[package])

    def load(name: str) -> Any:
        if name not in origins:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, attribute = origins[name]
        value: Any = import_module(module, package)
        # found directly from now on
        namespace[name] = value = getattr(value, attribute) if attribute else value
        return value

    return list(origins), load, lambda: sorted({*namespace, *origins})
