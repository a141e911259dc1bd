"""`import meshwright`: every public name is there, is the owner's, and costs nothing until it is used."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import meshwright as mw

OWNERS = {
    "GradScaler": "meshwright_parallel",
    "ParallelPlan": "meshwright_dtensor",
    "auto_parallelize": "meshwright_parallel",
    "clip_grad_norm_": "meshwright_parallel",
    "deferred_init": "meshwright_dtensor",
    "distribute": "meshwright_dtensor",
    "export": "meshwright_checkpoint",
    "init": "meshwright_dtensor",
    "latest": "meshwright_checkpoint",
    "load": "meshwright_checkpoint",
    "parallelize": "meshwright_parallel",
    "plan": "meshwright_planner",
    "prepare_save": "meshwright_checkpoint",
    "profile": "meshwright_planner",
    "save": "meshwright_checkpoint",
    "shard_loader": "meshwright_parallel",
    "verify": "meshwright_parallel",
}


@pytest.mark.parametrize("name", OWNERS)
def test_a_name_is_the_owners(name: str) -> None:
    value = getattr(mw, name)
    assert value.__module__.split(".")[0] == OWNERS[name]
    assert value is getattr(mw, name)
    assert name in dir(mw) and name in mw.__all__


def test_modules_are_names_too() -> None:
    assert mw.errors is importlib.import_module("meshwright_dtensor.errors")
    assert callable(mw.debug.communication)


def test_a_typo_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="paralelize"):
        _ = mw.paralelize


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, meshwright, meshwright.cli, meshwright.plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "error", "-c", code]).returncode == 0


def test_every_keyword_is_explicit() -> None:
    with pytest.raises(TypeError, match="tensor_parallel"):
        mw.plan(None, None, tensor_parallel=2)
