"""Subclasses of other libraries' classes, which import the library when they are used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from meshwright_dtensor.errors import UsageError


def subclass_on_first_use(name: str, mixin: type, library: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module (PEP 562) whose class `name` is `mixin` over the class of that name in `library`.

    So the module can be imported where the library is missing. Raises UsageError then: the class is used.
    """

    def load(attribute: str) -> Any:
        if attribute != name:
            raise AttributeError(f"module {mixin.__module__!r} has no attribute {attribute!r}")
        try:
            base = getattr(import_module(library), name)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{mixin.__module__} needs {library}, and there is no module {error.name!r} here; "
                f"pip install 'meshwright[{library}]'"
            ) from error
        module = sys.modules[mixin.__module__]
        value = type(name, (mixin, base), {"__module__": mixin.__module__, "__doc__": mixin.__doc__})
        # pickle and later imports find it
        setattr(module, name, value)
        return value

    return load
