"""Plans, plugins and errors need no torch: they are imported and used in a process where importing it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_distributions import install, strategy

import meshwright_dtensor

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Block())
"""


def run(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    source = Path(meshwright_dtensor.__file__).parent.parent
    search = os.pathsep.join(map(str, [source, *paths]))
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCK + code],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    "module",
    [
        "meshwright_dtensor",
        "meshwright_dtensor.errors",
        "meshwright_dtensor.cluster",
        "meshwright_dtensor.plan",
        "meshwright_dtensor.plugins",
        "meshwright_dtensor.plugins.rank_check",
        "meshwright_dtensor.sharding.states",
        "meshwright_dtensor.strategy",
    ],
)
def test_a_module_imports_without_torch(module: str) -> None:
    done = run(f"import {module}; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_torch_import_is_blocked() -> None:
    done = run("import torch")
    assert done.returncode != 0 and "torch is blocked" in done.stderr


def test_plans_and_plugins_are_used_without_torch(tmp_path: Path) -> None:
    install(tmp_path, "acme-ring", {"ring": "acme_ring"}, {"acme_ring": strategy("acme-ring")})
    code = """
import meshwright_dtensor as md
host = md.discover()
assert "acme-ring" in host.strategies(), host.problems
assert host.get(md.plugins.StrategySpec, "acme-ring").load()(4.0) == 2.0
plan = md.ParallelPlan(world_size=2, degrees={"tp": 2}, parameters=[md.ParameterRule(pattern="*", placement={"tp": "S(0)"})])
plan.validate_for(2, ["tp"])
assert md.ParallelPlan.from_json(plan.to_json()) == plan
assert "tp 2" in plan.explain()
assert "torch" not in sys.modules
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_package_lists_what_it_exports_and_refuses_the_rest() -> None:
    assert {"ParallelPlan", "PlanError", "PluginHost"} <= set(meshwright_dtensor.__all__) & set(
        dir(meshwright_dtensor)
    )
    with pytest.raises(AttributeError, match="no_such_name"):
        meshwright_dtensor.no_such_name  # noqa: B018


def test_every_exported_name_is_there() -> None:
    for name in meshwright_dtensor.__all__:
        getattr(meshwright_dtensor, name)
