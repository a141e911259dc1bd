"""Run plans for a few real steps on ranks of this machine, and keep the fastest."""
