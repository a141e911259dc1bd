"""Plans, schedules and tables drawn for the command line."""
