"""What a step returns, and what it leaves in attributes."""
