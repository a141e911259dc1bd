"""The results of a step: returned, or left in attributes."""
