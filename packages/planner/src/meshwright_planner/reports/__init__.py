"""What is said of plans: why, why not, what to buy, side by side, and what to do when nothing fits."""
