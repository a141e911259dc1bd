"""Reshard a run in memory."""
