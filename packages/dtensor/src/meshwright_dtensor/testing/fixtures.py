"""Pytest fixtures on real ranks. In a conftest.py: `from meshwright_dtensor.testing.fixtures import rank_pool`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from meshwright_dtensor.testing.device_option import device_kind
from meshwright_dtensor.testing.rank_pool import RankPool

_POOL = pytest.StashKey[RankPool]()


def session_pool(config: pytest.Config, preload: Sequence[str] = ()) -> RankPool:
    """The rank pool of this session, created on first use, which alone takes `preload` (see `RankPool`), closed at the end."""
    if _POOL not in config.stash:
        pool = config.stash[_POOL] = RankPool(preload=preload, device=device_kind(config))
        config.add_cleanup(pool.close)
    return config.stash[_POOL]


@pytest.fixture(scope="session")
def rank_pool(pytestconfig: pytest.Config) -> RankPool:
    """Real ranks on this machine, started on first use and kept for the session."""
    return session_pool(pytestconfig)
