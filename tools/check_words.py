"""Keep private words out of sources, docs and tests: `python tools/check_words.py [PATH ...]`.

The project writes the field's standard terms in plain English. This check lists each line with a word that once
stood for one of them, and the term to use. It exits 1 when it finds any. Without a path it reads every Python and
Markdown file that git tracks.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

PHRASES = {
    r"lies?|lying": "is placed, has the layout, has the same placements",
    r"in thought": "simulated",
    r"mates": "ranks of the stage",
    r"the post of|letters?|wire": "message, header, p2p",
    r"surprises?|surprised": "ScheduleWarning, or say what is unexpected",
    r"behind": "after, backward",
    r"beside": "next to, together with, in addition to",
    r"ahead(?! of time)": "before, forward",
    r"taken down": "recorded",
    r"hung up|hangs up": "registered",
    r"looked at|looks at|a look at": "inspected, examined, read",
    r"what it": "name the thing",
    r"(?:is|are) made of|makes? of (?:it|them)": "name the thing",
    r"of which there": "name the thing",
    r"rows? (?:that )?(?:meet|meets)|rows are mixed|(?:made )?row by row": "batch-independent, cross-row interaction",
    r"g(?:ive|ives|iven|ave|iving) up": "reshard",
    r"hand(?:s|ed|ing)? over": "pass, in-memory reshard",
    r"portions?|neighbours?|inert": "read plan, node peers, restricted unpickler",
    r"relief|reliev(?:e|es|ed|ing)|eas(?:ed|ing)": "memory to free, recomputation",
    r"foreseen?|foresees|foreseeing": "predicted",
}
"""Phrases of prose, as regular expressions, and what to write in their place."""

IDENTIFIERS = {
    "Mail": "p2p", "Letter": "Message", "Surprise": "ScheduleWarning", "Lookout": "LossChecker",
    "Foreseen": "LossForecast", "Still": "StubMode", "Kept": "WrittenState", "Ran": "TailRun",
    "Rowless": "CannotSplit", "Runs": "IntervalShard", "Space": "MeshContext",
}  # fmt: skip
"""Names of classes, and their standard names."""

VARIABLES = ("found", "one", "every", "own", "known", "asked", "said")
"""Names that say nothing of what a variable, parameter or field holds."""

IDENTIFIER_WORDS = frozenset(
    "lies mates surprise surprises letter letters relief relieving relieved easing eased foreseen foreseeing "
    "behind beside ahead crowded portions neighbours inert meeting".split()
)
"""Words that are no part of a name either: of a function, a class, a variable or a test."""

_PHRASE = re.compile("|".join(rf"\b(?P<p{i}>{p})\b" for i, p in enumerate(PHRASES)), re.IGNORECASE)
_TERMS = tuple(PHRASES.values())


def phrases(text: str) -> Iterator[tuple[int, str]]:
    """Line number and message for each phrase of `text`."""
    for number, line in enumerate(text.splitlines(), 1):
        for match in _PHRASE.finditer(line):
            term = _TERMS[int(str(match.lastgroup)[1:])]
            yield number, f"{match.group()!r}: say {term}"


def _names(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Line, name and whether it is a variable, for each name that the module gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id, True
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg, True
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name, False


def names(text: str) -> Iterator[tuple[int, str]]:
    """Line number and message for each name in the Python source `text`."""
    for number, name, variable in _names(ast.parse(text)):
        if name in IDENTIFIERS:
            yield number, f"class {name}: call it {IDENTIFIERS[name]}"
        elif variable and name in VARIABLES:
            yield number, f"variable {name!r}: name it after what it holds"
        else:
            for word in sorted(IDENTIFIER_WORDS.intersection(name.lower().split("_"))):
                yield number, f"name {name!r}: {word!r} is no standard term"


def tracked(paths: list[str]) -> list[Path]:
    """The Python and Markdown files under `paths` that git tracks, but for this one and recorded results."""
    listed = subprocess.check_output(["git", "ls-files", *paths], cwd=ROOT, text=True).splitlines()
    files = [ROOT / name for name in listed if name.endswith((".py", ".md"))]
    return [f for f in files if f != Path(__file__).resolve() and "results" not in f.parts and f.exists()]


def main(paths: list[str]) -> int:
    count = 0
    for file in tracked(paths):
        text = file.read_text(encoding="utf-8")
        problems = [*phrases(text), *(names(text) if file.suffix == ".py" else ())]
        for number, message in sorted(problems):
            print(f"{file.relative_to(ROOT)}:{number}: {message}")
        count += len(problems)
    if count:
        print(f"{count} words to replace")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
