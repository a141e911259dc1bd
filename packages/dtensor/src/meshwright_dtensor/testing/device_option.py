"""`pytest --device TYPE`: the tests of a session make their tensors, models and process groups on a type of device.

For a conftest.py at the root of the tests: `pytest_plugins = ["meshwright_dtensor.testing.device_option"]`. Ranks of
`rank_pool` use the device too, several ranks one device where there are more ranks. Tests that are only about the CPU are marked
`host(reason)` and are skipped. What a device lacks is in a file, `--device-lacks FILE`: the beginning of a test's id, ": " and the
reason on each line. With `--where-available`, tests are skipped where there is no such device, and a line says how many.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ABSENT = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """--device and --device-lacks."""
    group = parser.getgroup("meshwright devices")
    group.addoption(
        "--device",
        metavar="TYPE",
        default=None,
        help="make tensors, models and process groups on this type of device, such as cuda; the CPU by default",
    )
    group.addoption(
        "--device-lacks",
        metavar="FILE",
        default=None,
        help="tests to skip on the device, with reasons: lines of a test's id, or its beginning, a colon, and the reason",
    )
    group.addoption(
        "--where-available",
        action="store_true",
        help="where there is no device of the type, skip what needs one; otherwise that is an error",
    )


def device_kind(config: pytest.Config) -> str:
    """The type of device of this session's tests."""
    return str(config.getoption("--device", None) or "cpu")


def pytest_configure(config: pytest.Config) -> None:
    """Use the device from now on: modules of tests make tensors when they are imported. Raises UsageError: there is none."""
    config.addinivalue_line("markers", "host(reason): is about the CPU alone; skipped with --device")
    if config.getoption("--device", None) is not None:
        from meshwright_dtensor.errors import UsageError
        from meshwright_dtensor.testing.on_device import use

        try:
            use(device_kind(config))
        except UsageError as error:
            if not config.getoption("--where-available"):
                raise pytest.UsageError(f"--device: {error}") from None
            kind = device_kind(config)
            config.stash[_ABSENT] = "GPU" if kind == "cuda" else f"{kind} device"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is about the CPU, and what the device lacks."""
    kind = device_kind(config)
    if kind == "cpu":
        return
    lacks = _lacks(config.getoption("--device-lacks", None))
    absent = config.stash.get(_ABSENT, "")
    for item in items:
        for mark in item.iter_markers("host"):
            item.add_marker(pytest.mark.skip(reason=f"of the CPU alone: {mark.args[0]}"))
        for start, reason in lacks.items():
            if _begins(item.nodeid, start):
                item.add_marker(pytest.mark.skip(reason=f"{kind} lacks: {reason}"))
        if absent and item.get_closest_marker("host") is None:
            item.add_marker(pytest.mark.skip(reason=f"needs a {absent}"))


def _begins(test: str, start: str) -> bool:
    """Whether a line is of a test: its id, or the id of its folder, file, class or function, or ends in the brackets."""
    if not test.startswith(start):
        return False
    rest = test[len(start) :]
    return not rest or rest.startswith(("[", "::", "/")) or "[" in start


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """One line: how many checks wait for the device."""
    if absent := config.stash.get(_ABSENT, ""):
        skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", [])]
        waiting = sum(f"needs a {absent}" in reason for reason in skipped)
        terminalreporter.write_line(f"no {absent} here: {waiting} checks wait for one")


def _lacks(file: str | None) -> dict[str, str]:
    """Beginning of a test's id -> what the device lacks for it. Raises UsageError: a line is not of that form."""
    lacks = {}
    for number, line in enumerate(_lines(file), 1):
        start, colon, reason = line.partition(": ")
        if not colon or not reason.strip():
            raise pytest.UsageError(f"{file}:{number}: {line!r} has no ': ' and reason after the test's id")
        lacks[start] = reason.strip()
    return lacks


def _lines(file: str | None) -> Iterator[str]:
    if file is not None:
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            if line.strip() and not line.startswith("#"):
                yield line
