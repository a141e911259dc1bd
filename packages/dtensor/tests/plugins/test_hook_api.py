"""The version of the hook API that a plugin is written for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from plugin_distributions import install, strategy

from meshwright_dtensor.plugins import HOOK_API, discover
from meshwright_dtensor.plugins.hook_api import refusal

MAJOR, MINOR = HOOK_API


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        (None, None),
        (f"{MAJOR}.{MINOR}", None),
        (f"{MAJOR}.0", None),
        (f"{MAJOR}.{MINOR + 1}", "upgrade meshwright-dtensor"),
        (f"{MAJOR + 1}.0", "upgrade meshwright-dtensor"),
        (f"{MAJOR - 1}.9", "upgrade the plugin, or install an older meshwright-dtensor"),
        (
            1.0,
            'meshwright_hook_api is 1.0; write the version of the hook API as text, meshwright_hook_api = "',
        ),
        ("1", "write the version of the hook API as text"),
    ],
)
def test_versions_that_the_host_can_use(declared: object, reason: str | None) -> None:
    text = refusal(declared)
    assert (text is None) == (reason is None)
    assert reason is None or (text is not None and reason in text)


def test_a_plugin_of_a_later_version_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, line in (("newer", f'meshwright_hook_api = "{MAJOR + 1}.0"\n'), ("older", "")):
        install(tmp_path, name, {name: f"{name}_plugin"}, {f"{name}_plugin": line + strategy(name)})
    host = discover(disabled=())
    for name in ("newer_plugin", "older_plugin"):
        sys.modules.pop(name, None)
    assert "older" in host.strategies() and "newer" not in host.strategies()
    (problem,) = (problem for problem in host.problems if problem.distribution == "newer")
    assert f"it is written for hook API {MAJOR + 1}.0, and meshwright-dtensor has {MAJOR}.{MINOR}" in str(
        problem
    )
