"""Geometry of shards without torch: placement states, intervals, boxes, reshapes."""
