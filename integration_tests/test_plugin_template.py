"""examples/plugin-template, copied and renamed as its README says, and broken in one place: the suite names the place.

That the template as it is passes the whole suite in a fresh environment is a part of `tox run -e release`. What needs no other
package than the core is tested in packages/dtensor/tests/testing.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright_dtensor.plugins import BackendSpec, StrategySpec, discover
from meshwright_dtensor.testing.conformance import backends, strategies
from meshwright_dtensor.testing.conformance.report import Check, Nonconformance, Tools
from meshwright_dtensor.testing.rank_pool import RankPool

TEMPLATE = Path(__file__).parent.parent / "examples" / "plugin-template"


@dataclass(frozen=True)
class Copy:
    """A copy of the template on sys.path, under a name of its own: ranks keep the modules that they have imported."""

    name: str
    folder: Path

    def change(self, module: str, old: str, new: str) -> None:
        """Break one thing."""
        file = self.folder / f"{self.name}_meshwright" / f"{module}.py"
        text = file.read_text()
        assert text.count(old) == 1
        file.write_text(text.replace(old, new))


@pytest.fixture
def template(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Copy]:
    """The template, renamed after the test."""
    name = "t" + "".join(c for c in request.node.name if c.isalnum()).lower()
    for file in (TEMPLATE / "src").rglob("*.py"):
        target = tmp_path / str(file.relative_to(TEMPLATE / "src")).replace("acme", name)
        target.parent.mkdir(exist_ok=True)
        target.write_text(file.read_text().replace("acme", name))
    project = tomllib.loads((TEMPLATE / "pyproject.toml").read_text().replace("acme", name))["project"]
    info = tmp_path / f"{name}_meshwright-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    points = "".join(f"{k} = {v}\n" for k, v in project["entry-points"]["meshwright"].items())
    (info / "entry_points.txt").write_text(f"[meshwright]\n{points}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield Copy(name, tmp_path)


def checked(check: Check, kind: Any, name: str, pool: RankPool, tmp_path: Path) -> str:
    """The sentence with which a check fails, "" if it does not."""
    host = discover()
    try:
        check(host.get(kind, name), Tools(host, lambda: pool, str(tmp_path / "checkpoints")))
    except Nonconformance as error:
        return str(error)
    return ""


def test_the_copy_is_whole(template: Copy) -> None:
    records = [r for r in discover().everything() if r.distribution == f"{template.name}-meshwright"]
    assert {r.record.kind for r in records} == {
        "strategy",
        "schedule",
        "planner",
        "checkpoint backend",
        "op rule",
    }
    assert not [p for p in discover().problems if template.name in p.distribution]


@pytest.mark.slow
def test_a_loss_that_an_engine_doubles_is_found_on_ranks(
    template: Copy, rank_pool: RankPool, tmp_path: Path
) -> None:
    attach = (
        "def attach(self, model, mesh, plan):\n"
        "        model.register_forward_hook(lambda module, inputs, output: output + output)\n\n"
        "    def degrees("
    )
    template.change("strategy", "def degrees(", attach)
    text = checked(strategies.check_on_ranks, StrategySpec, f"{template.name}-rows", rank_pool, tmp_path)
    assert text.startswith(f"strategy '{template.name}-rows' of {template.name}-meshwright: "), text
    assert "does not compute what one device does" in text
    assert "look at parameter_state(), input_state() and gradient, and at attach()" in text


BROKEN = [
    (
        "check_interface",
        "def commit(self, manifest: bytes) -> None:",
        "begin = None\n\n    def commit(self, manifest: bytes) -> None:",
        "has no begin; write a function or class that takes a path",
    ),
    (
        "check_bytes",
        "def _note(",
        "def nbytes(self, name: str) -> int:\n        return 0\n\n    def _note(",
        "has nbytes()=0; store the bytes of all write() calls",
    ),
    (
        "check_commit",
        "def _note(",
        "def outcome(self, save_id: str) -> None:\n        return None\n\n    def _note(",
        "outcome() of a save that ended without commit() is None; return False",
    ),
    (
        "check_no_overwrite",
        "return [JournalStorage(child.path) for child in super().children()]",
        "return []",
        "list every committed checkpoint",
    ),
    (
        "check_other_jobs",
        "def _note(",
        "def begin(self, save_id: str) -> None:\n"
        "        self._staging_path(save_id).mkdir(parents=True)\n\n    def _note(",
        "begin() succeeds on one process while another one saves to the same path; lock the path in begin()",
    ),
    (
        "check_save_and_load",
        "super().commit(manifest)",
        "super().commit(b'{}')",
        "let open() read exactly the bytes that writer() was given",
    ),
]


@pytest.mark.parametrize(("check", "old", "new", "told"), BROKEN, ids=[check for check, *_ in BROKEN])
def test_a_broken_backend_fails_with_a_sentence(
    template: Copy, rank_pool: RankPool, tmp_path: Path, check: str, old: str, new: str, told: str
) -> None:
    template.change("backend", old, new)
    text = checked(getattr(backends, check), BackendSpec, f"{template.name}-journal", rank_pool, tmp_path)
    assert text.startswith(f"checkpoint backend '{template.name}-journal' of {template.name}-meshwright: ")
    assert told in text, text
