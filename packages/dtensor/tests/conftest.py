"""Fixtures for the tests of this package."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

from meshwright_dtensor.testing.fixtures import rank_pool

# no test asserts a time: the machine may be busy
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

__all__ = ["rank_pool"]
