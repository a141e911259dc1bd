"""From what the search found to plans."""
