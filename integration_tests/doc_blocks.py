"""The code blocks of a page of documentation, and how each is run.

The blocks of a page run in order, on two ranks, in a new folder:

- `python` blocks that follow each other share one namespace. One whose first line is `# name.py` is a file.
- `sh` blocks: each line is a command. `meshwright` and `torchrun FILE` run on the ranks of the pool, `python FILE` on one.
  Lines of pip, tox and git are not run; tests compare those of README.md with what there is.
- `toml`, `yaml` and `json` blocks whose first line is `# name` are files; json must be valid.
- `text` blocks are output, errors and other people's code: they are not run.

Comments that readers do not see:

- `<!-- run` and lines of Python: run like a block. They prepare what a block takes for granted.
- `<!-- error` and lines of Python: they must raise what the next `text` block shows ("Class: message", `...` stands for any text).
- `<!-- ranks N -->`: the number of ranks for the page.
- `<!-- needs NAME -->`: where this package is not installed, all up to the next `python` block is left out.
- `<!-- long -->`: of the commands of the next block only names and options are checked.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LANGUAGES = ("python", "sh", "toml", "yaml", "json", "text", "mermaid")
NOT_RUN = ("pip", "python3", ".venv/bin/tox", ".venv/bin/pytest", "git", "cd")

_BLOCK = re.compile(
    r"^<!-- *(?P<comment>run|error|ranks|needs|long)\b(?P<body>.*?)-->$"
    r"|^ *```(?P<language>[\w-]+)\n(?P<text>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """`kind` is a language, or that of a comment; `line` is where its text begins in the page."""

    kind: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The name of the file that the block is."""
        named = re.match(r"# ([\w./]+\.\w+)\n", self.text)
        return named[1] if named else None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            match["comment"] or match["language"],
            match["body"] if match["comment"] else match["text"],
            text.count("\n", 0, match.start("body" if match["comment"] else "text")) + 1,
        )
        for match in _BLOCK.finditer(text)
    ]


@dataclass(frozen=True)
class Step:
    """What is run at once: `python` (sources with their lines, and the message that the last one must raise), `sh`, or `long`."""

    kind: str
    sources: tuple[tuple[str, int], ...] = ()
    message: str | None = None
    command: tuple[str, ...] = ()


def steps(page: Path, folder: Path) -> Iterator[Step]:
    """The steps of a page; its files are written to `folder` where they come."""
    sources: list[tuple[str, int]] = []
    listed = blocks(page)
    absent = False
    for index, block in enumerate(listed):
        if block.kind == "needs":
            absent = importlib.util.find_spec(block.text.strip()) is None
        elif absent:
            absent = block.kind != "python"
        elif block.file and block.kind in ("python", "toml", "yaml", "json"):
            (folder / block.file).write_text(block.text)
        elif block.kind == "json":
            json.loads(block.text)
        elif block.kind in ("python", "run"):
            sources.append((block.text, block.line))
        elif block.kind == "error":
            shows = listed[index + 1]
            assert shows.kind == "text", f"{page.name}:{block.line}: no text block follows"
            yield Step("python", (*sources, (block.text, block.line)), shows.text.strip())
            sources = []
        elif block.kind == "sh":
            if sources:
                yield Step("python", tuple(sources))
            sources = []
            for line in block.text.splitlines():
                words = shlex.split(line, comments=True)
                if words and words[0] not in NOT_RUN:
                    yield Step("long" if listed[index - 1].kind == "long" else "sh", command=tuple(words))
    if sources:
        yield Step("python", tuple(sources))


def ranks(page: Path) -> int:
    return next((int(block.text) for block in blocks(page) if block.kind == "ranks"), 2)


@contextlib.contextmanager
def inside(folder: str) -> Iterator[io.StringIO]:
    """Work in a folder whose modules can be imported, and are forgotten afterwards; gives what is printed."""
    here, path = os.getcwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            yield out
    finally:
        os.chdir(here)
        sys.path[:] = path
        forget(0, 1, folder)


def forget(rank: int, size: int, folder: str) -> None:
    """Forget the modules of a folder: another page has others of the same names."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(folder):
            del sys.modules[name]


def run_python(rank: int, size: int, page: str, folder: str, job: list[Step]) -> str:
    """Run steps of Python on a rank, in one namespace; returns what was printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(0)
    with inside(folder) as out:
        try:
            for step in job:
                _run_step(step, page, namespace)
        finally:
            # the models of a page must not be alive on the next one
            namespace.clear()
            gc.collect()
    return out.getvalue()


def _run_step(step: Step, page: str, namespace: dict[str, Any]) -> None:
    *before, (last, line) = step.sources
    for text, start in before:
        exec(compile("\n" * (start - 1) + text, page, "exec"), namespace)
    code = compile("\n" * (line - 1) + last, page, "exec")
    if step.message is None:
        exec(code, namespace)
        return
    try:
        exec(code, namespace)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        if not matches(step.message, message):
            raise AssertionError(
                f"{page}:{line}: the page shows\n{step.message}\nraised is\n{message}"
            ) from error
    else:
        raise AssertionError(f"{page}:{line}: nothing was raised; the page shows {step.message}")


def matches(shown: str, message: str) -> bool:
    """Whether a message is the one shown, where `...` stands for any text, and spaces for any spaces."""
    parts = (re.escape(" ".join(part.split())).replace(r"\ ", r"\s+") for part in shown.split("..."))
    return re.fullmatch(r"\s*.*?\s*".join(parts), message.strip(), re.DOTALL) is not None


def run_script(rank: int, size: int, folder: str, words: list[str]) -> str:
    """Run a script on a rank, as torchrun does, in the world of the pool; returns its output."""
    arguments, sys.argv = sys.argv, list(words)
    os.environ["LOCAL_RANK"] = str(rank)
    namespace: dict[str, Any] = {"__name__": "__main__", "__file__": words[0]}
    destroy = dist.destroy_process_group
    # the pool's next step needs the world that a script ends
    dist.destroy_process_group = lambda *a: None
    try:
        with inside(folder) as out:
            exec(compile(Path(words[0]).read_text(), words[0], "exec"), namespace)
    finally:
        namespace.clear()
        dist.destroy_process_group = destroy
        sys.argv = arguments
        # the models of a script must not be alive in the next one
        gc.collect()
    return out.getvalue()
