"""Options of the conformance suite. pytest imports this in every session (entry point pytest11), so it imports nothing else."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """--plugin and --checkpoint-path, of meshwright_dtensor.testing.conformance."""
    group = parser.getgroup(
        "meshwright", "meshwright: pytest --pyargs meshwright_dtensor.testing.conformance"
    )
    group.addoption(
        "--plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="check the plugins of this distribution, entry point or record name (repeatable); all by default",
    )
    group.addoption(
        "--checkpoint-path",
        default="",
        metavar="PATH",
        help="an empty place that the checked checkpoint backend can write to, such as a URL; a new folder by default",
    )
