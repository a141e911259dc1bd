"""Fixtures for the tests of this package."""

from __future__ import annotations

from meshwright_dtensor.testing.fixtures import rank_pool

__all__ = ["rank_pool"]
