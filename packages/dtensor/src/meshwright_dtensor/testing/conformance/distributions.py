"""Checks of a distribution: its entry points, the hook API that it is written for, what its plugin module imports."""

from __future__ import annotations

import importlib.metadata

from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.plugins.hook_api import DECLARATION, version_text
from meshwright_dtensor.plugins.hookspec import GROUP
from meshwright_dtensor.testing.conformance.report import Nonconformance
from meshwright_dtensor.utils.names import canonical

IMPORT = """
import importlib.metadata, sys
from meshwright_dtensor.plugins import PluginHost
points = [p for p in importlib.metadata.entry_points(group="meshwright") if p.dist is not None and p.dist.name == sys.argv[1]]
PluginHost.build(points)
sys.exit(3 if "torch" in sys.modules else 0)
"""
"""A program that finds the records of the distribution that is its argument, and ends with 3 if that has imported torch."""


def check_problems(distribution: str, host: PluginHost) -> None:
    """The host left nothing of the distribution out."""
    for problem in host.problems:
        if canonical(problem.distribution) == canonical(distribution):
            raise Nonconformance(
                f"{problem} (left out by the plugin host; `meshwright plugins` shows it too)"
            )


def check_declaration(distribution: str) -> None:
    """Each plugin module says which hook API it is written for."""
    for point in importlib.metadata.entry_points(group=GROUP):
        if point.dist is None or canonical(point.dist.name) != canonical(distribution):
            continue
        if not hasattr(point.load(), DECLARATION):
            raise Nonconformance(
                f"{distribution} (entry point {point.name!r}): {point.value} does not say which hook API it is written for; "
                f'add the line {DECLARATION} = "{version_text()}" to it, so that other hosts can refuse it with a reason'
            )


def check_import(distribution: str, status: int, output: str) -> None:
    """The program `IMPORT` ended with `status`: its plugin modules import no torch, records are found."""
    if status == 3:
        raise Nonconformance(
            f"{distribution}: its plugin module imports torch, and every command of meshwright would wait for that; "
            "import torch in the modules that the targets name, not in the one that yields the records"
        )
    if status:
        last = output.strip().splitlines()[-1] if output.strip() else f"exit status {status}"
        raise Nonconformance(
            f"{distribution}: finding its records fails in a new process ({last}); correct that"
        )
