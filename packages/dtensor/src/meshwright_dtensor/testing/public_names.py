"""The public names of modules, and the signatures of what plugins implement, as text for a file under version control.

    python -m meshwright_dtensor.testing.public_names MODULE... > public_names.txt

A test of each package compares the file with the code (`check_public_names`), so that no name changes by accident.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright_dtensor.plugins.hook_api import version_text
from meshwright_dtensor.plugins.hookspec import RECORD_TYPES, HookSpecs

OWN = "meshwright"


def public_names(modules: Sequence[str]) -> list[str]:
    """A line for each public name of the modules; with the module of hooks, their version and signatures in front."""
    lines: list[str] = []
    if "meshwright_dtensor.plugins" in modules:
        lines.append(f"hook API {version_text()}")
        lines += [f"hook {name}{inspect.signature(getattr(HookSpecs, name))}" for name in RECORD_TYPES]
    for name in modules:
        module = importlib.import_module(name)
        # a package that loads its names on first use lists them; their signatures are not those of hooks
        if "__all__" in vars(module) and "__getattr__" in vars(module):
            lines += [f"{name}.{attribute}" for attribute in sorted(module.__all__)]
        else:
            lines += _of_module(module)
    return lines


def _of_module(module: types.ModuleType) -> Iterator[str]:
    listed = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    for name in sorted(listed):
        value, where = getattr(module, name), f"{module.__name__}.{name}"
        # what a module, unlike a package, only imports is public elsewhere
        elsewhere = not hasattr(module, "__path__") and getattr(value, "__module__", "") != module.__name__
        if isinstance(value, types.ModuleType) or name == "annotations" or elsewhere:
            continue
        if isinstance(value, type):
            yield where
            if value.__module__.startswith(OWN):
                yield from (f"{where}.{line}" for line in _of_class(value))
        elif inspect.isfunction(value):
            yield f"{where}{inspect.signature(value)}"
        else:
            yield where


def _of_class(cls: type[Any]) -> list[str]:
    """Fields with types and defaults, and methods, of a class and of its bases in these packages."""
    members: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if base.__module__.startswith(OWN)]):
        for name, annotation in vars(base).get("__annotations__", {}).items():
            plain = isinstance(
                vars(base).get(name), (str, int, float, bool, tuple, type(None))
            ) and name in vars(base)
            members[name] = f"{name}: {annotation}{f' = {vars(base)[name]!r}' if plain else ''}"
        for name, value in vars(base).items():
            function = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if inspect.isfunction(function):
                members[name] = f"{name}{inspect.signature(function)}"
            elif isinstance(value, property):
                members[name] = f"{name}: property"
    return [line for name, line in sorted(members.items()) if not name.startswith("_")]


def check_public_names(file: Path, modules: Sequence[str]) -> None:
    """Raise AssertionError where `file` differs from the public names: what changed, and what to do about it."""
    before, now = file.read_text().splitlines(), public_names(modules)
    gone, new = ([line for line in a if line not in b] for a, b in ((before, now), (now, before)))
    if not gone and not new:
        return
    major, minor = map(int, version_text().split("."))
    if any(not line.startswith("hook API") for line in gone):
        rule = f"names or signatures that plugins and users have changed or are gone: hook API {major + 1}.0, if plugins use them"
    else:
        rule = f"names are new: hook API {major}.{minor + 1}, if plugins may use them"
    raise AssertionError(
        f"the public names differ from {file.name}\n"
        + "".join(f"  - {line}\n" for line in gone)
        + "".join(f"  + {line}\n" for line in new)
        + f"{rule} (HOOK_API in meshwright_dtensor/plugins/hook_api.py; the policy is in docs/plugins.md). If this is meant, say "
        f"it in the CHANGELOG and write the file again:\n"
        f"  python -m meshwright_dtensor.testing.public_names {' '.join(modules)} > {file}"
    )


if __name__ == "__main__":
    print("\n".join(public_names(sys.argv[1:])))
