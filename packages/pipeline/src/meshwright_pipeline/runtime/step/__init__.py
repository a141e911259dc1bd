"""One step of the schedule: the plan of a call, its execution on a rank, and its end on all ranks."""
