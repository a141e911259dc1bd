"""The search over configurations: which ones are tried, and how good the best one is."""
