"""Check that a release of all packages can be uploaded: build, inspect, install and run it.

    tox run -e release
    tox run -e release -- --only pages          # the files and what they say, without installing: a minute

Slow (about a quarter of an hour, most of it installing): it runs weekly and on every tag, not in every run of CI. In this order:

1. files: sdists, and wheels from the sdists, of every package; the same wheels come from the tree.
2. pages: license, classifiers, URLs, README as a package index shows it, CHANGELOG; version ranges between the packages;
   imports that are not declared.
3. alone: each package from its wheel in an environment of its own, with the lowest versions of its dependencies.
4. template: examples/plugin-template installs, and passes the conformance suite.
5. together: all packages and extras from wheels, with the lowest allowed versions of everything, of the frameworks of extras,
   then with the highest: `pip check`, `meshwright doctor`, two ranks that plan, train, save and load, the conformance suite over
   our own plugins, and tests of what the dependencies are used for.

Environments share one torch, as those of tox do (tools/install_wheels.py).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from install_wheels import ROOT, closure, distributions, shared_torch
from packaging.requirements import Requirement
from packaging.version import Version
from release.artifacts import Artifacts, ReleaseError, build, check_contents
from release.environments import Environment, allowed_versions, missing_bounds, version_at
from release.metadata import check_fields, check_imports, check_pins, check_readme, extras, project

SMOKE = ROOT / "tools" / "release"
STEPS = ("pages", "alone", "template", "together")
TEMPLATE = ROOT / "examples" / "plugin-template"

TESTS = (
    "packages/dtensor/tests/plugins/test_plugin_host.py",
    "packages/dtensor/tests/plan",
    "packages/planner/tests/placement",
    "packages/planner/tests/reports",
    "packages/checkpoint/tests/storage",
    "packages/meshwright/tests/test_recipes.py",
)
"""What depends on pluggy, pydantic and rich; on scipy; on jinja2; on fsspec; on pydantic and pyyaml."""

SUITE = ("--pyargs", "meshwright_dtensor.testing.conformance", "-k", "not trial")
"""The checks of all plugins that are installed, ours. The planner `trial` starts ranks of its own for each of them: minutes."""

TOOLS = ("pytest", "hypothesis")
FRAMEWORKS = frozenset({"transformers", "accelerate", "peft", "lightning"})


class Release:
    """The packages of a release, and what was remarked on the way."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.folders = {
            name: path for name, path in distributions().items() if path.parent.name == "packages"
        }
        self.artifacts: dict[str, Artifacts] = {}
        self.remarks: list[str] = []
        self.torch = shared_torch(ROOT / "constraints.txt", ROOT / ".tox")

    def build_all(self) -> None:
        """Step 1."""
        for name, folder in self.folders.items():
            self.artifacts[name] = build(name, folder, self.work / "dist" / name)
            check_contents(self.artifacts[name])
            say(f"{name}: sdist and wheel")

    def check_pages(self) -> None:
        """Step 2."""
        check_pins(self.folders)
        for name, folder in self.folders.items():
            check_imports(name, folder)
            self.remarks += check_fields(self.artifacts[name], folder)
            check_readme(self.artifacts[name])
            say(f"{name}: metadata, README, declared imports")

    def check_alone(self) -> None:
        """Step 3."""
        for name in self.folders:
            needed = closure([name], self.folders)
            environment = Environment.fresh(self.work / name, self.torch)
            wheels = [self.artifacts[each].wheel for each in needed]
            environment.install(wheels, self.constraints("lowest", needed, self.work / f"{name}.txt"))
            ours = {each for each in environment.installed() if each in self.folders}
            if ours != set(needed):
                raise ReleaseError(f"{name} alone: {sorted(ours)} are installed, it declares {needed}")
            say(environment.run(SMOKE / "smoke_alone.py", name.replace("-", "_")))

    def check_template(self) -> None:
        """Step 4: nothing of the conformance suite is skipped, since all packages are there."""
        environment = Environment.fresh(self.work / "template", self.torch)
        folder = self.work / "plugin-template"
        shutil.copytree(TEMPLATE, folder, ignore=shutil.ignore_patterns("__pycache__"))
        wheels = [artifacts.wheel for artifacts in self.artifacts.values()]
        environment.install([*wheels, f"acme-meshwright[test] @ {folder.as_uri()}"], ROOT / "constraints.txt")
        pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs")
        say(environment.run(*pytest, folder / "tests").strip().splitlines()[-1])
        text = environment.run(*pytest, *SUITE, "--plugin", "acme-meshwright").strip().splitlines()[-1]
        if "skipped" in text:
            raise ReleaseError(f"template: {text}; all packages are installed, so every check has to run")
        say(text)

    def check_all_together(self) -> None:
        """Step 5."""
        self.check_together("lowest")
        self.check_together("lowest", frameworks=True)
        self.check_together("highest")

    def check_together(self, end: str, frameworks: bool = False) -> None:
        """Step 5, with the "lowest" or the "highest" versions: of everything, or of the frameworks of extras alone.

        Frameworks ask for newer versions of what we declare too, so the lowest of all cannot be installed at once.
        """
        title = f"{end}-frameworks" if frameworks else end
        environment = Environment.fresh(self.work / title, self.torch)
        names, requirements = list(self.folders), []
        for name, folder in self.folders.items():
            chosen = [
                extra
                for extra, lines in extras(project(folder)).items()
                if frameworks or end == "highest" or FRAMEWORKS.isdisjoint(named(lines))
            ]
            bracket = f"[{','.join(chosen)}]" if chosen else ""
            requirements.append(f"{name}{bracket} @ {self.artifacts[name].wheel.as_uri()}")
        limits = self.constraints(
            end, names, self.work / f"{title}.txt", only=FRAMEWORKS if frameworks else None
        )
        environment.install([*requirements, *TOOLS], limits)
        self.check_versions(environment, limits, title)
        environment.run("-m", "meshwright", "doctor")
        say(environment.run(SMOKE / "smoke_alone.py", "meshwright"))
        say(environment.run(SMOKE / "smoke_together.py"))
        pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", ROOT / "pytest.ini")
        say(environment.run(*pytest, *SUITE).strip().splitlines()[-1])
        if not frameworks:
            files = [ROOT / test for test in TESTS]
            say(environment.run(*pytest, "-m", "not slow", *files).strip().splitlines()[-1])

    def check_versions(self, environment: Environment, limits: Path, title: str) -> None:
        """The versions that were asked for are those that are imported."""
        installed = environment.installed()
        pinned = dict(line.split("==") for line in limits.read_text().split())
        wrong = {
            name: installed[name]
            for name, version in pinned.items()
            if name in installed and Version(installed[name]).public != version
        }
        if wrong:
            raise ReleaseError(f"{title}: {wrong} are installed where {limits} asks for others")
        say(f"{title}: " + ", ".join(f"{name} {installed[name]}" for name in pinned if name in installed))

    def constraints(
        self, end: str, names: Sequence[str], file: Path, only: Collection[str] | None = None
    ) -> Path:
        """A file of constraints: the lowest or highest allowed versions of all, or of `only` some, that `names` declare."""
        tables = [project(self.folders[name]) for name in names]
        lines = [line for table in tables for line in table["dependencies"]]
        lines += [line for table in tables for xs in extras(table).values() for line in xs]
        allowed = allowed_versions(lines, self.folders)
        if end == "lowest":
            self.remarks += [remark for remark in missing_bounds(allowed) if remark not in self.remarks]
        chosen = {
            name: version_at(end, name, allowed[name])
            for name in sorted(allowed)
            if only is None or name in only
        }
        file.write_text("".join(f"{name}=={version.public}\n" for name, version in chosen.items()))
        return file


def named(requirements: Iterable[str]) -> set[str]:
    """The distributions that requirements name."""
    return {Requirement(line).name for line in requirements}


def say(text: str) -> None:
    """A line of progress."""
    print(text.strip(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--only", choices=STEPS, action="append", help="this step; the files are always built"
    )
    parser.add_argument(
        "--work", type=Path, default=ROOT / ".tox" / "release-work", help="folder for everything"
    )
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    release = Release(arguments.work)
    jobs = {
        "pages": release.check_pages,
        "alone": release.check_alone,
        "template": release.check_template,
        "together": release.check_all_together,
    }
    try:
        release.build_all()
        for step in arguments.only or STEPS:
            start = time.monotonic()
            say(f"-- {step}")
            jobs[step]()
            say(f"-- {step} took {time.monotonic() - start:.0f} s")
    except ReleaseError as error:
        print(f"release check failed: {error}", file=sys.stderr)
        return 1
    for remark in release.remarks:
        say(f"remark: {remark}")
    say(f"{len(release.artifacts)} packages can be released: {arguments.work / 'dist'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
