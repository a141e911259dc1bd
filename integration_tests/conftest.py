"""Fixtures for tests of several packages together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from meshwright_dtensor.testing.fixtures import session_pool
from meshwright_dtensor.testing.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> RankPool:
    """Real ranks on this machine, started on first use and kept for the session."""
    return session_pool(pytestconfig, ["meshwright_planner", "transformers.models.llama.modeling_llama"])


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """What a test begins in this process, for a world of one rank, is not there for the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
