"""What one configuration costs: legal degrees, placements, step time and memory."""
