"""Every code block of README.md and docs/ runs, the site builds without a warning, and links between files hold."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import click
import pytest
from commands import run_on
from doc_blocks import LANGUAGES, Step, forget, ranks, run_python, run_script, steps

from meshwright.cli import State
from meshwright.cli import group as group_of_commands
from meshwright_dtensor.testing.rank_pool import RankPool

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("docs/*.md"), ROOT / "README.md"})
PROSE = [*PAGES, ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("packages/*/*.md"))]
ELSEWHERE = {"train.md", "plugins.md"}
"""Pages that a test of their own runs."""


def with_blocks() -> list[Path]:
    return [
        p
        for p in PAGES
        if p.name not in ELSEWHERE and re.search(r"```(python|sh)\n|<!-- (run|error)\n", p.read_text())
    ]


@pytest.mark.slow
@pytest.mark.parametrize("page", with_blocks(), ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, rank_pool: RankPool, tmp_path: Path) -> None:
    size = ranks(page)
    for kind, group in groupby(steps(page, tmp_path), key=lambda step: step.kind):
        if kind == "python":
            rank_pool.run(size, run_python, page.name, str(tmp_path), list(group))
            continue
        for step in group:
            if kind == "long":
                check_options(step.command)
            else:
                run_command(rank_pool, step, tmp_path)


def run_command(pool: RankPool, step: Step, folder: Path) -> None:
    program, *arguments = step.command
    if program == "meshwright":
        # verify starts as many ranks as its degrees say
        degrees = [int(word.partition("=")[2]) for word in arguments if re.fullmatch(r"\w+=\d+", word)]
        size = math.prod(degrees) if arguments[0] == "verify" else 1
        done = run_on(pool, size, arguments, folder, inside=True)
        pool.run(size, forget, str(folder))
        assert done[0].returncode == 0, (step.command, done[0].stderr)
    elif program == "torchrun":
        option, size, *script = arguments
        assert option == "--nproc-per-node" and script, step.command
        pool.run(int(size), run_script, str(folder), script)
    else:
        assert program == "python", f"how is {step.command} run? See doc_blocks.py"
        pool.run(1, run_script, str(folder), arguments)


def check_options(words: tuple[str, ...]) -> None:
    """That a command of `meshwright` exists, and has the options that are given."""
    if words[0] != "meshwright":
        return
    context = click.Context(group_of_commands, obj=State(()))
    command = group_of_commands.get_command(context, words[1])
    assert command is not None, words
    if isinstance(command, click.Group):
        command = command.get_command(context, words[2])
        assert command is not None, words
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words if re.match("--?[a-z]", word)} <= options, words


def test_blocks_have_a_language_that_is_checked() -> None:
    for page in (page for page in PROSE if page.name not in ELSEWHERE):
        fences = re.findall(r"^ *```(\S*)$", page.read_text(), re.MULTILINE)
        unknown = {f for f in fences[::2] if f not in LANGUAGES and not f.startswith("{")}
        assert not unknown, f"{page.name}: {unknown}; see doc_blocks.py"


def test_links_between_files_hold() -> None:
    broken = []
    for page in PROSE:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if re.match(r"\w+:", target) is None:
                file = (page.parent / path) if path else page
                if not file.exists() or (anchor and anchor not in anchors(file)):
                    broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub, and the site, give the titles of a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", source)
    for folder in ("benchmarks", "examples", "integration_tests", "packages"):
        # pages link to them
        (tmp_path / folder).symlink_to(ROOT / folder)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", source, tmp_path / "site"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site/api.html").read_text().count('<dt class="sig') > 30
