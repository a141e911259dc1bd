"""Runs that go on where they ended: `mw.elastic`, the states of a run, guards of losses, and ranks that are slow."""
