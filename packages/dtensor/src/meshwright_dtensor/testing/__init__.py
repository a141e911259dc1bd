"""Real ranks for tests."""
