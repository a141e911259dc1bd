"""Build wheels of this repository's packages and install them into the environment that runs this script.

    python tools/install_wheels.py meshwright-parallel
    python tools/install_wheels.py "meshwright[demo]" meshwright-sample-vocabulary

The named distributions and the siblings that their metadata asks for are built (once for each state of the sources, into
.tox/wheels) and installed from those files; everything else comes from the package index under constraints.txt. Nothing
undeclared is installed, so a package that forgets a dependency fails its tests.

All environments share one torch, which is installed once, into .tox: what they declare alike takes longest to install, and
longer still to compile at its first import.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (*sorted((ROOT / "packages").iterdir()), ROOT / "integration_tests" / "sample_plugin")


def distributions() -> dict[str, Path]:
    """Distribution name -> its folder, for every package of this repository."""
    return {
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"]: folder
        for folder in SOURCES
        if (folder / "pyproject.toml").exists()
    }


def closure(names: list[str], folders: dict[str, Path]) -> list[str]:
    """The named distributions and every sibling that they declare, directly or through another."""
    names_needed: list[str] = []
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in folders:
            sys.exit(
                f"{name!r} is not a distribution of this repository; use one of: {', '.join(sorted(folders))}"
            )
        if name in names_needed:
            continue
        names_needed.append(name)
        project = tomllib.loads((folders[name] / "pyproject.toml").read_text())["project"]
        declared = (re.match(r"[A-Za-z0-9._-]+", line) for line in project.get("dependencies", ()))
        waiting += [match[0] for match in declared if match and match[0] in folders]
    return names_needed


def build(name: str, folder: Path, wheels: Path) -> Path:
    """The wheel of one distribution, built again only when a source file changed."""
    digest = hashlib.sha256()
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for file in sorted(files):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    target = wheels / f"{name}-{digest.hexdigest()[:16]}"
    if not list(target.glob("*.whl")):
        pip("wheel", "--no-deps", "--wheel-dir", str(target), str(folder))
    (wheel,) = target.glob("*.whl")
    return wheel


def shared_torch(constraints: Path, folders: Path) -> Path:
    """The folder of the shared torch and its dependencies; they are installed first if they are new."""
    key = hashlib.sha256(sys.version.encode() + constraints.read_bytes()).hexdigest()[:16]
    folder = folders / f"torch-{key}"
    if not folder.exists():
        unfinished = folder.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        pip("install", "--no-compile", "--constraint", str(constraints), "--target", str(unfinished), "torch")
        unfinished.rename(folder)
    return folder


def pip(*arguments: str) -> None:
    """Run pip of this environment; leave with its exit status when it fails."""
    status = subprocess.run([sys.executable, "-m", "pip", arguments[0], "-q", *arguments[1:]]).returncode
    if status:
        sys.exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("requirements", nargs="+", metavar="NAME[extra]")
    parser.add_argument("--wheels", type=Path, default=ROOT / ".tox" / "wheels")
    arguments = parser.parse_args()
    folders, constraints = distributions(), ROOT / "constraints.txt"
    extras = {
        name: bracket + rest for name, bracket, rest in (r.partition("[") for r in arguments.requirements)
    }
    names = closure(list(extras), folders)
    torch = shared_torch(constraints, ROOT / ".tox")
    Path(sysconfig.get_path("purelib"), "shared_torch.pth").write_text(f"{torch}\n")
    wheels = {name: build(name, folders[name], arguments.wheels) for name in names}
    # The same version number with new content: pip would keep the old one.
    pip("uninstall", "-q", "-y", *names)
    files = [f"{name}{extras.get(name, '')} @ {wheels[name].as_uri()}" for name in names]
    pip("install", "--no-compile", "--constraint", str(constraints), *files)


if __name__ == "__main__":
    main()
