"""Clusters to plan for: those with names, and those of files."""
