"""Fixtures for tests of several packages together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from meshwright_dtensor.testing import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Real ranks on this machine, started on first use and kept for the session."""
    with RankPool(preload=["meshwright_planner", "transformers.models.llama.modeling_llama"]) as pool:
        yield pool
