"""Pipeline schedules: the interface, the installed ones by name, and the check that one can run."""
