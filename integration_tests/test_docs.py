"""What the documentation says of keywords, options and packages is what there is."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from pathlib import Path

import meshwright as mw

ROOT = Path(__file__).parent.parent


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of the first table under a title."""
    part = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def test_the_table_of_keywords_is_the_signature() -> None:
    table = rows((ROOT / "docs/planner.md").read_text(), "Keywords")
    listed = {cells[0].strip("`"): cells[2].strip("`") for cells in table}
    for function, more in ((mw.plan, set()), (mw.auto_parallelize, {"plugins"})):
        signature = inspect.signature(function).parameters
        keywords = {
            name: parameter
            for name, parameter in signature.items()
            if parameter.kind is parameter.KEYWORD_ONLY
        }
        assert [name for name in keywords if name not in more and name not in listed] == []
        assert [name for name in listed if name not in keywords] == []
        assert {name: str(ast.literal_eval(listed[name])) for name in listed} == {
            n: str(keywords[n].default) for n in listed
        }
    assert all(len(cells) == 4 and cells[1] and cells[3] for cells in table)


def test_installing_from_a_checkout_names_every_package() -> None:
    text = (ROOT / "README.md").read_text()
    packages = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    lines = re.findall(r"^pip (?:install|wheel) .*packages.*$", text, re.MULTILINE)
    assert len(lines) == 2
    for line in lines:
        paths = [word.partition("[")[0] for word in shlex.split(line) if word.startswith("./packages/")]
        assert {Path(path).name for path in paths} == packages and all(
            (ROOT / path).is_dir() for path in paths
        )


def test_every_command_is_in_the_readme() -> None:
    from meshwright_dtensor.plugins import discover

    commands = {
        name for name, entry in discover().commands().items() if entry.distribution.startswith("meshwright")
    }
    text = (ROOT / "README.md").read_text()
    assert {
        name
        for name in commands
        if f"\nmeshwright {name} " not in text and f"\nmeshwright {name}\n" not in text
    } == {"trial"}


def test_the_map_names_files_that_exist() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    paths = re.findall(r"`((?:dtensor|parallel|planner|pipeline|checkpoint)/[\w/.]*)`", text)
    assert len(paths) > 60
    packages = ROOT / "packages"
    places = [packages / p.split("/")[0] / "src" / f"meshwright_{p}" for p in paths]
    assert [str(place.relative_to(packages)) for place in places if not place.exists()] == []
