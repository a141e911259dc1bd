"""Check what a distribution says about itself: license, classifiers, URLs, README, versions, dependencies."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from release.artifacts import Artifacts, ReleaseError, run

CLASSIFIERS = ("Programming Language :: Python :: 3.11", "Typing :: Typed")

IMPORTS: Mapping[str, str] = {"yaml": "pyyaml"}
"""Import name -> distribution, where they differ."""

BROUGHT: Mapping[str, str] = {"pydantic-core": "pydantic"}
"""Distribution -> the declared one that always brings it, with a version that fits."""

UNIMPORTED = frozenset({"numpy"})
"""Declared for torch, which needs it for `Tensor.numpy()` and does not declare it."""


def project(folder: Path) -> dict[str, Any]:
    """[project] of a folder's pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return table


def check_fields(artifacts: Artifacts, folder: Path) -> list[str]:
    """Check license, classifiers, Python versions and summary; return remarks that do not stop a release."""
    metadata = artifacts.metadata
    license_, classifiers = metadata["License-Expression"], metadata.get_all("Classifier") or []
    if license_ != "Apache-2.0" or metadata.get_all("License-File") != ["LICENSE"]:
        raise ReleaseError(
            f'{artifacts.name}: license {license_!r}; write license = "Apache-2.0" and license-files = ["LICENSE"]'
        )
    if missing := [text for text in CLASSIFIERS if text not in classifiers]:
        raise ReleaseError(f"{artifacts.name}: classifiers lack {missing}; add them to its pyproject.toml")
    if any(text.startswith("License ::") for text in classifiers):
        raise ReleaseError(
            f"{artifacts.name}: a classifier names a license too; license = ... is enough, remove it"
        )
    for field in ("Requires-Python", "Summary", "Description-Content-Type"):
        if not metadata[field]:
            raise ReleaseError(
                f"{artifacts.name}: no {field}; complete [project] in {folder.name}/pyproject.toml"
            )
    changelog = (folder / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changelog, re.MULTILINE)
    if newest is None or newest[1] != metadata["Version"]:
        raise ReleaseError(
            f"{artifacts.name}: version {metadata['Version']}, but its CHANGELOG begins with "
            f"{newest[1] if newest else 'no version'}; write a section '## {metadata['Version']}'"
        )
    urls = metadata.get_all("Project-URL") or []
    if bad := [url for url in urls if not url.partition(", ")[2].startswith("https://")]:
        raise ReleaseError(f"{artifacts.name}: project URLs that are not https: {bad}; correct them")
    return [] if urls else [f"{artifacts.name}: no [project.urls]; add them before the first upload"]


def check_readme(artifacts: Artifacts) -> None:
    """Render the README as a package index does, and refuse links that only work inside the repository."""
    run(sys.executable, "-m", "twine", "check", "--strict", artifacts.sdist, artifacts.wheel)
    text = artifacts.metadata.get_payload()
    relative = re.findall(r"\]\((?!https?://|#)([^)]+)\)", str(text))
    if relative:
        raise ReleaseError(
            f"{artifacts.name}: its README links to {relative[0]}, which is not there on a package index; "
            "name the file in words, or give the whole URL"
        )


def check_pins(folders: Mapping[str, Path]) -> None:
    """Every requirement on a package of this repository is the range of that package's present minor version."""
    versions = {name: Version(project(folder)["version"]) for name, folder in folders.items()}
    for name, folder in folders.items():
        table = project(folder)
        lines = [*table["dependencies"], *(x for xs in extras(table).values() for x in xs)]
        for requirement in map(Requirement, lines):
            version = versions.get(requirement.name)
            if version is None:
                continue
            text = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
            if requirement.specifier != Requirement(f"x{text}").specifier:
                raise ReleaseError(
                    f"{name} asks for {requirement}, and {requirement.name} is {version}: "
                    f'write "{requirement.name}{text}" in {folder.name}/pyproject.toml'
                )


def extras(table: Mapping[str, Any]) -> dict[str, list[str]]:
    """Extra -> its requirements."""
    return dict(table.get("optional-dependencies", {}))


def check_imports(name: str, folder: Path) -> None:
    """Everything that the sources import is declared, and everything that is declared is imported."""
    table = project(folder)
    required = {canonicalize_name(Requirement(line).name) for line in table["dependencies"]}
    optional = {canonicalize_name(Requirement(x).name) for xs in extras(table).values() for x in xs}
    used: dict[str, str] = {}
    for module, file in _imports(folder / "src"):
        top = module.split(".")[0]
        distribution = canonicalize_name(IMPORTS.get(top, top))
        if top not in sys.stdlib_module_names and distribution != canonicalize_name(name):
            used.setdefault(distribution, f"{file.relative_to(folder)}")
    for distribution, file in sorted(used.items()):
        if BROUGHT.get(distribution, distribution) not in required | optional:
            raise ReleaseError(
                f"{name}: {file} imports {distribution}, which it does not declare; "
                "add it to dependencies, or to an extra if the code works without it"
            )
    if unused := required - used.keys() - UNIMPORTED:
        # the meta-package brings packages that register themselves
        if name != "meshwright":
            raise ReleaseError(
                f"{name} declares {sorted(unused)} and imports none of it; remove it from dependencies"
            )


def _imports(source: Path) -> Iterator[tuple[str, Path]]:
    for file in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name, file) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module, file
