"""Fixtures for the tests of this package."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright_dtensor.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Real ranks on this machine, started on first use and kept for the session."""
    with RankPool() as pool:
        yield pool
