"""Activation checkpointing by the plan."""
