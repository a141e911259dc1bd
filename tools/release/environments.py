"""Fresh environments: what is installed into them, in which versions, and how programs run there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from release.artifacts import ReleaseError, run

PIP = (sys.executable, "-m", "pip")


@dataclass(frozen=True)
class Environment:
    """A virtual environment without pip: that of the environment which runs this installs into it."""

    folder: Path

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @classmethod
    def fresh(cls, folder: Path, torch: Path) -> Environment:
        """A new environment that shares the torch in `torch` (see tools/install_wheels.py)."""
        venv.create(folder, clear=True, symlinks=True, with_pip=False)
        environment = cls(folder)
        (purelib,) = folder.glob("lib/python*/site-packages")
        (purelib / "shared_torch.pth").write_text(f"{torch}\n")
        return environment

    def install(self, requirements: Iterable[str | Path], constraints: Path | None = None) -> None:
        """Install, then check that everything that is installed fits together."""
        limits = ["--constraint", constraints] if constraints else []
        run(*PIP, "--python", self.python, "install", "-q", "--no-compile", *limits, *requirements)
        run(*PIP, "--python", self.python, "check")

    def installed(self) -> dict[str, str]:
        """Distribution -> version, in normalized names; the first on the path counts, as for imports."""
        code = (
            "import importlib.metadata as m, json; "
            "print(json.dumps([[d.metadata['Name'], d.version] for d in m.distributions()][::-1]))"
        )
        listed = json.loads(self.run("-c", code))
        return {canonicalize_name(name): version for name, version in listed}

    def run(self, *arguments: str | Path) -> str:
        """Run its Python away from the checkout, and return the output; ReleaseError if it fails."""
        command = [str(self.python), "-I", *map(str, arguments)]
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "MESHWRIGHT"))}
        environment |= {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1"}
        environment["PATH"] = f"{self.python.parent}{os.pathsep}{environment['PATH']}"
        process = subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if process.returncode:
            shown = " ".join(command)
            raise ReleaseError(f"exit status {process.returncode} of: {shown}\n{process.stdout.strip()}")
        return process.stdout


@cache
def available(name: str) -> tuple[Version, ...]:
    """The versions that the package index has wheels of for this Python, ascending."""
    text = run(*PIP, "index", "versions", "--only-binary", ":all:", name)
    match = re.search(r"^Available versions: (.*)$", text, re.MULTILINE)
    if match is None:
        raise ReleaseError(f"the package index names no versions of {name}: {text.strip()}")
    return tuple(sorted(map(Version, match[1].split(", "))))


def version_at(end: str, name: str, allowed: SpecifierSet) -> Version:
    """The "lowest" or "highest" allowed version that the package index has."""
    fitting = [version for version in available(name) if version in allowed]
    if not fitting:
        raise ReleaseError(f"no version of {name} on the package index is in {allowed}; correct its bounds")
    return fitting[0] if end == "lowest" else fitting[-1]


def allowed_versions(requirements: Iterable[str], siblings: Mapping[str, Path]) -> dict[str, SpecifierSet]:
    """Distribution -> the versions that all requirements on it allow; without those of this repository."""
    allowed: dict[str, SpecifierSet] = {}
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name not in siblings:
            allowed[name] = allowed.get(name, SpecifierSet()) & requirement.specifier
    return allowed


def missing_bounds(allowed: Mapping[str, SpecifierSet]) -> list[str]:
    """Remarks on lower bounds that the package index does not have, so that the next version is used."""
    remarks = []
    for name, specifiers in allowed.items():
        bounds = [Version(s.version) for s in specifiers if s.operator == ">="]
        if not bounds:
            raise ReleaseError(f"{name} has no lower bound; declare the lowest version that works")
        used = version_at("lowest", name, specifiers)
        if Version(used.public) != max(bounds):
            remarks.append(f"{name}: the package index has no {max(bounds)}, {used} is used in its place")
    return remarks
