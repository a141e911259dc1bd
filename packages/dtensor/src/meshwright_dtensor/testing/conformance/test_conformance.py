"""The suite as pytest runs it: one test for each check of each record. See the docstring of the package."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plugins import (
    BackendSpec,
    DeviceSpec,
    OpRuleSpec,
    PlannerSpec,
    Registered,
    ScheduleSpec,
    StrategySpec,
    discover,
)
from meshwright_dtensor.testing.conformance import (
    backends,
    devices,
    distributions,
    op_rules,
    planners,
    schedules,
    strategies,
)
from meshwright_dtensor.testing.conformance.report import Check, Nonconformance, NotChecked, Tools
from meshwright_dtensor.testing.conformance.selection import chosen
from meshwright_dtensor.testing.fixtures import session_pool

CHECKS: dict[type, tuple[Check, ...]] = {
    StrategySpec: strategies.CHECKS,
    ScheduleSpec: schedules.CHECKS,
    PlannerSpec: planners.CHECKS,
    BackendSpec: backends.CHECKS,
    OpRuleSpec: op_rules.CHECKS,
    DeviceSpec: devices.CHECKS,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each distribution, and for each check of each record."""
    try:
        records, problems = chosen(discover(), metafunc.config.getoption("--plugin"))
    except MeshwrightError as error:
        raise pytest.UsageError(str(error)) from error
    if "check" in metafunc.fixturenames:
        pairs = [
            pytest.param(record, check, id=f"{record.record.kind}-{record.name}-{check.__name__[6:]}")
            for each in records.values()
            for record in each
            for check in (check_target, *CHECKS.get(type(record.record), ()))
        ]
        metafunc.parametrize(("plugin", "check"), pairs)
    elif "distribution" in metafunc.fixturenames:
        metafunc.parametrize("distribution", sorted({*records, *problems}))


@pytest.fixture(scope="session")
def tools(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Tools:
    """The installed plugins, real ranks, and a place for checkpoints."""
    path = pytestconfig.getoption("--checkpoint-path") or str(tmp_path_factory.mktemp("checkpoints"))
    return Tools(discover(), lambda: session_pool(pytestconfig), path)


def check_target(plugin: Registered[Any], tools: Tools) -> None:
    """The target of the record is there."""
    plugin.load()


def test_distribution(distribution: str, tools: Tools) -> None:
    """The distribution is announced as the host expects, and its plugin module imports without torch."""
    try:
        distributions.check_problems(distribution, tools.host)
        distributions.check_declaration(distribution)
        command = [sys.executable, "-c", distributions.IMPORT, distribution]
        done = subprocess.run(command, capture_output=True, text=True)
        distributions.check_import(distribution, done.returncode, done.stdout + done.stderr)
    except Nonconformance as error:
        pytest.fail(str(error), pytrace=False)


def test_record(plugin: Registered[Any], check: Check, tools: Tools) -> None:
    """One rule of one kind of plugin."""
    try:
        check(plugin, tools)
    except NotChecked as reason:
        pytest.skip(str(reason))
    except (Nonconformance, MeshwrightError) as error:
        pytest.fail(str(error), pytrace=False)
