"""Build the sdist of each package, and its wheel from the sdist and from the tree; look into both."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesParser
from pathlib import Path, PurePosixPath


class ReleaseError(Exception):
    """What a release must not have: the value, the rule and the fix."""


@dataclass(frozen=True)
class Artifacts:
    """What is uploaded for one package. `wheel` was built from `sdist`."""

    name: str
    sdist: Path
    wheel: Path

    @property
    def metadata(self) -> Message:
        """METADATA of the wheel."""
        with zipfile.ZipFile(self.wheel) as archive:
            (member,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
            return BytesParser().parsebytes(archive.read(member))

    @property
    def wheel_files(self) -> dict[str, str]:
        """Name -> hash of the content of each file in the wheel."""
        return contents(self.wheel)

    @property
    def sdist_files(self) -> set[str]:
        """Names in the sdist, relative to its one folder."""
        with tarfile.open(self.sdist) as archive:
            return {str(PurePosixPath(*PurePosixPath(m.name).parts[1:])) for m in archive if m.isfile()}


def contents(wheel: Path) -> dict[str, str]:
    """Name -> hash of the content of each file in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def run(*arguments: str | Path, cwd: Path | None = None) -> str:
    """Run a command without a shell and return its output; ReleaseError with all of it if it fails."""
    process = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=None,
    )
    if process.returncode:
        shown = " ".join(map(str, arguments))
        raise ReleaseError(f"exit status {process.returncode} of: {shown}\n{process.stdout.strip()}")
    return process.stdout


def build(name: str, folder: Path, out: Path) -> Artifacts:
    """The sdist of a package, and the wheel that is built from it.

    Raises ReleaseError where a wheel that is built from the tree differs: a file is missing in the sdist.
    """
    shutil.rmtree(out, ignore_errors=True)
    # hatchling is the build backend of every package; the environment that runs this has it
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=folder)
    (sdist,) = out.glob("*.tar.gz")
    wheels = []
    for source, target in ((sdist, out), (folder, out / "tree")):
        pip = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir")
        run(sys.executable, *pip, "--wheel-dir", target, source)
        (wheel,) = target.glob("*.whl")
        wheels.append(wheel)
    from_sdist, from_tree = map(contents, wheels)
    if from_sdist != from_tree:
        different = sorted(set(from_sdist.items()) ^ set(from_tree.items()))
        names = ", ".join(sorted({name for name, _ in different})[:5])
        raise ReleaseError(
            f"{name}: the wheel from its sdist differs from that of the tree in {names}; "
            "add the files to [tool.hatch.build.targets.sdist] of its pyproject.toml"
        )
    return Artifacts(name, sdist, wheels[0])


def check_contents(artifacts: Artifacts) -> None:
    """The wheel has the package, its types marker and the license; the sdist has the tests and the changelog too."""
    root = artifacts.name.replace("-", "_")
    info = f"{artifacts.wheel.name.rsplit('-', 3)[0]}.dist-info"
    wheel = set(artifacts.wheel_files)
    missing = {f"{root}/__init__.py", f"{root}/py.typed", f"{info}/licenses/LICENSE"} - wheel
    foreign = {name for name in wheel if name.split("/")[0] not in (root, info)}
    needed = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    lacking = needed - artifacts.sdist_files
    if not any(name.startswith("tests/") for name in artifacts.sdist_files):
        lacking.add("tests/")
    wrong = {
        "the wheel lacks": missing,
        "the wheel has files outside of its package:": foreign,
        "the sdist lacks": lacking,
    }
    for text, names in wrong.items():
        if names:
            shown = ", ".join(sorted(names)[:5])
            raise ReleaseError(f"{artifacts.name}: {text} {shown}; see [tool.hatch.build] of its pyproject")
