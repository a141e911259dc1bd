"""Clusters to plan for: by name, from files, and this machine."""
