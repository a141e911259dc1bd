"""Private names of torch are touched in `_torch.py` alone, so that a release of torch is met in one file."""

from __future__ import annotations

import ast
from pathlib import Path

from torch import nn

import meshwright_planner

SOURCES = [p for p in Path(meshwright_planner.__file__).parent.rglob("*.py") if p.name != "_torch.py"]
OF_MODULES = {name for name in (*dir(nn.Module), *vars(nn.Module())) if name[0] == "_" and name[:2] != "__"}


def test_private_names_of_torch_are_in_one_file() -> None:
    files = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            if module.startswith("torch") and "._" in module:
                files.append(f"{path.name}:{node.lineno} {module}")
            if isinstance(node, ast.Attribute) and node.attr in OF_MODULES:
                files.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert len(SOURCES) > 50 and not files
