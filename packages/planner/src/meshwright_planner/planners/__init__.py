"""Planners beside the default one, on the same search space, costs and reports."""

from __future__ import annotations
