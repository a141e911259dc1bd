"""How a check ends: `Nonconformance` with a sentence, `NotChecked` with a reason, or nothing. Imports no pytest."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright_dtensor.plugins import PluginHost, Registered
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.utils.names import canonical


class Nonconformance(AssertionError):
    """A plugin breaks a rule: what is wrong, the rule, the fix."""


class NotChecked(Exception):
    """A check cannot run here: the reason."""


@dataclass(frozen=True)
class Tools:
    """What checks use.

    Attributes:
        host: the installed plugins.
        pool: real ranks, on request.
        path: an empty place for checkpoints.
    """

    host: PluginHost
    pool: Callable[[], RankPool]
    path: str

    def place(self, plugin: Registered[Any], name: str) -> str:
        """The path of a checkpoint that does not exist yet, the same for equal arguments."""
        return f"{self.path.rstrip('/')}/{canonical(plugin.name)}-{name}"


Check = Callable[[Registered[Any], Tools], None]


def require(condition: object, plugin: Registered[Any], wrong: str, fix: str) -> None:
    """Raise Nonconformance unless `condition`. `wrong`: the value and the rule; `fix`: what to do."""
    if not condition:
        raise Nonconformance(f"{plugin.record.kind} {plugin.name!r} of {plugin.distribution}: {wrong}; {fix}")


def told(plugin: Registered[Any], doing: str, fix: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call of the plugin. An exception is a Nonconformance that says what was asked."""
    try:
        return call(*arguments)
    except (Nonconformance, NotChecked):
        raise
    except Exception as error:
        shown = f"{type(error).__name__}: {' '.join(str(error).split())}"
        text = f"{plugin.record.kind} {plugin.name!r} of {plugin.distribution}: {doing} raised {shown}; {fix}"
        raise Nonconformance(text) from error


def instance(plugin: Registered[Any], base: type[Any], where: str) -> Any:
    """An object of the plugin's target, which has to be a subclass of `base` that takes no arguments."""
    target = told(plugin, "loading its target", "correct the target", plugin.load)
    shown = getattr(target, "__name__", repr(target))
    require(
        isinstance(target, type) and issubclass(target, base),
        plugin,
        f"its target {plugin.record.target!r} is {shown}, which does not derive from {base.__name__}",
        f"write class {shown if isinstance(target, type) else 'Name'}({base.__name__}), from {where}",
    )
    missing = sorted(getattr(target, "__abstractmethods__", ()))
    require(
        not missing,
        plugin,
        f"{shown} does not define {', '.join(missing)}",
        f"add it, as {base.__name__} says",
    )
    made = told(
        plugin, f"{shown}()", "the class is called without arguments; give each of them a default", target
    )
    require(
        getattr(made, "name", None) == plugin.name,
        plugin,
        f"{shown}.name is {getattr(made, 'name', None)!r}, and its record says {plugin.name!r}",
        f"set name = {plugin.name!r}, since plans find it by that name",
    )
    return made


def sibling(package: str, purpose: str) -> Any:
    """A package that the core does not depend on. NotChecked where it is not installed."""
    if importlib.util.find_spec(package.partition(".")[0]) is None:
        name = package.partition(".")[0].replace("_", "-")
        raise NotChecked(f"{purpose} needs {name}, which is not installed: pip install {name}")
    return importlib.import_module(package)
