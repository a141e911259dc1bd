"""The planners. All use the same search space, costs and reports."""
