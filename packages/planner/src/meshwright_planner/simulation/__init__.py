"""Event simulation of a plan on a cluster: schedules, collectives, slow ranks, faulty links."""
