"""Subclasses of other libraries' classes, which import the library when they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from meshwright_dtensor.errors import UsageError


def subclass_on_first_use(
    name: str, mixin: type, library: str, base: str | None = None
) -> Callable[[str], Any]:
    """The `__getattr__` of a module (PEP 562) whose class `name` is `mixin` over a class of `library`.

    So the module can be imported where the library is missing. Raises UsageError then: the class is used.

    Args:
        base: "module:class" in the library; left out: the class `name` of the library itself.
    """
    place, _, base_name = (base or f"{library}:{name}").partition(":")

    def load(attribute: str) -> Any:
        if attribute != name:
            raise AttributeError(f"module {mixin.__module__!r} has no attribute {attribute!r}")
        try:
            base_class = getattr(import_module(place), base_name)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{mixin.__module__} needs {library}, and there is no module {error.name!r} here; "
                f"pip install 'meshwright[{library}]'"
            ) from error
        module = sys.modules[mixin.__module__]
        value = type(name, (mixin, base_class), {"__module__": mixin.__module__, "__doc__": mixin.__doc__})
        # pickle and later imports find it
        setattr(module, name, value)
        return value

    return load
