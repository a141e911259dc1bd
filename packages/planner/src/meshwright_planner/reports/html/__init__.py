"""A plan as one HTML page that needs nothing else."""

from __future__ import annotations

from meshwright_planner.reports.html.page import page

__all__ = ["page"]
