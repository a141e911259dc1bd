"""Distributions on disk for tests: a dist-info folder and modules, found through importlib.metadata like any other."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path


def install(
    site: Path, name: str, entry_points: Mapping[str, str], modules: Mapping[str, str], version: str = "1.0"
) -> None:
    """Write a distribution into the folder `site`.

    entry_points: entry point name -> value, in the group "meshwright".
    modules: module name -> source. `hookimpl` and the records are imported for it.
    """
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = "".join(f"{point} = {value}\n" for point, value in entry_points.items())
    (info / "entry_points.txt").write_text(f"[meshwright]\n{lines}")
    for module, source in modules.items():
        header = "from meshwright_dtensor.plugins import *\nfrom meshwright_dtensor.plugins import hookimpl\n"
        (site / f"{module}.py").write_text(header + textwrap.dedent(source))


def strategy(name: str, axis: str = "cp", target: str = "math:sqrt") -> str:
    """The source of a plugin module that registers one strategy."""
    return (
        "@hookimpl\ndef meshwright_strategies():\n"
        f"    yield StrategySpec(name={name!r}, axis={axis!r}, target={target!r}, summary='for a test')\n"
    )
